"""List, prepare or measure configurations, and print JSON lines; `trainyard bench` runs this once per configuration.

Runs in our environment and in the peers', where trainyard is not installed, so it extends sys.path.
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
sys.path[0:1] = [str(ROOT), str(ROOT / "src")]  # not this folder, whose module names would shadow packages

from benchmarks import loaders, ours, peers, prints, readers  # noqa: E402
from benchmarks.contract import BATCH, PRINT_PX, SIZE_PX, Configuration, Setting  # noqa: E402
from trainyard.tools.bench import measure  # noqa: E402

STEP = {"suite": "step", "name": "ours", "environment": "dev", "note": "train_step of the engine"}
"""The suite "step" has no data and no iterator of batches: it is listed here and measured by `step.py`."""
ENVIRONMENTS = {"dev": (ours, readers, loaders, prints), "peers": (peers,)}


def main() -> None:
    arguments = parse()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of our lines
    setting = Setting(arguments.data, arguments.rgb, arguments.gray, arguments.prints, arguments.threads)
    if arguments.command == "list":
        lines = describe()
    elif arguments.command == "prepare":
        lines = [{"data": str(find(name).data(setting))} for name in arguments.names if name != "step/ours"]
    else:
        lines = measure_one(arguments.names[0], setting, arguments)
    output.writelines(json.dumps(line) + "\n" for line in lines)
    output.close()
    os._exit(0)  # skip the orderly shutdown of a busy loader's threads and worker processes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("list", "prepare", "measure"))
    parser.add_argument("names", nargs="*", metavar="SUITE/NAME")
    parser.add_argument("--data", type=Path, required=True)
    for number in ("rgb", "gray", "prints", "threads", "warmup", "samples"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args()


def describe() -> list[dict[str, Any]]:
    return [STEP] + [
        {
            "suite": configuration.suite,
            "name": configuration.name,
            "environment": environment,
            "note": configuration.note,
        }
        for environment, modules in ENVIRONMENTS.items()
        for configuration in chain.from_iterable(module.list_configurations() for module in modules)
    ]


def find(full_name: str) -> Configuration:
    modules = chain.from_iterable(ENVIRONMENTS.values())
    known = chain.from_iterable(module.list_configurations() for module in modules)
    return next(configuration for configuration in known if f"{configuration.suite}/{configuration.name}" == full_name)


def measure_one(full_name: str, setting: Setting, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    limits = {"warmup": arguments.warmup, "samples": arguments.samples, "seconds": arguments.seconds}
    if full_name == "step/ours":
        import torch

        from benchmarks import step

        torch.set_num_threads(1)  # several threads waiting for each other would measure noise, not the step's cost
        return [
            line | {"versions": find_versions(("trainyard", "torch"))} for line in step.measure_interleaved(**limits)
        ]
    configuration = find(full_name)
    if configuration.suite != "read":
        import torch

        torch.set_num_threads(1)  # every loader here has its own threads or processes
    data = configuration.data(setting)
    read_through(data)
    batches = configuration.batches(data, setting)
    first = next(batches)
    check_batch(configuration, first)
    output = {"shape": list(first.shape), "dtype": str(first.dtype)}
    about = {"name": configuration.name, "output": output, "versions": find_versions(configuration.distributions)}
    return [about | measure(batches, **limits)]


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
    side = PRINT_PX if configuration.suite == "prints" else SIZE_PX
    pixels = BATCH * side * side
    assert len(batch) == BATCH and batch.numel() in (pixels, 3 * pixels), f"{configuration.name} yields {batch.shape}"


if __name__ == "__main__":
    main()
