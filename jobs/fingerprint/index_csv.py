"""Reads `index.csv`, the table that says whose print each file of a raw folder is."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainyard.data.raw import find_listed
from trainyard.errors import UserError
from trainyard.foreign import read_rows

INDEX_CSV = "index.csv"
REQUIRED = ("path", "finger")
OPTIONAL = ("impression", "set", "dpi", "split")
MAY_BE_EMPTY = ("set", "dpi")
DPI_RANGE = (50, 10_000)
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; a field that no column gives is None, 0 or ""."""

    line: int
    path: str
    finger: str
    impression: int | None
    set: str
    dpi: int
    split: str


def read_index_csv(file: Path, *, images: Collection[str]) -> list[Row]:
    """Return the rows, in the order of the file.

    Args:
        images: the paths below the raw folder that can be read, "/" between folders.

    Raises:
        UserError: the file is not such a table; the message lists the bad cells, one sentence each with the line.
    """
    problems: list[str] = []
    rows: list[Row] = []
    for line, cells in read_rows(file, columns=REQUIRED, further=OPTIONAL):
        given = {name: cell.strip() for name, cell in cells.items()}
        if not any(given.values()):
            continue
        given["path"] = _find_image(file, line, given["path"], images)
        wrong = _check_row(line, given, images)
        problems += wrong
        rows += [] if wrong else [_parse_row(line, given)]
    problems += [*_find_repeated(rows), *_find_fingers_in_two_splits(rows)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:_MOST_LISTED])
        more = f"\n  and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        raise UserError(f"{file}: {len(problems)} of its cells are wrong:{listed}{more}")
    if not rows:
        raise UserError(f"{file}: expected one line for each print below the header, found none.")
    return rows


def _find_image(file: Path, line: int, name: str, images: Collection[str]) -> str:
    """Return the path of an image as it is listed; the name as it is if there is none."""
    if not name or name in images:
        return name
    image = find_listed(file.parent, name, where=f"{file}: line {line}, path")
    return name if image is None else image.relative_to(file.parent).as_posix()


def _check_row(line: int, given: dict[str, str], images: Collection[str]) -> list[str]:
    """Return an error for each wrong cell of a line."""
    return [
        f"line {line}, {name}: expected {expected}, found {repr(value) if value else 'nothing'}."
        for name, value in given.items()
        if (value or name not in MAY_BE_EMPTY) and (expected := _check_cell(name, value, images))
    ]


def _parse_row(line: int, given: dict[str, str]) -> Row:
    impression = int(given["impression"]) if "impression" in given else None
    dpi = int(given.get("dpi") or 0)
    return Row(line, given["path"], given["finger"], impression, given.get("set", ""), dpi, given.get("split", ""))


def _check_cell(name: str, value: str, images: Collection[str]) -> str:
    """Describe the expected value if a cell is wrong; "" if it is right."""
    low, high = DPI_RANGE
    checks: dict[str, tuple[Callable[[str], bool], str]] = {
        "path": (images.__contains__, "the path of an image below the folder of this file, such as set/101_1.png"),
        "finger": (bool, "the name of the finger"),
        "impression": (_is_number, "a whole number"),
        "set": (bool, "the name of the set"),
        "dpi": (lambda text: _is_number(text) and low <= int(text) <= high, f"a whole number of {low} to {high}"),
        "split": (_is_split, "train, val, test, or test_ and a name"),
    }
    is_right, expected = checks[name]
    return "" if is_right(value) else expected


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _is_split(text: str) -> bool:
    return text in ("train", "val", "test") or (text.startswith("test_") and len(text) > len("test_"))


def _find_repeated(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for each path, and each impression of a finger in a set, that an earlier line has."""
    problems = []
    paths: dict[str, int] = {}
    prints: dict[tuple[str, str, int], int] = {}
    for row in rows:
        first = paths.setdefault(row.path, row.line)
        if first != row.line:
            problems.append(f"line {row.line}, path: expected each path once, found '{row.path}' in line {first} too.")
        elif row.impression is not None:
            first = prints.setdefault((row.set, row.finger, row.impression), row.line)
            if first != row.line:
                problems.append(
                    f"line {row.line}, impression: expected another number than in line {first}, found impression "
                    f"{row.impression} of finger '{row.finger}' again{f' in set {row.set!r}' if row.set else ''}."
                )
    return problems


def _find_fingers_in_two_splits(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for each finger that is in two of train, val and the tests; tests may share fingers."""
    first: dict[str, Row] = {}
    problems: dict[str, str] = {}
    for row in rows:
        prior = first.setdefault(row.finger, row)
        roles = {prior.split.partition("_")[0], row.split.partition("_")[0]}
        if len(roles) > 1 and row.finger not in problems:
            problems[row.finger] = (
                f"line {row.line}, split: expected '{prior.split}' as for finger '{row.finger}' in line {prior.line}, "
                f"found '{row.split}': a finger that trains must not validate or test."
            )
    return list(problems.values())
