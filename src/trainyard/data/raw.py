"""Lists raw files, and refuses those that packing would hang on, read twice, or could not name."""

import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from trainyard.data.shards import Sample
from trainyard.errors import UserError


def list_files(folder: Path, suffixes: Collection[str], *, depth: int | None = None) -> list[Path]:
    """List the files in a folder and below it with one of these suffixes (lower case), sorted.

    Links are followed; hidden files and folders, and a folder that does not exist, count as empty.

    Args:
        depth: levels of sub-folders to enter; None: all.

    Raises:
        UserError: a folder cannot be listed or is inside itself by a link, or a file is no regular file, a link to
            nothing, or has a name that is not UTF-8.
    """
    found: list[Path] = []
    if folder.is_dir():
        _collect_files(folder, suffixes, depth, {_identify(folder): folder}, found)
    return sorted(found)


def check_sources(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Pass samples on after checking their names and raw files; costs a `stat` and about 150 bytes for each.

    Samples may share a raw file. What is refused is a file that a link makes appear in two folders, because its copies
    would be dealt out to training and test. Hard links, and links with another name, are taken as meant.

    Raises:
        UserError: as in `list_files`, or a link makes a file appear twice.
    """
    folders: dict[int, int] = {}  # hash of (device, inode, name) -> hash of the folder
    for sample in samples:
        if sample.source is not None:
            path = sample.source
            _check_name(path)
            found = _check_regular(path)
            folder = hash(path.parent)
            first = folders.setdefault(hash((found.st_dev, found.st_ino, path.name)), folder)
            if first != folder and found.st_nlink == 1:
                raise UserError(
                    f"{path}: reached twice, because a link leads to it or to a folder that contains it, so its copies "
                    "would be in training and test. Remove the link. All links: find RAW -type l"
                )
        yield sample


def _collect_files(
    folder: Path,
    suffixes: Collection[str],
    depth: int | None,
    outer: dict[tuple[int, int], Path],
    found: list[Path],
) -> None:
    """Add the files of a folder to `found`.

    Args:
        outer: the folder and all around it, by identity.
    """
    try:
        with os.scandir(folder) as entries:
            listed = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror}). Give yourself the right to read it.") from None
    for entry in listed:
        path = Path(entry.path)
        if entry.is_dir():
            if depth == 0:
                continue
            identity = _identify(path)
            if identity in outer:
                raise UserError(
                    f"{path}: a link to {outer[identity]}, the folder that it is in, so each sample would be there "
                    f"twice. Remove it: rm {shlex.quote(str(path))}"
                )
            below = None if depth is None else depth - 1
            _collect_files(path, suffixes, below, outer | {identity: path}, found)
        elif path.suffix.lower() in suffixes:
            _check_name(path)
            _check_regular(path)
            found.append(path)


def _identify(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _check_name(path: Path) -> None:
    """Refuse names that are not UTF-8, because keys and columns are stored as text."""
    if _is_utf8(path):
        return
    wrong = next(part for part in (*reversed(path.parents), path) if not _is_utf8(part))
    quoted = os.fsencode(wrong).replace(b"\\", b"\\\\").replace(b"'", b"\\'").decode(errors="backslashreplace")
    raise UserError(f"{quoted}: its name is not UTF-8, so it cannot be stored. Rename it: mv $'{quoted}' NEW_NAME")


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_regular(path: Path) -> os.stat_result:
    """Return what stat(2) says about a file that can be read to its end."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            raise UserError(f"{path}: no such file any more. Run the same command again.") from None
        raise UserError(
            f"{path}: a link to {path.readlink()}, which does not exist. Restore that file, or remove the link: "
            f"rm {shlex.quote(str(path))}"
        ) from None
    except OSError as error:  # a link to itself
        raise UserError(f"{path}: cannot be read ({error.strerror}). Repair or remove it.") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{path}: is a named pipe, a device or another special file, and reading it may never end. "
            f"Remove it: rm {shlex.quote(str(path))}"
        )
    return found
