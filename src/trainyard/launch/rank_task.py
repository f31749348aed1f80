"""What runs on the node: data made ready, everything decided and recorded, then training.

Torch, h5py and DALI are imported inside the functions, because the submitting side imports this file to pickle it.
"""

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from trainyard.config import freeze, load_family, thaw
from trainyard.data.prepare import StopRequested, is_packed, prepare_data
from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.hardware import (
    available_cores,
    compute_threads,
    gpu_by_name,
    openmp_wait_policy,
    precision_for,
    read_driver_version,
    set_openmp_wait_policy,
    why_no_gpu,
    why_no_kernels,
)
from trainyard.runs.folder import CONFIG, record_error, update_env
from trainyard.runs.lock import RunLock
from trainyard.runs.state import ExitCode
from trainyard.settings import Duration, TrainConfig
from trainyard.train.world import World, read_attempt_id, read_world

if TYPE_CHECKING:
    import signal

    import torch

    from trainyard.data.shards import ShardSet
    from trainyard.data.stage import Staged
    from trainyard.train.heartbeat import Heartbeat
    from trainyard.train.run_context import RunContext
    from trainyard.train.stop import RuntimeLimit, StopFlag


@dataclass(frozen=True)
class RankTask:
    """One rank of one start of a submitted run: what submitit pickles. Everything else stands in the run's folder."""

    run: Path
    jobs: Path
    since: float = 0.0  # start of all ranks, seconds since the epoch; 0: each rank's own

    def __call__(self) -> None:
        """Train, and leave with the exit code: submitit would call a run that stopped half-way a success."""
        set_openmp_wait_policy(os.environ)
        try:
            code = execute(self.run, self.jobs, environ=os.environ, started=self.since or time.time())
            if code == 0 and read_world(os.environ).is_main:
                _report(self.run)
        except UserError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 2
        if code:
            sys.exit(code)


def _report(run: Path) -> None:
    from trainyard.report.run_page import write_report

    print(f"report: {write_report(run)}")


def execute(run: Path, jobs_dir: Path, *, environ: Mapping[str, str], started: float, break_lock: bool = False) -> int:
    """Train the run in this folder, from wherever it stands, as the rank that the environment says.

    Args:
        started: when the session began, seconds since the epoch: `max_runtime` counts from there.

    Returns:
        The exit code: `ExitCode`.

    Raises:
        UserError: what was asked for cannot be done; the message says why.
    """
    from trainyard.train.stop import StopFlag

    world, attempt = read_world(environ), read_attempt_id(environ, started=started)
    notes = _Notes(run, attempt, written="TRAINYARD_ATTEMPT" in environ)
    with StopFlag(notes.signal) as stop:  # before torch is imported: a warning may come early
        try:
            lock = RunLock(run, break_other_host=break_lock, attempt=attempt) if world.is_main else None
            with lock or nullcontext(), _log(run, world):
                code = _train(run, jobs_dir, world, stop, lock, environ=environ, attempt=attempt, started=started)
        except BaseException as error:
            record_error(run, error, attempt=attempt, rank=world.rank)
            if isinstance(error, UserError):
                notes.left(ExitCode.USER_ERROR)
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
    from trainyard.train.heartbeat import Heartbeat
    from trainyard.train.stop import EXIT_CODES, RuntimeLimit
    from trainyard.train.trainer import fit

    heartbeat = Heartbeat(run, attempt)
    try:
        config = _with_data(run, jobs_dir, world, heartbeat, stop)
    except StopRequested:
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
        StopRequested: a signal came before that was done.
    """

    def hook() -> None:
        if stop.reason:
            raise StopRequested
        if world.is_main:
            heartbeat.beat("preparing")

    config = thaw(run / CONFIG, jobs_dir)
    if world.is_main:
        heartbeat.beat("preparing", now=True)
        ready = prepare_data(config, jobs_dir, hook=hook)
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
        return bool(stop.reason) or limit.is_reached(reserve_s=0)

    folder = Path(config.data.path)
    staged = stage(folder, wanted=config.data.stage, environ=environ, stop_requested=stop_asked, tell=logger.info)
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
) -> "RunContext":
    """Decide everything that depends on this machine and on the data, and record each choice with its reason."""
    import torch

    from trainyard.data.loader import choose_decoder
    from trainyard.data.shards import ShardSet
    from trainyard.train import distributed, precision
    from trainyard.train.module import DataInfo
    from trainyard.train.run_context import RunContext

    device = distributed.select_device(world)
    sm, name = _card(device)
    if (
        fault := why_no_gpu(read_driver_version(), environ)
        if sm is None
        else why_no_kernels(sm, torch.cuda.get_arch_list())
    ):
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
    info = DataInfo.from_shards(data, splits["train"])
    module = load_family(jobs_dir, config.family, "module").build(config, info)
    decoding = config.data.threads or cores
    check_owner = lock.check if lock else lambda: None
    return RunContext(
        config, module, data, splits, world, device, policy, decode, decoding, run, heartbeat, check_owner
    )


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
    update_env(run, "choices", {name: asdict(choice) for name, choice in choices.items()})
    update_env(run, "data", {"path": path, "fingerprint": data.fingerprint, "samples": data.count})
    update_env(run, "data", {"skipped": data.skipped, "splits": dict(sizes)})
    for name, choice in choices.items():
        logger.info("{:<16} {}  ({})", name, choice.value, choice.reason)
    logger.info("{:<16} {}", "data", "  ".join(f"{name} {size}" for name, size in sizes.items()))
