"""Read who is in a raw folder, who is whose twin, and which set each family belongs to."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.data.raw import list_files
from trainyard.errors import UserError
from trainyard.text import find_nearest

from .config import PackingSettings

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".pgm", ".ppm"}
DATASET, PAIRS = "dataset_infor.json", "*twin_pairs*.json"
SETS = ("train", "val", "test")
SET_BY_PREFIX = {"": "", "train_": "train", "val_": "val", "test_": "test", "external_test_": "test"}


@dataclass(frozen=True)
class ListedImage:
    """One image that a raw folder lists."""

    name: str  # the sample key: relative to the raw folder if inside it, else as listed
    path: Path | None  # None: listed, but missing


@dataclass(frozen=True)
class Person:
    """One person, with everything known before any image is opened."""

    name: str
    family: str  # the name of its first member
    set: str  # train, val or test
    images: list[ListedImage]


def read_people(raw: Path, rule: PackingSettings, *, all_test: bool = False) -> list[Person]:
    """Return every person in a raw folder, in listing order; no family is in two sets.

    Accepted layouts: `dataset_infor.json` with {person: [path, ...]}, optionally prefixed `train_`, `val_`, `test_` or
    `external_test_`; or one sub-folder of images per person. Twins: `twin_pairs_infor.json` with
    [[person, person], ...], or the same by set, {"train": [...], "test": [...]}. Absolute paths from another machine
    are matched by their longest tail that exists below `raw`.

    Args:
        all_test: all families are in "test", whatever the raw files say.

    Raises:
        UserError: a file has another layout, a pair names an unknown person, names one person twice or is listed twice,
            a family is in two sets, a person has no twin or no image, or too few families are left to train on.
    """
    listing, set_by_person = _read_listing(raw)
    if not listing:
        return []  # who packs says what is expected
    files = [path for path in list_files(raw, {".json"}, depth=0) if path.match(PAIRS)]
    pairs = [pair for file in files for pair in _read_pairs(file)]
    _refuse_bad_pairs(pairs, listing)
    family_by_person = connect_families(listing, [(pair.one, pair.other) for pair in pairs])
    twins = {name for pair in pairs for name in (pair.one, pair.other)}
    kept = _filter_singles(listing, twins, rule.singles, raw)
    set_by_family = dict.fromkeys(family_by_person.values(), "test")
    if not all_test:
        for pair in pairs:
            for person in (pair.one, pair.other) if pair.set else ():
                if set_by_person.setdefault(person, pair.set) != pair.set:
                    raise UserError(
                        f"person '{person}' is in set {set_by_person[person]} and in set {pair.set}. Keep each person "
                        "in one set."
                    )
        set_by_family = _split_families(kept, family_by_person, set_by_person, twins, rule)
    families = [(name, family_by_person[name]) for name in kept]
    return [Person(name, family, set_by_family[family], listing[name]) for name, family in families]


def connect_families(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return each person's family: the first name among all that pairs connect (union-find, so triplets are one)."""
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for pair in pairs:
        first, second = sorted(root(name) for name in pair)
        parent[second] = first
    return {name: root(name) for name in parent}


@dataclass(frozen=True)
class _Pair:
    one: str
    other: str
    set: str  # empty: not stated
    where: str


def _read_listing(raw: Path) -> tuple[dict[str, list[ListedImage]], dict[str, str]]:
    """Return each person's images, and the sets stated by the names of the listing files."""
    files = [path for path in list_files(raw, {".json"}, depth=0) if path.name.endswith(DATASET)]
    if not files:
        paths = [path for path in list_files(raw, SUFFIXES, depth=1) if path.parent != raw]
        by_person = itertools.groupby(paths, key=lambda path: path.parent.name)
        return {
            name: [ListedImage(path.relative_to(raw).as_posix(), path) for path in own] for name, own in by_person
        }, {}
    listing: dict[str, list[ListedImage]] = {}
    set_by_person: dict[str, str] = {}
    for file in files:
        prefix = file.name.removesuffix(DATASET)
        if prefix not in SET_BY_PREFIX:
            raise UserError(f"{file}: expected a name of {', '.join(p + DATASET for p in SET_BY_PREFIX)}. Rename it.")
        content = _read_json(file)
        if not isinstance(content, dict):
            raise UserError(f"{file}: expected {{person: [path, ...]}}, found {_abbreviate(content)}.")
        for person, listed in content.items():
            if person in listing:
                raise UserError(f"{file}: person '{person}' is in another listing too. List each person in one file.")
            listing[person] = list(_resolve_images(raw, file, person, listed))
            if SET_BY_PREFIX[prefix]:
                set_by_person[person] = SET_BY_PREFIX[prefix]
    return listing, set_by_person


