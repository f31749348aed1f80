"""The board: one page with all runs, their state, deciding metric, loss and goodput, which `trainyard board` writes.

It is a plain file without a server. While a run is active, the page loads itself again each minute; `--watch` writes it
again. Of each run it reads the events, and only samples of the metrics, so that thousands of runs take seconds.
"""

import html
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.report.html import PAGE_TEMPLATE
from trainyard.report.metric_values import format_metric
from trainyard.runs.events import STARTS, Line, read_sampled_metrics
from trainyard.runs.folder import format_run_name, list_newest_runs
from trainyard.runs.history import parse_time
from trainyard.runs.state import ACTIVE, State
from trainyard.runs.status import Status, read_statuses, suggest_command
from trainyard.text import format_duration

PAGE = "index.html"
_RELOAD_S = 60
_WIDTH, _HEIGHT, _MOST_POINTS = 120, 28, 60  # of a sparkline
_SHADES = {State.DONE: "done", State.FAILED: "failed", State.LOST: "failed", State.SILENT: "failed"}
_STYLE = """<style>
.board { width: 100%; }
.board td { white-space: normal; overflow-wrap: anywhere; min-width: 4rem; }
.board .pill { margin: 0; }
.board code { font-size: .8rem; }
.spark { display: block; width: 7.5rem; height: 1.75rem; stroke: var(--link); fill: none; stroke-width: 1.5; }
@media (max-width: 60rem) {
  .board thead { display: none; }
  .board tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem; padding: .7rem 0;
    border-bottom: 1px solid var(--line); }
  .board td { border: 0; padding: .15rem 0; }
  .board td:empty { display: none; }
  .board td::before { content: attr(data-name); display: block; font-size: .75rem; color: var(--soft); }
  .board td:first-child, .board td:last-child { grid-column: 1 / -1; }
}
</style>
"""


def write_board(root: Path) -> tuple[Path, int]:
    """Write `index.html` in the folder of all runs; return its path, and how many runs are active.

    Raises:
        UserError: the folder has no runs.
    """
    runs = list_newest_runs(root, None)
    if not runs:
        raise UserError(f"{root.absolute()}: no runs yet. Start one: trainyard run JOB (trainyard jobs lists them)")
    statuses, note = read_statuses(runs)
    active = sum(status.state in ACTIVE for status in statuses)
    page = PAGE_TEMPLATE.replace("@TITLE@", f"{len(runs):,} runs").replace("@BODY@", _render(statuses, note))
    if active:
        page = page.replace("<title>", f'<meta http-equiv="refresh" content="{_RELOAD_S}">\n<title>', 1)
    write_atomically(root / PAGE, page.replace("</head>", f"{_STYLE}</head>", 1))
    return root / PAGE, active


def compute_goodput(status: Status) -> float | None:
    """Return which share of the time since a run first started went into training that is kept; None: not recorded.

    The rest is evaluation, saving, preparing, waiting in the queue, and steps that were lost and taken again.
    """
    events = status.snapshot.events
    begin = next((parse_time(event["time"]) for event in events if event.get("event") in STARTS), None)
    known = [event for event in events if isinstance(event.get("train_s"), int | float)]
    if begin is None or not known or (whole_s := parse_time(known[-1]["time"]) - begin) <= 0:
        return None
    return min(1.0, float(known[-1]["train_s"]) / whole_s)  # times of events are whole seconds


def _render(statuses: Sequence[Status], note: str) -> str:
    counts = Counter(status.state for status in statuses)
    summary = ", ".join(f"{counts[state]:,} {state}" for state in State if counts[state])
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    rows = "\n".join(_render_row(status) for status in statuses)
    warning = f'<div class="note">{html.escape(note)}</div>' if note else ""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return (
        f'<header><h1>{len(statuses):,} runs</h1><p>{summary}</p><p class="soft">Written {written}. Newest first. '
        "To write it again: <code>trainyard board</code>, and each half minute: <code>trainyard board --watch</code>"
        f"</p>{warning}</header>"
        f'<div class="scroll"><table class="board"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


_COLUMNS = ("run", "state", "step", "newest evaluation", "training loss", "goodput", "next")


def _render_row(status: Status) -> str:
    problem = status.snapshot.damage
    try:
        lines = read_sampled_metrics(status.run)
    except UserError as error:
        lines, problem = [], f"{problem} {error}".strip()
    goodput = compute_goodput(status)
    name, shade = html.escape(format_run_name(status.run)), _SHADES.get(status.state, "")
    page = "/".join(map(quote, (status.run.parent.name, status.run.name)))
    page += "/report.html" if (status.run / "report.html").is_file() else "/"
    detail = problem or (status.detail if status.state not in (State.RUNNING, State.DONE) else "")
    steps = "" if status.step is None else f"{status.step:,}"
    steps += f" of {status.total_steps:,}" if status.total_steps is not None else ""
    ago = "" if status.last_activity_s is None else f"{format_duration(status.last_activity_s)} ago"
    cells = (
        f'<a href="{page}">{name}</a>',
        f'<span class="pill {shade}">{status.state}</span> <span class="soft">{html.escape(detail)}</span>',
        f'{steps} <span class="soft">{ago}</span>',
        html.escape(_format_newest(status, lines)),
        _draw_sparkline([*_list_losses(lines)]),
        "-" if goodput is None else f"{goodput:.0%}".replace("%", " %"),
        "" if status.state == State.DONE else f"<code>{html.escape(suggest_command(status))}</code>",
    )
    return "<tr>" + "".join(f'<td data-name="{n}">{c}</td>' for n, c in zip(_COLUMNS, cells, strict=True)) + "</tr>"


def _format_newest(status: Status, lines: Sequence[Line]) -> str:
    """Return the deciding metric of the newest evaluation, on a test set if there was one; "-" without one."""
    starts = [event for event in status.snapshot.events if event.get("event") in STARTS]
    monitor: Any = starts[-1].get("monitor") if starts else None
    metric = str(monitor.get("metric")) if isinstance(monitor, dict) else ""
    found = [line for line in lines if line["kind"] == "eval" and metric in line]
    newest = found[-1] if found else None
    return f"{metric} {format_metric(newest, metric)} on {newest['split']}" if newest else "-"


def _list_losses(lines: Sequence[Line]) -> Iterator[tuple[int, float]]:
    """Yield step and loss of the training lines, each step once."""
    seen = -1
    for line in lines:
        if line["kind"] == "train" and line["step"] > seen and math.isfinite(line.get("loss", math.nan)):
            seen = line["step"]
            yield seen, float(line["loss"])


def _draw_sparkline(points: Sequence[tuple[int, float]]) -> str:
    """Draw a curve as SVG, without axes; "-" of fewer than two points."""
    if len(points) < 2:
        return "-"
    kept = [points[i * (len(points) - 1) // (_MOST_POINTS - 1)] for i in range(_MOST_POINTS)]
    kept = kept if len(points) > _MOST_POINTS else list(points)
    (first, _), (last, _) = kept[0], kept[-1]
    low, high = min(y for _, y in kept), max(y for _, y in kept)
    places = " ".join(
        f"{_WIDTH * (x - first) / (last - first):.1f},{1 + (_HEIGHT - 2) * (high - y) / (high - low or 1):.1f}"
        for x, y in kept
    )
    label = f"training loss from {points[0][1]:.3g} to {points[-1][1]:.3g}"
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><title>{label}</title><polyline points="{places}"/></svg>'
    )
