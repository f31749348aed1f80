"""Checkpoints that survive a crash at any instant, and detect damage.

A checkpoint is two files: `step-000000100.ckpt`, written by torch.save, and its manifest `step-000000100.json`
with the SHA-256 of those bytes. It exists if and only if the data file has its final name and the manifest's
hash matches. A final name is never written twice: saving a step again writes `step-000000100-1.ckpt` and then
deletes the older file. One process writes a directory at a time; any number may read it.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import safetensors
import safetensors.torch
import torch
from loguru import logger

from trainyard.errors import UserError
from trainyard.files import (
    CHECKPOINT,
    FORMATS,
    create_file,
    find_existing,
    fsync_path,
    make_folder_inside,
    name_partial,
    rename,
)
from trainyard.runs.changes import FILES
from trainyard.runs.manifest import (
    DATA_NAME,
    CheckpointError,
    Entry,
    find_result_step,
    format_name,
    hash_fields,
    list_checkpoints,
    parse_name,
    read_entry,
    verify,
)
from trainyard.text import format_size, quote_path
from trainyard.train.archive import check_archive, check_state

State = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, numbers, strings and None."""


def save(
    directory: Path,
    state: State,
    *,
    step: int,
    meta: Mapping[str, Any],
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of `step`, so that kill -9 or a power cut at any instant leaves the directory valid.

    Returns its data file.

    Leftovers of interrupted saves are removed first. Tensors that share memory are written once and share it
    again when loaded; a view is written with its whole storage.

    Args:
        directory: created if it is missing.
        state: tensors may be on any device.
        step: optimizer steps finished.
        meta: JSON values for the manifest, such as epoch, metrics, config hash and world size.
        check_owner: called before anything gets its name; raises if another process writes this directory now.

    Raises:
        CheckpointError: the state contains something that a safe load would refuse, or the disk did not take all of
            it (full, quota, I/O error). Older checkpoints are then untouched.
    """
    assert step >= 0, step
    _check_loads_safely(state)
    needed = count_tensor_bytes(state)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        is_new = not directory.exists()
        make_folder_inside(directory)
        if is_new:
            fsync_path(directory.parent)
        _remove_leftovers(directory)
        replaced = [entry.path for entry in list_checkpoints(directory) if entry.step == step]
        revision = 1 + max((parse_name(old)[1] for old in replaced), default=-1)
        _require_room(directory, needed)
        path = directory / format_name(step, revision)
        _write(path, state, step=step, meta=meta, check_owner=check_owner)
    except OSError as error:
        disk = find_existing(directory)
        free = shutil.disk_usage(disk).free
        raise CheckpointError(
            f"{directory / format_name(step, 0)}: not saved: {error.strerror or error}. It needs at least "
            f"{format_size(needed)}, {format_size(free)} are free (a quota may allow less). Older checkpoints are "
            f"untouched. Look at df -h {disk} and du -sh {disk}/*, free some space or keep fewer "
            "(checkpoint.keep_last=1), and start the run again: it resumes from the newest checkpoint."
        ) from error
    for old in replaced:
        _delete(old)
    return path


def select_weights(state: State) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint that evaluation and export use: averaged ones if there are any."""
    return {**(state.get("model") or {}), **_select_averaged(state)}


def _select_averaged(state: State) -> dict[str, torch.Tensor]:
    swa = state.get("swa") or {}
    averaged: dict[str, torch.Tensor] = swa["module"] if swa.get("refreshed") else state.get("ema") or {}
    return averaged


def load(path: Path, *, mmap: bool = False) -> State:
    """Verify one checkpoint and return its state, all tensors on the CPU.

    Args:
        path: the .ckpt file; its manifest is next to it.
        mmap: map the file instead of copying it, so that only the tensors touched are read. Only for short
            reads of a file that nothing rewrites: a mapped file that is truncated, or deleted on NFS, kills the
            process with SIGBUS. Therefore off in training, where `prune` deletes the file that it resumed from.

    Raises:
        CheckpointError: it is missing, damaged, or contains more than `State` allows. No code in it is run.
    """
    if not DATA_NAME.fullmatch(path.name):
        raise CheckpointError(f"{path}: not the name of a checkpoint. Expected a file like step-000000100.ckpt.")
    problem = verify(read_entry(path))
    if problem:
        raise CheckpointError(
            f"{path}: damaged: {problem}. Restore it from a copy; the others: "
            f"trainyard ckpt verify {quote_path(path.parents[1])}"
        )
    return read_verified(path, mmap=mmap)


def read_verified(path: Path, *, mmap: bool = False) -> State:
    """Return the state of a checkpoint that this process, or rank 0 on behalf of all, has just verified; see `load`."""
    try:
        check_archive(path)
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        check_state(state)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # torch raises anything for a file that it did not write
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path}: refused: it contains more than tensors, numbers and strings, and loading it could run code: "
            f"{reason.splitlines()[0]}. Trainyard never writes such a file: find out who did before you use anything "
            "else in this folder."
        ) from error
    return state


