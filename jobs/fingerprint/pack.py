"""Turns folders of fingerprint images into samples, and splits fingers into training, validation and test."""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray
from PIL import Image, ImageOps

from trainyard.data.raw import list_named
from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import open_image
from trainyard.errors import UserError
from trainyard.text import join_names

from .config import Config, SplitSettings
from .index_csv import DPI_RANGE
from .listing import SUFFIXES, Print, describe_listing, find_doubts, find_set_dpi, list_prints
from .minutia_files import read_minutiae
from .synthesis import number_synthetic, synthesize
from .wsq_images import WSQ_START, can_decode_wsq, decode_wsq

__all__ = ["list_labelled", "log_reading", "samples", "splits", "synthesize", "unlabelled"]

RAW_FILES = "images named FINGER_IMPRESSION, such as 101_1.tif, in one folder or in one for each set, or an index.csv"
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
LEAST_16_BIT = 1 << 12  # a 16-bit image whose brightest pixel is darker has fewer bits than it says
BLOCK_PX = 8  # cell size of the search for the print, at 500 dpi: about one ridge


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every print below `raw`, as `index.csv` or `packing.layout` reads it (`listing.list_prints`).

    Columns: `finger` (text, unique over all sets), `impression` (number), `set` (text, "" for images directly in
    `raw`), `split` (text, "" where `index.csv` does not say), `dpi`, and `box_y, box_x, box_height, box_width`, the
    square to crop in px. Files whose names cannot be read are yielded too: loading one gives the reason. Records:
    `image` and, unless `packing.minutiae` is none, `minutiae` (n, 3) float32: x, y in px of the image and direction in
    radians, as `minutia_maps` says. With `packing.ridges=placed` there is no image and no square, but `ridges` and
    `place` of `places.PlacedPrint`.

    Raises:
        UserError: as `list_prints`; or there are WSQ files, and their decoder is not installed.
    """
    yield from _list_samples(raw, config, trains=True)


def _list_samples(raw: Path, config: Config, *, trains: bool) -> Iterator[Sample]:
    listing = list_prints(raw, config.packing)
    _check_wsq_decoder([file.path for file in listing.prints])
    first: dict[str, Print] = {}
    for file in listing.prints:
        earliest = first.setdefault(file.finger, file)
        first[file.finger] = min(earliest, file, key=lambda print_: print_.impression)
    for file in listing.prints:
        if config.packing.ridges == "placed":
            of_finger = first[file.finger]
            frame = (raw / of_finger.path, of_finger.dpi) if trains else None
            load = _choose_placed_loader(raw / file.path, config, stated_dpi=file.dpi, frame=frame)
        else:
            minutiae = config.packing.minutiae if trains else "none"
            load = _choose_loader(raw / file.path, config, stated_dpi=file.dpi, minutiae=minutiae)
        yield Sample(
            key=file.path,
            load=load,
            columns={
                "finger": file.finger,
                "impression": file.impression,
                "set": file.set,
                "split": file.split,
                "dpi": file.dpi,
            },
            source=raw / file.path,
        )
    for path, reason in listing.unreadable.items():
        yield Sample(key=path, load=partial(_refuse, reason), source=raw / path)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the samples of a folder to evaluate, as `samples` but without minutiae, and the run's artifacts."""
    return _list_samples(raw, config, trains=False) if raw.is_dir() else iter(()), artifacts


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image in a folder and below it, or the file `raw` itself, whatever its name.

    Its folder below `raw` is its set, as for `packing.dpi_of_sets`.
    """
    files = list_named(raw, SUFFIXES)
    _check_wsq_decoder([name for name, _ in files])
    for key, path in files:
        stated_dpi = find_set_dpi(config.packing.dpi_of_sets, key.rpartition("/")[0].partition("/")[0])
        choose = _choose_loader if config.packing.ridges == "none" else _choose_placed_loader
        yield Sample(key, choose(path, config, stated_dpi=stated_dpi), source=path)


def _choose_loader(path: Path, config: Config, *, stated_dpi: int, minutiae: str = "none") -> "partial[Loaded]":
    return partial(
        load,
        path,
        stated_dpi=stated_dpi,
        default_dpi=config.packing.dpi,
        region_px=config.packing.region_px,
        fill=config.image.fill,
        minutiae=minutiae,
    )


def _choose_placed_loader(
    path: Path, config: Config, *, stated_dpi: int, frame: tuple[Path, int] | None = None
) -> "partial[Loaded]":
    """Return what loads a print for `model.name=dense`: with places on the one of `frame`, a path and its dpi."""
    seed = None if config.data.path else config.seed  # without a path, the prints are synthetic
    read = partial(read_gray, default_dpi=config.packing.dpi, fill=config.image.fill)
    read_frame = None if frame is None else partial(read, frame[0], stated_dpi=frame[1])
    return partial(load_placed, partial(read, path, stated_dpi=stated_dpi), frame=read_frame, seed=seed)


def log_reading(raw: Path, config: Config) -> None:
    """Log how a raw folder is read: five examples, files that are not read, and suspicious names."""
    listing = list_prints(raw, config.packing)
    for line in describe_listing(listing, config.packing):
        logger.info("{}", line)
    for doubt in find_doubts(listing):
        logger.warning("{}", doubt)


def _check_wsq_decoder(names: Sequence[str]) -> None:
    wsq = [name for name in names if name.lower().endswith(".wsq")]
    if wsq and not can_decode_wsq():
        raise UserError(
            f"WSQ files are here ({join_names(wsq, most=3)}), but no decoder is installed. In a checkout, type "
            "make setup; for a container image, make image HW=card; elsewhere, pip install wsq."
        )


def _refuse(reason: str) -> Loaded:
    raise BadRecord(reason)


def load(path: Path, *, stated_dpi: int, default_dpi: int, region_px: int, fill: int, minutiae: str = "none") -> Loaded:
    """Read one image and find the print in it.

    Args:
        stated_dpi: the resolution that the listing or an option states; 0: a WSQ file's own, else `default_dpi`.
        minutiae: as `packing.minutiae`.

    Raises:
        BadRecord: the file is not a complete image of a known format, or its minutiae cannot be read.
    """
    data, gray, dpi = read_gray(path, stated_dpi=stated_dpi, default_dpi=default_dpi, fill=fill)
    centre_y, centre_x = find_print_centre(gray, dpi)
    side = round(region_px * dpi / 500)
    loaded: Loaded = {
        "image": data,
        "dpi": dpi,
        "box_y": round(centre_y - side / 2),
        "box_x": round(centre_x - side / 2),
        "box_height": side,
        "box_width": side,
    }
    if minutiae == "files":
        loaded["minutiae"] = Ragged(read_minutiae(path, (gray.shape[0], gray.shape[1])))
    elif minutiae == "extract":
        loaded["minutiae"] = Ragged(_extract_minutiae(gray, dpi))
    return loaded


def read_gray(path: Path, *, stated_dpi: int, default_dpi: int, fill: int) -> tuple[bytes, NDArray[np.uint8], int]:
    """Return an encoded 8-bit gray image, its pixels (H, W), and its resolution in dpi."""
    data, gray, own_dpi = _encode_gray(path.read_bytes(), fill)
    if own_dpi and not stated_dpi and not DPI_RANGE[0] <= own_dpi <= DPI_RANGE[1]:
        raise BadRecord(f"its comment says {own_dpi} dpi, which cannot be. State it: packing.dpi_of_sets=[*:500]")
    return data, gray, stated_dpi or own_dpi or default_dpi


def load_placed(
    read: "partial[tuple[bytes, NDArray[np.uint8], int]]",
    *,
    frame: "partial[tuple[bytes, NDArray[np.uint8], int]] | None",
    seed: int | None,
) -> Loaded:
    """Read a print as the descriptors of `dense` are trained and scored.

    Args:
        read: as `read_gray`, of this print.
        frame: of the impression on which it has places, which may be the same; None: no place is known.
        seed: of synthetic prints, which have places on their master; None: of real ones.
    """
    import torch  # takes time and memory that other packing does not need

    from .places import place_nowhere, place_real, place_synthetic

    torch.set_num_threads(1)  # packing has a process for each core
    _, gray, dpi = read()
    if frame is None:
        placed = place_nowhere(gray, dpi)
    elif seed is not None:
        placed = place_synthetic(gray, seed, *number_synthetic(read.args[0]))
    else:
        placed = place_real(gray, dpi, *frame()[1:])
    return {"ridges": placed.ridges, "place": placed.place, "dpi": dpi}


def _extract_minutiae(gray: NDArray[np.uint8], dpi: int) -> NDArray[np.float32]:
    import torch  # takes time and memory that other packing does not need

    from .extraction import extract_minutiae

    torch.set_num_threads(1)  # packing has a process for each core
    return extract_minutiae(gray, dpi)


def _encode_gray(data: bytes, fill: int) -> tuple[bytes, NDArray[np.uint8], int]:
    """Return an encoded 8-bit gray image, its pixels (H, W), and the resolution that a WSQ file states, else 0.

    A plain gray JPEG or PNG keeps its bytes; anything else becomes a lossless PNG.
    """
    if data.startswith(WSQ_START):
        pixels, dpi = decode_wsq(data)
        return _encode_png(pixels), pixels, dpi
    image = open_image(data)
    rotated = image.getexif().get(ORIENTATION, 1) != 1
    if image.mode == "L" and not image.has_transparency_data and not rotated:
        pixels = np.asarray(image)
        if image.format in ("JPEG", "PNG"):
            return data, pixels, 0
    else:
        pixels = np.asarray(_convert_to_gray(ImageOps.exif_transpose(image), fill))
    return _encode_png(pixels), pixels, 0


def _encode_png(pixels: NDArray[np.uint8]) -> bytes:
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG", compress_level=1)
    return png.getvalue()


def _convert_to_gray(image: Image.Image, fill: int) -> Image.Image:
    if image.mode.startswith("I;16"):
        wide = np.asarray(image)
        if (most := int(wide.max())) < LEAST_16_BIT:
            raise BadRecord(
                f"16-bit pixels, but none above {most}, so it is almost black or holds 8 or 12 bits: convert the file "
                "to 8-bit gray"
            )
        return Image.fromarray((wide >> 8).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, (fill, fill, fill, 255))
        return Image.alpha_composite(background, image.convert("RGBA")).convert("L")
    if image.mode in ("1", "L", "P", "RGB", "YCbCr", "CMYK"):
        return image.convert("L")
    raise BadRecord(f"the pixels have mode {image.mode} with an unknown range: convert the file to 8-bit gray")


def find_print_centre(gray: NDArray[np.uint8], dpi: int) -> tuple[float, float]:
    """Return the centroid (y, x) of the print in pixels; the middle of an image without contrast.

    Ridges are where neighbouring pixels differ most. A cell of about one ridge counts as print if its summed absolute
    differences, smoothed over 5 x 5 cells, exceed half of their 90th percentile. About 1 ms for 640 x 480.
    """
    height, width = gray.shape
    block = max(1, min(round(BLOCK_PX * dpi / 500), height - 1, width - 1))
    rows, columns = (height - 1) // block, (width - 1) // block
    if rows == 0 or columns == 0:
        return height / 2, width / 2
    here = gray[: rows * block + 1, : columns * block + 1].astype(np.int16)
    change = np.abs(np.diff(here, axis=0)[:, :-1]) + np.abs(np.diff(here, axis=1)[:-1])  # to the pixels below and right
    cells = change.reshape(rows, block, columns, block).sum(axis=(1, 3))
    energy = np.lib.stride_tricks.sliding_window_view(np.pad(cells, 2), (5, 5)).mean(axis=(2, 3))
    ridges = energy > 0.5 * np.quantile(energy, 0.9)
    if not ridges.any():
        return height / 2, width / 2
    y, x = np.nonzero(ridges)
    return (float(y.mean()) + 0.5) * block, (float(x.mean()) + 0.5) * block


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and the tests; what trains, validates and tests shares no finger.

    The `split` column of `index.csv` decides if there is one; only `val` is held out here, if the column has none.
    Otherwise sets have roles, and fingers are held out in the order of a hash of (seed, name), so the split depends on
    nothing else. Shares are of the fingers in `train_sets`, rounded, and at least two fingers, because one finger has
    no impostors.

    Args:
        columns: `finger`, `set` and, but for data packed by older commits, `split`, (N,) codes.
        vocabulary: the names of those codes.

    Returns:
        Ascending int64 ids. Tests are named "test_<set>", or "test" if there are no `test_sets`.

    Raises:
        UserError: a pattern matches no set, a set has two roles, a finger would be in two splits, or too few fingers
            are left for training.
    """
    given = np.array(vocabulary["split"])[columns["split"]] if "split" in columns else np.array([""])
    if given.any():
        masks = _take_given_splits(given, columns["finger"], vocabulary["finger"], config)
    else:
        masks = _deal_out_fingers(columns, vocabulary, config)
    _check_disjoint_fingers(masks, columns["finger"], vocabulary["finger"])
    return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}


