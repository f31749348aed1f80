"""What a person sees while a run trains: log lines and a progress bar."""

import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from trainyard.text import format_duration


def format_line(values: Mapping[str, float]) -> str:
    """Return the console line of one training interval, without the parts that `values` lacks.

    `step 400/10000  loss 0.213  1840 samples/s  idle 3 ms (4 %)  compute 66 ms  mem 31.2 GiB  eta 12m`

    Args:
        values: the keys of a train line, with `step` and, if the number of steps is known, `total_steps`.
            `step_ms` gives the share of time that the device was idle, and the time left (of training alone), which
            the first step, in which a model may be compiled, does not tell.
    """
    total = f"/{values['total_steps']:.0f}" if "total_steps" in values else ""
    parts = [f"step {values['step']:.0f}{total}", *_format_measurements(values)]
    if total and "step_ms" in values and values["step"] > 1:
        left_s = (values["total_steps"] - values["step"]) * values["step_ms"] / 1000
        parts.append(f"eta {format_duration(left_s)}")
    return "  ".join(parts)


def _format_measurements(values: Mapping[str, float]) -> Iterator[str]:
    if "loss" in values:
        yield f"loss {values['loss']:.3g}"
    if "samples_per_s" in values:
        yield f"{values['samples_per_s']:.{0 if values['samples_per_s'] >= 10 else 2}f} samples/s"
    if "idle_ms" in values:
        share = values["idle_ms"] / values["step_ms"] if values.get("step_ms") else None
        yield f"idle {values['idle_ms']:.0f} ms" + (f" ({share:.0%})".replace("%", " %") if share is not None else "")
    if "compute_ms" in values:
        yield f"compute {values['compute_ms']:.0f} ms"
    if "memory_gib" in values:
        yield f"mem {values['memory_gib']:.1f} GiB"


class ProgressBar:
    """A bar with the time left, on a terminal only. Log lines written through `log_sink` do not tear it."""

    def __init__(self, total_steps: int | None, *, step: int = 0, show: bool = True) -> None:
        """Draw on standard error.

        Args:
            total_steps: steps of the whole run; None if time ends it.
            step: where this attempt starts.
            show: whether this rank may draw: rank 0.
        """
        from tqdm import tqdm

        hide = None if show else True  # None: tqdm hides itself without a terminal
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            disable=hide,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
        )

    def update(self, step: int, *, loss: float | None = None) -> None:
        """Show `step` steps as done."""
        if loss is not None:
            self._bar.set_postfix_str(f"loss {loss:.3g}", refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def log_sink(message: str) -> None:
    """Write a log message to standard error, above the progress bar if there is one: `logger.add(log_sink)`."""
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr, end="")
