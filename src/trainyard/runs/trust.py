"""Refuses to execute what others own or can change in a run folder: the one check of every command that resumes runs.

Resuming runs the folder's copy of the code, its batch script and the cluster file that it names, and writes through the
folder's links. Owner and mode are all that can be checked: an unpacked archive belongs to whoever unpacked it.
"""

import grp
import os
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, NamedTuple

from trainyard.errors import UserError
from trainyard.files import name_user
from trainyard.runs.folder import CONFIG, ENV_FILE, SUBMISSION
from trainyard.runs.submission import read_submission
from trainyard.runs.sweep_file import FILE as SWEEP_FILE

_OWNED_ALONE = (CONFIG, ENV_FILE, SWEEP_FILE, "code*", "jobs", "slurm")
"""Entries of a run's or a sweep's folder that are executed or believed. A group may write the others."""

_OF_TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Folders that are not searched: trackers put links to their own logs there, and resuming opens nothing in them."""

_UNUSED_LINKS = ".submission_file_*"
"""Links that submitit leaves behind, with absolute paths, which lead elsewhere once a run has been moved."""

_NOBODY = 65534
_ROOT = 0


class UntrustedRun(UserError):
    """A command would execute files that others own or can change."""


class _Fault(NamedTuple):
    path: Path
    words: str
    kind: Literal["owner", "unknown owner", "mode", "entry"]


def require_trust(
    folders: Sequence[Path],
    *,
    uses: Sequence[str],
    jobs_dir: Path,
    named: Sequence[Path] = (),
    is_chosen: Callable[[Path], bool],
    trusted: bool,
    command: str,
) -> None:
    """Check the folders of runs, and of their sweep, before anything in them is executed or written.

    A folder, and its files that are executed or believed, must belong to this user, who alone can change it. No link
    may lead out of a folder. The code and the cluster file that a submission names are checked likewise.

    Args:
        folders: the runs, after their sweep if a sweep is continued.
        uses: what of the last submission will be used: of "code", "jobs" and "cluster_file".
        jobs_dir: the folder of families in use; checked if it is inside one of the folders.
        named: folders of code that the folders name in another way; checked like those of a submission.
        is_chosen: tells whether the user gets this cluster file without the folder, so that it need not be checked.
        trusted: the user knows all this: nothing is checked but that the folders can be written.
        command: as the user typed it, without the flag.

    Raises:
        UntrustedRun: names the owner, the mode, the executed files, and the command to type.
    """
    roots = list(dict.fromkeys(folder.resolve() for folder in folders))
    if trusted:
        for root in roots:
            _require_writable(root)
        return
    for root in roots:
        faults = list(_search_folder(root, alone=_OWNED_ALONE))
        if not faults and jobs_dir.is_dir() and jobs_dir.resolve().is_relative_to(root):
            faults = list(_search_folder(jobs_dir.resolve()))
        if faults:
            raise UntrustedRun(_describe(faults, root, executed=_list_executed(root), command=command))
    for root in roots:
        submitted = _list_named(root, uses) if uses and (root / SUBMISSION).is_file() else []
        for path in (*submitted, *named):
            faults = list(_search_named(path, roots, is_chosen))
            if faults:
                raise UntrustedRun(_describe(faults, path, executed=_list_executed(root), command=command))


def require_own_file(file: Path, *, purpose: str) -> None:
    """Refuse a file of this user's if another user owns it, or others can change it.

    Args:
        purpose: of the file, for the message.

    Raises:
        UntrustedRun: names them, and the command to type.
    """
    place = file.resolve()
    faults = list(_find_faults(place, place.stat(), [os.geteuid(), _ROOT]))
    if faults:
        close = (
            ""
            if {fault.kind for fault in faults} != {"mode"}
            else f"close it: chmod go-w {shlex.quote(str(place))}, or "
        )
        raise UntrustedRun(
            f"{file}: {faults[0].words}. It decides {purpose}, so it must be yours alone. Read it, then {close}move it "
            f"away and write your own: mv {shlex.quote(str(place))} {shlex.quote(f'{place}.old')}"
        )


def _require_writable(root: Path) -> None:
    """Refuse a folder in which this user cannot replace the files of its owner, as every attempt does."""
    status = root.stat()
    is_owner = os.geteuid() == _ROOT or status.st_uid == _find_user_on(root)
    if not os.access(root, os.W_OK) or (status.st_mode & stat.S_ISVTX and not is_owner):
        raise UntrustedRun(
            f"{root}: belongs to {name_user(status.st_uid)}, mode {_format_mode(status)}, and you cannot write there. "
            f"Resume a copy of it, with today's code: cp -r {shlex.quote(str(root))} COPY; "
            "trainyard resume COPY --update-code"
        )


# The search


def _search_folder(root: Path, *, alone: Sequence[str] = ("*",), owners: Sequence[int] = ()) -> Iterator[_Fault]:
    """Yield the faults of a folder and of its content.

    Args:
        alone: names of the entries that nobody else may own or change, as patterns.
        owners: who may own it besides this user.
    """
    allowed = [_find_user_on(root), *owners]
    if own := list(_find_faults(root, root.stat(), allowed)):
        yield from own
        return  # whoever can change the folder can replace everything in it
    for path, status in _walk(root):
        if fault := _find_odd_kind(path, status, root):
            yield fault
        elif stat.S_ISLNK(status.st_mode):
            continue  # its mode means nothing, and its target is checked where it is
        elif any(fnmatch(path.relative_to(root).parts[0], pattern) for pattern in alone):
            yield from _find_faults(path, status, allowed)


def _search_named(path: Path, roots: Sequence[Path], is_chosen: Callable[[Path], bool]) -> Iterator[_Fault]:
    """Yield the faults of the code or the cluster file that a submission names, if it is outside the folders."""
    place = path.resolve()
    if any(place.is_relative_to(root) for root in roots) or not place.exists():
        return
    if place.is_dir():
        # Root could change the interpreter as well: root's files and a container's mounts are as good as that.
        yield from _find_faults(place.parent, place.parent.stat(), [_find_user_on(place.parent), _ROOT])
        yield from _search_folder(place, owners=(_ROOT,))
    elif not is_chosen(path):
        yield from _find_faults(place, place.stat(), [os.geteuid(), _ROOT])


def _find_faults(path: Path, status: os.stat_result, owners: Sequence[int]) -> Iterator[_Fault]:
    """Yield why a file or a folder is not the owner's alone."""
    if status.st_uid not in owners:
        kind: Literal["owner", "unknown owner"] = "owner" if _has_name(status.st_uid) else "unknown owner"
        words = f"belongs to {name_user(status.st_uid)}, mode {_format_mode(status)}, and you are "
        yield _Fault(path, words + name_user(owners[0]), kind)
    # In a sticky folder only the owner of an entry can replace it.
    protects_entries = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    others = status.st_mode & stat.S_IWOTH
    if others or (status.st_mode & stat.S_IWGRP and not protects_entries):
        who = "everybody" if others else f"the group {_name_group(status.st_gid)}"
        words = f"{who} can change it: its mode is {_format_mode(status)}, its owner {name_user(status.st_uid)}"
        yield _Fault(path, words, "mode")


