"""Submitting to a real Slurm: quickly, with any names that users choose, and with one message per mistake."""

import grp
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.images import make_unmeasured_environ
from tests.slurm.cluster_runs import (
    LAB_FILE,
    Start,
    find_rank_pids,
    make_starter,
    read_ends,
    read_last_step,
    read_lines,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.test_memory_prediction import store_plan
from tests.training import FAMILIES, find_differences, load_state, new_run, train_on_ranks
from trainyard.cluster.description import load_cluster
from trainyard.config import compose as configs
from trainyard.plan.make_plan import make_plan
from trainyard.plan.resources import ResourceRequest
from trainyard.runs.folder import read_env

if TYPE_CHECKING:
    from tests.slurm.conftest import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return make_starter(tmp_path / "runs", tmp_path / "cache")


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    """A copy of the lab's cluster file, for tests to edit."""
    return Path(shutil.copy(LAB_FILE, tmp_path / "mine.yaml"))


def change_gpus(path: Path, hw: str, **values: object) -> None:
    content = yaml.safe_load(path.read_text())
    content["gpus"][hw].update(values)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def submit_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: object) -> str:
    """Return the error of a submission that must fail and leave nothing behind."""
    runs = tmp_path / "runs"
    assert trainyard("submit", "stripes", "--jobs", FAMILIES, "--runs", runs, *words) == 2
    assert not list(runs.glob("*/*")), "a run folder was left behind"
    return capsys.readouterr().err


def test_submitting_loads_no_torch_and_reads_a_stored_prediction(lab, tmp_path):
    words = ["stripes", "--jobs", FAMILIES, "--runs", tmp_path / "runs", "--cluster", LAB_FILE, "--hw", "a5000"]
    code = (
        "import sys; from trainyard.cli import main; code = main(sys.argv[1:]); "
        "loaded = {'torch', 'h5py', 'nvidia', 'matplotlib'} & set(sys.modules); print('loaded', sorted(loaded)); "
        "sys.exit(code)"
    )
    environ = [f"--unset={name}" for name in os.environ.keys() - make_unmeasured_environ().keys()]
    environ.append(f"XDG_CACHE_HOME={tmp_path}")
    for extra in (["--no-plan"], [], []):
        output = lab.run("env", *environ, sys.executable, "-c", code, "submit", *words, *extra, cwd=Path.cwd())
        assert "loaded []" in output
        job = next(line.split()[-1] for line in output.splitlines() if line.startswith("submitted"))
        lab.run("scancel", job)
        runs = sorted((tmp_path / "runs" / "stripes").iterdir(), key=lambda run: run.stat().st_ctime)
        config = configs.load_config(runs[0] / "config.yaml", FAMILIES)
        plan = make_plan(config, load_cluster(LAB_FILE), ResourceRequest(hw="a5000"))
        store_plan(plan, {"XDG_CACHE_HOME": str(tmp_path)}, FAMILIES)
    recorded = [read_env(run)["choices"]["predicted_memory"]["value"] for run in runs]
    assert sorted(recorded) == ["13.00 GiB", "13.00 GiB", "not checked"]


def test_spaces_and_quotes_in_a_folder_and_shell_code_in_a_value_are_plain_text(lab, tmp_path):
    root = tmp_path / 'my "runs" $(touch HACKED)' / "it's; here"
    run = make_starter(root, tmp_path / "ca che")("plain", "model.diary=`touch HACKED`$(touch HACKED)", "--hw", "a5000")
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]
    assert not list(tmp_path.rglob("HACKED")) and not Path("HACKED").exists()
    Path("`touch HACKED`$(touch HACKED)").unlink()  # the diary, in the folder that was submitted from


def test_names_that_a_folder_cannot_have_are_refused(capsys, tmp_path):
    for name in ("a b", "it's", "two\nlines", "$(id)", "-rf"):
        assert "cannot name a run" in submit_refused(capsys, tmp_path, f"--name={name}", "--cluster", LAB_FILE)


def test_an_unknown_partition_is_refused_with_the_nearest_name(capsys, tmp_path, lab_file):
    change_gpus(lab_file, "a5000", partition="a500")
    error = submit_refused(capsys, tmp_path, "--hw", "a5000", "--cluster", lab_file)
    assert "partition is 'a500', which this Slurm does not have. Nearest: a5000. It has: p100" in error
    assert error.count("\n") == 1


