"""Finds the annotation files of a raw folder, the set that each one names, and the images that it lists."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from trainyard.data.raw import find_listed, list_files
from trainyard.errors import UserError

from .visdrone import list_texts

SETS = ("train", "val", "test")
BOTH = "trainval"
"""Named by a file whose images train and validate; which does which is for us to decide."""

WORDS = {
    "train": ("train", "training", "trainset", "minitrain"),
    "val": ("val", "valid", "validation", "valset", "minival", "valminusminival"),
    "test": ("test", "testing", "testset", "testdev"),
    BOTH: ("trainval",),
}
"""Words in a name, and the set that each means. Public names: instances_train2017 (COCO), instances_minitrain2017,
instances_valminusminival2014, aitod_trainval_v1, aitodv2_test, tiny_set_test_all (TinyPerson),
VisDrone2019-DET_test-dev_coco."""

OTHER_KINDS = ("captions_", "panoptic_", "image_info_", "person_keypoints_", "stuff_")
"""COCO's other annotations of the same images: without boxes, or with boxes of some categories again."""

ACCEPTED_FOLDERS = {"train": ("train", BOTH), "val": ("val", BOTH), "test": ("test",), BOTH: (BOTH, "train", "val")}
"""The sets whose folders may hold the images of a set."""


@dataclass(frozen=True)
class AnnotationFile:
    """An annotation file, with its set and year as read from the name."""

    path: Path  # a file, or VisDrone's folder of texts
    set: str  # one of SETS, BOTH, or empty: it names none
    prefix: str = ""  # the folder of the set, in front of the names of its images: two sets may share names
    folder: "PairedFolder | None" = None  # of files for each image (`folders.py`); the path is then what names the sets

    @property
    def name(self) -> str:
        """Its name in messages: the file, or the folder of the set."""
        if self.folder is not None:
            return f"the {self.folder.kind} folder"
        return self.path.parent.name if self.path.is_dir() else self.path.name

    @property
    def parts(self) -> list[Path]:
        """The files to read."""
        if self.folder is not None:
            return [*self.folder.tables, *(path for _, path in self.folder.pairs if path is not None)]
        return list_texts(self.path) if self.path.is_dir() else [self.path]


@dataclass(frozen=True)
class PairedFolder:
    """Pairs each image of a set with its annotation file."""

    kind: str  # one of `folders.SUFFIXES`
    raw: Path
    pairs: tuple[tuple[Path, Path | None], ...]  # an image and its annotations; None: it has no objects
    tables: tuple[Path, ...]  # that name classes and sets
    classes: tuple[str, ...]  # names of the classes 0, 1, ..; none: the annotations name them


def find_annotation_files(raw: Path) -> tuple[list[AnnotationFile], list[Path]]:
    """Return the annotation files of a raw folder to read, sorted by name, and those to leave out.

    They are `*.json` in `annotations/`, else in the folder itself, else in `train/`, `valid/` and `test/`; there, or in
    the folder itself, VisDrone's `annotations/*.txt` also count. Other kinds of annotations are left out. So is the
    union of train and val if the train file lies alongside.

    Raises:
        UserError: there are none, or their names do not tell them apart. Official validation images must never train,
            so nothing is guessed; a single file may have any name.
    """
    files = list_files(raw / "annotations", {".json"}, depth=0) or list_files(raw, {".json"}, depth=0)
    if not files and list_texts(raw / "annotations"):
        return [AnnotationFile(raw / "annotations", "".join(find_sets(raw.name)))], []
    if not files and raw.is_dir():
        return _find_annotations_of_folders(raw), []
    chosen = [path for path in files if not path.name.lower().startswith(OTHER_KINDS)] or files
    stems = {path.stem.lower() for path in chosen}
    unions = {path for path in chosen if find_sets(path.stem) == {BOTH} and _get_train_stem(path) in stems}
    chosen = [path for path in chosen if path not in unions]
    _check_names(chosen)
    left_out = [path for path in files if path not in chosen]
    return [AnnotationFile(path, "".join(find_sets(path.stem))) for path in chosen], left_out


