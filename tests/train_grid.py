"""Trains a job once for each combination of options, and writes how good each run became, next to its baselines.

`python -m tests.train_grid JOB [OPTION=VALUE ...] --vary 'OPTION=VALUE|VALUE' --work FOLDER --results benchmarks`
writes `grid-JOB-DATE.jsonl`: a line for each run, with every metric of its test set and of its baselines, or of its
validation set if it has no test set, and the CPU seconds that it took, packing and evaluation included. Several
options that are varied make all combinations. In a value, `{data.path}` is the value of that option, such as in the
name of a run to start from.
"""

import argparse
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.measure import make_header, write_new
from trainyard.runs.events import read_events, read_metrics, select_metrics

ROOT = Path(__file__).resolve().parents[1]


def train(job: str, options: Sequence[str], name: str, work: Path, jobs: Path = ROOT / "jobs") -> Path:
    """Train a job and return its run; one that is there already is finished.

    Raises:
        AssertionError: it failed; the message is the end of what it printed.
    """
    runs = work / "runs"
    command = [sys.executable, "-m", "trainyard", "run", job, *options, f"data.cache={work}", "--name", name]
    done = subprocess.run(
        [*command, "--runs", str(runs), "--jobs", str(jobs)],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return runs / job / name


def read_result(run: Path) -> dict[str, Any]:
    """Return the metrics of a test set of a run, or else of its validation set, and of its baselines by name."""
    lines = [line for line in read_metrics(run) if "split" in line]
    [*_, line] = [line for line in lines if line["split"].startswith("test")] or lines
    baselines = [event["scores"] for event in read_events(run) if event.get("event") == "baselines"]
    return {"metrics": select_metrics(line), "baselines": baselines[-1] if baselines else {}}


def measure_cpu_s() -> float:
    """Return the CPU time of all processes that this one has waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    parser.add_argument("--vary", action="append", default=[], metavar="OPTION=VALUE|VALUE")
    parser.add_argument("--jobs", type=Path, default=Path("jobs"), help="folder of families in this checkout")
    parser.add_argument("--show", default="", help="the metric to print")
    parser.add_argument("--work", type=Path, required=True, help="folder for packed data and runs; kept")
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    varied = [(name, values.split("|")) for name, _, values in (text.partition("=") for text in args.vary)]
    lines = []
    for chosen in itertools.product(*(values for _, values in varied)):
        options = {name: value for (name, _), value in zip(varied, chosen, strict=True)}
        path = options.get("data.path", "")
        words = [f"{name}={value}".replace("{data.path}", path) for name, value in options.items()]
        name = "-".join("".join(filter(str.isalnum, word)) for word in words)
        before = measure_cpu_s()
        found = read_result(train(args.job, [*args.options, *words], name, args.work, ROOT / args.jobs))
        cpu_s = measure_cpu_s() - before
        lines.append({"kind": "run", "job": args.job, **options, **found, "cpu_s": cpu_s})
        others = {name: scores.get(args.show) for name, scores in found["baselines"].items()}
        print(*words, args.show, found["metrics"].get(args.show), others, flush=True)
    header = make_header(f"grid-{args.job}", vars(args))
    print(f"written: {write_new(args.results, f'grid-{args.job}', [header, *lines])}")


if __name__ == "__main__":
    main()
