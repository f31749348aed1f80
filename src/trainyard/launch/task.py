"""What runs on the node: data made ready, everything decided and recorded, then training.

Torch, h5py and DALI are imported inside the functions, because the submitting side imports this file to pickle it.
"""

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from trainyard.errors import UserError
from trainyard.hardware import (
    available_cores,
    compute_threads,
    gpu_by_name,
    loaded_driver,
    openmp_wait_policy,
    precision_for,
    set_openmp_wait_policy,
    why_no_gpu,
    why_no_kernels,
)
from trainyard.launch.config import freeze, load_family, thaw, write_atomically
from trainyard.launch.runs import CONFIG, FlockRefused, RunLock, alone, record_error, update_record
from trainyard.settings import Duration, TrainConfig
from trainyard.train.world import World, attempt_id, world_from

if TYPE_CHECKING:
    import signal

    import torch

    from trainyard.data.shards import ShardSet
    from trainyard.data.stage import Staged
    from trainyard.train.engine import Job
    from trainyard.train.record import Heartbeat
    from trainyard.train.stop import RuntimeLimit, StopFlag


class StopAsked(Exception):
    """Raised by a hook to leave what can be gone on with later."""


def pack_raw(
    config: TrainConfig,
    raw: Path,
    out: Path | None,
    jobs_dir: Path,
    *,
    workers: int = 0,
    shard_mib: int = 256,
    hook: Callable[[], None] = lambda: None,
) -> Path:
    """Pack a folder of raw files, or finish packing it; return the folder of shards.

    Args:
        out: None: a folder under `data.cache` named after what is packed and how, so that a change of either makes
            another data set and nothing is ever mixed.
        workers: processes; 0: the cores this process may use.
        hook: called now and then; what it raises stops the packing, which can be finished later.

    Raises:
        UserError: the raw folder is missing, holds nothing the job knows, or holds files that cannot be read.
    """
    from tqdm import tqdm

    from trainyard.data.pack import listing_of, pack

    if not raw.is_dir():
        raise UserError(
            f"{raw}: no such folder. Give the folder of raw files: data.path=FOLDER, or make run DATA=FOLDER"
        )
    family = load_family(jobs_dir, config.family, "pack")
    meta = {
        "family": config.family,
        "fill": config.image.fill,
        "rate_hz": config.sound.rate_hz,
        "packing": _packing_options(config),
    }
    count, listing = listing_of(family.samples(raw, config), meta)
    if not count:
        raise UserError(
            f"{raw}: holds no sample that {config.family} knows. What it expects: {jobs_dir / config.family}/README.md"
        )
    folder = out or Path(config.data.cache) / f"{config.family}-{listing[:12]}"

    def progress(samples: int) -> None:
        bar.update(samples)
        hook()

    with (
        _first_come(folder),
        tqdm(total=count, unit="sample", desc=f"packing {raw.name}", disable=None, leave=False) as bar,
    ):
        data = pack(
            family.samples(raw, config),
            folder,
            meta=meta,
            workers=workers or available_cores(),
            skip_bad=config.data.on_error == "skip",
            shard_mib=shard_mib,
            learned=_learned(family, raw, config, folder),
            progress=progress,
        )
    skipped = f", {data.skipped} unreadable left out" if data.skipped else ""
    logger.info("packed {}: {} samples in {} shards{}", folder, data.count, len(data.shards), skipped)
    data.close()
    return folder


def _learned(family: Any, raw: Path, config: TrainConfig, folder: Path) -> Mapping[str, str] | None:
    """Return what the family learns from the training part before it packs; None if it has no `learn`."""
    from trainyard.data.shards import INDEX, learned_of

    if not hasattr(family, "learn"):
        return None
    learned: Mapping[str, str] = learned_of(folder) if (folder / INDEX).is_file() else family.learn(raw, config)
    return learned


def ready_data(config: TrainConfig, jobs_dir: Path, *, hook: Callable[[], None] = lambda: None) -> TrainConfig:
    """Return the config with `data.path` pointing at packed shards: synthesized and packed now if need be.

    Raises:
        UserError: the job needs data and was given none, or what it was given cannot be packed.
    """
    if is_packed(config):
        return config
    raw = Path(config.data.path) if config.data.path else _synthetic(config, jobs_dir)
    packed = pack_raw(config, raw, None, jobs_dir, hook=hook)
    return replace(config, data=replace(config.data, path=str(packed)))


