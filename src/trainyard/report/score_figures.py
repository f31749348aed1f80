"""Plots of scores that several families show."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.report.figures import draw_figure
from trainyard.scoring import compute_error_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_BINS = 60
_LEAST_ERRORS = 1  # rates of fewer errors are not drawn: they depend only on the number of pairs


def draw_score_histogram(scores: Mapping[str, Floats], *, x_label: str) -> bytes:
    """Plot the distribution of the scores of each kind of pair, each with area one; a kind without scores has none."""

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        pooled = np.concatenate(list(scores.values()))
        edges = np.linspace(pooled.min(), pooled.max(), _BINS + 1)
        for name, values in scores.items():
            density = len(values) > 0
            axes.hist(values, bins=list(edges), density=density, alpha=0.5, label=f"{name} ({len(values):,})")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_ylabel("density")
        axes.legend()

    return draw_figure("Scores by kind of pair", draw, x_label=x_label)


def draw_error_trade_off(genuine: Floats, impostors: Mapping[str, Floats]) -> bytes:
    """Plot false rejections over false acceptances, at all thresholds, for each kind of impostor."""

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import LogLocator

        for name, values in impostors.items():
            rates = compute_error_rates(genuine, values)
            axes.plot(rates.fmr, rates.fnmr, drawstyle="steps-post", label=name)
        least = _LEAST_ERRORS / max(len(values) for values in [genuine, *impostors.values()])
        axes.plot([least, 1], [least, 1], color="0.6", linestyle=":", label="equal")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator())
        axes.set_xlim(least, 1)
        axes.set_ylim(least, 1)
        axes.set_ylabel("false rejections (share)")
        axes.legend(loc="lower left")

    return draw_figure("Error trade-off", draw, x_label="false acceptances (share)")
