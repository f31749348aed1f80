"""CSV catalogues into samples of tokens, numbers and pictures, and rows into parts that share no near-duplicates."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import open_image
from trainyard.errors import UserError

from . import catalog, features, folds, parsing, tokenizer
from .config import Config, PackingSettings
from .synthesis import synthesize

__all__ = ["fit_artifacts", "samples", "splits", "synthesize", "unlabelled"]

PARTS = ("train", "val", "test")
TOKENIZER, FEATURES, PRICES = "tokenizer", "features", "prices"
QUANTILES = (0.001, 0.999)  # of the training prices: no prediction lies beyond


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return what the training rows teach: tokenizer, state of the features, and where prices lie, each as JSON."""
    return _plan(raw, config.packing).artifacts


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every row of the catalogue `raw`, a CSV file or a folder that holds one (or a train.csv).

    Records: `tokens` (ragged int32 ids), `numbers` (F,) float32, and `image` where `packing.images` is set. Columns:
    `price`, `group` (number), `set` (text: train, val or test), `length` and `title_length` (tokens), `has_picture`,
    and `content`, a hash of the row and of what was learned, which tells packed data that are out of date. A row that
    cannot train (no price above 0, no text) is a bad record: `data.on_error=skip` leaves such rows out.
    """
    rule = config.packing
    plan = _plan(raw, rule)
    file = catalog.find(raw, prefer=rule.file)
    for entry, (part, group, inner) in zip(catalog.read(file, _columns(rule)), plan.rows, strict=True):
        inner_fold = inner if part == "train" else None
        yield Sample(
            key=entry.key,
            load=partial(load, entry, max_tokens=rule.max_tokens, inner_fold=inner_fold, pictures=_pictures(rule)),
            columns={"price": entry.price, "group": group, "set": part, "content": _content(entry, plan.digest)},
            source=_picture_path(entry, rule),
        )


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every row of a catalogue to be priced: `raw` is a CSV file or a folder that holds one (or a test.csv).

    No row is refused for what its text says or lacks, or for want of a picture: each id must get a price. Units never
    seen in training count as other units.
    """
    rule = config.packing
    file = catalog.find(raw, prefer="test.csv")
    for entry in catalog.read(file, _columns(rule, priced=False)):
        yield Sample(
            key=entry.key,
            load=partial(
                load,
                entry,
                artifacts=artifacts,
                max_tokens=rule.max_tokens,
                inner_fold=None,
                pictures=_pictures(rule, may_miss=True),
            ),
            source=_picture_path(entry, rule),
        )