def _take_given_splits(
    given: np.ndarray, finger_codes: np.ndarray, finger_names: list[str], config: Config
) -> dict[str, np.ndarray]:
    """Return (N,) bool for each split that `index.csv` names, and for `val`: held out of `train` if it has none."""
    settings = config.split
    unlike = [
        f"split.{name}=[{','.join(default)}]"
        for name, default in (("train_sets", ["*"]), ("val_sets", []), ("test_sets", []))
        if getattr(settings, name) != default
    ]
    if unlike:
        raise UserError(
            "The split column of index.csv and split.*_sets both choose training prints. Remove the column and pack "
            f"again, or type {' '.join(unlike)}"
        )
    masks = {str(name): given == name for name in ("train", *sorted(set(given.tolist()) - {"train"}))}
    if "val" not in masks:
        fingers = _sort_fingers(finger_codes[masks["train"]], finger_names, config.seed)
        val, train = np.split(fingers, [_count_held_out(len(fingers), settings.val_share)])
        masks["val"], masks["train"] = np.isin(finger_codes, val), np.isin(finger_codes, train)
    count = len(np.unique(finger_codes[masks["train"]]))
    if count < 2:
        raise UserError(
            f"The split column of index.csv leaves {count} fingers to train on: at least 2 are needed. Give more lines "
            "the split train, and pack again."
        )
    return masks


