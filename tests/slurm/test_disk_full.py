"""What the batch script does when the disk of the run is full or read-only; Slurm's commands are stubs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import trainyard
from trainyard.launch.submit import render_attempt_script
from trainyard.runs.state import ExitCode

FILL = 'mount -t tmpfs -o size=256k tmpfs "$TRAINYARD_RUN" && cp -r "$KEPT"/. "$TRAINYARD_RUN"'
FULL = f'{FILL} && head -c 1M /dev/zero >"$TRAINYARD_RUN/ballast" 2>/dev/null'


LIMITS = "preempted=0 node_failure=0 crash=2 disk_full=3"


class BatchScript:
    """Runs `attempt.sh` in a mount namespace of its own, as the batch script of Slurm job 7."""

    def __init__(self, root: Path) -> None:
        self.run, self.kept, self.programs = root / "run", root / "kept", root / "bin"
        for folder in (self.run, self.kept / "slurm", self.programs):
            folder.mkdir(parents=True)
        (root / "attempt.sh").write_text(render_attempt_script())
        self.script = root / "attempt.sh"
        for name, text in (("squeue", "echo trainyard RUNNING"), ("sinfo", ""), ("sleep", "")):
            self._write_program(name, text)
        self._write_program("scontrol", f'echo "$@" >>{root / "requeued"}')
        self.requeued = root / "requeued"

    def _write_program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def start(self, words: str, *, disk: str, restarts: int = 0, limits: str = LIMITS) -> int:
        """Source the script; afterwards `kept` holds what the disk holds. Returns its exit code."""
        slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURM_JOB_NODELIST": "a"}
        environ = {"PATH": f"{self.programs}:{os.environ['PATH']}", "TRAINYARD_RUN": str(self.run), **slurm}
        environ |= {"TRAINYARD_LIMITS": limits, "KEPT": str(self.kept), "SLURM_JOB_PARTITION": "p"}
        lines = f'{disk}\n( source {self.script} {words} )\ncode=$?\ncp -r "$TRAINYARD_RUN"/slurm "$KEPT"\nexit $code'
        user = [] if os.geteuid() == 0 else ["-Ur"]
        command = ["unshare", *user, "-m", "bash", "-c", lines]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        if "mount:" in done.stderr or "unshare:" in done.stderr:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        return done.returncode

    def read_log(self) -> list[dict]:
        path = self.kept / "slurm" / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


@pytest.fixture
def batch(tmp_path: Path) -> BatchScript:
    assert shutil.which("unshare"), trainyard.__file__
    return BatchScript(tmp_path)


@pytest.mark.parametrize("disk", [FULL, f'{FILL} && mount -o remount,ro "$TRAINYARD_RUN"'], ids=["full", "read-only"])
def test_an_attempt_that_finds_no_room_is_requeued_until_its_budget_is_used_up(batch: BatchScript, disk: str):
    for restarts in range(3):
        assert batch.start("begin", disk=disk, restarts=restarts) == ExitCode.DISK_FULL
        assert batch.requeued.read_text() == "requeue 7\n" * (restarts + 1)
    assert batch.start("begin", disk=disk, restarts=3) == ExitCode.DISK_FULL
    assert batch.requeued.read_text() == "requeue 7\n" * 3
    more = LIMITS.replace("disk_full=3", "disk_full=9")
    assert batch.start("begin", disk=FILL, restarts=4, limits=more) == 0
    assert [line["cause"] for line in batch.read_log() if line["event"] == "end"] == ["disk_full"]


def test_ranks_that_found_no_room_for_a_checkpoint_are_requeued_as_often_as_the_budget_says(batch: BatchScript):
    """The newest checkpoint stays the same, which is no reason to stop: the disk was the reason."""
    for restarts in range(4):
        assert batch.start("begin", disk=FILL, restarts=restarts) == 0, restarts
        (batch.kept / "slurm" / f"left-7-{restarts}").write_text(f"{ExitCode.DISK_FULL}\n")
        assert batch.start("end 1", disk=FILL, restarts=restarts) == ExitCode.DISK_FULL
    ends = [(line["cause"], line["action"]) for line in batch.read_log() if line["event"] == "end"]
    assert ends == [("disk_full", "requeue")] * 3 + [("disk_full", "stop")]
    assert batch.requeued.read_text() == "requeue 7\n" * 3


def test_ranks_that_could_not_even_leave_a_note_are_recognised(batch: BatchScript):
    assert batch.start("begin", disk=FILL) == 0
    assert batch.start("end 143", disk=FULL) == ExitCode.DISK_FULL
    assert batch.requeued.read_text() == "requeue 7\n"


def test_two_crashes_without_a_new_checkpoint_still_stop_the_job(batch: BatchScript):
    for restarts in range(2):
        assert batch.start("begin", disk=FILL, restarts=restarts) == 0
        code = batch.start("end 1", disk=FILL, restarts=restarts)
    assert code == 1 and [line["cause"] for line in batch.read_log() if line["event"] == "end"][-1] == "no_progress"
