"""What takes disk space: who needs it is told truly, and only what a person names is deleted."""

import errno
import fcntl
import json
import os
import shlex
import shutil
import time
from pathlib import Path

import pytest

from tests.training import FAMILIES, start
from trainyard import cli
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import pack_raw, prepare_data
from trainyard.data.shards import ShardSet, verify
from trainyard.files import LockHeld, exclusive_lock, name_guard
from trainyard.runs import manifest
from trainyard.runs.create import create_run
from trainyard.runs.folder import CONFIG, update_env
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
    for name in ("stopped", "submitted", "reader"):
        shutil.rmtree(place / "runs/stripes" / name)
    assert find(place)[str(place / PACKED)].needed_by == ""


def test_packed_data_outside_the_caches_are_not_listed_whatever_runs_read_them(place, tmp_path):
    shared = Path(shutil.copytree(place / "data", tmp_path / "shared"))
    shutil.rmtree(place / "data")
    for name in ("done", "stopped", "submitted"):
        update_env(place / "runs/stripes" / name, "data", {"path": str(shared / "stripes")})
    assert not [item.name for item in find(place).values() if "shared" in item.name]


def test_a_folder_that_packing_did_not_write_is_not_listed_wherever_it_is(place, tmp_path, capsys):
    """A run may come from a stranger, and name any folder of ours."""
    for parent in (tmp_path, place / "data"):
        for name in ("thesis", "stripes-synthetic-faces", "stripes-synthetic-8-seed0-0123abcd"):
            (parent / name).mkdir()
            (parent / name / "index.h5").write_bytes(b"chapters")
            (parent / name / "chapter.tex").write_bytes(b"x" * 100)
        update_env(place / "runs/stripes/done", "data", {"path": str(parent / "thesis")})
        assert not [name for name in find(place) if "thesis" in name or "synthetic" in name]
        run_gc(capsys, "--delete", "unneeded")
    assert len(list(tmp_path.rglob("chapter.tex"))) == 6


# What a run packed, and what a person did


@pytest.fixture
def raw(tmp_path: Path, packed_by_run: Path) -> Path:
    """The raw files that a run packed into ./data."""
    return tmp_path / "raw"


@pytest.fixture
def packed_by_run(place: Path, tmp_path: Path) -> Path:
    """Data that a run packed into ./data, and no run names."""
    shutil.rmtree("runs")
    Path("runs").mkdir()
    load_family(FAMILIES, "stripes", "pack").synthesize(tmp_path / "raw", count=8, seed=0)
    return Path(prepare_data(configure(place / "data", f"data.path={tmp_path / 'raw'}"), FAMILIES).data.path)


def configure(cache: Path, *options: str) -> TrainConfig:
    return compose("stripes", [f"data.cache={cache}", *options], FAMILIES)


def list_unneeded(place: Path) -> set[str]:
    return {name for name, item in find(place).items() if item.is_unneeded}


def test_what_a_run_packed_is_unneeded_and_the_next_run_packs_it_again(place, raw, packed_by_run, capsys):
    assert list_unneeded(place) == {str(packed_by_run)}
    before = {path.name: path.read_bytes() for path in packed_by_run.iterdir()}
    assert "a run packs the raw files again" in run_gc(capsys, "--delete", "unneeded")
    assert not packed_by_run.exists()
    prepare_data(configure(place / "data", f"data.path={raw}"), FAMILIES)
    assert {path.name: path.read_bytes() for path in packed_by_run.iterdir()} == before


def test_half_packed_data_of_a_run_is_unneeded(place, packed_by_run):
    (packed_by_run / "index.h5").unlink()
    assert find(place)[str(packed_by_run)].kind == "half-packed"
    assert list_unneeded(place) == {str(packed_by_run)}


def test_data_packed_by_hand_go_only_by_their_name(place, raw, packed_by_run, capsys):
    prints = pack_raw(configure(place / "data"), raw, place / "data/prints", FAMILIES, workers=1)
    renamed = packed_by_run.rename(place / "data/mine")
    for folder in (prints, renamed):
        assert "by hand" in find(place)[str(folder)].kept_for
    run_gc(capsys, "--delete", "unneeded")
    assert prints.is_dir() and renamed.is_dir()
    run_gc(capsys, "--delete", str(prints))
    assert not prints.exists() and renamed.is_dir()