def _find_annotations_of_folders(raw: Path) -> list[AnnotationFile]:
    """Return the annotations in folders called after sets, as Roboflow writes them and VisDrone."""
    folders = list_set_folders(raw).items()
    files = [
        AnnotationFile(path, name, f"{folder.name}/")
        for folder, name in folders
        for path in list_files(folder, {".json"}, depth=0)
    ]
    files += [
        AnnotationFile(folder / "annotations", name, f"{folder.name}/")
        for folder, name in folders
        if list_texts(folder / "annotations")
    ]
    if not files:
        raise UserError(
            f"{raw}: no annotations. Expected COCO JSON files in {raw}/annotations, such as instances_train.json and "
            "instances_val.json, and the images in the folder images; or a file in each of the folders train, valid "
            "and test, next to its images; or a folder of YOLO (images, labels and data.yaml), Pascal VOC, LabelMe or "
            "VisDrone."
        )
    repeated = next(
        (file for file in files if sum(sibling.path.parent == file.path.parent for sibling in files) > 1), None
    )
    if repeated is not None:
        raise UserError(f"{repeated.path.parent}: several JSON files. Keep its annotations, and move the others away.")
    return files


def list_set_folders(raw: Path) -> dict[Path, str]:
    """Return the folders in a raw folder whose names say a set, and the set."""
    return {path: "".join(sets) for path in _list_folders(raw) if len(sets := find_sets(path.name)) == 1}


def find_sets(name: str) -> set[str]:
    """Return the sets that a file's or folder's name mentions, 'trainval' for their union; a clear name mentions one.

    Words end at digits, punctuation and capitals: 'instances_train2017' -> {'train'}, 'aitodv2_testDev' -> {'test'}.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    text = re.sub(r"\btrain (val|valid|validation)\b", BOTH, " ".join(words))
    return {name for name, meant in WORDS.items() if set(meant) & set(text.split())}


def list_image_folders(raw: Path, file: AnnotationFile) -> list[Path]:
    """Return the existing folders in which the images of a file may lie, in order of the search.

    Of a folder with a file for each image: the raw folder, from which they are named. Else
    first those named after its set, in the raw folder or in `images`, each preceded by its own folder `images`; among
    several the one that the file's name repeats, as 'train2017'. Then `images` and the raw folder itself.
    """
    if file.folder is not None:
        return [raw]
    shared = [*_find_images_folder(raw), raw]
    inside = [path for base in reversed(shared) for path in _list_folders(base)]
    inside.sort(key=lambda path: _strip_punctuation(path.name) not in _strip_punctuation(file.path.stem))
    folders: list[Path] = []
    for wanted in ACCEPTED_FOLDERS.get(file.set, ()):
        for folder in (path for path in inside if find_sets(path.name) == {wanted}):
            folders += [*_find_images_folder(folder), folder]
    own = [*_find_images_folder(file.path.parent), file.path.parent] if file.prefix else []
    return list(dict.fromkeys([*own, *folders, *shared]))


def find_image(raw: Path, folders: Sequence[Path], name: str, *, where: str) -> Path | None:
    """Return the path of an image: in the first of these folders that has it, with or without the folders in its
    name, and never outside of `raw`."""
    return find_listed(raw, name, where=where, folders=folders, tails=True)


def _check_names(paths: Sequence[Path]) -> None:
    unclear = [path for path in paths if len(find_sets(path.stem)) > 1]
    unnamed = [path for path in paths if not find_sets(path.stem)] if len(paths) > 1 else []
    if not unclear and not unnamed:
        return
    first = (unclear or unnamed)[0]
    what = "mentions several sets" if unclear else f"mentions no set, and there are {len(paths)} annotation files"
    rename = f"mv {quote(str(first))} {quote(str(_suggest_name(first)))}"
    raise UserError(
        f"{first}: its name {what}, so images that are for validation or test could train. Expected exactly one of the "
        f"words train, val, test or {BOTH} (divided by packing.val_share) in each name, found "
        f"{', '.join(path.name for path in paths)}. Rename it, for example: {rename}; "
        "or move it elsewhere."
    )


def _suggest_name(path: Path) -> Path:
    """Return a new name that is clear; which set the images are for, only the user knows."""
    stem = path.stem if not find_sets(path.stem) else "instances"
    names = (path.with_name(f"{stem}{number}_{name}.json") for number in ("", *range(2, 100)) for name in SETS)
    return next(name for name in names if not name.exists())


def _get_train_stem(path: Path) -> str:
    """'aitod_trainval_v1' -> 'aitod_train_v1', in lower case."""
    return re.sub(r"(train)[-_ ]?val(id(ation)?)?", r"\1", path.stem.lower())


def _strip_punctuation(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _list_folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:  # asks the disk about folders and links only, not about each image
        return sorted(Path(entry.path) for entry in entries if entry.is_dir())


def _find_images_folder(folder: Path) -> list[Path]:
    """Return the folders called images, in any case: one or none where case does not matter."""
    return [path for path in _list_folders(folder) if path.name.lower() == "images"]
