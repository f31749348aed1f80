"""What runs on the node: data made ready, everything decided and recorded, then training.

Torch, h5py and DALI are imported inside the functions, because the submitting side imports this file to pickle it.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from trainyard.errors import UserError
from trainyard.hardware import available_cores, gpu_by_name, precision_for
from trainyard.launch.config import load_family, thaw
from trainyard.launch.runs import CONFIG, RunLock, update_record
from trainyard.settings import Duration, TrainConfig

if TYPE_CHECKING:
    import torch

    from trainyard.data.shards import ShardSet
    from trainyard.train.distributed import World
    from trainyard.train.engine import Job


def pack_raw(
    config: TrainConfig, raw: Path, out: Path | None, jobs_dir: Path, *, workers: int = 0, shard_mib: int = 256
) -> Path:
    """Pack a folder of raw files, or finish packing it; return the folder of shards.

    Args:
        out: None: a folder under `data.cache` named after what is packed and how, so that a change of either makes
            another data set and nothing is ever mixed.
        workers: processes; 0: the cores this process may use.

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
    meta = {"family": config.family, "fill": config.image.fill, "packing": _packing_options(config)}
    count, listing = listing_of(family.samples(raw, config), meta)
    if not count:
        raise UserError(
            f"{raw}: holds no sample that {config.family} knows. What it expects: {jobs_dir / config.family}/README.md"
        )
    folder = out or Path(config.data.cache) / f"{config.family}-{listing[:12]}"
    with tqdm(total=count, unit="sample", desc=f"packing {raw.name}", disable=None, leave=False) as bar:
        data = pack(
            family.samples(raw, config),
            folder,
            meta=meta,
            workers=workers or available_cores(),
            skip_bad=config.data.on_error == "skip",
            shard_mib=shard_mib,
            progress=bar.update,
        )
    skipped = f", {data.skipped} unreadable left out" if data.skipped else ""
    logger.info("packed {}: {} samples in {} shards{}", folder, data.count, len(data.shards), skipped)
    data.close()
    return folder


def ready_data(config: TrainConfig, jobs_dir: Path) -> TrainConfig:
    """Return the config with `data.path` pointing at packed shards: synthesized and packed now if need be.

    Raises:
        UserError: the job needs data and was given none, or what it was given cannot be packed.
    """
    from trainyard.data.shards import INDEX

    if config.data.path and (Path(config.data.path) / INDEX).is_file():
        return config
    raw = Path(config.data.path) if config.data.path else _synthetic(config, jobs_dir)
    packed = pack_raw(config, raw, None, jobs_dir)
    return replace(config, data=replace(config.data, path=str(packed)))


def execute(run: Path, jobs_dir: Path, *, environ: Mapping[str, str], started: float, break_lock: bool = False) -> int:
    """Train the run in this folder, from wherever it stands, as the rank that the environment says.

    Args:
        started: when the session began, seconds since the epoch: `max_runtime` counts from there.

    Returns:
        The exit code: `train.stop.EXIT_CODES`.

    Raises:
        UserError: what was asked for cannot be done; the message says why.
    """
    from trainyard.train import distributed
    from trainyard.train.engine import fit
    from trainyard.train.stop import EXIT_CODES, RuntimeLimit, StopFlag

    world = distributed.world_from(environ)
    config = thaw(run / CONFIG, jobs_dir)
    limit = Duration.parse(config.max_runtime).minutes() if config.max_runtime else None
    with StopFlag() as stop, _sole_writer(run, world, break_lock), _log(run, world):
        distributed.join(world, run)
        try:
            job = _job(run, config, jobs_dir, world)
            return EXIT_CODES[fit(job, stop=stop, limit=RuntimeLimit(limit, started=started))]
        finally:
            distributed.leave()


