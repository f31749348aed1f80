"""Lists disk usage and the runs that need it, and deletes the items that a person names: `trainyard gc`.

Nothing is listed that another user owns, that a link leads to, or that is outside of the run, the cache or the scratch
it is listed for. `unneeded` takes packed data only if all of this holds:

- It is in a cache that the user names (`--data`; default: ./data). Other folders that a run names are only protected.
- A run packed it there, and can again: the cache remembers from which raw files (`raw.remember_listing`), they are as
  they were, and the folder has no other files. Anything else may be the only copy, and goes only by its name.
- No unfinished run in the folder of runs names it, or has yet to pack data of its family.
- No process on any machine reads it: readers hold a shared flock on its index (`index.hold_packed`).
"""

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainyard.config.frozen import read_options
from trainyard.data.index import INDEX, is_index
from trainyard.data.lossy import LOSS
from trainyard.data.pack import JOURNAL
from trainyard.data.raw import recall_listing
from trainyard.errors import UserError
from trainyard.files import FlockRefused, LockHeld, exclusive_lock, name_guard, raise_failed_disk
from trainyard.runs.folder import CONFIG, format_run_name, list_newest_runs, read_env
from trainyard.runs.history import RunSnapshot, read_run
from trainyard.runs.lock import LOCK, RunLock
from trainyard.runs.manifest import list_checkpoints, select_checkpoint
from trainyard.text import align_columns, join_names, quote_path, suggest_nearest

_GIB = 2**30
_LEFTOVER_AGE_S = 3600  # a run is created within seconds: a younger folder may be one that is being created
_PACKED_FILE = re.compile(rf"{re.escape(INDEX)}|{JOURNAL}|{LOSS}|shard-\d{{5,9}}\.h5|\..+\.partial")
_SYNTHETIC = re.compile(r"[A-Za-z]\w*-synthetic-\d+-seed\d+-[0-9a-f]{8}(\.partial)?")
_NOT_DRAWN = re.compile(rf"\.?({_SYNTHETIC.pattern})(\.damaged(-\d+)?|\.[0-9a-f]+\.partial)")  # moved aside, or killed
_NEW = re.compile(r"\.new-[0-9a-f]+")
_STAGED = re.compile(r"[0-9a-f]{16}(\.partial)?")


@dataclass(frozen=True)
class DiskUsage:
    """Something that can be deleted on its own."""

    name: str  # as typed after --delete
    kind: str
    bytes: int
    needed_by: str  # which unfinished run needs it; "" if none does
    again: str  # how to get it back
    paths: tuple[Path, ...]
    kept_for: str = ""  # why `unneeded` leaves it although no run needs it; "" if it takes it
    run: Path | None = None  # whose lock a deletion takes
    guard: Path | None = None  # an flock that who makes it holds
    index: Path | None = None  # an flock that who reads it holds

    @property
    def is_unneeded(self) -> bool:
        """Whether `unneeded` takes it."""
        return not self.needed_by and not self.kept_for


def list_usage(runs_dir: Path, *, data_dirs: Sequence[Path], environ: Mapping[str, str]) -> list[DiskUsage]:
    """List what Trainyard keeps on this machine's disks, largest first within each kind.

    Reads file sizes, options and `env.json` of runs, and checkpoint manifests; costs one `stat` for each file, and for
    each folder of raw files.

    Args:
        runs_dir: folder of runs.
        data_dirs: caches of packed and synthetic data.
        environ: for the user's cache folder and scratch.
    """
    runs = [read_run(path) for path in list_newest_runs(runs_dir, None)] if runs_dir.is_dir() else []
    needs = [_find_needs(run) for run in runs if not run.is_done]
    caches = dict.fromkeys(folder.absolute() for folder in data_dirs if folder.is_dir())
    usages = [
        *(usage for cache in caches for usage in _list_data(cache, needs)),
        *(usage for run in runs if _is_below(run.run, runs_dir) for usage in _list_run(run, needs)),
        *_list_leftovers(runs_dir),
        *_list_caches(environ),
    ]
    kinds = list(dict.fromkeys(usage.kind for usage in usages))
    return sorted((usage for usage in usages if usage.bytes), key=lambda usage: (kinds.index(usage.kind), -usage.bytes))


