"""Checks which package may import which."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.run_folders import NOW, RunFolder

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    *("errors", "choice", "text", "terminal", "files", "foreign", "masking", "tables", "hardware", "split", "scoring"),
    *("config", "environment", "measure"),
    *("cluster", "runs", "data", "report", "train", "jobs", "plan", "node", "launch", "tools", "cli", "api"),
)
"""Each imports only itself and packages to its left."""

LOADED_LATE = ("torch", "torchvision", "h5py", "nvidia", "crc32c")
LIGHT = ("cluster", "runs", "report")
"""Packages that load none of these, because they must respond quickly on login nodes."""


def find_layer(module: str) -> str | None:
    """Return a module's layer: 'trainyard.data.order' -> 'data', 'jobs.pricing.module' -> 'jobs', 'numpy' -> None."""
    parts = module.split(".")
    if parts[0] == "jobs":
        return "jobs"
    return parts[1] if parts[0] == "trainyard" and len(parts) > 1 and parts[1] in ORDER else None


def list_imports(path: Path, module: str) -> list[str]:
    """List the absolute names of all imports in a file, at any level."""
    return _list_imports_of(path.read_text(), module)


@cache  # the planted violations change one file each
def _list_imports_of(code: str, module: str) -> list[str]:
    names = []
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names += [".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names]
    return names


def list_modules(root: Path) -> dict[Path, str]:
    """List the files of the source and of the families, without tests, and the names of their modules."""
    names = {path: path.relative_to(root / "src") for path in (root / "src" / "trainyard").rglob("*.py")}
    names |= {
        path: path.relative_to(root) for path in (root / "jobs").rglob("*.py") if not path.name.startswith("test_")
    }
    assert len(names) > 30, f"only {len(names)} files found: has the source moved?"
    return {path: ".".join(short.with_suffix("").parts) for path, short in names.items()}


OWN_SWITCHES = r"torch\.(backends|_dynamo\.config|utils\.deterministic)\.|sys\.(argv|path)$|threading\.excepthook$"
"""Settings that torch and Python document for others to change."""


def list_patches(path: Path) -> list[str]:
    """List what a file sets in modules that it imports, and what it hangs into Python's import machinery."""
    return _list_patches_of(path.read_text())


@cache
def _list_patches_of(code: str) -> list[str]:
    tree, found = ast.parse(code), []
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:  # `import a.b` makes the name a, `import a.b as c` the name c
                whole = alias.name if alias.asname or base else alias.name.partition(".")[0]
                imported[alias.asname or whole] = base + whole

    def name(node: ast.expr) -> str:
        """Return the dotted name of an attribute of an imported module; "" for any other expression."""
        if isinstance(node, ast.Attribute):
            return f"{owner}.{node.attr}" if (owner := name(node.value)) else ""
        return imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        found += [name(target) for target in targets if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            found.append(name(node.args[0]))
        if isinstance(node, ast.Attribute) and node.attr in ("meta_path", "path_hooks"):
            found.append(name(node))
    return [module for module in found if module and not re.match(OWN_SWITCHES, module)]


def find_circle(root: Path) -> list[str]:
    """Return modules each of which imports the next, the first of which is the last; none if there is no circle.

    An import in a function counts, and one for the type checker.
    """
    files = list_modules(root)
    modules = {module.removesuffix(".__init__") for module in files.values()}
    imported = {}
    for path, module in files.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in list_imports(path, module)}
        here = module.removesuffix(".__init__")
        imported[here] = names & modules - {here}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # it lists each after what it imports
    return []


def find_violations(root: Path) -> list[str]:
    """Describe every import to the right, of another job, of a private name, or of DALI outside its one file.

    And whatever sets an attribute of a module that it imports: other people's modules are not patched.
    """
    wrong = []
    for path, module in list_modules(root).items():
        short = path.relative_to(root / "src" if path.is_relative_to(root / "src") else root)
        here = find_layer(module)
        wrong += [f"{short} patches {name}, which is not its own" for name in list_patches(path)]
        for name in list_imports(path, module):
            there = find_layer(name)
            if here and there and ORDER.index(there) > ORDER.index(here):
                wrong.append(f"{short} ({here}) imports {name} ({there})")
            if here == there == "jobs" and name.split(".")[1] != module.split(".")[1]:
                wrong.append(f"{short} imports another job: {name}")
            if name.startswith("nvidia.dali") and short.name != "decode_dali.py":
                wrong.append(f"{short} imports {name}; only decode_dali.py may")
            if name == "argparse" and here not in ("jobs", "tools", "cli") and short.name != "weights_file.py":
                wrong.append(f"{short} imports argparse: cli turns what was typed into a RunRequest, or into values")
            if name.partition(".")[0] in ("trainyard", "jobs") and re.match(r"_[^_]", name.rpartition(".")[2]):
                wrong.append(f"{short} imports {name}: a leading underscore makes it private")
    return wrong


def copy_code(into: Path) -> None:
    for folder in ("src", "jobs"):
        for path in (ROOT / folder).rglob("*.py"):
            copy = into / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def test_imports_point_to_the_left():
    assert find_violations(ROOT) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        (
            "src/trainyard/data/order.py",
            "from trainyard.train import trainer",
            "data) imports trainyard.train.trainer (train)",
        ),
        (
            "src/trainyard/train/step.py",
            "import jobs.fingerprint.module",
            "(train) imports jobs.fingerprint.module (jobs)",
        ),
        ("jobs/fingerprint/pack.py", "from jobs.other import pack", "imports another job: jobs.other.pack"),
        ("src/trainyard/data/loader.py", "import nvidia.dali", "only decode_dali.py may"),
        (
            "src/trainyard/runs/status.py",
            "from trainyard.data.prepare import prepare_data",
            "(runs) imports trainyard.data.prepare.prepare_data (data)",
        ),
        (
            "src/trainyard/cluster/check.py",
            "from trainyard.launch import submit",
            "(cluster) imports trainyard.launch.submit (launch)",
        ),
        ("src/trainyard/launch/submit.py", "import argparse", "imports argparse: cli turns"),
        ("src/trainyard/cli/sweep.py", "from trainyard.runs.status import _build_row", "makes it private"),
        (
            "src/trainyard/train/step.py",
            "import torch._dynamo as d; d.disable = lambda f: f",
            "step.py patches torch._dynamo.disable",
        ),
        (
            "src/trainyard/train/step.py",
            "from scipy import optimize; setattr(optimize, 'minimize', None)",
            "patches scipy.optimize",
        ),
        ("src/trainyard/cli/verb.py", "import sys; sys.meta_path.insert(0, None)", "patches sys.meta_path"),
    ],
)
def test_a_planted_violation_is_found(file, line, said, tmp_path):
    copy_code(tmp_path)
    with (tmp_path / file).open("a") as target:
        target.write(f"\n\ndef planted():\n    {line}\n")
    assert any(said in wrong for wrong in find_violations(tmp_path))


