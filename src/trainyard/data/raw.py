"""Lists raw files, refuses those that packing would hang on, read twice, or could not name; remembers listings."""

import errno
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainyard.errors import UserError
from trainyard.files import load_json, write_json
from trainyard.text import compose_letters, join_names

if TYPE_CHECKING:
    from trainyard.data.shards import Sample


IMAGES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".avif")
    + (".jp2", ".j2k", ".jpx", ".pgm", ".ppm", ".pbm", ".pnm")
)
"""Endings of the images that Pillow reads."""

SOUNDS = frozenset(
    (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".w64", ".sph")
)
"""Endings of the recordings that libsndfile reads."""

_MEDIA = (
    *(*IMAGES, *SOUNDS, ".raw", ".heic", ".heif", ".dcm", ".wsq", ".eft", ".an2", ".nist", ".m4a", ".aac", ".wma"),
    *(".amr", ".mp4", ".avi", ".mov", ".mkv", ".webm", ".npy", ".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"),
)
"""Endings of files that may hold samples: a warning names those that are not read."""

_MOST_NAMED = 3

_THREADS = 16  # that wait for a file system at the same time
_FILES_PER_TASK = 32
_MOST_BYTES = 2**28  # of a remembered listing: a hundred bytes for each folder


class Entry(NamedTuple):
    """An entry of a folder. Links are followed, but for `is_link`."""

    name: str
    is_folder: bool
    is_file: bool  # a regular one
    is_link: bool


@dataclass
class Listed:
    """The folders that `list_folder` has listed within a block."""

    entries: dict[Path, list[Entry]] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)  # modification time, ns, of each folder before it was listed


_listed: ContextVar[Listed | None] = ContextVar("_listed", default=None)


@contextmanager
def list_once() -> Iterator[Listed]:
    """Within the block, no folder is listed a second time: the first listing counts. Keeps 150 bytes an entry."""
    token = _listed.set(listed := Listed())
    try:
        yield listed
    finally:
        _listed.reset(token)


def list_folder(folder: Path) -> list[Entry]:
    """List a folder without hidden entries, sorted by name; asks the file system about links only, not about each file.

    Raises:
        UserError: it cannot be listed.
    """
    listed = _listed.get()
    if listed is not None and folder in listed.entries:
        return listed.entries[folder]
    try:
        time_ns = folder.stat().st_mtime_ns
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror}). Give yourself the right to read it.") from None
    described = sorted(_describe_entry(item) for item in visible)
    if listed is not None:
        listed.entries[folder] = described
        listed.times[str(folder.absolute())] = time_ns
    return described


def _describe_entry(entry: os.DirEntry[str]) -> Entry:
    try:
        return Entry(entry.name, entry.is_dir(), entry.is_file(), entry.is_symlink())
    except OSError:  # a link to itself, or to where nobody may look: neither a folder nor a file that can be read
        return Entry(entry.name, is_folder=False, is_file=False, is_link=True)


def remember_listing(path: Path, listed: Listed, result: str, *, raw: Path) -> None:
    """Write down what followed from a listing of `raw`; for `recall_listing`.

    Of a family that lists folders without `list_folder`, only the time of `raw` itself is known.
    """
    times = listed.times or {str(raw.absolute()): raw.stat().st_mtime_ns}
    write_json(path, {"folders": times, "result": result, "is_complete": bool(listed.times)})


def recall_listing(path: Path, *, only_complete: bool = True) -> str | None:
    """Return what followed from a listing, if its folders have the same entries now; None if they are not known.

    Asks for each folder, and for no file: a file that was overwritten in place goes unnoticed.

    Args:
        only_complete: return None if the times of the folders in `raw` were not known.
    """
    try:
        content = load_json(path, most_bytes=_MOST_BYTES)
        folders, result = {str(name): int(time) for name, time in content["folders"].items()}, str(content["result"])
        if only_complete and not content.get("is_complete", True):
            return None
        with ThreadPoolExecutor(_THREADS) as pool:
            times = list(pool.map(lambda name: Path(name).stat().st_mtime_ns, folders))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None  # nothing was remembered, it is damaged, or a folder is gone: then all is listed again
    return result if times == list(folders.values()) else None


