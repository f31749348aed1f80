"""What a run says of itself afterwards: one HTML page with its plots, and a summary that fits a screen."""

import base64
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainyard.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from trainyard.train.console import format_duration
from trainyard.train.record import (
    ENDS,
    EVENTS_FILE,
    STARTS,
    TIMING_KEYS,
    Line,
    elapsed_s,
    flatten,
    read_events,
    read_metrics,
    replace_file,
)


@dataclass(frozen=True)
class _Story:
    """Everything a run folder holds, read once, and what follows from it."""

    run: Path
    config: str  # the text of config.yaml; empty if there is none
    env: Mapping[str, Any]
    train: list[Line]
    evals: list[Line]
    events: list[Line]

    @classmethod
    def read(cls, run: Path) -> "_Story":
        metrics = read_metrics(run)
        return cls(
            run=run,
            config=_text(run / "config.yaml"),
            env=_environment(run / "env.json"),
            train=[line for line in metrics if line["kind"] == "train"],
            evals=[line for line in metrics if line["kind"] == "eval"],
            events=read_events(run),
        )

    @property
    def job(self) -> str:
        match = re.search(r"^job: *(\S+)", self.config, re.MULTILINE)
        return match[1].strip("'\"") if match else self.run.absolute().parent.name

    @property
    def status(self) -> str:
        known = [e for e in self.events if e.get("event") in STARTS + ENDS]
        if not known:
            return "not recorded"
        last = known[-1]
        if last["event"] in STARTS:
            return "no end recorded: still running, or killed"
        return _ending(last)

    @property
    def step(self) -> int:
        return max((line["step"] for line in [*self.train, *self.evals, *self.current_events()]), default=0)

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(str(line["split"]) for line in self.evals))

    @property
    def samples_per_s(self) -> float | None:
        """Median over the lines; where there are several, without the first, which may hold compilation."""
        rates = [line["samples_per_s"] for line in self.train if "samples_per_s" in line]
        return float(np.median(rates[1:] or rates)) if rates else None

    @property
    def elapsed_s(self) -> float:
        return elapsed_s([*self.train, *self.evals, *self.current_events()])

    def current_events(self) -> list[Line]:
        """The events of the history that stands: not those of steps that a later attempt took again."""
        kept: list[Line] = []
        for event in self.events:
            if event.get("event") in STARTS:
                kept = [e for e in kept if e["step"] <= event["step"]]
            kept.append(event)
        return kept

    def started(self, key: str) -> Any:
        """A field of the latest start or resume; None if it was not recorded."""
        values = (e.get(key) for e in reversed(self.events) if e.get("event") in STARTS)
        return next((value for value in values if value is not None), None)

    def last(self, split: str) -> Line:
        return next(line for line in reversed(self.evals) if str(line["split"]) == split)

    def best(self) -> tuple[str, Line] | None:
        """The metric that decides and its best evaluation; None if it is not named or never finite."""
        monitor = self.started("monitor") or {}
        name, split = str(monitor.get("metric")), str(monitor.get("split"))
        of_split = [line for line in self.evals if str(line["split"]) == split]
        finite = [line for line in of_split if math.isfinite(line.get(name, math.nan))]
        if not finite:
            return None
        choose = max if monitor.get("mode") == "max" else min
        return name, choose(finite, key=lambda line: line[name])

    def time_spent_s(self) -> dict[str, float]:
        """Seconds of the run by what they went to, adding up to `elapsed_s` if that was recorded."""
        steps = np.diff([0, *(line["step"] for line in self.train)])
        parts = {
            "compute": _per_step_s(self.train, steps, "compute_ms"),
            "data wait": _per_step_s(self.train, steps, "data_wait_ms"),
            "evaluation": sum(line.get("seconds", 0.0) for line in self.evals),
            "checkpoint": sum(e.get("seconds", 0.0) for e in self.current_events() if e.get("event") == "checkpoint"),
        }
        return parts | {"other": max(self.elapsed_s - sum(parts.values()), 0.0)}

    def missing(self) -> list[str]:
        """What a reader would look for and not find, in words."""
        absent = {
            "No training line yet.": not self.train,
            "No evaluation yet.": not self.evals,
            "The end of the run is not recorded: it is still running, or it was killed.": not any(
                e.get("event") in ENDS for e in self.events
            ),
            "env.json is absent: the environment and the automatic choices are not recorded.": not self.env,
            "config.yaml is absent: the options are not recorded.": not self.config,
        }
        return [text for text, is_absent in absent.items() if is_absent]


