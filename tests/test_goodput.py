"""What each second of a run went to: labels, their sum, and what a killed attempt lost."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import format_time
from tests.training import new_run, start
from trainyard.report.run_page import format_summary, write_report
from trainyard.runs.events import read_events
from trainyard.runs.goodput import (
    LABELS,
    LOST,
    START_UP,
    STOPPED,
    USEFUL,
    compute_goodput,
    compute_shares,
    describe_goodput,
    label_seconds,
    sum_up,
)


def make_event(at: float, name: str, step: int, attempt: str = "a", **fields: Any) -> dict[str, Any]:
    """Return an event at a second, with what the attempt had spent."""
    return {"event": name, "step": step, "attempt": attempt, "time": format_time(at), **fields}


START = make_event(110, "start", 0, spent={"preparing": 8.0, "packing": 1.0})


def test_every_second_of_an_attempt_has_a_label():
    spent = {"preparing": 9.0, "packing": 1.0, "compiling": 2.0, "training": 50.0, "input": 5.0, "evaluating": 3.0}
    done = make_event(180, "done", 40, spent=spent | {"saving": 4.0})
    seconds = sum_up(format_time(100.0), [START, done], {})
    expected = {"packing": 1, "compilation": 2, "input wait": 5, "evaluation": 3, "saving": 4, USEFUL: 50, START_UP: 9}
    assert seconds == expected | {STOPPED: 1}, "the process began 9 s before its start was recorded"
    assert next(iter(seconds)) == USEFUL
    assert set(LABELS.values()) < {*expected}


def test_what_a_killed_attempt_did_after_its_last_checkpoint_is_lost():
    saved = make_event(130, "checkpoint", 10, spent={"preparing": 9.0, "training": 10.0})
    beat = {"attempt": "a", "spent": {"preparing": 9.0, "training": 25.0, "evaluating": 1.0}}
    running = sum_up(format_time(100.0), [START, saved], beat)
    assert running == {USEFUL: 25, START_UP: 9, STOPPED: 1, "evaluation": 1}, "it may be running still"
    resumed = make_event(200, "resume", 10, "b", spent={"preparing": 7.0}, previous=beat)
    seconds = sum_up(format_time(100.0), [START, saved, resumed], {})
    # until 101 + 35 s the first attempt, from 193 s the second
    assert seconds == {USEFUL: 10, LOST: 16, START_UP: 16, STOPPED: 1 + 193 - 136}
    again = make_event(200, "start", 0, "b", spent={"preparing": 7.0}, previous=beat)
    assert sum_up(format_time(100.0), [START, saved, again], {})[LOST] == 26, (
        "from scratch: everything but its start-up"
    )


def test_a_stop_that_saved_loses_nothing():
    stop = make_event(150, "stop", 30, spent={"preparing": 9.0, "training": 38.0, "saving": 2.0})
    resumed = make_event(170, "resume", 30, "b", spent={"preparing": 7.0})
    seconds = sum_up(
        format_time(101.0), [START, stop, resumed], {"attempt": "b", "spent": {"preparing": 7.0, "training": 5.0}}
    )
    assert seconds == {USEFUL: 43, START_UP: 16, STOPPED: 13, "saving": 2}


def test_a_second_start_in_one_process_is_counted_once():
    """Without memory on a GPU, an attempt starts again with half the micro-batch."""
    again = make_event(130, "start", 0, spent={"preparing": 12.0, "training": 20.0})
    done = make_event(170, "done", 9, spent={"preparing": 12.0, "training": 60.0})
    assert sum_up(format_time(101.0), [START, again, done], {}) == {USEFUL: 40, START_UP: 8, "packing": 1, LOST: 23}


def test_a_clock_that_goes_back_takes_no_time():
    stop = make_event(150, "stop", 30, spent={"preparing": 9.0, "training": 40.0})
    resumed = make_event(20, "resume", 30, "b", spent={"preparing": 7.0})
    seconds = sum_up(format_time(500.0), [START, stop, resumed], {})
    assert seconds == {USEFUL: 40, START_UP: 16} and STOPPED not in seconds


@pytest.mark.parametrize("spent", [None, 3, {}, {"preparing": "long"}, {"preparing": -1.0}, {"preparing": True}])
def test_a_run_that_did_not_record_its_seconds_has_none(spent):
    assert sum_up(format_time(0.0), [{**START, "spent": spent}], {"attempt": "a", "spent": spent}) == {}
    assert sum_up(format_time(0.0), [], {}) == {}
    assert sum_up(format_time(0.0), [{**START, "time": "now"}], {}) == {}
    assert sum_up("yesterday", [START], {}) == {} and compute_goodput({}) is None


def test_goodput_is_one_sentence():
    shares = compute_shares([{USEFUL: 30.0, LOST: 10.0}, {USEFUL: 30.0, STOPPED: 50.0}])
    assert shares == [
        (USEFUL, 60.0, 50.0),
        (STOPPED, 50.0, pytest.approx(41.7, abs=0.1)),
        (LOST, 10.0, pytest.approx(8.3, abs=0.1)),
    ]
    assert describe_goodput(shares) == (
        "Goodput: 50 % of 2m00s were steps whose result counts; most of the rest: queued or stopped, 42 %."
    )


@pytest.mark.parametrize(
    "steps", [pytest.param(60, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.long)]
)
@pytest.mark.timeout(1200)
def test_the_seconds_of_a_run_that_was_preempted_killed_and_resumed_add_up_to_its_wall_time(steps, tmp_path):
    """Four thousand steps take over 250 s: then the sum is within 1 %."""
    # without learning, only the evaluation at step 25 is the best so far, and saved; that at 50 writes a heartbeat
    words = ["checkpoint.every=20st", "eval_every=25st", "optimizer.lr=0", "log_every=1st", f"max_duration={steps}st"]
    earliest = time.time()
    run = new_run(tmp_path, "model.sleep_ms=60", *words)
    latest = time.time()
    for step, number in ((12, signal.SIGTERM), (52, signal.SIGKILL)):
        process = start(run)
        wait_for_step(run, step, process)
        os.kill(process.pid, number)
        process.join(60)
        time.sleep(1)
    process = start(run)
    process.join(1000)
    assert process.exitcode == 0
    done = max((run / name).stat().st_mtime for name in ("events.jsonl", "heartbeat.json"))  # by the kernel's clock
    events = read_events(run)
    assert [event["event"] for event in events if event["event"] in ("start", "resume", "stop", "done")] == [
        *("start", "stop", "resume", "resume", "done")
    ]
    seconds = label_seconds(run, events)
    print(f"{sum(seconds.values()):.2f} s by label, {done - latest:.2f} to {done - earliest:.2f} s by the clock")
    assert done - latest - 1 < sum(seconds.values()) < done - earliest + 1
    assert steps < 1000 or abs(sum(seconds.values()) / (done - earliest) - 1) < 0.01
    assert min(seconds.values()) > 0 and seconds[STOPPED] > 1 and seconds["evaluation"] > 0
    assert seconds[LOST] > 10 * 0.06, "of steps 41 to 52 those until the heartbeat at step 50"
    assert steps * 0.06 < seconds[USEFUL] < steps * 0.5
    page = write_report(run).read_text()
    assert describe_goodput(compute_shares([seconds])) in page and "useful steps" in format_summary(run)


def wait_for_step(run: Path, step: int, process: Any) -> None:
    """Wait until the heartbeat or a line of metrics says so, or the process has ended."""
    while process.is_alive():
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines if line.endswith("}")):
            return
        time.sleep(0.01)
