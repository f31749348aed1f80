"""Run folders that somebody else owns or can change: nothing in them is executed, and one sentence says why."""

import functools
import grp
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import FAMILIES, new_run, train
from trainyard import cli
from trainyard.cluster import description as clusters
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.launch import submit
from trainyard.launch.cancel import cancel
from trainyard.plan.make_plan import make_plan
from trainyard.plan.resources import ResourceRequest
from trainyard.report.run_page import write_report
from trainyard.runs.create import Origin, create_run

ROOT = Path(__file__).resolve().parents[1]
STRANGER, OTHER = 12345, 12346
OPEN_TO_ALL = tempfile.gettempdir()  # read before the session has a TMPDIR of its own
CLUSTER = """\
shared: [/]
gpus: {here: {card: cpu, partition: p, per_node: 1, nodes: 1, cores_per_gpu: 1, memory_gib_per_gpu: 1}}
setup: ["touch %s"]
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class TouchWhenLoaded:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own and what is in it."""
    with tempfile.TemporaryDirectory(dir=OPEN_TO_ALL) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@functools.cache
def read_new_run() -> dict[str, str]:
    """Return the files of a new run, created once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(
            Path(folder), configs.compose("stripes", [], FAMILIES), origin=Origin.collect(code=Path(folder))
        )
        return {path.name: path.read_text() for path in run.iterdir()}


def make_run(place: Path, name: str = "handed") -> Path:
    run = place / "runs" / "stripes" / name
    run.mkdir(parents=True)
    for file, text in read_new_run().items():
        (run / file).write_text(text)
    close(run)
    return run


def submit_by_hand(run: Path, **changed: object) -> Path:
    """Write what a submission leaves in a run folder, each part of which creates the file `executed` if it is used."""
    marker = run.parents[2] / "executed"
    package = run / "code" / "trainyard" / "node"
    package.mkdir(parents=True)
    for module in (package.parent / "__init__.py", package / "rank_task.py", run / "code" / "sitecustomize.py"):
        module.write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
    shutil.copytree(FAMILIES, run / "code" / "handed_jobs", ignore=shutil.ignore_patterns("__pycache__"))
    with (run / "code" / "handed_jobs" / "stripes" / "config.py").open("a") as config:
        config.write(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
    (run / "slurm").mkdir()
    (run / "slurm" / "7_submitted.pkl").write_bytes(pickle.dumps(TouchWhenLoaded(marker)))
    (run / "slurm" / "attempt.sh").write_text(f"touch {marker}\n")
    (run / "cluster.yaml").write_text(CLUSTER % marker)
    submission = {"scheduler": "slurm", "job": "999999999", "cluster": "c", "cluster_file": str(run / "cluster.yaml")}
    submission |= {
        "hw": "here",
        "gpus": 1,
        "nodes": 1,
        "time_min": 5,
        "partition": "p",
        "slurm_name": "",
        "submitted": "2026-01-02T03:04:05+00:00",
    }
    submission |= {"code": str(run / "code"), "jobs": str(run / "code" / "handed_jobs"), "folder": str(run / "slurm")}
    (run / "slurm" / "submission.json").write_text(json.dumps(submission | changed))
    return marker


def close(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o022)


def resume(capsys: pytest.CaptureFixture[str], run: Path, *more: str, jobs: Path = FAMILIES) -> str:
    """Resume a run that must be refused; return what was said, which is one sentence on standard error."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as without_slurm:  # asking it takes longer than all the rest
        without_slurm.setenv("PATH", "")
        assert cli.main(["resume", str(run), "--jobs", str(jobs), *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


def is_past_the_check(said: str) -> bool:
    """Return whether all that was refused is Slurm's absence, or a partition that no Slurm has."""
    return "UntrustedRun" not in said and "Slurm" in said


def give_away(folder: Path, *, deep: bool = True) -> None:
    for path in [folder, *(folder.rglob("*") if deep else [])]:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


# Of another owner


@needs_root
def test_the_run_of_another_user_is_refused_with_owner_mode_and_what_it_would_execute(place, capsys):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    give_away(run)
    said = resume(capsys, run)
    assert said.startswith(f"UntrustedRun: {run}: belongs to uid {STRANGER}, mode 0755, and you are root (uid 0).")
    assert "would use, as you: code, config.yaml, env.json, slurm." in said
    assert f"trainyard resume {run} --jobs {FAMILIES} --trust" in said
    assert "65534 (nobody)" in said and "docker run --user" in said
    assert not marker.exists()
    assert is_past_the_check(resume(capsys, run, "--trust"))  # the flag is all that was missing
    assert said.count("\n") == 2


@needs_root
@pytest.mark.parametrize("entry", ["code/trainyard/node/rank_task.py", "slurm", "slurm/7_submitted.pkl", "config.yaml"])
def test_one_entry_of_another_user_is_enough(place, capsys, entry):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    give_away(run / entry, deep=False)
    assert f"{run / entry}: belongs to uid {STRANGER}" in resume(capsys, run)
    assert not marker.exists()


@needs_root
@pytest.mark.parametrize("key", ["code", "cluster_file"])
def test_code_and_cluster_file_elsewhere_are_checked_too(place, capsys, key):
    run, theirs = make_run(place), make_run(place, "theirs")
    marker = submit_by_hand(theirs)
    there = theirs / "cluster.yaml" if key == "cluster_file" else theirs / "code"
    shutil.rmtree(theirs / "slurm")
    submit_by_hand(run, **{key: str(there)})
    for folder in (run, theirs):
        close(folder)
    give_away(theirs)
    said = resume(capsys, run)
    assert f"{there}: belongs to" in said or f"{theirs}: belongs to" in said
    assert str(there) in said and not marker.exists()


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed")
@pytest.mark.slow
def test_another_user_is_refused_the_run_of_root_and_may_resume_a_copy(place):
    run = make_run(place)
    submit_by_hand(run)
    close(run)
    python = shutil.copytree(ROOT / "src" / "trainyard", place / "src" / "trainyard").parent
    families = shutil.copytree(FAMILIES, place / "families")
    (place / "home").mkdir()
    os.chown(place / "home", STRANGER, STRANGER)
    user = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    environ = {"PYTHONPATH": str(python), "HOME": str(place / "home"), "PATH": os.environ["PATH"]}

    def try_resume(folder: Path, *more: str) -> str:
        words = [*user, sys.executable, "-m", "trainyard", "resume", str(folder), "--jobs", str(families), *more]
        done = subprocess.run(words, env=environ, cwd=place, capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    if subprocess.run([*user, sys.executable, "-c", "import loguru"], env=environ, cwd=place).returncode:
        pytest.skip("this Python is not readable to another user")
    assert f"{run}: belongs to root (uid 0), mode 0755, and you are uid {STRANGER}." in try_resume(run)
    assert "you cannot write there. Resume a copy of it" in try_resume(run, "--trust")
    subprocess.run([*user, "cp", "-r", str(run), str(place / "home" / "mine")], check=True)
    mine = place / "home" / "mine"
    assert is_past_the_check(try_resume(mine)), "it names the code in root's run, and root may change Python as well"
    os.chown(run / "code", OTHER, OTHER)
    assert f"{run / 'code'}: belongs to uid {OTHER}, mode 0755, and you are uid {STRANGER}." in try_resume(mine)
    assert is_past_the_check(try_resume(mine, "--update-code", "--cluster", "x"))


# That others can change


@pytest.mark.parametrize(
    ("entry", "mode", "who"),
    [
        (".", 0o777, "everybody"),
        (".", 0o1777, "everybody"),
        (".", 0o775, "the group"),
        ("code", 0o775, "the group"),
        ("code/trainyard/node/rank_task.py", 0o664, "the group"),
        ("code/handed_jobs/stripes", 0o777, "everybody"),
        ("slurm", 0o777, "everybody"),
        ("slurm/7_submitted.pkl", 0o666, "everybody"),
        ("slurm/attempt.sh", 0o666, "everybody"),
        ("config.yaml", 0o664, "the group"),
        ("env.json", 0o666, "everybody"),
    ],
)
def test_what_others_can_change_is_refused_and_the_printed_chmod_helps(place, capsys, entry, mode, who):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    (run / entry).chmod(mode)
    said = resume(capsys, run)
    assert f"{run / entry}: {who}" in said and f"can change it: its mode is {mode:04o}" in said
    advised = said.partition("close it: ")[2].partition(" - ")[0]
    assert advised == f"chmod -R go-w {run}"
    assert not marker.exists()
    subprocess.run(shlex.split(advised), check=True)
    assert is_past_the_check(resume(capsys, run))


@pytest.mark.parametrize("here", [["--here"], []])
def test_families_inside_a_writable_run_are_not_imported(place, capsys, here):
    """`cd RUN; trainyard resume .` takes the folder of families from there."""
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    shutil.copytree(run / "code" / "handed_jobs", run / "my_jobs")
    (run / "my_jobs" / "stripes" / "config.py").chmod(0o666)
    assert "config.py: everybody can change it" in resume(capsys, run, *here, jobs=run / "my_jobs")
    assert not marker.exists()


def test_predictions_do_not_import_families_inside_a_writable_run(place, capsys, monkeypatch):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    shutil.copytree(run / "code" / "handed_jobs", run / "jobs")
    (run / "jobs" / "stripes").chmod(0o777)
    monkeypatch.chdir(run)
    assert cli.main(["predict", str(run), "raw", "out.csv"]) == 2
    assert f"{run / 'jobs' / 'stripes'}: everybody can change it" in capsys.readouterr().err
    assert not marker.exists()


def test_the_group_may_write_a_folder_whose_entries_it_cannot_replace(place, capsys):
    run = make_run(place)
    submit_by_hand(run)
    close(run)
    run.chmod(0o3775)
    (run / "notes.txt").touch(0o664)
    assert is_past_the_check(resume(capsys, run))


@pytest.mark.parametrize("kind", ["code", "cluster_file"])
def test_code_and_cluster_file_elsewhere_that_everybody_can_change_are_refused(place, capsys, kind):
    run, other = make_run(place), make_run(place, "other")
    marker = submit_by_hand(other)
    there = other / ("code" if kind == "code" else "cluster.yaml")
    submit_by_hand(run, **{kind: str(there)})
    for folder in (run, other):
        close(folder)
    there.chmod(0o777)
    said = resume(capsys, run)
    assert f"{there}: everybody can change it" in said and f"chmod -R go-w {there} - " in said
    assert not marker.exists()


def test_code_in_a_folder_where_others_can_replace_it_is_refused_unless_it_is_not_used(place, capsys):
    """As that of a sweep, when one of its runs is resumed."""
    run, sweep = make_run(place), place / "sweep"
    sweep.mkdir()
    marker = submit_by_hand(run)
    (run / "code").rename(sweep / "code")
    shutil.rmtree(run / "slurm")
    submit_by_hand(run, code=str(sweep / "code"), jobs=str(sweep / "code" / "handed_jobs"))
    shutil.rmtree(run / "code")
    for folder in (run, sweep):
        close(folder)
    assert is_past_the_check(resume(capsys, run))
    sweep.chmod(0o777)
    said = resume(capsys, run)
    assert f"{sweep}: everybody can change it" in said and f"chmod -R go-w {sweep} - " in said
    assert is_past_the_check(resume(capsys, run, "--update-code"))
    assert not marker.exists()


# With odd entries


@pytest.mark.parametrize("name", ["code", "slurm", "log", "checkpoints/step-000000001.ckpt", "jobs"])
def test_a_link_out_of_the_folder_is_refused(place, capsys, name):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    target = place / "elsewhere"
    if (run / name).is_dir():
        (run / name).rename(target)
    else:
        target.write_text("precious\n")
        (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(target)
    said = resume(capsys, run, "--here")
    assert f"{run / name}: is a link that leads out of the folder, to {target}" in said
    assert "chmod" not in said and "--trust" in said
    assert not marker.exists() and (target.is_dir() or target.read_text() == "precious\n")


def test_links_inside_the_folder_and_those_that_trackers_and_submitit_leave_are_fine(place, capsys):
    run = make_run(place)
    submit_by_hand(run)
    close(run)
    (run / "best").symlink_to("checkpoints")
    (run / "wandb").mkdir()
    (run / "wandb" / "debug.log").symlink_to(place / "elsewhere")
    (run / "slurm" / ".submission_file_ab12.sh").symlink_to("/before/the/run/was/moved/7_submission.sh")
    assert is_past_the_check(resume(capsys, run))


def test_a_pipe_in_place_of_a_file_does_not_block(place, capsys):
    run = make_run(place)
    os.mkfifo(run / "log")
    assert f"{run / 'log'}: is neither a file nor a folder" in resume(capsys, run)


# Sweeps, and runs resumed by their name


def test_a_sweep_that_others_can_change_is_not_continued(place, capsys):
    run = make_run(place)
    marker = submit_by_hand(run)
    close(run)
    sweep = place / "runs" / "sweeps" / "all"
    sweep.mkdir(parents=True)
    element = {"index": 0, "overrides": ["seed=1"], "run": "stripes/handed"}
    record = {"format": 1, "job": "stripes", "axes": {"seed": ["1"]}, "fixed": [], "elements": [element]}
    (sweep / "sweep.json").write_text(json.dumps(record))
    words = ["sweep", "--continue", "all", "--runs", str(place / "runs"), "--jobs", str(FAMILIES)]
    for folder in (sweep, run):
        close(sweep)
        folder.chmod(0o777)
        assert cli.main(words) == 2
        assert f"UntrustedRun: {folder}: everybody can change it" in capsys.readouterr().err
    assert not marker.exists()


def test_the_same_name_again_does_not_resume_what_others_can_change(place, capsys):
    run = make_run(place)
    run.chmod(0o777)
    words = ["run", "stripes", "--name", "handed", "--runs", str(place / "runs"), "--jobs", str(FAMILIES)]
    assert cli.main(words) == 2
    assert f"{run}: everybody can change it" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "env.json"]


# What Trainyard creates


def list_writable(folder: Path) -> list[str]:
    """Return what others than the owner can change in a folder, with the mode."""
    found = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
    return [f"{path.relative_to(folder)} {mode:o}" for path, mode in found.items() if mode & 0o022]


@pytest.fixture(params=[0o000, 0o002])
def open_umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of a site where everybody, or the group, can change new files."""
    before = os.umask(request.param)
    yield request.param
    assert os.umask(before) == request.param  # as it was


def test_whatever_the_umask_only_the_owner_can_change_what_a_submission_runs(place, open_umask, monkeypatch):
    (place / "bin").mkdir()
    answers = {
        "sbatch": f"umask > {place}/umask; echo Submitted batch job 12",
        "scontrol": 'if [ "$1" = ping ]; then echo "Slurmctld(primary) at x is UP"; else echo "ClusterName = here"; fi',
        "squeue": 'printf "ID|STATE|RESTARTS|NODES|REASON\\n12|RUNNING|0|n-0|None\\n"',
        "scancel": '[ "$*" = "-- 12" ]',
    }
    for name, line in {**answers, "srun": ":"}.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    run = create_run(place / "runs", configs.compose("stripes", [], FAMILIES), origin=Origin.collect(code=place))
    (place / "cluster.yaml").write_text(CLUSTER % "x")
    families = shutil.copytree(FAMILIES, place / "checkout")
    subprocess.run(["chmod", "-R", "a+rwX", families], check=True)
    code = submit.snapshot_code(families, run / "code")
    config = configs.load_config(run / "config.yaml", FAMILIES)
    plan = make_plan(config, clusters.load_cluster(place / "cluster.yaml"), ResourceRequest())
    assert submit.submit(plan, [run], folder=run / "slurm", code=code) == ["12"]
    assert (run / "code" / "checkout" / "stripes" / "config.py").is_file() and list((run / "slurm").glob("*.pkl"))
    assert "cancelled Slurm job 12" in cancel([run])[0] and (run / "slurm" / "cancelled").is_file()
    assert list_writable(run) == []
    assert (place / "umask").read_text() == "0022\n"  # Slurm gives it to the job
    assert [path.stat().st_mode & 0o777 for path in (run / "slurm").glob("*_submission.sh")] == [0o700]
    for parent in (run.parent, run.parent.parent):  # others may have runs there, but cannot replace this one
        assert parent.stat().st_mode & 0o7777 == 0o1777 & ~open_umask


@pytest.mark.slow
def test_whatever_the_umask_only_the_owner_can_change_what_training_writes(tmp_path):
    before = os.umask(0)
    try:
        run = new_run(tmp_path, "max_duration=4st", "eval_every=4st", "data.synthetic=40")
        assert train(run) == 0
        write_report(run)
    finally:
        os.umask(before)
    assert {"log", "metrics.jsonl", "checkpoints", "report.html"} <= {path.name for path in run.iterdir()}
    assert list_writable(run) == []


def test_a_group_may_write_what_is_not_executed(place, capsys):
    mine = grp.getgrgid(os.getegid())
    config = configs.compose("stripes", [], FAMILIES)
    run = create_run(place / "runs", config, name="shared", origin=Origin.collect(code=place), group=mine.gr_name)
    submit_by_hand(run)
    (run / "code").chmod(0o755)
    modes = {path.name: f"{path.stat().st_mode & 0o7777:o}" for path in [run.parent, run, *run.iterdir()]}
    assert modes == {
        **{"stripes": "3775", "shared": "3775", "checkpoints": "2775", "config.yaml": "644", "env.json": "644"},
        **{"code": "755", "slurm": "2755", "cluster.yaml": "644"},
    }
    assert run.stat().st_gid == (run / "config.yaml").stat().st_gid == mine.gr_gid
    assert is_past_the_check(resume(capsys, run))


def test_a_group_that_does_not_exist_is_one_sentence_and_no_run(place):
    config = configs.compose("stripes", [], FAMILIES)
    with pytest.raises(UserError, match=r"cannot be given to group 'no-such'.* id -Gn\. Correct `group`"):
        create_run(place / "runs", config, origin=Origin.collect(code=place), group="no-such")
    assert not (place / "runs").exists()


# A submission that no submission writes


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"job": "--user=victim"}, "'job' should be the number of a Slurm job or a process"),
        ({"gpus": "1; touch x"}, "'gpus' should be a whole number from 1"),
        ({"code": "../code"}, "'code' should be an absolute path"),
        ({"jobs": None}, "'jobs' should be text, found None"),
        ({"scheduler": "bash"}, "'scheduler' should be slurm or local"),
    ],
)
def test_a_submission_with_other_values_is_one_sentence(place, capsys, changed, problem):
    run = make_run(place)
    marker = submit_by_hand(run, **changed)
    close(run)
    said = resume(capsys, run)
    assert f"submission.json: {problem}" in said and said.count("\n") == 1
    assert not marker.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_submission_is_one_sentence(place, capsys, text):
    run = make_run(place)
    submit_by_hand(run)
    close(run)
    (run / "slurm" / "submission.json").write_text(text, encoding="latin-1")
    said = resume(capsys, run)
    assert "so how this run was submitted is not known" in said and said.count("\n") == 1
