"""The file of a sweep: which runs it has, and what varies among them. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainyard.errors import UserError
from trainyard.runs.state import ACTIVE, State
from trainyard.text import join_names, nearest

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
    """A job, what varies, and one run for each combination."""

    folder: Path
    job: str
    axes: dict[str, list[str]]  # values of each option as one types them, in the order typed
    fixed: tuple[str, ...]  # overrides that all elements share
    elements: list[Element]  # the last axis varies fastest

    @property
    def name(self) -> str:
        """The name of its folder, by which people call it."""
        return self.folder.name


def exists(name: str, root: Path) -> bool:
    """Tell whether a sweep is named exactly so."""
    return (root / FOLDER / name / FILE).is_file()


def load(text: str, root: Path) -> Sweep:
    """Return the sweep that a person names.

    Args:
        text: path of its folder, its name, or a beginning that no other sweep's name has.
        root: folder of all runs.

    Raises:
        UserError: no sweep is so named, or several are; names them.
    """
    if (Path(text) / FILE).is_file():
        folder = Path(text).resolve()
        return _read(folder, folder.parents[1])
    names = sorted(path.parent.name for path in (root / FOLDER).glob(f"*/{FILE}"))
    matches = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return _read(root / FOLDER / matches[0], root)
    if matches:
        raise UserError(
            f"{root / FOLDER}: {len(matches)} sweeps begin with '{text}': {join_names(matches)}. Type more."
        )
    near = nearest(text, names, most=3)
    there = (
        f"Nearest: {join_names(near)}." if near else f"There are: {join_names(names)}." if names else "There are none."
    )
    raise UserError(f"{root / FOLDER}: no sweep is '{text}'. {there} Make one: trainyard sweep JOB --sweep ...")


def list_unfinished(sweep: Sweep, statuses: Mapping[Path, str]) -> list[Element]:
    """Return the elements that are neither done nor with Slurm now: what is to be submitted again.

    Args:
        statuses: state of each element's run, in the words of `trainyard status`.
    """
    return [element for element in sweep.elements if statuses[element.run] not in (State.DONE, *ACTIVE)]


def encode_sweep(sweep: Sweep, root: Path) -> str:
    """Runs are noted relative to the folder of runs, which may move."""
    elements = [
        {"index": e.index, "overrides": e.overrides, "run": e.run.relative_to(root).as_posix()} for e in sweep.elements
    ]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"job": sweep.job, "created": created, "axes": sweep.axes, "fixed": sweep.fixed, "elements": elements}
    return json.dumps(record, indent=2) + "\n"


def _read(folder: Path, root: Path) -> Sweep:
    path = folder / FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        elements = [Element(e["index"], tuple(e["overrides"]), root / e["run"]) for e in record["elements"]]
        return Sweep(folder, record["job"], record["axes"], tuple(record["fixed"]), elements)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected the record of a sweep, found {error!r}. Restore it from a copy.") from None