def load(
    entry: catalog.Entry,
    artifacts: Mapping[str, str],
    *,
    max_tokens: int,
    inner_fold: int | None,
    pictures: tuple[Path, bool] | None,
) -> Loaded:
    """Turn one row into what the model reads; tokenised here, once, and never again.

    Args:
        inner_fold: of a training row, so that its own price does not come back as its brand's.
        pictures: the folder of pictures and whether one may be missing; None: no pictures.

    Raises:
        BadRecord: the row cannot train, or its picture is missing or broken.
    """
    if entry.fault:
        raise BadRecord(entry.fault)
    item = parsing.parse(entry.text)
    ids = tokenizer.encode(artifacts[TOKENIZER], parsing.document(item), max_tokens=max_tokens)
    title = tokenizer.encode(artifacts[TOKENIZER], item.title, max_tokens=max_tokens)
    numbers = _features(artifacts[FEATURES]).row(item, entry.numbers, inner_fold=inner_fold)
    loaded: Loaded = {"tokens": Ragged(ids), "numbers": numbers, "length": len(ids), "title_length": len(title) - 2}
    if pictures is not None:
        loaded["image"], loaded["has_picture"] = _picture(entry, *pictures)
    return loaded


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test" as packed: no group of near-duplicates is in two of them.

    Raises:
        UserError: no row trains.
    """
    set_of = np.array(vocabulary["set"])[columns["set"]]
    found = {name: np.flatnonzero(set_of == name) for name in PARTS if name in vocabulary["set"]}
    if "train" not in found:
        raise UserError("No row trains: give more rows, or lower packing.val_share.")
    return found


@dataclass(frozen=True)
class Table:
    """The sound rows of a catalogue as a baseline wants them."""

    keys: list[str]
    texts: np.ndarray  # (N,) str, as written
    prices: np.ndarray  # (N,) float64
    numbers: np.ndarray  # (N, F) float32, as the model gets them
    parts: np.ndarray  # (N,) "train", "val" or "test"


def table(raw: Path, config: Config) -> Table:
    """Return the rows that `samples` yields, in memory, cut and counted in the same way."""
    rule = config.packing
    plan = _plan(raw, rule)
    entries = catalog.read(catalog.find(raw, prefer=rule.file), _columns(rule))
    fitted = _features(plan.artifacts[FEATURES])
    sound = [(entry, row) for entry, row in zip(entries, plan.rows, strict=True) if not entry.fault]
    numbers = [
        fitted.row(parsing.parse(entry.text), entry.numbers, inner_fold=inner if part == "train" else None)
        for entry, (part, _, inner) in sound
    ]
    return Table(
        [entry.key for entry, _ in sound],
        np.array([entry.text for entry, _ in sound], dtype=object),
        np.array([entry.price for entry, _ in sound]),
        np.stack(numbers),
        np.array([part for _, (part, _, _) in sound]),
    )


@dataclass(frozen=True)
class _Plan:
    """What the whole catalogue decides for its rows."""

    artifacts: Mapping[str, str]
    digest: str  # of that
    rows: list[tuple[str, int, int]]  # part, group and inner fold of each


def _plan(raw: Path, rule: PackingSettings) -> _Plan:
    file = catalog.find(raw, prefer=rule.file)
    if rule.fold >= rule.folds:
        raise UserError(f"packing.fold={rule.fold}: expected -1 .. {rule.folds - 1}, for packing.folds={rule.folds}.")
    stat = file.stat()
    return _planned(str(file), stat.st_size, stat.st_mtime_ns, json.dumps(astuple(rule)))


@lru_cache(maxsize=2)  # packing asks three times; a plan is small beside its catalogue
def _planned(file: str, size_bytes: int, time_ns: int, options: str) -> _Plan:
    rule = PackingSettings(*json.loads(options))
    entries = catalog.read(Path(file), _columns(rule))
    sound = [i for i, entry in enumerate(entries) if not entry.fault]
    if not sound:
        faults = "; ".join(entry.fault for entry in entries[:3]) or "it has no rows"
        raise UserError(f"{file}: no row can train: {faults}.")
    items = {i: parsing.parse(entries[i].text) for i in sound}
    keys = [parsing.group_key(items[i], by=rule.group) or f"id {entries[i].key}" for i in sound]
    _require_groups(file, rule, keys)
    log_price = np.log([entries[i].price for i in sound])
    parts = folds.cut(keys, log_price, folds=rule.folds, fold=rule.fold, val_share=rule.val_share, seed=rule.seed)
    number_of = {key: number for number, key in enumerate(sorted(set(keys)))}
    rows = [("train", -1, 0)] * len(entries)  # of a row with a fault: it is never written
    for i, key, part in zip(sound, keys, parts.tolist(), strict=True):
        rows[i] = (part, number_of[key], features.inner_fold(key))
    train = [i for i in sound if rows[i][0] == "train"]
    artifacts = _fit_artifacts(rule, [(entries[i], items[i], rows[i][2]) for i in train], log_price[parts == "train"])
    digest = hashlib.blake2b(json.dumps(artifacts, sort_keys=True).encode()).hexdigest()
    return _Plan(artifacts, digest, rows)


def _fit_artifacts(
    rule: PackingSettings, train: list[tuple[catalog.Entry, parsing.Item, int]], log_price: np.ndarray
) -> dict[str, str]:
    """Learn from the training rows, each with its inner fold."""
    fitted = features.fit(
        [item for _, item, _ in train],
        [entry.numbers for entry, _, _ in train],
        log_price,
        [inner for _, _, inner in train],
        columns=rule.numeric_columns,
    )
    return {
        TOKENIZER: _tokenizer(rule, [parsing.document(item) for _, item, _ in train]),
        FEATURES: fitted.to_text(),
        PRICES: _prices(log_price),
    }


def _require_groups(file: str, rule: PackingSettings, keys: list[str]) -> None:
    needed = max(rule.folds, round(1 / rule.val_share) if rule.val_share else 2)
    found = len(set(keys))
    if found < 2 * needed:
        raise UserError(
            f"{file}: its {len(keys)} sound rows are {found} groups of near-duplicates, such as '{keys[0]}'; expected "
            f"{2 * needed} or more, for packing.folds={rule.folds} and packing.val_share={rule.val_share:g}. Give more "
            "rows, or tell apart more of them: packing.group=text"
        )


def _tokenizer(rule: PackingSettings, texts: list[str]) -> str:
    made = (
        tokenizer.load(Path(rule.tokenizer)) if rule.tokenizer else tokenizer.fit_artifacts(texts, size=rule.vocabulary)
    )
    text: str = made.to_str()
    return text


def _prices(log_price: np.ndarray) -> str:
    low, high = np.quantile(log_price, QUANTILES)
    state = {"mean": log_price.mean(), "std": max(float(log_price.std()), 1e-6), "low": low, "high": high}
    median = float(np.exp(np.median(log_price)))
    return json.dumps({name: float(value) for name, value in state.items()} | {"median": median}, sort_keys=True)


@lru_cache(maxsize=4)
def _features(text: str) -> features.Features:
    return features.Features.from_text(text)


def _columns(rule: PackingSettings, *, priced: bool = True) -> catalog.Columns:
    return catalog.Columns(
        key=rule.id_column,
        text=rule.text_column,
        price=rule.price_column if priced else "",
        numbers=tuple(rule.numeric_columns),
        picture=rule.picture_column if rule.images else "",
    )


def _content(entry: catalog.Entry, learned_digest: str) -> int:
    """Return 63 bits of a hash of a row and of what it is packed with."""
    told = json.dumps([entry.text, repr(entry.numbers), entry.picture, learned_digest])
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest()) >> 1


def _pictures(rule: PackingSettings, *, may_miss: bool = False) -> tuple[Path, bool] | None:
    return (Path(rule.images), may_miss or rule.missing_picture == "gray") if rule.images else None


def _picture(entry: catalog.Entry, folder: Path, may_miss: bool) -> tuple[bytes, int]:
    """Return an encoded RGB picture, and whether it is one: JPEG and PNG stay as they are, other kinds become PNG."""
    path = folder / _file_name(entry)
    if not path.is_file():
        if not may_miss:
            raise BadRecord(f"no picture '{path.name}' in {folder} (packing.missing_picture=gray goes on without)")
        return _png(Image.new("RGB", (8, 8), (128, 128, 128))), 0
    data = path.read_bytes()
    picture = open_image(data)
    upright = picture.getexif().get(0x0112, 1) == 1
    if picture.format in ("JPEG", "PNG") and picture.mode in ("L", "RGB") and upright:
        return data, 1
    return _png(ImageOps.exif_transpose(picture).convert("RGB")), 1


def _picture_path(entry: catalog.Entry, rule: PackingSettings) -> Path | None:
    path = Path(rule.images) / _file_name(entry)
    return path if rule.images and path.is_file() else None


def _file_name(entry: catalog.Entry) -> str:
    """Return the last component of a path or an address."""
    return entry.picture.rstrip("/").rpartition("/")[2]


def _png(picture: Image.Image) -> bytes:
    png = io.BytesIO()
    picture.save(png, "PNG", compress_level=1)
    return png.getvalue()