def _ending(event: Line) -> str:
    reason = event.get("reason") if event["event"] != "done" else None
    return f"{event['event']} ({reason})" if reason else str(event["event"])


def _per_step_s(lines: Sequence[Line], steps: np.ndarray, key: str) -> float:
    return float(sum(n * line.get(key, 0.0) for n, line in zip(steps, lines, strict=True)) / 1000)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _environment(path: Path) -> Mapping[str, Any]:
    try:
        env = json.loads(_text(path) or "{}")
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found {error}. Restore it, or remove it to go without.") from error
    if not isinstance(env, dict):
        raise UserError(f"{path}: expected a JSON object. Restore it, or remove it to go without.")
    return env


def _metrics(line: Line) -> list[str]:
    """Names of the metrics of an evaluation, in its order; the ends of an interval go with their metric."""
    fixed = {"kind", "step", "epoch", "split", "seconds", "elapsed_s"}
    names = [key for key, value in line.items() if key not in fixed and isinstance(value, int | float)]
    ends = {end for name in names for end in _interval_names(name) if _has_interval(line, name)}
    return [name for name in names if name not in ends]


def _all_metrics(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in _metrics(line)))


def _interval_names(name: str) -> tuple[str, str]:
    return f"{name}_low", f"{name}_high"


def _has_interval(line: Line, name: str) -> bool:
    return all(isinstance(line.get(end), int | float) for end in _interval_names(name))