def choose_undamaged(directory: Path, *, step: int | None = None) -> tuple[Entry, str]:
    """Return the checkpoint whose weights are the run's result, or the newest undamaged one if that cannot be used.

    Args:
        directory: has a checkpoint.
        step: of the result; default: the newest manifest says it.

    Returns:
        The checkpoint, and why it is not the one of `step`; "" if it is.

    Raises:
        CheckpointError: every checkpoint is damaged.
    """
    entries = list_checkpoints(directory)
    step = find_result_step(entries) if step is None else step
    wanted = next((entry for entry in entries if entry.step == step), None)
    problem = f"the one of step {step} is missing" if wanted is None else verify(wanted)
    if wanted is not None and problem is None:
        return wanted, ""
    usable = find_newest_valid(directory)
    assert usable is not None, "it has a checkpoint"
    what = f"{wanted.path.name} is damaged ({problem})" if wanted else f"{problem} from {directory}"
    return usable, (
        f"{what}, which has the best weights of this run; {usable.path.name}, the newest undamaged one, is used "
        "instead. To use the best ones, restore that file from a copy"
    )


def choose_of_run(run: Path) -> Entry:
    """Return the checkpoint that scores a run's test sets; warn if it is not the best one.

    Raises:
        UserError: the run has no checkpoint yet.
        CheckpointError: every checkpoint is damaged.
    """
    folder = run / "checkpoints"
    if not list_checkpoints(folder):
        raise UserError(f"{run} is a run without checkpoints. Train it first: trainyard resume {quote_path(run)}")
    entry, problem = choose_undamaged(folder)
    if problem:
        logger.warning("{}: {}.", run, problem)
    return entry


def load_newest_valid(directory: Path) -> tuple[Entry, State] | None:
    """Return what `find_newest_valid` does, with its state (see `load`).

    Raises:
        CheckpointError: every checkpoint is damaged, or the newest undamaged one does not load. It is not skipped then:
            older ones would fail too, or lose more training than needed.
    """
    entry = find_newest_valid(directory)
    return None if entry is None else (entry, read_verified(entry.path))


def find_newest_valid(directory: Path) -> Entry | None:
    """Return the newest undamaged checkpoint, None if there is no checkpoint at all. Reads it in full.

    Damaged ones are logged by name and reason and skipped, never deleted.

    Raises:
        CheckpointError: every checkpoint is damaged.
        OSError: none is undamaged, and of one only the disk is known to have failed.
    """
    damaged, failed = list[str](), None
    for entry in list_checkpoints(directory):
        try:
            problem = verify(entry)
        except OSError as error:
            failed, problem = error, error.strerror
        if problem is None:
            return entry
        logger.warning("{}: damaged, trying the one before: {}", entry.path, problem)
        damaged.append(f"\n  {entry.path.name}: {problem}")
    if failed is not None:
        raise failed
    if damaged:
        move = f"mv {quote_path(directory)} {quote_path(directory)}.damaged"
        raise CheckpointError(
            f"{directory}: all {len(damaged)} checkpoints are damaged:{''.join(damaged)}\nNothing was deleted. Restore "
            f"one from a copy, or start from scratch without them: {move}"
        )
    return None