def is_packed(config: TrainConfig) -> bool:
    """Tell whether `data.path` holds shards."""
    return bool(config.data.path) and (Path(config.data.path) / "index.h5").is_file()


@dataclass(frozen=True)
class Attempt:
    """One rank of one start of a submitted run: what submitit pickles. Everything else stands in the run's folder."""

    run: Path
    jobs: Path
    since: float = 0.0  # start of all ranks, seconds since the epoch; 0: each rank's own

    def __call__(self) -> None:
        """Train, and leave with the exit code: submitit would call a run that stopped half-way a success."""
        set_openmp_wait_policy(os.environ)
        try:
            code = execute(self.run, self.jobs, environ=os.environ, started=self.since or time.time())
            if code == 0 and world_from(os.environ).is_main:
                _report(self.run)
        except UserError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 2
        if code:
            sys.exit(code)


def _report(run: Path) -> None:
    from trainyard.train.report import write_report

    print(f"report: {write_report(run)}")


def execute(run: Path, jobs_dir: Path, *, environ: Mapping[str, str], started: float, break_lock: bool = False) -> int:
    """Train the run in this folder, from wherever it stands, as the rank that the environment says.

    Args:
        started: when the session began, seconds since the epoch: `max_runtime` counts from there.

    Returns:
        The exit code: `train.stop.EXIT_CODES`.

    Raises:
        UserError: what was asked for cannot be done; the message says why.
    """
    from trainyard.train.stop import EXIT_USER_ERROR, StopFlag

    world, attempt = world_from(environ), attempt_id(environ, started=started)
    notes = _Notes(run, attempt, written="TRAINYARD_ATTEMPT" in environ)
    with StopFlag(notes.signal) as stop:  # before torch is imported: a warning may come early
        try:
            lock = RunLock(run, break_other_host=break_lock, attempt=attempt) if world.is_main else None
            with lock or nullcontext(), _log(run, world):
                code = _train(run, jobs_dir, world, stop, lock, environ=environ, attempt=attempt, started=started)
        except BaseException as error:
            record_error(run, error, attempt=attempt, rank=world.rank)
            if isinstance(error, UserError):
                notes.left(EXIT_USER_ERROR)
            raise
    if world.is_main:
        notes.left(code)
    return code


def _train(
    run: Path,
    jobs_dir: Path,
    world: World,
    stop: "StopFlag",
    lock: RunLock | None,
    *,
    environ: Mapping[str, str],
    attempt: str,
    started: float,
) -> int:
    from trainyard.train import distributed
    from trainyard.train.engine import fit
    from trainyard.train.record import Heartbeat
    from trainyard.train.stop import EXIT_CODES, RuntimeLimit

    heartbeat = Heartbeat(run, attempt)
    try:
        config = _with_data(run, jobs_dir, world, heartbeat, stop)
    except StopAsked:
        return EXIT_CODES[stop.reason]
    minutes = Duration.parse(config.max_runtime).minutes() if config.max_runtime else None
    limit = RuntimeLimit(minutes, started=started)
    distributed.join(world, run)
    try:
        staged = _stage(config, world, heartbeat, stop, limit, environ)
        job = _job(run, config, staged, jobs_dir, world, heartbeat, lock, environ)
        return EXIT_CODES[fit(job, stop=stop, limit=limit)]
    finally:
        distributed.leave()


def _with_data(run: Path, jobs_dir: Path, world: World, heartbeat: "Heartbeat", stop: "StopFlag") -> TrainConfig:
    """Return the run's config with packed data: rank 0 packs what is raw and says so in the config, others wait.

    Raises:
        StopAsked: a signal came before that was done.
    """

    def hook() -> None:
        if stop.reason:
            raise StopAsked
        if world.is_main:
            heartbeat.beat("preparing")

    config = thaw(run / CONFIG, jobs_dir)
    if world.is_main:
        heartbeat.beat("preparing", now=True)
        ready = ready_data(config, jobs_dir, hook=hook)
        if ready.data.path != config.data.path:
            freeze(ready, run / CONFIG)
        return ready
    while not is_packed(config):
        hook()
        time.sleep(1)
        config = thaw(run / CONFIG, jobs_dir)
    return config