def test_the_cluster_file_of_another_slurm_is_refused(capsys, tmp_path, lab_file):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "slurm_name": "tower"}))
    error = submit_refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "describes the Slurm 'tower', but 'lab' answers here" in error and error.count("\n") == 1


def test_more_time_than_the_partition_allows_is_refused_before_submission(capsys, tmp_path, lab_file):
    change_gpus(lab_file, "p100", partition="short")
    error = submit_refused(capsys, tmp_path, "--hw", "p100", "--time", "2h", "--cluster", lab_file)
    assert "partition short allows at most 1 minute" in error and error.count("\n") == 1


def test_what_only_slurm_can_refuse_is_reported_in_its_own_words(capsys, tmp_path, lab_file):
    change_gpus(lab_file, "a100", gres="gpu:a1000")
    error = submit_refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "Slurm refused the job: sbatch: error: " in error and f"trainyard cluster-check {lab_file}\n" in error
    assert "Traceback" not in error


MODULE = """() { [ "$2" = there ] || { echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 1; }; }"""


def test_a_container_image_and_a_module_that_are_not_there_are_refused(capsys, tmp_path, lab_file, monkeypatch):
    monkeypatch.setenv("BASH_FUNC_module%%", MODULE)
    container = {"kind": "apptainer", "image": f"{tmp_path}/yard-{{target}}.sif"}
    setup = ["module load there", "export MODULES=1", "module load apptainer/9"]
    content = {**yaml.safe_load(lab_file.read_text()), "container": container, "setup": setup}
    lab_file.write_text(yaml.safe_dump(content))
    words = ("--hw", "a100", "--cluster", lab_file)
    error = submit_refused(capsys, tmp_path, *words)
    image = f"there is no {tmp_path}/yard-cuda13.sif. Build it: make sif HW=a100-80-sxm. Or correct the path."
    assert error == f"UserError: {lab_file}: container.image: {image}\n"
    (tmp_path / "yard-cuda13.sif").touch()
    module = "'module load apptainer/9' fails here: ERROR: Unable to locate a modulefile for 'apptainer/9'."
    assert f"{lab_file}: setup: {module} Correct it" in submit_refused(capsys, tmp_path, *words)
    assert trainyard("cluster-check", lab_file) == 1
    assert f"wrong  setup: {module}" in (checked := capsys.readouterr().out) and "make sif HW=p100-16-pcie" in checked


def test_a_command_that_no_node_has_is_named_with_the_node_and_tried_once_more(lab, tmp_path, lab_file, capsys, start):
    (tmp_path / "yard-cuda13.sif").touch()
    container = {"kind": "apptainer", "image": f"{tmp_path}/yard-{{target}}.sif"}
    lab_file.write_text(yaml.safe_dump({**yaml.safe_load(lab_file.read_text()), "container": container}))
    assert shutil.which("apptainer") is None
    run = start("none", "--hw", "a100", cluster=lab_file)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "crash", "requeue"), (1, "no_progress", "stop")]
    capsys.readouterr()
    assert trainyard("why", run) == 0
    why = capsys.readouterr().out
    assert re.search(r"on (a100-\d): there is no apptainer\n", why)
    assert "cause: a command of the site was not found\n" in why and "user error" not in why


def test_a_run_folder_that_the_nodes_do_not_see_is_refused(capsys, tmp_path, lab_file):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "shared": ["/home"]}))
    error = submit_refused(capsys, tmp_path, "--hw", "a100", "--cluster", lab_file)
    assert "is not below a folder that the nodes of mine share with this machine (/home)" in error


def test_a_job_without_data_is_refused_before_submission(capsys, tmp_path):
    assert "stripes needs data: data.path=FOLDER" in submit_refused(
        capsys, tmp_path, "data.synthetic=0", "--cluster", LAB_FILE
    )
    error = submit_refused(capsys, tmp_path, f"data.path={tmp_path / 'nowhere'}", "--cluster", LAB_FILE)
    assert "nowhere: no such folder" in error


def test_without_slurm_the_error_says_what_works_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    error = submit_refused(capsys, tmp_path, "--cluster", LAB_FILE)
    assert error.startswith("UserError: There is no Slurm here: sbatch is not on PATH.")
    assert "trainyard submit stripes --local" in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--gpus", 0], "--gpus 0: a job needs at least one rank"), (["--time", "soon"], "is not a time")],
)
def test_an_invalid_local_request_leaves_nothing_behind(words, expected, capsys, tmp_path):
    assert expected in submit_refused(capsys, tmp_path, "--local", f"data.cache={tmp_path / 'cache'}", *words)