def prune(
    directory: Path,
    *,
    keep_last: int,
    protect: Callable[[int], bool] = lambda step: False,
    written: Path | None = None,
) -> list[Path]:
    """Delete old checkpoints, oldest first, and return the data files deleted.

    Keeps the newest undamaged checkpoint, the `keep_last` - 1 before it, newer ones (they are damaged, and a person
    may want to inspect them), and every step for which `protect` is true. If there is anything to delete, reads a
    checkpoint to be sure that an undamaged one remains; deletes nothing if there is none.

    Args:
        written: the data file that this process has just saved: it is not read again, only its size is compared.
    """
    assert keep_last >= 1, keep_last
    entries = list_checkpoints(directory)
    if all(protect(entry.step) for entry in entries[keep_last:]):
        return []
    problems = (entry.problem if entry.path == written else verify(entry) for entry in entries)
    newest_valid = next((i for i, problem in enumerate(problems) if problem is None), len(entries))
    doomed = [entry.path for entry in entries[newest_valid + keep_last :] if not protect(entry.step)]
    for path in reversed(doomed):
        _delete(path)
    return doomed[::-1]


def describe_weights(entry: Entry, state: State) -> dict[str, str]:
    """Return where the weights of `select_weights` come from, as texts for the header of a file.

    They are the step, the kind of weights, the checkpoint's SHA-256, and `meta` and the artifacts of packing as JSON.
    """
    refreshed = (state.get("swa") or {}).get("refreshed")
    return {
        "step": str(entry.step),
        "weights": "swa" if refreshed else "ema" if _select_averaged(state) else "model",
        "checkpoint_sha256": entry.sha256,
        "meta": json.dumps({name: value for name, value in entry.meta.items() if name != FILES}),
        "artifacts": json.dumps(state.get("artifacts", {})),
    }


def export(path: Path, out: Path, *, texts: Mapping[str, str] | None = None) -> Path:
    """Write a checkpoint's model weights as a safetensors file, and return `out`.

    The weights are those of `select_weights`; the file is read again and compared with them bit by bit before it gets
    its name.

    Args:
        texts: for the file's metadata, in addition to the format and `describe_weights`.

    Raises:
        CheckpointError: `out` exists or cannot be written, or the checkpoint is damaged or has no such weights.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already and is not overwritten. Name another file, or delete it.")
    state, entry = load(path, mmap=True), read_entry(path)
    try:
        averaged = _select_averaged(state)
        weights = _merge_weights(path, state.get("model") or {}, averaged)
    except (LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not exported: its weights are not where they should be ({error}).") from error
    metadata = {"format": "pt", **describe_weights(entry, state), **(texts or {})}
    partial = name_partial(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(weights, partial, metadata=metadata)
        fsync_path(partial)
        _compare_with_file(weights, partial)
        rename(partial, out)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{out}: not exported: {error}. Free some space, or name a file elsewhere.") from error
    return out


def _compare_with_file(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise an OSError if a safetensors file holds anything but these bits."""
    with safetensors.safe_open(path, "pt") as file:
        same = set(file.keys()) == set(weights) and all(
            torch.equal(file.get_tensor(name).view(-1).view(torch.uint8), w.view(-1).view(torch.uint8))
            for name, w in weights.items()
        )
    if not same:
        raise OSError(errno.EIO, "the disk returns other bytes than were written")


