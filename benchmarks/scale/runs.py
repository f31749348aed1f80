"""What grows with a run's length and with the number of runs; how long commands take to start."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.contract import Absent, Case, Number, Sizes, make_folder, measure_work, prepare_nothing

# A run with many lines of metrics


def _prepare_metrics(folder: Path, sizes: Sizes) -> None:
    (folder / "config.yaml").write_text("job: scale\n")
    start = {"kind": "event", "step": 0, "event": "start", "attempt": "local-1", "total_steps": sizes.lines}
    monitor = {"split": "val", "metric": "eer", "mode": "min"}
    (folder / "events.jsonl").write_bytes(_encode({**start, "monitor": monitor, "elapsed_s": 0.0}))
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, sizes.lines + 1):
            numbers = {
                "loss": 1 / step,
                "centre": 2 / step,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "samples_per_s": 900.5 + step % 7,
            }
            times = {"step_ms": 71.25, "data_wait_ms": 1.5, "idle_ms": 0.5, "compute_ms": 70.75, "memory_gib": 11.25}
            line = {"kind": "train", "step": step, "epoch": step // 1000, "samples_seen": 64 * step, **numbers, **times}
            file.write(_encode({**line, "elapsed_s": step / 14}))


def _measure_metrics(folder: Path, sizes: Sizes) -> list[Number]:
    from trainyard.report.run_page import write_report
    from trainyard.train.recorder import Recorder

    size = (folder / "metrics.jsonl").stat().st_size
    note = f"{sizes.lines:,} lines, {size / 1e6:,.0f} MB"

    def resume() -> None:
        Recorder.rewind(folder, size)
        Recorder(folder, trackers=[], config={}, resume_at=sizes.lines).close()

    small = make_folder(folder / "small")
    _prepare_metrics(small, replace(sizes, lines=10))
    few = measure_work("report of a short run", lambda: write_report(small), "10 lines; loads what draws")
    numbers = measure_work("resume the metrics", resume, note)
    return [*numbers, *few[:1], *measure_work("report", lambda: write_report(folder), note)]


# A job with many runs


def _prepare_runs(folder: Path, sizes: Sizes) -> None:
    for number in range(sizes.runs):
        run = folder / "scale" / f"run-{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("job: scale\n")
        env = {"created": f"2026-01-01T{number:06}", "plan": {"key": "k"}, "versions": {"text": "x" * 4000}}
        (run / "env.json").write_text(json.dumps(env))


def _measure_search(folder: Path, sizes: Sizes) -> list[Number]:
    try:
        from trainyard.runs.observations import find_observations
    except ImportError:
        raise Absent("runs did not keep what they took") from None

    note = f"{sizes.runs:,} runs of a job, none fits"
    return measure_work("find what runs took", lambda: list(find_observations(folder, job="scale", key="k")), note)


# A board of many runs


def _prepare_board(folder: Path, sizes: Sizes) -> None:
    for number in range(sizes.runs):
        run = folder / "runs" / "scale" / f"run-{number}"
        run.mkdir(parents=True)
        _prepare_metrics(run, replace(sizes, lines=_BOARD_LINES))
        (run / "env.json").write_text(json.dumps({"created": f"2026-01-01T{number:06}"}))
        end = {"kind": "event", "step": _BOARD_LINES, "event": "done", "reason": "none", "elapsed_s": 90.0}
        whole = [{**json.loads((run / "events.jsonl").read_bytes()), "time": "2026-01-01T00:00:00+00:00"}]
        whole.append({**end, "time": "2026-01-01T00:01:40+00:00", "train_s": 80.0})
        (run / "events.jsonl").write_bytes(b"".join(map(_encode, whole)))


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


_BOARD_LINES = 500  # of a run's metrics: 180 kB


def _measure_board(folder: Path, sizes: Sizes) -> list[Number]:
    try:
        from trainyard.report.board import write_board
    except ImportError:
        raise Absent("no board") from None

    root, note = folder / "runs", f"{sizes.runs:,} runs that have ended"
    for path in root.glob(".board*"):
        path.unlink()
    first = measure_work("first board", lambda: write_board(root), note)
    return [*first, *measure_work("board again", lambda: write_board(root), note)[:1]]


# Commands, from the start of the process


def _measure_start(folder: Path, sizes: Sizes) -> list[Number]:
    import trainyard

    code = Path(trainyard.__file__).parents[2]
    own = make_folder(folder / code.name)  # what one code packs is not the other's
    train = ["run", "fingerprint_smoke", "max_duration=2st", "data.synthetic=60", "--jobs", str(code / "jobs")]
    commands = {"--help": ["--help"], "status": ["status"], "run": train}
    if not (own / "runs").exists():
        _run_command(train, own)  # packs
    numbers: list[Number] = []
    for name, command in commands.items():
        begin = time.perf_counter()
        _run_command(command, own)
        seconds = time.perf_counter() - begin
        loaded = _list_imports(_run_command(command, own, PYTHONPROFILEIMPORTTIME="1"))
        what = "two steps, evaluation and report; packed before" if name == "run" else ""
        numbers.append(Number(f"trainyard {name}", seconds, "s", what))
        numbers.append(Number(f"trainyard {name}, imports", len(loaded), "modules", "of all its processes"))
        if name == "run":
            compiler = sum(module.startswith(("torch._dynamo", "torch._inductor")) for module in loaded)
            numbers.append(Number("trainyard run, torch's compiler", compiler, "modules", "compile=off"))
    return numbers


def _run_command(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a command of Trainyard's; return what it wrote to stderr."""
    arguments = [sys.executable, "-m", "trainyard", *command]
    found = subprocess.run(arguments, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stderr


def _list_imports(text: str) -> list[str]:
    """List the modules that Python wrote for -X importtime."""
    return re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", text, re.MULTILINE)


CASES = (
    Case("metrics", _prepare_metrics, _measure_metrics),
    Case("runs", _prepare_runs, _measure_search),
    Case("board", _prepare_board, _measure_board),
    Case("start", prepare_nothing, _measure_start),
)
