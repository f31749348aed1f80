"""Shows a run's progress to a person: log lines and a progress bar."""

import sys
from collections.abc import Mapping

from trainyard.text import format_duration


def format_line(values: Mapping[str, float]) -> str:
    """Return the console line of one training interval.

    `step 400/10000  loss 0.213  1840 samples/s  idle 3 ms (4 %)  compute 66 ms  mem 31.2 GiB  eta 12m`

    Args:
        values: a train line with `step` and, if the number of steps is known, `total_steps`. The time left is of
            training alone; the first step, in which a model may be compiled, does not tell it.
    """
    step, total, rate, step_ms = values["step"], values.get("total_steps"), values["samples_per_s"], values["step_ms"]
    parts = [
        f"step {step:.0f}" if total is None else f"step {step:.0f}/{total:.0f}",
        f"loss {values['loss']:.3g}",
        f"{rate:.{0 if rate >= 10 else 2}f} samples/s",
        f"idle {values['idle_ms']:.0f} ms ({100 * values['idle_ms'] / step_ms:.0f} %)",
        f"compute {values['compute_ms']:.0f} ms",
        f"mem {values['memory_gib']:.1f} GiB",
    ]
    if total is not None and step > 1:
        parts.append(f"eta {format_duration((total - step) * step_ms / 1000)}")
    return "  ".join(parts)


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

    def update(self, step: int) -> None:
        """Show `step` steps as done."""
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def log_sink(message: str) -> None:
    """Write a log message to standard error, above the progress bar if there is one: `logger.add(log_sink)`."""
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr, end="")
