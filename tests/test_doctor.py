"""`trainyard doctor`: what it concludes from its measurements; tests marked long plant what slows a job down."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

from tests.training import FAMILIES, run_as_command
from trainyard import cli
from trainyard.measure import Summary
from trainyard.tools.doctor import (
    COMPUTE,
    LOADER,
    TOGETHER,
    Diagnosis,
    Fault,
    decode_diagnosis,
    encode_diagnosis,
    format_diagnosis,
    judge_input,
)
from trainyard.tools.stage_sampler import find_stage


def make_diagnosis(compute: float, loader: float, together: float, *faults: Fault) -> Diagnosis:
    """Return what was measured of a job, in samples per second."""
    rates = {
        name: Summary.from_values([rate] * 3)
        for name, rate in zip((COMPUTE, LOADER, TOGETHER), (compute, loader, together), strict=True)
    }
    found = Diagnosis(1, rates, {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}, {"decode": 0.7, "idle": 0.3})
    found.faults += faults
    judge_input(found)
    return found


def test_a_loader_that_the_steps_wait_for_is_the_verdict_with_what_fixing_it_gives():
    found = make_diagnosis(705, 410, 402)
    assert found.verdict is not None and found.verdict.name == "input: decode"
    assert found.verdict.gain == pytest.approx(705 / 402)
    lines = format_diagnosis("job", found)
    assert lines[-1] == "verdict: job: input: decode; fixing it gives at most x1.75"
    assert "a step          forward 3.0 ms (30%), backward 6.0 ms (60%), optimizer 1.0 ms (10%)" in lines


@pytest.mark.parametrize(("loader", "together"), [(5000, 690), (5000, 400), (700, 660)])
def test_a_job_whose_loader_keeps_up_is_healthy(loader, together):
    """Where both share the cores of a CPU, together they are slower than the steps alone, whatever the loader."""
    found = make_diagnosis(700, loader, together)
    assert found.verdict is None
    assert format_diagnosis("job", found)[-1].startswith(
        "verdict: job: healthy: limited by the step itself; the loader"
    )


def test_of_several_faults_the_one_that_costs_most_is_the_verdict_and_all_are_named():
    small, large = (
        Fault("slow disk", "reads 3 MiB/s", "stage it", gain=1.3),
        Fault("few cores", "1 of 8", "ask", gain=4),
    )
    unknown = Fault("small shared memory", "64 MiB", "--shm-size=1g")
    found = make_diagnosis(700, 5000, 690, small, unknown, large)
    assert found.verdict == large
    named = [line for line in format_diagnosis("job", found) if line.startswith("found: ")]
    assert [line.split(": ")[1] for line in named] == ["few cores", "slow disk", "small shared memory"]
    assert named[0] == "found: few cores: 1 of 8. Without it at most x4.00. Try: ask."
    assert decode_diagnosis(json.loads(json.dumps(encode_diagnosis(found)))) == found


def test_the_stage_of_a_loaders_thread_is_the_innermost_of_the_data_package():
    def stack(*files: str) -> object:
        frame = None
        for file in files:
            frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=f"/x/{file}"), f_back=frame)
        return frame

    stages = {
        "idle": stack("trainyard/data/prefetch.py"),
        "decode": stack(
            "trainyard/data/prefetch.py", "trainyard/data/loader.py", "trainyard/data/decode_dali.py", "c.py"
        ),
        "read": stack("trainyard/data/decode_dali.py", "trainyard/data/shards.py", "numpy/core.py"),
        "prepare": stack("threading.py", "trainyard/data/loader.py"),
    }
    assert {stage: find_stage(frame) for stage, frame in stages.items()} == {stage: stage for stage in stages}


@pytest.mark.slow
def test_the_command_measures_a_job_and_writes_what_it_found(tmp_path):
    trace = tmp_path / "trace.json"
    words = ["doctor", "stripes", "--jobs", str(FAMILIES), "--seconds", "0.5", f"data.cache={tmp_path / 'cache'}"]
    words += ["--results", str(tmp_path / "results"), "--trace", str(trace)]
    done = run_as_command(partial(cli.main, words), tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert "verdict: stripes: " in done.stdout and "step alone" in done.stdout
    [path] = (tmp_path / "results").glob("doctor-*.jsonl")
    head, found = map(json.loads, path.read_text().splitlines())
    assert head["options"]["job"] == "stripes" and set(found["rates"]) == {COMPUTE, LOADER, TOGETHER}
    assert all(rate["median"] > 0 for rate in found["rates"].values())
    assert set(found["step_ms"]) == {"forward", "backward", "optimizer"} and min(found["step_ms"].values()) > 0
    assert {"threads", "save", "disk", "cores", "cpu time", "shared memory"} <= set(found["facts"])
    assert len(found["operators"]) == 5 and json.loads(trace.read_text())["traceEvents"]
    assert not list(tmp_path.glob("here/runs/*")), "its run is thrown away"


def test_a_number_of_ranks_that_makes_no_sense_is_refused(capsys):
    assert cli.main(["doctor", "stripes", "--jobs", str(FAMILIES), "--ranks", "0"]) == 2
    assert "expected a rank or more" in capsys.readouterr().err