def _stage(
    config: TrainConfig,
    world: World,
    heartbeat: "Heartbeat",
    stop: "StopFlag",
    limit: "RuntimeLimit",
    environ: Mapping[str, str],
) -> "Staged":
    """Return where this node reads the data. Told to stop, it gives up copying, and the first step saves and leaves."""
    from trainyard.data.stage import stage

    def stop_asked() -> bool:
        if world.is_main:
            heartbeat.beat("preparing")
        return bool(stop.reason) or limit.reached(reserve_s=0)

    folder = Path(config.data.path)
    staged = stage(folder, wanted=config.data.stage, environ=environ, stop_asked=stop_asked, tell=logger.info)
    if staged.failed and world.local_rank == 0 and not world.is_main:  # rank 0 records its own among the choices
        logger.warning("{} reads from {}: {}", socket.gethostname(), folder, staged.reason)
    return staged


class _Notes:
    """What the ranks leave for the batch script, which may run outside their image: see attempt.sh."""

    def __init__(self, run: Path, attempt: str, *, written: bool) -> None:
        self._folder, self._attempt, self._written = run / "slurm", attempt, written

    def signal(self, number: "signal.Signals") -> None:
        """Keep the first signal that any rank notices, with its time."""
        path = self._folder / f"signal-{self._attempt}"
        if self._written and not path.exists():
            path.write_text(f"{number.name} {time.time():.1f}\n")

    def left(self, code: int) -> None:
        """Say with which code the ranks leave: srun's own may be that of a rank it killed because another left."""
        if self._written:
            write_atomically(self._folder / f"left-{self._attempt}", f"{code}\n")


def _synthetic(config: TrainConfig, jobs_dir: Path) -> Path:
    """Return a folder of synthetic raw files, made now if it is not there."""
    count, seed = config.data.synthetic, config.seed
    if not count:
        raise UserError(
            f"{config.job} needs data: data.path=FOLDER, or make run JOB={config.job} DATA=FOLDER. "
            f"What the folder should hold: {jobs_dir / config.family}/README.md"
        )
    raw = Path(config.data.cache) / f"{config.family}-synthetic-{count}-seed{seed}"
    with _first_come(raw):
        if not raw.is_dir():
            logger.info("drawing {} synthetic samples into {}", count, raw)
            load_family(jobs_dir, config.family, "pack").synthesize(raw, count=count, seed=seed)
    return raw