def test_a_local_submission_trains_in_the_background_with_the_same_code(tmp_path, capsys):
    here = [
        "--local",
        "--cpu-ranks",
        2,
        "--jobs",
        FAMILIES,
        "--runs",
        tmp_path / "runs",
        f"data.cache={tmp_path / 'cache'}",
    ]
    assert trainyard("submit", "stripes", "--name", "here", "data.threads=1", *here) == 0
    assert "memory      checked at start  (ranks on the CPU; " in capsys.readouterr().out
    run = tmp_path / "runs" / "stripes" / "here"
    wait(
        "the end",
        lambda: read_lines(run / "events.jsonl")[-1:] and read_lines(run / "events.jsonl")[-1]["event"] == "done",
    )
    assert read_lines(run / "events.jsonl")[0]["world_size"] == 2
    assert read_env(run)["choices"]["predicted_memory"]["value"] == "checked at start"
    other = new_run(tmp_path / "other")
    assert train_on_ranks(other, 2, rendezvous="m") == [0, 0]
    assert find_differences(load_state(other), load_state(run)) == []
    wait("the report", lambda: (run / "report.html").is_file())
    capsys.readouterr()
    assert trainyard("status", run) == 0
    assert "done" in capsys.readouterr().out


def test_an_exhausted_budget_ends_the_job(lab, tmp_path, lab_file, start):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "attempts": {"crash": 0, "preempted": 0}}, sort_keys=False))
    slow = ("model.sleep_ms=300", "max_duration=12ep", "--hw", "2080ti")
    run = start("no-second", *slow, cluster=lab_file)
    wait("a first step", lambda: (run / "metrics.jsonl").exists())
    lab.run("scancel", "--signal=USR2", read_slurm_job_id(run))
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "preempted", "stop")]
    assert "budget of 0 restarts" in read_lines(run / "slurm" / "attempts.jsonl")[-1]["reason"]
    assert trainyard("why", run) == 0


def test_a_run_uses_the_grace_time_of_a_partition_to_save_and_is_requeued(lab, tmp_path, lab_file, start):
    change_gpus(lab_file, "a100", partition="a100-grace")
    run = start("graced", "model.sleep_ms=300", "max_duration=8ep", "--hw", "a100", "--gpus", 2, cluster=lab_file)
    wait("step 3", lambda: len(read_lines(run / "metrics.jsonl")) >= 3)
    node = read_lines(run / "slurm" / "attempts.jsonl")[0]["nodes"]
    lab.submit("sleep 1", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", node, "--exclusive")
    wait_for_end(lab, run)
    assert [end[1] for end in read_ends(run)] == ["preempted", "done"]
    resumed = [line for line in read_lines(run / "events.jsonl") if line["event"] == "resume"]
    stopped = [line for line in read_lines(run / "events.jsonl") if line["event"] == "stop"]
    assert resumed[0]["step"] == stopped[0]["step"], "steps were lost though there was time to save"


def test_what_the_environment_says_about_other_jobs_does_not_reach_the_new_one(
    start, lab, lab_file, monkeypatch, capsys
):
    """Neither options of sbatch, nor the variables of the job that one submits from, nor an empty environment."""
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "sbatch": {"export": "NONE"}}, sort_keys=False))
    options = {"SBATCH_EXPORT": "NONE", "SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "1"}
    outer = {"SLURM_RESTART_COUNT": "7", "SLURM_ARRAY_JOB_ID": "99", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "64"}
    outer |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x0", "SLURM_MEM_PER_CPU": "1", "SLURM_EXPORT_ENV": "NONE"}
    for name, value in {**options, **outer}.items():
        monkeypatch.setenv(name, value)
    run = start("clean", "--hw", "a100", cluster=lab_file)
    assert "not used    SBATCH_EXPORT, SBATCH_PARTITION, SBATCH_TIMELIMIT: " in capsys.readouterr().out
    for name in outer:
        monkeypatch.delenv(name)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]


