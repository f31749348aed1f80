"""Prepares the packed data that a run needs: synthesizes raw files if there are none, and packs them."""

import hashlib
import inspect
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from trainyard.config.compose import compose, find_differences
from trainyard.config.families import describe_value, load_family, locate_code, require_mapping
from trainyard.config.settings import JPEG, KEEP, StoreSettings, TrainConfig
from trainyard.data.generator import hash_generator, hash_packing
from trainyard.data.raw import count_by_suffix, describe_unread, list_once, recall_listing, remember_listing
from trainyard.data.splits import find_splits
from trainyard.errors import ContractError, UserError
from trainyard.files import (
    FlockRefused,
    exclusive_lock,
    hash_file,
    name_full_disk,
    name_guard,
    remove_partial_folders,
    remove_partials,
    rename,
    require_writable,
    write_json,
)
from trainyard.foreign import remember_reads
from trainyard.hardware import count_cores
from trainyard.runs.folder import find_free_name
from trainyard.runs.history import read_object
from trainyard.text import align_columns, cut, format_override, join_names

if TYPE_CHECKING:
    from trainyard.data.index import Index
    from trainyard.data.pack import Listing
    from trainyard.data.shards import Sample

OFF = "none"
_MOST_NAMED = 5  # damaged records
_EXAMPLES = 5
_CELL = 24  # characters of a value in an example
_LISTED = 1000  # entries of a folder that are read to describe it


class StopRequested(Exception):
    """Raised by a hook to interrupt work that can be resumed later."""


def pack_raw(
    config: TrainConfig,
    raw: Path,
    out: Path | None,
    jobs_dir: Path,
    *,
    workers: int = 0,
    shard_mib: int = 128,
    hook: Callable[[], None] = lambda: None,
    on_shard: Callable[[], None] = lambda: None,
) -> Path:
    """Pack a folder of raw files, or finish packing it; return the folder of shards.

    Args:
        out: None: a folder under `data.cache`, named by a digest of the raw files and the packing options, so that
            different data sets never mix.
        workers: processes; 0: as many as the cores this process may use.
        hook: called now and then; an exception it raises stops the packing, which can be resumed later.
        on_shard: called after each shard that is new on disk.

    Raises:
        UserError: the raw folder is missing, contains nothing that the job knows, or contains unreadable files.
    """
    from tqdm import tqdm

    from trainyard.data.copies import describe_copies
    from trainyard.data.index import IMAGE
    from trainyard.data.pack import pack

    family = load_family(jobs_dir, config.family, "pack")
    _require_folder(raw, family)
    written = 0
    with list_once() as listed, remember_reads() as read:
        seen = Seen(read)
        listing, named = _list_raw(config, raw, jobs_dir, seen)
        if not listing.samples:
            raise UserError(f"{raw}: {explain_no_sample(raw, config, jobs_dir)} Name another folder: data.path=FOLDER")
        folder = out or named
        if out is None:
            require_writable(folder.parent, flag="data.cache=")
        _log_reading(family, raw, config, seen)

        def progress(samples: int) -> None:
            bar.update(samples)
            hook()

        def count_shard() -> None:
            nonlocal written
            written += 1
            on_shard()

        with (
            _lock_folder(folder),
            tqdm(total=listing.samples, unit="sample", desc=f"packing {raw.name}", disable=None, leave=False) as bar,
        ):
            if out is None:  # before packing, so that gc knows also of a half-packed folder that it can be packed again
                remember_listing(_name_remembered(config, raw, jobs_dir), listed, folder.name, raw=raw)
            data = pack(
                family.samples(raw, config),
                folder,
                meta=_describe_packing(config, jobs_dir),
                workers=workers or count_cores(),
                listing=listing,
                skip_bad=config.data.on_error == "skip",
                shard_mib=shard_mib,
                artifacts=_fit_artifacts(family, raw, config, folder),
                progress=progress,
                on_shard=count_shard,
            )
            if JPEG in data.meta:
                from trainyard.data.lossy import LOSS, measure_loss

                if not (folder / LOSS).exists():  # newly packed, or killed before this
                    loss = measure_loss(family.samples(raw, config), data, config.image)
                    logger.info("{}: {}", folder, loss.describe())
    skipped = f", {data.skipped} unreadable left out" if data.skipped else ""
    done = "packed" if written else "reused, as packed before from the same files by the same code:"
    logger.info("{} {}: {} samples in {} shards{}", done, folder, data.count, len(data.shards), skipped)
    for warning in describe_copies(data, lambda: find_splits(family, data, config)):
        logger.warning("{}: {}", folder, warning)
    if written and IMAGE in data.records and isinstance(getattr(config, "packing", None), StoreSettings):
        from trainyard.data.reading_rate import describe_reading

        logger.info("{}: {}", folder, describe_reading(data, config))
    data.close()
    return folder


