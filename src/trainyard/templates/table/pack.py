"""Turns the rows of a CSV file into samples of numbers and categories, and fits how they are scaled."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from loguru import logger

from trainyard import foreign
from trainyard.data.amounts import MARKS, AmountReader, parse_number
from trainyard.data.labelled import SETS, assign_sets, find_sets
from trainyard.data.raw import list_files
from trainyard.data.shards import BadRecord, Loaded, Sample
from trainyard.errors import UserError
from trainyard.text import format_override

from .config import CLASSIFY, REGRESS, Config, PackingSettings

SCALING = "scaling"
TAKES_FILE = True
"""`data.path` may be the CSV file itself, not only the folder that it is in."""
_MOSTLY = 0.9  # a column with more numbers than this, and other text too, is one with mistakes

Row = dict[str, str]


@dataclass(frozen=True)
class Scaling:
    """Statistics of each column over the training rows."""

    numbers: dict[str, tuple[float, float]]  # column -> mean and standard deviation
    categories: dict[str, list[str]]  # column -> its values; others, and none, count as unknown
    classes: list[str]  # of the target, sorted; empty: it is a number
    target: tuple[float, float]  # mean and standard deviation of a target that is a number

    @classmethod
    def from_artifacts(cls, artifacts: Mapping[str, str]) -> "Scaling":
        """Read what `fit_artifacts` returned."""
        return cls(**json.loads(artifacts[SCALING]))


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Fit the scaling on the training rows."""
    rows, rule = read_rows(raw, config.packing), config.packing
    _check_options(raw, rows, rule)
    sets = _assign_sets(rows, rule)
    training = [row for key, row in rows.items() if sets[key] == "train"]
    return {SCALING: json.dumps(asdict(_fit_scaling(raw, training, rule, _find_classes(rows.values(), rule))))}


def log_reading(raw: Path, config: Config) -> None:
    """Log which columns are read as numbers, and which as categories."""
    scaling = Scaling.from_artifacts(fit_artifacts(raw, config))
    logger.info("numbers: {}", ", ".join(scaling.numbers) or "none")
    counted = ", ".join(f"{name} ({len(values)} values)" for name, values in scaling.categories.items())
    logger.info("categories: {}", counted or "none")


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every row of `raw`, a CSV file with a line of names, or a folder with one.

    Records: `numbers` (2 F,) float32, each scaled and followed by whether it is missing; `categories` (C,) int64, 0
    where unknown. Columns: `target` (the number of a class, for packing.task=classify) and `set` (text). A row without
    a target is a bad record.
    """
    rows, rule = read_rows(raw, config.packing), config.packing
    _check_options(raw, rows, rule)
    sets = _assign_sets(rows, rule)
    classes = _find_classes(rows.values(), rule)
    for key, row in rows.items():
        target, fault = _read_target(row, rule, classes)
        read = partial(load, row, fault, decimal_mark=rule.decimal_mark)
        yield Sample(key, read, columns={"target": target, "set": sets[key]})


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the rows of a labelled file to evaluate, all in "test", and the artifacts of the run."""
    rows, rule, scaling = read_rows(raw, config.packing), config.packing, Scaling.from_artifacts(artifacts)
    _require(raw, rows, [rule.target, *scaling.numbers, *scaling.categories])
    unknown = sorted(set(_find_classes(rows.values(), rule)) - set(scaling.classes))
    if unknown:
        raise UserError(
            f"{raw}: {rule.target} is '{unknown[0]}' in it, which is no class of the model: "
            f"{', '.join(scaling.classes)}. Remove such rows."
        )
    return _make_test_samples(rows, rule, artifacts), artifacts


def _make_test_samples(
    rows: Mapping[str, Row], rule: PackingSettings, artifacts: Mapping[str, str]
) -> Iterator[Sample]:
    classes = Scaling.from_artifacts(artifacts).classes
    for key, row in rows.items():
        target, fault = _read_target(row, rule, classes)
        read = partial(load, row, fault, artifacts, decimal_mark=rule.decimal_mark)
        yield Sample(key, read, columns={"target": target, "set": "test"})