def summary_text(run: Path, *, next_commands: Sequence[str] = ()) -> str:
    """Return what a run came to, on one screen of plain text.

    Args:
        next_commands: what the user may want to type now, one line each.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = _Story.read(run)
    facts = dict(_facts(story))
    page = run / "report.html"
    rows: list[tuple[str, Sequence[str]]] = [
        ("trained", [f"{facts[name]} {name.lower()}" for name in ("Steps", "Epochs", "Samples")]),
        ("took", [facts["Running time"], *(f"{name} {share:.0f} %" for name, _, share in _shares(story))]),
        ("speed", [f"{facts['Median rate']} (median)"]),
        *((split, _shown_metrics(story.last(split))) for split in story.splits),
    ]
    if not story.evals:
        rows.append(("metrics", ["no evaluation yet"]))
    if best := story.best():
        name, line = best
        rows.append(("best", [f"{name} {_value(line, name)} on {line['split']} at step {line['step']:,}"]))
    rows.append(("report", [str(page) if page.exists() else "not written"]))
    rows += [("" if i else "next:", [command]) for i, command in enumerate(next_commands)]
    return "\n".join([f"{story.job}  {story.status}", *_columns(rows)])


def _columns(rows: Sequence[tuple[str, Sequence[str]]], *, width: int = 110) -> Iterator[str]:
    """Yield lines with the names in one column and the items beside it, broken only between items."""
    left = max(len(name) for name, _ in rows)
    for name, items in rows:
        line = f"{name:<{left}}"
        for item in items:
            if line.strip() not in ("", name) and len(line) + 2 + len(item) > width:
                yield line
                line = " " * left
            line += f"  {item}"
        yield line


def _shown_metrics(line: Line) -> list[str]:
    return [f"{name} {_value(line, name)}" for name in _metrics(line)]


def _facts(story: _Story) -> list[tuple[str, str]]:
    """Name and value of each figure that says what was trained."""
    total, last = story.started("total_steps"), story.train[-1] if story.train else {}
    attempts = sum(e.get("event") in STARTS for e in story.events)
    memory = max((line["memory_gib"] for line in story.train if "memory_gib" in line), default=None)
    rate = story.samples_per_s
    name, line = story.best() or ("", None)
    return [
        ("Steps", f"{story.step:,}" + (f" of {total:,}" if total else "")),
        ("Epochs", _shown(last.get("epoch"))),
        ("Samples", _shown(last.get("samples_seen"))),
        ("Running time", format_duration(story.elapsed_s)),
        ("Median rate", f"{_shown(rate)} samples/s" if rate else _ABSENT),
        ("Peak memory", f"{memory:.1f} GiB" if memory else _ABSENT),
        ("Attempts", str(attempts) if attempts else _ABSENT),
        (f"Best {name}", f"{_score(line[name])} on {line['split']}") if line else ("Best metric", _ABSENT),
    ]


_ABSENT = "not recorded"


def _shares(story: _Story) -> list[tuple[str, float, float]]:
    """(what, seconds, percent of the run) for each part; empty if nothing was timed."""
    spent = story.time_spent_s()
    whole = sum(spent.values())
    return [(name, seconds, 100 * seconds / whole) for name, seconds in spent.items()] if whole else []


def _value(line: Line, name: str) -> str:
    if name not in line:
        return "-"
    if not _has_interval(line, name):
        return _score(line[name])
    low, high = (_score(line[end]) for end in _interval_names(name))
    return f"{_score(line[name])} [{low}, {high}]"


def _score(value: float) -> str:
    """Four significant digits, zeros at the end included, so that columns of metrics compare by eye."""
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) and abs(value) < 1000 else _shown(value)


def _shown(value: object) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# --- Plots ------------------------------------------------------------------------------------------------

_BLUE = "#0072B2"
SERIES = (_BLUE, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision tell apart (Okabe and Ito 2008, https://jfly.uni-koeln.de/color/)."""
MARKERS = "os^Dv*P"
_SPENT_COLOURS = {
    "compute": _BLUE,
    "data wait": "#E69F00",
    "evaluation": "#009E73",
    "checkpoint": "#CC79A7",
    "other": "#c4c9d1",
}
_STYLE: Any = {  # matplotlib 3.11 types it by its 300 keys, 3.9 as a plain dict
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": "#374151",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e5e7eb",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
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
class Plot:
    name: str  # file name without its ending
    title: str
    png: bytes


def _plots(story: _Story) -> tuple[list[Plot], list[Plot], list[Plot]]:
    """Draw what there is to draw: (training curves, metrics on evaluation sets, speed)."""
    names = dict.fromkeys(key for line in story.train for key, value in line.items() if isinstance(value, int | float))
    curves = [n for n in names if n not in TIMING_KEYS | {"step", "epoch", "samples_seen"}]
    training = [_curve(story, name) for name in sorted(curves, key=lambda n: n != "loss")]
    metrics = [_metric_plot(story, name) for name in _all_metrics(story.evals) if _moves(story.evals, name)]
    speed = [_curve(story, "samples_per_s")] if "samples_per_s" in names else []
    if _shares(story):
        speed.append(_time_plot(story))
    return training, metrics, speed


def _exhibits(run: Path) -> list[Plot]:
    """Return what the job itself shows of its last evaluation."""
    return [Plot(path.stem, path.stem, path.read_bytes()) for path in sorted((run / "exhibits").glob("*.png"))]


def _moves(evals: Sequence[Line], name: str) -> bool:
    """Tell whether a metric differs between evaluations of one split: counts of pairs never do, and make no plot."""
    values: dict[str, list[Any]] = {}
    for line in evals:
        values.setdefault(line["split"], []).append(line.get(name))
    return all(len(seen) < 2 for seen in values.values()) or any(len(set(seen)) > 1 for seen in values.values())


def _curve(story: _Story, key: str) -> Plot:
    """Plot one number of the training lines over the steps, with its running mean where there are many."""
    steps = np.array([line["step"] for line in story.train if key in line])
    values = np.array([line[key] for line in story.train if key in line], dtype=np.float64)
    finite = np.isfinite(values)
    width = len(values) // 25

    def draw(axes: "Axes") -> None:
        if width < 2 or key == "lr":
            axes.plot(steps, values, color=_BLUE, marker="o" if len(values) < 25 else "", markersize=4)
        else:
            axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=0.8, label="logged")
            axes.plot(steps, _running_mean(values, width), color=_BLUE, label=f"mean of {width}")
            axes.legend()
        if not finite.all():
            bottom = np.zeros(np.sum(~finite))
            place: Any = axes.get_xaxis_transform()
            axes.plot(
                steps[~finite],
                bottom,
                "x",
                color=SERIES[1],
                transform=place,
                label="not finite",
                clip_on=False,
            )
            axes.legend()
        axes.set_xlim(0, 1.02 * max(steps))
        if key == "samples_per_s":
            axes.set_ylim(bottom=0)
        elif key != "lr" and _spans_decades(values[finite]):
            axes.set_yscale("log")
        axes.set_ylabel(_UNITS.get(key, key))

    title = _TITLES.get(key, f"Training: {key}")
    return Plot(slug(f"train_{key}"), title, figure(title, draw))