def format_usage(usages: Sequence[DiskUsage], command: str = "trainyard gc") -> str:
    """Return the list for a terminal: a line for each, a sum, and the next command.

    Args:
        command: as it was typed, without --delete.
    """
    if not usages:
        return "Nothing here takes space."
    rows = [["KIND", "SIZE", "NEEDED BY", "NAME"]]
    rows += [
        [usage.kind, format_bytes(usage.bytes), usage.needed_by or usage.kept_for or "nobody", usage.name]
        for usage in usages
    ]
    free = [usage for usage in usages if usage.is_unneeded]
    total, unneeded = (format_bytes(sum(usage.bytes for usage in group)) for group in (usages, free))
    lines = [*align_columns(rows), "", f"{total} in all; nobody needs {unneeded} of it."]
    if free:
        lines.append(f"next: {command} --delete {shlex.quote(free[0].name)}   (several names, or --delete unneeded)")
    return "\n".join(lines)


def select_usage(
    usages: Sequence[DiskUsage], names: Sequence[str], *, force: bool = False, command: str = "trainyard gc"
) -> list[DiskUsage]:
    """Return the named items; `unneeded` names all that nobody needs.

    Args:
        command: as it was typed, without --delete.

    Raises:
        UserError: a name is none of the list, or of an item that a run still needs and `force` is not given.
    """
    by_name = {usage.name: usage for usage in usages}
    chosen: dict[str, DiskUsage] = {}
    for name in names:
        if name == "unneeded":
            chosen |= {usage.name: usage for usage in usages if usage.is_unneeded}
            continue
        if name not in by_name:
            raise UserError(
                f"'{name}': nothing of that name takes space.{suggest_nearest(name, by_name)} See: {command}"
            )
        usage = by_name[name]
        if usage.needed_by and not force:
            raise UserError(
                f"{name}: is needed by {usage.needed_by}. To delete it all the same: "
                f"{command} --delete {shlex.quote(name)} --force. Getting it back: {usage.again}"
            )
        chosen[name] = usage
    return list(chosen.values())


def delete_usage(usages: Sequence[DiskUsage], tell: Callable[[str], object]) -> int:
    """Print the items to delete, delete them, and return the bytes freed.

    Every lock is taken first, so nothing at all is deleted if anything is in use.

    Raises:
        UserError: something is in use, or cannot be deleted.
    """
    with ExitStack() as guards:
        with ExitStack() as readers:
            for run in dict.fromkeys(usage.run for usage in usages if usage.run):
                guards.enter_context(RunLock(run))
            for guard, usage in {usage.guard: usage for usage in usages}.items():  # several may share one
                _take_lock(guards, guard, usage, "another process is making it now")
            for usage in usages:
                _take_lock(readers, usage.index, usage, "a process is reading it now")
            for usage in usages:
                tell(f"deleting {usage.name} ({format_bytes(usage.bytes)}). Getting it back: {usage.again}")
            _delete([usage.index for usage in usages if usage.index])  # from here on nobody finds the data
        for usage in usages:  # without open files, which NFS would keep in the folders
            _delete(usage.paths)
    return sum(usage.bytes for usage in usages)


