"""The results of a sweep: a metric and its spread over seeds for each combination of options, as text and files."""

import io
import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.measure import compute_half_width
from trainyard.report.figures import MARKERS, SERIES, Plot, draw_figure
from trainyard.report.html import escape, render_gallery, render_page, render_section, render_table
from trainyard.report.run_page import render_goodput
from trainyard.runs.changes import find_changes
from trainyard.runs.events import (
    STARTS,
    Line,
    find_best_evaluation,
    find_elapsed_s,
    read_events,
    read_thinned_metrics,
    select_metrics,
)
from trainyard.runs.folder import CONFIG
from trainyard.runs.goodput import compute_shares, label_seconds
from trainyard.runs.state import ACTIVE, State
from trainyard.runs.sweep_file import Element, Sweep
from trainyard.tables import write_table
from trainyard.text import align_columns, find_nearest, make_slug, quote_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "results.html"
TABLE = "results.csv"
PLOTS = "plots"

SEED = "seed"
"""The option whose values repeat one experiment instead of defining different ones."""

_WIDTH = 110
_TRAIN = "train"


@dataclass(frozen=True)
class Monitor:
    """The metric that decides which model is better."""

    split: str
    metric: str
    mode: str  # "min" or "max"
    ties: Sequence[tuple[str, str]] = ()
    baseline: Sequence[str | float] = ()  # see runs/events.py


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a sweep."""

    element: Element
    state: str  # as in `trainyard status`
    monitor: Monitor | None  # None: training has not begun
    metrics: Mapping[str, Mapping[str, float]]  # by split: best validation so far, tests if finished
    gpu_hours: float
    cpu_rank_hours: float
    seconds: Mapping[str, float]  # by activity; empty if not recorded

    @property
    def values(self) -> dict[str, str]:
        """The value of each axis."""
        return {name: value for name, _, value in (word.partition("=") for word in self.element.overrides)}

    def explain_exclusion(self, metric: str, splits: Iterable[str]) -> str:
        """Return why the run is excluded from the means of this metric; empty if it is not."""
        if self.state != State.DONE:
            return self.state
        missing = [s for s in splits if not math.isfinite(self.metrics.get(s, {}).get(metric, math.nan))]
        return f"{metric} on {missing[0]} is not a finite number" if missing else ""


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % confidence interval."""

    n: int
    value: float
    half_width: float | None  # None: one value has no spread


@dataclass(frozen=True)
class Row:
    """One combination of all options but the seed."""

    values: Mapping[str, str]
    outcomes: Sequence[Outcome]  # one per seed, finished or not
    means: Mapping[str, Mean]  # by split, over the finished runs; empty if there is none

    @property
    def counted(self) -> int:
        """The number of runs that the means are over."""
        return next((mean.n for mean in self.means.values()), 0)


@dataclass(frozen=True)
class Results:
    """A sweep's runs and their means."""

    sweep: Sweep
    metric: str  # empty: no run has begun to train
    mode: str  # "min" or "max"; empty: which is better was not recorded
    splits: Sequence[str]  # validation first, if there is one, then the test sets
    outcomes: Sequence[Outcome]
    rows: Sequence[Row]

    @property
    def best(self) -> Row | None:
        """The combination with the best mean on the first split.

        That is validation if there is one: a choice by the test set would flatter the test value.
        """
        ranked = [row for row in self.rows if row.means]
        if not self.mode or not ranked:
            return None
        choose = max if self.mode == "max" else min
        return choose(ranked, key=lambda row: row.means[self.splits[0]].value)


def collect(sweep: Sweep, state_by_run: Mapping[Path, str], *, metric: str = "") -> Results:
    """Read the records of a sweep's runs.

    Means are over finished runs only: a run that stopped half-way is another experiment. Test values are those of
    the weights that were best on validation.

    Args:
        state_by_run: state of each element's run, as in `trainyard status`.
        metric: empty: the monitor of the runs.

    Raises:
        UserError: no run has that metric, or the runs have different monitors and no metric was given.
    """
    outcomes = [_read_outcome(element, state_by_run[element.run]) for element in sweep.elements]
    metric, mode = _choose_metric(outcomes, metric)
    done = [outcome for outcome in outcomes if outcome.state == State.DONE]
    splits = list(dict.fromkeys(s for o in done for s, values in o.metrics.items() if metric in values))
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(v for name, v in outcome.values.items() if name != SEED), []).append(outcome)
    rows = [_build_row(group, metric, splits) for group in groups.values()]
    return Results(sweep, metric, mode, splits, outcomes, rows)


