"""What a run was predicted to take, and what it took: a section of its env.json, which later plans read."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.files import limit_writers
from trainyard.runs.events import METRICS_FILE, STARTS, read_events, read_lines_backwards
from trainyard.runs.folder import ENV_FILE, format_run_name, read_env, update_env

SECTION = "plan"
_MOST_RATES = 10_000  # training lines whose rates an observation is the median of: the newest
_MOST_RUNS = 500  # of a job, that are searched for observations: those that changed last


@dataclass(frozen=True)
class Place:
    """What, besides the job's options and code, decides what a run takes."""

    card: str  # key of a GPU type, as in hardware.GPU_TYPES, or "cpu"
    gpus: int  # ranks of the whole run
    setting: Mapping[str, Any]  # the fields of launch.memory_prediction.Setting


@dataclass(frozen=True)
class Amounts:
    """What a run takes, as predicted or as observed; None: not known, and `reasons` says why."""

    memory_gib: float | None = None  # the most that torch's allocator gives out on a GPU
    micro_batch_size: int | None = None
    samples_per_s: float | None = None  # of all ranks together, in the steps
    hours: float | None = None  # of the run, with evaluation and saving
    disk_bytes: int | None = None  # of its checkpoints
    reasons: Mapping[str, str] | None = None  # by the names above: where a number comes from, or why there is none


@dataclass(frozen=True)
class Observation:
    """What a run took at one place."""

    run: str  # JOB/NAME
    place: Place
    steps: int
    steps_per_epoch: int
    checkpoint_bytes: int  # of one; 0: none was written
    checkpoint_s: float
    amounts: Amounts

    @property
    def step_s(self) -> float | None:
        """Return the seconds of the run for each of its steps, with its share of evaluation and saving."""
        hours = self.amounts.hours
        return None if hours is None or not self.steps else hours * 3600 / self.steps


def keep_key(run: Path, key: str) -> None:
    """Record what a plan of this run is stored under, unless an earlier attempt has. For the run's owner only."""
    if "key" not in read_env(run).get(SECTION, {}):
        with limit_writers():
            update_env(run, SECTION, {"key": key})


def keep_prediction(run: Path, place: Place, predicted: Amounts) -> None:
    """Record where an attempt runs, and what it is predicted to take. For the run's owner only."""
    known = read_env(run).get(SECTION, {}).get("places", [])
    name = f"{place.gpus} x {place.card}"
    update_env(
        run,
        SECTION,
        {
            "places": known if name in known else [*known, name],
            "place": asdict(place),
            "predicted": asdict(predicted),
        },
    )


def keep_observation(run: Path, *, memory_gib: float | None, steps_per_epoch: int) -> None:
    """Record what a run took, from what it logged. For the run's owner only.

    Args:
        memory_gib: the most that torch's allocator gave out on rank 0's GPU; None on the CPU.
    """
    env = read_env(run)
    section, events = env[SECTION], read_events(run)
    saved = [event for event in events if event.get("event") == "checkpoint"]
    started_at = next(event["step"] for event in reversed(events) if event.get("event") in STARTS)
    steps, elapsed_s = events[-1]["step"], events[-1]["elapsed_s"]  # of the end
    if steps <= started_at:
        return  # this attempt trained nothing
    newest = (line for line in read_lines_backwards(run / METRICS_FILE) if "samples_per_s" in line)
    rates = [line["samples_per_s"] for line in islice(newest, _MOST_RATES)]
    micro_batch = env["choices"]["micro_batch_size"]["value"]
    place = section["place"]
    if micro_batch < place["setting"]["micro_batch"]:  # halved since
        place = {**place, "setting": {**place["setting"], "micro_batch": micro_batch, "accumulates": True}}
    folder = run / "checkpoints"
    reasons = {"memory_gib": "only a GPU's allocator says what it gave out" if memory_gib is None else "rank 0"}
    if len(section["places"]) > 1:
        reasons |= dict.fromkeys(("samples_per_s", "hours"), f"on {', then '.join(section['places'])}")
    is_one_place = len(section["places"]) == 1
    amounts = Amounts(
        memory_gib=memory_gib,
        micro_batch_size=micro_batch,
        samples_per_s=_compute_median(rates[:-1] or rates) if rates and is_one_place else None,
        hours=elapsed_s / 3600 if steps and is_one_place else None,
        disk_bytes=sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder.is_dir() else 0,
        reasons=reasons,
    )
    observed = {
        "steps": steps,
        "steps_per_epoch": steps_per_epoch,
        "checkpoint_bytes": saved[-1]["bytes"] if saved else 0,
        "checkpoint_s": saved[-1].get("write_s", saved[-1]["seconds"]) if saved else 0.0,
        "amounts": asdict(amounts),
    }
    update_env(run, SECTION, {"place": place, "observed": observed})


def read_amounts(env: Mapping[str, Any]) -> tuple[Amounts, Amounts] | None:
    """Return what env.json says was predicted and observed; None if the run has not ended, or is of an older version.

    Raises:
        UserError: the section is damaged.
    """
    section = env.get(SECTION, {})
    if "observed" not in section or "predicted" not in section:
        return None
    try:
        return _build_amounts(section["predicted"]), _build_amounts(section["observed"]["amounts"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"env.json: its section '{SECTION}' is damaged: {error!r}. Restore it from a copy.") from None


def find_observations(runs: Path, *, job: str, key: str) -> Iterator[Observation]:
    """Yield what runs of a job took that were stored under this key, newest first.

    Of many runs, only those are read whose env.json changed last. A run of which env.json is damaged, or not for us to
    read, is left out: `trainyard why` says so.
    """
    changed: list[tuple[int, Path]] = []
    for path in runs.glob(f"{job}/[!.]*/{ENV_FILE}"):
        with suppress(OSError):
            changed.append((path.stat().st_mtime_ns, path))
    envs: list[tuple[str, Path, dict[str, Any]]] = []
    for _, path in heapq.nlargest(_MOST_RUNS, changed):
        with suppress(UserError, OSError):
            if key in path.read_text(errors="replace"):  # most do not, and parsing takes longer
                env = read_env(path.parent)
                envs.append((str(env.get("created")), path.parent, env))
    for _, run, record in sorted(envs, key=lambda entry: entry[0], reverse=True):
        section = record.get(SECTION, {})
        if isinstance(section, dict) and section.get("key") == key and "observed" in section:
            observed = section["observed"]
            yield Observation(
                run=format_run_name(run),
                place=Place(**section["place"]),
                amounts=_build_amounts(observed["amounts"]),
                **{name: observed[name] for name in ("steps", "steps_per_epoch", "checkpoint_bytes", "checkpoint_s")},
            )


def find_observation(observations: Sequence[Observation], place: Place) -> Observation | None:
    """Return the newest observation at exactly this place: numbers of one card are never used for another."""
    return next((found for found in observations if found.place == place), None)


def _compute_median(rates: Sequence[float]) -> float:
    ordered, middle = sorted(rates), len(rates) // 2
    return ordered[middle] if len(rates) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _build_amounts(content: Mapping[str, Any]) -> Amounts:
    return Amounts(**{field.name: content[field.name] for field in fields(Amounts)})
