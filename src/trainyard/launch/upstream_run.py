"""Finds the Slurm job that must end well before another run starts, for `submit --after`."""

from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import UserError
from trainyard.runs.folder import format_run_name
from trainyard.runs.state import ACTIVE, Cause, State
from trainyard.runs.status import describe_state, format_resume_command, read_statuses


@dataclass(frozen=True)
class UpstreamRun:
    """A run that another one follows."""

    run: Path
    job: str  # Slurm job that trains it, the newest if successors continue it; "": it is done

    def describe(self) -> str:
        """Describe when the run that follows starts."""
        if not self.job:
            return f"{self.run} is done, so this starts at once"
        return f"{self.run} (Slurm job {self.job}): starts when it is done; if it ends otherwise, Slurm cancels this"


def find_upstream_run(run: Path) -> UpstreamRun:
    """Return the run that a new run waits for in order to follow it.

    Raises:
        UserError: the run is not done, and Slurm cannot wait for it; has the reason and the next command.
    """
    (status,), _ = read_statuses([run])
    name, reached = f"--after {format_run_name(run)}", describe_state(status)
    if status.state == State.DONE:
        return UpstreamRun(run.absolute(), "")
    if status.slurm_unavailable_reason:
        raise UserError(
            f"{name}: whether it can be waited for is not known. {status.slurm_unavailable_reason} Submit from a "
            "machine that reaches that Slurm, or leave --after out."
        )
    if status.state not in ACTIVE or status.cause == Cause.NEVER_STARTS:
        raise UserError(
            f"{name}: is {reached}, so Slurm would cancel what waits for it to be done. Resume it first: "
            f"{format_resume_command(status)}"
        )
    if not status.slurm_job_id:
        raise UserError(
            f"{name}: is {reached} outside Slurm, so no Slurm job can wait for it. Leave --after out, "
            "and submit when it is done."
        )
    return UpstreamRun(run.absolute(), status.snapshot.training_job_id)