def estimate_mean(values: Sequence[float]) -> Mean:
    """Return the mean of independent values with its 95 % confidence interval: none of a single value."""
    n = len(values)
    return Mean(n, statistics.fmean(values), compute_half_width(values) if n > 1 else None)


def format_results(results: Results) -> str:
    """Format a table that fits a screen, followed by the next command."""
    sweep = results.sweep
    lines = [f"{sweep.name}  {sweep.job}, {len(results.outcomes)} runs: {_format_counts(results)}"]
    lines += [*textwrap.wrap(_write_caption(results), _WIDTH), ""]
    lines += align_columns([_build_header(results), *(_build_cells(results, row) for row in results.rows)])
    notices = [*_list_notices(results)]
    if notices:
        lines += ["", "not in the means:", *align_columns(notices)]
    following = [["" if i else "next:", command] for i, command in enumerate(_suggest_commands(results))]
    return "\n".join([*lines, "", *align_columns(following)])


def write(results: Results) -> Path:
    """Write results.csv (a line per run, with all metrics), results.html and its plots next to the sweep's file.

    Returns:
        The page, which needs no network and no other file.
    """
    folder = results.sweep.folder
    write_atomically(folder / TABLE, _encode_csv(results))
    plots = [*_draw_plots(results)]
    for plot in plots:
        write_atomically(folder / PLOTS / f"{plot.name}.png", plot.png, inside=True)
    rows = render_table(_build_header(results), [_build_cells(results, row) for row in results.rows])
    caption = f'<p class="soft">{escape(_write_caption(results))}</p>'
    excluded = render_table(["run", "why", "command"], [*_list_notices(results)], numbers=False)
    page = render_page(
        results.sweep.name,
        f"<header><h1>{escape(results.sweep.name)}</h1>"
        f'<p class="soft">Sweep of {escape(results.sweep.job)}, {len(results.outcomes)} runs: '
        f"{_format_counts(results)}</p></header>",
        render_section("Results", rows, caption).replace("+-", "\u00b1"),
        render_section("Not in the means", excluded, optional=True),
        render_section("Plots", render_gallery(plots), optional=True),
        render_section("Time", render_goodput(compute_shares(o.seconds for o in results.outcomes)), optional=True),
        render_section("Runs", render_table(*_build_runs_table(results))),
    )
    write_atomically(folder / PAGE, page)
    return folder / PAGE


# Reading the runs


def _read_outcome(element: Element, state: str) -> Outcome:
    if not (element.run / CONFIG).is_file():  # creating the sweep was interrupted
        return Outcome(element, state, None, {}, 0.0, 0.0, {})
    events = read_events(element.run)
    lines, _ = read_thinned_metrics(element.run, most=2)  # of the training, only how long it took
    for change in find_changes(element.run):
        logger.warning("{}", change)
    starts = [event for event in events if event["event"] in STARTS]
    monitor = Monitor(**starts[-1]["monitor"]) if starts else None
    evals = [line for line in lines if line["kind"] == "eval"]
    metrics = _collect_metrics(evals, monitor, finished=state == State.DONE)
    hours = _compute_hours(events, lines)
    return Outcome(element, state, monitor, metrics, hours["gpu"], hours["cpu"], label_seconds(element.run, events))


def _collect_metrics(evals: Sequence[Line], monitor: Monitor | None, *, finished: bool) -> dict[str, dict[str, float]]:
    """Return by split: the metrics of the best validation, and of the tests at the end of a finished run."""
    if monitor is None:
        return {}
    chosen: dict[str, Line] = {}
    best = find_best_evaluation(evals, split=monitor.split, metric=monitor.metric, mode=monitor.mode, ties=monitor.ties)
    if best is not None:
        chosen[monitor.split] = best
    if finished:
        chosen |= {line["split"]: line for line in evals if line["split"] not in (monitor.split, _TRAIN)}
    return {split: select_metrics(line) for split, line in chosen.items()}


def _compute_hours(events: Sequence[Line], lines: Sequence[Line]) -> dict[str, float]:
    """Return the rank-hours of all attempts by kind of device, including steps that were lost and repeated.

    An attempt counts from its first event to the last line of it that no resume cut; work of a killed attempt after
    that (less than the time between two checkpoints) is not known.
    """
    spent = {"gpu": 0.0, "cpu": 0.0}
    bounds = [i for i, event in enumerate(events) if event["event"] in STARTS] + [len(events)]
    for begin, end in itertools.pairwise(bounds):
        first = events[begin]
        own = [*events[begin:end], *(lines if end == len(events) else [])]  # no line of the last attempt was cut
        hours = (find_elapsed_s(own) - first["elapsed_s"]) / 3600
        spent["cpu" if first["device"] == "cpu" else "gpu"] += first["world_size"] * hours
    return spent