def _spans_decades(values: np.ndarray) -> bool:
    """Whether a linear axis would hide most of the values: 5 % of them are over 100 times another 5 %."""
    return bool(np.all(values > 0) and len(values) and np.ptp(np.log10(np.percentile(values, [5, 95]))) > 2)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` values, fewer at the ends; what is not finite does not count."""
    finite = np.isfinite(values)
    window = np.ones(width)
    count = np.convolve(finite, window, mode="same")
    mean = np.full(len(values), np.nan)
    total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    np.divide(total, count, out=mean, where=count > 0)
    return mean


def _metric_plot(story: _Story, name: str) -> Plot:
    """Plot one metric over the steps, a line for each split, with its 95 % interval where there is one."""

    def draw(axes: "Axes") -> None:
        for i, split in enumerate(story.splits):
            lines = [line for line in story.evals if str(line["split"]) == split and name in line]
            if not lines:
                continue
            colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
            steps = [line["step"] for line in lines]
            axes.plot(steps, [line[name] for line in lines], color=colour, marker=marker, markersize=4, label=split)
            certain = [line for line in lines if _has_interval(line, name)]
            low, high = ([line[end] for line in certain] for end in _interval_names(name))
            axes.vlines([line["step"] for line in certain], low, high, color=colour, linewidth=1, alpha=0.5)
        axes.set_xlim(0, 1.02 * story.evals[-1]["step"] or 1)
        axes.set_ylabel(name)
        axes.legend()

    return Plot(slug(f"eval_{name}"), name, figure(name, draw))


def _time_plot(story: _Story) -> Plot:
    """Plot the share of the run's time that each kind of work took, as one bar."""

    def draw(axes: "Axes") -> None:
        left = 0.0
        for name, _, share in _shares(story):
            axes.barh(0, share, left=left, height=0.5, color=_SPENT_COLOURS[name], label=f"{name} {share:.0f} %")
            left += share
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.5, 0.5)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3)

    title = "Where the time went"
    label = f"share of {format_duration(sum(story.time_spent_s().values()))} (%)"
    return Plot("time", title, figure(title, draw, x_label=label))


def figure(title: str, draw: Callable[["Axes"], None], *, x_label: str = "optimizer step") -> bytes:
    """Return one pair of axes as PNG. No pyplot: no global figure stays behind, and no display is needed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.1), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        draw(axes)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


# --- The page ---------------------------------------------------------------------------------------------

_EVENTS_SHOWN = 200


def write_report(run: Path) -> Path:
    """Write `<run>/plots/*.png` and `<run>/report.html`, and return the page's path.

    The page holds all it shows: it needs no network and no other file. A run that has not finished, or has
    just begun, gets a page that says what is missing.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = _Story.read(run)
    training, metrics, speed = _plots(story)
    (run / "plots").mkdir(exist_ok=True)
    for plot in [*training, *metrics, *speed]:
        replace_file(run / "plots" / f"{plot.name}.png", plot.png)
    body = "\n".join(
        [
            _header(story),
            section("Summary", _summary(story), _results(story)),
            section("Training", gallery(training)),
            section("Evaluation", gallery(metrics), gallery(_exhibits(run)), _evaluations(story)),
            section("Speed", gallery(speed), _time_table(story)),
            section("Attempts and events", _attempts(story), _events(story)),
            section("Automatic choices", _choices(story)),
            section("Environment", _environment_table(story)),
            section("Configuration", f"<pre>{html.escape(story.config)}</pre>" if story.config else ""),
        ]
    )
    page = PAGE_TEMPLATE.replace("@TITLE@", html.escape(f"{story.job} - {run.name}")).replace("@BODY@", body)
    replace_file(run / "report.html", page.encode())
    return run / "report.html"


PAGE_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light; --ink: #111827; --soft: #4b5563; --line: #e5e7eb; --panel: #f9fafb; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .3rem; font-size: 1.15rem;
  border-bottom: 1px solid var(--line); }
h3 { margin: 1.25rem 0 .4rem; font-size: .95rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.pill { display: inline-block; margin-top: .6rem; padding: .1rem .7rem; border-radius: 1rem;
  font-size: .85rem; font-weight: 600; color: #1f2937; background: #e5e7eb; }
.pill.done { color: #065f46; background: #d1fae5; }
.pill.failed { color: #7c2d12; background: #ffedd5; }
.note { padding: .6rem .9rem; margin-top: 1rem; border-left: 3px solid #E69F00; background: #fffbeb; }
.facts { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 0; }
.facts div { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--panel); }
.facts dt { font-size: .8rem; color: var(--soft); }
.facts dd { margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; border: 1px solid var(--line); border-radius: .5rem; max-width: 40rem; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.25rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td { white-space: nowrap; }
td.number, th.number { text-align: right; }
td.number { white-space: pre; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
pre { margin: 0; padding: 1rem; overflow-x: auto; font: .8rem/1.45 ui-monospace, Menlo, Consolas, monospace;
  background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; }
@media (max-width: 40rem) { .facts { grid-template-columns: repeat(2, 1fr); } }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .plots { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  td { white-space: normal; }
  figure, tr, .facts div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
</style>
</head>
<body>
@BODY@
</body>
</html>
"""


def _header(story: _Story) -> str:
    shade = next((word for word in ("done", "failed") if story.status.startswith(word)), "")
    started = next((e.get("time") for e in story.events if e.get("event") == "start"), None)
    missing = "".join(f"<p>{html.escape(text)}</p>" for text in story.missing())
    return (
        f"<header><h1>{html.escape(story.job)}</h1>"
        f'<p class="soft">Run {html.escape(story.run.absolute().name)}, started {_time(started)}</p>'
        f'<span class="pill {shade}">{html.escape(story.status)}</span>'
        + (f'<div class="note">{missing}</div>' if missing else "")
        + "</header>"
    )


def section(title: str, *parts: str) -> str:
    inner = "\n".join(part for part in parts if part) or '<p class="soft">Not recorded.</p>'
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{inner}\n</section>"


def _summary(story: _Story) -> str:
    cells = [f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in _facts(story)]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _results(story: _Story) -> str:
    """Final metrics, a column for each split, and the best evaluation beside them."""
    if not story.evals:
        return ""
    columns = [(f"{split}, step {line['step']:,}", line) for split in story.splits for line in [story.last(split)]]
    note = "Which evaluation is best is not recorded."
    if best := story.best():
        name, line = best
        columns.append((f"best {line['split']}, step {line['step']:,}", line))
        note = f"Best by {name} on {line['split']}."
    names = _all_metrics(story.evals)
    rows = [[name, *(_value(line, name).replace(" [", "\n[") for _, line in columns)] for name in names]
    metrics = table(["metric", *(title for title, _ in columns)], rows)
    caption = f"Last evaluation of each split; 95 % intervals in brackets. {note}"
    return f'{metrics}<p class="soft">{html.escape(caption)}</p>'


def gallery(plots: Sequence[Plot]) -> str:
    figures = [
        f'<figure><img alt="{html.escape(plot.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(plot.png).decode()}"></figure>'
        for plot in plots
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _evaluations(story: _Story) -> str:
    if not story.evals:
        return ""
    names = _all_metrics(story.evals)
    rows = [
        [
            str(line["split"]),
            f"{line['step']:,}",
            _shown(line.get("epoch")),
            *(_value(line, n) for n in names),
        ]
        for line in story.evals
    ]
    return table(["split", "step", "epoch", *names], rows)


def _time_table(story: _Story) -> str:
    rows = [[name, f"{seconds:,.1f}", f"{share:.1f}"] for name, seconds, share in _shares(story)]
    return table(["part", "seconds", "share (%)"], rows) if rows else ""


def _attempts(story: _Story) -> str:
    starts = [i for i, event in enumerate(story.events) if event.get("event") in STARTS]
    if not starts:
        return ""
    rows = []
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(story.events)], strict=True), start=1):
        first, last = story.events[begin], story.events[end - 1]
        rows.append(
            [
                str(number),
                _time(first.get("time")),
                str(first.get("host", _ABSENT)),
                str(first.get("device", _ABSENT)),
                _shown(first.get("world_size")),
                f"{first['step']:,}",
                f"{last['step']:,}",
                _ending(last) if last.get("event") in ENDS else _ABSENT,
            ]
        )
    return table(
        ["attempt", "started", "host", "device", "ranks", "from step", "to step", "ended"],
        rows,
        numbers=False,
    )


def _events(story: _Story) -> str:
    if not story.events:
        return ""
    stamped = {"kind", "step", "event", "time", "elapsed_s"}
    rows = [
        [
            _time(event.get("time")),
            f"{event['step']:,}",
            str(event.get("event", _ABSENT)),
            ", ".join(f"{k} {_shown(v)}" for k, v in flatten(event) if k not in stamped),
        ]
        for event in story.events[-_EVENTS_SHOWN:]
    ]
    cut = len(story.events) - len(rows)
    note = f'<p class="soft">{cut} earlier events are in {EVENTS_FILE}.</p>' if cut else ""
    return table(["time", "step", "event", "details"], rows, numbers=False) + note


def _choices(story: _Story) -> str:
    rows = []
    for name, choice in dict(story.env.get("choices") or {}).items():
        known = choice if isinstance(choice, Mapping) else {"value": choice}
        rows.append([str(name), str(known.get("value", _ABSENT)), str(known.get("reason", _ABSENT))])
    return table(["choice", "value", "reason"], rows, numbers=False) if rows else ""


def _environment_table(story: _Story) -> str:
    parts = []
    for section, content in story.env.items():
        if section != "choices":
            rows = [[k, _shown(v)] for k, v in (flatten(content) if isinstance(content, Mapping) else [("", content)])]
            parts.append(f"<h3>{html.escape(str(section))}</h3>{table(['name', 'value'], rows, numbers=False)}")
    return "".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a table, its text escaped; `numbers` aligns all but the first column to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ["number" if numbers and i > 0 else "text" if i == len(row) - 1 else "" for i in range(len(row))]
        return "".join(f'<{tag} class="{k}">{html.escape(t)}</{tag}>' for k, t in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _time(text: object) -> str:
    return html.escape(str(text).replace("T", " ").replace("+00:00", " UTC")) if text else _ABSENT
