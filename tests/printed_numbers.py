"""Finds the numbers of speed, size and accuracy that our pages print, and computes each from its source.

docs/numbers.toml has a table for each page. A key is a piece of the page's text, on one line. If it ends with "...", it
goes on to the end of its paragraph or row, and if it begins the head of a table, to the end of the table. Its value is
a list with the source of each number in that piece, in their order, or one source for all of them:

    FILE > LINE > FIELD    benchmarks/FILE.jsonl: a field of the lines of this name, or "key=value, key=value", or "all"
    PATH > TEXT            the first number of a text that occurs in this file of the repository
    commit HASH > TEXT     of a text that occurs in the message of this commit
    why: REASON            no measurement of ours: a setting, a definition, a prediction, what others published
    unfiled: COMMAND       measured here with this command, before results were kept in files; never a new one

The first three and plain numbers can be terms: A + B - C * D / E, from left to right, and then "| NAME" of FUNCTIONS.
"""

import json
import operator
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from statistics import mean, median, pstdev, stdev
from typing import Any

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
FUNCTIONS: dict[str, Any] = {"median": median, "mean": mean, "pstdev": pstdev, "stdev": stdev, "min": min, "max": max}

NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_END = r"(?=x\b|[mk]?s\b|[kMGT]i?B\b|[^\w^-]|$)(?![.,/:]\d| x \d)"
_NUMBER = re.compile(rf"(?<![\w.,/^:-]){NUMBER}{_END}|(?<=\+-){NUMBER}\b|(?<=\+){NUMBER}(?= \.\.)")
_WORDS = "times|bytes|img/core-s|images/s|thousand(?:/s)?|a second|a core|per core|hours?|minutes|min|seconds?|dB"
_UNIT = rf"(?:%|(?:{_WORDS}|[kMGT]i?B|[mk]?s)\b|x(?![\w-])(?! *[\d`]))"
_AFTER = re.compile(rf"(?:(?:,|;| and| or| to| ->| \.\.)? ?\+?{NUMBER})*(?:,? ?\??) ?{_UNIT}|, {NUMBER}\]| \+- | \.\. ")
_METRIC = r"\b(?:EERs?|AUC|AP\d*|SMAPE|DCF|FNMR|PSNR|[Rr]atio)(?: of| is| are|:)?(?: the)? "
_BEFORE = re.compile(rf"{_METRIC}$|\+- $|\.\. \+?$|\[{NUMBER}, $")
_CELL = re.compile(rf"[*?,;() ]*{NUMBER}(?:{NUMBER}|[*?,;() ]|->|\.\.|\+-)*")
Spans = list[tuple[int, int]]


def check_page(text: str, sources: dict[str, str | list[str]], root: Path) -> list[str]:
    """Return what is wrong: a number without a source, one that its source does not give, a key that is not there."""
    blocks, wrong = read_blocks(text), []
    left = [find_numbers(block) for block in blocks]
    for key, given in sources.items():
        numbers = take_numbers(key, blocks, left)
        listed = [given] * len(numbers) if isinstance(given, str) else given
        if not numbers or len(listed) != len(numbers):
            wrong.append(f"{key!r}: {len(listed)} sources, but {len(numbers)} numbers in one place: {numbers}")
            continue
        for number, source in zip(numbers, listed, strict=True):
            try:
                value = None if source.startswith(("why: ", "unfiled: ")) else compute(source, root)
            except (ValueError, KeyError, IndexError, OSError) as error:
                wrong.append(f"{key!r}: {number}: {source}: {type(error).__name__}: {error}")
                continue
            if value is not None and not is_printed(number, value):
                wrong.append(f"{key!r}: {number}, but {source} is {value:.6g}")
    rest = [(block, *span) for block, spans in zip(blocks, left, strict=True) for span in spans]
    return wrong + [
        f"no source: {block[max(0, a - 60) : a]}[[{block[a:b]}]]{block[b : b + 30]}" for block, a, b in rest
    ]


