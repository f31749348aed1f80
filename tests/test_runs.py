import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from loguru import logger

from tests.training import FORKSERVER
from trainyard.cli import main
from trainyard.config.settings import TrainConfig
from trainyard.environment import THIS_CODE, collect_environment, describe_cpu, find_checkout
from trainyard.errors import UserError
from trainyard.runs.create import Origin, create_run
from trainyard.runs.folder import (
    find_latest_run,
    list_newest_runs,
    read_creation_time,
    read_env,
    resolve_run,
    update_env,
    write_env,
)
from trainyard.runs.lock import RunLock
from trainyard.runs.manifest import hash_fields

SECRET = "hf_planted0123456789"
TINY = TrainConfig(job="tiny", family="tiny")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean git checkout of one commit, with a password in the address of its remote."""
    folder = tmp_path / "checkout"
    (folder / "jobs").mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", f"https://user:{SECRET}@example.com/code.git")
    (folder / "model.py").write_text("WIDTH = 8\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


# Creating


def test_a_run_is_named_by_job_time_and_commit_and_contains_options_and_environment(tmp_path: Path, checkout: Path):
    before = time.strftime("%Y%m%d-%H%M%S")
    run = create_run(tmp_path / "runs", TINY, origin=Origin.collect(code=checkout / "jobs"))
    time_of_name, commit = run.name.rsplit("-", 1)
    assert run.parent == tmp_path / "runs" / "tiny"
    assert before <= time_of_name <= time.strftime("%Y%m%d-%H%M%S")
    assert commit == git(checkout, "rev-parse", "HEAD")[:7]
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "env.json"]  # clean, so no code.diff
    assert "job: tiny\n" in (run / "config.yaml").read_text()
    assert read_env(run)["code"] == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False, "untracked": []}


def test_a_run_of_code_outside_git_says_so_and_why(tmp_path: Path):
    run = create_run(tmp_path / "runs", TINY, origin=Origin.collect(code=tmp_path))
    assert re.fullmatch(r"\d{8}-\d{6}-nogit", run.name)
    assert read_env(run)["code"]["commit"] is None and "not a git repository" in read_env(run)["code"]["reason"]


def _create_several(root: Path, code: Path, names: "multiprocessing.Queue[str]") -> None:
    for _ in range(3):
        names.put(create_run(root, TINY, origin=Origin.collect(code=code)).name)


@pytest.mark.slow
def test_runs_created_in_the_same_second_by_several_processes_get_different_folders(tmp_path: Path):
    names = FORKSERVER.Queue()
    workers = [FORKSERVER.Process(target=_create_several, args=(tmp_path / "runs", tmp_path, names)) for _ in range(4)]
    for worker in workers:
        worker.start()
    created = [names.get(timeout=60) for _ in range(12)]
    for worker in workers:
        worker.join()
    assert len(set(created)) == 12
    assert any(name.endswith("-nogit-2") for name in created)
    assert sorted(path.name for path in (tmp_path / "runs" / "tiny").iterdir()) == sorted(created)  # nothing left over


def test_a_name_can_be_given_to_one_run_only(tmp_path: Path):
    run = create_run(tmp_path, TINY, name="baseline", origin=Origin.collect(code=tmp_path))
    assert run == tmp_path / "tiny" / "baseline"
    before = (run / "env.json").read_bytes()
    with pytest.raises(
        UserError, match=r"baseline: there is a run of this name\. Choose another, or resume it: trainyard"
    ):
        create_run(tmp_path, TINY, name="baseline", origin=Origin.collect(code=tmp_path))
    assert (run / "env.json").read_bytes() == before
    assert [path.name for path in run.parent.iterdir()] == ["baseline"]


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden", "-x", "a b"])
def test_a_name_that_is_not_a_plain_file_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=r"cannot name a run\. Use letters"):
        create_run(tmp_path / "runs", TINY, name=name)
    assert not (tmp_path / "runs").exists()


# Recording


def test_uncommitted_changes_are_stored_as_a_patch_that_applies(tmp_path: Path, checkout: Path):
    (checkout / "model.py").write_text("WIDTH = 16\n")
    (checkout / "weights.bin").write_bytes(bytes(range(256)))
    git(checkout, "add", "weights.bin")
    (checkout / "scratch notes.txt").write_text("private")
    run = create_run(tmp_path / "runs", TINY, origin=Origin.collect(code=checkout / "jobs"))
    assert read_env(run)["code"]["dirty"] is True
    assert read_env(run)["code"]["untracked"] == ["scratch notes.txt"]
    assert "private" not in (run / "code.diff").read_text()
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(checkout), str(clone))
    git(clone, "apply", str(run / "code.diff"))
    assert (clone / "model.py").read_text() == "WIDTH = 16\n"
    assert (clone / "weights.bin").read_bytes() == bytes(range(256))


def test_an_untracked_file_alone_makes_a_checkout_dirty(checkout: Path):
    (checkout / "new.py").touch()
    assert find_checkout(checkout)[0]["dirty"] is True


def test_no_secret_from_the_environment_or_the_remote_reaches_the_run(tmp_path: Path, checkout: Path):
    (checkout / "model.py").write_text("WIDTH = 16\n")
    environ = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "SLURM_JOB_ID": "42", "CUDA_VISIBLE_DEVICES": "0,1"}
    run = create_run(tmp_path / "runs", TINY, origin=Origin.collect(environ, checkout))
    assert read_env(run)["environ"] == {"SLURM_JOB_ID": "42", "CUDA_VISIBLE_DEVICES": "0,1"}
    files = [file for file in run.rglob("*") if file.is_file()]
    assert len(files) == 3
    assert [file for file in files if SECRET.encode() in file.read_bytes() or b"example.com" in file.read_bytes()] == []


def test_the_environment_of_the_process_is_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert collect_environment({})["environ"] == {}


def test_the_environment_record_contains_versions_and_machine():
    found = collect_environment(find_checkout(THIS_CODE)[0])
    assert found["versions"]["python"] == platform.python_version()
    assert {"torch", "h5py", "numpy", "hydra-core"} <= set(found["versions"])
    installed = {name: metadata.version(name) for name in found["versions"] if name != "python"}
    assert {**installed, "python": platform.python_version()} == found["versions"]
    machine = found["machine"]
    assert machine["host"] == platform.node() and machine["kernel"] == platform.release()
    assert 1 <= machine["cores_available"] <= os.cpu_count()
    assert 0.1 < machine["memory_gib"] < 100_000
    assert machine["libc"] and machine["cpu"]


@pytest.mark.parametrize(("flags", "vectors"), [("fma avx2 avx512f", "AVX-512"), ("fma avx2", "AVX2"), ("", "no AVX2")])
def test_two_cpu_generations_with_the_same_name_are_distinguished(flags: str, vectors: str):
    first = f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu {flags}\n"
    assert describe_cpu(f"{first}\n{first.replace('25', '26')}") == f"AMD EPYC (family 25, model 1, {vectors})"


def test_where_the_kernel_names_no_cpu_its_architecture_is_recorded():
    assert describe_cpu("processor\t: 0\nBogoMIPS\t: 50.00\n") == platform.machine()


@pytest.mark.parametrize(
    ("script", "recorded"),
    [
        (None, "none"),
        ("echo 'NVIDIA H200, 570.1, 143771 MiB'; echo 'NVIDIA H200, 570.1, 143771 MiB'", ("; ",)),
        ("echo 'Failed to initialize NVML'; exit 18", "unknown: Failed to initialize NVML"),
        ("exit 9", "unknown: nvidia-smi failed"),
    ],
)
def test_gpus_are_what_nvidia_smi_prints(tmp_path: Path, monkeypatch, script: str | None, recorded: "str | tuple"):
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = "; ".join(["NVIDIA H200, 570.1, 143771 MiB"] * 2) if recorded == ("; ",) else recorded
    assert collect_environment({})["machine"]["gpus"] == expected


def test_updating_a_section_of_env_json_keeps_the_rest(tmp_path: Path):
    run = create_run(tmp_path, TINY, origin=Origin.collect(code=tmp_path))
    before = read_env(run)
    update_env(run, "result", {"step": 10, "loss": 0.5})
    update_env(run, "result", {"step": 20})
    assert read_env(run) == {**before, "result": {"step": 20, "loss": 0.5}}
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "env.json"]


# One writer

HOLD_LOCK = """
import sys, time
from pathlib import Path
from trainyard.runs.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def start_lock_holder(run: Path) -> subprocess.Popen:
    """Start a process that owns the lock of a run until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def write_forged_lock(run: Path, **changes: object) -> None:
    """Write a lock as this process would, with some fields changed."""
    with RunLock(run):
        content = json.loads((run / "lock").read_text())
    (run / "lock").write_text(json.dumps({**content, **changes}))


def test_a_lock_exists_inside_its_block_and_can_be_taken_again(tmp_path: Path, log: list[str]):
    for _ in range(2):
        with RunLock(tmp_path):
            content = json.loads((tmp_path / "lock").read_text())
            assert (content["pid"], content["host"]) == (os.getpid(), platform.node())
        assert list(tmp_path.iterdir()) == []
    assert log == []


def test_a_lock_is_released_when_its_block_fails(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert not (tmp_path / "lock").exists()


def test_a_living_writer_is_named_with_host_time_and_what_to_type(tmp_path: Path):
    process = start_lock_holder(tmp_path)
    try:
        for break_other_host in (False, True):
            with pytest.raises(UserError) as caught, RunLock(tmp_path, break_other_host=break_other_host):
                pass
            message = str(caught.value)
            assert (
                f"{tmp_path}: process {process.pid} on {platform.node()} has been writing to this run since 20"
                in message
            )
            assert message.endswith(f"Wait for it, or stop it: kill {process.pid}")
    finally:
        process.kill()
        process.wait()


def test_one_process_cannot_write_twice(tmp_path: Path):
    with RunLock(tmp_path):
        with pytest.raises(UserError, match=f"kill {os.getpid()}"), RunLock(tmp_path):
            pass
        assert (tmp_path / "lock").exists()


def test_the_lock_of_a_killed_process_is_taken_over_with_a_line_in_the_log(tmp_path: Path, log: list[str]):
    process = start_lock_holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()
    assert len(log) == 1 and f"took over the lock that process {process.pid} on" in log[0]


def test_a_killed_process_that_nobody_waited_for_is_dead(tmp_path: Path):
    process = start_lock_holder(tmp_path)
    process.kill()
    while " Z " not in Path(f"/proc/{process.pid}/stat").read_text():
        time.sleep(0.01)
    with RunLock(tmp_path):
        pass
    process.wait()


def test_a_later_process_with_the_same_pid_is_not_the_writer(tmp_path: Path, log: list[str]):
    write_forged_lock(tmp_path, started_ticks=1)  # this process id, but not its start time
    with RunLock(tmp_path):
        pass
    assert len(log) == 1


def test_a_lock_from_before_a_reboot_is_taken_over(tmp_path: Path, log: list[str]):
    write_forged_lock(tmp_path, boot_id="another")
    with RunLock(tmp_path):
        pass
    assert len(log) == 1


@pytest.mark.parametrize(
    "changes", [{"host": "node7"}, {"pid_namespace": "pid:[1]"}, {"host": "node7", "boot_id": "x"}]
)
def test_a_writer_that_this_host_cannot_see_keeps_its_lock_unless_overridden(
    tmp_path: Path, changes: dict, log: list[str]
):
    write_forged_lock(tmp_path, pid=77, **changes)
    host = changes.get("host", platform.node())
    with pytest.raises(UserError) as caught, RunLock(tmp_path):
        pass
    assert f"process 77 on {host} has been writing to this run since 20" in str(caught.value)
    assert "ps -p 77" in str(caught.value) and "--break-lock" in str(caught.value)
    assert log == []
    with RunLock(tmp_path, break_other_host=True):
        pass
    assert len(log) == 1 and not (tmp_path / "lock").exists()


def test_a_writer_whose_lock_was_broken_does_not_release_the_lock_of_its_successor(tmp_path: Path):
    with RunLock(tmp_path):
        forged = {**json.loads((tmp_path / "lock").read_text()), "host": "node7"}
        (tmp_path / "lock").write_text(json.dumps(forged))
    assert json.loads((tmp_path / "lock").read_text()) == forged


def test_a_forked_child_that_leaves_the_block_does_not_release_the_lock(tmp_path: Path):
    with RunLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_cannot_be_read_says_what_to_delete(tmp_path: Path):
    (tmp_path / "lock").touch()
    with pytest.raises(UserError, match=f"Try again; .*rm {tmp_path}/lock"), RunLock(tmp_path):
        pass


def _take_lock(run: Path, start: float, outcomes: "multiprocessing.Queue[str]", all_tried: Event) -> None:
    logger.remove()
    time.sleep(max(0.0, start - time.time()))
    try:
        with RunLock(run):
            outcomes.put("taken")
            all_tried.wait(60)
    except UserError as error:
        outcomes.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("stale", [True, False])
def test_of_many_processes_that_request_a_lock_at_once_exactly_one_gets_it(tmp_path: Path, stale: bool):
    for repeat in range(3):
        run = tmp_path / str(repeat)
        run.mkdir()
        if stale:
            write_forged_lock(run, started_ticks=1)
        outcomes, all_tried = FORKSERVER.Queue(), FORKSERVER.Event()
        start = time.time() + 0.3
        processes = [FORKSERVER.Process(target=_take_lock, args=(run, start, outcomes, all_tried)) for _ in range(8)]
        for process in processes:
            process.start()
        results = [outcomes.get(timeout=60) for _ in processes]
        all_tried.set()
        for process in processes:
            process.join()
        assert results.count("taken") == 1
        assert not (run / "lock").exists()


def _count_up(run: Path, counter: Path, rounds: int) -> None:
    logger.remove()
    done = 0
    while done < rounds:
        try:
            with RunLock(run):
                value = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(value + 1))
            done += 1
        except UserError:
            time.sleep(0.0005)


@pytest.mark.slow
def test_writers_that_come_and_go_never_overlap(tmp_path: Path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    writers = [FORKSERVER.Process(target=_count_up, args=(tmp_path, counter, 25)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert counter.read_text() == "100"


# Finding


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of two jobs, oldest first: tiny/b, tiny/a1, tiny/a2, tiny_big/c."""
    for job, name in [("tiny", "b"), ("tiny", "a1"), ("tiny", "a2"), ("tiny_big", "c")]:
        create_run(tmp_path / "runs", TrainConfig(job=job), name=name, origin=Origin.collect(code=tmp_path))
    return tmp_path / "runs"


