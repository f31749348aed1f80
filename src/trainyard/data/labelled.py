"""Lists raw files in a folder for each class, and divides samples into training, validation and test sets."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.config.settings import HoldOutSettings
from trainyard.data.raw import list_files
from trainyard.data.splits import SETS as SETS
from trainyard.data.splits import find_sets as find_sets
from trainyard.errors import UserError
from trainyard.text import find_nearest


@dataclass(frozen=True)
class LabelledFile:
    """A raw file whose folder says its class."""

    path: Path
    key: str  # the path relative to the raw folder
    label: str  # the name of its class
    set: str  # "train", "val" or "test"; "": the raw folder does not say


def list_labelled_files(raw: Path, suffixes: Collection[str]) -> list[LabelledFile]:
    """List the files of `raw/CLASS/`, or of `raw/train/CLASS/`, `raw/val/CLASS/` and `raw/test/CLASS/`, by key.

    Raises:
        UserError: there is no folder of a class with files in it, or only one; files are in no class; or folders of
            sets and of classes are mixed.
    """
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder. Expected one with a sub-folder for each class.")
    files = []
    for path in list_files(raw, suffixes):
        folders = path.relative_to(raw).parts[:-1]
        stated = folders[0] if folders and folders[0] in SETS else ""
        label = folders[bool(stated)] if len(folders) > bool(stated) else ""
        if not label:
            raise UserError(
                f"{path}: in no class. Expected a sub-folder for each class, such as "
                f"{raw / stated / 'cat' / path.name}, and no other files."
            )
        files.append(LabelledFile(path, path.relative_to(raw).as_posix(), label, stated))
    _check_sets(raw, files)
    classes = {file.label for file in files}
    if len(classes) < 2:
        raise UserError(
            f"{raw}: {len(classes) or 'no'} class{'' if len(classes) == 1 else 'es'} with files ending in "
            f"{', '.join(sorted(suffixes))}. Expected a sub-folder for each of two classes or more."
        )
    return files


def _check_sets(raw: Path, files: Sequence[LabelledFile]) -> None:
    """Refuse a folder in which only some files are in folders of sets, and one without training samples."""
    if not any(file.set for file in files):
        return
    loose = next((file for file in files if not file.set), None)
    if loose is not None:
        name = loose.key.split("/")[0]
        near = find_nearest(name, SETS)
        raise UserError(
            f"{raw / name}: is next to folders of sets, and is none of {', '.join(SETS)}. "
            f"{f'Rename it to {near[0]}' if near else 'Move it into one of them'}, or out of {raw}."
        )
    if all(file.set != "train" for file in files):
        raise UserError(f"{raw}: has sets, but no {raw / 'train'}. Add it: a model needs samples to train on.")


def find_class(file: LabelledFile, classes: Sequence[str]) -> int:
    """Return the number of a file's class.

    Raises:
        UserError: the model was not trained for this class.
    """
    if file.label in classes:
        return classes.index(file.label)
    near = find_nearest(file.label, classes)
    raise UserError(
        f"{file.path}: '{file.label}' is no class of the model, which knows {', '.join(classes)}. "
        + (f"Rename the folder to {near[0]}, or move it away." if near else "Move the folder away.")
    )


def assign_sets(
    labels: Mapping[str, str], rule: HoldOutSettings, *, stated: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the set of each sample: as stated, else shares of each class, by a hash of its key.

    A class of three samples or more has at least one in each set whose share is above 0; a smaller one only trains.
    Where the validation or the test set is stated, only what "train" contains and the other set lacks is divided.

    Args:
        labels: class by key; "" for all if there are no classes.
        stated: set by key; "" or absent: not stated.
    """
    given = {key: (stated or {}).get(key, "") for key in labels}
    shares = {"val": rule.val_share, "test": rule.test_share}
    shares = {name: share for name, share in shares.items() if share > 0 and name not in given.values()}
    if "train" in given.values():  # only the owner names a test set; training needs a validation set
        shares.pop("test", None)
    sets = {key: name or "train" for key, name in given.items()}
    by_label: dict[str, list[str]] = {}
    for key, label in labels.items():
        if sets[key] == "train":
            by_label.setdefault(label, []).append(key)
    for keys in by_label.values():
        drawn = sorted(keys, key=lambda key: hashlib.blake2b(f"{rule.seed}:{key}".encode(), digest_size=8).digest())
        for name, share in shares.items():
            count = max(1, round(share * len(keys))) if len(keys) >= 3 else 0
            sets |= dict.fromkeys(drawn[:count], name)
            drawn = drawn[count:]
    return sets
