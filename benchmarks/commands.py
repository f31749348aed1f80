"""Measure how long submit, status, why and cancel take on a Slurm, and what heavy modules they load.

    export SLURM_CONF=$PWD/.slurm-lab/etc/slurm.conf    # after make slurm-lab-up
    python -m benchmarks.commands --cluster slurm/lab.yaml

Each round submits a run that Slurm holds, asks about it, and cancels it. A first round is not measured: it predicts the
job's memory, and compiles our modules to bytecode, whatever PYTHONDONTWRITEBYTECODE says here. CPU time counts user and
system time of the command and of what it waits for, such as sbatch: other programs on a busy machine make it longer,
but less so than the wall time.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import format_results
from trainyard.measure import Summary, make_header, write_new

HEAVY = ("torch", "h5py", "nvidia.dali", "matplotlib", "numpy", "hydra", "omegaconf")


def main() -> int:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, help="cluster file")
    parser.add_argument("--job", default="fingerprint_1m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path("benchmarks"))
    args = parser.parse_args()
    Path("runs").mkdir(exist_ok=True)  # git ignores it, and the nodes see it
    with tempfile.TemporaryDirectory(prefix=".commands-", dir="runs") as folder:
        lines = measure(args, Path(folder).absolute())
    head = make_header("commands", vars(args))
    head["command"] = shlex.join(["python", "-m", "benchmarks.commands", *sys.argv[1:]])
    path = write_new(args.results, "commands", [head, *lines])
    print(f"{format_results([head, *lines])}\nMedians of {args.rounds} rounds, in {path}")
    return 0


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one line for each command."""
    held = folder / args.cluster.name
    content = yaml.safe_load(args.cluster.read_text())
    held.write_text(yaml.safe_dump({**content, "sbatch": {**content.get("sbatch", {}), "hold": True}}))
    runs = folder / "runs"
    commands = {
        "submit": [args.job, "--synthetic", "--gpus", "8", "--cluster", str(held)],
        "status": [],
        "why": [args.job],
        "cancel": [args.job],
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    loads: dict[str, str] = {}
    for number in range(-1, args.rounds):  # the first fills caches, and says what is imported
        for name, words in commands.items():
            flags = ["-X", "importtime"] if number < 0 else []
            wall, cpu, imported = run_command([*flags, "-m", "trainyard", name, *words, "--runs", str(runs)])
            if number < 0:
                loaded = [module for module in HEAVY if f"| {module}\n" in imported.replace("|   ", "| ")]
                loads[name] = ", ".join(loaded) or "none of " + ", ".join(HEAVY)
            else:
                took[name].append((wall, cpu))
    return [
        {
            "kind": "result",
            "name": name,
            "rounds": values,
            "wall_ms": asdict(Summary.from_values([1000 * wall for wall, _ in values])),
            "cpu_ms": asdict(Summary.from_values([1000 * cpu for _, cpu in values])),
            "loads": loads[name],
        }
        for name, values in took.items()
    ]


def run_command(words: list[str]) -> tuple[float, float, str]:
    """Return wall time, CPU time and standard error of a Python command."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *words]
    with tempfile.TemporaryFile() as said:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: code {process.returncode}\n{text}")
    return wall, usage.ru_utime + usage.ru_stime, text


if __name__ == "__main__":
    sys.exit(main())