def _fit_artifacts(family: Any, raw: Path, config: TrainConfig, folder: Path) -> Mapping[str, str] | None:
    """Return the artifacts that the family fits to the training part; None if it has no `fit_artifacts`."""
    from trainyard.data.index import INDEX, read_index

    if not hasattr(family, "fit_artifacts"):
        return None
    if (folder / INDEX).is_file():
        return read_index(folder).artifacts
    artifacts = require_mapping(family.fit_artifacts, family.fit_artifacts(raw, config), "a text for each name")
    for name, value in artifacts.items():
        if not isinstance(value, str):
            raise ContractError(
                f"{locate_code(family.fit_artifacts)}: '{name}' is {describe_value(value)}; expected a text, such as "
                "json.dumps(...)."
            )
    return artifacts


def prepare_data(
    config: TrainConfig,
    jobs_dir: Path,
    *,
    hook: Callable[[], None] = lambda: None,
    on_shard: Callable[[], None] = lambda: None,
) -> TrainConfig:
    """Return the config with `data.path` pointing to packed shards, which are synthesized and packed now if needed.

    `hook` and `on_shard` as for `pack_raw`; `hook` also while a family with such a parameter synthesizes.

    Raises:
        UserError: the job needs data but none was given, it cannot be packed, or it was packed for another family or
            for another size of the model's input.
    """
    from trainyard.data.index import read_index

    if is_packed(config):
        check_packed(read_index(Path(config.data.path)), config)
        return config
    raw = find_raw(config, jobs_dir)
    with nullcontext(raw) if raw else _synthesize_raw(config, jobs_dir, hook) as folder:
        packed = pack_raw(config, folder, None, jobs_dir, hook=hook, on_shard=on_shard)
    return replace(config, data=replace(config.data, path=str(packed)))


def count_samples(config: TrainConfig, jobs_dir: Path) -> int:
    """Return the number of samples of `data.path`: from its index, or from the family's listing of raw files.

    Raises:
        UserError: the shards are damaged or of another family, or the family refuses the raw files.
    """
    from trainyard.data.index import read_index

    if is_packed(config):
        index = read_index(Path(config.data.path))
        check_packed(index, config)
        return index.count
    return measure_raw(config, jobs_dir)[0]


def measure_raw(config: TrainConfig, jobs_dir: Path, seen: "Seen | None" = None) -> tuple[int, int]:
    """Return how many samples the raw files in `data.path` are, and about how many bytes; opens no image or sound.

    Args:
        seen: has watched the samples if they were listed before; then they are not listed again.

    Raises:
        UserError: there is no such folder, or the family refuses the raw files.
    """
    raw, seen = Path(config.data.path), seen or Seen(set())
    family = load_family(jobs_dir, config.family, "pack")
    _require_folder(raw, family)
    for _ in () if seen.count else seen.watch(family.samples(raw, config)):
        pass
    return seen.count, seen.estimate_bytes() + (raw.stat().st_size if raw.is_file() else 0)


def check_packed(index: "Index", config: TrainConfig) -> None:
    """Refuse packed data that this job cannot read.

    Raises:
        UserError: it was packed for another family, or for another size of the model's input.
    """
    from trainyard.data.store import check_inputs

    index.check_family(config.family)
    check_inputs(index.path.parent, index.records, index.meta, image=config.image, augmentation=config.augment)


