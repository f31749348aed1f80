"""Batch sizes that a run has lowered because a GPU's memory was not enough: all its later attempts keep to them."""

from pathlib import Path
from typing import NamedTuple

from trainyard.runs.events import append_event
from trainyard.runs.folder import read_env, update_env
from trainyard.runs.history import RankError, read_errors

OUT_OF_MEMORY = "out_of_memory"
"""The event of lowering a batch size."""

_SECTION = "memory_limits"
_HANDLED = ".handled"


class Limit(NamedTuple):
    """A batch size that a run may not exceed, and why."""

    value: int
    reason: str


def read_limit(run: Path, option: str) -> Limit | None:
    """Return the limit of `micro_batch_size` or `eval_batch_size`; None if nothing has lowered it."""
    found = read_env(run).get(_SECTION, {}).get(option)
    return None if found is None else Limit(**found)


def keep_limit(run: Path, option: str, limit: Limit) -> None:
    """Record a limit. For the run's owner only."""
    update_env(run, _SECTION, {option: limit._asdict()})


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
        keep_limit(run, "micro_batch_size", Limit(size, reason))
    append_event(run, {"event": OUT_OF_MEMORY, "micro_batch_size": size, "reason": reason, "message": smallest.summary})
    attempts = {error.attempt for error in asked}
    for error in errors:
        if error.attempt in attempts:  # also what the other ranks said when they lost this one
            error.path.rename(error.path.with_name(error.path.name + _HANDLED))
    return reason


def is_handled(error: RankError) -> bool:
    """Tell whether the next start of the run takes a smaller micro-batch because of this error."""
    return isinstance(error.fields.get("next_micro_batch_size"), int)
