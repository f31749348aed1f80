"""Turns CSV catalogues into samples of tokens, numbers and images, and splits rows without shared near-duplicates."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from loguru import logger
from PIL import Image

from trainyard.data.raw import find_file
from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import read_image
from trainyard.errors import UserError
from trainyard.text import align_columns, cut, join_names

from . import baseline, catalog, features, folds, parsing, tokenizer
from .config import Config, PackingSettings
from .synthesis import synthesize

__all__ = [
    "fit_artifacts",
    "join_artifacts",
    "list_labelled",
    "log_reading",
    "samples",
    "splits",
    "synthesize",
    "unlabelled",
]

PARTS = ("train", "val", "test")
TOKENIZER, FEATURES, PRICES, DOCUMENT, RIDGE = "tokenizer", "features", "prices", "document", "ridge_on_text"
EXAMPLES = 5
QUANTILES = (0.001, 0.999)  # of the training prices; predictions are clamped to them


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Fit the tokenizer, the features and the price statistics on the training rows; return each as JSON."""
    return _get_plan(raw, config.packing).artifacts


def log_reading(raw: Path, config: Config) -> None:
    """Log how five rows of a catalogue are read, and which rows cannot train and why."""
    entries = catalog.read(catalog.find(raw, prefer=config.packing.file), select_columns(config.packing))
    for line in describe_reading(entries):
        logger.info("{}", line)
    if faults := describe_faults(entries, end="left out" if config.data.on_error == "skip" else "cannot train"):
        logger.warning("{}", faults)


