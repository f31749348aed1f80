"""What takes disk space: who needs it is told truly, and only what a person names is deleted."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from trainyard import cli
from trainyard.files import exclusive_lock
from trainyard.runs import manifest
from trainyard.runs.folder import update_env
from trainyard.runs.lock import RunLock
from trainyard.tools import gc

PACKED, OTHER = "data/stripes", "data/other"


@pytest.fixture
def place(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sets of packed data: a stopped run reads one; a finished, a stopped and a submitted run the
    other. Without cache and scratch."""
    shutil.copytree(PACKED, OTHER)
    for name, data in (("stopped", PACKED), ("submitted", PACKED), ("reader", OTHER)):
        run = Path(shutil.copytree("runs/stripes/done", f"runs/stripes/{name}"))
        update_env(run, "data", {"path": data})
        events = run / "events.jsonl"
        events.write_text(
            events.read_text().replace('"event": "done", "reason": "none"', '"event": "stop", "reason": "interrupted"')
        )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINYARD_SCRATCH", raising=False)
    return stored


def find(place: Path, **environ: str) -> dict[str, gc.DiskUsage]:
    """Return the items of the folder by name."""
    cache = {"XDG_CACHE_HOME": str(place.parent / "cache"), **environ}
    items = gc.list_usage(place / "runs", data_dirs=[place / "data"], environ=cache)
    assert len({item.name for item in items}) == len(items)
    return {item.name: item for item in items}