def _choose_metric(outcomes: Sequence[Outcome], metric: str) -> tuple[str, str]:
    """Return the metric to show and its mode: "min", "max", or empty if that was not recorded."""
    monitors = list(dict.fromkeys((o.monitor.metric, o.monitor.mode) for o in outcomes if o.monitor))
    if not metric and len(monitors) > 1:
        names = ", ".join(name for name, _ in monitors)
        raise UserError(f"The runs of this sweep have different monitors: {names}. Choose: --metric {monitors[0][0]}")
    if not metric:
        return monitors[0] if monitors else ("", "")
    known = list(dict.fromkeys(name for o in outcomes for values in o.metrics.values() for name in values))
    if metric not in known:
        near = find_nearest(metric, known, similarity=0.0)
        choice = f"Nearest: {near[0]}. There are: {', '.join(known)}." if known else "Nothing has been evaluated yet."
        raise UserError(f"--metric {metric}: no run of this sweep has it. {choice}")
    return metric, dict(monitors).get(metric, "")


def _build_row(outcomes: Sequence[Outcome], metric: str, splits: Sequence[str]) -> Row:
    counted = [outcome for outcome in outcomes if not outcome.explain_exclusion(metric, splits)]
    means = {s: estimate_mean([outcome.metrics[s][metric] for outcome in counted]) for s in splits} if counted else {}
    return Row({n: v for n, v in outcomes[0].values.items() if n != SEED}, outcomes, means)


# Text


def _format_counts(results: Results) -> str:
    return ", ".join(f"{n} {state}" for state, n in Counter(outcome.state for outcome in results.outcomes).items())


def _write_caption(results: Results) -> str:
    if not results.metric:
        return "No run has begun to train."
    if not results.splits:
        return f"No run has finished, so there is no mean of {results.metric} yet; {TABLE} has what there is so far."
    first, *tests = results.splits
    parts = [f"{results.metric}: mean +- 95 % confidence interval over seeds (Student's t)."]
    monitor = next(outcome.monitor for outcome in results.outcomes if outcome.monitor)
    if first == monitor.split:
        parts.append(f"{first}: at the best validation by {monitor.metric}" + ("." if not tests else "; "))
    if tests and first == monitor.split:
        parts[-1] += f"{', '.join(tests)}: with the weights of that step."
    if results.mode:
        parts.append(f"* {'highest' if results.mode == 'max' else 'lowest'} on {first}.")
    else:
        parts.append(f"No best is marked: whether a higher or a lower {results.metric} is better is not recorded.")
    return " ".join(parts)


def _build_header(results: Results) -> list[str]:
    axes = [name for name in results.sweep.axes if name != SEED]
    return ["", *axes, *(f"{results.metric} on {s}" for s in results.splits), "runs", *_list_cost_names(results)]


def _build_cells(results: Results, row: Row) -> list[str]:
    shown = [_format_mean(row.means[s]) if row.means else "-" for s in results.splits]
    counted = f"{row.counted} of {len(row.outcomes)}"
    mark = "*" if row is results.best else ""
    return [mark, *row.values.values(), *shown, counted, *_format_costs(results, row.outcomes)]


def _format_mean(mean: Mean) -> str:
    """Format a mean to the second digit of its uncertainty."""
    if mean.half_width is None:
        return f"{mean.value:.4g}"
    digits = 1 - math.floor(math.log10(mean.half_width)) if mean.half_width > 0 else 4
    if not 0 <= digits <= 8:
        return f"{mean.value:.4g} +- {mean.half_width:.2g}"
    return f"{mean.value:.{digits}f} +- {mean.half_width:.{digits}f}"


def _sum_costs(outcomes: Iterable[Outcome]) -> dict[str, float]:
    costs = [(outcome.gpu_hours, outcome.cpu_rank_hours) for outcome in outcomes]
    return dict(zip(("GPU-hours", "CPU rank-hours"), map(sum, zip(*costs, strict=True)), strict=True))


def _list_cost_names(results: Results) -> list[str]:
    """Return the names of the cost columns: one for GPUs and one for ranks on CPUs, each if it was used."""
    return [name for name, hours in _sum_costs(results.outcomes).items() if hours]


def _format_costs(results: Results, outcomes: Iterable[Outcome]) -> list[str]:
    sums = _sum_costs(outcomes)
    return [f"{sums[name]:.2f}" if sums[name] >= 0.1 else f"{sums[name]:.2g}" for name in _list_cost_names(results)]


