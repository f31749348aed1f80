"""List, prepare or measure configurations, and print JSON lines; `trainyard bench` starts it, once for each.

Runs in our environment and in the peers', where trainyard is not installed: hence the two paths below.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0:1] = [str(ROOT), str(ROOT / "src")]  # this folder itself holds names that would shadow packages

from benchmarks import loaders, ours, peers, readers  # noqa: E402
from benchmarks.contract import BATCH, SIZE_PX, Compared, Setting  # noqa: E402
from trainyard.tools.bench import measure  # noqa: E402

STEP = {"suite": "step", "name": "ours", "environment": "dev", "note": "train_step of the engine"}
"""The suite "step" is no iterator of batches: listed here, it has no data, and `step.py` measures it."""
ENVIRONMENTS = {"dev": (ours, readers, loaders), "peers": (peers,)}


def main() -> None:
    arguments = parse()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print would otherwise land among our lines
    setting = Setting(arguments.data, arguments.rgb, arguments.gray, arguments.threads)
    if arguments.command == "list":
        lines = describe()
    elif arguments.command == "prepare":
        lines = [{"data": str(find(name).data(setting))} for name in arguments.names if name != "step/ours"]
    else:
        lines = measure_one(arguments.names[0], setting, arguments)
    output.writelines(json.dumps(line) + "\n" for line in lines)
    output.close()
    os._exit(0)  # threads and worker processes of a loader in full flight need no orderly end


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("list", "prepare", "measure"))
    parser.add_argument("names", nargs="*", metavar="SUITE/NAME")
    parser.add_argument("--data", type=Path, required=True)
    for number in ("rgb", "gray", "threads", "warmup", "samples"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args()


def describe() -> list[dict[str, Any]]:
    return [STEP] + [
        {"suite": each.suite, "name": each.name, "environment": environment, "note": each.note}
        for environment, modules in ENVIRONMENTS.items()
        for each in chain.from_iterable(module.configurations() for module in modules)
    ]


def find(full_name: str) -> Compared:
    modules = chain.from_iterable(ENVIRONMENTS.values())
    known = chain.from_iterable(module.configurations() for module in modules)
    return next(each for each in known if f"{each.suite}/{each.name}" == full_name)


def measure_one(full_name: str, setting: Setting, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    limits = {"warmup": arguments.warmup, "samples": arguments.samples, "seconds": arguments.seconds}
    if full_name == "step/ours":
        import torch

        from benchmarks import step

        torch.set_num_threads(1)  # two that wait for each other show the machine's noise, not the step's cost
        return [line | {"versions": versions(("trainyard", "torch"))} for line in step.measure_interleaved(**limits)]
    each = find(full_name)
    if each.suite != "read":
        import torch

        torch.set_num_threads(1)  # every loader here brings threads or processes of its own
    data = each.data(setting)
    read_through(data)
    batches = each.batches(data, setting)
    first = next(batches)
    check(each, first)
    output = {"shape": list(first.shape), "dtype": str(first.dtype)}
    facts = {"name": each.name, "output": output, "versions": versions(each.distributions)}
    return [facts | measure(batches, **limits)]


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Of two wheels of one package, only one is installed."""
    found = {"python": sys.version.split()[0]}
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read_through(data: Path) -> None:
    """Bring the data into the page cache: every configuration is measured warm."""
    for path in [data] if data.is_file() else filter(Path.is_file, data.rglob("*")):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def check(each: Compared, batch: Any) -> None:
    """Hold the first batch against what the suite asks for; the number of channels is left to the note."""
    if each.suite == "read":
        assert batch.shape == (BATCH,) and (batch > 0).all(), batch
        return
    assert str(batch.dtype) == "torch.uint8" or each.name == "ours_float", f"{each.name} yields {batch.dtype}"
    pixels = BATCH * SIZE_PX * SIZE_PX
    assert len(batch) == BATCH and batch.numel() in (pixels, 3 * pixels), f"{each.name} yields {batch.shape}"


if __name__ == "__main__":
    main()
