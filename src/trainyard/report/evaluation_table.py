"""The table of a run's evaluations: folders and baselines side by side, a row for each metric."""

from collections.abc import Iterator, Sequence

from trainyard.report.html import escape, render_gallery, render_table
from trainyard.report.metric_values import format_metric
from trainyard.report.run_plots import read_figures
from trainyard.report.run_story import list_all_metric_names
from trainyard.runs.evaluations import FIGURES, RUN, Evaluation
from trainyard.runs.events import Line
from trainyard.scoring import explain_missing_intervals
from trainyard.text import SCREEN_WIDTH, align_columns


def format_evaluations(evaluations: Sequence[Evaluation]) -> str:
    """Return the table for a screen, in as many parts as its width needs."""
    names, columns = _list_columns(evaluations)
    cells = [[title, system, *(format_metric(line, name) for name in names)] for title, system, line in columns]
    first = ["", "metric", *names]
    parts = ["\n".join(align_columns(list(zip(*part, strict=True)))) for part in _fit_to_screen(first, cells)]
    return "\n\n".join([*parts, *filter(None, [explain_missing_intervals(names)])])


def render_evaluations(evaluations: Sequence[Evaluation]) -> str:
    """Return the table as HTML, with the data and the figures of each folder; "" if there is none."""
    if not evaluations:
        return ""
    names, columns = _list_columns(evaluations)
    rows = [[name, *(format_metric(line, name).replace(" [", "\n[") for _, _, line in columns)] for name in names]
    table = render_table(["metric", *(f"{title}: {system}" for title, system, _ in columns)], rows)
    about = render_table(["evaluated"], [[item.describe()] for item in evaluations], numbers=False)
    figures = [
        f"<h3>{escape(item.name)}</h3>{gallery}"
        for item in evaluations
        if (gallery := render_gallery(read_figures(item.path / FIGURES)))
    ]
    return "\n".join([about, table, *figures])


def _list_columns(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[tuple[str, str, Line]]]:
    """Return all metrics, and (evaluation, system, line) of each column."""
    columns = [(item.name, str(line.get("system", RUN)), line) for item in evaluations for line in item.lines]
    return list_all_metric_names(line for _, _, line in columns), columns


def _fit_to_screen(first: list[str], columns: Sequence[list[str]]) -> Iterator[list[list[str]]]:
    """Yield parts of a table, each beginning with the first column; a part has one other column or more."""
    part, width = [first], max(map(len, first))
    for column in columns:
        wide = 2 + max(map(len, column))
        if len(part) > 1 and width + wide > SCREEN_WIDTH:
            yield part
            part, width = [first], max(map(len, first))
        part.append(column)
        width += wide
    yield part
