"""What takes disk space, who still needs it, and deleting what a person names: `trainyard gc`."""

import os
import shlex
import shutil
import subprocess
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
from trainyard.text import align_columns, join_names, suggest_nearest

CONTAINER_IMAGES = "localhost/trainyard"
_INDEX = "index.h5"
_SYNTHETIC = "-synthetic-"  # in the name of a folder of drawn raw files
_GIB = 2**30
_ENGINE_TIMEOUT_S = 60
_LEFTOVER_AGE_S = 3600  # a run is created within seconds: a younger folder may be one that is being created


@dataclass(frozen=True)
class Item:
    """Something that can be deleted on its own."""

    name: str  # what a person types after --delete
    kind: str
    bytes: int
    needed_by: str  # who still needs it; "" if nobody does
    again: str  # how to get it back
    paths: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()  # deletes it, where it is not files of ours


def find_items(
    runs_dir: Path,
    *,
    data_dirs: Sequence[Path],
    images: Path,
    environ: Mapping[str, str],
    tell: Callable[[str], object] = lambda line: None,
) -> list[Item]:
    """List what Trainyard keeps on this machine's disks, largest first within each kind.

    Reads file sizes, `env.json` and checkpoint manifests; costs one `stat` for each file.

    Args:
        runs_dir: folder of runs.
        data_dirs: folders that hold nothing but packed and drawn data of this person. Of packed data elsewhere only
            what the runs of `runs_dir` read is listed: the rest may be somebody else's.
        images: folder of SIF files.
        environ: for the user's cache folder and scratch.
        tell: called with a line about what could not be listed.
    """
    runs = [read_run(path) for path in list_newest_runs(runs_dir, None)] if runs_dir.is_dir() else []
    readers = _find_readers(runs)
    own = [path for folder in data_dirs if folder.is_dir() for path in folder.absolute().iterdir()]
    found = [
        *(item for path in sorted({*own, *readers}) for item in _list_data(path, readers.get(path, []))),
        *(item for run in runs for item in _list_run(run)),
        *_list_leftovers(runs_dir),
        *_list_copies(environ),
        *_list_sifs(images),
        *_list_container_images(tell),
        *_list_caches(environ),
    ]
    kinds = list(dict.fromkeys(item.kind for item in found))
    return sorted((item for item in found if item.bytes), key=lambda item: (kinds.index(item.kind), -item.bytes))


def format_items(items: Sequence[Item]) -> str:
    """Return the list for a terminal: a line for each item, a sum, and the next command."""
    if not items:
        return "Nothing here takes space."
    rows = [["KIND", "SIZE", "NEEDED BY", "NAME"]]
    rows += [[item.kind, format_bytes(item.bytes), item.needed_by or "nobody", item.name] for item in items]
    free = [item for item in items if not item.needed_by]
    total, unneeded = (format_bytes(sum(item.bytes for item in group)) for group in (items, free))
    lines = [*align_columns(rows), "", f"{total} in all; nobody needs {unneeded} of it."]
    if free:
        lines.append(f"next: trainyard gc --delete '{free[0].name}'   (several names, or --delete unneeded)")
    return "\n".join(lines)


def select_items(items: Sequence[Item], names: Sequence[str], *, force: bool = False) -> list[Item]:
    """Return the items that a person names; `unneeded` names all that nobody needs.

    Raises:
        UserError: a name is none of the list, or names what a run still needs and `force` is not given.
    """
    by_name = {item.name: item for item in items}
    chosen: dict[str, Item] = {}
    for name in names:
        if name == "unneeded":
            chosen |= {item.name: item for item in items if not item.needed_by}
            continue
        if name not in by_name:
            raise UserError(
                f"'{name}': nothing of that name takes space.{suggest_nearest(name, by_name)} See: trainyard gc"
            )
        item = by_name[name]
        if item.needed_by and not force:
            raise UserError(
                f"{name}: is needed by {item.needed_by}. To delete it all the same: "
                f"trainyard gc --delete '{name}' --force. Getting it back: {item.again}"
            )
        chosen[name] = item
    return list(chosen.values())


def delete_items(items: Sequence[Item], tell: Callable[[str], object]) -> int:
    """Delete items and return how many bytes that freed.

    A run's files are deleted under the run's lock and packed data under the lock of whoever packs them, so what is in
    use stays.

    Raises:
        UserError: an item is in use; what came before it in the list is gone.
    """
    freed = 0
    for item in items:
        if item.command:
            _run_engine(item.command)
        elif item.kind in ("checkpoints", "code"):
            with RunLock(_find_run(item.paths[0])):
                _delete(item.paths)
        elif item.kind in ("packed", "half-packed", "drawn"):
            (folder,) = item.paths
            try:
                with exclusive_lock(folder.with_name(f".{folder.name}.guard"), wait=False):
                    _delete(item.paths)
            except LockHeld:
                raise UserError(f"{folder}: another process is making it now. See: trainyard gc") from None
            except FlockRefused as error:
                raise UserError(
                    f"{folder}: cannot be locked ({error}), so a run may be making it now. If none is: rm -r '{folder}'"
                ) from None
        else:
            _delete(item.paths)
        freed += item.bytes
        tell(f"deleted {item.name} ({format_bytes(item.bytes)}). Getting it back: {item.again}")
    return freed