def is_packed(config: TrainConfig) -> bool:
    """Return whether `data.path` contains shards."""
    return bool(config.data.path) and (Path(config.data.path) / "index.h5").is_file()


def find_packed(config: TrainConfig, jobs_dir: Path, seen: "Seen | None" = None) -> Path | None:
    """Return the packed data that `prepare_data` would find complete; None if it would pack.

    Raw files are not listed again if their folders have not changed since they were packed. `prepare_data` lists them,
    so that it notices a file that was overwritten in place, and packs again.

    Args:
        seen: watches the samples if they are listed.

    Raises:
        UserError: the raw files cannot be listed.
    """
    if not any(Path(config.data.cache).glob(f"{config.family}-*/index.h5")):
        return None  # and the raw files need not be listed
    raw = Path(config.data.path) if config.data.path else _name_synthetic(config, jobs_dir)
    if not raw.exists():
        return None
    known = recall_listing(_name_remembered(config, raw, jobs_dir))
    if known is None:
        folder = _list_raw(config, raw, jobs_dir, seen)[1]
    else:
        logger.info("{}: its folders are as they were when it was packed, so its files are not listed again", raw)
        folder = Path(config.data.cache) / Path(known).name
    return folder if (folder / "index.h5").is_file() else None


def packs_the_same(one: TrainConfig, other: TrainConfig) -> bool:
    """Return whether two jobs are packed from the same raw files into the same folder."""
    raw = [config.data.path or (config.family, config.data.synthetic, config.seed) for config in (one, other)]
    return raw[0] == raw[1] and one.data.cache == other.data.cache and build_meta(one) == build_meta(other)


def verify_packed(folder: Path, *, hook: Callable[[], None] = lambda: None) -> None:
    """Read packed data in full and compare them with their index; `hook` as for `pack_raw`.

    Raises:
        UserError: names the first damaged records, and the next command.
    """
    from trainyard.data.shards import verify

    damaged = list(verify(folder, lambda bytes_read: hook()))
    if damaged:
        named = "".join(f"\n  {damage.shard}: {damage.what}: {damage.reason}" for damage in damaged[:_MOST_NAMED])
        raise UserError(
            f"{folder}: {len(damaged)} damaged, although just packed or found packed:{named}\n"
            f"Delete the folder, which packs again: rm -r {shlex.quote(str(folder))}"
        )
    logger.info("verified {}: all records are as they were packed", folder)


def find_raw(config: TrainConfig, jobs_dir: Path) -> Path | None:
    """Return the folder of raw files that a run packs; None if it synthesizes them.

    Raises:
        UserError: the job needs data but none was given, or there is no such folder.
    """
    if config.data.path:
        _require_folder(Path(config.data.path), load_family(jobs_dir, config.family, "pack"))
        return Path(config.data.path)
    if config.data.synthetic:
        return None
    raise UserError(
        f"{config.job} needs data: data.path=FOLDER, or make run JOB={config.job} DATA=FOLDER. "
        f"The folder's layout: {jobs_dir / config.family}/README.md.{suggest_first_try(config, jobs_dir)}"
    )


def restore_source(config: TrainConfig, source: str, jobs_dir: Path) -> TrainConfig:
    """Return the config with `data.path` where the packed data that is gone came from, so that it is packed again.

    Args:
        source: as the run recorded it: the folder of raw files, or how many samples were synthesized; "": not recorded.

    Raises:
        UserError: the raw files are also gone.
    """
    gone = config.data.path
    if config.data.synthetic and source == describe_synthetic(config.data.synthetic):
        again = ""
    elif source and Path(source).exists():
        again = source
    else:
        differing = find_differences(compose(config.job, [], jobs_dir), config)
        names: tuple[str, ...] = ("packing.", "image.fill", "sound.rate")
        names += ("image.height_px", "image.width_px", "image.channels") if "input" in build_meta(config) else ()
        packing = [f"{d.name}={d.new}" for d in differing if d.name.startswith(names)]
        typed = shlex.join(["trainyard", "pack", config.job, "RAW", gone, *packing])
        raise UserError(
            f"{gone}: the packed data of this run is gone, and so are the raw files ({source or 'not recorded'}). Put "
            f"one of them back, or pack the same raw files: {typed}"
        )
    logger.warning("{}: the packed data is gone; packing it again from {}", gone, source)
    return replace(config, data=replace(config.data, path=again))


