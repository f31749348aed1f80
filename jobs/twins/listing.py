"""Read who is in a raw folder, who is whose twin, and which set each family belongs to."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.data.raw import IMAGES, find_listed, list_files, list_folder
from trainyard.errors import UserError
from trainyard.foreign import read_json
from trainyard.text import compose_letters, find_nearest

from .config import PackingSettings

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
    `external_test_`; or one sub-folder of images per person, which may be in `train/`, `val/` and `test/`. Twins:
    `twin_pairs_infor.json` with [[person, person], ...], or the same by set, {"train": [...], "test": [...]}. Absolute
    paths from another machine are matched by their longest tail that exists below `raw`.

    Args:
        all_test: all families are in "test", whatever the raw files say.

    Raises:
        UserError: a file has another layout, a pair names an unknown person, names one person twice or is listed twice,
            a family is in two sets, a person has no twin or no image, or too few families are left to train on.
    """
    listing, set_by_person = _read_listing(raw)
    if not listing:
        return []  # the caller names the expected layouts
    files = [path for path in list_files(raw, {".json"}, depth=0) if path.match(PAIRS)]
    spelling = {compose_letters(name): name for name in listing}  # of folders, which a Mac may have written
    pairs = [pair for file in files for pair in _read_pairs(file, spelling)]
    _check_pairs(pairs, listing)
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
        return _list_folders(raw)
    listing: dict[str, list[ListedImage]] = {}
    set_by_person: dict[str, str] = {}
    for file in files:
        prefix = file.name.removesuffix(DATASET)
        if prefix not in SET_BY_PREFIX:
            raise UserError(f"{file}: expected a name of {', '.join(p + DATASET for p in SET_BY_PREFIX)}. Rename it.")
        for person, listed in read_json(file, dict[str, list[str]], expected="{person: [path, ...]}").items():
            if person in listing:
                raise UserError(f"{file}: person '{person}' is in another listing too. List each person in one file.")
            if not listed:
                raise UserError(f"{file}: person '{person}': expected a list of one or more paths, found none.")
            listing[person] = [_find_image(raw, file, name) for name in listed]
            if SET_BY_PREFIX[prefix]:
                set_by_person[person] = SET_BY_PREFIX[prefix]
    return listing, set_by_person


def _list_folders(raw: Path) -> tuple[dict[str, list[ListedImage]], dict[str, str]]:
    """Read a folder of images for each person, or such folders in `train`, `val` and `test` (VGGFace2)."""
    names = [entry.name for entry in list_folder(raw) if entry.is_folder] if raw.is_dir() else []
    by_set = set(names) <= set(SETS) and not any(list_files(raw / name, IMAGES, depth=0) for name in names)
    listing: dict[str, list[ListedImage]] = {}
    set_by_person: dict[str, str] = {}
    for name in names if names and by_set else [""]:
        paths = [path for path in list_files(raw / name, IMAGES, depth=1) if path.parent != raw / name]
        for person, own in itertools.groupby(paths, key=lambda path: path.parent.name):
            if person in listing:
                raise UserError(f"{raw / name / person}: also in {set_by_person[person]}. Keep each person in one set.")
            listing[person] = [ListedImage(path.relative_to(raw).as_posix(), path) for path in own]
            if name:
                set_by_person[person] = name
    return listing, set_by_person


def _find_image(raw: Path, file: Path, name: str) -> ListedImage:
    path = find_listed(raw, name, where=str(file), tails=True)
    return ListedImage(name if path is None else path.relative_to(raw).as_posix(), path)


_Pairs: Any = dict[str, list[tuple[str, str]]] | list[tuple[str, str]]


def _read_pairs(file: Path, spelling: Mapping[str, str]) -> Iterator[_Pair]:
    """Yield the pairs of a file, the people spelled as their folders are."""
    content = read_json(file, _Pairs, expected='[["ann", "bea"], ...], or such a list for each set')
    by_set = content if isinstance(content, dict) else {"": content}
    for name, pairs in by_set.items():
        if name not in ("", *SETS):
            raise UserError(f"{file}: unknown set '{name}'. Expected {_suggest(name, SETS)}.")
        for number, (one, other) in enumerate(pairs, start=1):
            one, other = (spelling.get(compose_letters(person), person) for person in (one, other))
            yield _Pair(one, other, name, f"{file}: pair {number}{' of ' + name if name else ''}")


def _check_pairs(pairs: list[_Pair], listing: dict[str, list[ListedImage]]) -> None:
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


def _suggest(name: str, known: Iterable[str]) -> str:
    return ", ".join(find_nearest(name, known, most=3, similarity=0.0)) or "none"
