"""Every signal that ends a program makes a run save and exit, from its first moments on."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.images import make_import_environ, make_unmeasured_environ
from tests.training import FAMILIES, load_state, new_run, start, wait_for_lines
from trainyard.runs.events import read_events
from trainyard.runs.state import ExitCode
from trainyard.train.stop import Stop, StopFlag

JOBS = ["--jobs", str(FAMILIES)]
RUN = [sys.executable, "-m", "trainyard"]


def read_status(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status that is a mask of signals."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1], 16)


def listens_to(pid: int, number: signal.Signals) -> bool:
    return bool(read_status(pid, "SigCgt") >> (number - 1) & 1)


def list_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(autouse=True)
def _take_signals_that_a_shell_had_ignored():
    """Let processes begin with SIGQUIT and SIGHUP as usual: under nohup, or after `&` in a script, they are ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGQUIT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGQUIT, marks=pytest.mark.long)])
def test_a_closed_terminal_and_ctrl_backslash_save_like_sigterm(number, tmp_path):
    run = new_run(tmp_path, "checkpoint.every=1000st", "max_duration=200ep", "eval_every=200ep")
    process = start(run)
    wait_for_lines(run, 5, process)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == ExitCode.PREEMPTED
    assert load_state(run)["progress/step"] >= 5 and read_events(run)[-1]["event"] == "stop"


def test_a_rank_that_slurm_starts_keeps_a_signal_until_its_run_listens(tmp_path):
    command = [sys.executable, "-m", "trainyard.node.start_rank", str(tmp_path)]
    process = subprocess.Popen(command, env={**make_import_environ(), "SUBMITIT_EXECUTOR": "local"})
    while not read_status(process.pid, "SigBlk") >> (signal.SIGUSR2 - 1) & 1:
        assert process.poll() is None
    assert "numpy" not in list_libraries(process.pid), "submitit is loaded already"
    process.send_signal(signal.SIGUSR2)
    while "numpy" not in list_libraries(process.pid):  # it goes on loading
        assert process.poll() is None
    assert read_status(process.pid, "ShdPnd") >> (signal.SIGUSR2 - 1) & 1
    process.kill()
    process.wait()


@pytest.mark.parametrize("verb", ["run", "resume"])
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_a_run_listens_before_it_imports_anything_slow(verb, number, tmp_path):
    environ = make_unmeasured_environ()  # coverage has a handler for SIGTERM
    command = [*RUN, verb, "stripes", *JOBS]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    while not listens_to(process.pid, number):
        assert process.poll() is None
    assert "numpy" not in list_libraries(process.pid) and "yaml" not in list_libraries(process.pid)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.PREEMPTED
    assert said == "Stopped by a signal before training began. The same command starts it again.\n"


def test_other_commands_end_at_a_signal_as_any_program_does(tmp_path):
    code = "import signal, trainyard.__main__ as m, sys; sys.argv = ['t', 'jobs']; m.main(); signal.raise_signal(1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGHUP


def test_a_run_under_nohup_does_not_notice_that_its_terminal_closes(tmp_path):
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen([*RUN, "run", "stripes", *JOBS], cwd=tmp_path, preexec_fn=ignore)
    while not listens_to(process.pid, signal.SIGUSR2):
        assert process.poll() is None
    assert read_status(process.pid, "SigIgn") & 1 and not listens_to(process.pid, signal.SIGHUP)
    process.kill()
    process.wait()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason is Stop.NONE
            signal.raise_signal(signal.SIGQUIT)
            assert stop.reason is Stop.PREEMPTED
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long
def test_a_signal_while_several_ranks_start_reaches_all_of_them(tmp_path):
    run = new_run(tmp_path, "max_duration=1000ep", "eval_every=1000ep")
    process = subprocess.Popen([*RUN, "resume", str(run), "--cpu-ranks", "2", *JOBS], stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGUSR2)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == ExitCode.PREEMPTED, said
    assert "Stopped and saved" in said and load_state(run)["progress/step"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", [[], ["--cpu-ranks", "2"]], ids=["one process", "two ranks"])
def test_a_terminal_that_closes_makes_the_run_save(ranks, tmp_path):
    run = new_run(tmp_path, "max_duration=1000ep", "eval_every=1000ep", "checkpoint.every=100000st")
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [*RUN, "resume", str(run), *ranks, *JOBS],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
    )
    os.close(terminal)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        os.set_blocking(master, False)
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(master)
    assert process.wait(120) == ExitCode.PREEMPTED
    assert load_state(run)["progress/step"] >= 5 and read_events(run)[-1]["event"] == "stop"
    assert not list((run / "errors").glob("*"))


@pytest.mark.long
def test_the_same_command_in_a_new_container_goes_on_after_any_kill(tmp_path):
    """Containers of one machine: another host name each time, the same process ids."""
    user = [] if os.geteuid() == 0 else ["-Ur"]
    container = ["unshare", *user, "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*container, "hostname", "a"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces for host names and process ids are not permitted here")
    run = tmp_path / "runs" / "stripes" / "it"
    words = f"{sys.executable} -m trainyard run stripes --name it --jobs {FAMILIES} max_duration=4ep"
    hosts = set()
    for number, sign in enumerate(["data/*", "data/*/packing.json", "runs/stripes/it/lock", "runs/*/it/metrics.jsonl"]):
        process = subprocess.Popen([*container, "sh", "-c", f"hostname box{number} && {words}"], cwd=tmp_path)
        while not list(tmp_path.glob(sign)):
            assert process.poll() is None, f"ended before {sign} appeared"
            time.sleep(0.002)
        process.kill()
        process.wait()
        if (run / "lock").exists():
            hosts.add(json.loads((run / "lock").read_text())["host"])
    assert hosts == {"box2", "box3"}
    last = ["sh", "-c", f"hostname last && exec {words}"]
    done = subprocess.run([*container, *last], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "took over the lock that process" in done.stderr and "Traceback" not in done.stderr
