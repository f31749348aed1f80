"""Atomic file writes, full disks, file hashes, and locks that the kernel releases."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import pwd
import re
import resource
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any, BinaryIO

from trainyard.errors import DiskError, DiskFull, FormatError, UserError
from trainyard.text import format_size, quote_path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a write that failed because the disk or quota is full or the file system is read-only."""

DISK_FAILED = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENXIO, errno.EUCLEAN)
"""Error numbers of a disk, or of a network file system, that does not work."""

PACKED_DATA, CHECKPOINT, RUN, SWEEP, EVALUATION = "packed data", "checkpoint", "run folder", "sweep", "evaluation"
FORMATS = {PACKED_DATA: 1, CHECKPOINT: 1, RUN: 1, SWEEP: 1, EVALUATION: 1}
"""The format number of each kind of stored files. A change of the stored fields raises it: see docs/formats.md."""
_INSTEAD = {
    PACKED_DATA: "pack the raw files again: trainyard pack JOB RAW OUT",
    CHECKPOINT: "train again: trainyard run JOB",
    RUN: "train again: trainyard run JOB",
    SWEEP: "sweep again: trainyard sweep JOB --sweep OPTION=VALUE,VALUE",
    EVALUATION: "delete its folder, and evaluate again: trainyard evaluate RUN FOLDER",
}
"""The remedy for a file of another format."""

