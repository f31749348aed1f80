"""Prepares or measures configurations in a process of its own, and prints JSON lines; `suite.py` starts it."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import loaders, ours, readers
from benchmarks.contract import BATCH, SIZE_PX, Configuration, Setting


def list_configurations() -> list[Configuration]:
    """List the configurations of all suites. Loads no torch."""
    modules = (ours, readers, loaders)
    return [configuration for module in modules for configuration in module.list_configurations()]


def main() -> None:
    """Run `worker.py prepare|measure SETTING SUITE/NAME...`; SETTING is JSON."""
    command, options, *names = sys.argv[1:]
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of our lines
    values = json.loads(options)
    setting = Setting(**{**values, "data": Path(values["data"])})
    for configuration in list_configurations():
        if configuration.full_name in names:
            data = configuration.data(setting)
            if command == "measure":
                output.write(json.dumps(measure_one(configuration, data, setting)) + "\n")
    output.close()
    os._exit(0)  # skip the orderly shutdown of a busy loader's threads and worker processes


def measure_one(configuration: Configuration, data: Path, setting: Setting) -> dict[str, Any]:
    """Measure one configuration."""
    if configuration.suite != "read":
        import torch

        torch.set_num_threads(1)  # every loader here has its own threads or processes
    limits = {"warmup": setting.warmup, "samples": setting.samples, "seconds": setting.seconds}
    read_through(data)
    batches = configuration.batches(data, setting)
    first = next(batches)
    check_batch(configuration, first)
    output = {"shape": list(first.shape), "dtype": str(first.dtype)}
    versions = find_versions(configuration.distributions)
    return {"name": configuration.name, "output": output, "versions": versions, **measure(batches, **limits)}


def find_versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions; of alternative wheels of a package, only one is installed."""
    found = {"python": sys.version.split()[0]}
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read_through(data: Path) -> None:
    """Read the data into the page cache: every configuration is measured warm."""
    for path in [data] if data.is_file() else filter(Path.is_file, data.rglob("*")):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def check_batch(configuration: Configuration, batch: Any) -> None:
    """Check the first batch against what the suite requires; a different number of channels goes into the note."""
    if configuration.suite == "read":
        assert batch.shape == (BATCH,) and (batch > 0).all(), batch
        return
    assert str(batch.dtype) == "torch.uint8" or configuration.name == "ours_float", (
        f"{configuration.name} yields {batch.dtype}"
    )
    pixels = BATCH * SIZE_PX * SIZE_PX
    assert len(batch) == BATCH and batch.numel() in (pixels, 3 * pixels), f"{configuration.name} yields {batch.shape}"


def measure(batches: Iterator[Sized], *, warmup: int, samples: int, seconds: float) -> dict[str, float]:
    """Time an endless iterator of batches; `len(batch)` is its number of samples.

    Args:
        warmup: samples to read before the clock starts, to fill caches, ring buffers and worker processes.
        samples, seconds: both must be reached before the clock stops.

    Returns:
        samples, seconds and core_seconds (CPU time of this process, its threads and its child processes), and the
        rates samples_per_s and samples_per_core_s.
    """
    _consume(batches, samples=warmup, seconds=0.0)
    cpu_before, begin = _read_cpu_s(), time.perf_counter()
    count = _consume(batches, samples=samples, seconds=seconds)
    wall, cpu = time.perf_counter() - begin, _read_cpu_s() - cpu_before
    rates = {"samples_per_s": count / wall, "samples_per_core_s": count / cpu}
    return {"samples": count, "seconds": wall, "core_seconds": cpu, **rates}


def _consume(batches: Iterator[Sized], *, samples: int, seconds: float) -> int:
    begin, count = time.perf_counter(), 0
    while count < samples or time.perf_counter() - begin < seconds:
        count += len(next(batches))
    return count


def _read_cpu_s() -> float:
    """Read the CPU seconds of this process, its ended children and its living descendants (in ticks of 10 ms)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(_read_cpu_ticks(pid) for pid in _list_descendants(os.getpid()))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living / os.sysconf("SC_CLK_TCK")


def _list_descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from _list_descendants(int(child))


def _read_cpu_ticks(pid: int) -> int:
    """Read user and system time of a process and the children it has waited for: proc(5), stat, fields 14 to 17."""
    fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields_after_name[11:15])


if __name__ == "__main__":
    main()
