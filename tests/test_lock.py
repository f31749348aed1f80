"""The lock of a run appears whole, is taken over from dead owners in other containers, and can always be removed."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainyard.errors import UserError
from trainyard.runs.lock import RunLock, read_owner, release

HOLD_LOCK = """
import sys, time
from pathlib import Path
from trainyard.runs.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
CONTAINER = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "--uts", "--pid", "--fork", "--kill-child"]


@pytest.fixture
def container_writer(tmp_path: Path):
    """Start a process that owns the lock, with a host name and process ids of its own, as in a container."""
    lines = f'hostname 0123456789ab && exec {sys.executable} -c "$0" {tmp_path}'
    process = subprocess.Popen([*CONTAINER, "sh", "-c", lines, HOLD_LOCK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "held\n":
        pytest.skip("namespaces for host names and process ids are not permitted here")
    yield process
    process.kill()
    process.wait()


def test_a_writer_in_another_container_of_this_machine_is_seen_and_keeps_its_lock(tmp_path, container_writer):
    owner = json.loads((tmp_path / "lock").read_text())
    assert (owner["host"], owner["pid"]) == ("0123456789ab", 1)
    for break_other_host in (False, True):
        with pytest.raises(UserError, match=r"in another container of this machine.*docker stop 0123456789ab"):
            RunLock(tmp_path, break_other_host=break_other_host).__enter__()


def test_after_kill_9_of_a_container_the_same_command_takes_over(tmp_path, container_writer, log):
    container_writer.send_signal(signal.SIGKILL)
    container_writer.wait()
    owner = read_owner(tmp_path / "lock")
    while owner.find_alive(tmp_path / "lock"):  # unshare dies first, and the kernel then kills what it started
        time.sleep(0.01)
    assert not owner.is_checkable_here()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [tmp_path / "lock.guard"]
    assert len(log) == 1 and "took over the lock that process 1 on 0123456789ab held" in log[0]


def test_a_copied_run_tells_nothing_about_the_writer_in_a_container(tmp_path, container_writer):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (*tmp_path.glob("lock"), *tmp_path.glob(".lock.*")):
        shutil.copy(path, copy)
    with pytest.raises(UserError, match=r"or if 0123456789ab was a container that is gone, add --break-lock"):
        RunLock(copy).__enter__()


def test_a_lock_of_another_boot_or_of_an_earlier_version_is_refused_with_advice_that_works(tmp_path):
    with RunLock(tmp_path):
        content = json.loads((tmp_path / "lock").read_text())
    content |= {"host": "0123456789ab", "pid": 1, "pid_namespace": "pid:[1]"}
    for changes in ({"boot_id": "another"}, {"token": ""}):
        (tmp_path / "lock").write_text(json.dumps({**content, **changes}))
        with pytest.raises(UserError, match="add --break-lock"):
            RunLock(tmp_path).__enter__()
        with RunLock(tmp_path, break_other_host=True):
            pass


@pytest.mark.parametrize("content", ["", '{"host": "a', "[]", "\0\0\0\0"])
def test_an_unreadable_lock_is_replaced_by_break_lock_and_by_the_next_attempt_of_slurm(tmp_path, content, log):
    for arguments in ({"break_other_host": True}, {"attempt": "12-1"}):
        (tmp_path / "lock").write_text(content)
        with pytest.raises(UserError, match="add --break-lock"):
            RunLock(tmp_path, attempt="local-1").__enter__()
        with RunLock(tmp_path, **arguments):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert len(log) == 2 and all("replaced a lock that cannot be read" in line for line in log)
    (tmp_path / "lock").write_text(content)
    release(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_damaged_lock_whose_writer_lives_is_not_replaced(tmp_path):
    with RunLock(tmp_path):
        whole = (tmp_path / "lock").read_text()
        (tmp_path / "lock").write_text("{")
        for arguments in ({"break_other_host": True}, {"attempt": "12-1"}):
            with pytest.raises(UserError, match="not a readable lock"):
                RunLock(tmp_path, **arguments).__enter__()
        with pytest.raises(UserError, match="not a readable lock"):
            release(tmp_path)
        (tmp_path / "lock").write_text(whole)
    assert not (tmp_path / "lock").exists()


def test_a_later_local_attempt_does_not_supersede_an_earlier_one_that_lives(tmp_path):
    with RunLock(tmp_path, attempt="local-100"):
        with pytest.raises(UserError, match="That is this host"):
            RunLock(tmp_path, attempt="local-200").__enter__()


def test_a_lock_that_cannot_be_written_whole_does_not_appear(tmp_path):
    """A file size limit cuts the write short, as a full disk does, for any user."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            RunLock(tmp_path).__enter__()
        except OSError as error:
            os._exit(0 if error.errno == errno.EFBIG else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


def test_a_takeover_succeeds_after_one_that_was_killed_half_way_and_when_nfs_repeats_its_rename(tmp_path, monkeypatch):
    def replace_twice(*names: Path | str, **folders: int | None) -> None:
        replace(*names, **folders)
        replace(*names, **folders)  # finds nothing to rename

    replace = os.replace
    dead = subprocess.run(
        [sys.executable, "-c", "import os, sys; from pathlib import Path; from trainyard.runs.lock import RunLock\n"
         "with RunLock(Path(sys.argv[1])): os._exit(0)", str(tmp_path)]
    )  # fmt: skip
    assert dead.returncode == 0 and (tmp_path / "lock").exists()
    os.link(tmp_path / "lock", tmp_path / ".lock.new")
    monkeypatch.setattr(os, "replace", replace_twice)
    with RunLock(tmp_path) as lock:
        lock.check()
        assert sorted(path.name[:6] for path in tmp_path.iterdir()) == [".lock.", "lock", "lock.g"]


def test_the_next_owner_removes_what_a_killed_one_left_of_its_files(tmp_path: Path):
    left, others = tmp_path / ".env.json.0123456789abcdef.partial", tmp_path / ".report.html.0123456789abcdef.partial"
    for path in (left, others):
        path.write_text("half")
    with RunLock(tmp_path):
        assert not left.exists() and others.exists()