def format_bytes(count: int) -> str:
    """Return a size in the unit that reads best."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def _find_readers(runs: Sequence[RunSnapshot]) -> dict[Path, list[RunSnapshot]]:
    """Return, by folder of packed data, the runs that were trained on it."""
    readers: dict[Path, list[RunSnapshot]] = {}
    for run in runs:
        data = read_env(run.run).get("data", {})
        if "path" in data:
            readers.setdefault(Path(data["path"]).absolute(), []).append(run)
    return readers


def _list_data(path: Path, readers: Sequence[RunSnapshot]) -> Iterator[Item]:
    if path.is_symlink() or not path.is_dir() or path.name.startswith("."):
        return
    if (path / _INDEX).is_file():
        needed_by = _name_runs([run for run in readers if not run.is_done])
        again = "a run, or trainyard pack, packs the raw files again"
        yield Item(str(path), "packed", _measure(path), needed_by, again, (path,))
    elif (path / "packing.json").is_file():
        yield Item(str(path), "half-packed", _measure(path), "", "packing starts from the beginning", (path,))
    elif _SYNTHETIC in path.name:
        yield Item(str(path), "drawn", _measure(path), "", "the job draws the same files again", (path,))


def _list_run(run: RunSnapshot) -> Iterator[Item]:
    """List a run's checkpoints beyond those that its result and a resume need, and its copy of the code."""
    name = format_run_name(run.run)
    found = list_checkpoints(run.run / "checkpoints")
    if found:
        kept = {select_checkpoint(found).path} | ({found[0].path} if not run.is_done else set())
        needed = "its result" if run.is_done else "its result and a resume"
        groups = (
            (needed, [one for one in found if one.path in kept], "no way: train again"),
            ("", [one for one in found if one.path not in kept], "no way; nothing reads them by itself"),
        )
        for needed_by, group, again in groups:
            paths = tuple(path for one in group for path in (one.path, one.path.with_suffix(".json")))
            label = f"{run.run}/checkpoints" + ("" if needed_by else " (older)")
            yield Item(label, "checkpoints", sum(one.bytes for one in group), needed_by, again, paths)
    code = run.run / "code"
    if code.is_dir():
        needed = "" if run.is_done else name
        yield Item(str(code), "code", _measure(code), needed, "trainyard resume RUN --update-code", (code,))


def _list_leftovers(runs_dir: Path) -> Iterator[Item]:
    """List folders of runs whose creation was interrupted: none can be named, resumed or listed."""
    for path in sorted(runs_dir.glob("*/.new-*")) if runs_dir.is_dir() else ():
        if time.time() - path.stat().st_mtime < _LEFTOVER_AGE_S:
            continue
        yield Item(str(path), "leftover", _measure(path), "", "nothing to get back", (path,))


def _list_copies(environ: Mapping[str, str]) -> Iterator[Item]:
    scratch = environ.get("TRAINYARD_SCRATCH")
    home = Path(scratch) / f"trainyard-{os.getuid()}" if scratch else None
    for path in sorted(home.iterdir()) if home and home.is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            if path.name == "compiled":
                yield Item(str(path), "cache", _measure(path), "", "the next run here compiles again", (path,))
                continue
            again = "the next run on this node copies it again"
            yield Item(str(path), "staged", _measure(path), "runs on this node that read it", again, (path,))


def _list_sifs(images: Path) -> Iterator[Item]:
    for path in sorted(images.glob("*.sif")):
        again = "make sif HW=..."
        yield Item(str(path), "sif", path.stat().st_size, "clusters that name it", again, (path,))


def _list_container_images(tell: Callable[[str], object]) -> Iterator[Item]:
    """List our container images in each engine that is installed; say so if one does not answer."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None:
            continue
        listing = (engine, "image", "ls", "--filter", f"reference={CONTAINER_IMAGES}", "--format", "{{.ID}}")
        try:
            found = _run_engine(listing)
        except UserError as error:
            tell(f"Container images are not listed: {error}")
            continue
        for image in dict.fromkeys(found.split()):
            shown = _run_engine(
                (engine, "image", "inspect", "--format", "{{.Size}} {{range .RepoTags}}{{.}} {{end}}", image)
            )
            size, *tags = shown.split() or ["0"]
            for tag in tags[:1]:
                command = (engine, "image", "rm", tag)
                yield Item(tag, f"{engine} image", int(size), "", "make image HW=...", command=command)


def _run_engine(command: Sequence[str]) -> str:
    """Return what an engine prints.

    Raises:
        UserError: it failed or did not answer; quotes its last line.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{shlex.join(command)}: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"{shlex.join(command)}: {lines[-1] if lines else f'code {done.returncode}'}")
    return done.stdout


def _list_caches(environ: Mapping[str, str]) -> Iterator[Item]:
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    if folder.is_dir():
        again = "the next make sif fetches Apptainer again, the next run compiles again"
        yield Item(str(folder), "cache", _measure(folder), "", again, (folder,))


def _find_run(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / CONFIG).is_file())


def _name_runs(runs: Sequence[RunSnapshot]) -> str:
    names = [format_run_name(run.run) for run in runs]
    return names[0] if len(names) == 1 else f"{len(names)} runs: {join_names(names[:3])}" if names else ""


def _measure(folder: Path) -> int:
    """Return the bytes of all files below a folder, of links their own."""
    return sum(entry.lstat().st_size for entry in folder.rglob("*") if not entry.is_dir())


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be deleted: {error}.") from None
