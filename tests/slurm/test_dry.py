"""The batch scripts, compared with golden texts that a person has reviewed. Needs no Slurm."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import trainyard
from trainyard.cli import main
from trainyard.cluster.description import load_cluster
from trainyard.cluster.options import OPTIONS, merge_options, read_options
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.launch.batch_script import JobDependency
from trainyard.launch.submit import render_batch_script
from trainyard.plan.make_plan import make_plan
from trainyard.plan.resources import Code, ResourceRequest

ATTEMPT = Path(trainyard.__file__).parent / "launch" / "attempt.sh"
GOLDEN = Path(__file__).parent / "golden"
CLUSTER = str(GOLDEN / "cluster.yaml")
REQUESTS = [
    (hw, gpus, nodes)
    for hw in ("p100", "2080ti", "a5000", "a100")
    for gpus, nodes in ((1, 0), (4, 0), (8, 0), (8, 2))
    if (hw, nodes) != ("p100", 2)  # eight P100 are two nodes anyway
]


def make_arguments(*arguments: str) -> list[str]:
    return [
        "submit",
        "fingerprint_1m",
        *arguments,
        "--dry",
        "--cluster",
        CLUSTER,
        "--runs",
        "/shared/runs",
    ]


def extract_script(printed: str) -> str:
    return printed[printed.index("#!/bin/bash") :]


@pytest.mark.slow
@pytest.mark.parametrize(("hw", "gpus", "nodes"), REQUESTS)
def test_the_batch_script_for_each_card_matches_the_golden_text(hw, gpus, nodes, capsys):
    words = ["--hw", hw, "--gpus", str(gpus), *(["--nodes", str(nodes)] if nodes else [])]
    assert main(make_arguments(*words)) == 0
    printed = capsys.readouterr().out
    golden = GOLDEN / f"{hw}-{gpus}{f'-on-{nodes}' if nodes else ''}.sh"
    assert extract_script(printed) == golden.read_text()


def test_the_second_array_of_a_sweep_waits_for_its_packing_and_for_the_first_array():
    assert JobDependency(after_done=("1",), after_end="2").option == "afterok:1,afterany:2"


def test_every_golden_text_is_compared():
    assert len(list(GOLDEN.glob("*.sh"))) == len(REQUESTS) == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "split"),
    [(1, "64 x 8 micro-batches x 1 rank"), (4, "64 x 2 micro-batches x 4 ranks"), (8, "64 x 1 micro-batch x 8 ranks")],
)
def test_the_global_batch_is_the_same_for_every_card_and_number_of_gpus(gpus, split, capsys):
    for hw in ("p100", "2080ti", "a5000", "a100"):
        assert main(make_arguments("--hw", hw, "--gpus", str(gpus))) == 0
        assert f"512 = {split}\n" in capsys.readouterr().out


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    """Type `make submit` for eight GPUs of the golden cluster, without submitting."""
    return subprocess.run(
        [
            "make",
            "--no-print-directory",
            "--old-file=.venv/.done",
            "submit",
            "JOB=fingerprint_1m",
            "GPUS=8",
            "DRY=1",
            f"CLUSTER={CLUSTER}",
            *words,
        ],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed, as in container images")
def test_make_submit_prints_the_same():
    made = run_make("HW=a100", "RUNS=/shared/runs")
    assert made.returncode == 0, made.stderr
    assert extract_script(made.stdout) == (GOLDEN / "a100-8.sh").read_text()
    assert "needs DATA=folder" in made.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed, as in container images")
def test_make_submit_asks_for_synthetic_samples_only_with_1():
    made = run_make("SYNTHETIC=1")
    assert "960 synthetic samples" in made.stdout and "needs DATA" not in made.stderr, made.stderr
    refused = run_make("SYNTHETIC=5000")
    assert (
        refused.returncode == 2 and 'expected 1. For a number of samples: SET="data.synthetic=5000"' in refused.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hw", "a10"], "HW=a10: cluster has no such GPU type. Nearest: a100. It has: p100 (4 x 4), 2080ti (2 x 8)"),
        (["--gpus", "64"], "64 GPUs requested, but no GPU type of cluster has that many: p100 (4 x 4)"),
        (["--hw", "a100", "--gpus", "17"], "a100 has 2 nodes of 8: at most GPUS=16"),
        (
            ["--hw", "a100", "--gpus", "9"],
            "9 GPUs cannot be split evenly over 2 nodes of 8 a100. Request a multiple of 2",
        ),
        (["--hw", "p100", "--gpus", "8", "--nodes", "1"], "Request NODES=2 or 4"),
        (["--hw", "2080ti", "--time", "3d"], "TIME=3d: partition turing of 2080ti allows at most 1d"),
        (["--time", "soon"], "'soon' is not a time"),
        (["--gpus", "0"], "GPUS=0: a job needs at least one GPU"),
        (["--hw", "p100", "precision=bf16"], "precision=bf16 requested, but this device (sm_60) runs only fp32"),
    ],
)
def test_an_impossible_request_gets_a_one_line_error_before_submission(words, expected, capsys):
    assert main(make_arguments(*words)) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_a_run_folder_that_slurm_cannot_write_or_nodes_cannot_see_is_refused(tmp_path, capsys):
    from trainyard.launch.submit import check_paths

    cluster = load_cluster(GOLDEN / "cluster.yaml")
    check_paths(cluster, [Path("/shared/my runs/it's")])
    with pytest.raises(
        UserError, match=r"/scratch/runs: is not below a folder that the nodes of cluster share.*\(/shared\)"
    ):
        check_paths(cluster, [Path("/scratch/runs")])
    for name in ("a\n#SBATCH --uid=0", "100%", "back\\slash"):
        with pytest.raises(UserError, match="Slurm interprets %, backslash and line breaks in paths"):
            check_paths(cluster, [Path("/shared") / name])


NODE_FAILURE = """\
srun: error: Node failure on a-0
slurmstepd-a-0: error: *** STEP 7.0 ON a-0 CANCELLED AT 2026-11-22T07:10:09 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***
"""
PREEMPTION = "slurmstepd-a-0: error: *** JOB 7 ON a-0 CANCELLED AT 2026-11-22T07:10:09 DUE TO PREEMPTION ***\n"


@pytest.mark.parametrize(
    ("earlier", "log_text", "signalled", "cause"),
    [
        ("", NODE_FAILURE, True, "node_failure"),
        ("", PREEMPTION, True, "preempted"),
        (PREEMPTION, "", False, "node_failure"),
        (NODE_FAILURE, "", True, "preempted"),
        ("", "", True, "preempted"),
    ],
)
def test_the_cause_of_an_end_is_read_from_the_attempts_own_log_if_slurm_does_not_answer(
    earlier: str, log_text: str, signalled: bool, cause: str, tmp_path: Path
):
    """The attempt in question is the second, 7-1; the log of the first, 7-0, does not count."""
    programs, notes = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    (programs / "sinfo").write_text("#!/bin/sh\necho slurm_load_node: Unable to contact slurm controller >&2\nexit 1\n")
    (programs / "sinfo").chmod(0o755)
    notes.mkdir()
    shutil.copy(ATTEMPT, notes / "attempt.sh")
    starts = [f'{{"event":"start","job":"7","attempt":{n},"nodes":"a-0","checkpoint":"{n}"}}\n' for n in (0, 1)]
    end = '{"event":"end","job":"7","attempt":0,"code":-1,"cause":"","action":"slurm","reason":""}\n'
    (notes / "attempts.jsonl").write_text(starts[0] + end + starts[1])
    began = [f"trainyard: attempt 7-{n} on a-0\n" for n in (0, 1)]
    log = notes / "7_0_log.err"
    log.write_text(began[0] + earlier + began[1] + log_text)
    if signalled:
        (notes / "signal-7-1").write_text("SIGTERM 1\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "a-1", "SLURM_JOB_PARTITION": "p"}
    limits = {"TRAINYARD_LIMITS": "preempted=9 node_failure=9", "TRAINYARD_RUN": str(tmp_path)}
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", **limits, **slurm}
    with log.open("a") as errors:
        command = ["bash", "-c", f"source {notes / 'attempt.sh'} begin"]
        assert subprocess.run(command, env=environ, stderr=errors, timeout=60).returncode == 0
    ends = [json.loads(line) for line in (notes / "attempts.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["cause"]) for line in ends if line["event"] == "end"][1:] == [(1, cause)]


# Options of sbatch


def render(
    tmp_path: Path, hw: str = "a5000", *, gpus: int = 4, options: dict[str, str] | None = None, **changes
) -> str:
    """Return the batch script for a cluster file with changes: keys of the GPU type in `kind`, else of the file."""
    content = yaml.safe_load((GOLDEN / "cluster.yaml").read_text())
    content["gpus"][hw].update(changes.pop("kind", {}))
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    request = ResourceRequest(gpus=gpus, hw=hw, options=read_options(options or {}))
    plan = make_plan(TrainConfig(job="stripes"), load_cluster(path), request)
    run = Path("/shared/runs/stripes/one")
    return render_batch_script(plan, [run], folder=run / "slurm", code=Code(run / "code", run / "code" / "jobs"))


def list_options(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}


@pytest.mark.parametrize(
    ("stated", "removed", "added"),
    [
        ({"account": "other"}, "account=biometrics", "account=other"),
        ({"qos": "high"}, "qos=normal", "qos=high"),
        ({"partition": "gpu,long"}, "partition=gpu", "partition=gpu,long"),
        ({"constraint": "a5000&ib"}, "constraint=a5000", "constraint='a5000&ib'"),
        ({"reservation": "friday"}, "", "reservation=friday"),
        ({"exclude": "a-[1,3]"}, "", "exclude='a-[1,3]'"),
        ({"mem": "64G"}, "mem=240GB", "mem=64G"),
        ({"mem": "none"}, "mem=240GB", ""),
        ({"comment": "it's $(touch HACKED)"}, "", """comment='it'"'"'s $(touch HACKED)'"""),
        ({"account": ""}, "", ""),
    ],
)
def test_an_option_of_the_line_overrides_the_cluster_file(stated, removed, added, tmp_path):
    before, after = list_options(render(tmp_path)), list_options(render(tmp_path, options=stated))
    assert before - after == ({removed} if removed else set())
    assert after - before == ({added} if added else set())


@pytest.mark.parametrize(
    ("changes", "removed", "added"),
    [
        ({"kind": {"account": "cheap", "qos": "spare"}}, "account=biometrics qos=normal", "account=cheap qos=spare"),
        ({"kind": {"memory_gib_per_gpu": 0}}, "mem=240GB", ""),
        ({"kind": {"gpu_option": "gpus-per-node"}}, "gres=gpu:4", "gpus-per-node=4"),
        ({"kind": {"gpu_option": "gpus-per-node", "gres": "gpu:a5000"}}, "gres=gpu:4", "gpus-per-node=a5000:4"),
        ({"kind": {"partition": "gpu,gpu-long"}}, "partition=gpu", "partition=gpu,gpu-long"),
        ({"kind": {"gres": "gpu:1g.10gb", "card": {"sm": 80, "memory_gib": 9}}}, "gres=gpu:4", "gres=gpu:1g.10gb:4"),
        ({"time_default": "8:00:00"}, "time=2880", "time=480"),
        ({"sbatch": {"reservation": "friday", "mail-type": "END"}}, "", "reservation=friday"),
    ],
)
def test_a_cluster_file_says_how_to_request(changes, removed, added, tmp_path):
    before, after = list_options(render(tmp_path)), list_options(render(tmp_path, **changes))
    assert (before - after, after - before) == (set(removed.split()), set(added.split()))


def test_the_line_overrides_what_the_cluster_file_passes_on_to_sbatch(tmp_path):
    passed = {"sbatch": {"reservation": "friday", "comment": "ours"}}
    script = render(tmp_path, options={"reservation": "monday", "comment": "mine"}, **passed)
    assert {"reservation=monday", "comment=mine"} <= list_options(script)


def test_set_up_of_each_node_is_a_step_of_its_own_and_its_failure_ends_the_attempt(tmp_path):
    lines = ['mkdir -p "/local/it\'s"', "echo $SLURM_NODEID"]
    script = render(tmp_path, gpus=16, node_setup=lines)
    setup, ranks = (
        script.index("srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 "),
        script.index("srun --unb"),
    )
    assert script.index("attempt.sh begin") < setup < ranks
    step = script[setup : script.index(': >|"$TRAINYARD_RUN/slurm/started-')]
    assert step.rstrip().endswith("|| exit")
    words = shlex.split(step)
    assert words[words.index("-c") + 1].splitlines() == ["set -e", *lines]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("account", "a\n#SBATCH --uid=0", "found a line break"),
        ("qos", "two words", "without spaces and quotes"),
        ("mem", "much", "expected a number with a unit, such as 64G, or none"),
        ("comment", "bell\a", "control character"),
        ("comment", "back\\slash", "no backslash"),
    ],
)
def test_a_value_that_sbatch_could_misread_is_refused(name, value, said):
    with pytest.raises(UserError, match=rf"^--{name} .*{said}"):
        read_options({name: value})


def test_options_are_kept_on_resume_as_far_as_they_fit_the_nodes():
    previous = {"account": "a", "partition": "p", "mem": "64G", "comment": "c"}
    assert merge_options(previous, same_nodes=True, stated={"mem": "32G"}) == {**previous, "mem": "32G"}
    assert merge_options(previous, same_nodes=False, stated={"qos": "q"}) == {
        "account": "a",
        "comment": "c",
        "qos": "q",
    }
    assert "account" not in merge_options(previous, same_nodes=True, stated={"account": ""})


def test_the_command_line_takes_every_option_and_shows_it(capsys):
    values = {name: "64G" if name == "mem" else f"x{name}" for name in OPTIONS}
    assert main(make_arguments("--hw", "a5000", *(f"--{name}={value}" for name, value in values.items()))) == 0
    printed = capsys.readouterr().out
    assert {f"{name}={value}" for name, value in values.items()} <= list_options(extract_script(printed))
    assert "options     account xaccount, " in printed and "  (requested)\n" in printed