def lose_folder(raw: Path, packed: Path) -> None:
    shutil.rmtree(raw)


def lose_file(raw: Path, packed: Path) -> None:
    time.sleep(0.02)  # the clock of files ticks every few milliseconds
    next(raw.iterdir()).unlink()


def add_file(raw: Path, packed: Path) -> None:
    (packed / "notes.txt").write_text("which prints are bad")


@pytest.mark.parametrize("change", [lose_folder, lose_file, add_file])
def test_packed_data_that_no_run_can_make_again_stay(place, raw, packed_by_run, capsys, change):
    change(raw, packed_by_run)
    run_gc(capsys, "--delete", "unneeded")
    assert (packed_by_run / "index.h5").is_file()


def test_what_another_user_owns_is_not_listed(place, packed_by_run):
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(packed_by_run / "shard-00000.h5", 12345, 12345)
    assert str(packed_by_run) not in find(place)
    os.chown(packed_by_run / "shard-00000.h5", 0, 0)
    (listing,) = (place / "data").glob(".*.listing")
    os.chown(listing, 12345, 12345)  # who may write to a common cache could declare anything unneeded
    assert str(packed_by_run) in find(place) and not list_unneeded(place)


# What is in use


def test_data_that_somebody_reads_stay_whatever_is_typed(place, packed_by_run, capsys):
    name = str(packed_by_run)
    data = ShardSet(packed_by_run)
    assert "uses it now" in find(place)[name].kept_for
    run_gc(capsys, "--delete", "unneeded")
    assert "a process is reading it now" in run_gc(capsys, "--delete", name, "--force", code=2)
    assert len(list(verify(packed_by_run))) == 0
    data.close()
    run_gc(capsys, "--delete", name)
    assert not packed_by_run.exists()


def test_data_that_are_being_verified_stay(packed_by_run):
    held = []

    def try_lock(bytes_read: int) -> None:
        with pytest.raises(LockHeld), exclusive_lock(packed_by_run / "index.h5", wait=False):
            pass
        held.append(bytes_read)

    assert not list(verify(packed_by_run, try_lock)) and held


def test_data_that_a_run_of_another_folder_of_runs_trains_on_stay(place, raw, packed_by_run, tmp_path, capsys):
    config = configure(place / "data", f"data.path={raw}", "model.sleep_ms=200", "max_duration=1000st")
    process = start(create_run(tmp_path / "others", config))
    try:
        while not list(tmp_path.glob("others/stripes/*/metrics.jsonl")):
            assert process.is_alive()
            time.sleep(0.05)
        run_gc(capsys, "--delete", "unneeded")
        assert "is reading it now" in run_gc(capsys, "--delete", str(packed_by_run), "--force", code=2)
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    assert list_unneeded(place) == {str(packed_by_run)}, "the kernel released the lock"


def test_synthetic_raw_files_stay_while_they_are_packed(place):
    found = []

    def look() -> None:
        found.append(
            {item.kind: item.kept_for for item in find(place).values() if item.kind in ("drawn", "half-packed")}
        )

    prepare_data(configure(place / "data", "data.synthetic=8"), FAMILIES, on_shard=look)
    assert found == [{"drawn": "a process that uses it now", "half-packed": "a process that uses it now"}]