def format_bytes(count: int) -> str:
    """Return a size in the unit that reads best."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def _take_lock(locks: ExitStack, path: Path | None, usage: DiskUsage, held: str) -> None:
    try:
        if path is not None:
            locks.enter_context(exclusive_lock(path, wait=False))
    except LockHeld:
        raise UserError(f"{usage.name}: {held}. Nothing was deleted. Try again when that has ended.") from None
    except (FlockRefused, OSError) as error:
        raise UserError(
            f"{path}: cannot be locked ({error}), so a process may be using {usage.name}. Nothing was deleted. If none "
            f"is: rm -r {quote_path(usage.paths[0])}"
        ) from None


def _explain_use(*locks: Path) -> str:
    """Return why `unneeded` leaves what these locks are for; "" if they are free."""
    try:
        for lock in locks:
            if lock.is_file():
                with exclusive_lock(lock, wait=False):
                    pass
    except LockHeld:
        return "a process that uses it now"
    except (FlockRefused, OSError):
        return "only you know: it cannot be locked"
    return ""


# Needs of runs


class _Needs(NamedTuple):
    """Files and folders that an unfinished run still reads."""

    run: str
    paths: list[Path]
    prefix: str | None  # of the folders in a cache that it may read: their full names are known later

    def includes(self, path: Path) -> bool:
        """Return whether the run may read a folder or file."""
        real = os.path.realpath(path)
        named = any(  # by a relative path, if the run was started elsewhere
            Path(os.path.realpath(own)).is_relative_to(real) or (not own.is_absolute() and own.name == path.name)
            for own in self.paths
        )
        return named or (self.prefix is not None and path.name.startswith(self.prefix))


def _find_needs(run: RunSnapshot) -> _Needs:
    """Read the needs of a run. Of a run whose options are damaged, that may be anything."""
    name = format_run_name(run.run)
    try:
        options, _ = read_options(run.run / CONFIG)
    except UserError:
        return _Needs(f"{name} (its {CONFIG} cannot be read)", [], "")
    record = {}
    with suppress(UserError):  # then its options have to do
        record = read_env(run.run, checked=False)
    data, family = options.get("data.path"), options.get("family")
    stated = [data, record.get("data", {}).get("path"), options.get("start_from")]
    match record:
        case {"exactness": {"start_from": {"path": path}}}:  # a run's result, which may be another checkpoint now
            stated.append(path)
    paths = [Path(path) for path in stated if isinstance(path, str) and path and "\0" not in path]
    is_packed = any(str(path) == data and is_index(path / INDEX) for path in paths)
    return _Needs(name, paths, None if is_packed else f"{family}-" if family else "")


def _name_needing(path: Path, needs: Sequence[_Needs]) -> str:
    names = [need.run for need in needs if need.includes(path)]
    return names[0] if len(names) == 1 else f"{len(names)} runs: {join_names(names[:3])}" if names else ""


# Disk usage


def _list_data(cache: Path, needs: Sequence[_Needs]) -> Iterator[DiskUsage]:
    listings = [path for path in cache.glob(".*.listing") if path.lstat().st_uid == os.geteuid()]
    packed_by_runs = {recall_listing(path, only_complete=False) for path in listings}
    named = [need._replace(prefix=None) if need.prefix else need for need in needs]
    for folder in sorted(cache.iterdir()):
        if not_drawn := _NOT_DRAWN.fullmatch(folder.name):
            guard = name_guard(folder.with_name(not_drawn[1]))
            if guard.is_file():
                for usage in _measure(folder, "leftover", _name_needing(folder, named), again="nothing to get back"):
                    yield replace(usage, kept_for=_explain_use(guard), guard=guard)
        if folder.name.startswith(".") or not _is_own_folder(folder):
            continue
        names, guard, index = [entry.name for entry in folder.iterdir()], name_guard(folder), None
        kept_for = _explain_use(guard)
        has_only_packed = all(_PACKED_FILE.fullmatch(name) for name in names)
        if is_index(folder / INDEX):
            kind, index, again = "packed", folder / INDEX, "a run packs the raw files again"
            kept_for = kept_for or _explain_use(index)
        elif JOURNAL in names and has_only_packed:
            kind, again = "half-packed", "packing starts from the beginning"
        elif _SYNTHETIC.fullmatch(folder.name) and guard.is_file():
            kind, again = "drawn", "the job draws it again; other files, if its generator has changed"
        else:
            continue
        if kind != "drawn" and not (folder.name in packed_by_runs and has_only_packed):
            kept_for = kept_for or "only you know: packed by hand, or its raw files changed"
            again = "trainyard pack, if you have its raw files"
        needed_by = _name_needing(folder, needs)
        for usage in _measure(folder, kind, needed_by, again=again):
            yield replace(usage, kept_for=kept_for, guard=guard, index=index)


def _list_run(run: RunSnapshot, needs: Sequence[_Needs]) -> Iterator[DiskUsage]:
    """List a run's checkpoints beyond those that its result and a resume need, and its copy of the code."""
    saved = list_checkpoints(run.run / "checkpoints") if _is_own_folder(run.run / "checkpoints") else []
    for entry in saved:
        raise_failed_disk(entry.error, entry.path)  # else it would count as damaged, and be deleted
    kept = {entry.path for entry in saved if _name_needing(entry.path, needs)}
    if saved:
        kept.add(select_checkpoint(saved).path)
    if saved and not run.is_done:  # a resume takes the newest that is intact
        kept |= {saved[0].path, next((entry for entry in saved if entry.problem is None), saved[0]).path}
    reason = "its result" if run.is_done else "its result and a resume"
    lock = run.run / LOCK
    is_free = not os.path.lexists(lock) or (run.owner is not None and run.owner.find_alive(lock) is False)
    kept_for = "" if is_free else "a process that writes to the run now"
    for label, needed_by, again in (
        ("checkpoints", reason, "no way: train again"),
        ("checkpoints (older)", "", "no way; nothing reads them by itself"),
    ):
        group = [entry for entry in saved if (entry.path in kept) == bool(needed_by)]
        paths = tuple(path for entry in group for path in (entry.path, entry.path.with_suffix(".json")))
        size = sum(entry.bytes for entry in group)
        if _are_own(paths):
            name = f"{run.run}/{label}"
            yield DiskUsage(name, "checkpoints", size, needed_by, again, paths, kept_for=kept_for, run=run.run)
    needed_by = "" if run.is_done else format_run_name(run.run)
    for usage in _measure(run.run / "code", "code", needed_by, again="trainyard resume RUN --update-code"):
        yield replace(usage, kept_for=kept_for, run=run.run)


