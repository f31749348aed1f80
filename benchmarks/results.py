"""Reads result files, and formats those of any suite as a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import QUOTABLE_ROUNDS, QUOTABLE_SPREAD, Summary
from trainyard.text import align_columns


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read a result file.

    Raises:
        UserError: the file is missing, or is not a result file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such result file. Those that are kept are in benchmarks/.")
    try:
        lines: list[dict[str, Any]] = [json.loads(text) for text in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: expected one JSON object per line, found: {error}.") from None
    if not lines or lines[0].get("kind") != "header":
        raise UserError(f"{path}: expected a header line written by a benchmark, found none.")
    return lines


def format_results(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format a result file: what was measured, and a table with a column for each text, number and summary."""
    head, results = lines[0], [line for line in lines if line.get("kind") != "header"]
    cells = [{name: _format_cell(value) for name, value in line.items() if name != "kind"} for line in results]
    names = dict.fromkeys(name for row in cells for name, cell in row.items() if cell)
    names = sorted(names, key=lambda name: name == "note")  # last: it is long
    rows = align_columns([names, *([row.get(name, "") for name in names] for row in cells)])
    legend = (
        "+- (largest - smallest) / median; "
        f"? not quotable: spread above {QUOTABLE_SPREAD} or fewer than {QUOTABLE_ROUNDS} rounds"
    )
    return "\n".join([f"{head['suite']}  {head['date']}  {head['command']}", *rows, legend])


def _format_cell(value: object) -> str:
    """Format a text, a number or a summary; "" for anything else, which is raw material."""
    if isinstance(value, Mapping) and ("summary" in value or "word" in value):  # with an earlier code, or why not
        value = value.get("summary", f"{value.get('word')}: {value.get('reason')}")
    if isinstance(value, Mapping) and value.keys() == {field.name for field in fields(Summary)}:
        summary = Summary(**value)
        return summary.format(",.2f" if abs(summary.median) >= 0.1 or not summary.median else ".2g")
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, str | int) else ""
