"""Who is in a raw folder, whose twin, and in which set: the forms in which twin faces are handed around."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.text import nearest

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".pgm", ".ppm"}
DATASET, PAIRS = "dataset_infor.json", "*twin_pairs*.json"
SETS = ("train", "val", "test")
SET_OF_PREFIX = {"": "", "train_": "train", "val_": "val", "test_": "test", "external_test_": "test"}


@dataclass(frozen=True)
class Picture:
    """One picture that a raw folder names."""

    name: str  # as a key: relative to the raw folder where it lies in it, else as listed
    path: Path | None  # None: named, but not there


@dataclass(frozen=True)
class Person:
    """One person with everything that is known before any picture is opened."""

    name: str
    family: str  # its first member's name
    set: str  # train, val or test
    has_twin: bool
    pictures: list[Picture]


@dataclass(frozen=True)
class Cut:
    """How families are dealt to sets; where the raw files name a set, that holds."""

    val_share: float
    test_share: float
    seed: int


def people(raw: Path, *, singles: str, cut: Cut) -> list[Person]:
    """Return every person of a raw folder, in the order of the listing, each family within one set.

    Forms: `dataset_infor.json`, {person: [path, ...]}, also as `train_`, `val_`, `test_` and `external_test_` ones;
    or a sub-folder of pictures per person. Twins: `twin_pairs_infor.json`, [[person, person], ...], or the same by
    set, {"train": [...], "test": [...]}. Paths may be absolute ones of another machine: their longest tail that exists
    below `raw` counts.

    Args:
        singles: "fail", "keep" or "skip", for persons without a twin.

    Raises:
        UserError: a file is not of these forms, a pair names somebody unknown, names one person twice or comes twice,
            a family is in two sets, a person has no twin or no picture, or too few families are left to train.
    """
    found, set_of = _found(raw)
    pairs = [pair for file in sorted(raw.glob(PAIRS)) for pair in _pairs(file)]
    _refuse_bad_pairs(pairs, found)
    family_of = families(found, [(pair.one, pair.other) for pair in pairs])
    for pair in pairs:
        if pair.set:
            _settle(set_of, pair.one, pair.set)
            _settle(set_of, pair.other, pair.set)
    twins = {name for pair in pairs for name in (pair.one, pair.other)}
    kept = _with_singles(found, twins, singles, raw)
    set_of_family = _deal(kept, family_of, set_of, twins, cut)
    return [Person(name, family_of[name], set_of_family[family_of[name]], name in twins, found[name]) for name in kept]


def families(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the family of each person: the first name of all that pairs connect (union-find, so triplets are one)."""
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
    set: str  # empty: not said
    where: str


def _found(raw: Path) -> tuple[dict[str, list[Picture]], dict[str, str]]:
    """Return the pictures of each person, and the sets that the names of the listing files say."""
    files = sorted(raw.glob("*" + DATASET))
    if not files:
        folders = sorted(path for path in raw.iterdir() if path.is_dir())
        return {path.name: pictures for path in folders if (pictures := list(_in_folder(raw, path)))}, {}
    found: dict[str, list[Picture]] = {}
    set_of: dict[str, str] = {}
    for file in files:
        prefix = file.name.removesuffix(DATASET)
        if prefix not in SET_OF_PREFIX:
            raise UserError(f"{file}: expected a name of {', '.join(p + DATASET for p in SET_OF_PREFIX)}. Rename it.")
        for person, listed in _object(file).items():
            if person in found:
                raise UserError(f"{file}: person '{person}' stands in another listing too. Leave each in one file.")
            found[person] = list(_listed(raw, file, person, listed))
            if SET_OF_PREFIX[prefix]:
                set_of[person] = SET_OF_PREFIX[prefix]
    return found, set_of


def _in_folder(raw: Path, folder: Path) -> Iterator[Picture]:
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES):
        yield Picture(path.relative_to(raw).as_posix(), path)


def _listed(raw: Path, file: Path, person: str, listed: Any) -> Iterator[Picture]:
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise UserError(f"{file}: person '{person}': expected a list of one or more paths, found {_short(listed)}.")
    for text in listed:
        path = _below(raw, Path(text))
        inside = path is not None and path.is_relative_to(raw)
        yield Picture(path.relative_to(raw).as_posix() if path is not None and inside else text, path)