def list_files(folder: Path, suffixes: Collection[str], *, depth: int | None = None) -> list[Path]:
    """List the files in a folder and below it with one of these suffixes (lower case), sorted.

    Links are followed; hidden files and folders, and a folder that does not exist, count as empty.

    Args:
        depth: levels of sub-folders to enter; None: all.

    Raises:
        UserError: a folder cannot be listed or is inside itself by a link, or a file is no regular file, a link to
            nothing, or has a name that is not UTF-8.
    """
    files: list[Path] = []
    if folder.is_dir():
        _collect_files(folder, suffixes, depth, {_identify(folder): folder}, files)
    return sorted(files)


def list_named(raw: Path, suffixes: Collection[str]) -> list[tuple[str, Path]]:
    """List the files in a folder as `list_files` does, each with its name below it; of a file, the file itself."""
    if raw.is_file():
        return [(raw.name, raw)]
    return [(path.relative_to(raw).as_posix(), path) for path in list_files(raw, suffixes)]


def find_listed(raw: Path, name: str, *, where: str, folders: Sequence[Path] = (), tails: bool = False) -> Path | None:
    """Return the file that a table or an annotation file names; None if it is missing.

    A name is relative to one of `folders`, or absolute. An absolute one outside of `raw` comes from another machine,
    and means its longest tail that exists. Composed and decomposed letters are the same: a Mac writes accents the other
    way round.

    Args:
        where: the place of the name, for the error.
        folders: in the order of the search, all inside `raw`; none: `raw` alone.
        tails: whether every name means its longest tail that exists.

    Raises:
        UserError: the name leads to a file outside of `raw`, and no tail of it is in `raw`. Links in `raw` may lead
            anywhere.
    """
    root, folders = raw.absolute(), folders or (raw,)
    full = [Path(os.path.normpath(folder.absolute() / name)) for folder in folders if "\0" not in name]
    inside = [path.relative_to(root) for path in full if path.is_relative_to(root)]
    for path in inside:
        if (file := find_file(raw, path.parts)) is not None:
            return file
    is_foreign = not inside and Path(name).is_absolute()
    parts = [part for part in Path(name).parts if part not in ("/", "//", os.pardir)]
    for folder in folders if full and (tails or is_foreign) else ():
        for start in range(len(parts)):
            if (file := find_file(folder, parts[start:])) is not None:
                return file
    if inside or not any(map(_is_file, full)):
        return None
    raise UserError(f"{where}: {name!a} is outside of {raw}. Move the file into it, and name it from there.")


