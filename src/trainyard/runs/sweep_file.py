"""The file that describes a sweep: its runs, and which options vary among them. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard.errors import FormatError, UserError
from trainyard.files import FORMATS, SWEEP, check_format, load_json
from trainyard.runs.folder import CONFIG
from trainyard.runs.state import ACTIVE, State
from trainyard.text import find_nearest, join_names

FOLDER = "sweeps"
FILE = "sweep.json"


@dataclass(frozen=True)
class Element:
    """One run of a sweep."""

    index: int  # its place in the sweep, from 0
    overrides: tuple[str, ...]  # its own, one per axis
    run: Path


@dataclass(frozen=True)
class Sweep:
    """A job, the options that vary, and one run for each combination."""

    folder: Path
    job: str
    axes: dict[str, list[str]]  # values of each option as typed, in the order typed
    fixed: tuple[str, ...]  # overrides that all elements share
    elements: list[Element]  # the last axis varies fastest
    request: Mapping[str, Any] = field(default_factory=dict)  # `resources.ResourceRequest`; {}: of an older version

    @property
    def name(self) -> str:
        """The name of its folder, which users type."""
        return self.folder.name


def exists(name: str, root: Path) -> bool:
    """Return whether a sweep has exactly this name."""
    return (root / FOLDER / name / FILE).is_file()


def load(text: str, root: Path) -> Sweep:
    """Return the sweep that the user named.

    Args:
        text: path of its folder, its name, or an unambiguous prefix of its name.
        root: folder of all runs.

    Raises:
        UserError: no sweep matches, or several do; the message lists them.
    """
    if (Path(text) / FILE).is_file():
        folder = Path(text).resolve()
        return _read_sweep(folder, folder.parents[1])
    names = sorted(path.parent.name for path in (root / FOLDER).glob(f"*/{FILE}"))
    matches = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return _read_sweep(root / FOLDER / matches[0], root)
    if matches:
        raise UserError(
            f"{root / FOLDER}: {len(matches)} sweeps begin with '{text}': {join_names(matches)}. Type more."
        )
    similar = find_nearest(text, names, most=3)
    existing = f"There are: {join_names(names)}." if names else "There are none."
    hint = f"Nearest: {join_names(similar)}." if similar else existing
    raise UserError(f"{root / FOLDER}: no sweep is '{text}'. {hint} Make one: trainyard sweep JOB --sweep ...")


def list_missing(sweep: Sweep) -> list[Element]:
    """Return the elements whose run was not created: creating the sweep was interrupted."""
    return [element for element in sweep.elements if not (element.run / CONFIG).is_file()]


def list_unfinished(sweep: Sweep, statuses: Mapping[Path, str]) -> list[Element]:
    """Return the elements that are neither done nor active: those to submit again.

    Args:
        statuses: state of each element's run, as `trainyard status` shows it.
    """
    return [element for element in sweep.elements if statuses[element.run] not in (State.DONE, *ACTIVE)]


def encode_sweep(sweep: Sweep, root: Path) -> str:
    """Return the contents of the sweep's file. Paths of runs are relative to the folder of runs, which may move."""
    elements = [
        {"index": e.index, "overrides": e.overrides, "run": e.run.relative_to(root).as_posix()} for e in sweep.elements
    ]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"format": FORMATS[SWEEP], "job": sweep.job, "created": created}
    record |= {"axes": sweep.axes, "fixed": sweep.fixed, "request": sweep.request, "elements": elements}
    return json.dumps(record, indent=2) + "\n"


def _read_sweep(folder: Path, root: Path) -> Sweep:
    path = folder / FILE
    try:
        record = load_json(path, most_bytes=2**28)
        check_format(path, record["format"], kind=SWEEP)
        elements = [Element(e["index"], tuple(e["overrides"]), root / e["run"]) for e in record["elements"]]
        fixed, request = tuple(record["fixed"]), record.get("request", {})
        return Sweep(folder, record["job"], record["axes"], fixed, elements, request)
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected the record of a sweep, found {error!r}. Restore it from a copy.") from None
