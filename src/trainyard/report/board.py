"""The board: one page with all runs, their state, deciding metric, loss and goodput, which `trainyard board` writes.

It is a plain file without a server. While a run is active, the page loads itself again each minute; `--watch` writes it
again, and so does each run that ends.
"""

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loguru import logger

from trainyard.errors import UserError
from trainyard.files import exclusive_lock, write_atomically
from trainyard.report.html import escape, render_page
from trainyard.report.metric_values import format_metric
from trainyard.runs.events import STARTS, Line, read_sampled_metrics
from trainyard.runs.folder import estimate_creation_time, format_run_name, list_runs
from trainyard.runs.goodput import compute_goodput, sum_up
from trainyard.runs.state import ACTIVE, State
from trainyard.runs.status import Status, read_statuses, suggest_command
from trainyard.text import format_duration

PAGE = "index.html"
_GUARD = ".board.lock"
_REPORT = "report.html"
_RELOAD_S = 60
_WIDTH, _HEIGHT, _MOST_POINTS = 120, 28, 60  # of a sparkline
_SHADES: dict[str, str] = {State.DONE: "done", State.FAILED: "failed", State.LOST: "failed", State.SILENT: "failed"}
_STYLE = """<style>
.board { width: 100%; }
.board td { white-space: normal; overflow-wrap: anywhere; min-width: 4rem; }
.board td:first-child { min-width: 10rem; }
.board .when { white-space: nowrap; }
.board .pill { margin: 0; }
.board code { font-size: .8rem; overflow-wrap: break-word; }
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
    runs = list_runs(root)
    if not runs:
        where = "no runs yet" if root.is_dir() else "no such folder. Of another one: trainyard board --runs FOLDER"
        raise UserError(f"{root.absolute()}: {where}. Start one: trainyard run JOB (trainyard jobs lists them)")
    with exclusive_lock(root / _GUARD):  # of two writers, the later one sees the earlier one's page
        statuses, note = read_statuses(runs)
        statuses.sort(
            key=lambda item: (item.snapshot.created or estimate_creation_time(item.run), format_run_name(item.run)),
            reverse=True,
        )
        active = sum(status.state in ACTIVE for status in statuses)
        page = render_page(f"{len(runs):,} runs", _render(statuses, note, root))
        if active:
            page = page.replace("<title>", f'<meta http-equiv="refresh" content="{_RELOAD_S}">\n<title>', 1)
        write_atomically(root / PAGE, page.replace("</head>", f"{_STYLE}</head>", 1))
    return root / PAGE, active


def update_board(run: Path) -> None:
    """Write the board again on which a run is that has just ended, if there is a board; a failure is logged."""
    root = run.absolute().parents[1]
    if not (root / PAGE).is_file():
        return
    try:
        write_board(root)
    except Exception as error:  # the run has ended, and must not fail because of others
        logger.warning("{}: not written again: {}: {}", root / PAGE, type(error).__name__, error)


def _render(statuses: Sequence[Status], note: str, root: Path) -> str:
    counts = Counter(status.state for status in statuses)
    summary = ", ".join(f"{counts[state]:,} {state}" for state in State if counts[state])
    now = time.time()
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    flag = "" if root.name == _USUAL_ROOT else f" --runs {shlex.quote(str(root))}"
    rows = "\n".join(_render_row(status, flag, now) for status in statuses)
    warning = f'<div class="note">{escape(note)}</div>' if note else ""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return (
        f'<header><h1>{len(statuses):,} runs</h1><p>{summary}</p><p class="soft">Written {written}. Newest first. '
        f"Written again when a run ends; by hand: <code>trainyard board{escape(flag)}</code>, and each half "
        f"minute: <code>trainyard board --watch{escape(flag)}</code></p>{warning}</header>"
        f'<div class="scroll"><table class="board"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


_COLUMNS = ("run", "state", "step", "newest evaluation", "training loss", "goodput", "next")
_USUAL_ROOT = "runs"  # the default of --runs


def _render_row(status: Status, flag: str, now: float) -> str:
    """Render a run; `flag` is what commands need to find it."""
    name, problem = format_run_name(status.run), status.snapshot.damage
    try:
        lines = read_sampled_metrics(status.run, most=_MOST_POINTS)
    except UserError as error:
        lines, problem = [], f"{problem} {error}".strip()
    detail = problem or (status.detail if status.state not in (State.RUNNING, State.DONE) else "")
    page = "/".join(map(quote, name.split("/"))) + (f"/{_REPORT}" if (status.run / _REPORT).is_file() else "/")
    command = "" if status.state == State.DONE else suggest_command(status, name)
    command += flag if command.startswith("trainyard ") else ""
    progress = "" if status.step is None else f"{status.step:,}"
    progress += f" of {status.total_steps:,}" if status.total_steps is not None else ""
    snapshot = status.snapshot
    goodput = compute_goodput(sum_up(snapshot.created, snapshot.events, snapshot.heartbeat))
    cells = (
        f'<a href="{page}">{_break_after(name, "/")}</a>',
        f'<span class="pill {_SHADES.get(status.state, "")}">{escape(status.state)}</span> '
        f'<span class="soft">{escape(detail)}</span>',
        f'{progress} <span class="soft when">{_format_activity(status, now)}</span>',
        escape(_format_newest(status, lines)),
        _draw_sparkline([*_list_losses(lines)]),
        "-" if goodput is None else f"{goodput:.0%}".replace("%", " %"),
        f"<code>{_break_after(command, '/=')}</code>" if command else "",
    )
    return "<tr>" + "".join(f'<td data-name="{n}">{c}</td>' for n, c in zip(_COLUMNS, cells, strict=True)) + "</tr>"


def _break_after(text: str, marks: str) -> str:
    """Return text as HTML that may go on in the next line after each of these characters."""
    return "<wbr>".join(escape(part) for part in re.split(f"(?<=[{marks}])", text))


def _format_activity(status: Status, now: float) -> str:
    """Describe a run's last activity: of an active run, the time since; else the date, which stays true."""
    last = status.snapshot.last_activity
    if last is None:
        return ""
    if status.state in ACTIVE:
        return f"{format_duration(max(0.0, now - last))} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(last))