def _list_notices(results: Results) -> Iterator[list[str]]:
    """Yield run, reason and the command that tells more, for each run that is excluded from the means."""
    for outcome in results.outcomes:
        if reason := outcome.explain_exclusion(results.metric, results.splits):
            verb = "status" if outcome.state in ACTIVE else "report" if outcome.state == State.DONE else "why"
            yield [" ".join(outcome.element.overrides), reason, f"trainyard {verb} {outcome.element.run}"]


def _suggest_commands(results: Results) -> list[str]:
    name, best = results.sweep.name, results.best
    commands = [f"open {quote_path(results.sweep.folder / PAGE)}"]
    if any(outcome.state not in (State.DONE, *ACTIVE) for outcome in results.outcomes):
        commands.append(f"trainyard sweep --continue {name}")
    if any(outcome.state in ACTIVE for outcome in results.outcomes):
        commands.append(f"trainyard results {name}")
    elif best is not None:
        choose = max if results.mode == "max" else min
        counted = [o for o in best.outcomes if not o.explain_exclusion(results.metric, results.splits)]
        run = choose(counted, key=lambda o: o.metrics[results.splits[0]][results.metric]).element.run
        commands.append(f"trainyard export {quote_path(run)} {results.sweep.job}.safetensors")
    return commands


# Files


def _build_runs_table(results: Results) -> tuple[list[str], list[list[str]]]:
    splits = list(dict.fromkeys(split for outcome in results.outcomes for split in outcome.metrics))
    metric_columns = [f"{results.metric} on {split}" for split in splits]
    header = ["run", *results.sweep.axes, "state", *metric_columns, *_list_cost_names(results)]
    rows = []
    for o in results.outcomes:
        metrics = [o.metrics.get(split, {}).get(results.metric) for split in splits]
        shown = ["-" if value is None else f"{value:.4g}" for value in metrics]
        rows.append([o.element.run.name, *o.values.values(), o.state, *shown, *_format_costs(results, [o])])
    return header, rows


def _encode_csv(results: Results) -> str:
    names = list(dict.fromkeys(f"{s}/{n}" for o in results.outcomes for s, values in o.metrics.items() for n in values))
    fixed = ["index", "run", "state", *results.sweep.axes, "gpu_hours", "cpu_rank_hours"]
    out = io.StringIO()
    rows = (
        {"index": o.element.index, "run": o.element.run, "state": o.state, **o.values}
        | {"gpu_hours": f"{o.gpu_hours:.6g}", "cpu_rank_hours": f"{o.cpu_rank_hours:.6g}"}
        | {f"{split}/{name}": value for split, values in o.metrics.items() for name, value in values.items()}
        for o in results.outcomes
    )
    write_table(out, [*fixed, *names], rows, line_end="\n")
    return out.getvalue()


def _draw_plots(results: Results) -> Iterator[Plot]:
    """Draw the metric over each option whose values are numbers: a point per seed, mean and interval."""
    if not results.splits:
        return
    split = results.splits[-1]
    for axis, values in results.sweep.axes.items():
        if axis != SEED and len(values) > 1 and all(map(_is_number, values)):
            title = f"{results.metric} on {split}"
            png = draw_figure(title, _make_drawer(results, axis, split), x_label=axis)
            yield Plot(make_slug(axis), f"{title} over {axis}", png)


def _make_drawer(results: Results, axis: str, split: str) -> Callable[["Axes"], None]:
    series: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.means:
            series.setdefault(" ".join(f"{n}={v}" for n, v in row.values.items() if n != axis), []).append(row)

    def draw(axes: "Axes") -> None:
        for i, (label, rows) in enumerate(series.items()):
            colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
            rows = sorted(rows, key=lambda row: float(row.values[axis]))
            x = [float(row.values[axis]) for row in rows]
            means = [row.means[split] for row in rows]
            axes.errorbar(
                x, [m.value for m in means], [m.half_width or 0.0 for m in means], label=label, color=colour,
                marker=marker, markersize=5, capsize=3, elinewidth=1,
            )  # fmt: skip
            for row, place in zip(rows, x, strict=True):
                counted = [o for o in row.outcomes if not o.explain_exclusion(results.metric, [split])]
                seeds = [o.metrics[split][results.metric] for o in counted]
                axes.plot([place] * len(seeds), seeds, "x", color=colour, markersize=4, alpha=0.7, zorder=3)
        _set_ticks(axes, results.sweep.axes[axis])
        axes.set_ylabel(results.metric)
        if len(series) > 1:
            axes.legend(fontsize="small")

    return draw


def _set_ticks(axes: "Axes", values: Sequence[str]) -> None:
    """Put the ticks at the values, on a logarithmic axis if they span more than a decade."""
    from matplotlib.ticker import NullLocator

    places = sorted(map(float, values))
    if places[0] > 0 and places[-1] / places[0] > 10:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
