"""What a case of `trainyard bench scale` is, how large its input is, and how its work is measured.

Cases run with today's code and, for `--against REVISION`, with that of an earlier commit. So they import it within
functions, and where its names differed, ask which it has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Sizes:
    """How large the input of each case is."""

    lines: int = 1_000_000  # of a run's metrics
    runs: int = 2_000  # of a job
    rows: int = 200_000  # that two ranks gather
    dims: int = 512  # of a row, float32
    fingers: int = 250  # of which all pairs are scored, with 8 impressions each
    draws: int = 1_000  # of a bootstrap
    checkpoint_mib: int = 512
    shards: int = 1_200  # packed and read with at most 64 open files
    files: int = 50_000  # raw, 100 in a folder
    slow_files: int = 2_000  # raw, on a file system that takes a millisecond for each call
    submitted: int = 60  # raw prints that are packed already
    records: int = 100_000  # small images, packed with a kill in the middle
    prints: int = 2_048  # of 448 px, packed in each way
    arrays: int = 6_000  # uncompressed, of 50 KB
    read_prints: int = 512  # synthetic
    read_ms: int = 2_000  # at least, for each rate of a loader
    ordered: int = 10_000_000  # samples of an epoch
    ranks: int = 16  # on this machine, each a process
    rank_checkpoint_mib: int = 64  # that each of them resumes from

    def make_quick(self) -> "Sizes":
        """Return sizes that show in seconds that everything runs, and measure nothing."""
        small = Sizes(lines=2_000, runs=20, rows=2_000, dims=64, fingers=8, draws=20, checkpoint_mib=8, files=200)
        small = replace(small, shards=70, slow_files=20, submitted=8, ordered=1_000)
        return replace(
            small, records=5_000, prints=20, arrays=64, read_prints=64, read_ms=1, ranks=3, rank_checkpoint_mib=1
        )

    def make_comparable(self) -> "Sizes":
        """Return sizes at which the code before these cases existed takes seconds and not minutes."""
        small = replace(self, lines=100_000, rows=50_000, fingers=125, draws=200, checkpoint_mib=256, files=20_000)
        return replace(small, shards=200, runs=500, records=20_000, ordered=2_000_000)


@dataclass(frozen=True)
class Number:
    """One number that a case measured."""

    name: str
    value: float
    unit: str
    note: str = ""


class Absent(Exception):
    """The code that is measured has nothing of the kind; the text says what."""


@dataclass(frozen=True)
class Case:
    """One thing that grows."""

    name: str
    prepare: Callable[[Path, Sizes], None]  # writes the input into a folder, once, with today's code
    measure: Callable[[Path, Sizes], list[Number]]  # called in a process of its own


def prepare_nothing(folder: Path, sizes: Sizes) -> None:
    """Prepare a case that makes its own input."""


def measure_work(name: str, work: Callable[[], object], note: str = "") -> list[Number]:
    """Do some work once; return its seconds, and the memory that it had at most beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here: proc(5)
    before, begin = _read_memory_mib("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    peak = _read_memory_mib("VmHWM") - before
    return [Number(name, seconds, "s", note), Number(f"{name}, memory", peak, "MiB")]


def _read_memory_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def read_private_mib(process: int) -> float:
    """Return the memory that a process shares with no other (proc(5): smaps_rollup); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def list_children(process: int) -> list[int]:
    """Return the processes that another one started, in that order; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def make_folder(folder: Path) -> Path:
    """Return a folder, made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