_PARTIAL = ".partial"
_BLOCK = 1 << 20


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True, inside: bool = False) -> None:
    """Write or replace the file `path`, as `open_atomically` does.

    Args:
        content: text is encoded as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_atomically(path, size_bytes=len(data), durable=durable, inside=inside) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(
    path: Path, *, size_bytes: int = 0, durable: bool = True, inside: bool = False
) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends: a reader, a kill or a crash finds the old or the new one.

    The folder is opened once, and the file appears there under a name that is not used: whatever others plant or
    rename in a folder that they share, nothing is written elsewhere.

    Args:
        size_bytes: what will be written, for the message of a full disk.
        durable: wait until the content is on disk, so that it survives a power cut; off for files that are written
            every few seconds and worthless after a crash.
        inside: the folder is one of a run's or a sweep's: it is created if it is missing, and must not be a link.
    """
    if path.is_dir() and not path.is_symlink():
        raise _make_refusal(path, "regular file")
    partial = name_partial(path).name
    with name_failed_file(path, size_bytes=size_bytes), _open_folder(path.parent, inside=inside) as folder:
        try:
            with os.fdopen(os.open(partial, _CREATE, 0o666, dir_fd=folder), "wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            replace(partial, path.name, folder=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=folder)
        if durable:
            os.fsync(folder)


def rename(source: Path, target: Path) -> None:
    """Give a file, or a folder with all that is in it, its final name.

    Its content is on disk before it has that name, and the name when this returns: a power cut leaves all or nothing.

    Args:
        target: replaced if it is a file or an empty folder.
    """
    tree = list(os.walk(source, topdown=False))
    with ThreadPoolExecutor(DISK_THREADS) as pool:  # a disk flushes many files in the time of a few
        list(pool.map(fsync_path, [Path(folder, name) for folder, _, names in tree for name in names]))
    for folder in [Path(folder) for folder, *_ in tree] or [source]:
        fsync_path(folder)
    replace(source, target)
    fsync_path(target.parent)


def replace(source: Path | str, target: Path | str, *, folder: int | None = None) -> None:
    """Rename without flushing anything, for `rename` and for names that a power cut may undo.

    Args:
        folder: its descriptor, if the names are relative to it.
    """
    moved = os.stat(source, dir_fd=folder, follow_symlinks=False)
    try:
        os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:  # over NFS a repeated request finds that the first one has done it
        if not os.path.samestat(moved, os.stat(target, dir_fd=folder, follow_symlinks=False)):
            raise


DISK_THREADS = 16
"""Threads that ask for small files of many runs: each waits milliseconds for a shared file system."""

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def _open_folder(folder: Path, *, inside: bool) -> Iterator[int]:
    """Yield a descriptor of a folder, through which files in it are named."""
    if inside:
        make_folder_inside(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if inside else 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def create_file(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a new file to write; what stands under its name, such as the leftover of a killed writer, is removed."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, _CREATE, 0o666), "wb", buffering)


def name_partial(path: Path) -> Path:
    """Return a name next to `path` under which it is written: nobody can guess it, and it is not used again."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PARTIAL}")


def make_folder_inside(folder: Path) -> Path:
    """Create a folder in one that others may write to, or check that it is there and no link; return it.

    Raises:
        UserError: it is a link, through which files would be written elsewhere.
    """
    _refuse_link(folder)
    if folder.exists() and not folder.is_dir():
        raise _make_refusal(folder, "folder")
    folder.mkdir(exist_ok=True)
    return folder


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: is a link, and a write would go elsewhere. Remove it: rm {quote_path(path)}")


def _open_to_append(path: Path) -> FileIO:
    """Open a file at its end, or create it; not through a link, and no pipe, on which opening could block.

    Raises:
        UserError: something else is there.
    """
    _refuse_link(path)
    if path.exists() and not path.is_file():
        raise _make_refusal(path, "regular file")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return FileIO(os.open(path, flags, 0o666), "ab")


def _make_refusal(path: Path, expected: str) -> UserError:
    move = f"mv {quote_path(path)} {quote_path(f'{path}.old')}"
    return UserError(f"{path}: is no {expected}, and one is to be written there. Move it away: {move}")


def remove_partials(folder: Path) -> None:
    """Remove partial files that killed writers left in a folder. Call it only when nobody is writing there."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        partial.unlink()


@contextlib.contextmanager
def create_folder(path: Path) -> Iterator[Path]:
    """Yield a new empty folder, which becomes `path` when the block ends, and is deleted if it raises.

    Its content is on disk before it has its name, and the name when this returns: a power cut leaves all or nothing.
    A killed process's remains are never in the way, whatever its process id: in a container all have the same.

    Args:
        path: does not exist, or is an empty folder.
    """
    partial = name_partial(path)
    partial.mkdir(parents=True)
    try:
        with name_full_disk(path):
            yield partial
            rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_partial_folders(path: Path) -> None:
    """Remove what killed `create_folder(path)` blocks left. Call it only when nobody is creating `path`."""
    leftover = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+{re.escape(_PARTIAL)}")
    for partial in path.parent.iterdir():
        if partial.is_dir() and leftover.fullmatch(partial.name):
            shutil.rmtree(partial, ignore_errors=True)  # it is in nobody's way: its name is never used again


def remove_partial_files(path: Path) -> None:
    """Remove what killed writes of the file `path` left. Call it only when nobody writes it: a write would fail."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def copy_folder(source: Path, into: Path, *, leave_out: Callable[[str], bool]) -> None:
    """Copy a folder's files with their times and modes, except that nobody else may change the copies.

    Links are followed. `shutil.copytree` would hide the error number of a full disk.

    Args:
        into: does not exist.
        leave_out: tells by its name which file or folder is not copied.
    """
    into.mkdir()
    for path in source.iterdir():
        if leave_out(path.name):
            continue
        if path.is_dir():
            copy_folder(path, into / path.name, leave_out=leave_out)
        elif path.is_file():
            status, copied = path.stat(), into / path.name
            try:
                shutil.copyfile(path, copied)
            except OSError as error:
                if error.errno in DISK_FULL:
                    error.filename = str(copied)  # it names the source
                raise
            os.utime(copied, ns=(status.st_atime_ns, status.st_mtime_ns))
            copied.chmod(_close(status.st_mode))
        else:
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    into.chmod(_close(source.stat().st_mode))


def _close(mode: int) -> int:
    """Return a mode without the permission of others to write."""
    return stat.S_IMODE(mode) & ~0o022


class AppendedFile:
    """A file that grows at its end. Each write goes straight to the kernel, so closing it repeats none that failed."""

    def __init__(self, path: Path) -> None:
        self._path, is_new = path, not path.exists()
        with name_failed_file(path):
            self._file = _open_to_append(path)
            if is_new:
                fsync_path(path.parent)

    def write(self, data: bytes) -> None:
        """Append all of `data`; on a full disk a part of it may be in the file."""
        with name_failed_file(self._path, size_bytes=len(data)):
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> int:
        """Flush to disk; return the length of the file in bytes."""
        with name_failed_file(self._path):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def name_failed_file(path: Path, *, size_bytes: int = 0) -> Iterator[None]:
    """Add to an OSError of the block its file and the space that it needs: read(2) and write(2) do not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        if size_bytes:
            error.add_note(f"It needs {format_size(size_bytes)}.")
        raise


@contextlib.contextmanager
def forgive_failed_write(tell: Callable[[OSError], object]) -> Iterator[None]:
    """Report an error of the block instead of raising it: for files worthless after a crash, or easily made again.

    Raises:
        OSError: the disk is full or read-only: required files would fail as well.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        tell(error)


@contextlib.contextmanager
def name_full_disk(folder: Path) -> Iterator[None]:
    """Make an error of a full disk say that it was the disk of `folder`, if it names no file.

    For blocks in which families and libraries write. Some hide the error number: then a disk without room tells.
    """
    try:
        yield
    except Exception as error:
        failed = _find_full_disk(error)
        if failed is not None:
            failed.filename = failed.filename or str(folder)
        elif not isinstance(error, UserError) and shutil.disk_usage(find_existing(folder)).free < _PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


_PAGE_BYTES = 4096  # a failed write leaves less


@contextlib.contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn every error in the block that comes from a full, read-only or failing disk into one sentence.

    For the places where commands and attempts end; everything below raises plain OSErrors, or UserErrors from them.

    Args:
        folder: where the block writes, for an error that does not name its file.

    Raises:
        DiskFull: it is full or read-only.
        DiskError: it failed.
        UserError: there is no folder for temporary files.
    """
    before, threading.excepthook = threading.excepthook, _print_thread_error
    try:
        yield
    except (DiskFull, DiskError):
        raise
    except Exception as error:
        broken = _find_failed(error, DISK_FAILED)
        if broken is not None and broken.filename is not None:  # else of a terminal or a pipe
            raise DiskError(_describe_failed_disk(broken)) from error
        if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):  # of `tempfile`
            raise UserError(
                f"No folder for temporary files can be written to: {str(error).partition(' in ')[2]}. Name one: "
                "export TMPDIR=FOLDER. In a container that is read-only: docker run --tmpfs /tmp:exec ..."
            ) from error
        failed = _find_full_disk(error)
        if failed is None:
            raise
        message = str(error) if isinstance(error, UserError) else _describe_full_disk(failed, folder)
        raise DiskFull(message) from error
    finally:
        threading.excepthook = before


def _print_thread_error(error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, unless a full disk ended it: TensorBoard raises that again where it is used."""
    if _find_full_disk(error.exc_value) is None:
        threading.__excepthook__(error)


def raise_failed_disk(error: BaseException | None, path: Path) -> None:
    """Raise the error of a disk that failed, if `error` comes from one: the content of `path` is not at fault."""
    failed = _find_failed(error, DISK_FAILED)
    if failed is not None:
        raise OSError(failed.errno, failed.strerror, failed.filename or str(path))


def _find_full_disk(error: BaseException | None) -> OSError | None:
    """Return the failed write that an exception comes from, if the disk was the reason."""
    return _find_failed(error, DISK_FULL)


def _find_failed(error: BaseException | None, numbers: Sequence[int]) -> OSError | None:
    """Return the error of a file that an exception comes from, if it is one of these numbers."""
    seen: list[BaseException] = []  # libraries raise errors again, and then two may name each other
    while error is not None and not any(error is cause for cause in seen):
        if isinstance(error, OSError) and error.errno in numbers:
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def _describe_failed_disk(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return (
        f"{os.fsdecode(error.filename)}: {error.strerror} ({name}): the disk, or the network to it, failed, and not "
        "the code. The system's messages: dmesg, journalctl -k. Then start the same command again: it continues where "
        "this one stopped."
    )


def _describe_full_disk(error: OSError, folder: Path) -> str:
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder
    disk = find_existing(path)
    room = f"{format_size(shutil.disk_usage(disk).free)} are free on the disk of {disk} (a quota may allow less)"
    needed = " ".join(["", *getattr(error, "__notes__", [])])
    remedy = "Have it mounted for writing" if error.errno == errno.EROFS else "Make room (trainyard gc shows what for)"
    return (
        f"{path}: not written: {error.strerror}.{needed} {room}. {remedy}, and start the same command "
        "again: it continues where this one stopped."
    )


def require_writable(folder: Path, *, flag: str) -> None:
    """Check that a folder is there and can be written to, or can be created; creates nothing.

    Args:
        flag: with which the folder is named, such as "--results" or "data.cache=".

    Raises:
        UserError: it cannot; has the reason and the next command.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        where, before = "" if existing == folder else f" in {existing}", flag if flag.endswith("=") else f"{flag} "
        raise UserError(
            f"{before}{folder}: nothing can be written there: {error.strerror}{where}. Name a folder that you may "
            f"write to: {before}FOLDER"
        ) from error


def find_existing(path: Path) -> Path:
    """Return the folder nearest to `path`, itself or above it, that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def write_json(path: Path, value: Any, *, durable: bool = True, inside: bool = False) -> None:
    """Write or replace the file `path` with readable JSON, as `write_atomically` does."""
    write_atomically(path, json.dumps(value, indent=2) + "\n", durable=durable, inside=inside)


def open_untrusted(path: Path) -> BufferedReader:
    """Open a file that may be another person's, for reading.

    Raises:
        OSError: it cannot be read; also if it is a link, which could show a file from elsewhere, or a pipe, device or
            folder, on which reading could block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise OSError(error.errno, "it is a link, and a link may lead out of its folder", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, *, most_bytes: int) -> bytes:
    """Return the content of a file that may be another person's (see `open_untrusted`), if it is small enough.

    Raises:
        OSError: it cannot be read, or is larger than `most_bytes`.
    """
    with name_failed_file(path), open_untrusted(path) as file:
        blocks = iter(lambda: file.read(_BLOCK), b"")  # one read of `most_bytes` would take as much memory
        data = b"".join(itertools.islice(blocks, most_bytes // _BLOCK + 2))
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes, the most that is expected", str(path))
    return data


def load_json(path: Path, *, most_bytes: int = 2**24) -> Any:
    """Read a file of JSON that may be another person's.

    Raises:
        OSError: as for `read_file`.
        ValueError: as for `parse_json`.
    """
    return parse_json(read_file(path, most_bytes=most_bytes))


def parse_json(text: bytes | str, *, parse_float: Callable[[str], float] = float) -> Any:
    """Parse JSON that may be damaged or hostile.

    Args:
        parse_float: makes a number of one with a point or an exponent.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        value = json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("a number has thousands of digits") from None
    marks = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, marks)) > _MOST_LEVELS and _is_deeper(value, _MOST_LEVELS):  # type: ignore[arg-type]
        raise ValueError("nested too deeply")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in inner if isinstance(item, dict | list))


_MOST_LEVELS = 100


def check_format(path: Path, number: object, *, kind: str) -> None:
    """Compare the format number that a file states with the one that this version reads.

    Args:
        found: the number; None if the file states none.
        kind: of stored files, a key of `FORMATS`.

    Raises:
        FormatError: they differ.
    """
    if type(number) is not int or number != FORMATS[kind]:
        raise FormatError(
            f"{path}: the format of this {kind} is {str(number)[:20]}, expected {FORMATS[kind]}, which this version of "
            f"Trainyard reads. Use the version that wrote it, or {_INSTEAD[kind]}"
        )


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_failed_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raise_open_files(more: int) -> int:
    """Raise the soft limit on open files, often 1024, to `more` than are open now; return how many more can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return more
    used = len(list(Path("/proc/self/fd").iterdir()))
    if soft < used + more:
        soft = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - used


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; reads it in chunks, because it may be larger than memory."""
    with name_failed_file(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def restrict_umask() -> Iterator[None]:
    """Create files and folders that only their owner can change, whatever the umask, until the block ends.

    The umask belongs to the whole process, and child processes inherit it.
    """
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def let_group_read() -> None:
    """Create files that the group may read, whatever the umask: of this process, its children and its Slurm jobs."""
    os.umask(os.umask(0o077) & ~0o050)


def name_user(uid: int) -> str:
    """Return how a user is called in messages: "ann (uid 1000)"."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def make_own_folder(path: Path) -> Path:
    """Create a folder that only this user can write to, or check that there is one; return it.

    Raises:
        UserError: it cannot be created, or others own it or can write to it.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UserError(f"{path} is not a folder that only this user can write to")
    return path


def create_common_folder(folder: Path, *, group: str = "") -> None:
    """Create a folder for entries of several users, if it is missing; only the owner of an entry can replace it.

    Args:
        group: whose members may create entries; "": whoever the umask lets write.

    Raises:
        UserError: this user is not in the group, or there is none of this name.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    for parent in missing:
        fsync_path(parent.parent)
    if group:
        try:
            share_folder(folder, group)
        except UserError:
            folder.rmdir()
            raise
    elif (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o022:
        folder.chmod(mode | stat.S_ISVTX)


def share_folder(folder: Path, group: str, *, sticky: bool = True) -> None:
    """Let the members of a group create entries in a folder; new ones belong to the group.

    Args:
        sticky: only the owner of an entry can replace or delete it.

    Raises:
        UserError: this user is not in the group, or there is none of this name.
    """
    try:
        shutil.chown(folder, group=group)
    except (LookupError, PermissionError):
        raise UserError(
            f"{folder}: cannot be given to group '{group}', which the cluster file names: there is no such group here, "
            "or you are not in it. List your groups: id -Gn. Correct `group` in the cluster file, or leave it out."
        ) from None
    others = stat.S_IMODE(folder.stat().st_mode) & 0o005
    folder.chmod(0o2770 | others | (stat.S_ISVTX if sticky else 0))


def name_guard(path: Path) -> Path:
    """Return the file on which whoever makes or deletes `path` holds an `exclusive_lock`."""
    return path.with_name(f".{path.name.removesuffix(_PARTIAL)}.guard")


class FlockRefused(Exception):
    """The file system does not support flock."""


class LockHeld(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive_lock(guard: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an flock on the file `guard`; the kernel releases it if the process dies.

    Args:
        wait: until another process releases it.

    Raises:
        FlockRefused: the file system does not support flock; raised on entry.
        LockHeld: another process holds it, and `wait` is false.
    """
    with _open_to_append(guard) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockHeld from None
        except OSError as error:
            raise FlockRefused(error.strerror) from None
        yield