@pytest.mark.usefixtures("packed_by_run")
def test_what_is_left_of_drawing_is_listed_and_stays_if_a_run_names_it_or_it_is_drawn_now(place, capsys):
    """Changed drawn files are moved aside; a killed process leaves a hidden folder with another name."""
    config = configure(place / "data", "data.synthetic=8")
    prepare_data(config, FAMILIES)
    drawn = next((place / "data").glob("stripes-synthetic-*"))
    for _ in range(2):
        next(drawn.glob("*.png")).write_bytes(b"other")
        prepare_data(config, FAMILIES)
    killed, aside = drawn.with_name(f".{drawn.name}.partial.{'0' * 16}.partial"), f"{drawn}.damaged"
    shutil.copytree(drawn, killed)
    create_run(place / "runs", config, name="q")  # needs what it would draw, and none of these
    left = {str(killed), aside, f"{aside}-2"}
    assert {name for name, item in find(place).items() if item.kind == "leftover"} == left
    with exclusive_lock(name_guard(drawn)):
        assert not left & list_unneeded(place)
    create_run(place / "runs", configure(place / "data", f"data.path={aside}-2"), name="r")
    run_gc(capsys, "--delete", "unneeded")
    assert {str(path) for path in drawn.parent.glob(f"*{drawn.name}*") if path.is_dir()} == {str(drawn), f"{aside}-2"}


def test_nothing_is_deleted_if_one_of_several_things_is_in_use(place, raw, packed_by_run, capsys):
    prints = pack_raw(configure(place / "data"), raw, place / "data/prints", FAMILIES, workers=1)
    data = ShardSet(prints)
    refused = run_gc(capsys, "--delete", str(packed_by_run), "--delete", str(prints), code=2)
    data.close()
    assert "Nothing was deleted" in refused and "deleting" not in refused
    assert (packed_by_run / "index.h5").is_file() and (prints / "index.h5").is_file()


def test_everything_is_shown_before_anything_is_deleted(place, raw, packed_by_run):
    pack_raw(configure(place / "data"), raw, place / "data/prints", FAMILIES, workers=1)
    items = [item for item in find(place).values() if item.kind == "packed" and item.name != str(place / OTHER)]
    told = []

    def tell(line: str) -> None:
        assert all((item.paths[0] / "index.h5").is_file() for item in items)
        told.append(line)

    assert gc.delete_usage(items, tell) == sum(item.bytes for item in items)
    assert [line.split()[1] for line in told] == [item.name for item in items] and len(items) == 3
    assert not any(item.paths[0].exists() for item in items)


def test_where_the_file_system_has_no_locks_data_are_read_and_stay(place, packed_by_run, monkeypatch, capsys):
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ShardSet(packed_by_run).close()
    assert "cannot be locked" in find(place)[str(packed_by_run)].kept_for
    run_gc(capsys, "--delete", "unneeded")
    refused = run_gc(capsys, "--delete", str(packed_by_run), code=2)
    assert f"rm -r {packed_by_run}" in refused and packed_by_run.is_dir()


# What a run that waits needs


def test_packed_data_that_a_waiting_run_names_are_needed_by_it(place, packed_by_run, monkeypatch, capsys):
    for path in (str(packed_by_run), f"data/{packed_by_run.name}"):
        run = create_run(place / "runs", configure(place / "data", f"data.path={path}"), name="q")
        monkeypatch.chdir(place.parent)  # a relative path was typed elsewhere
        assert find(place)[str(packed_by_run)].needed_by == "stripes/q"
        monkeypatch.chdir(place)
        assert "needed by stripes/q" in run_gc(capsys, "--delete", str(packed_by_run), code=2)
        shutil.rmtree(run)


def test_what_a_waiting_run_would_pack_is_needed_by_it(place, raw, packed_by_run):
    (place / "data/twins-0123456789ab").mkdir()  # of another family
    shutil.copytree(packed_by_run, place / "data/twins-0123456789ab", dirs_exist_ok=True)
    prepare_data(configure(place / "data", "data.synthetic=8"), FAMILIES)
    for options in ([f"data.path={raw}"], ["data.synthetic=8"]):
        run = create_run(place / "runs", configure(place / "data", *options), name="q")
        needed = {Path(name).name: item.needed_by for name, item in find(place).items()}
        assert {by for name, by in needed.items() if name.startswith("stripes-")} == {"stripes/q"}
        assert not needed["twins-0123456789ab"]
        shutil.rmtree(run)


def test_a_run_whose_options_are_damaged_may_need_anything(place, packed_by_run):
    run = create_run(place / "runs", configure(place / "data"), name="q")
    (run / CONFIG).write_bytes(b"data: {path: [")
    items = [item for item in find(place).values() if item.kind == "packed"]
    assert len(items) == 3 and all("stripes/q" in item.needed_by for item in items)