def _resolve_images(raw: Path, file: Path, person: str, listed: Any) -> Iterator[ListedImage]:
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise UserError(
            f"{file}: person '{person}': expected a list of one or more paths, found {_abbreviate(listed)}."
        )
    for text in listed:
        path = _find_below(raw, Path(text))
        inside = path is not None and path.is_relative_to(raw)
        yield ListedImage(path.relative_to(raw).as_posix() if path is not None and inside else text, path)


def _find_below(raw: Path, listed: Path) -> Path | None:
    """Return the file of a listed image: the path itself, or its longest tail that exists below `raw`."""
    if listed.is_absolute() and listed.is_file():
        return listed
    parts = listed.parts[listed.is_absolute() :]
    tails = (raw.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((path for path in tails if path.is_file()), None)


def _read_pairs(file: Path) -> Iterator[_Pair]:
    content = _read_json(file)
    by_set = content if isinstance(content, dict) else {"": content}
    for name, pairs in by_set.items():
        if name not in ("", *SETS):
            raise UserError(f"{file}: unknown set '{name}'. Expected {_suggest(name, SETS)}.")
        if not isinstance(pairs, list):
            raise UserError(f"{file}: expected a list of pairs, found {_abbreviate(pairs)}.")
        for number, pair in enumerate(pairs, start=1):
            where = f"{file}: pair {number}{' of ' + name if name else ''}"
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise UserError(f'{where}: expected two people, such as ["90004", "90005"], found {_abbreviate(pair)}.')
            yield _Pair(pair[0], pair[1], name, where)


def _refuse_bad_pairs(pairs: list[_Pair], listing: dict[str, list[ListedImage]]) -> None:
    seen: dict[frozenset[str], str] = {}
    for pair in pairs:
        for name in (pair.one, pair.other):
            if name not in listing:
                raise UserError(
                    f"{pair.where}: '{name}' is not in the data set. Nearest: {_suggest(name, listing)}. Fix the pair, "
                    "or remove it."
                )
        if pair.one == pair.other:
            raise UserError(f"{pair.where}: '{pair.one}' is paired with itself. Expected two people; remove the pair.")
        key = frozenset((pair.one, pair.other))
        if key in seen:
            raise UserError(
                f"{pair.where}: '{pair.one}' and '{pair.other}' are already listed, in {seen[key]}. Remove one of them."
            )
        seen[key] = pair.where


def _filter_singles(listing: dict[str, list[ListedImage]], twins: set[str], singles: str, raw: Path) -> list[str]:
    alone = [name for name in listing if name not in twins]
    if alone and singles == "fail":
        raise UserError(
            f"{raw}: person '{alone[0]}' has no twin in any {PAIRS} ({len(alone)} of {len(listing)} people have none). "
            "Add the pairs, or type packing.singles=keep (each becomes a family of one, for pairs of strangers), or "
            "packing.singles=skip."
        )
    return list(listing) if singles == "keep" else [name for name in listing if name in twins]


def _split_families(
    names: list[str],
    family_by_person: dict[str, str],
    set_by_person: dict[str, str],
    twins: set[str],
    rule: PackingSettings,
) -> dict[str, str]:
    """Return the set of each family.

    Families that the raw files put into val or test stay there. For each of these two sets that no file names, the
    first of the other families in hash order are held out, twin families and singles separately; the rest trains.
    """
    named: dict[str, str] = {}
    for name in names:
        family = family_by_person[name]
        if name in set_by_person and named.setdefault(family, set_by_person[name]) != set_by_person[name]:
            raise UserError(
                f"person '{name}' is in set {set_by_person[name]}, but the family of '{family}' is in set "
                f"{named[family]}: testing on twins seen in training proves nothing. Keep each family in one set."
            )
    result = {name: where for name, where in named.items() if where != "train"}
    shares = {"test": rule.test_share, "val": rule.val_share}
    wanted = {where: share for where, share in shares.items() if share > 0 and where not in result.values()}
    unassigned = {family_by_person[name] for name in names} - set(result)
    for group in (unassigned & twins, unassigned - twins):
        ranked = sorted(group, key=lambda name: hashlib.blake2b(f"{rule.seed}:{name}".encode()).digest())
        for where, share in wanted.items():
            count = max(2, round(share * len(group)))
            result |= dict.fromkeys(ranked[:count], where)
            ranked = ranked[count:]
        result |= dict.fromkeys(ranked, "train")
    training = list(result.values()).count("train")
    if training < 2:
        raise UserError(
            f"{len(result)} families, but only {training} left to train on: at least 2 are needed. Add "
            "families, or lower packing.val_share and packing.test_share."
        )
    return result


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}. Fix the file.") from None


def _suggest(name: str, known: Iterable[str]) -> str:
    return ", ".join(find_nearest(name, known, most=3, always=True)) or "none"


def _abbreviate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