def test_the_latest_run_is_the_newest_one_whatever_its_name(runs: Path):
    assert find_latest_run(runs, "tiny") == runs / "tiny" / "a2"
    create_run(runs, TrainConfig(job="tiny"), name="0", origin=Origin.collect(code=runs))
    assert find_latest_run(runs, "tiny") == runs / "tiny" / "0"


def test_what_needs_weights_passes_over_a_newer_run_that_failed_before_its_first_checkpoint(runs: Path):
    assert resolve_run("tiny", runs, trained=True) == runs / "tiny" / "a2", "none has weights"
    (runs / "tiny" / "a1" / "checkpoints").mkdir()
    (runs / "tiny" / "a1" / "checkpoints" / "step-000000004.ckpt").touch()
    assert resolve_run("tiny", runs, trained=True) == runs / "tiny" / "a1"
    assert resolve_run("tiny", runs) == runs / "tiny" / "a2"


def test_the_error_for_a_job_without_runs_lists_jobs_that_have_some(runs: Path, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        find_latest_run(runs, "tinny")
    assert "no run of job 'tinny'. There are runs of: tiny, tiny_big." in str(caught.value)
    assert str(caught.value).endswith("trainyard run tinny")
    with pytest.raises(UserError, match="There are no runs at all"):
        find_latest_run(tmp_path / "nowhere", "tiny")


@pytest.mark.parametrize(
    ("text", "found"),
    [("tiny", "tiny/a2"), ("tiny_big", "tiny_big/c"), ("tiny_", "tiny_big/c"), ("b", "tiny/b")]
    + [("a1", "tiny/a1"), ("tiny/a2", "tiny/a2"), ("tiny/b", "tiny/b")],
)
def test_a_run_is_found_by_job_or_by_a_prefix_of_its_name(runs: Path, text: str, found: str):
    assert resolve_run(text, runs) == runs / found


def test_a_run_is_found_by_its_path(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs)
    assert resolve_run("tiny/a1/", runs / "elsewhere") == Path("tiny/a1")
    assert resolve_run(str(runs / "tiny" / "a1"), Path("nowhere")) == runs / "tiny" / "a1"


def test_an_exact_name_wins_over_names_that_begin_with_it(runs: Path):
    create_run(runs, TrainConfig(job="tiny"), name="a1-2", origin=Origin.collect(code=runs))
    assert resolve_run("a1", runs) == runs / "tiny" / "a1"


def test_an_ambiguous_prefix_lists_the_matching_runs(runs: Path):
    with pytest.raises(UserError, match=r"2 runs begin with 'a': tiny/a1, tiny/a2\. Type more of the name"):
        resolve_run("a", runs)


@pytest.mark.parametrize("text", ["*", "[", "", "/", "..", "tiny/*"])
def test_text_that_cannot_be_a_name_gets_the_same_error_as_any_other(runs: Path, text: str):
    with pytest.raises(UserError, match=r"no run is|runs begin with"):
        resolve_run(text, runs)


def test_the_error_for_an_unknown_run_lists_the_nearest_or_the_newest(runs: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"no run is 'tinnny'\. Nearest: tiny.*Give a path, a job, or the beginning"):
        resolve_run("tinnny", runs)
    with pytest.raises(UserError, match=r"no run is 'quux'\. Newest: tiny_big/c, tiny/a2, tiny/a1\."):
        resolve_run("quux", runs)
    with pytest.raises(UserError, match="there are no runs, so none is 'tiny'"):
        resolve_run("tiny", tmp_path / "nowhere")


def seal(record: dict[str, object]) -> str:
    """Return the text of an env.json with a digest that matches."""
    return json.dumps({**record, "sha256": hash_fields(record)})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("{}", "does not match the digest in it"),
        (seal({"format": 1}), "does not say when the run was created"),
        ("[1, 2", "is damaged, not JSON"),
        ("[]", "expected a JSON object"),
        (seal({"format": 1, "created": 5}), "does not say when the run was created"),
        ('{"created": "2026", "sha256": "0"}', "does not match the digest in it"),
    ],
)
def test_a_run_with_a_damaged_environment_record_is_named_and_hides_no_other(
    runs: Path, capsys: pytest.CaptureFixture[str], damage: str, sentence: str
):
    (runs / "tiny" / "a2" / "env.json").write_text(damage)
    assert main(["runs", "--runs", str(runs)]) == 0
    output = capsys.readouterr().out
    assert all(f"{run.parent.name}/{run.name}" in output for run in runs.glob("*/*"))
    assert sentence in output
    assert find_latest_run(runs, "tiny") == runs / "tiny" / "a1", "the newest of those that can be dated"
    assert f"{runs}/tiny/a2/env.json: " in capsys.readouterr().err
    for run in ("b", "a1", "a2"):
        (runs / "tiny" / run / "env.json").write_text(damage)
    with pytest.raises(UserError, match=sentence):
        find_latest_run(runs, "tiny")


def test_the_newest_runs_are_found_without_opening_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = [create_run(tmp_path, TINY, name=f"{9 - i}", origin=Origin.collect(code=tmp_path)) for i in range(9)]
    for i, run in enumerate(made):
        os.utime(run / "config.yaml", (1e9 + i, 1e9 + i))
        write_env(run, {**read_env(run), "created": f"2001-09-09T01:46:4{i}.000000+00:00"})
    os.utime(made[0] / "config.yaml")  # rewritten since: it is opened, and still the oldest
    opened = []

    def note(run: Path) -> str:
        opened.append(run)
        return read_creation_time(run)

    monkeypatch.setattr("trainyard.runs.folder.read_creation_time", note)
    assert list_newest_runs(tmp_path, 2) == made[:-3:-1] and len(opened) <= 4
    assert list_newest_runs(tmp_path, None) == made[::-1]