def read_blocks(text: str) -> list[str]:
    """Return paragraphs, list items and table rows as one line each, "" between them, without code blocks."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [""]
    for line in text.splitlines():
        plain = line.strip()
        if (line.startswith("    ") and not blocks[-1]) or re.fullmatch(r"\|[ :|-]+\|", plain):
            continue  # a block of code, or the line below a table's head
        if not plain or re.match(r"[|#]|- |\d+\. ", plain):
            blocks.append(plain)
        else:
            blocks[-1] = f"{blocks[-1]} {plain}".strip()
    return blocks


def find_numbers(block: str) -> Spans:
    """Return where a block prints numbers of speed, size or accuracy, outside of code and links: begin and end of each.

    These have a unit, or a metric in front of them, or are in an interval, or have a decimal point; near a rate, also
    large numbers; and in a row of a table with such a number, cells of numbers alone.
    """
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda found: "`" * len(found[0]), block)
    text = re.sub(rf"(?<![\w.,-])({NUMBER})-(?={NUMBER} ?{_UNIT})", r"\1;", text)  # 2-3 x
    numbers = [found.span() for found in _NUMBER.finditer(text)]
    is_row, rate, spans = text.startswith("|"), re.search(r"/s\b|core-s|per core|a second\b(?! one)", text), set()
    for begin, end in numbers:
        number = text[begin:end]
        is_large = (rate and len(number) >= 3) or (is_row and "," in number and "|" in text[1:begin])
        if "." in number or is_large or _AFTER.match(text[end:]) or _BEFORE.search(text[:begin]):
            spans.add((begin, end))
    for cell in re.finditer(r"(?<=\|)[^|]*(?=\|)", text) if is_row and spans else ():
        if _CELL.fullmatch(cell[0]):
            spans |= {span for span in numbers if cell.start() <= span[0] < cell.end()}
    return sorted(spans)


def take_numbers(key: str, blocks: list[str], left: list[Spans]) -> list[str]:
    """Return the numbers in a piece of a page, and take them from `left`; none if it does not occur once."""
    piece = key.removesuffix("...")
    places = [(i, found.start()) for i, block in enumerate(blocks) for found in re.finditer(re.escape(piece), block)]
    if len(places) != 1:
        return []
    first, begin = places[0]
    last, end = first, begin + len(piece) if piece == key else len(blocks[first])
    if piece != key and begin == 0 and piece.startswith("|") and not blocks[first - 1].startswith("|"):
        while last + 1 < len(blocks) and blocks[last + 1].startswith("|"):
            last += 1
        end = len(blocks[last])
    spans = [(i, *span) for i in range(first, last + 1) for span in left[i]]
    inside = [(i, a, b) for i, a, b in spans if (i, a) >= (first, begin) and (i, b) <= (last, end)]
    for i, a, b in inside:
        left[i].remove((a, b))
    return [blocks[i][a:b] for i, a, b in inside]


def is_printed(number: str, value: float) -> bool:
    """Whether a value is printed so: rounded to the decimals shown, or to thousands where these end with ",000"."""
    unit = 1000.0 if number.endswith(",000") else 10.0 ** -len(number.partition(".")[2])
    return abs(value - float(number.replace(",", ""))) <= unit / 2 * (1 + 1e-9)


def compute(source: str, root: Path) -> float | None:
    """Compute a number from its source; None if that is a commit and the history is not here."""
    terms, _, function = source.partition(" | ")
    first, *rest = re.split(r" ([-+*/]) ", terms)
    if (values := read_term(first, root)) is None:
        return None
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        other = read_term(term, root) or []
        pairs = zip(values, other if len(other) != 1 else other * len(values), strict=True)
        values = [OPERATORS[sign](a, b) for a, b in pairs]
    if not function and len(values) != 1:
        raise ValueError(f"{len(values)} values: end with | and one of {', '.join(FUNCTIONS)}")
    return float(FUNCTIONS[function or "mean"](values))


def read_term(term: str, root: Path) -> list[float] | None:
    """Return the values of one term of a source."""
    name, *places = term.split(" > ")
    if not places:
        return [float(term)]
    if (len(places) == 1 and "." in name) or name.startswith("commit "):
        text = read_message(name[7:], root) if name.startswith("commit ") else (root / name).read_text(encoding="utf-8")
        if text and not re.search(rf"(?<![\w.,]){re.escape(places[0])}(?!\w|[.,]\d)", " ".join(text.split())):
            raise ValueError("the text does not occur there")
        return [float(re.findall(NUMBER, places[0])[0].replace(",", ""))] if text else None
    found: list[Any] = [line for line in read_lines(root / "benchmarks" / f"{name}.jsonl") if is_line(line, places[0])]
    for step in [*places[1:], "summary"][0].split("."):
        found = [one[int(step)] if step.isdecimal() else one[step] for one in found]
        found = [one for many in found for one in (many if isinstance(many, list) else [many])]
    for step in ("summary", "median"):
        found = [one[step] if isinstance(one, dict) and step in one else one for one in found]
    return [float(value) for value in found]


@cache
def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a result file that are results."""
    return [line for text in path.read_text().splitlines() if (line := json.loads(text)).get("kind") != "header"]


def is_line(line: dict[str, Any], wanted: str) -> bool:
    """Whether a result has this name, or these values."""
    pairs = [pair.split("=") for pair in wanted.split(", ")] if "=" in wanted else [["name", wanted]]
    return wanted == "all" or all(str(line.get(key)) in (value, f"{value}.0") for key, value in pairs)


@cache
def read_message(commit: str, root: Path) -> str | None:
    """Return a commit's message; None where there is no git, or not all of the history."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "log", "-1", "--format=%B", commit], cwd=root, capture_output=True, text=True)
    if done.returncode and commit != "HEAD" and read_message("HEAD", root) and not (root / ".git/shallow").exists():
        raise ValueError(f"no commit {commit}")
    return None if done.returncode else done.stdout