def _read_target(row: Row, rule: PackingSettings, classes: Sequence[str]) -> tuple[float, str]:
    """Return the target, or the number of its class, and why it is none."""
    text = row[rule.target]
    value = (
        _parse_number(text, rule.decimal_mark)
        if not classes
        else float(classes.index(text))
        if text in classes
        else None
    )
    if value is None:
        return math.nan, f"'{text}' in column {rule.target} is no {'class' if classes else 'number'}"
    return value, ""


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every row to predict."""
    rows, scaling = read_rows(raw, config.packing), Scaling.from_artifacts(artifacts)
    _require(raw, rows, [*scaling.numbers, *scaling.categories])
    for key, row in rows.items():
        yield Sample(key, partial(load, row, "", artifacts, decimal_mark=config.packing.decimal_mark))


def load(row: Row, fault: str, artifacts: Mapping[str, str], *, decimal_mark: str) -> Loaded:
    """Scale the numbers of a row, and number its categories.

    Raises:
        BadRecord: `fault`, or a number is none.
    """
    if fault:
        raise BadRecord(fault)
    scaling = Scaling.from_artifacts(artifacts)
    numbers = []
    for name, (mean, std) in scaling.numbers.items():
        value = _parse_number(row[name], decimal_mark)
        if value is None and row[name]:
            raise BadRecord(f"'{row[name]}' in column {name} is no number")
        numbers += [0.0 if value is None else (value - mean) / std, float(value is None)]
    codes = [1 + values.index(row[name]) if row[name] in values else 0 for name, values in scaling.categories.items()]
    return {"numbers": np.array(numbers or [0.0], np.float32), "categories": np.array(codes or [0], np.int64)}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test", as packed."""
    return find_sets(columns, vocabulary)


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Write `count` rows whose target is a known function of them and noise: the smoke test trains on them."""
    rng = np.random.default_rng(seed)
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "size", "age", "kind", "target"])
        for i in range(count):
            size, age, kind = rng.uniform(20, 200), rng.integers(0, 80), rng.choice(["flat", "house", "hut"])
            target = 3 * size - 2 * age + {"flat": 0, "house": 150, "hut": -50}[kind] + rng.normal(0, 5)
            table.writerow([f"r{i}", f"{size:.1f}", age if i % 7 else "", kind, f"{target:.2f}"])


def read_rows(raw: Path, rule: PackingSettings) -> dict[str, Row]:
    """Return the rows of a CSV file by their names, with values stripped of spaces.

    Raises:
        UserError: there is no such file, or not one; a column has no name, or that of another; a row has more or fewer
            values than columns; an id is missing, or there twice; or a number could mean two values.
    """
    id_column, lines = rule.id_column, dict[int, Row]()
    files = [raw] if raw.is_file() else list_files(raw, {".csv", ".tsv"})
    if len(files) != 1:
        raise UserError(f"{raw}: {len(files)} CSV files. Expected one: name the file itself.")
    rows: dict[str, Row] = {}
    for line, cells in foreign.read_rows(files[0]):
        row = {name: cell.strip() for name, cell in cells.items()}
        if id_column and id_column not in row:
            raise UserError(f"{files[0]}: has no column packing.id_column={id_column}. It has: {', '.join(row)}.")
        if not all(row):
            raise UserError(f"{files[0]}: expected a first line with a name for each column: {list(row)}.")
        key = row[id_column] if id_column else str(line)
        if not key or key in rows:
            raise UserError(f"{files[0]}: line {line}: the id '{key}' is missing, or used before.")
        rows[key] = lines[line] = row
    if not rows:
        raise UserError(f"{files[0]}: has no rows.")
    _refuse_doubt(files[0], lines, rule)
    return rows


def _refuse_doubt(file: Path, rows: Mapping[int, Row], rule: PackingSettings) -> None:
    """Refuse numbers that could mean two values, in columns that are mostly numbers under either decimal mark."""
    amounts = AmountReader(str(file), decimal_mark=rule.decimal_mark)
    texts = {rule.id_column, rule.set_column, *rule.ignore, *rule.categories}
    for name in next(iter(rows.values())):
        cells = {line: row[name] for line, row in rows.items() if row[name]}
        numbers = [cell for cell in cells.values() if any(_parse_number(cell, mark) is not None for mark in MARKS)]
        if name not in texts and len(numbers) > _MOSTLY * len(cells):
            for line, cell in cells.items():
                amounts.read_number(cell, line=line)
    header = foreign.read_text(file).lstrip().partition("\n")[0]
    amounts.refuse_doubt(points=0 < header.count(",") >= len(next(iter(rows.values()))) - 1)


def _check_options(raw: Path, rows: Mapping[str, Row], rule: PackingSettings) -> None:
    """Require the options that a table cannot tell: the target column, and its kind."""
    names = list(next(iter(rows.values())))
    if not rule.target:
        raise UserError(f"Which column is to be predicted? Type packing.target=NAME, one of: {', '.join(names)}.")
    stated = [rule.target, *rule.ignore, *rule.categories, *filter(None, [rule.set_column])]
    _require(raw, rows, stated)
    if not rule.task:
        raise UserError(
            f"Is {rule.target} a number or a class? Type packing.task={REGRESS} or packing.task={CLASSIFY}."
        )
    if rule.set_column:
        sets = {row[rule.set_column] for row in rows.values()}
        if not {"train"} <= sets <= set(SETS):
            raise UserError(f"{raw}: column {rule.set_column} has {sorted(sets)[:5]}, expected {', '.join(SETS)}.")


def _require(raw: Path, rows: Mapping[str, Row], columns: Sequence[str]) -> None:
    names = list(next(iter(rows.values())))
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"{raw}: has no column {missing[0]}. It has: {', '.join(names)}.")


def _assign_sets(rows: Mapping[str, Row], rule: PackingSettings) -> dict[str, str]:
    labels = {key: row[rule.target] if rule.task == CLASSIFY else "" for key, row in rows.items()}
    stated = {key: row[rule.set_column] for key, row in rows.items()} if rule.set_column else None
    return assign_sets(labels, rule, stated=stated)


def _find_classes(rows: Iterable[Row], rule: PackingSettings) -> list[str]:
    """Return the classes of the target, sorted; none if it is a number."""
    return sorted({row[rule.target] for row in rows} - {""}) if rule.task == CLASSIFY else []


def _fit_scaling(raw: Path, rows: Sequence[Row], rule: PackingSettings, classes: list[str]) -> Scaling:
    numbers, categories = {}, {}
    used = [n for n in rows[0] if n not in {rule.target, rule.id_column, rule.set_column, *rule.ignore}]
    for name in used:
        texts = [row[name] for row in rows if row[name]]
        values = [value for text in texts if (value := _parse_number(text, rule.decimal_mark)) is not None]
        if name in rule.categories or len(values) <= _MOSTLY * len(texts):
            categories[name] = sorted(set(texts))
        elif len(values) < len(texts):
            option = format_override("packing.categories", [*rule.categories, name])
            wrong = next(text for text in texts if _parse_number(text, rule.decimal_mark) is None)
            raise UserError(
                f"{raw}: column {name} has {len(values):,} numbers, and '{wrong}'. Correct it, write nothing where "
                f"there is no number, or say that these are names: {option}"
            )
        else:
            numbers[name] = _measure(values)
    targets = [value for row in rows if (value := _parse_number(row[rule.target], rule.decimal_mark)) is not None]
    return Scaling(numbers, categories, classes, (0.0, 1.0) if classes else _measure(targets))


def _measure(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, 1 if all are equal."""
    if not values:
        return 0.0, 1.0
    return float(np.mean(values)), float(np.std(values)) or 1.0


def _parse_number(text: str, decimal_mark: str) -> float | None:
    value = parse_number(text, decimal_mark)
    return value if math.isfinite(value) else None