def run_gc(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Type `trainyard gc ...` and return what it prints."""
    capsys.readouterr()
    assert cli.main(["gc", *words]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_packed_data_name_the_unfinished_runs_that_need_them(place):
    found = find(place)
    other = found[str(place / OTHER)]
    assert (other.kind, other.needed_by) == ("packed", "stripes/reader")
    assert other.bytes == sum(path.stat().st_size for path in other.paths[0].iterdir())
    needed = found[str(place / PACKED)].needed_by
    assert "stripes/stopped" in needed and "stripes/done" not in needed


def test_packed_data_that_only_finished_runs_read_are_needed_by_nobody(place):
    for name in ("stopped", "submitted"):
        shutil.rmtree(place / "runs/stripes" / name)
    assert find(place)[str(place / PACKED)].needed_by == ""


def test_of_packed_data_elsewhere_only_what_our_runs_read_is_listed(place, tmp_path):
    """The folder may be shared: what others packed there is not ours to call unneeded."""
    shared = Path(shutil.copytree(place / "data", tmp_path / "shared"))
    shutil.rmtree(place / "data")
    for name in ("done", "stopped", "submitted"):
        update_env(place / "runs/stripes" / name, "data", {"path": str(shared / "stripes")})
    assert [item.name for item in find(place).values() if item.kind == "packed"] == [str(shared / "stripes")]


def test_a_finished_run_keeps_the_checkpoint_of_its_result_and_frees_the_others(place, capsys):
    run = Path("runs/stripes/done")
    kept = manifest.select_checkpoint(manifest.list_checkpoints(run / "checkpoints")).path
    others = [entry.path for entry in manifest.list_checkpoints(run / "checkpoints") if entry.path != kept]
    assert others, "the set has no run with several checkpoints"
    printed = run_gc(capsys, "--delete", f"{run}/checkpoints (older)")
    assert "freed" in printed and kept.is_file() and kept.with_suffix(".json").is_file()
    assert not any(path.exists() or path.with_suffix(".json").exists() for path in others)
    assert manifest.verify(manifest.list_checkpoints(run / "checkpoints")[0]) is None


def test_what_a_run_needs_is_refused_and_the_line_to_type_works(place, capsys):
    name = str(place / OTHER)
    refused = run_gc(capsys, "--delete", name, code=2)
    line = f"trainyard gc --delete {shlex.quote(name)} --force"
    assert "needed by stripes/reader" in refused and line in refused and Path(name).is_dir()
    assert "Getting it back" in run_gc(capsys, "--delete", name, "--force")
    assert not Path(name).exists()


def test_unneeded_deletes_exactly_what_the_list_says_nobody_needs(place, capsys):
    (place / "data/stripes-synthetic-60-seed0").mkdir()
    (place / "data/stripes-synthetic-60-seed0/d0-0000.png").write_bytes(b"x" * 100)
    (place / "data/stripes-half").mkdir()
    (place / "data/stripes-half/packing.json").write_text("{}")
    (place / "runs/stripes/.new-0123").mkdir()
    (place / "runs/stripes/.new-0123/config.yaml").write_text("job: stripes\n")
    os.utime(place / "runs/stripes/.new-0123", (0, 0))
    before = find(place)
    kinds = {item.kind for item in before.values() if not item.needed_by}
    assert {"drawn", "half-packed", "leftover", "checkpoints"} <= kinds
    run_gc(capsys, "--delete", "unneeded")
    after = find(place)
    assert set(after) == {name for name, item in before.items() if item.needed_by}
    assert all(item.needed_by for item in after.values())


def test_checkpoints_of_a_run_that_is_written_to_stay(place, capsys):
    run = Path("runs/stripes/done")
    files = sorted((run / "checkpoints").iterdir())
    with RunLock(run):
        assert "has been writing to this run" in run_gc(capsys, "--delete", f"{run}/checkpoints (older)", code=2)
    assert sorted((run / "checkpoints").iterdir()) == files


def test_a_wrong_name_is_refused_with_the_nearest_and_nothing_is_deleted(place, capsys):
    before = find(place)
    refused = run_gc(capsys, "--delete", "runs/stripes/done/checkpoints (olde)", code=2)
    assert "Nearest: runs/stripes/done/checkpoints (older)." in refused
    assert find(place) == before


def test_a_path_outside_the_list_cannot_be_deleted(place, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.mkdir()
    assert "nothing of that name" in run_gc(capsys, "--delete", str(precious), code=2)
    assert precious.is_dir()


def test_a_link_to_a_folder_is_neither_listed_nor_followed(place, tmp_path):
    target = Path(shutil.move(place / PACKED, tmp_path / "elsewhere"))
    (place / "data/linked").symlink_to(target)
    assert str(place / "data/linked") not in find(place)


def test_the_list_is_short_and_ends_with_the_next_command(place, capsys):
    lines = run_gc(capsys).splitlines()
    assert lines[0].split() == ["KIND", "SIZE", "NEEDED", "BY", "NAME"]
    assert lines[-1].startswith("next: trainyard gc --delete ")
    assert "in all; nobody needs" in lines[-2]


def test_an_empty_folder_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_gc(capsys) == "Nothing here takes space.\n"


def test_staged_copies_and_the_cache_are_found(place, tmp_path):
    copy = tmp_path / "scratch" / f"trainyard-{os.getuid()}" / "0123456789abcdef"
    copy.mkdir(parents=True)
    (copy / "index.h5").write_bytes(b"x" * 10)
    (tmp_path / "cache/trainyard").mkdir(parents=True)
    (tmp_path / "cache/trainyard/sif").write_bytes(b"x" * 20)
    found = find(place, TRAINYARD_SCRATCH=str(tmp_path / "scratch"))
    assert found[str(copy)].bytes == 10 and found[str(copy)].needed_by
    assert found[str(tmp_path / "cache/trainyard")].bytes == 20


def test_compiled_code_on_scratch_is_a_cache_that_nobody_needs(place, tmp_path):
    compiled = tmp_path / "scratch" / f"trainyard-{os.getuid()}" / "compiled"
    (compiled / "a100-torch-2.13.0").mkdir(parents=True)
    (compiled / "a100-torch-2.13.0" / "kernel.py").write_bytes(b"x" * 10)
    item = find(place, TRAINYARD_SCRATCH=str(tmp_path / "scratch"))[str(compiled)]
    assert (item.kind, item.bytes, item.needed_by) == ("cache", 10, "")


def test_code_of_a_stopped_submitted_run_is_needed_by_it(place):
    run = place / "runs/stripes/submitted"
    (run / "code").mkdir()
    (run / "code/x.py").write_text("x = 1\n")
    assert find(place)[str(run / "code")].needed_by == "stripes/submitted"
    assert json.loads((run / "env.json").read_text())


def test_a_run_that_is_being_created_is_not_a_leftover(place):
    (place / "runs/stripes/.new-4567").mkdir()
    (place / "runs/stripes/.new-4567/config.yaml").write_text("job: stripes\n")
    name = "runs/stripes/.new-4567"
    assert str(place / name) not in find(place)
    os.utime(place / name, (0, 0))
    assert find(place)[str(place / name)].kind == "leftover"


def test_data_that_another_process_is_packing_stay(place, capsys):
    folder = place / "data/stripes-half"
    folder.mkdir()
    (folder / "packing.json").write_text("{}")
    with exclusive_lock(place / "data/.stripes-half.guard"):  # another open file, as another process has
        assert "another process is making it now" in run_gc(capsys, "--delete", str(folder), code=2)
    assert folder.is_dir()
    run_gc(capsys, "--delete", str(folder))
    assert not folder.exists()
