"""What a run says of itself afterwards: one HTML page with its plots, and a summary that fits a screen."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainyard.files import write_atomically
from trainyard.report.html import PAGE_TEMPLATE, gallery, section, table
from trainyard.report.run_plots import draw_plots, read_figures
from trainyard.report.run_story import (
    RunStory,
    all_metric_names,
    describe_ending,
    has_interval,
    interval_names,
    metric_names,
    time_shares,
)
from trainyard.runs.events import (
    ENDS,
    EVENTS_FILE,
    STARTS,
    Line,
    flatten,
)
from trainyard.text import format_duration


def summary_text(run: Path, *, next_commands: Sequence[str] = ()) -> str:
    """Return what a run came to, on one screen of plain text.

    Args:
        next_commands: what the user may want to type now, one line each.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = RunStory.read(run)
    facts = dict(_facts(story))
    page = run / "report.html"
    rows: list[tuple[str, Sequence[str]]] = [
        ("trained", [f"{facts[name]} {name.lower()}" for name in ("Steps", "Epochs", "Samples")]),
        ("took", [facts["Running time"], *(f"{name} {share:.0f} %" for name, _, share in time_shares(story))]),
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
    return [f"{name} {_value(line, name)}" for name in metric_names(line)]


def _facts(story: RunStory) -> list[tuple[str, str]]:
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


def _value(line: Line, name: str) -> str:
    if name not in line:
        return "-"
    if not has_interval(line, name):
        return _score(line[name])
    low, high = (_score(line[end]) for end in interval_names(name))
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


# --- The page ---------------------------------------------------------------------------------------------

_EVENTS_SHOWN = 200


def write_report(run: Path) -> Path:
    """Write `<run>/plots/*.png` and `<run>/report.html`, and return the page's path.

    The page holds all it shows: it needs no network and no other file. A run that has not finished, or has
    just begun, gets a page that says what is missing.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = RunStory.read(run)
    training, metrics, speed = draw_plots(story)
    (run / "plots").mkdir(exist_ok=True)
    for plot in [*training, *metrics, *speed]:
        write_atomically(run / "plots" / f"{plot.name}.png", plot.png)
    body = "\n".join(
        [
            _header(story),
            section("Summary", _summary(story), _results(story)),
            section("Training", gallery(training)),
            section("Evaluation", gallery(metrics), gallery(read_figures(run)), _evaluations(story)),
            section("Speed", gallery(speed), _time_table(story)),
            section("Attempts and events", _attempts(story), _events(story)),
            section("Automatic choices", _choices(story)),
            section("Environment", _environment_table(story)),
            section("Configuration", f"<pre>{html.escape(story.config)}</pre>" if story.config else ""),
        ]
    )
    page = PAGE_TEMPLATE.replace("@TITLE@", html.escape(f"{story.job} - {run.name}")).replace("@BODY@", body)
    write_atomically(run / "report.html", page.encode())
    return run / "report.html"


def _header(story: RunStory) -> str:
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


def _summary(story: RunStory) -> str:
    cells = [f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in _facts(story)]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _results(story: RunStory) -> str:
    """Final metrics, a column for each split, and the best evaluation beside them."""
    if not story.evals:
        return ""
    columns = [(f"{split}, step {line['step']:,}", line) for split in story.splits for line in [story.last(split)]]
    note = "Which evaluation is best is not recorded."
    if best := story.best():
        name, line = best
        columns.append((f"best {line['split']}, step {line['step']:,}", line))
        note = f"Best by {name} on {line['split']}."
    names = all_metric_names(story.evals)
    rows = [[name, *(_value(line, name).replace(" [", "\n[") for _, line in columns)] for name in names]
    metrics = table(["metric", *(title for title, _ in columns)], rows)
    caption = f"Last evaluation of each split; 95 % intervals in brackets. {note}"
    return f'{metrics}<p class="soft">{html.escape(caption)}</p>'


def _evaluations(story: RunStory) -> str:
    if not story.evals:
        return ""
    names = all_metric_names(story.evals)
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


def _time_table(story: RunStory) -> str:
    rows = [[name, f"{seconds:,.1f}", f"{share:.1f}"] for name, seconds, share in time_shares(story)]
    return table(["part", "seconds", "share (%)"], rows) if rows else ""


def _attempts(story: RunStory) -> str:
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
                describe_ending(last) if last.get("event") in ENDS else _ABSENT,
            ]
        )
    return table(
        ["attempt", "started", "host", "device", "ranks", "from step", "to step", "ended"],
        rows,
        numbers=False,
    )


def _events(story: RunStory) -> str:
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


def _choices(story: RunStory) -> str:
    rows = []
    for name, choice in dict(story.env.get("choices") or {}).items():
        known = choice if isinstance(choice, Mapping) else {"value": choice}
        rows.append([str(name), str(known.get("value", _ABSENT)), str(known.get("reason", _ABSENT))])
    return table(["choice", "value", "reason"], rows, numbers=False) if rows else ""


def _environment_table(story: RunStory) -> str:
    parts = []
    for title, content in story.env.items():
        if title != "choices":
            rows = [[k, _shown(v)] for k, v in (flatten(content) if isinstance(content, Mapping) else [("", content)])]
            parts.append(f"<h3>{html.escape(str(title))}</h3>{table(['name', 'value'], rows, numbers=False)}")
    return "".join(parts)


def _time(text: object) -> str:
    return html.escape(str(text).replace("T", " ").replace("+00:00", " UTC")) if text else _ABSENT
