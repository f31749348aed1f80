"""What takes disk space, who still needs it, and deleting what a person names: `trainyard gc`."""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import UserError
from trainyard.files import FlockRefused, LockHeld, exclusive_lock
from trainyard.runs.folder import CONFIG, format_run_name, list_newest_runs, read_env
from trainyard.runs.history import RunSnapshot, read_run
from trainyard.runs.lock import RunLock
from trainyard.runs.manifest import list_checkpoints, select_checkpoint
from trainyard.text import align_columns, join_names, quote_path, suggest_nearest

_INDEX = "index.h5"
_SYNTHETIC = "-synthetic-"  # in the name of a folder of drawn raw files
_GIB = 2**30
_LEFTOVER_AGE_S = 3600  # a run is created within seconds: a younger folder may be one that is being created


@dataclass(frozen=True)
class DiskUsage:
    """Something that can be deleted on its own."""

    name: str  # what a person types after --delete
    kind: str
    bytes: int
    needed_by: str  # who still needs it; "" if nobody does
    again: str  # how to get it back
    paths: tuple[Path, ...]


def list_usage(runs_dir: Path, *, data_dirs: Sequence[Path], environ: Mapping[str, str]) -> list[DiskUsage]:
    """List what Trainyard keeps on this machine's disks, largest first within each kind.

    Reads file sizes, `env.json` and checkpoint manifests; costs one `stat` for each file.

    Args:
        runs_dir: folder of runs.
        data_dirs: folders that hold nothing but packed and drawn data of this person. Of packed data elsewhere only
            what the runs of `runs_dir` read is listed: the rest may be somebody else's.
        environ: for the user's cache folder and scratch.
    """
    runs = [read_run(path) for path in list_newest_runs(runs_dir, None)] if runs_dir.is_dir() else []
    readers = _find_readers(runs)
    own = [path for folder in data_dirs if folder.is_dir() for path in folder.absolute().iterdir()]
    found = [
        *(usage for path in sorted({*own, *readers}) for usage in _list_data(path, readers.get(path, []))),
        *(usage for run in runs for usage in _list_run(run)),
        *_list_leftovers(runs_dir),
        *_list_caches(environ),
    ]
    kinds = list(dict.fromkeys(usage.kind for usage in found))
    return sorted((usage for usage in found if usage.bytes), key=lambda usage: (kinds.index(usage.kind), -usage.bytes))


def format_usage(usages: Sequence[DiskUsage]) -> str:
    """Return the list for a terminal: a line for each, a sum, and the next command."""
    if not usages:
        return "Nothing here takes space."
    rows = [["KIND", "SIZE", "NEEDED BY", "NAME"]]
    rows += [[usage.kind, format_bytes(usage.bytes), usage.needed_by or "nobody", usage.name] for usage in usages]
    free = [usage for usage in usages if not usage.needed_by]
    total, unneeded = (format_bytes(sum(usage.bytes for usage in group)) for group in (usages, free))
    lines = [*align_columns(rows), "", f"{total} in all; nobody needs {unneeded} of it."]
    if free:
        lines.append(f"next: trainyard gc --delete {shlex.quote(free[0].name)}   (several names, or --delete unneeded)")
    return "\n".join(lines)


def select_usage(usages: Sequence[DiskUsage], names: Sequence[str], *, force: bool = False) -> list[DiskUsage]:
    """Return what a person names; `unneeded` names all that nobody needs.

    Raises:
        UserError: a name is none of the list, or names what a run still needs and `force` is not given.
    """
    by_name = {usage.name: usage for usage in usages}
    chosen: dict[str, DiskUsage] = {}
    for name in names:
        if name == "unneeded":
            chosen |= {usage.name: usage for usage in usages if not usage.needed_by}
            continue
        if name not in by_name:
            raise UserError(
                f"'{name}': nothing of that name takes space.{suggest_nearest(name, by_name)} See: trainyard gc"
            )
        usage = by_name[name]
        if usage.needed_by and not force:
            raise UserError(
                f"{name}: is needed by {usage.needed_by}. To delete it all the same: "
                f"trainyard gc --delete {shlex.quote(name)} --force. Getting it back: {usage.again}"
            )
        chosen[name] = usage
    return list(chosen.values())