def find_file(folder: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of this name in a folder, however its accents are composed; None if there is none.

    Raises:
        UserError: several files have the name, if composed and decomposed letters are the same.
    """
    path = folder.joinpath(*parts)
    if _is_file(path):
        return path
    if all(part.isascii() for part in parts):
        return None
    matches = [folder]
    for part in parts:
        same = compose_letters(part)
        entries = [(place, entry.name) for place in matches if place.is_dir() for entry in list_folder(place)]
        matches = [place / name for place, name in entries if compose_letters(name) == same]
    matches = [place for place in matches if place.is_file()]
    if len(matches) > 1:
        raise UserError(f"{matches[0]} and {matches[1]}: two spellings of one name. Rename one of them.")
    return matches[0] if matches else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()  # False for a name with a zero byte
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # no file has such a name
            raise
        return False


def describe_unread(raw: Path, is_read: Callable[[Path], bool]) -> tuple[str, str]:
    """Return which files below a folder are not read, for people: those that may hold samples, and the others."""
    media: list[str] = []
    other: list[str] = []
    for path in _walk(raw, {_identify(raw)}):
        if not is_read(path):
            (media if path.suffix.lower() in _MEDIA else other).append(str(path.relative_to(raw)))
    return count_by_suffix(media), count_by_suffix(other)


def count_by_suffix(paths: Iterable[str]) -> str:
    """Return such as "2 .raw (a.raw, b.raw), 1 .txt (notes.txt)"."""
    by_suffix: dict[str, list[str]] = {}
    for path in paths:
        by_suffix.setdefault(Path(path).suffix.lower() or "without ending", []).append(path)
    return ", ".join(
        f"{len(names)} {suffix} ({join_names(names, most=_MOST_NAMED)})" for suffix, names in sorted(by_suffix.items())
    )


def _walk(folder: Path, outer: Set[tuple[int, int]]) -> Iterator[Path]:
    """Yield all files, and folders that cannot be listed; one that a link makes contain itself is not entered again."""
    try:
        entries = list_folder(folder)
    except UserError:  # whoever needs it has refused it
        yield folder
        return
    for entry in entries:
        path = folder / entry.name
        if not entry.is_folder:
            yield path
        elif (identity := _identify(path)) not in outer:
            yield from _walk(path, outer | {identity})


def check_sources(samples: "Iterable[Sample]") -> "Iterator[tuple[Sample, os.stat_result | None]]":
    """Yield samples after checking their names and raw files, with the stat(2) of the file; None without one.

    Costs one `stat` for each sample, of which many run at the same time, and about 150 bytes. Samples may share a raw
    file. A file is refused if a link makes it appear in two folders, because its copies would be dealt out to
    training and test. Hard links, and links with another name, are taken as meant.

    Raises:
        UserError: as in `list_files`, or a link makes a file appear twice.
    """
    stream = iter(samples)
    folders: dict[int, int] = {}  # hash of (device, inode, name) -> hash of the folder
    with ThreadPoolExecutor(_THREADS) as pool:
        while chunk := list(islice(stream, _THREADS * _FILES_PER_TASK)):
            tasks = [chunk[begin : begin + _FILES_PER_TASK] for begin in range(0, len(chunk), _FILES_PER_TASK)]
            stats = pool.map(_stat_sources, tasks)
            for sample, status in zip(chunk, (info for batch in stats for info in batch), strict=True):
                if sample.source is not None and status is not None:
                    path, folder = sample.source, hash(sample.source.parent)
                    first = folders.setdefault(hash((status.st_dev, status.st_ino, path.name)), folder)
                    if first != folder and status.st_nlink == 1:
                        raise UserError(
                            f"{path}: reached twice, because a link leads to it or to a folder that contains it, so "
                            "its copies would be in training and test. Remove the link. All links: find RAW -type l"
                        )
                yield sample, status


def _stat_sources(samples: "Sequence[Sample]") -> list[os.stat_result | None]:
    """Check names and raw files; return what stat(2) says of them."""
    stats: list[os.stat_result | None] = []
    for sample in samples:
        if sample.source is not None:
            _check_name(sample.source)
        stats.append(None if sample.source is None else _check_regular(sample.source))
    return stats


def _collect_files(
    folder: Path,
    suffixes: Collection[str],
    depth: int | None,
    outer: dict[tuple[int, int], Path],
    files: list[Path],
) -> None:
    """Add the files of a folder to `found`.

    Args:
        outer: the folder and all around it, by identity.
    """
    for entry in list_folder(folder):
        path = folder / entry.name
        if entry.is_folder:
            if depth == 0:
                continue
            identity = _identify(path)
            if identity in outer:
                raise UserError(
                    f"{path}: a link to {outer[identity]}, the folder that it is in, so each sample would be there "
                    f"twice. Remove it: rm {shlex.quote(str(path))}"
                )
            below = None if depth is None else depth - 1
            _collect_files(path, suffixes, below, outer | {identity: path}, files)
        elif path.suffix.lower() in suffixes:
            _check_name(path)
            if entry.is_link or not entry.is_file:
                _check_regular(path)
            files.append(path)


def _identify(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


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
        status = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            raise UserError(f"{path}: no such file any more. Run the same command again.") from None
        raise UserError(
            f"{path}: a link to {path.readlink()}, which does not exist. Restore that file, or remove the link: "
            f"rm {shlex.quote(str(path))}"
        ) from None
    except OSError as error:  # a link to itself
        raise UserError(f"{path}: cannot be read ({error.strerror}). Repair or remove it.") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"{path}: is a named pipe, a device or another special file, and reading it may never end. "
            f"Remove it: rm {shlex.quote(str(path))}"
        )
    return status
