"""Decides whether compile=auto compiles, from what `trainyard gpu-check` measured, and where compiled code is kept.

Loads no torch.
"""

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.duration import Duration
from trainyard.environment import THIS_CODE, describe_cpu
from trainyard.errors import UserError
from trainyard.files import make_own_folder, parse_json, read_file
from trainyard.settings import TrainConfig

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
CPU = "cpu"

_SCRATCH = "TRAINYARD_SCRATCH"
_MOST_BYTES = 64 * 2**20


class Setup(NamedTuple):
    """What a measurement is valid for."""

    card: str  # torch.cuda.get_device_name(), or `CPU`
    torch: str  # its version
    family: str
    precision: str  # of matrix products: "fp32", "fp16" or "bf16"
    channels_last: bool
    deterministic: bool


class Measurement(NamedTuple):
    """Training steps of a preset, eager and compiled. The fields of a line of `trainyard gpu-check`."""

    preset: str
    samples_per_s_eager: float  # median
    spread_eager: float  # (largest - smallest) / median
    samples_per_s_compiled: float
    spread_compiled: float
    quotable: bool
    compile_startup_s: float  # with an empty cache


# The decision


def find_results(code: Path = THIS_CODE) -> list[Path]:
    """Return the result files of `trainyard gpu-check`: below the current folder, where it writes, and the checkout."""
    folders = dict.fromkeys(folder.resolve() / "benchmarks" for folder in (Path(), code.parents[1]))
    return [path for folder in folders for path in sorted(folder.glob("gpu-*.jsonl"))]


def decide_compile(
    results: Iterable[Path], setup: Setup, *, preset: str, samples: float | None, minutes: float
) -> tuple[bool, str]:
    """Return whether a run of this length is faster compiled, and the reason.

    It is if compiled steps are faster even where both spreads count against them, and if that saves more time than
    compiling takes.

    Args:
        results: of trainyard gpu-check.
        samples: how many a rank trains on in the whole run; None: as many as it can in `minutes`.

    Raises:
        UserError: a file is damaged.
    """
    measured = _find_measurement(results, setup, preset=preset)
    if measured is None:
        tried = "the CPU; compile=on tries it" if setup.card == CPU else "this card: trainyard gpu-check"
        return False, f"not measured on {tried}"
    eager, compiled = measured.samples_per_s_eager, measured.samples_per_s_compiled
    figures = (
        f"trainyard gpu-check measured {measured.preset} on this card: {eager:.4g} samples/s eager "
        f"(+-{measured.spread_eager:.0%}), {compiled:.4g} compiled (+-{measured.spread_compiled:.0%})"
    )
    if not measured.quotable:
        return False, f"{figures}, too noisy or too few rounds to decide by; repeat it: trainyard gpu-check"
    if compiled * (1 - measured.spread_compiled) <= eager * (1 + measured.spread_eager):
        return False, f"{figures}, not faster by more than the spread"
    planned = minutes * 60 * eager if samples is None else samples
    saved_s = planned / eager - planned / compiled
    return saved_s > measured.compile_startup_s, (
        f"{figures}; this run's {planned:.0f} samples a rank take {saved_s:.0f} s less, compiling takes "
        f"{measured.compile_startup_s:.0f} s"
    )