def _below(raw: Path, listed: Path) -> Path | None:
    """Return where a listed picture lies: as named, or at the longest tail of its name that exists below `raw`."""
    if listed.is_absolute() and listed.is_file():
        return listed
    parts = listed.parts[listed.is_absolute() :]
    tails = (raw.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((path for path in tails if path.is_file()), None)


def _pairs(file: Path) -> Iterator[_Pair]:
    content = _json(file)
    by_set = content if isinstance(content, dict) else {"": content}
    for name, pairs in by_set.items():
        if name not in ("", *SETS):
            raise UserError(f"{file}: unknown set '{name}'. Expected {_nearest(name, SETS)}.")
        if not isinstance(pairs, list):
            raise UserError(f"{file}: expected a list of pairs, found {_short(pairs)}.")
        for position, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise UserError(
                    f"{file}: pair {position + 1}{' of ' + name if name else ''}: expected two persons, such as "
                    f'["90004", "90005"], found {_short(pair)}.'
                )
            yield _Pair(pair[0], pair[1], name, f"{file}: pair {position + 1}{' of ' + name if name else ''}")


def _refuse_bad_pairs(pairs: list[_Pair], found: dict[str, list[Picture]]) -> None:
    seen: dict[frozenset[str], str] = {}
    for pair in pairs:
        for name in (pair.one, pair.other):
            if name not in found:
                raise UserError(
                    f"{pair.where}: '{name}' is not in the data set. Nearest: {_nearest(name, found)}. Mend the pair, "
                    "or remove it."
                )
        if pair.one == pair.other:
            raise UserError(f"{pair.where}: '{pair.one}' is paired with itself. Expected two persons; remove the pair.")
        key = frozenset((pair.one, pair.other))
        if key in seen:
            raise UserError(
                f"{pair.where}: '{pair.one}' and '{pair.other}' are listed before, in {seen[key]}. Leave one of them."
            )
        seen[key] = pair.where


def _settle(set_of: dict[str, str], person: str, wanted: str) -> None:
    if set_of.setdefault(person, wanted) != wanted:
        raise UserError(f"person '{person}' is in set {set_of[person]} and in set {wanted}. Leave each person in one.")


def _with_singles(found: dict[str, list[Picture]], twins: set[str], singles: str, raw: Path) -> list[str]:
    alone = [name for name in found if name not in twins]
    if alone and singles == "fail":
        raise UserError(
            f"{raw}: person '{alone[0]}' has no twin in any {PAIRS} ({len(alone)} of {len(found)} persons have none). "
            "Add the pairs, or type packing.singles=keep (each a family of one, for pairs of strangers), or "
            "packing.singles=skip."
        )
    return list(found) if singles == "keep" else [name for name in found if name in twins]


def _deal(
    names: list[str], family_of: dict[str, str], set_of: dict[str, str], twins: set[str], cut: Cut
) -> dict[str, str]:
    """Return the set of each family.

    Named ones of val and test hold. From the others, twin families and singles alike, those first in the order of a
    hash are held out for each of the two that no file names; the rest trains.
    """
    named: dict[str, str] = {}
    for name in names:
        family = family_of[name]
        if name in set_of and named.setdefault(family, set_of[name]) != set_of[name]:
            raise UserError(
                f"person '{name}' is in set {set_of[name]}, but the family of '{family}' in set {named[family]}: "
                "twins seen in training tell nothing as a test. Leave a family in one set."
            )
    result = {name: where for name, where in named.items() if where != "train"}
    shares = {"test": cut.test_share, "val": cut.val_share}
    wanted = {where: share for where, share in shares.items() if share > 0 and where not in result.values()}
    free = {family_of[name] for name in names} - set(result)
    for group in (free & twins, free - twins):
        ranked = sorted(group, key=lambda name: _rank(cut.seed, name))
        for where, share in wanted.items():
            count = max(2, round(share * len(group)))
            result |= dict.fromkeys(ranked[:count], where)
            ranked = ranked[count:]
        result |= dict.fromkeys(ranked, "train")
    training = list(result.values()).count("train")
    if training < 2:
        raise UserError(
            f"{len(result)} families, of which {training} are left to train: at least 2 are needed. Give more "
            "families, or lower packing.val_share and packing.test_share."
        )
    return result


def _rank(seed: int, family: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{family}".encode()).digest()


def _object(file: Path) -> dict[str, Any]:
    content = _json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected {{person: [path, ...]}}, found {_short(content)}.")
    return content


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}. Mend the file.") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    return ", ".join(nearest(name, known, most=3, always=True)) or "none"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
