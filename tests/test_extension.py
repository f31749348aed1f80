"""A run that gets a larger max_duration ends as one that was planned so, where that is possible."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import FAMILIES, find_differences, load_state, new_run, read_run_metrics, train
from trainyard.cli import main
from trainyard.cli.extension import plan_extension, record_extension
from trainyard.config.compose import load_config, save_config
from trainyard.config.settings import ScheduleSettings, TrainConfig
from trainyard.errors import UserError
from trainyard.runs.changes import find_changes
from trainyard.runs.events import read_events
from trainyard.runs.folder import CONFIG, read_env
from trainyard.runs.history import read_run

STEADY = ("schedule.name=constant", "eval_every=1ep", "checkpoint.every=3st", "data.decode=cpu")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A run of two epochs, five steps each."""
    run = new_run(tmp_path_factory.mktemp("short"), *STEADY, "max_duration=2ep")
    assert train(run) == 0
    return run


def read_config(run: Path, **changes: object) -> TrainConfig:
    return replace(load_config(run / CONFIG, FAMILIES), **changes)


def plan(run: Path, old: TrainConfig, length: str, *, allow_inexact: bool = False):
    new = replace(old, max_duration=length)
    return plan_extension(run, old, new, FAMILIES, allow_inexact=allow_inexact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), pytest.param(("swa=true", "ema_decay=0"), marks=pytest.mark.long)], ids=["best", "average"]
)
def test_an_extended_run_equals_one_that_was_planned_so(done, tmp_path, options):
    planned = new_run(done.parents[2], *STEADY, *options, "max_duration=4ep")
    short = new_run(done.parents[2], *STEADY, *options, "max_duration=2ep") if options else tmp_path / "short"
    if not options:
        shutil.copytree(done, short)
    assert train(planned) == 0 and (not options or train(short) == 0)
    assert read_run(short).is_done
    assert main(["resume", str(short), "max_duration=4ep", "--jobs", str(FAMILIES)]) == 0
    assert find_differences(load_state(planned), load_state(short)) == []
    assert read_run_metrics(planned) == read_run_metrics(short)
    events = read_events(short)
    (extended,) = [event for event in events if event["event"] == "extended"]
    assert (extended["from"], extended["to"], extended["differences"], extended["step"]) == ("2ep", "4ep", "", 10)
    assert read_env(short)["choices"]["max_duration"]["reason"].endswith("as if it had been planned so from the start")
    assert events[-1]["event"] == "done" and find_changes(short) == []


@pytest.mark.slow
def test_a_kill_before_the_next_checkpoint_leaves_a_run_that_knows_its_options(done, tmp_path):
    run = shutil.copytree(done, tmp_path / "run")
    old = read_config(run)
    longer = replace(old, max_duration="4ep")
    record_extension(run, plan(run, old, "4ep"), longer)
    assert find_changes(run) == [], "killed before the options were written"
    save_config(longer, run / CONFIG)
    assert find_changes(run) == [] and not read_run(run).is_done
    save_config(replace(old, max_duration="3ep"), run / CONFIG)
    assert [change.path.name for change in find_changes(run)] == [CONFIG], "nobody recorded this one"


def test_a_schedule_that_knows_its_end_is_extended_only_if_told(done, capsys):
    old = read_config(done, schedule=ScheduleSettings(name="cosine"))
    with pytest.raises(UserError) as caught:
        plan(done, old, "4ep")
    assert "schedule.name=cosine ends where the run ends" in str(caught.value)
    assert f"trainyard resume {done} max_duration=4ep --inexact" in str(caught.value)
    assert "cosine" in plan(done, old, "4ep", allow_inexact=True).differences
    command = ["resume", str(done), "--dry", "--inexact", "--jobs", str(FAMILIES)]
    assert main([*command, "max_duration=4ep"]) == 0
    assert "4ep: 20 steps, 5 in an epoch" in capsys.readouterr().out
    assert main([*command, "max_duration=1ep"]) == 2
    assert "does not extend it" in capsys.readouterr().err
    assert read_run(done).is_done and read_config(done).max_duration == "2ep"


def test_an_evaluation_that_only_the_end_made_due_is_named(done):
    old = read_config(done, eval_every="3st")
    with pytest.raises(UserError, match=r"it was evaluated at its end, step 10, where eval_every=3st is not due"):
        plan(done, old, "4ep")
    assert "step 10" in plan(done, old, "4ep", allow_inexact=True).differences
    assert plan(done, replace(old, eval_every="5st"), "4ep").differences == ""


@pytest.mark.parametrize("length", ["1ep", "2ep", "9st", "30min"])
def test_only_a_larger_length_of_a_comparable_unit_extends(done, length):
    old = read_config(done)
    if length == "2ep":
        assert plan(done, old, length) is None
        return
    with pytest.raises(UserError, match=r"does not extend it: expected more than 2ep"):
        plan(done, old, length)
    assert plan(done, old, "11st").differences == "", "an epoch has five steps"


def test_a_run_that_waited_long_enough_needs_more_patience(done, tmp_path):
    old = read_config(done, patience=2)
    path = done / "events.jsonl"
    text = path.read_text()
    try:
        path.write_text(text.replace('"event": "done"', '"event": "out_of_patience"'))
        with pytest.raises(
            UserError, match=r"ended at step 10 because patience=2 was over.*patience=4 max_duration=4ep"
        ):
            plan(done, old, "4ep")
        new = replace(old, patience=4, max_duration="4ep")
        assert plan_extension(done, old, new, FAMILIES, allow_inexact=False) is not None
    finally:
        path.write_text(text)


def test_the_same_name_with_another_length_says_how_to_extend(done, capsys):
    root = done.parents[1]
    options = [f"data.path={read_config(done).data.path}", *STEADY, "max_duration=4ep"]
    command = ["run", "stripes", "--name", done.name, "--runs", str(root), "--jobs", str(FAMILIES), *options]
    assert main(command) == 2
    assert f"To extend it: trainyard resume {done} max_duration=4ep" in capsys.readouterr().err