def plan_length(config: TrainConfig, *, samples: int, world_size: int) -> dict[str, Any]:
    """Return how long a run is, as `decide_compile` takes it.

    Args:
        samples: of an epoch, over all ranks.
    """
    length = Duration.parse(config.max_duration)
    if length.unit == "min":
        return {"samples": None, "minutes": length.value}
    steps = length.to_steps(-(-samples // config.global_batch_size))
    return {"samples": steps * config.global_batch_size / world_size, "minutes": 0.0}


def keep_compile(env: Mapping[str, Any], place: str) -> bool | None:
    """Return what compile=auto chose when the run began on this card with this torch; None if it did not yet.

    Versions that recorded no such choice never compiled on auto.

    Args:
        env: the run's env.json.
    """
    recorded = env.get("exactness", {}).get("compiled_by_card")
    if recorded is None:
        return False if "compile" in env.get("choices", {}) else None
    compiled: bool | None = recorded.get(place)
    return compiled


def _find_measurement(paths: Iterable[Path], setup: Setup, *, preset: str) -> Measurement | None:
    """Return the newest measurement of a preset in this setup; if there is none, of another preset of its family."""
    found = [(date, measured) for path in paths for date, there, measured in _read_measurements(path) if there == setup]
    own = [(date, measured) for date, measured in found if measured.preset == preset]
    return max(own or found, key=lambda item: item[0])[1] if found else None


def _read_measurements(path: Path) -> Iterator[tuple[str, Setup, Measurement]]:
    """Yield the comparisons of eager with compiled steps in a result file, with its date."""
    date = ""
    for number, raw in enumerate(read_file(path, most_bytes=_MOST_BYTES).splitlines(), start=1):
        try:
            line = parse_json(raw)
            if not isinstance(line, dict):
                raise TypeError("not an object")
            date = str(line["date"]) if number == 1 else date
            if number == 1 or "samples_per_s_compiled" not in line:
                continue
            setup = Setup(**{name: line[name] for name in Setup._fields})
            measured = Measurement(**{name: line[name] for name in Measurement._fields})
            _check_numbers(measured)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: expected a result of trainyard gpu-check, found {raw[:60]!r} ({error!r:.80}). "
                f"Move this file away, or use compile=off, which reads none: mv '{path}' '{path}.damaged'"
            ) from None
        yield date, setup, measured


def _check_numbers(measured: Measurement) -> None:
    numbers = [value for name, value in measured._asdict().items() if name not in ("preset", "quotable")]
    if not all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in numbers):
        raise ValueError("a rate, a spread or a time is not a number")
    if not measured.samples_per_s_eager or not measured.samples_per_s_compiled:
        raise ValueError("a rate is 0")


# Where compiled code is kept


def choose_cache(environ: Mapping[str, str], *, card: str | None, torch_version: str, attempt: str) -> tuple[Path, str]:
    """Return the folder in which torch.compile keeps its code for later attempts and runs, and the reason.

    What is in it is executed, so only this user can write to it, and no run folder has a say in where it is. Each
    card, torch and Python has its own; without a card each kind of CPU, whose vector instructions the code uses.

    Args:
        card: its name; None: the CPU.
        attempt: `read_attempt_id`.

    Raises:
        UserError: others can write to it, or it cannot be created.
    """
    if stated := environ.get(CACHE_VARIABLES[0]):
        return make_own_folder(Path(stated)), f"{CACHE_VARIABLES[0]} in the environment"
    if fault := _explain_unusable_scratch(environ.get(_SCRATCH), attempt):
        base, reason = _make_user_cache(environ), f"in this user's cache: {fault}"
    else:
        base, reason = make_own_folder(Path(environ[_SCRATCH]) / f"trainyard-{os.getuid()}"), f"in {_SCRATCH}"
    device = card or f"{CPU} {describe_cpu(Path('/proc/cpuinfo').read_text())}"
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    name = re.sub(r"[^a-z0-9.+]+", "-", f"{device} torch-{torch_version} {python}".lower()).strip("-")
    return make_own_folder(make_own_folder(base / "compiled") / name), reason


def _explain_unusable_scratch(scratch: str | None, attempt: str) -> str:
    """Return why compiled code cannot be kept on scratch; "" if it can."""
    slurm_job_id = attempt.partition("-")[0]
    if scratch is None:
        return f"no {_SCRATCH}"
    if not Path(scratch).is_absolute() or not Path(scratch).is_dir():
        return f"{_SCRATCH} is '{scratch}', which is not a folder here"
    if slurm_job_id.isdigit() and re.search(rf"(?<!\d){slurm_job_id}(?!\d)", scratch):
        return f"{scratch} ends with this Slurm job"
    return ""


def _make_user_cache(environ: Mapping[str, str]) -> Path:
    """Return Trainyard's folder in the user's cache, created if missing.

    Raises:
        UserError: it cannot be created; says what to type.
    """
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: there is no place for compiled code: {error.strerror}. Name a folder that only you can write "
            f"to: export {CACHE_VARIABLES[0]}=$(mktemp -d)"
        ) from None
    return folder
