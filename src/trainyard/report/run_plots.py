"""The plots of a run: training curves, evaluation metrics, where the time went."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainyard.files import read_file
from trainyard.report.figures import BLUE, MARKERS, SERIES, Plot, draw_figure
from trainyard.report.run_story import RunStory
from trainyard.runs.events import has_interval, name_interval_ends, select_metrics
from trainyard.runs.goodput import LABELS, LOST, START_UP, STOPPED, compute_shares
from trainyard.text import format_duration, make_slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_OPTIMIZER = ("lr", "grad_norm")
_SPENT_COLOURS = dict(zip((*LABELS.values(), LOST, START_UP, STOPPED), (*SERIES, "#7f7f7f", "#c4c9d1"), strict=True))
_UNITS = {
    "samples_per_s": "samples / s",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
_TITLES = {
    "samples_per_s": "Throughput",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "loss": "Training loss",
}


@dataclass(frozen=True)
class Plots:
    """The plots of a run, by where its page shows them."""

    losses: list[Plot]  # the loss of every step first
    metrics: list[Plot]  # the deciding one first
    histograms: list[Plot]
    optimizer: list[Plot]  # learning rate, norm of the gradient
    speed: list[Plot]

    def __iter__(self) -> Iterator[Plot]:
        yield from (*self.losses, *self.metrics, *self.histograms, *self.optimizer, *self.speed)


def draw_plots(story: RunStory) -> Plots:
    """Draw the recorded series that change: no curve of one point, none that equals the loss, and no constant one."""
    names = dict.fromkeys(name for line in story.train for name in select_metrics(line))
    logged = {name: _list_logged(story, name) for name in names}
    loss = logged.get("loss")
    if loss is not None:
        same = [
            name
            for name, curve in logged.items()
            if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(curve, loss, strict=True))
        ]
        logged = {name: curve for name, curve in logged.items() if name not in same}
        logged = {"loss": story.list_step_losses(), **logged}
    raw = "each step" if story.every == 1 else f"steps of each {story.every}th line"
    drawn = {
        name: _plot_curve(name, *curve, raw if name == "loss" else "logged")
        for name, curve in logged.items()
        if len(np.unique(curve[1], equal_nan=False)) > 1  # NaN differs from all
    }
    deciding = str((story.find_start_field("monitor") or {}).get("metric"))
    changing = sorted(story.list_metrics(constant=False), key=lambda name: name != deciding)
    by_split = [story.list_evaluations(split) for split in story.splits]
    several = [name for name in changing if any(sum(name in line for line in lines) > 1 for lines in by_split)]
    metrics = [_plot_metric(story, name) for name in several]
    rates = _list_logged(story, "samples_per_s")
    speed = [_plot_curve("samples_per_s", *rates)] if len(rates[0]) > 1 else []
    if story.seconds:
        speed.append(_plot_time(story))
    losses = [plot for name, plot in drawn.items() if name not in _OPTIMIZER]
    shown = {split: story.find_last_evaluation(split).get("shown", {}) for split in story.splits}
    drawable = [name for values in shown.values() for name, value in values.items() if isinstance(value, dict)]
    histograms = [_plot_histogram(shown, name) for name in dict.fromkeys(drawable)]
    return Plots(losses, metrics, histograms, [plot for name, plot in drawn.items() if name in _OPTIMIZER], speed)


def read_figures(folder: Path) -> list[Plot]:
    """Return the figures in a folder of a run; none of a link, which could lead out of it."""
    paths = [] if folder.is_symlink() else sorted(folder.glob("*.png"))
    return [Plot(path.stem, path.stem, png) for path in paths if (png := _read_png(path))]


def _read_png(path: Path) -> bytes:
    """Return a PNG; nothing if it is no PNG or a link: a report is shown to others, and must not show other files."""
    try:
        data = read_file(path, most_bytes=_MOST_PNG_BYTES)
    except OSError:
        return b""
    return data if data.startswith(b"\x89PNG") else b""


_MOST_PNG_BYTES = 2**26


def _list_logged(story: RunStory, key: str) -> tuple[Floats, Floats]:
    lines = [line for line in story.train if key in line]
    return np.array([line["step"] for line in lines], np.float64), np.array([line[key] for line in lines], np.float64)


def _plot_curve(key: str, steps: Floats, values: Floats, raw: str = "logged") -> Plot:
    """Plot one number over the steps, with its running mean if there are many."""
    finite = np.isfinite(values)
    width = len(values) // 25

    def draw(axes: "Axes") -> None:
        if width < 2 or key == "lr":
            axes.plot(steps, values, color=BLUE, marker="o" if len(values) < 25 else "", markersize=4)
        else:
            axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=0.8, label=raw)
            axes.plot(steps, compute_running_mean(values, width), color=BLUE, label=f"mean of {width}")
            axes.legend()
        if not finite.all():
            bottom = np.zeros(np.sum(~finite))
            transform: Any = axes.get_xaxis_transform()
            axes.plot(
                steps[~finite],
                bottom,
                "x",
                color=SERIES[1],
                transform=transform,
                label="not finite",
                clip_on=False,
            )
            axes.legend()
        axes.set_xlim(0, 1.02 * max(steps))
        if key == "samples_per_s":
            axes.set_ylim(bottom=0)
        elif key != "lr" and spans_decades(values[finite]):
            axes.set_yscale("log")
        axes.set_ylabel(_UNITS.get(key, key))

    title = _TITLES.get(key, f"Training: {key}")
    return Plot(make_slug(f"train_{key}"), title, draw_figure(title, draw))


def spans_decades(values: NDArray[np.float64]) -> bool:
    """Return whether a linear axis would hide most values: 5 % of them are over 100 times another 5 %."""
    return bool(np.all(values > 0) and len(values) and np.ptp(np.log10(np.percentile(values, [5, 95]))) > 2)


def compute_running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred mean over `width` values, fewer at the ends, ignoring those that are not finite."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    window = np.ones(width)
    count = np.convolve(finite, window, mode="same")
    mean = np.full(len(values), np.nan)
    total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    np.divide(total, count, out=mean, where=count > 0)
    return mean


def _plot_metric(story: RunStory, name: str) -> Plot:

    def draw(axes: "Axes") -> None:
        for i, split in enumerate(story.splits):
            lines = [line for line in story.list_evaluations(split) if name in line]
            if not lines:
                continue
            colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
            steps = [line["step"] for line in lines]
            axes.plot(steps, [line[name] for line in lines], color=colour, marker=marker, markersize=4, label=split)
            with_interval = [line for line in lines if has_interval(line, name)]
            low, high = ([line[end] for line in with_interval] for end in name_interval_ends(name))
            axes.vlines([line["step"] for line in with_interval], low, high, color=colour, linewidth=1, alpha=0.5)
        axes.set_xlim(0, 1.02 * story.evals[-1]["step"] or 1)
        axes.set_ylabel(name)
        axes.legend()

    return Plot(make_slug(f"eval_{name}"), name, draw_figure(name, draw))


def _plot_histogram(shown: Mapping[str, Mapping[str, Any]], name: str) -> Plot:
    """Plot a histogram of the last evaluation of each split.

    Args:
        shown: by split, the texts and histograms of its last evaluation.
    """

    def draw(axes: "Axes") -> None:
        for i, (split, values) in enumerate(shown.items()):
            if isinstance(values.get(name), dict):
                axes.stairs(values[name]["counts"], values[name]["edges"], color=SERIES[i % len(SERIES)], label=split)
        axes.set_ylabel("samples")
        axes.legend()

    return Plot(make_slug(f"shown_{name}"), name, draw_figure(name, draw, x_label=name))


def _plot_time(story: RunStory) -> Plot:

    def draw(axes: "Axes") -> None:
        left = 0.0
        for name, _, share in compute_shares([story.seconds]):
            axes.barh(0, share, left=left, height=0.5, color=_SPENT_COLOURS[name], label=f"{name} {share:.0f} %")
            left += share
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.5, 0.5)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3)

    title = "Where the time went"
    label = f"share of {format_duration(sum(story.seconds.values()))} (%)"
    return Plot("time", title, draw_figure(title, draw, x_label=label))