def delete_usage(usages: Sequence[DiskUsage], tell: Callable[[str], object]) -> int:
    """Delete what is listed and return how many bytes that freed.

    A run's files are deleted under the run's lock and packed data under the lock of whoever packs them, so what is in
    use stays.

    Raises:
        UserError: something is in use; what came before it in the list is gone.
    """
    for usage in usages:
        if usage.kind in ("checkpoints", "code"):
            with RunLock(next(parent for parent in usage.paths[0].parents if (parent / CONFIG).is_file())):
                _delete(usage.paths)
        elif usage.kind in ("packed", "half-packed", "drawn"):
            (folder,) = usage.paths
            try:
                guard = folder.with_name(f".{folder.name.removesuffix('.partial')}.guard")
                with exclusive_lock(guard, wait=False):
                    _delete(usage.paths)
            except LockHeld:
                raise UserError(f"{folder}: another process is making it now. See: trainyard gc") from None
            except FlockRefused as error:
                raise UserError(
                    f"{folder}: cannot be locked ({error}), so a run may be making it now. If none is: "
                    f"rm -r {quote_path(folder)}"
                ) from None
        else:
            _delete(usage.paths)
        tell(f"deleted {usage.name} ({format_bytes(usage.bytes)}). Getting it back: {usage.again}")
    return sum(usage.bytes for usage in usages)


def format_bytes(count: int) -> str:
    """Return a size in the unit that reads best."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def _find_readers(runs: Sequence[RunSnapshot]) -> dict[Path, list[RunSnapshot]]:
    readers: dict[Path, list[RunSnapshot]] = {}
    for run in runs:
        data = read_env(run.run).get("data", {})
        if "path" in data:
            readers.setdefault(Path(data["path"]).absolute(), []).append(run)
    return readers


def _list_data(path: Path, readers: Sequence[RunSnapshot]) -> Iterator[DiskUsage]:
    if path.is_symlink() or not path.is_dir() or path.name.startswith("."):
        return
    if (path / _INDEX).is_file():
        names = [format_run_name(run.run) for run in readers if not run.is_done]
        needed_by = names[0] if len(names) == 1 else f"{len(names)} runs: {join_names(names[:3])}" if names else ""
        yield _measure(path, "packed", needed_by, again="a run, or trainyard pack, packs the raw files again")
    elif (path / "packing.json").is_file():
        yield _measure(path, "half-packed", again="packing starts from the beginning")
    elif _SYNTHETIC in path.name:
        yield _measure(path, "drawn", again="the job draws it again; other files, if its generator has changed")


def _list_run(run: RunSnapshot) -> Iterator[DiskUsage]:
    """List a run's checkpoints beyond those that its result and a resume need, and its copy of the code."""
    found = list_checkpoints(run.run / "checkpoints")
    kept = {select_checkpoint(found).path, *([] if run.is_done else [found[0].path])} if found else set()
    reason = "its result" if run.is_done else "its result and a resume"
    for label, needed_by, again in (
        ("checkpoints", reason, "no way: train again"),
        ("checkpoints (older)", "", "no way; nothing reads them by itself"),
    ):
        group = [one for one in found if (one.path in kept) == bool(needed_by)]
        paths = tuple(path for one in group for path in (one.path, one.path.with_suffix(".json")))
        size = sum(one.bytes for one in group)
        yield DiskUsage(f"{run.run}/{label}", "checkpoints", size, needed_by, again, paths)
    if (code := run.run / "code").is_dir():
        needed_by = "" if run.is_done else format_run_name(run.run)
        yield _measure(code, "code", needed_by, again="trainyard resume RUN --update-code")


def _list_leftovers(runs_dir: Path) -> Iterator[DiskUsage]:
    """List folders of runs whose creation was interrupted: none can be named, resumed or listed."""
    for path in sorted(runs_dir.glob("*/.new-*")):
        if time.time() - path.stat().st_mtime >= _LEFTOVER_AGE_S:
            yield _measure(path, "leftover", again="nothing to get back")


def _list_caches(environ: Mapping[str, str]) -> Iterator[DiskUsage]:
    """List the copies of packed data on this node's scratch, compiled code, and the user's cache folder."""
    scratch = environ.get("TRAINYARD_SCRATCH")
    home = Path(scratch) / f"trainyard-{os.getuid()}" if scratch else None
    for path in sorted(home.iterdir()) if home and home.is_dir() else ():
        if path.name == "compiled":
            yield _measure(path, "cache", again="the next run here compiles again")
        elif path.is_dir() and not path.name.startswith("."):
            again = "the next run on this node copies it again"
            yield _measure(path, "staged", "runs on this node that read it", again=again)
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    if folder.is_dir():
        yield _measure(folder, "cache", again="the next make sif fetches Apptainer again, the next run compiles again")


def _measure(folder: Path, kind: str, needed_by: str = "", *, again: str) -> DiskUsage:
    """Return what the files below a folder take, of links their own size."""
    size = sum(entry.lstat().st_size for entry in folder.rglob("*") if not entry.is_dir())
    return DiskUsage(str(folder), kind, size, needed_by, again, (folder,))


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be deleted: {error}.") from None