@contextmanager
def _first_come(folder: Path) -> Iterator[None]:
    """Let one process at a time make this folder: the runs of a sweep all find that it is missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder.with_name(f".{folder.name}.guard")):
            yield
    except FlockRefused as error:
        raise UserError(
            f"{folder.parent}: this file system cannot keep two runs from making {folder.name} at once ({error}). "
            "Pack once, by hand, to another place: trainyard pack JOB RAW OUT, then data.path=OUT"
        ) from None


def _packing_options(config: TrainConfig) -> dict[str, Any]:
    packing = getattr(config, "packing", None)
    return asdict(packing) if packing is not None else {}


@contextmanager
def _log(run: Path, world: World) -> Iterator[None]:
    """Send rank 0's lines to the run's log file too; other ranks say only what went wrong."""
    from trainyard.train.console import log_sink

    logger.remove()
    if world.is_main:
        logger.add(log_sink, format="{time:HH:mm:ss} {message}", level="INFO", colorize=False)
        logger.add(run / "log", format="{time:YYYY-MM-DD HH:mm:ss} {level} {message}", level="DEBUG")
    else:
        logger.add(sys.stderr, format=f"rank {world.rank}: {{message}}", level="WARNING")
    try:
        yield
    finally:
        logger.remove()
        logger.add(sys.stderr, format="{message}", level="INFO")


@dataclass(frozen=True)
class _Choice:
    value: Any
    reason: str


def _job(
    run: Path,
    config: TrainConfig,
    staged: "Staged",
    jobs_dir: Path,
    world: World,
    heartbeat: "Heartbeat",
    lock: RunLock | None,
    environ: Mapping[str, str],
) -> "Job":
    """Decide everything that depends on this machine and on the data, and record each choice with its reason."""
    import torch

    from trainyard.data.loader import choose_decoder
    from trainyard.data.shards import ShardSet
    from trainyard.train import distributed, precision
    from trainyard.train.engine import Job
    from trainyard.train.module import DataInfo

    device = distributed.device_of(world)
    sm, name = _card(device)
    if fault := why_no_gpu(loaded_driver(), environ) if sm is None else why_no_kernels(sm, torch.cuda.get_arch_list()):
        raise UserError(f"Rank {world.rank}: {fault}")
    policy = precision_for(sm, precision=config.precision, channels_last=config.channels_last, compile=config.compile)
    importable = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
    decode, why = choose_decoder(config.data.decode, importable=importable)
    cores, why_cores = _cores(world)
    threads, why_threads = compute_threads(environ, cores=cores, reason=why_cores, launcher=world.launcher)
    torch.set_num_threads(threads)
    precision.set_switches(policy, deterministic=config.deterministic)
    choices = {
        "device": _Choice(name, f"rank 0 of {world.world_size}, started by {world.launcher}"),
        **{name: _Choice(getattr(policy, name), reason) for name, reason in policy.reasons.items()},
        "decode": _Choice(decode, why),
        "threads": _Choice(config.data.threads or cores, "data.threads" if config.data.threads else why_cores),
        "compute_threads": _Choice(threads, why_threads),
        "openmp_wait": _Choice(*openmp_wait_policy(environ)),
        "micro_batch_size": _micro_batch(config, world),
        "freed_memory": _Choice(*precision.keep_freed_memory(device)),
    }
    data = ShardSet(staged.folder)
    choices["stage"] = _Choice(str(data.folder) if staged.copied else "off", staged.reason)
    choices["reader"] = _Choice(data.reader, data.reader_reason)
    splits = load_family(jobs_dir, config.family, "pack").splits(data.columns, data.vocabulary, config)
    if world.is_main:
        _record(run, choices, config.data.path, data, {name: len(ids) for name, ids in splits.items()})
    torch.manual_seed(config.seed)
    info = DataInfo.of(data, splits["train"])
    module = load_family(jobs_dir, config.family, "module").build(config, info)
    decoding = config.data.threads or cores
    check_owner = lock.check if lock else lambda: None
    return Job(config, module, data, splits, world, device, policy, decode, decoding, run, heartbeat, check_owner)


def _card(device: "torch.device") -> tuple[int | None, str]:
    """Return a device's compute capability (major * 10 + minor; None: CPU) and its name."""
    import torch

    if device.type == "cpu":
        return None, f"CPU, {available_cores()} cores"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    known = gpu_by_name(name, memory_gib)
    return 10 * major + minor, f"{name}, {memory_gib:.1f} GiB" + ("" if known else " (not in our table of GPUs)")


def _cores(world: World) -> tuple[int, str]:
    """Return how many cores this rank may keep busy, and the reason."""
    available = available_cores()
    if world.cores is not None:  # bound or not: Slurm gives a rank so many, and this machine may have fewer
        return max(
            1, min(world.cores, available)
        ), f"Slurm's cores per task ({world.cores}), of {available} usable here"
    return max(1, available // world.local_world_size), "cores of this process, shared by the ranks of the node"


def _micro_batch(config: TrainConfig, world: World) -> _Choice:
    share = -(-config.global_batch_size // world.world_size)
    size = min(config.micro_batch_size or share, share)
    return _Choice(
        size, f"global batch {config.global_batch_size} over {world.world_size} ranks in {-(-share // size)} parts each"
    )


def _record(run: Path, choices: Mapping[str, _Choice], path: str, data: "ShardSet", sizes: Mapping[str, int]) -> None:
    update_record(run, "choices", {name: asdict(choice) for name, choice in choices.items()})
    update_record(run, "data", {"path": path, "fingerprint": data.fingerprint, "samples": data.count})
    update_record(run, "data", {"skipped": data.skipped, "splits": dict(sizes)})
    for name, choice in choices.items():
        logger.info("{:<16} {}  ({})", name, choice.value, choice.reason)
    logger.info("{:<16} {}", "data", "  ".join(f"{name} {size}" for name, size in sizes.items()))
