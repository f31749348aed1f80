"""`trainyard doctor`: what it concludes from its measurements; tests marked long plant what slows a job down."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest

from tests.doctor_faults import format_matrix, list_plants, measure_matrix
from tests.run_folders import RunFolder
from tests.training import FAMILIES, run_as_command
from trainyard import cli
from trainyard.choice import Choice
from trainyard.measure import Summary
from trainyard.runs.folder import read_creation_time, record_choices
from trainyard.runs.history import parse_time
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
    judge_ranks,
    measure_cpu_shares,
)
from trainyard.tools.gpu_facts import describe_node
from trainyard.tools.stage_sampler import find_stage


def make_diagnosis(compute: float, loader: float, together: float, *faults: Fault) -> Diagnosis:
    """Return what was measured of a job, in samples per second."""
    rates = {
        name: Summary.from_values([rate] * 3)
        for name, rate in zip((COMPUTE, LOADER, TOGETHER), (compute, loader, together), strict=True)
    }
    found = Diagnosis(1, rates, {"forward": 3.0, "backward": 6.0, "optimizer": 1.0})
    found.loader_shares = {"decode": 0.7, "idle": 0.3}
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


def test_a_rank_is_slow_if_it_is_so_in_almost_all_turns_and_not_if_others_work_hits_one_after_the_other():
    even, late = [0.1] * 9, [0.13] * 9
    by_chance = [0.1, 0.3, 0.1, 0.3, 0.1, 0.3, 0.1, 0.3, 0.3]
    answers = []
    for seconds in ([even, late], [even, even, late], [even, even], [by_chance[::-1], by_chance], [even, [0.105] * 9]):
        found = Diagnosis(len(seconds))
        judge_ranks(found, seconds, ["node1"] * len(seconds))
        answers.append([fault.found.split(" on ")[0] for fault in found.faults])
    assert answers == [["rank 1"], ["rank 2"], [], [], []]


def test_a_loader_that_seems_slow_in_single_turns_is_not_a_fault():
    """Other processes take the cores now in this turn, now in that."""
    slowdowns = {(0.5, 0.9, 1.3, 4.0, 1.2): False, (1.3, 1.2, 1.3, 4.0, 1.2): True, (1.05, 1.0, 1.05, 1.1, 1.0): False}
    for turns, is_fault in slowdowns.items():
        found = make_diagnosis(705, 410, 402)
        found.faults, found.slowdowns = [], list(turns)
        judge_input(found)
        assert bool(found.faults) == is_fault, turns


def test_threads_that_only_compute_get_the_cores_that_nobody_else_uses():
    share = measure_cpu_shares(1, seconds=0.1)
    assert 0 < share.own <= 1 and share.others >= 0 and share.stolen >= 0


def test_the_node_of_a_card_is_compared_with_the_cores_of_this_process(tmp_path):
    card, node = tmp_path / "bus/pci/devices/0000:1b:00.0", tmp_path / "devices/system/node/node1"
    assert describe_node("00000000:1b:00.0", tmp_path) == "not measured: the kernel does not say"
    card.mkdir(parents=True)
    node.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    own = os.sched_getaffinity(0)
    (node / "cpulist").write_text(f"{min(own)},100000-100003\n")
    assert describe_node("00000000:1b:00.0", tmp_path) == f"1, with 1 of this process's {len(own)} cores"


def test_a_run_says_from_its_record_what_its_time_went_to(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    run = folder.run
    record_choices(run, {"device": Choice("CPU, 2 cores", "no GPU")})
    assert cli.main(["doctor", "--run", str(run)]) == 0
    unknown = f"verdict: {run.name}: time by activity is not recorded\n"
    assert capsys.readouterr().out == unknown
    line = {"kind": "train", "step": 100, "samples_per_s": 50.0, "elapsed_s": 200.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    created = parse_time(read_creation_time(run))
    for wait_s, expected in (
        (50.0, "input; without it the run would have been x1.33 as fast"),
        (0.0, "healthy: 95% of"),
    ):
        (run / "events.jsonl").unlink(missing_ok=True)
        folder.add_event(created + 5, "start", 0, spent={"preparing": 5.0})
        folder.add_event(
            created + 200, "done", 100, spent={"preparing": 10.0, "training": 190 - wait_s, "input": wait_s}
        )
        assert cli.main(["doctor", "--run", str(run)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "recorded        100 steps, 200.0 s, 50.0 samples/s"
        assert f"useful steps    {190 - wait_s:.1f} s ({(190 - wait_s) / 200:.0%})" in said
        assert "device          CPU, 2 cores  (no GPU)" in said
        assert said[-1].startswith(f"verdict: {run.name}: {expected}")
    assert cli.main(["doctor"]) == cli.main(["doctor", "stripes", "--run", str(run)]) == 2


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups and mounts need root")
def test_each_planted_fault_is_named_and_below_its_threshold_a_run_is_healthy(tmp_path):
    """DOCTOR_REPEATS=N plants each N times; `python -m tests.doctor_faults` also writes the table."""
    lines = measure_matrix(list_plants(), tmp_path, repeats=int(os.environ.get("DOCTOR_REPEATS", "1")))
    print("\n".join(format_matrix(lines)))
    assert len(lines) == 26
    assert not [line for line in lines if line["right"] != line["of"]]


@pytest.mark.parametrize("flag", ["--trace", "--results"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(flag, capsys):
    assert cli.main(["doctor", "stripes", "--jobs", str(FAMILIES), flag, "/proc/nothing/x"]) == 2
    assert flag in capsys.readouterr().err
