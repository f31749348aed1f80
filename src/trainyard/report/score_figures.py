"""Plots of scores that several families show."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.report.figures import draw_figure
from trainyard.scoring import compute_error_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_BINS = 60
_NAMED_CLASSES = 12  # more names and counts do not fit
_LEAST_ERRORS = 1  # rates of fewer errors are not drawn: they depend only on the number of pairs


def draw_score_histogram(scores: Mapping[str, Floats], *, x_label: str) -> bytes:
    """Plot the distribution of the scores of each kind of pair, each with area one; a kind without scores has none."""

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        pooled = np.concatenate(list(scores.values()))
        low, high = float(pooled.min()), float(pooled.max())
        margin = 0.0 if low < high else 0.5  # of a network that gives all samples one score
        edges = np.linspace(low - margin, high + margin, _BINS + 1)
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


def draw_confusion_matrix(truth: NDArray[np.integer], predicted: NDArray[np.integer], classes: Sequence[str]) -> bytes:
    """Plot how many samples of each true class, a row each, are predicted as which, as shares of the row."""
    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, (truth, predicted), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def draw(axes: "Axes") -> None:
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.grid(False)
        axes.set_ylabel("true")
        ticks = range(len(classes)) if len(classes) <= _NAMED_CLASSES else []
        axes.set_xticks(ticks, [classes[i] for i in ticks], rotation=30, ha="right")
        axes.set_yticks(ticks, [classes[i] for i in ticks])
        for i, j in [(i, j) for i in ticks for j in ticks if counts[i, j]]:
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, f"{counts[i, j]:,.0f}", ha="center", va="center", color=colour, fontsize=8)

    return draw_figure("Confusion matrix", draw, x_label="predicted")


def draw_scatter(truth: Floats, predicted: Floats) -> bytes:
    """Plot predicted over true values, with the line on which they are equal."""

    def draw(axes: "Axes") -> None:
        axes.scatter(truth, predicted, s=6, alpha=0.5)
        ends = [float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))]
        axes.plot(ends, ends, color="0.6", linestyle=":", label="equal")
        axes.set_ylabel("predicted")
        axes.legend()

    return draw_figure("Predicted and true", draw, x_label="true")
