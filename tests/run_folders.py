"""Writes run folders for tests, as the launcher, the batch script and the ranks write them."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard.cluster.query import SlurmJob
from trainyard.config.frozen import write_frozen
from trainyard.runs.folder import write_env
from trainyard.runs.history import read_run
from trainyard.runs.status import Status, read_status

NOW = 1_767_400_000.0

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ann/runs/prints/first/code/trainyard/train/engine.py", line 190, in _step
    losses = self.state.model(batch)
  File "/home/ann/runs/prints/first/code/jobs/prints/module.py", line 88, in forward
    x = self.block(x)
        ^^^^^^^^^^^^^
  File "/home/ann/.venv/lib/python3.11/site-packages/torch/nn/modules/conv.py", line 554, in forward
    return self._conv_forward(input, self.weight, self.bias)
torch.OutOfMemoryError: CUDA out of memory.
"""


class RunFolder:
    """A run folder, written as the launcher, the batch script and the ranks write it."""

    def __init__(self, root: Path, *, job: str | None = "12", slurm_name: str = "lab") -> None:
        self.job, self.slurm_name = job, slurm_name
        self.run = root / "runs" / "prints" / "20260102-030405-abcdef0"
        self.logs = self.run / "slurm"
        self.logs.mkdir(parents=True)
        write_frozen({"job": "prints", "optimizer": {"name": "adamw", "lr": 0.004}}, self.run / "config.yaml")
        choices = {"micro_batch_size": {"value": 32, "reason": "as requested"}}
        write_env(self.run, {"created": format_time(NOW - 9999), "choices": choices})
        if job is not None:
            self.submit(job, NOW - 9000)

    def submit(self, job: str, at: float) -> None:
        submission = {"scheduler": "slurm", "job": job, "cluster": "lab", "hw": "a100", "gpus": 8, "nodes": 1}
        submission |= {"slurm_name": self.slurm_name}
        submission |= {"partition": "a100", "submitted": format_time(at, "+00:00"), "folder": str(self.logs)}
        (self.logs / "submission.json").write_text(json.dumps(submission))

    def begin(self, at: float, *, job: str = "12", attempt: int = 0) -> None:
        line = {"event": "start", "job": job, "attempt": attempt, "time": format_time(at), "nodes": "a100-0"}
        append(self.logs / "attempts.jsonl", line | {"partition": "a100", "checkpoint": ""})
        self.append_stderr(f"trainyard: attempt {job}-{attempt} on a100-0\n", job=job)

    def end(self, at: float, code: int, cause: str, action: str, *, job: str = "12", attempt: int = 0) -> None:
        line = {"event": "end", "job": job, "attempt": attempt, "time": format_time(at), "code": code, "cause": cause}
        append(self.logs / "attempts.jsonl", line | {"action": action, "reason": ""})

    def add_event(self, at: float, name: str, step: int, *, attempt: str = "12-0", **more: Any) -> None:
        named = {"attempt": attempt} if name in ("start", "resume") else {}
        line = {"kind": "event", "step": step, "event": name, **named, **more}
        append(self.run / "events.jsonl", line | {"elapsed_s": 1.0, "time": format_time(at, "+00:00")})

    def write_heartbeat(
        self, at: float, *, attempt: str = "12-0", step: int = 40, phase: str = "training", previous: str | None = None
    ) -> None:
        beat = {"time": at, "phase": phase, "step": step, "total_steps": 100, "samples_per_s": 123.4}
        beat |= {"host": "a100-0", "attempt": attempt} | ({"previous": previous} if previous else {})
        (self.run / "heartbeat.json").write_text(json.dumps(beat))

    def add_error(self, at: float, cause: str, *, rank: int = 0, attempt: str = "12-0", message: str = "no") -> Path:
        path = self.run / "errors" / f"{attempt}-rank{rank}.json"
        path.parent.mkdir(exist_ok=True)
        error = {"time": at, "rank": rank, "host": "a100-0", "type": "OutOfMemoryError", "message": message}
        path.write_text(json.dumps(error | {"traceback": TRACEBACK, "cause": cause}))
        return path

    def append_stderr(self, text: str, *, job: str = "12") -> None:
        with (self.logs / f"{job}_0_log.err").open("a") as file:
            file.write(text)

    def read_status(self, job: SlurmJob | None = None, *, slurm_unavailable_reason: str = "") -> Status:
        return read_status(read_run(self.run), job, now=NOW, slurm_unavailable_reason=slurm_unavailable_reason)


def format_time(at: float, zone: str = "Z") -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", zone)


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def make_slurm_job(
    state: str, reason: str = "None", *, job: str = "12", restarts: int | None = 0, by: int | None = None
) -> SlurmJob:
    return SlurmJob(job, state, reason, nodes="a100-0", restarts=restarts, source="squeue", cancelled_by=by)