def test_a_checkpoint_that_a_waiting_run_starts_from_stays(place, capsys):
    kept = manifest.select_checkpoint(manifest.list_checkpoints(Path("runs/stripes/done/checkpoints"))).path
    older = [path for path in Path("runs/stripes/done/checkpoints").glob("*.ckpt") if path != kept]
    assert older
    create_run(place / "runs", configure(place / "data", f"start_from={older[0].absolute()}"), name="q")
    run_gc(capsys, "--delete", "unneeded")
    assert older[0].is_file() and older[0].with_suffix(".json").is_file()


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
    shutil.rmtree("runs")
    prepare_data(configure(place / "data", "data.synthetic=8"), FAMILIES)
    shutil.copytree(place / PACKED, place / "data/stripes-0123456789ab")
    (place / "data/stripes-0123456789ab/index.h5").unlink()
    shutil.copytree(Path(__file__).parent / "format_1/runs", "runs")
    (place / "runs/stripes/.new-0123").mkdir()
    (place / "runs/stripes/.new-0123/config.yaml").write_text("job: stripes\n")
    os.utime(place / "runs/stripes/.new-0123", (0, 0))
    before = find(place)
    kinds = {item.kind for item in before.values() if item.is_unneeded}
    assert kinds == {"drawn", "packed", "leftover", "checkpoints"}
    run_gc(capsys, "--delete", "unneeded")
    after = find(place)
    assert after == {name: item for name, item in before.items() if not item.is_unneeded}
    assert {item.kind for item in after.values()} >= {"half-packed", "packed", "checkpoints"}


def test_an_unfinished_run_keeps_the_newest_intact_checkpoint_to_resume_from(place, capsys):
    folder = place / "runs/stripes/stopped/checkpoints"
    for step, source in ((5, 4), (6, 4), (7, 4)):
        data, entry = (folder / f"step-{step:09d}{suffix}" for suffix in (".ckpt", ".json"))
        shutil.copy(next(folder.glob(f"step-{source:09d}*.ckpt")), data)
        fields = json.loads(next(folder.glob(f"step-{source:09d}*.json")).read_text())
        del fields["self_sha256"]
        fields |= {"step": step, "meta": {**fields["meta"], "best": {"step": 4}, "swa": False}}
        entry.write_text(json.dumps({**fields, "self_sha256": manifest.hash_fields(fields)}))
    (folder / "step-000000007.ckpt").write_bytes(b"cut off")
    assert [one.problem is None for one in manifest.list_checkpoints(folder)][:2] == [False, True]
    run_gc(capsys, "--delete", "unneeded")
    steps = [one.step for one in manifest.list_checkpoints(folder)]
    assert 6 in steps and 5 not in steps


def test_checkpoints_of_a_run_that_is_written_to_stay(place, capsys):
    run = Path("runs/stripes/done")
    files = sorted((run / "checkpoints").iterdir())
    with RunLock(run):
        assert "has been writing to this run" in run_gc(capsys, "--delete", f"{run}/checkpoints (older)", code=2)
        run_gc(capsys, "--delete", "unneeded")
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


LINKED = ("runs/stripes/done/checkpoints", "runs/stripes/done/code", "runs/stripes/done", "runs/stripes")


@pytest.mark.parametrize("linked", LINKED)
def test_nothing_is_deleted_through_a_link_in_a_run_or_to_one(place, tmp_path, capsys, linked):
    (place / "runs/stripes/done/code").mkdir()
    (place / "runs/stripes/done/code/x.py").write_text("x = 1\n")
    (place / "runs/stripes/.new-0123").mkdir()
    (place / "runs/stripes/.new-0123/precious").write_bytes(b"x" * 100)
    os.utime(place / "runs/stripes/.new-0123", (0, 0))
    target = Path(shutil.move(place / linked, tmp_path / "elsewhere"))
    (place / linked).symlink_to(target)
    files = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    run_gc(capsys, "--delete", "unneeded")
    assert (place / linked).is_symlink()
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == files