def _deal_out_fingers(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return (N,) bool for each split, by the roles of sets and the shares of `config.split`."""
    settings = config.split
    train_sets, val_sets, test_sets = _find_roles(settings, vocabulary["set"])
    set_names, finger_codes = np.array(vocabulary["set"])[columns["set"]], columns["finger"]
    is_dealt = np.isin(set_names, train_sets)
    fingers = _sort_fingers(finger_codes[is_dealt], vocabulary["finger"], config.seed)
    test_count = 0 if test_sets else _count_held_out(len(fingers), settings.test_share)
    val_count = 0 if val_sets else _count_held_out(len(fingers), settings.val_share)
    test, val, train = np.split(fingers, [test_count, test_count + val_count])
    if len(train) < 2:
        raise UserError(
            f"{len(fingers)} fingers to train on, less {test_count} for testing and {val_count} for validation: at "
            "least 2 must be left. Give more data, or lower split.val_share and split.test_share."
        )
    masks = {
        "train": np.isin(finger_codes, train) & is_dealt,
        "val": (np.isin(finger_codes, val) & is_dealt) | np.isin(set_names, val_sets),
    }
    masks |= {f"test_{name}": set_names == name for name in test_sets}
    if test_count:
        masks["test"] = np.isin(finger_codes, test) & is_dealt
    return masks


def _find_roles(settings: SplitSettings, names: list[str]) -> tuple[list[str], list[str], list[str]]:
    train_sets = _match_sets("split.train_sets", settings.train_sets, names)
    val_sets = _match_sets("split.val_sets", settings.val_sets, names)
    test_sets = _match_sets("split.test_sets", settings.test_sets, names)
    if settings.train_sets == ["*"]:
        train_sets = [name for name in train_sets if name not in val_sets + test_sets]
    roles = [*train_sets, *val_sets, *test_sets]
    repeated = sorted({name for name in roles if roles.count(name) > 1})
    if repeated:
        raise UserError(
            f"'{repeated[0]}' is named in two of split.train_sets, split.val_sets and split.test_sets, but these "
            "must not share fingers. Keep it in one of them."
        )
    return train_sets, val_sets, test_sets


def _check_disjoint_fingers(masks: Mapping[str, np.ndarray], finger_codes: np.ndarray, finger_names: list[str]) -> None:
    """Refuse a finger in two of train, val and the tests: sets may share fingers. Two tests may share fingers."""
    owners: dict[str, np.ndarray] = {}
    for name, mask in masks.items():
        role = name.partition("_")[0]
        owners[role] = np.union1d(owners.get(role, np.array([], np.int64)), finger_codes[mask])
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = np.intersect1d(owners.get(one, []), owners.get(other, [])).astype(np.int64)
        if len(shared):
            raise UserError(
                f"{len(shared)} fingers, such as {finger_names[shared[0]]}, are in '{one}' and in '{other}': the sets "
                "share fingers, and a score on fingers that trained says nothing. Leave split.val_sets and "
                "split.test_sets empty, so that fingers are held out in all sets, or write an index.csv with a split "
                "column."
            )


def _match_sets(option: str, patterns: list[str], names: list[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            listed = ", ".join(name or "(none: images directly in the raw folder)" for name in sorted(names))
            raise UserError(f"{option}: '{pattern}' matches no set. Sets (sub-folders) found: {listed}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _sort_fingers(codes: np.ndarray, names: list[str], seed: int) -> NDArray[np.int64]:
    """Return the distinct codes, ordered by a hash of (seed, name)."""
    ranks = {code: hashlib.blake2b(f"{seed}:{names[code]}".encode()).digest() for code in np.unique(codes)}
    return np.array(sorted(ranks, key=ranks.__getitem__), dtype=np.int64)


def _count_held_out(fingers: int, share: float) -> int:
    return max(2, round(share * fingers)) if share > 0 else 0
