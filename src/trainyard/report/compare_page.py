"""Several runs on one page: the deciding metric best first, what differs in their options, curves over one another.

The runs have one family and one deciding metric, because numbers of others cannot be ranked. A sweep has its own page
(sweep_page.py), with means over seeds; here each run counts for itself, with the interval of its evaluation.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from trainyard.config.frozen import LOCATION, read_options
from trainyard.errors import UserError
from trainyard.files import restrict_umask, write_atomically
from trainyard.report.figures import MARKERS, SERIES, Plot, draw_figure
from trainyard.report.html import escape, render_gallery, render_page, render_section, render_table
from trainyard.report.metric_values import format_metric, format_value
from trainyard.report.run_plots import compute_running_mean, spans_decades
from trainyard.report.run_story import RunStory
from trainyard.runs.events import Line, has_interval, name_interval_ends
from trainyard.runs.folder import CONFIG, format_run_name
from trainyard.text import format_duration, join_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "comparison.html"
_LINES = ("-", "--", ":", "-.")  # where there are more runs than colours
_NAMES_ONLY = (LOCATION, "job", "start_from", "data.cache")  # locations, which change nothing in training


@dataclass(frozen=True)
class Compared:
    """One of the runs that are compared."""

    name: str
    story: RunStory
    options: dict[str, object]
    line: Line | None  # the evaluation that counts; None: there is none on the set that the others were scored on


@restrict_umask()
def write_comparison(runs: Sequence[Path], page: Path) -> str:
    """Write the page, and return a sentence about the best run, if that can be told.

    Raises:
        UserError: the runs cannot be compared, or one of them cannot be read.
    """
    stories = [RunStory.read(run) for run in runs]
    options = [read_options(run / CONFIG)[0] for run in runs]
    split, metric, mode = _require_one_metric(stories, options)
    names = [format_run_name(run.absolute()) for run in runs]
    if len({name.partition("/")[0] for name in names}) == 1:
        names = [run.absolute().name for run in runs]
    shown = _choose_split(stories, split, metric)
    compared = [
        Compared(name, story, own, _find_line(story, shown, metric, is_validation=shown == split))
        for name, story, own in zip(names, stories, options, strict=True)
    ]
    sign = 1 if mode == "min" else -1
    compared.sort(key=lambda item: sign * item.line[metric] if item.line else math.inf)
    verdict = judge_runs(compared, metric, mode=mode)
    better = "lower" if mode == "min" else "higher"
    title = f"{len(runs)} runs of {stories[0].job if len({s.job for s in stories}) == 1 else options[0]['family']}"
    caption = f"{metric} on {shown}, best first; {better} is better; 95 % intervals in brackets."
    text = render_page(
        title,
        f"<header><h1>{escape(title)}</h1></header>"
        f'<div class="headline"><p class="verdict">{escape(verdict)}</p></div>',
        render_section("Results", _render_results(compared, metric), f'<p class="soft">{escape(caption)}</p>'),
        render_section("Runs", _render_legend(compared, page)),
        render_section("Options that differ", _render_differences(compared)),
        render_section("Curves", render_gallery(_draw_curves(compared, split, metric))),
    )
    write_atomically(page, text)
    return verdict


def judge_runs(compared: Sequence[Compared], metric: str, *, mode: str) -> str:
    """Return one sentence: which run is best, as far as the intervals show.

    Args:
        found: best first.
    """
    scored = {run.name: run.line for run in compared if run.line is not None}
    if len(scored) < 2:
        return f"Fewer than two runs have {metric} on one set, so they cannot be ranked."
    lacking = [name for name, line in scored.items() if not has_interval(line, metric)]
    if lacking:
        return f"No winner can be named: {join_names(lacking)} without a 95 % interval of {metric}."
    low, high = name_interval_ends(metric)
    (best, of_best), *others = scored.items()
    if mode == "min":
        overlapping = [name for name, line in others if line[low] <= of_best[high]]
    else:
        overlapping = [name for name, line in others if line[high] >= of_best[low]]
    if overlapping:
        return f"No winner can be named: the 95 % interval of {best} overlaps that of {join_names(overlapping)}."
    return f"{best} is best: its 95 % interval of {metric} overlaps no other."


def _require_one_metric(stories: Sequence[RunStory], options: Sequence[dict[str, object]]) -> tuple[str, str, str]:
    """Return the validation set, the deciding metric and its mode that all runs have, or refuse to rank them."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for story, own in zip(stories, options, strict=True):
        monitor = story.find_start_field("monitor")
        if not isinstance(monitor, dict):
            raise UserError(f"{story.run}: has not begun to train, so there is nothing to compare. Leave it out.")
        kind = (str(own.get("family")), *(str(monitor.get(key)) for key in ("split", "metric", "mode")))
        kinds.setdefault(kind, []).append(str(story.run))
    if len(kinds) > 1:
        listed = "".join(
            f"\n  {family}, {metric} ({mode}) on {split}: {join_names(runs)}"
            for (family, split, metric, mode), runs in kinds.items()
        )
        raise UserError(
            "Only runs of one family with one deciding metric can be ranked, because numbers of different metrics "
            f"cannot be compared. Found:{listed}\nName runs of one of these lines."
        )
    _, split, metric, mode = next(iter(kinds))
    return split, metric, mode