def describe_synthetic(count: int) -> str:
    """Name synthetic samples as the source of data."""
    return f"{count} synthetic samples"


def suggest_first_try(config: TrainConfig, jobs_dir: Path) -> str:
    """Return a sentence that names the family's preset for a few of the user's files; "" if it has none, or it runs."""
    few = f"{config.family}_few"
    if config.job == few or not (jobs_dir / config.family / f"{few}.yaml").is_file():
        return ""
    return f" A first try with 50 to 500 of your files: trainyard run {few} data.path=FOLDER."


def explain_no_sample(raw: Path, config: TrainConfig, jobs_dir: Path) -> str:
    """Return an error about a folder without samples of a family: the expected files, and those found."""
    expected = getattr(load_family(jobs_dir, config.family, "pack"), "RAW_FILES", "")
    more = f"{jobs_dir / config.family}/README.md"
    files = [Path(place) / name for place, _, names in itertools.islice(os.walk(raw), _LISTED) for name in names]
    present = count_by_suffix(str(path.relative_to(raw)) for path in sorted(files)) or "no file"
    return (
        f"contains no sample that {config.family} knows. "
        + (f"Expected: {expected}; more: {more}." if expected else f"Expected: what {more} describes.")
        + f" Found: {present}.{suggest_first_try(config, jobs_dir)}"
    )


def _require_folder(raw: Path, family: Any) -> None:
    if raw.is_file() and getattr(family, "TAKES_FILE", False):
        return
    if raw.is_file():
        option = format_override("data.path", str(raw.parent))
        raise UserError(
            f"{raw}: is a file, and a folder of raw files is expected. Name the one it is in: {option}, or make run "
            f"DATA={shlex.quote(str(raw.parent))}"
        )
    if not raw.is_dir():
        raise UserError(
            f"{raw}: no such folder. Name the folder of raw files: data.path=FOLDER, or make run DATA=FOLDER"
        )


@contextmanager
def _synthesize_raw(config: TrainConfig, jobs_dir: Path, hook: Callable[[], None]) -> Iterator[Path]:
    """Yield a folder of synthetic raw files, which stays until the block ends, even if `trainyard gc` is asked.

    If it is missing, it is written now, or an interrupted call finished if the family takes a `hook`; if its files are
    not those that were written, it is moved aside, and written again. Costs a reading of all files.

    Its name has the digest of generator and arguments: others write another folder. It is written under another
    name, which a kill leaves, and renamed when complete, whatever the family's `synthesize` does.
    """
    synthesize, raw = load_family(jobs_dir, config.family, "pack").synthesize, _name_synthetic(config, jobs_dir)
    unfinished, record = raw.with_name(f"{raw.name}.partial"), raw.with_name(f".{raw.name}.drawn")
    require_writable(raw.parent, flag="data.cache=")
    with _lock_folder(raw):
        if raw.is_dir() and (present := _describe_files(raw)) != (drawn := read_object(record)):
            aside = find_free_name(raw.with_name(f"{raw.name}.damaged"))
            logger.warning(
                "{}: has {} files, and not the {} that were drawn: moved to {}, and drawn again",
                *(raw, present["files"], drawn.get("files", "recorded"), aside),
            )
            raw.rename(aside)
        if not raw.is_dir():
            remove_partial_folders(unfinished)
            remove_partials(unfinished)
            logger.info("synthesizing {} samples into {}{}", config.data.synthetic, raw, _explain_synthesis(raw))
            hooks = {"hook": hook} if "hook" in inspect.signature(synthesize).parameters else {}
            if not hooks and unfinished.is_dir():  # soon drawn again, and many a family refuses a folder with files
                shutil.rmtree(unfinished)
            _remove_newest(unfinished)
            with name_full_disk(raw):
                synthesize(unfinished, count=config.data.synthetic, seed=config.seed, **hooks)
            write_json(record, _describe_files(unfinished))
            rename(unfinished, raw)
        yield raw