@pytest.mark.parametrize("prints_id", [True, False])
def test_what_a_site_has_sbatch_print_is_no_id_and_a_job_without_one_is_not_left(
    prints_id: bool, start: Start, lab: "Lab", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "bin").mkdir()
    hidden = "" if prints_id else " | sed 's/Submitted batch job.*/Have fun/'"
    script = f"#!/bin/sh\necho '--> job 7 of 10 slots is yours'\n{shutil.which('sbatch')} \"$@\"{hidden}\n"
    (tmp_path / "bin" / "sbatch").write_text(script)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    if prints_id:
        run = start("greeted", "max_duration=1ep", "--hw", "a100")
        assert lab.wait_for(read_slurm_job_id(run), "COMPLETED")
        return
    words = ["--jobs", FAMILIES, "--runs", tmp_path / "runs", "--cluster", LAB_FILE, "--hw", "a100", "--no-plan"]
    assert trainyard("submit", "stripes", f"data.cache={tmp_path / 'cache'}", *words) == 2
    assert f"{tmp_path}/" not in lab.run("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%o")
    assert not list((tmp_path / "runs").glob("*/*"))


HOSTILE = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"},
    **{"MASTER_PORT": "1", "TRAINYARD_MEETING": "x", "TRAINYARD_ATTEMPT": "1-0", "TRAINYARD_TASK": "packing"},
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_LOCALID": "5"},
    **{"SBATCH_PARTITION": "nowhere", "SBATCH_SIGNAL": "USR1@1", "SBATCH_TIMELIMIT": "1", "SBATCH_EXPORT": "NONE"},
    **{"SQUEUE_STATES": "COMPLETED", "SQUEUE_FORMAT": "%u", "SCANCEL_STATE": "PENDING", "SRUN_CPUS_PER_TASK": "99"},
    **{"SUBMITIT_PREEMPT_SIGNAL": "USR1", "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "7", "PMI_RANK": "3"},
    **{"PYTHONPATH": "HERE", "PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "2", "PYTHONUSERBASE": "HERE", "TMPDIR": "/none"},
    **{"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "MKL_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "9"},
    **{"NCCL_SOCKET_IFNAME": "none0", "GLOO_SOCKET_IFNAME": "none0", "LD_PRELOAD": "/none.so", "LD_AUDIT": "/none.so"},
    **{"BASH_ENV": "HERE/leave.sh", "BASH_FUNC_srun%%": "() { exit 7; }", "PROMPT_COMMAND": "exit 7", "IFS": "0"},
}
"""What the shell of a person who submits may hold, and no rank may get."""

SITE_LINES = [
    "module() { echo loaded; }",
    "module load x",
    "cd /",
    "umask 077",
    "shopt -s failglob",
    "export HELLO=yes",
]
SITE_LINES += ["trap 'exit 9' EXIT TERM USR2", "set -euo pipefail"]


def test_neither_the_shell_that_submits_nor_lines_of_the_site_change_a_run(
    start: Start, lab: "Lab", lab_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A warned attempt is requeued, and both give the bits of a run from a clean shell on a cluster without lines."""
    words = ("max_duration=2ep", "model.sleep_ms=150", "checkpoint.every=1000st", "--gpus", 2, "--hw", "a100")
    clean = start("clean", *words)
    content = yaml.safe_load(lab_file.read_text())
    lines = {"setup": SITE_LINES, "node_setup": ["cd /; trap 'exit 0' EXIT; false"], "variables": ["OWN_KEY"]}
    lab_file.write_text(yaml.safe_dump({**content, **lines}, sort_keys=False))
    (tmp_path / "leave.sh").write_text("exit 7\n")
    (tmp_path / "random.py").write_text("raise ImportError('of the folder that one submits from')\n")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as shell:
        shell.setenv("OWN_KEY", "4711")
        for name, value in HOSTILE.items():
            shell.setenv(name, value.replace("HERE", str(tmp_path)))
        odd = start("odd", *words, cluster=lab_file)
    wait("a first step", lambda: read_last_step(odd) >= 1)
    environs = [read_environ(pid) for rank in range(2) for pid in find_rank_pids(odd, rank)]
    lab.run("scancel", "--signal=USR2", read_slurm_job_id(odd))
    for run in (clean, odd):
        wait_for_end(lab, run)
    assert read_ends(odd) == [(0, "preempted", "requeue"), (1, "done", "stop")]
    assert find_differences(load_state(clean), load_state(odd)) == []
    assert len(environs) == 2 and all(environ["HELLO"] == "yes" for environ in environs)
    for environ in environs:
        kept = {name for name, value in HOSTILE.items() if environ.get(name) == value.replace("HERE", str(tmp_path))}
        assert kept <= {"SLURM_PROCID", "SLURM_STEP_ID"}, "of these, Slurm says the same"
    passed = read_env(odd)["passed"]
    assert passed["PATH"] == environs[0]["PATH"] and passed["OWN_KEY"] == "(set)"
    assert environs[0]["OWN_KEY"] == "4711" and not passed.keys() & HOSTILE.keys()


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_an_option_of_the_line_reaches_slurm_as_typed_and_is_kept_on_resume(start, lab, lab_file):
    content = yaml.safe_load(lab_file.read_text())
    lab_file.write_text(yaml.safe_dump({**content, "sbatch": {"hold": True}}, sort_keys=False))
    comment = """it's $(touch HACKED) `touch HACKED` "quoted" #1"""
    run = start("noted", "--hw", "a100", "--comment", comment, "--mem", "3G", "--exclude", "a100-1", cluster=lab_file)
    first = read_slurm_job_id(run)
    assert f"Comment={comment} \n" in (described := lab.run("scontrol", "show", "job", first))
    assert "MinMemoryNode=3G" in described and "ExcNodeList=a100-1" in described
    assert trainyard("cancel", run) == 0
    lab.wait_for(first, "CANCELLED")
    assert trainyard("resume", run, "--jobs", "tests/families", "--mem", "2G") == 0
    second = read_slurm_job_id(run)
    assert f"Comment={comment} \n" in (described := lab.run("scontrol", "show", "job", second))
    assert "MinMemoryNode=2G" in described and "ExcNodeList=a100-1" in described
    assert trainyard("cancel", run) == 0


def test_the_lab_passes_its_own_check(lab):
    checked = subprocess.run(
        [sys.executable, "-m", "trainyard", "cluster-check", str(LAB_FILE)],
        env=lab.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_both_lines_that_a_job_without_data_is_refused_with_can_be_typed(lab, tmp_path, capsys):
    """The job is held, so that no rank starts."""
    content = yaml.safe_load(LAB_FILE.read_text())
    held = tmp_path / "held.yaml"
    held.write_text(yaml.safe_dump({**content, "data": {}, "sbatch": {"hold": True}}, sort_keys=False))
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "7_1.png").touch()
    runs = tmp_path / "runs"
    assert trainyard("submit", "fingerprint_1m", "--gpus", 8, "--cluster", held, "--runs", runs) == 2
    assert not runs.exists()
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("  trainyard submit ")]
    assert len(lines) == 2
    for line, data in zip(lines, (str(tmp_path / "raw"), "960 synthetic samples"), strict=True):
        words = [word.replace("FOLDER", str(tmp_path / "raw")) for word in shlex.split(line)]
        assert trainyard(*words[1:], "--no-plan") == 0
        run = next(run for run in runs.glob("fingerprint_1m/*") if read_choice(run, "data_root") == data)
        assert read_choice(run, "gpu_type") == "a100"
        lab.run("scancel", read_slurm_job_id(run))
    empty = ["--cluster", held, "--runs", tmp_path / "more", f"data.path={tmp_path / 'config'}"]
    (tmp_path / "config").mkdir()
    assert trainyard("submit", "fingerprint_1m", "--gpus", 8, *empty) == 2
    assert "that fingerprint knows. Expected: images named FINGER_IMPRESSION" in capsys.readouterr().err
    assert not (tmp_path / "more").exists() and lab.run("squeue", "-h", "-n", "fingerprint_1m") == ""


def read_choice(run: Path, name: str) -> str:
    """Return what a run's env.json says was chosen."""
    return str(read_env(run)["choices"][name]["value"])


def test_members_of_the_group_can_read_a_run_whatever_the_umask(lab, lab_file, start):
    content = yaml.safe_load(lab_file.read_text()) | {"group": grp.getgrgid(os.getegid()).gr_name}
    lab_file.write_text(yaml.safe_dump(content, sort_keys=False))
    before = os.umask(0o077)
    try:
        run = start("read", "max_duration=2st", "--hw", "a5000", cluster=lab_file)
    finally:
        os.umask(before)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]
    made = {path.relative_to(run).as_posix(): path.stat() for path in run.rglob("*") if not path.is_symlink()}
    unreadable = [name for name, found in made.items() if not found.st_mode & 0o040]
    assert all(name == "code.diff" or name.endswith("_submission.sh") for name in unreadable), unreadable
    assert not run.stat().st_mode & 0o007
