"""Records memory and disk of a run: predicted by the stored plan, observed, and batch sizes that it had to lower."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainyard.choice import Choice
from trainyard.errors import UserError
from trainyard.runs.events import append_event
from trainyard.runs.folder import read_env, update_env
from trainyard.runs.history import RankError, read_errors

OUT_OF_MEMORY = "out_of_memory"
"""The event of lowering a batch size."""

_PLAN, _LIMITS = "plan", "memory_limits"  # sections of env.json
_HANDLED = ".handled"


@dataclass(frozen=True)
class Usage:
    """Resources of a run, predicted or observed."""

    memory_gib: float | None  # the most that torch's allocator gives out on rank 0's GPU; None: unknown
    disk_bytes: int  # of its checkpoints


def describe_plan(key: str) -> dict[str, dict[str, str]]:
    """Return the key of a new run's stored predictions, as a section of env.json."""
    return {_PLAN: {"key": key}}


def read_plan_key(run: Path) -> str:
    """Return the key of `describe_plan`; "" if there is none."""
    return str(read_env(run).get(_PLAN, {}).get("key", ""))


def record_prediction(run: Path, predicted: Usage | None) -> None:
    """Record the predicted usage of this attempt; None: no plan is stored. For the run's owner only."""
    update_env(run, _PLAN, {"predicted": predicted and asdict(predicted)})


def record_usage(run: Path, *, memory_gib: float | None) -> None:
    """Record a run's observed usage. For the run's owner only."""
    disk_bytes = sum(path.stat().st_size for path in run.glob("checkpoints/*") if path.is_file())
    update_env(run, _PLAN, {"observed": asdict(Usage(memory_gib, disk_bytes))})


def read_usage(env: Mapping[str, Any]) -> tuple[Usage, Usage] | None:
    """Return what env.json says was predicted and observed; None without a prediction, or before the run has ended.

    Raises:
        UserError: the section is damaged.
    """
    try:
        predicted, observed = (env.get(_PLAN, {}).get(name) for name in ("predicted", "observed"))
        return (Usage(**predicted), Usage(**observed)) if predicted and observed else None
    except (TypeError, AttributeError) as error:
        raise UserError(f"env.json: its section '{_PLAN}' is damaged: {error!r}. Restore it from a copy.") from None


# Batch sizes that a run has lowered, and may not exceed any more


def read_limit(run: Path, option: str) -> Choice[int] | None:
    """Return the limit of `micro_batch_size` or `eval_batch_size`; None if nothing has lowered it."""
    limit = read_env(run).get(_LIMITS, {}).get(option)
    return None if limit is None else Choice(**limit)


def record_limit(run: Path, option: str, limit: Choice[int]) -> None:
    """Record a limit, which all later attempts keep to. For the run's owner only."""
    update_env(run, _LIMITS, {option: limit._asdict()})


def learn_from_errors(run: Path) -> str:
    """Lower the micro-batch as ranks asked for when their memory was not enough; return why, "" if none did.

    Their errors become events: they ended an attempt, but are no fault of the run any more. For the run's owner only.
    """
    errors = read_errors(run)
    asked = [error for error in errors if is_handled(error)]
    if not asked:
        return ""
    smallest = min(asked, key=lambda error: int(error.fields["next_micro_batch_size"]))
    before, size = smallest.fields.get("micro_batch_size"), int(smallest.fields["next_micro_batch_size"])
    reason = f"halved from {before}: out of memory in the {smallest.fields.get('phase')}, {smallest.who}"
    if (known := read_limit(run, "micro_batch_size")) is None or size < known.value:
        record_limit(run, "micro_batch_size", Choice(size, reason))
    append_event(run, {"event": OUT_OF_MEMORY, "micro_batch_size": size, "reason": reason, "message": smallest.summary})
    attempts = {error.attempt for error in asked}
    for error in errors:
        if error.attempt in attempts:  # also the errors of other ranks when they lost this one
            error.path.rename(error.path.with_name(error.path.name + _HANDLED))
    return reason


def is_handled(error: RankError) -> bool:
    """Return whether the next start of the run takes a smaller micro-batch because of this error."""
    return isinstance(error.fields.get("next_micro_batch_size"), int)