def _format_newest(status: Status, lines: Sequence[Line]) -> str:
    """Return the deciding metric of the newest evaluation, on a test set if there was one; "-" without one."""
    starts = [event for event in status.snapshot.events if event.get("event") in STARTS]
    monitor: Any = starts[-1].get("monitor") if starts else None
    metric = str(monitor.get("metric")) if isinstance(monitor, dict) else ""
    scored = [line for line in lines if line["kind"] == "eval" and metric in line and line["step"]]
    newest = scored[-1] if scored else None
    return f"{metric} {format_metric(newest, metric)} on {newest['split']}" if newest else "-"


def _list_losses(lines: Sequence[Line]) -> Iterator[tuple[int, float]]:
    """Yield step and loss of the steps that training lines list, each once."""
    seen = -1
    for line in lines:
        if line["kind"] == "train" and line["step"] > seen:
            listed = line.get("step_losses", [])
            for step, loss in enumerate(listed, start=line["step"] - len(listed) + 1):
                if step > seen and loss is not None and math.isfinite(loss):
                    yield step, float(loss)
            seen = line["step"]


def _draw_sparkline(losses: Sequence[tuple[int, float]]) -> str:
    """Draw points all over a curve as SVG, without axes; "-" of fewer than two."""
    if len(losses) < 2:
        return "-"
    count = min(len(losses), _MOST_POINTS)
    points = [losses[i * (len(losses) - 1) // (count - 1)] for i in range(count)]
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    xs = (round(_WIDTH * (x - first) / (last - first), 1) for x, _ in points)
    ys = (round(1 + (_HEIGHT - 2) * (high - y) / (high - low or 1), 1) for _, y in points)
    places = " ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True))
    label = f"training loss from {losses[0][1]:.3g} to {losses[-1][1]:.3g}"
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><title>{label}</title><polyline points="{places}"/></svg>'
    )
