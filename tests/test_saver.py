"""A checkpoint is written from a copy while training goes on, and changes nothing but the time that training waits."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from tests.training import (
    FAMILIES,
    FORKSERVER,
    find_differences,
    load_state,
    new_run,
    read_run_metrics,
    start,
    train,
    train_on_ranks,
)
from trainyard.node.rank_task import execute
from trainyard.runs.events import read_events, read_metrics
from trainyard.runs.folder import read_env
from trainyard.runs.why import explain_run
from trainyard.train import checkpoint
from trainyard.train.saver import HostCopy

SAVES = ("checkpoint.every=4st", "max_duration=3ep")


def test_a_copy_is_written_as_the_same_bytes_and_keeps_them_when_the_original_changes(tmp_path):
    layer = torch.nn.BatchNorm1d(3)
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"model": layer.state_dict(), "view": whole[1:, ::2], "whole": whole, "turned": whole.t(), "empty": {}}
    state |= {"losses": [1.0, 2.0], "parameter": layer.weight, "number": torch.tensor(3), "none": torch.zeros(0, 2)}
    expected = checkpoint.save(tmp_path / "a", state, step=1, meta={}).read_bytes()
    host = HostCopy()
    copied = host.take(state)
    assert type(copied["model"]) is OrderedDict and copied["model"]._metadata == state["model"]._metadata
    whole.zero_()
    state["losses"].append(3.0)
    assert checkpoint.save(tmp_path / "b", copied, step=1, meta={}).read_bytes() == expected
    assert host.bytes == host.predict_bytes(state) == checkpoint.count_tensor_bytes(state)
    again = host.take(state)
    assert again["whole"].data_ptr() == copied["whole"].data_ptr() and not again["whole"].any()


def fail_to_write(run: Path, rank: int, started: float) -> None:
    """Train as one of two ranks; the disk is full when the checkpoint of step 8 is written, in the background."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TRAINYARD_MEETING": "m"}

    def watch(name: str, arguments: tuple[object, ...]) -> None:
        if name == "open" and Path(str(arguments[0])).name.startswith(".step-000000008.ckpt."):
            assert threading.current_thread() is not threading.main_thread()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(watch)
    environ = {name: str(value) for name, value in numbers.items()}
    sys.exit(execute(run, FAMILIES, environ=environ, started=started))


@pytest.mark.slow
def test_a_write_that_fails_in_the_background_ends_all_ranks_and_the_run_resumes_from_the_one_before(tmp_path):
    options = (*SAVES, "data.decode=cpu")
    whole, failed = new_run(tmp_path, *options), new_run(tmp_path, *options)
    assert train_on_ranks(whole, 2, rendezvous="whole") == [0, 0]
    started = time.time()  # one attempt: its name has this second
    ranks = [FORKSERVER.Process(target=fail_to_write, args=(failed, rank, started)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert all(process.exitcode for process in ranks), [process.exitcode for process in ranks]
    why = explain_run(failed)
    assert "rank 0 on" in why and "DiskFull" in why and "No space left on device" in why and "rank 1" not in why, why
    assert [entry.step for entry in checkpoint.list_checkpoints(failed / "checkpoints")] == [4]
    assert not list((failed / "checkpoints").glob("*.partial"))
    assert train_on_ranks(failed, 2, rendezvous="again") == [0, 0]
    assert find_differences(load_state(whole), load_state(failed)) == []
    assert read_run_metrics(whole) == read_run_metrics(failed)


def train_with_hook(run: Path, event: str, pattern: str, act: str) -> None:
    """Train in a process of its own that acts when it is about to do this to a file for the first time."""
    is_done = False

    def watch(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_done
        if is_done or name != event or not re.search(pattern, str(arguments[0])):
            return
        is_done = True
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while (beat := json.loads((run / "heartbeat.json").read_text()))["phase"] != "saving" or beat["step"] <= 8:
            time.sleep(0.001)
        (run / "seen.json").write_text(str(len(read_metrics(run))))

    sys.addaudithook(watch)
    sys.exit(train(run))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_in_the_background_changes_no_bit_and_no_line(ranks, tmp_path):
    options = (*SAVES, "data.decode=cpu")
    whole, other = new_run(tmp_path, *options), new_run(tmp_path, *options, "checkpoint.background=false")
    for i, run in enumerate((whole, other)):
        assert train_on_ranks(run, ranks, rendezvous=str(i)) == [0] * ranks
    assert find_differences(load_state(whole), load_state(other)) == []
    assert read_run_metrics(whole) == read_run_metrics(other)
    saved = [
        [(e["step"], e["bytes"]) for e in read_events(run) if e["event"] == "checkpoint"] for run in (whole, other)
    ]
    assert saved[0] == saved[1] and len(saved[0]) >= 3
    choices = [read_env(run)["choices"]["checkpoint_write"] for run in (whole, other)]
    assert [choice["value"] for choice in choices] == ["in the background", "in the foreground"]
    assert "of host memory" in choices[0]["reason"]


@pytest.mark.slow
def test_steps_are_taken_during_a_write_and_the_next_save_waits_for_it_and_says_so(tmp_path):
    run = new_run(tmp_path, *SAVES, "data.decode=cpu")
    process = FORKSERVER.Process(
        target=train_with_hook, args=(run, "open", r"08\.ckpt\..*partial$", "wait until the next save")
    )
    process.start()
    process.join(40)
    assert process.exitcode == 0
    saved = [event for event in read_events(run) if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved[:3]] == [4, 8, 10]
    assert int((run / "seen.json").read_text()) >= 10, "no step was taken while the write of step 8 was held up"
    assert saved[2]["seconds"] >= saved[2]["waited_for_previous_s"] > 0
    assert saved[1]["write_s"] > saved[1]["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "pattern"),
    [
        ("open", r"08\.ckpt\..*partial$"),
        ("open", r"08\.json\..*partial$"),
        ("os.rename", r"08\.json\..*partial$"),
        ("os.rename", r"08\.ckpt\..*partial$"),
        ("os.remove", r"04\.ckpt$"),
    ],
)
def test_a_kill_at_any_instant_of_a_write_leaves_a_whole_checkpoint_and_changes_no_bit(event, pattern, tmp_path):
    options = ("checkpoint.every=4st", "max_duration=4ep", "checkpoint.keep_last=1", "data.decode=cpu")
    whole, killed = new_run(tmp_path, *options), new_run(tmp_path, *options)
    assert train(whole) == 0
    process = FORKSERVER.Process(target=train_with_hook, args=(killed, event, pattern, "kill"))
    process.start()
    process.join(40)
    assert process.exitcode == -signal.SIGKILL
    found = checkpoint.list_checkpoints(killed / "checkpoints")
    assert found and all(checkpoint.verify(entry) is None for entry in found)
    last = start(killed)
    last.join(120)
    assert last.exitcode == 0
    assert find_differences(load_state(whole), load_state(killed)) == []
    assert read_run_metrics(whole) == read_run_metrics(killed)
