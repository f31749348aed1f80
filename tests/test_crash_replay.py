"""What power cuts and failing disks leave of a run is resumed to the same bits; the long test tries most of it."""

import os
import subprocess
import sys

import pytest

from tests.crash_replay import NO_COMPILER, NO_MOUNT, Disk, Entry, Recording, Step, Tree, compile_library, list_states
from tests.images import make_import_environ
from tests.training import FAMILIES
from trainyard.cli import main as run_command
from trainyard.config.families import load_family
from trainyard.runs.state import ExitCode


def replay(*options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run the tool; skip where it cannot run."""
    words = [sys.executable, "-m", "tests.crash_replay", *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode in (NO_COMPILER, NO_MOUNT):
        pytest.skip(done.stdout)
    assert done.returncode in (0, 1), done.stderr
    return done


def read_table(text: str) -> list[dict[str, str]]:
    """Return the lines of the table at the end of what the tool prints."""
    names, *rows = (line.split("  ") for line in text[text.rindex("phase  ") :].splitlines())
    columns = [name.strip() for name in names if name]
    return [dict(zip(columns, (cell.strip() for cell in row if cell), strict=True)) for row in rows]


def build_all(steps: list[Step], *, model: str) -> list[Tree]:
    """Return what each state of a folder that was empty holds."""
    disk = Disk({})
    disk.add(bytearray())
    recording = Recording("", [], {}, disk, steps, [])
    return [recording.build(state) for state in list_states(steps) if state.model == model]


def test_a_state_is_legal_unless_a_flush_orders_it():
    create, write = Step("c", "a", 0, ((0, "a", 1),)), Step("w", "a", 1, node=1, data=b"as it was")
    rename, flush = Step("r", "b", 2, ((0, "a", None), (0, "b", 1))), Step("s", "a", 3, node=1)
    flush_folder = Step("s", ".", 4, node=0)
    empty, zeros, torn, whole = ({"b": Entry(content, 0)} for content in (b"", bytes(9), b"as i", b"as it was"))
    found = build_all([create, write, rename], model="journal")
    assert empty in found and zeros in found and whole in found and {"a": Entry(b"", 0)} in found
    found = build_all([create, write, flush, rename, flush_folder], model="journal")
    assert whole in found and empty not in found and zeros not in found
    found = build_all([create, write, rename], model="strict")
    assert empty in found and torn in found and {} in found
    found = build_all([create, write, flush, rename], model="strict")
    assert {} in found and whole in found and empty not in found and torn not in found
    last = build_all([create, write, flush, rename, flush_folder], model="strict")[-1]
    assert last == whole


@pytest.mark.slow
def test_a_disk_that_fails_while_reading_is_named_with_the_file_and_nothing_else_is_blamed(tmp_path):
    """No file is called damaged, no sample bad, and none is left out: the same command works once the disk does."""
    library = compile_library(tmp_path)
    if library is None:
        pytest.skip("no C compiler is here (cc, gcc or clang)")
    run, raw, cache = tmp_path / "runs/stripes/a", tmp_path / "raw", f"data.cache={tmp_path / 'cache'}"
    load_family(FAMILIES, "stripes", "pack").synthesize(raw, count=20, seed=0)
    start = ["run", "stripes", "--jobs", str(FAMILIES), "--runs", str(tmp_path / "runs"), cache, f"data.path={raw}"]
    options = ["data.decode=cpu", "max_duration=4st", "checkpoint.every=2st", "trackers=[]"]
    assert run_command([*start, *options, "--name", "a"]) == 0
    (packed,) = (tmp_path / "cache").glob("stripes-*")
    resume = ["resume", str(run), "--jobs", str(FAMILIES), "max_duration=6st", "--inexact"]
    commands = [
        (run / "checkpoints", resume),
        *((run / name, resume) for name in ("config.yaml", "env.json", "events.jsonl", "metrics.jsonl")),
        (run / "checkpoints", ["gc", "--runs", str(tmp_path / "runs")]),
        (packed / "index.h5", ["verify", str(packed)]),
        (raw, ["pack", "stripes", "--jobs", str(FAMILIES), str(raw), str(tmp_path / "out"), "data.on_error=skip"]),
    ]
    for path, words in commands:
        environ = make_import_environ() | {"LD_PRELOAD": str(library), "FAIL_READS": f"{path}"}
        command = [sys.executable, "-m", "trainyard", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == ExitCode.DISK_ERROR and "Traceback" not in done.stderr, done.stderr
        said = done.stderr.splitlines()[-1]
        assert said.startswith(f"DiskError: {path}") and "Input/output error (EIO)" in said, done.stderr


@pytest.mark.slow
def test_a_few_power_cuts_during_saves_lose_nothing():
    done = replay("--workers", "1", "--most", "4", "--only", "(journal|strict) save", timeout_s=120)
    table = read_table(done.stdout)
    assert done.returncode == 0 and sum(int(line["tried"]) for line in table) == 4, done.stdout


@pytest.mark.long  # which states are tried depends on the recording: of three, now and then none shows it
def test_the_replay_notices_that_checkpoints_are_not_flushed():
    """As on a branch that had lost the flush of a checkpoint's data before its rename."""
    forget = ["--forget", r"/checkpoints/.*\.ckpt\..*partial$"]
    done = replay("--workers", "1", "--most", "16", "--only", "journal save", *forget, timeout_s=300)
    lost = sum(int(line[outcome]) for line in read_table(done.stdout) for outcome in ("lost", "refused"))
    assert done.returncode == 1 and lost > 0, done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_power_cuts_and_failing_operations_end_equal_or_with_a_sentence():
    done = replay("--seconds", "1000", "--most", "96", timeout_s=1100)
    table = read_table(done.stdout)
    assert done.returncode == 0, done.stdout
    assert len(table) == 6 * 8 and all(int(line["tried"]) for line in table), done.stdout
    cuts = [line for line in table if line["of"] in ("journal", "strict")]
    assert all(int(line["equal"]) == int(line["tried"]) for line in cuts), done.stdout
