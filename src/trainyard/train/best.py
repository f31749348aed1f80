"""Decides which evaluation is the best so far, and when a run has waited long enough for a better one."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import UserError
from trainyard.runs.events import MetricOrder, rank_metrics


@dataclass
class Plateau:
    """Number of evaluations without an improvement of the deciding metric."""

    value: float | None = None  # of the last evaluation that was better by more than `min_delta`
    evaluations: int = 0  # since then

    def add(self, value: float, mode: str, min_delta: float) -> None:
        """Count an evaluation; NaN is no improvement."""
        gain = math.inf if self.value is None else (value - self.value) * (1 if mode == "max" else -1)
        if gain > min_delta and not math.isnan(value):
            self.value, self.evaluations = value, 0
        else:
            self.evaluations += 1


def is_better(metrics: Mapping[str, float], best: Mapping[str, Any] | None, monitor: MetricOrder) -> bool:
    """Return whether an evaluation is better than the best so far: of equals, the first one stays.

    Args:
        best: its `value` and `ties`; None before the first evaluation.
    """
    if best is None:
        return True
    of_best = dict(zip((name for name, _ in monitor), (best["value"], *best["ties"]), strict=True))
    return rank_metrics(metrics, monitor) > rank_metrics(of_best, monitor)


def explain_equals(evaluations: Iterable[Mapping[str, Any]], best: Mapping[str, Any], monitor: MetricOrder) -> str:
    """Return that several evaluations have the best value, so that validation cannot tell them apart; "" if one has.

    Args:
        evaluations: the lines of the validation set.
    """
    (name, _), *ties = monitor
    values = [line[name] for line in evaluations if name in line]
    equal = values.count(best["value"])
    if equal < 2:
        return ""
    decided = f"{' and '.join(tie for tie, _ in ties)} decided" if ties else "the first one won"
    tied = f"validation cannot choose: {name} is {best['value']:.4g} in {equal} of {len(values)} evaluations"
    return f"{tied}, so {decided}. More or harder validation samples would tell them apart."


def require_metrics(metrics: Mapping[str, float], monitor: MetricOrder) -> None:
    """Raise a UserError if a metric that decides is not among those of an evaluation."""
    missing = [name for name, _ in monitor if name not in metrics]
    if missing:
        raise UserError(
            f"monitor: the validation has no metric {missing[0]!r}. It has {', '.join(metrics)}. Start again with one "
            f"of these: monitor={next(iter(metrics), 'loss')}:min (or :max, if higher is better)."
        )