def test_a_checkpoint_that_is_a_link_leaves_what_it_leads_to(place, tmp_path, capsys):
    checkpoints = place / "runs/stripes/done/checkpoints"
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 100)
    for name in ("step-000000001.ckpt", "step-000000001.json"):
        (checkpoints / name).symlink_to(precious)
    run_gc(capsys, "--delete", "unneeded")
    assert precious.read_bytes() == b"x" * 100


def test_a_file_planted_among_checkpoints_does_not_hide_that_the_run_is_written_to(place, capsys):
    run = Path("runs/stripes/done")
    (run / "checkpoints/config.yaml").write_text("job: stripes\n")
    with RunLock(run):
        assert "has been writing to this run" in run_gc(capsys, "--delete", f"{run}/checkpoints (older)", code=2)


def test_links_on_scratch_and_to_the_cache_are_neither_listed_nor_followed(place, tmp_path):
    precious = tmp_path / "precious"
    (precious / "0123456789abcdef").mkdir(parents=True)
    (precious / "0123456789abcdef" / "index.h5").write_bytes(b"x" * 10)
    (tmp_path / "scratch").mkdir()
    home = tmp_path / "scratch" / f"trainyard-{os.getuid()}"
    home.symlink_to(precious)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/trainyard").symlink_to(precious)
    scratch = str(tmp_path / "scratch")
    assert not [item for item in find(place, TRAINYARD_SCRATCH=scratch).values() if item.kind in ("staged", "cache")]
    home.unlink()
    home.mkdir()
    (home / "0123456789abcdef").symlink_to(precious / "0123456789abcdef")
    (home / "thesis").mkdir()
    (home / "thesis/chapter.tex").write_bytes(b"x" * 10)
    assert not [item for item in find(place, TRAINYARD_SCRATCH=scratch).values() if item.kind in ("staged", "cache")]


def test_the_list_is_short_and_ends_with_the_next_command(place, capsys):
    lines = run_gc(capsys).splitlines()
    assert lines[0].split() == ["KIND", "SIZE", "NEEDED", "BY", "NAME"]
    assert lines[-1].startswith("next: trainyard gc --delete ")
    assert "in all; nobody needs" in lines[-2]


def test_the_lines_to_type_name_the_folders_that_were_typed(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folders = ["--runs", str(place / "runs"), f"--data={place / 'data'}"]
    line = run_gc(capsys, *folders).splitlines()[-1].removeprefix("next: trainyard gc ").partition("   (")[0]
    assert "freed" in run_gc(capsys, *shlex.split(line))
    refused = run_gc(capsys, *folders, "--delete", str(place / OTHER), code=2)
    line = refused.partition("trainyard gc ")[2].partition(". Getting")[0]
    run_gc(capsys, *shlex.split(line))
    assert not (place / OTHER).exists()


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


def test_a_staged_copy_that_somebody_reads_or_makes_stays_even_with_force(
    place, packed_by_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRAINYARD_SCRATCH", str(tmp_path / "scratch"))
    home = tmp_path / "scratch" / f"trainyard-{os.getuid()}"
    copy = Path(shutil.copytree(packed_by_run, home / "0123456789abcdef"))
    partial = Path(shutil.copytree(packed_by_run, home / "fedcba9876543210.partial"))
    data = ShardSet(copy)
    assert "is reading it now" in run_gc(capsys, "--delete", str(copy), "--force", code=2)
    data.close()
    with exclusive_lock(home / "fedcba9876543210.lock"):
        assert "is making it now" in run_gc(capsys, "--delete", str(partial), "--force", code=2)
    run_gc(capsys, "--delete", str(copy), "--delete", str(partial), "--force")
    assert not copy.exists() and not partial.exists()


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


def test_a_cache_that_is_not_there_is_named(tmp_path, capsys):
    assert cli.main(["gc", "--runs", str(tmp_path), "--data", str(tmp_path / "nowhere")]) == 2
    assert f"--data {tmp_path}/nowhere: no such folder." in capsys.readouterr().err
