"""The language of the code: words that were replaced stay away, and functions are verbs. See CONTRIBUTING.md, Words."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.checkout import PLACES, ROOT, list_files

READ = (*PLACES, "Makefile")
UNREAD = re.compile(
    r"\.lock$|\.jsonl$|\.json$|\.h5$|\.ckpt$|\.gz$|tests/test_words\.py$|\.png$|\.safetensors$|numbers\.toml$"
)

REPLACED = {
    r"\banew\b": "again, from scratch",
    r"\bh[eo]ld\w* (\w+ ){0,4}against\b": "compare with, check against",
    r"\b(go|goes|going|gone|went) on with\b": "resume, continue",
    r"\bhow-manieth\b": "index",
    r"\bhand(ed|s)? in\b": "submit",
    r"\bstands? (in|beside|on|above|below|there)\b": "is in, is next to",
    r"\bbeside\b": "next to, alongside, compared with",
    r"\bdecode_sound|SoundSettings\b": "decode_audio, AudioSettings",
    r"\w*[Pp]icture\w*": "image",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bwish(es|ed)?\b": "resource request, requirement",
}
"""What is refused, and what to write instead."""

STORED = re.compile(r"[\"']beside[\"']")
"""A name in the kept files of results: it stays."""

CONTRACT = {"unlabelled"}
"""Names that families of other people define."""

VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "shred", "speed"}
PARTICIPLES = {"built", "chosen", "drawn", "found", "grown", "heard", "held", "kept", "left", "made", "said"}
PARTICIPLES |= {"seen", "shown", "taken", "told", "written"}


def find_words(root: Path, files: list[Path]) -> list[str]:
    """Return each replaced word with its place and what to write instead."""
    wrong = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            plain = STORED.sub("", line)
            wrong += [
                f"{path.relative_to(root)}:{number}: '{found[0]}': write {instead}"
                for pattern, instead in REPLACED.items()
                if (found := re.search(pattern, plain))
            ]
    return wrong


def find_participles(root: Path, files: list[Path]) -> list[str]:
    """Return functions that are not named by a verb; properties, fixtures and tests may be nouns."""
    wrong = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(re.search("property|fixture", ast.unparse(one)) for one in node.decorator_list):
                continue
            name = node.name.strip("_")
            if name in CONTRACT or name.endswith("one_of"):
                continue
            if name.endswith("_of") or name in PARTICIPLES or (re.fullmatch("[a-z]+ed", name) and name not in VERBS):
                wrong.append(f"{path.relative_to(root)}:{node.lineno}: {node.name}: a function is a verb")
    return wrong


@pytest.mark.slow
def test_replaced_words_stay_away():
    files = [path for path in list_files(*READ) if not UNREAD.search(str(path.relative_to(ROOT)))]
    assert len(files) > 400, f"only {len(files)} files found: has the source moved?"
    assert find_words(ROOT, files) == []


def test_functions_are_verbs():
    code = list_files("src", "jobs", "containers", "benchmarks", ending=".py")
    code = [path for path in code if not path.name.startswith("test_")]
    assert len(code) > 200, f"only {len(code)} files found: has the source moved?"
    assert find_participles(ROOT, code) == []


@pytest.mark.parametrize(
    "line",
    [
        "# The weights are read anew.",
        "# Each shard is held against its hash.",
        "# Go on with that run.",
        "# A picture of a finger.",
        "raw_pictures = 3",
        "# The index stands beside it.",
    ],
)
def test_a_planted_word_is_found(line, tmp_path):
    (tmp_path / "planted.py").write_text(f"{line.replace('Go on', 'They go on')}\n")
    assert find_words(tmp_path, [tmp_path / "planted.py"])


@pytest.mark.parametrize("name", ["losses_of", "_drawn", "decoded", "kept"])
def test_a_planted_participle_is_found(name, tmp_path):
    (tmp_path / "planted.py").write_text(f"def {name}(x):\n    return x\n")
    assert find_participles(tmp_path, [tmp_path / "planted.py"])


def test_stored_names_and_verbs_are_left_alone(tmp_path):
    (tmp_path / "fine.py").write_text('KIND = "beside"\n\n\ndef embed(x):\n    return x\n')
    assert find_words(tmp_path, [tmp_path / "fine.py"]) == find_participles(tmp_path, [tmp_path / "fine.py"]) == []


DETOURS = r"\bsays so\b|, too\b|\b(for ever|by turns|of its own|lies? in)\b|\b[Ww]hat (is|was|were|the)\b|^(What|Who) "
"""Where a sentence has to be read twice: write verb and object."""


def find_detours(path: Path) -> list[str]:
    """Return the lines with a detour: of a page without blocks of code, or of a module's docstrings and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        text = "\n".join(inspect.cleandoc(node.value) for node in nodes if isinstance(node.value, str))
    else:
        text = re.sub(r"^```.*?^```|^    [^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if re.search(DETOURS, line.strip())]


@pytest.mark.parametrize(
    ("places", "ending", "least"),
    [(("README.md", "CONTRIBUTING.md", "docs"), ".md", 10), (("src", "jobs"), ".md", 8), (("src", "jobs"), ".py", 200)],
)
def test_pages_docstrings_and_messages_are_written_with_verb_and_object(places, ending, least):
    files = {str(path.relative_to(ROOT)): path for path in list_files(*places, ending=ending)}
    files = {
        name: path for name, path in files.items() if path.name != "commands.md" and not path.name.startswith("test_")
    }
    assert len(files) > least, f"only {len(files)} files found: has the source moved?"
    assert {name: lines for name, path in files.items() if (lines := find_detours(path))} == {}


@pytest.mark.parametrize("line", ["The run says so and ends.", "What is stored:", "It lists what the run took, too."])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.md", "# A page\n\n{}\n\n    # what is code\n"),
        ("module.py", 'def check(x):\n    """Check.\n\n    {}\n    """  # what is a comment\n'),
        ("message.py", 'raise ValueError(f"{{x}} is not so. " f"{}\\n{{x}}")\n'),
    ],
)
def test_a_planted_detour_is_found(line, name, content, tmp_path):
    (tmp_path / name).write_text(content.format(line))
    assert find_detours(tmp_path / name)[-1].endswith(line)
