"""A run that was killed, stopped or moved ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.training import (
    FAMILIES,
    find_differences,
    load_state,
    new_run,
    read_run_metrics,
    start,
    train,
    train_on_ranks,
    wait_for_lines,
)
from trainyard.cli import main
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.node.rank_task import execute
from trainyard.runs.changes import find_changes
from trainyard.runs.create import create_run
from trainyard.runs.events import read_events, read_metrics
from trainyard.runs.folder import read_env
from trainyard.runs.state import ExitCode
from trainyard.runs.why import explain_run
from trainyard.train import checkpoint


def list_resumes(run: Path) -> list[int]:
    """Return the steps from which attempts of a run resumed."""
    events = read_events(run) if (run / "events.jsonl").exists() else []
    return [event["step"] for event in events if event["event"] == "resume"]


@pytest.mark.slow
def test_ranks_that_use_different_parameters_find_them_and_resume_bitwise(tmp_path):
    options = ["model.branch=true", "max_duration=2ep", "micro_batch_size=3"]
    refused = new_run(tmp_path, *options, "find_unused_parameters=off")
    assert 0 not in train_on_ranks(refused, 2, rendezvous="off")
    assert "its loss gives branch.weight, branch.bias no gradient" in explain_run(refused)

    whole, stopped = (new_run(tmp_path, *options) for _ in range(2))
    assert train_on_ranks(whole, 2, rendezvous="whole") == [0, 0]
    chosen = read_env(whole)["choices"]["find_unused_parameters"]
    named = "of the first micro-batches, only some use branch.bias, branch.weight"
    assert chosen == {"value": True, "reason": named}

    two = [start(stopped, rank=r, world_size=2, rendezvous="first") for r in range(2)]
    assert set(stop_after(two, stopped, 5)) == {ExitCode.PREEMPTED}
    assert train_on_ranks(stopped, 2, rendezvous="second") == [0, 0]
    assert list_resumes(stopped), "it ended before it was stopped"
    assert read_env(stopped)["choices"]["find_unused_parameters"] == chosen
    assert find_differences(load_state(whole), load_state(stopped)) == []
    assert read_run_metrics(whole) == read_run_metrics(stopped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "count"),
    [("dali", 3), ("cpu", 3), *(pytest.param(decode, 10, marks=pytest.mark.long) for decode in ("dali", "cpu"))],
)
def test_kills_at_random_steps_change_no_bit(decode, count, tmp_path):
    whole = new_run(tmp_path, f"data.decode={decode}", "max_duration=12ep")
    assert train(whole) == 0

    killed = new_run(tmp_path, f"data.decode={decode}", "max_duration=12ep")
    rng, kills = random.Random(decode), 0
    while kills < count or len(list_resumes(killed)) < count // 2:  # too early, and nothing was written to resume from
        assert kills < 5 * count, "no attempt resumed from a checkpoint"
        process = start(killed)
        done = len(read_metrics(killed)) if (killed / "metrics.jsonl").exists() else 0
        wait_for_lines(killed, min(done + rng.randrange(1, 6), 50), process)
        assert process.is_alive(), f"ended with {process.exitcode} before kill {kills}"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    last = start(killed)
    last.join(120)

    assert last.exitcode == 0
    assert find_differences(load_state(whole), load_state(killed)) == []
    assert read_run_metrics(whole) == read_run_metrics(killed)


def stop_after(ranks: list, run: Path, lines: int, signal_number: int = signal.SIGTERM) -> list[int]:
    """Signal all ranks once the run has written `lines` metric lines; return their exit codes."""
    wait_for_lines(run, lines, ranks[0])
    for process in ranks:
        os.kill(process.pid, signal_number)
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


@pytest.mark.slow
def test_two_one_and_two_ranks_read_each_sample_of_each_epoch_once(tmp_path):
    diary = tmp_path / "diary"
    # else the first attempt tries its first batches, and the diary has those as well
    untried = ["deterministic=false", "find_unused_parameters=off"]
    options = ["max_duration=3ep", "eval_every=3ep", "global_batch_size=3", *untried]
    run = new_run(tmp_path, f"model.diary={diary}", *options)
    per_epoch = 60 // 3
    two = [start(run, rank=r, world_size=2, rendezvous="first") for r in range(2)]
    assert stop_after(two, run, 3) == [85, 85]
    middle = len(read_metrics(run))
    assert 3 <= middle < per_epoch, "expected the first stop in the first epoch"
    assert stop_after([start(run)], run, per_epoch + 3) == [85]
    assert train_on_ranks(run, 2, rendezvous="last") == [0, 0]

    ids_by_epoch: dict[int, list[int]] = {}
    for line in diary.read_text().splitlines():
        samples_seen, *ids = map(int, line.split())
        ids_by_epoch.setdefault(samples_seen // 60, []).extend(ids)
    train_ids = [i for i in range(100) if i % 5 > 1]
    assert sorted(ids_by_epoch) == [0, 1, 2]
    assert all(sorted(ids) == train_ids for ids in ids_by_epoch.values())


@pytest.mark.long
@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_three_ranks_that_were_stopped_end_as_if_they_had_not_been(micro_batch_size, tmp_path):
    options = ("max_duration=3ep", f"micro_batch_size={micro_batch_size}")
    whole, stopped = new_run(tmp_path, *options), new_run(tmp_path, *options)
    assert train_on_ranks(whole, 3, rendezvous="whole") == [0, 0, 0]
    three = [start(stopped, rank=r, world_size=3, rendezvous="first") for r in range(3)]
    assert stop_after(three, stopped, 5) == [85, 85, 85]
    assert train_on_ranks(stopped, 3, rendezvous="second") == [0, 0, 0]
    assert find_differences(load_state(whole), load_state(stopped)) == []
    assert read_run_metrics(whole) == read_run_metrics(stopped)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--changed-files", "accept"], ["--changed-files", "restore"]])
@pytest.mark.parametrize("damage", ["cut in a line", "cut after a line", "empty", "gone", "garbled"])
def test_a_run_without_its_last_metrics_resumes_and_says_which_are_missing(stopped_and_whole, damage, flags, tmp_path):
    stopped, whole = stopped_and_whole
    run = Path(shutil.copytree(stopped, tmp_path / "runs" / "stripes" / "cut"))
    metrics, (newest, *_) = run / "metrics.jsonl", checkpoint.list_checkpoints(run / "checkpoints")
    before = metrics.read_bytes()
    end = len(b"".join(before.splitlines(keepends=True)[:4]))
    if damage == "gone":
        metrics.unlink()
    elif damage == "garbled":  # the lengths of lines differ, and so do all offsets
        metrics.write_bytes(before.replace(b'"lr": ', b'"lr":   '))
    else:
        metrics.write_bytes(before[: {"cut in a line": end + 9, "cut after a line": end, "empty": 0}[damage]])
    if damage == "garbled" and flags != ["--changed-files", "accept"]:
        assert main(["resume", str(run), "--jobs", str(FAMILIES), *flags]) == 2
        return

    kept = read_run_metrics(run)
    if damage != "garbled":
        assert "is cut short or gone" in explain_run(run)
    assert main(["resume", str(run), "--jobs", str(FAMILIES), *flags]) == 0
    assert find_differences(load_state(whole), load_state(run)) == []
    lines = read_run_metrics(whole)
    kept = [line for line in kept if line["step"] <= newest.step]
    assert read_run_metrics(run) == [*kept, *(line for line in lines if line["step"] > newest.step)]
    (resume,) = [event for event in read_events(run) if event["event"] == "resume"]
    if damage != "garbled":
        last = kept[-1]["step"] if kept else 0
        expected = f"bytes: lines after step {last} and up to step {newest.step} are missing"
        assert expected in resume["missing"] and resume["missing"] in (run / "report.html").read_text()
        assert expected in (run / "log").read_text()
    assert find_changes(run) == []


@pytest.mark.slow
def test_a_run_without_its_last_metrics_resumes_after_further_kills_and_from_an_older_checkpoint(
    stopped_and_whole, tmp_path
):
    stopped, whole = stopped_and_whole
    run = Path(shutil.copytree(stopped, tmp_path / "runs" / "stripes" / "cut"))
    (run / "metrics.jsonl").unlink()
    process = start(run)
    wait_for_lines(run, 5, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert find_changes(run) == []
    newest, older, *_ = checkpoint.list_checkpoints(run / "checkpoints")
    newest.path.write_bytes(b"")
    assert main(["resume", str(run), "--jobs", str(FAMILIES)]) == 0
    assert list_resumes(run)[-1] == older.step
    assert find_differences(load_state(whole), load_state(run)) == []


@pytest.fixture(scope="module")
def stopped_and_whole(tmp_path_factory):
    """A run that was stopped with several checkpoints, and one that was not."""
    options = ("checkpoint.every=2st", "checkpoint.keep_last=9", "model.sleep_ms=20")
    root = tmp_path_factory.mktemp("stopped")
    whole, stopped = new_run(root, *options), new_run(root, *options)
    assert train(whole) == 0
    assert stop_after([start(stopped)], stopped, 9) == [85]
    return stopped, whole


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGUSR2, 85), (signal.SIGINT, 87)])
def test_a_signal_saves_at_the_step_boundary_exits_with_its_code_and_loses_no_step(number, code, tmp_path):
    whole, stopped = new_run(tmp_path), new_run(tmp_path, "checkpoint.every=1000st")
    assert train(whole) == 0
    assert stop_after([start(stopped)], stopped, 7, number) == [code]
    lines = len(read_metrics(stopped))
    assert checkpoint.list_checkpoints(stopped / "checkpoints")[0].step >= 7
    assert read_events(stopped)[-1]["event"] == "stop"
    assert train(stopped) == 0
    assert lines < len(read_metrics(stopped))
    assert find_differences(load_state(whole), load_state(stopped)) == []
    assert read_run_metrics(whole) == read_run_metrics(stopped)


@pytest.mark.slow
def test_a_signal_while_data_are_packed_exits_at_once_and_the_next_attempt_packs_and_trains(tmp_path):
    config = configs.compose("stripes", [f"data.cache={tmp_path / 'cache'}"], FAMILIES)
    run = create_run(tmp_path / "runs", config)
    process = start(run)
    while not (run / "heartbeat.json").exists():
        assert process.is_alive()
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 85
    assert not (run / "metrics.jsonl").exists() and not list(tmp_path.glob("cache/*/index.h5"))
    assert train(run) == 0


@pytest.mark.slow
def test_max_runtime_stops_in_time_with_a_code_of_its_own(tmp_path):
    run = new_run(tmp_path, "max_duration=10000ep", "max_runtime=1m", "eval_every=10000ep")
    assert execute(run, FAMILIES, environ={}, started=time.time() - 50) == 86
    assert read_events(run)[-1]["reason"] == "max_runtime"
    assert load_state(run)["progress/step"] > 0


@pytest.mark.slow
def test_a_finished_run_stays_as_it_is(tmp_path):
    run = new_run(tmp_path, "max_duration=1ep")
    assert train(run) == 0
    before, metrics = load_state(run), read_run_metrics(run)
    assert train(run) == 0
    assert find_differences(before, load_state(run), ignore=()) == []
    assert read_run_metrics(run) == metrics


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    run = new_run(tmp_path, "model.poison_step=60", "checkpoint.every=1st")
    with pytest.raises(UserError, match=r"Step 6: the gradient is not finite.*nothing after it is saved"):
        train(run)
    state = load_state(run)
    assert state["progress/step"] <= 6
    assert all(np.isfinite(v.numpy()).all() for name, v in state.items() if name.startswith("model/"))


@pytest.mark.slow
def test_a_flipped_byte_in_the_newest_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path, capfd):
    whole, damaged = new_run(tmp_path), new_run(tmp_path)
    assert train(whole) == 0
    assert stop_after([start(damaged)], damaged, 14) == [85]
    newest, before = checkpoint.list_checkpoints(damaged / "checkpoints")[:2]
    data = bytearray(newest.path.read_bytes())
    data[len(data) // 2] ^= 1
    newest.path.write_bytes(data)
    assert train(damaged) == 0
    output = capfd.readouterr().err
    assert newest.path.name in output and "damaged" in output and f"resuming from {before.path.name}" in output
    assert find_differences(load_state(whole), load_state(damaged)) == []


@pytest.mark.slow
def test_a_resume_on_other_data_is_refused(tmp_path):
    run = new_run(tmp_path, "max_duration=1ep")
    assert train(run) == 0
    other = new_run(tmp_path, "data.synthetic=60")
    text = (run / "config.yaml").read_text()
    old_data, new_data = (configs.load_config(r / "config.yaml", FAMILIES).data.path for r in (run, other))
    (run / "config.yaml").write_text(text.replace(old_data, new_data))
    with pytest.raises(UserError, match="trained on other data"):
        train(run)