def _choose_split(stories: Sequence[RunStory], validation: str, metric: str) -> str:
    """Return the set that the runs are ranked on: the first test set on which all are scored, else validation."""
    tests = [split for split in stories[0].splits if split not in ("train", validation)]
    scored = [{str(line["split"]) for line in story.evals if metric in line} for story in stories]
    return next((split for split in tests if all(split in own for own in scored)), validation)


def _find_line(story: RunStory, split: str, metric: str, *, is_validation: bool) -> Line | None:
    """Return a run's evaluation that counts: on a test set the last one; of validation that with an interval or best.

    None if there is none, or its metric is not finite.
    """
    lines = [line for line in story.evals if line["split"] == split and math.isfinite(line.get(metric, math.nan))]
    if is_validation and lines and not has_interval(lines[-1], metric):
        best = story.find_best_evaluation()
        return best[1] if best else None
    return lines[-1] if lines else None


def _render_results(compared: Sequence[Compared], metric: str) -> str:
    header = ["run", metric, "ended", "steps", "running time", "samples/s (median)"]
    rows = [
        [
            f"{place}  {run.name}",
            format_metric(run.line, metric) if run.line else "-",
            run.story.status,
            f"{run.story.step:,}",
            format_duration(run.story.elapsed_s),
            "-" if run.story.samples_per_s is None else format_value(run.story.samples_per_s),
        ]
        for place, run in enumerate(compared, start=1)
    ]
    return render_table(header, rows)


def _render_legend(compared: Sequence[Compared], page: Path) -> str:
    """Return each run with its place, the colour of its curves, and a link to its own report."""
    rows = []
    for place, run in enumerate(compared, start=1):
        target = quote(os.path.relpath(run.story.run / "report.html", page.absolute().parent))
        colour, _ = _choose_style(place)
        square = f'<span style="color:{colour}">&#9632;</span>'
        rows.append(f'<p>{square} {place} <a href="{target}">{escape(run.name)}</a></p>')
    return "".join(rows)


def _choose_style(place: int) -> tuple[str, str]:
    turn, colour = divmod(place - 1, len(SERIES))
    return SERIES[colour], _LINES[turn % len(_LINES)]


def _render_differences(compared: Sequence[Compared]) -> str:
    names = dict.fromkeys(name for run in compared for name in run.options if name not in _NAMES_ONLY)
    rows = []
    for name in names:
        values = [format_value(run.options[name]) if name in run.options else "-" for run in compared]
        if len(set(values)) > 1:
            rows.append([name, *values])
    header = ["option", *(f"{place}  {run.name}" for place, run in enumerate(compared, start=1))]
    return render_table(header, rows) if rows else "<p>None: the runs differ in nothing that an option says.</p>"


def _draw_curves(compared: Sequence[Compared], split: str, metric: str) -> list[Plot]:

    def draw_losses(axes: "Axes") -> None:
        everything = []
        for place, run in enumerate(compared, start=1):
            colour, line = _choose_style(place)
            steps, losses = run.story.list_step_losses()
            mean = compute_running_mean(losses, max(1, len(losses) // 25))
            axes.plot(steps, mean, color=colour, linestyle=line, label=str(place))
            everything += [value for value in mean.tolist() if math.isfinite(value)]
        if everything and spans_decades(np.array(everything)):
            axes.set_yscale("log")
        axes.set_ylabel("loss, running mean")
        axes.legend(title="run")

    def draw_metric(axes: "Axes") -> None:
        for place, run in enumerate(compared, start=1):
            colour, style = _choose_style(place)
            lines = [line for line in run.story.list_evaluations(split) if metric in line]
            marker = MARKERS[(place - 1) % len(MARKERS)]
            steps, values = [line["step"] for line in lines], [line[metric] for line in lines]
            axes.plot(steps, values, color=colour, linestyle=style, marker=marker, markersize=4, label=str(place))
        axes.set_ylabel(metric)
        axes.legend(title="run")

    plots = []
    if any(run.story.train for run in compared):
        plots.append(Plot("losses", "Training loss", draw_figure("Training loss", draw_losses)))
    if any(line["split"] == split for run in compared for line in run.story.evals):
        title = f"{metric} on {split}"
        plots.append(Plot("metric", title, draw_figure(title, draw_metric)))
    return plots