def _list_leftovers(runs_dir: Path) -> Iterator[DiskUsage]:
    """List folders of runs whose creation was interrupted: none can be named, resumed or listed."""
    for path in sorted(runs_dir.glob("*/.new-*")):
        if (
            _NEW.fullmatch(path.name)
            and _is_below(path, runs_dir)
            and time.time() - path.stat().st_mtime >= _LEFTOVER_AGE_S
        ):
            yield from _measure(path, "leftover", again="nothing to get back")


def _list_caches(environ: Mapping[str, str]) -> Iterator[DiskUsage]:
    """List the copies of packed data on this node's scratch, compiled code, and the user's cache folder."""
    scratch = environ.get("TRAINYARD_SCRATCH")
    home = Path(scratch) / f"trainyard-{os.getuid()}" if scratch else None
    for path in sorted(home.iterdir()) if home and _is_own_folder(home) else ():
        if path.name == "compiled":
            yield from _measure(path, "cache", again="the next run here compiles again")
        elif _STAGED.fullmatch(path.name):
            again = "the next run on this node copies it again"
            for usage in _measure(path, "staged", "runs on this node that read it", again=again):
                index = path / INDEX if is_index(path / INDEX) else None
                yield replace(usage, guard=path.with_suffix(".lock"), index=index)
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    again = "the next make sif fetches Apptainer again, the next run compiles again"
    yield from _measure(folder, "cache", again=again)


def _measure(folder: Path, kind: str, needed_by: str = "", *, again: str) -> Iterator[DiskUsage]:
    """Yield the size of the files below a folder, of links their own; nothing if not all of it is the user's own."""
    if not _is_own_folder(folder):
        return
    size = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a process uses it
                status = os.lstat(Path(place) / name)
                if status.st_uid != os.geteuid():
                    return
                size += status.st_size if name in files else 0
    yield DiskUsage(str(folder), kind, size, needed_by, again, (folder,))


def _is_own_folder(path: Path) -> bool:
    """Return whether this user owns a folder, which is no link to one."""
    return path.is_dir() and not path.is_symlink() and _are_own([path])


def _are_own(paths: Sequence[Path]) -> bool:
    return all(path.lstat().st_uid == os.geteuid() for path in paths if os.path.lexists(path))


def _is_below(run: Path, runs_dir: Path) -> bool:
    """Return whether a folder `JOB/RUN` of the user's own is in the folder of runs, and no link to another place."""
    expected = Path(os.path.realpath(runs_dir)) / run.parent.name / run.name
    return os.path.realpath(run) == str(expected) and _is_own_folder(run)


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be deleted: {error}.") from None