def _synthetic(config: TrainConfig, jobs_dir: Path) -> Path:
    """Return a folder of synthetic raw files, made now if it is not there."""
    count, seed = config.data.synthetic, config.seed
    if not count:
        raise UserError(
            f"{config.job} needs data: data.path=FOLDER, or make run JOB={config.job} DATA=FOLDER. "
            f"What the folder should hold: {jobs_dir / config.family}/README.md"
        )
    raw = Path(config.data.cache) / f"{config.family}-synthetic-{count}-seed{seed}"
    if not raw.is_dir():
        logger.info("drawing {} synthetic samples into {}", count, raw)
        load_family(jobs_dir, config.family, "pack").synthesize(raw, count=count, seed=seed)
    return raw


def _packing_options(config: TrainConfig) -> dict[str, Any]:
    packing = getattr(config, "packing", None)
    return asdict(packing) if packing is not None else {}


@contextmanager
def _sole_writer(run: Path, world: "World", break_lock: bool) -> Iterator[None]:
    if not world.is_main:
        yield
        return
    with RunLock(run, break_other_host=break_lock):
        yield


@contextmanager
def _log(run: Path, world: "World") -> Iterator[None]:
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


def _job(run: Path, config: TrainConfig, jobs_dir: Path, world: "World") -> "Job":
    """Decide everything that depends on this machine and on the data, and record each choice with its reason."""
    import torch

    from trainyard.data.loader import choose_decoder
    from trainyard.data.shards import ShardSet
    from trainyard.train import distributed, precision
    from trainyard.train.engine import Job
    from trainyard.train.module import DataInfo

    device = distributed.device_of(world)
    sm, name = _card(device)
    policy = precision_for(sm, precision=config.precision, channels_last=config.channels_last, compile=config.compile)
    importable = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
    decode, why = choose_decoder(config.data.decode, importable=importable)
    cores = max(1, available_cores() // world.local_world_size)
    torch.set_num_threads(cores)
    precision.set_switches(policy, deterministic=config.deterministic)
    choices = {
        "device": _Choice(name, f"rank 0 of {world.world_size}, started by {world.launcher}"),
        **{name: _Choice(getattr(policy, name), reason) for name, reason in policy.reasons.items()},
        "decode": _Choice(decode, why),
        "threads": _Choice(config.data.threads or cores, "cores of this process, shared by the ranks of the node"),
        "micro_batch_size": _micro_batch(config, world),
    }
    data = ShardSet(Path(config.data.path))
    choices["reader"] = _Choice(data.reader, data.reader_reason)
    splits = load_family(jobs_dir, config.family, "pack").splits(data.columns, data.vocabulary, config)
    if world.is_main:
        _record(run, choices, data, {name: len(ids) for name, ids in splits.items()})
    torch.manual_seed(config.seed)
    info = DataInfo(data.columns, data.vocabulary, splits["train"])
    module = load_family(jobs_dir, config.family, "module").build(config, info)
    threads = config.data.threads or cores
    return Job(config, module, data, splits, world, device, policy, decode, threads, run)


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


def _micro_batch(config: TrainConfig, world: "World") -> _Choice:
    share = -(-config.global_batch_size // world.world_size)
    size = min(config.micro_batch_size or share, share)
    return _Choice(
        size, f"global batch {config.global_batch_size} over {world.world_size} ranks in {-(-share // size)} parts each"
    )


def _record(run: Path, choices: Mapping[str, _Choice], data: "ShardSet", sizes: Mapping[str, int]) -> None:
    update_record(run, "choices", {name: asdict(choice) for name, choice in choices.items()})
    update_record(run, "data", {"path": str(data.folder), "fingerprint": data.fingerprint, "samples": data.count})
    update_record(run, "data", {"skipped": data.skipped, "splits": dict(sizes)})
    for name, choice in choices.items():
        logger.info("{:<16} {}  ({})", name, choice.value, choice.reason)
    logger.info("{:<16} {}", "data", "  ".join(f"{name} {size}" for name, size in sizes.items()))
