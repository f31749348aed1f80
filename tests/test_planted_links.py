"""Links that others plant in folders that they may write to: nothing that Trainyard writes follows one."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import FAMILIES, new_run
from trainyard.errors import UserError
from trainyard.files import AppendedFile, create_file, write_atomically
from trainyard.node.rank_task import execute
from trainyard.report.board import update_board
from trainyard.report.run_page import write_report

ROOT = Path(__file__).resolve().parents[1]
PRECIOUS = "PRECIOUS\n"


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has not started, whose trackers and figures write as much as any."""
    words = ("max_duration=1ep", "eval_every=1ep", "checkpoint.every=2st", "trackers=[tensorboard]")
    return new_run(tmp_path_factory.mktemp("planted"), *words)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    (folder / "empty").mkdir(parents=True)
    (folder / "file").write_text(PRECIOUS)
    return folder


def do_all(run: Path) -> None:
    """Train, and write the pages, in a process that Slurm started."""
    environ = {"TRAINYARD_ATTEMPT": "7-0"}
    (run / "slurm").mkdir(exist_ok=True)
    assert execute(run, FAMILIES, environ=environ, started=0.0) == 0
    write_report(run)
    update_board(run)


def list_paths(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*")}


@pytest.fixture(scope="module")
def written(created: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What all this creates in a run: files and folders whose names somebody may know before."""
    run = Path(shutil.copytree(created, tmp_path_factory.mktemp("whole") / "runs" / "stripes" / "a"))
    before = list_paths(run)
    do_all(run)
    return sorted(name for name in list_paths(run) - before if "tfevents" not in name)


@pytest.mark.long
def test_whatever_is_planted_under_a_name_that_a_run_writes_nothing_of_others_changes(
    written: list[str], created: Path, victim: Path, tmp_path: Path
):
    assert len(written) >= 15, written
    refused = []
    for number, name in enumerate(written):
        run = Path(shutil.copytree(created, tmp_path / "runs" / "stripes" / f"r{number}"))
        names = [name, f"{name}.partial"] if Path(name).suffix else [name]
        for planted in (run / one for one in names):
            planted.parent.mkdir(exist_ok=True)
            planted.symlink_to(victim / ("file" if planted.suffix else "empty"))
        try:
            do_all(run)
        except (UserError, OSError) as error:
            refused.append(name)
            assert name.partition("/")[0] in str(error), error
        assert (victim / "file").read_text() == PRECIOUS, name
        assert not list((victim / "empty").iterdir()), name
        assert sorted(path.name for path in victim.iterdir()) == ["empty", "file"], name
    assert {"log", "metrics.jsonl", "plots", "tensorboard", "checkpoints"} <= set(refused)


def test_each_way_of_writing_leaves_what_a_link_leads_to_alone(victim: Path, tmp_path: Path):
    link = tmp_path / "link"
    for target in (victim / "file", victim / "new"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(UserError, match="is a link"):
            AppendedFile(link)
        write_atomically(link, "own")
        assert not link.is_symlink()
        link.unlink()
        link.symlink_to(target)
        with create_file(link) as file:
            file.write(b"own")
        assert link.read_text() == "own" and not link.is_symlink()
    folder = tmp_path / "plots"
    folder.symlink_to(victim / "empty")
    with pytest.raises(UserError, match=r"plots: is a link, .* Remove it: rm /"):
        write_atomically(folder / "a.png", b"own", inside=True)
    assert sorted(path.name for path in victim.iterdir()) == ["empty", "file"]
    assert (victim / "file").read_text() == PRECIOUS


WRITERS = {"write_text", "write_bytes", "touch", "savefig", "symlink_to"}
OWN_PLACE = {
    "runs/create.py": "a new folder under a name that nobody can guess",
    "runs/tensor_file.py": "a new file under a name that nobody can guess",
    "train/watchdog.py": "created, or left alone",
    "data/stage.py": "a folder of scratch that is this user's alone",
    "tools/new_family.py": "a new folder under a name that nobody can guess",
    "report/figures.py": "into memory",
}


def find_writers(path: Path) -> Iterator[str]:
    """Yield the calls of a file that write to a path by themselves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, of = node.func.attr, ast.unparse(node.func.value)
        values = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        modes = [value.value for value in values[:1] if isinstance(value, ast.Constant)]
        writes = name == "open" and any(re.fullmatch("[wax]b?[+]?b?|r[+]b?", str(mode)) for mode in modes)
        if writes or (name in WRITERS and of not in ("self", "self.context.heartbeat", "heartbeat")):
            yield f"line {node.lineno}: {of}.{name}"


def test_what_writes_by_itself_writes_where_nobody_else_can_plant_anything():
    package = ROOT / "src" / "trainyard"
    found = {str(path.relative_to(package)): list(find_writers(path)) for path in sorted(package.rglob("*.py"))}
    found = {name: calls for name, calls in found.items() if calls and not name.startswith("templates/")}
    assert set(found) == set(OWN_PLACE), found