def _find_odd_kind(path: Path, status: os.stat_result, root: Path) -> _Fault | None:
    if stat.S_ISLNK(status.st_mode):
        target = Path(os.path.realpath(path))  # of a link to itself: the link
        inside = target.is_relative_to(root) or fnmatch(path.name, _UNUSED_LINKS)
        return None if inside else _Fault(path, f"is a link that leads out of the folder, to {target}", "entry")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return _Fault(path, "is neither a file nor a folder", "entry")
    return None


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below a folder, without following links. Unreadable files cannot be executed either."""
    for path in sorted(root.iterdir()):
        status = path.lstat()
        yield path, status
        is_readable = stat.S_ISDIR(status.st_mode) and os.access(path, os.R_OK | os.X_OK)
        if is_readable and path.name not in _OF_TRACKERS:
            yield from _walk(path)


def _find_user_on(folder: Path) -> int:
    """Return which user this process is on the file system of a folder.

    Usually its effective user. NFS servers may map all users, or root, to one of theirs, and so do file systems that
    some containers mount: then a new file shows whose files ours are.
    """
    if folder.stat().st_uid == os.geteuid():
        return os.geteuid()
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:  # not writable: certainly not ours
        return os.geteuid()


def _list_named(root: Path, keys: Sequence[str]) -> list[Path]:
    """Return the code, the jobs in it and the cluster file that a folder's submission names."""
    submission = read_submission(root)
    return [Path(submission[key]) for key in keys if key in submission]


def _list_executed(root: Path) -> list[str]:
    """Return the files that a command would execute or believe, for the message."""
    if not os.access(root, os.R_OK | os.X_OK):
        return []
    names = sorted(p.name for p in root.iterdir() if any(fnmatch(p.name, pattern) for pattern in _OWNED_ALONE))
    try:
        named = _list_named(root, ("code", "cluster_file")) if (root / SUBMISSION).is_file() else []
    except UserError:  # damaged, which matters only to those who trust the folder
        named = []
    return [*names, *(str(path) for path in named if not path.is_relative_to(root))]


# The message


def _describe(faults: Sequence[_Fault], folder: Path, *, executed: Sequence[str], command: str) -> str:
    first, kinds = faults[0], {fault.kind for fault in faults}
    more = f" ({len(faults) - 1} more like it)" if len(faults) > 1 else ""
    uses = f" '{command}' would use, as you: {', '.join(executed)}." if executed else ""
    if kinds == {"mode"}:
        outermost = first.path if folder.is_relative_to(first.path) else folder
        close = f"chmod -R go-w {shlex.quote(str(outermost))}"
        advice = f"If nobody else has changed anything there, close it: {close} - or use it as it is: {command} --trust"
    else:
        hint = f" {_UNKNOWN_OWNER}" if "unknown owner" in kinds else ""
        advice = f"If you have read that, and trust whoever wrote it: {command} --trust{hint}"
    return f"{first.path}: {first.words}{more}.{uses} {advice}"


_UNKNOWN_OWNER = (
    f"\nA container or an NFS server may number users differently, and shows those it does not know as {_NOBODY} "
    '(nobody). If the folder is yours, start as its owner, such as docker run --user "$(id -u):$(id -g)".'
)


def _format_mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _has_name(uid: int) -> bool:
    return uid != _NOBODY and name_user(uid) != f"uid {uid}"


def _name_group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