_WRITTEN_BACK_S = 120.0
"""Files are drawn without a flush; the kernel writes them to disk within half a minute, unless it is told otherwise."""


def _remove_newest(folder: Path) -> None:
    """Remove the files that were drawn last before an interruption: a power cut may have left zeros or a part of them.

    By the file system's own times, so no clock is compared with another.
    """
    changed = {path: path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}
    newest_s = max(changed.values(), default=0.0)
    for path, time_s in changed.items():
        if time_s > newest_s - _WRITTEN_BACK_S:
            path.unlink()


def _describe_files(folder: Path) -> dict[str, Any]:
    """Return how many files are in a folder and below it, and a digest of their names and contents."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = "".join(f"{hash_file(path)} {path.relative_to(folder)}\n" for path in paths)
    return {"files": len(paths), "sha256": hashlib.sha256(digests.encode()).hexdigest()}


def _explain_synthesis(raw: Path) -> str:
    """Explain why samples are synthesized although a folder of as many, from the same seed, is there; "" if none is."""
    if raw.with_name(f"{raw.name}.partial").is_dir():
        return ": finishing an interrupted call"
    alike = raw.name.rpartition("-")[0]
    alike_names = [path.name for path in raw.parent.glob(f"{alike}*") if not path.name.startswith(raw.name)]
    others = [name for name in alike_names if name == alike or name[len(alike)] == "-"]
    return f": the generator has changed since it made {join_names(sorted(others))} (kept)" if others else ""


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time create this folder, because all runs of a sweep find it missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(name_guard(folder)):
            yield
    except FlockRefused as error:
        raise UserError(
            f"{folder.parent}: this file system cannot stop two runs from creating {folder.name} at once ({error}). "
            "Pack once by hand to another folder: trainyard pack JOB RAW OUT, then set data.path=OUT"
        ) from None


def _log_reading(family: Any, raw: Path, config: TrainConfig, seen: "Seen") -> None:
    """Log how a folder is read: five examples, and which files are not read."""
    if hasattr(family, "log_reading"):
        family.log_reading(raw, config)
    else:
        logger.info("{}: {} samples. For example:", raw, seen.count)
        for line in seen.describe_examples():
            logger.info("{}", line)
    log_unread(raw, seen)


def log_unread(raw: Path, seen: "Seen") -> None:
    """Log which files of a folder are not read, by their endings."""
    if raw.is_file():
        return
    media, other_files = describe_unread(raw, seen.is_read)
    if media:
        logger.warning("{}: not read: {}", raw, media)
    if other_files:
        logger.info("{}: not read, because they hold no samples: {}", raw, other_files)


class Seen:
    """The raw files of all samples that a folder has, and some of the samples, to show how the folder is read.

    Args:
        read: the tables and texts that were read.
    """

    def __init__(self, read: Set[Path]) -> None:
        self.count = 0
        self._read, self._sources = read, set[int]()
        self._kept: list[Sample] = []
        self._step = 1

    def watch(self, samples: "Iterable[Sample]") -> "Iterator[Sample]":
        """Yield samples; keep evenly spaced ones, however many there are."""
        for number, sample in enumerate(samples):
            self.count += 1
            if sample.source is not None:
                self._sources.add(hash(sample.source))
            if number % self._step == 0:
                self._kept.append(sample)
            if len(self._kept) > 8 * _EXAMPLES:
                self._kept, self._step = self._kept[::2], 2 * self._step
            yield sample

    def is_read(self, path: Path) -> bool:
        """Return whether a file is a table that was read, or a sample's raw file."""
        return path in self._read or hash(path) in self._sources

    def estimate_bytes(self) -> int:
        """Return the size of all raw files, by the mean of those whose samples were kept."""
        sizes = [path.stat().st_size for path in {sample.source for sample in self._kept} if path and path.is_file()]
        return len(self._sources) * sum(sizes) // max(len(sizes), 1)

    def describe_examples(self) -> list[str]:
        """Return a table of five samples: names and columns."""
        last = len(self._kept) - 1
        examples = [self._kept[i] for i in sorted({i * last // (_EXAMPLES - 1) for i in range(_EXAMPLES)})]
        names = list(dict.fromkeys(name for sample in examples for name in sample.columns))
        rows = [[cut(str(s.columns.get(name, "")) or "-", _CELL) for name in names] for s in examples]
        table = [["sample", *names], *([sample.key, *row] for sample, row in zip(examples, rows, strict=True))]
        return align_columns(table, indent="  ")


def _list_raw(config: TrainConfig, raw: Path, jobs_dir: Path, seen: "Seen | None" = None) -> "tuple[Listing, Path]":
    """List a folder of raw files; return also the folder under `data.cache` that they are packed to."""
    from trainyard.data.pack import read_listing

    samples = _list_samples(load_family(jobs_dir, config.family, "pack"), raw, config)
    listing = read_listing(samples if seen is None else seen.watch(samples), _describe_packing(config, jobs_dir))
    return listing, Path(config.data.cache) / f"{config.family}-{listing.digest[:12]}"


def _list_samples(pack: Any, raw: Path, config: TrainConfig) -> "Iterator[Sample]":
    """Yield what `pack.samples` yields, which are samples."""
    from trainyard.data.shards import Sample

    yielded = pack.samples(raw, config)
    if not isinstance(yielded, Iterable):
        raise ContractError(
            f"{locate_code(pack.samples)} returned {describe_value(yielded)}; expected it to yield Samples."
        )
    for sample in yielded:
        if not isinstance(sample, Sample):
            raise ContractError(f"{locate_code(pack.samples)} yielded {describe_value(sample)}; expected a Sample.")
        if not isinstance(sample.key, str):
            key = describe_value(sample.key)
            raise ContractError(f"{locate_code(pack.samples)}: the key of a Sample is {key}; expected text.")
        yield sample


def _name_remembered(config: TrainConfig, raw: Path, jobs_dir: Path) -> Path:
    """Return the file that stores the packed folder's name for raw files."""
    key = json.dumps([str(raw.absolute()), _describe_packing(config, jobs_dir)], sort_keys=True)
    return Path(config.data.cache) / f".{config.family}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.listing"


def _describe_packing(config: TrainConfig, jobs_dir: Path) -> dict[str, Any]:
    """Return what decides about packed data besides the raw files, with the family's code that packs."""
    return {**build_meta(config), "code": hash_packing(jobs_dir / config.family)}


def _name_synthetic(config: TrainConfig, jobs_dir: Path) -> Path:
    made_by = f"{config.data.synthetic}-seed{config.seed}-{hash_generator(jobs_dir / config.family)}"
    return Path(config.data.cache) / f"{config.family}-synthetic-{made_by}"


def build_meta(config: TrainConfig) -> dict[str, Any]:
    """Return what decides about packed data besides the raw files."""
    packing = getattr(config, "packing", None)
    # Data that was packed before an option existed keeps its name: an option that is off is left out.
    options = {} if packing is None else {name: value for name, value in asdict(packing).items() if value != OFF}
    meta: dict[str, Any] = {
        "family": config.family,
        "fill": config.image.fill,
        "rate_hz": config.sound.rate_hz,
        "packing": options,
    }
    if not isinstance(packing, StoreSettings):
        return meta
    jpeg = {name: meta["packing"].pop(name) for name in ("longest_side_px", "quality")}
    if packing.store == KEEP:
        del meta["packing"]["store"]  # so that data packed before this option existed keeps its name
    elif packing.store == JPEG:
        meta[JPEG] = jpeg
    else:
        from trainyard.data.store import describe_store

        meta["input"] = describe_store(packing.store, config.image)
    return meta