def test_no_import_circle():
    assert find_circle(ROOT) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "circle"),
    [
        (
            "src/trainyard/data/store.py",
            "def planted():\n    from trainyard.data.loader import Loader",
            {"trainyard.data.store", "trainyard.data.loader"},
        ),
        (
            "src/trainyard/launch/batch_script.py",
            "if TYPE_CHECKING:\n    from trainyard.launch import submit",
            {"trainyard.launch.batch_script", "trainyard.launch.submit"},
        ),
        (
            "jobs/fingerprint/class_sampling.py",
            "from .module import build",
            {"jobs.fingerprint.class_sampling", "jobs.fingerprint.module"},
        ),
    ],
)
def test_a_planted_circle_is_found(file, line, circle, tmp_path):
    copy_code(tmp_path)
    with (tmp_path / file).open("a") as target:
        target.write(f"\n\n{line}\n")
    found = find_circle(tmp_path)
    assert set(found) == circle and found[0] == found[-1]


def test_source_names_no_job():
    families = [path.parent.name for path in (ROOT / "jobs").glob("*/pack.py")]
    assert families
    named = [
        f"{path.name}: {family}"
        for path in (ROOT / "src" / "trainyard").rglob("*.py")
        for family in families
        if f"jobs.{family}" in path.read_text()
    ]
    assert named == []


LISTING_NEEDS_NO = (*LOADED_LATE, "numpy", "hydra", "submitit", "tqdm", "matplotlib")
ASKING_NEEDS_NO = (
    *LISTING_NEEDS_NO,
    "omegaconf",
    "trainyard.config.compose",
    "trainyard.launch.submit",
    "trainyard.environment",
)


def list_loaded(names: Sequence[str], *commands: Sequence[object]) -> list[str]:
    """Return which of these modules are loaded by commands in one process, whether or not they succeed."""
    code = f"""
import sys
from trainyard.cli import main
for words in {[list(map(str, words)) for words in commands]!r}:
    try:
        main(words)
    except SystemExit:
        pass
print()
print(*[name for name in {tuple(names)!r} if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_listing_the_commands_loads_only_what_parses_them():
    assert list_loaded(LISTING_NEEDS_NO, ["--help"], ["submit", "--help"], ["stat"]) == []


def test_asking_about_runs_loads_nothing_that_starts_one(tmp_path):
    """It answers in a fraction of a second on a login node, also about a damaged run."""
    folder = RunFolder(tmp_path)
    folder.begin(NOW - 900)
    (folder.run / "config.yaml").write_text("optimizer: [")
    root = ["--runs", tmp_path / "runs"]
    quick = [["status", *root], ["cancel", folder.run, *root], ["logs", folder.run, *root]]
    assert list_loaded([*ASKING_NEEDS_NO, "yaml"], *quick) == []
    assert list_loaded(ASKING_NEEDS_NO, ["why", folder.run, *root]) == []


def test_submitting_a_job_loads_no_numpy():
    job = ["submit", "fingerprint_1m", "--synthetic", "--gpus", 8, "--cluster", ROOT / "slurm" / "lab.yaml", "--dry"]
    assert list_loaded([*LOADED_LATE, "numpy"], job) == []


def test_submitting_loads_no_torch():
    """Covers everything from typing a job's name to passing a task to a scheduler."""
    code = f"""
import sys
from pathlib import Path
import trainyard.cli.submission, trainyard.environment, trainyard.node.rank_task, trainyard.runs.folder
from trainyard.config import compose as config
composed = config.compose("fingerprint_1m", ["optimizer.lr=1e-3"], Path({str(ROOT / "jobs")!r}))
config.list_options(composed)
trainyard.environment.collect_environment({{}})
print([name for name in {LOADED_LATE!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_what_runs_on_a_login_node_loads_neither_torch_nor_dali_nor_h5py():
    source = ROOT / "src"
    files = [path for package in LIGHT for path in sorted((source / "trainyard" / package).glob("*.py"))]
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path in files if path.stem != "__init__"]
    assert len(modules) > 10, f"only {modules} found: has the source moved?"
    late = (*LOADED_LATE, "hydra")
    names = ", ".join(["trainyard.cli.sweep", *modules])
    code = f"import sys, {names}; print([name for name in {late!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