def describe_reading(entries: Sequence[catalog.Entry]) -> list[str]:
    """Return the lines that show how five rows are read, spread over those that can train."""
    usable = [entry for entry in entries if not entry.fault]
    picked = sorted({i * (len(usable) - 1) // (EXAMPLES - 1) for i in range(EXAMPLES)}) if usable else []
    rows = [["id", "price", "read as", "title", "amount", "unit"]]
    for entry in (usable[i] for i in picked):
        item = parsing.parse(*entry.texts)
        amount = "-" if item.amount is None else f"{item.amount:.6g}"
        unit = item.unit if item.kind == "other" else item.kind
        rows.append(
            [
                entry.key,
                " ".join(entry.written_price.split()),
                f"{entry.price:.12g}",
                cut(item.title, 40),
                amount,
                unit or "-",
            ]
        )
    return [f"rows {len(entries)}, {len(usable)} can train. For example:", *align_columns(rows, indent="  ")]


def describe_faults(entries: Sequence[catalog.Entry], *, end: str) -> str:
    """Return such as "3 rows left out: 2 price 0 (lines 5, 9), 1 price unreadable (line 12)"; "" if all can train.

    Args:
        end: of these rows: "left out".
    """
    lines_by_reason: dict[str, list[str]] = {}
    for entry in entries:
        if entry.fault:
            lines_by_reason.setdefault(entry.reason, []).append(str(entry.line))
    named = [
        f"{len(lines)} {reason} (line{'s' if len(lines) > 1 else ''} {join_names(lines)})"
        for reason, lines in sorted(lines_by_reason.items(), key=lambda item: -len(item[1]))
    ]
    count = sum(map(len, lines_by_reason.values()))
    return f"{count} row{'s' if count > 1 else ''} {end}: {', '.join(named)}" if named else ""


TAKES_FILE = True
"""`data.path` may be a catalogue itself, not only the folder that it is in."""


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every row of the catalogue `raw`: a CSV file, or a folder with one CSV file or a train.csv.

    Records: `tokens` (ragged int32 ids), `numbers` (F,) float32, and `image` if `packing.images` is set. Columns:
    `price`, `group` (number), `set` (text: train, val or test), `length` and `title_length` (tokens), `has_image`,
    `ridge` (with `packing.ridge`, ln of the price that it predicts) and `content`, a hash of the row and the artifacts
    that reveals stale packed data. A row that cannot train (no price above 0, no text) is a bad record:
    `data.on_error=skip` skips such rows.
    """
    packing = config.packing
    plan = _get_plan(raw, packing)
    file = catalog.find(raw, prefer=packing.file)
    for entry, (part, group, inner) in zip(catalog.read(file, select_columns(packing)), plan.rows, strict=True):
        inner_fold = inner if part == "train" else None
        images = _locate_images(packing)
        yield Sample(
            key=entry.key,
            load=partial(load, entry, max_tokens=packing.max_tokens, inner_fold=inner_fold, images=images),
            columns={"price": entry.price, "group": group, "set": part, "content": _hash_content(entry, plan.digest)},
            source=_find_image(entry, packing),
        )


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return every row of a catalogue with prices, all in "test", and the artifacts of the run, which read them."""
    packing = config.packing
    entries = catalog.read(catalog.find(raw, prefer=packing.file), select_columns(packing))
    return _make_priced_samples(entries, packing, artifacts), artifacts


def _make_priced_samples(
    entries: Sequence[catalog.Entry], packing: PackingSettings, artifacts: Mapping[str, str]
) -> Iterator[Sample]:
    groups: dict[str, int] = {}
    for entry in entries:
        key = "" if entry.fault else parsing.compute_group_key(parsing.parse(*entry.texts), by=packing.group)
        group = groups.setdefault(key or f"id {entry.key}", len(groups))
        yield Sample(
            key=entry.key,
            load=_choose_loader(entry, packing, artifacts),
            columns={"price": entry.price, "group": group, "set": "test"},
            source=_find_image(entry, packing),
        )


def join_artifacts(folder: Path, own: Mapping[str, str], packed: Mapping[str, str]) -> Mapping[str, str]:
    """Return the artifacts with which a run reads packed data: its own.

    Raises:
        UserError: the data was packed with others, so its tokens and numbers mean something else.
    """
    differing = [name for name in own if own[name] != packed.get(name)]
    if differing:
        raise UserError(
            f"{folder}: packed with another {differing[0]} than the run was trained with, so its tokens and numbers "
            "mean something else. Name the raw files instead: the run packs them with its own."
        )
    return own


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every row of a catalogue to predict: `raw` is a CSV file, or a folder with one CSV file or a test.csv.

    Refuses no row for its text or for a missing image, because each id must get a price. Unknown units count as other
    units.
    """
    packing = config.packing
    file = catalog.find(raw, prefer="test.csv")
    for entry in catalog.read(file, select_columns(packing, priced=False)):
        yield Sample(
            key=entry.key,
            load=_choose_loader(entry, packing, artifacts, allow_missing=True),
            source=_find_image(entry, packing),
        )


def _choose_loader(
    entry: catalog.Entry, packing: PackingSettings, artifacts: Mapping[str, str], *, allow_missing: bool = False
) -> Callable[[], Loaded]:
    """Return what loads a row with the artifacts of a run, outside of its folds."""
    images = _locate_images(packing, allow_missing=allow_missing)
    return partial(load, entry, artifacts=artifacts, max_tokens=packing.max_tokens, inner_fold=None, images=images)


def load(
    entry: catalog.Entry,
    artifacts: Mapping[str, str],
    *,
    max_tokens: int,
    inner_fold: int | None,
    images: tuple[Path, bool] | None,
) -> Loaded:
    """Turn one row into the model's inputs.

    Args:
        inner_fold: of a training row, so that its own price does not leak into its brand's mean.
        images: the folder of images and whether an image may be missing; None: no images.

    Raises:
        BadRecord: the row cannot train, or its image is missing or broken.
    """
    if entry.fault:
        raise BadRecord(entry.fault)
    item = parsing.parse(*entry.texts)
    document = parsing.build_document(item, json.loads(artifacts[DOCUMENT]))
    ids = tokenizer.encode(artifacts[TOKENIZER], document, max_tokens=max_tokens)
    title = tokenizer.encode(artifacts[TOKENIZER], item.title, max_tokens=max_tokens)
    numbers = _parse_features(artifacts[FEATURES]).compute_row(item, entry.numbers, inner_fold=inner_fold)
    loaded: Loaded = {"tokens": Ragged(ids), "numbers": numbers, "length": len(ids), "title_length": len(title) - 2}
    if RIDGE in artifacts:
        [price] = _parse_ridge(artifacts[RIDGE]).predict([entry.text], numbers[None])
        loaded["ridge"] = float(np.log(price))
    if images is not None:
        loaded["image"], loaded["has_image"] = _read_image(entry, *images)
    return loaded


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test" as packed; they share no group of near-duplicates.

    Raises:
        UserError: there is no training row.
    """
    set_names = np.array(vocabulary["set"])[columns["set"]]
    parts = {name: np.flatnonzero(set_names == name) for name in PARTS if name in vocabulary["set"]}
    if "train" not in parts:
        raise UserError("There are no training rows. Give more rows, or lower packing.val_share.")
    return parts


@dataclass(frozen=True)
class Table:
    """The valid rows of a catalogue, for baselines."""

    keys: list[str]
    texts: np.ndarray  # (N,) str, as written
    prices: np.ndarray  # (N,) float64
    numbers: np.ndarray  # (N, F) float32, as the model gets them
    parts: np.ndarray  # (N,) "train", "val" or "test"


def read_table(raw: Path, config: Config) -> Table:
    """Return the valid rows that `samples` yields, in memory, with the same parts and numbers."""
    packing = config.packing
    plan = _get_plan(raw, packing)
    entries = catalog.read(catalog.find(raw, prefer=packing.file), select_columns(packing))
    fitted = _parse_features(plan.artifacts[FEATURES])
    valid = [(entry, row) for entry, row in zip(entries, plan.rows, strict=True) if not entry.fault]
    numbers = [
        fitted.compute_row(parsing.parse(*entry.texts), entry.numbers, inner_fold=inner if part == "train" else None)
        for entry, (part, _, inner) in valid
    ]
    return Table(
        [entry.key for entry, _ in valid],
        np.array([entry.text for entry, _ in valid], dtype=object),
        np.array([entry.price for entry, _ in valid]),
        np.stack(numbers),
        np.array([part for _, (part, _, _) in valid]),
    )


@dataclass(frozen=True)
class _Plan:
    """Everything about the rows that depends on the whole catalogue."""

    artifacts: Mapping[str, str]
    digest: str  # of the artifacts
    rows: list[tuple[str, int, int]]  # part, group and inner fold of each row


def _get_plan(raw: Path, packing: PackingSettings) -> _Plan:
    file = catalog.find(raw, prefer=packing.file)
    if packing.fold >= packing.folds:
        raise UserError(
            f"packing.fold={packing.fold}: expected -1 .. {packing.folds - 1}, for packing.folds={packing.folds}."
        )
    stat = file.stat()
    return _compute_plan(str(file), stat.st_size, stat.st_mtime_ns, json.dumps(astuple(packing)))


@lru_cache(maxsize=2)  # packing needs the plan three times; it is small compared with the catalogue
def _compute_plan(file: str, size_bytes: int, time_ns: int, options: str) -> _Plan:
    packing = PackingSettings(*json.loads(options))
    entries = catalog.read(Path(file), select_columns(packing))
    valid = [i for i, entry in enumerate(entries) if not entry.fault]
    if not valid:
        faults = "; ".join(entry.fault for entry in entries[:3]) or "it has no rows"
        raise UserError(f"{file}: no row can train: {faults}.")
    items = {i: parsing.parse(*entries[i].texts) for i in valid}
    keys = [parsing.compute_group_key(items[i], by=packing.group) or f"id {entries[i].key}" for i in valid]
    _check_group_count(file, packing, keys)
    log_price = np.log([entries[i].price for i in valid])
    parts = folds.split_rows(
        keys, log_price, folds=packing.folds, fold=packing.fold, val_share=packing.val_share, seed=packing.seed
    )
    group_numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    rows = [("train", -1, 0)] * len(entries)  # placeholder for rows with a fault, which are never written
    for i, key, part in zip(valid, keys, parts.tolist(), strict=True):
        rows[i] = (part, group_numbers[key], features.assign_inner_fold(key))
    train = [i for i in valid if rows[i][0] == "train"]
    artifacts = _fit_artifacts(
        packing, [(entries[i], items[i], rows[i][2]) for i in train], log_price[parts == "train"]
    )
    digest = hashlib.blake2b(json.dumps(artifacts, sort_keys=True).encode()).hexdigest()
    return _Plan(artifacts, digest, rows)


def _fit_artifacts(
    packing: PackingSettings, train: list[tuple[catalog.Entry, parsing.Item, int]], log_price: np.ndarray
) -> dict[str, str]:
    """Fit on the training rows, each with its inner fold."""
    fitted = features.fit(
        [item for _, item, _ in train],
        [entry.numbers for entry, _, _ in train],
        log_price,
        [inner for _, _, inner in train],
        columns=packing.numeric_columns,
    )
    artifacts = {
        TOKENIZER: _fit_tokenizer(packing, [parsing.build_document(item) for _, item, _ in train]),
        FEATURES: fitted.to_json(),
        PRICES: _summarize_prices(log_price),
        DOCUMENT: json.dumps(parsing.DOCUMENT),
    }
    if packing.ridge:
        inner = np.array([fold for _, _, fold in train])
        numbers = [fitted.compute_row(item, entry.numbers, inner_fold=fold) for entry, item, fold in train]
        texts = [entry.text for entry, _, _ in train]
        artifacts[RIDGE] = baseline.tune_ridge(texts, np.stack(numbers), np.exp(log_price), inner).to_json()
    return artifacts


def _check_group_count(file: str, packing: PackingSettings, keys: list[str]) -> None:
    needed = max(packing.folds, round(1 / packing.val_share) if packing.val_share else 2)
    count = len(set(keys))
    if count < 2 * needed:
        raise UserError(
            f"{file}: the {len(keys)} valid rows form {count} groups of near-duplicates, such as '{keys[0]}'; expected "
            f"{2 * needed} or more, for packing.folds={packing.folds} and packing.val_share={packing.val_share:g}. "
            "Give more rows, or form smaller groups: packing.group=text"
        )


def _fit_tokenizer(packing: PackingSettings, texts: list[str]) -> str:
    if packing.tokenizer:
        fitted = tokenizer.load(Path(packing.tokenizer))
    else:
        fitted = tokenizer.train_unigram(texts, size=packing.vocabulary)
    text: str = fitted.to_str()
    return text


def _summarize_prices(log_price: np.ndarray) -> str:
    low, high = np.quantile(log_price, QUANTILES)
    state = {"mean": log_price.mean(), "std": max(float(log_price.std()), 1e-6), "low": low, "high": high}
    median = float(np.exp(np.median(log_price)))
    return json.dumps({name: float(value) for name, value in state.items()} | {"median": median}, sort_keys=True)


@lru_cache(maxsize=4)
def _parse_features(text: str) -> features.Features:
    return features.Features.from_json(text)


@lru_cache(maxsize=2)
def _parse_ridge(text: str) -> baseline.TfidfRidge:
    return baseline.TfidfRidge.from_json(text)


def select_columns(packing: PackingSettings, *, priced: bool = True) -> catalog.Columns:
    """Return the columns that packing or, without prices, prediction reads."""
    return catalog.Columns(
        key=packing.id_column,
        texts=(packing.text_column, *packing.further_text_columns),
        price=packing.price_column if priced else "",
        numbers=tuple(packing.numeric_columns),
        image=packing.image_column if packing.images else "",
        decimal_mark=packing.decimal_mark,
    )


def _hash_content(entry: catalog.Entry, artifacts_digest: str) -> int:
    """Return a 63-bit hash of a row and the artifacts it is packed with."""
    content = json.dumps([*entry.texts, repr(entry.numbers), entry.image, artifacts_digest])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()) >> 1


def _locate_images(packing: PackingSettings, *, allow_missing: bool = False) -> tuple[Path, bool] | None:
    """Return the folder of images and whether an image may be missing; None: no images."""
    return (Path(packing.images), allow_missing or packing.missing_image == "gray") if packing.images else None


def _read_image(entry: catalog.Entry, folder: Path, allow_missing: bool) -> tuple[bytes, int]:
    """Return an encoded image and 1: JPEG and PNG as they are, others as RGB PNG. A missing image: a gray one and 0."""
    name = _get_file_name(entry)
    path = find_file(folder, (name,))
    if path is None:
        if not allow_missing:
            raise BadRecord(f"no image '{name}' in {folder} (packing.missing_image=gray packs without it)")
        return _encode_png(Image.new("RGB", (8, 8), (128, 128, 128))), 0
    return read_image(path)[0], 1


def _find_image(entry: catalog.Entry, packing: PackingSettings) -> Path | None:
    return find_file(Path(packing.images), (_get_file_name(entry),)) if packing.images else None


def _get_file_name(entry: catalog.Entry) -> str:
    """Return the last component of the image's path or URL."""
    return entry.image.rstrip("/").rpartition("/")[2]


def _encode_png(image: Image.Image) -> bytes:
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return png.getvalue()