def _write(path: Path, state: State, *, step: int, meta: Mapping[str, Any], check_owner: Callable[[], None]) -> None:
    """Write data and manifest in the order that leaves every prefix of it valid."""
    manifest_path = path.with_suffix(".json")
    partial, manifest_partial = name_partial(path), name_partial(manifest_path)
    try:
        with create_file(partial, buffering=0) as file:
            writer = _HashingWriter(file)
            torch.save(state, cast(IO[bytes], writer))
        if writer.failure:
            raise writer.failure
        with create_file(manifest_partial) as file:
            file.write(_encode_manifest(step, writer.bytes, writer.hash.hexdigest(), meta).encode())
        fsync_path(partial)  # here, because it may take long
        check_owner()
        # The manifest goes first: alone it is no checkpoint, but data without a manifest are a damaged one.
        rename(manifest_partial, manifest_path)
        rename(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        manifest_partial.unlink(missing_ok=True)
        raise


class _HashingWriter:
    """The file that torch.save writes to, front to back. It hashes the intended bytes, not those on a bad disk.

    torch.save may wrap an exception of `write` into another one, which would hide "disk full". So `failure` keeps
    the first one for the caller, and later data are discarded.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.hash = hashlib.sha256()
        self.bytes = 0
        self.failure: OSError | None = None
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        self.bytes += len(data)
        rest = memoryview(data)
        while rest and self.failure is None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self.failure = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is unbuffered. torch.save calls this."""


def _encode_manifest(step: int, size: int, sha256: str, meta: Mapping[str, Any]) -> str:
    fields = {"format": FORMATS[CHECKPOINT], "step": step, "bytes": size, "sha256": sha256, "meta": dict(meta)}
    fields = json.loads(json.dumps(fields))  # as read back: string keys, no tuples
    return json.dumps({**fields, "self_sha256": hash_fields(fields)}, indent=1)


def _remove_leftovers(directory: Path) -> None:
    """Remove leftovers of an interrupted save or deletion: partial files, and manifests without their data."""
    for path in list(directory.glob("*step-*")):
        data = path.with_suffix(".ckpt")
        orphan = path.suffix == ".json" and DATA_NAME.fullmatch(data.name) and not data.exists()
        if orphan or re.fullmatch(r"\.?step-.+\.(ckpt|json)(\.[0-9a-f]+)?\.partial", path.name):
            path.unlink()


def _delete(path: Path) -> None:
    """Delete a checkpoint: the data first, because a manifest alone is no checkpoint."""
    path.unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)


def _walk_leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a nested state, keys included, each with its path."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield f"a key of {where}", key
            yield from _walk_leaves(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _walk_leaves(item, f"{where}[{i}]")
    else:
        yield where, value


def _check_loads_safely(state: State) -> None:
    """Raise for what torch.load(weights_only=True) would refuse, while it can still be corrected.

    Types are compared exactly: a numpy float is a subclass of float and pickles as numpy.
    """
    for where, leaf in _walk_leaves(state, "state"):
        if type(leaf) in (bool, int, float, str, type(None)):
            continue
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided and not leaf.is_meta:
            continue
        kind = f"{leaf.layout} tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else "value"
        raise CheckpointError(
            f"checkpoint not saved: {where} is a {kind} of type {type(leaf).__module__}.{type(leaf).__name__}. "
            "A checkpoint holds dicts, lists and tuples of dense tensors, numbers, strings and None, because it is "
            "loaded without running code. Convert it: float(x), x.tolist() or str(x)."
        )


def count_tensor_bytes(state: State) -> int:
    """Count the bytes of all storages: the size of the data file without names and padding."""
    return sum(storage.nbytes() for storage in list_storages(state))


def list_storages(state: State) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors, each once."""
    storages = [leaf.untyped_storage() for _, leaf in _walk_leaves(state, "state") if isinstance(leaf, torch.Tensor)]
    return list({storage.data_ptr(): storage for storage in storages}.values())


def _require_room(directory: Path, needed: int) -> None:
    if shutil.disk_usage(directory).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _merge_weights(path: Path, model: Mapping[str, Any], averaged: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors that share no memory, as safetensors requires."""
    stray = sorted(averaged.keys() - model.keys())
    non_tensors = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
    if not model or stray or non_tensors:
        fault = f"'ema' has {stray[0]}, which 'model' lacks" if stray else "'model' is empty or missing"
        fault = f"'model' has {non_tensors[0]}, which is not a tensor" if non_tensors else fault
        raise CheckpointError(f"{path}: not exported: expected state['model'] to hold all weights, but {fault}.")
    merged = {**model, **averaged}
    return {name: w.detach().clone(memory_format=torch.contiguous_format) for name, w in merged.items()}
