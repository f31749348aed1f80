"""Extends a run to a larger `max_duration`: exactly, unless its past steps depend on the end of the schedule."""

from dataclasses import dataclass
from pathlib import Path

from trainyard.cli.dry import count_steps_per_epoch
from trainyard.config import compose as configs
from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.runs.changes import accept_options
from trainyard.runs.events import EXTENDED, append_event, read_events
from trainyard.runs.folder import read_env, update_env
from trainyard.runs.history import read_run
from trainyard.runs.manifest import list_checkpoints
from trainyard.text import quote_path

LENGTH = "max_duration"

KNOW_THE_END = ("cosine", "one_cycle")
"""Schedules whose learning rates depend on the length of the run."""


@dataclass(frozen=True)
class Extension:
    """A larger `max_duration` of a run that exists."""

    old: str
    new: str
    step: int  # of the checkpoint that it continues from
    differences: str  # why its end differs from that of a run planned so; "": it does not, in any bit


def plan_extension(
    run: Path, old: TrainConfig, new: TrainConfig, jobs_dir: Path, *, allow_inexact: bool
) -> Extension | None:
    """Return how `new` extends the run; None if its length stays as it is.

    Raises:
        UserError: the length is not larger, or the run would differ from one planned so and that is not allowed.
    """
    if old.max_duration == new.max_duration:
        return None
    steps_per_epoch = count_steps_per_epoch(old, jobs_dir)
    if not _is_longer(old.max_duration, new.max_duration, steps_per_epoch):
        raise UserError(
            f"{run}: max_duration={new.max_duration} does not extend it: expected more than {old.max_duration}, which "
            f"it was planned for, in the same unit. For another length, start a new run: trainyard run {old.job} "
            f"max_duration={new.max_duration}"
        )
    saved = next((entry for entry in list_checkpoints(run / "checkpoints") if entry.problem is None), None)
    step = saved.step if saved else 0
    if step:
        _check_patience(run, old, new, step)
    differences = "; ".join(_list_differences(run, old, step, steps_per_epoch)) if step else ""
    if differences and not allow_inexact:
        raise UserError(
            f"{run}: extended from {old.max_duration} to {new.max_duration}, it would not end as a run planned so from "
            f"the start: {differences}. To extend it all the same: trainyard resume {quote_path(run)} "
            f"max_duration={new.max_duration} --inexact"
        )
    return Extension(old.max_duration, new.max_duration, step, differences)


def record_extension(run: Path, extension: Extension, new: TrainConfig) -> None:
    """Record an extension, so that the run takes its new options for its own. For the run's owner only.

    The options themselves are written afterwards: a kill in between leaves the run as it was.
    """
    kept, mutable = configs.list_kept_options(new)
    accept_options(run, {**kept, **mutable})
    fields = {"from": extension.old, "to": extension.new, "differences": extension.differences}
    append_event(run, {"event": EXTENDED, **fields})
    outcome = extension.differences or "as if it had been planned so from the start"
    reason = f"extended from {extension.old} at step {extension.step}: {outcome}"
    update_env(run, "choices", {LENGTH: {"value": extension.new, "reason": reason}})


def _is_longer(old: str, new: str, steps_per_epoch: int | None) -> bool:
    before, after = Duration.parse(old), Duration.parse(new)
    if before.unit == after.unit:
        return after.value > before.value
    if "min" in (before.unit, after.unit) or steps_per_epoch is None:
        return False
    return after.to_steps(steps_per_epoch) > before.to_steps(steps_per_epoch)


def _check_patience(run: Path, old: TrainConfig, new: TrainConfig, step: int) -> None:
    ended_so = any(event.get("event") == "out_of_patience" and event["step"] == step for event in read_events(run))
    if ended_so and 0 < new.patience <= old.patience:
        raise UserError(
            f"{run}: ended at step {step} because patience={old.patience} was over, and not its length. To continue: "
            f"trainyard resume {quote_path(run)} patience={2 * old.patience} max_duration={new.max_duration}"
        )


def _list_differences(run: Path, old: TrainConfig, step: int, steps_per_epoch: int | None) -> list[str]:
    """Return why the run at `step` differs from one that was planned to be longer."""
    notes = []
    own = read_env(run).get("choices", {}).get("schedule", {}).get("reason")
    if own or old.schedule.name in KNOW_THE_END:
        notes.append(
            f"{f'{own} may end' if own else f'schedule.name={old.schedule.name} ends'} where the run ends, so its "
            "learning rates so far are of the shorter run, and from here on they follow the longer one's"
        )
    if not read_run(run).is_done:
        return notes
    if Duration.parse(old.max_duration).unit == "min":
        notes.append(f"max_duration={old.max_duration} is a time, which another run would divide into other steps")
    has_validation = "val" in read_env(run).get("data", {}).get("splits", {})
    if has_validation and not _is_due(old.eval_every, step, steps_per_epoch):
        notes.append(
            f"it was evaluated at its end, step {step}, where eval_every={old.eval_every} is not due, and that had a "
            "say in which weights are the best"
        )
    return notes


def _is_due(every: str, step: int, steps_per_epoch: int | None) -> bool:
    interval = Duration.parse(every) if every else None
    if interval is None or interval.unit == "min" or (interval.unit == "ep" and steps_per_epoch is None):
        return False
    return step % max(1, interval.to_steps(steps_per_epoch or 1)) == 0
