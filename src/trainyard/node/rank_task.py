"""Runs one rank: prepares the data, decides and records everything that depends on the machine, then trains.

Torch, h5py and DALI are imported inside the functions, because the submitting side imports this file to pickle it.
"""

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from loguru import logger

from trainyard.config.compose import load_config, save_config
from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import StopRequested, is_packed, prepare_data, restore_source, verify_packed
from trainyard.errors import DiskError, DiskFull, OutOfDeviceMemory, UserError, format_failure
from trainyard.files import AppendedFile, report_full_disk, restrict_umask, write_atomically
from trainyard.hardware import set_openmp_wait_policy, show_own_mig_slice
from trainyard.node.choices import build_context, record_choices
from trainyard.node.ranks import train_on_ranks
from trainyard.plan.memory import StepConfig, count_disk_bytes, read_cache
from trainyard.runs.changes import check_unchanged
from trainyard.runs.folder import CONFIG, classify_error, read_env, record_error
from trainyard.runs.lock import RunLock
from trainyard.runs.observations import Usage, read_plan_key, record_prediction, record_usage
from trainyard.runs.state import Cause, ExitCode, choose_exit_code
from trainyard.split import split_batch
from trainyard.terminal import make_log_printable, say
from trainyard.text import quote_path
from trainyard.train.world import World, read_attempt_id, read_world

if TYPE_CHECKING:
    import signal

    from trainyard.data.stage import Staged
    from trainyard.train.heartbeat import Heartbeat
    from trainyard.train.run_context import RunContext
    from trainyard.train.stop import RuntimeLimit, StopFlag
    from trainyard.train.watchdog import Watchdog


@dataclass(frozen=True)
class RankTask:
    """The task that submitit starts: a rank, or the launcher of all. Everything else is in the run folder."""

    run: Path
    jobs: Path
    since: float = 0.0  # start of all ranks, seconds since the epoch; 0: each rank's own
    only_packs: bool = False  # without training: a separate Slurm job, before the GPUs are requested
    ranks_here: int = 1  # more: this task is no rank, but starts so many on its machine

    def __call__(self) -> None:
        """Train, and exit with the run's code: submitit would call a run that stopped half-way a success."""
        set_openmp_wait_policy(os.environ)
        try:
            code = self._train_or_pack(self.since or time.time())
            if code == 0 and not self.only_packs and read_world(os.environ).is_main:
                from trainyard.report.run_page import update_report

                with report_full_disk(self.run):
                    if (report := update_report(self.run)) is not None:
                        say(f"report: {report}")
        except UserError as error:
            say(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = choose_exit_code(error)
        finally:
            if not self.only_packs and read_world(os.environ).is_main:
                from trainyard.report.board import update_board

                update_board(self.run)
        if code:
            sys.exit(code)

    def _train_or_pack(self, started: float) -> int:
        if self.ranks_here > 1:
            return train_on_ranks(self.run, self.jobs, self.ranks_here, environ=os.environ, started=started)
        show_own_mig_slice(os.environ, read_world(os.environ).local_rank)
        return execute(self.run, self.jobs, environ=os.environ, started=started, only_packs=self.only_packs)


@dataclass(frozen=True)
class RankContext:
    """State that the parts of one rank's attempt share."""

    run: Path
    jobs: Path
    world: World
    heartbeat: "Heartbeat"
    watchdog: "Watchdog"
    stop: "StopFlag"
    notes: "_BatchScriptNotes"
    environ: Mapping[str, str]
    started: float  # when the attempt began, seconds since the epoch


@restrict_umask()
def execute(
    run: Path,
    jobs_dir: Path,
    *,
    environ: Mapping[str, str],
    started: float,
    break_lock: bool = False,
    only_packs: bool = False,
) -> int:
    """Train the run in this folder from its newest checkpoint, as the rank that the environment states.

    Args:
        started: when the attempt began, in seconds since the epoch: `max_runtime` counts from here.
        only_packs: prepare and verify the data, and do not train.

    Returns:
        The exit code: `ExitCode`.

    Raises:
        UserError: the requested run is impossible; the message has the reason.
    """
    from trainyard.train.heartbeat import Heartbeat
    from trainyard.train.stop import StopFlag
    from trainyard.train.watchdog import Watchdog

    world, attempt = read_world(environ), read_attempt_id(environ, started=started)
    notes = _BatchScriptNotes(run, attempt, enabled="TRAINYARD_ATTEMPT" in environ)
    heartbeat = Heartbeat(run, attempt, is_main=world.is_main, started=started)
    watchdog = Watchdog(
        run,
        attempt,
        world,
        heartbeat.progress,
        before_exit=lambda: notes.write_exit_code(ExitCode.HUNG),
        on_signal=notes.write_signal,
    )
    failure: BaseException | None = None
    with StopFlag(notes.write_signal) as stop, watchdog:  # before torch is imported: a warning may come early
        # A copy: torch's imports export variables such as TORCHINDUCTOR_CACHE_DIR, which nobody stated.
        rank = RankContext(run, jobs_dir, world, heartbeat, watchdog, stop, notes, dict(environ), started)
        if not only_packs:
            _load_torch()
        while True:
            try:
                lock = RunLock(run, break_other_host=break_lock, attempt=attempt) if world.is_main else None
                heartbeat.check_owner = lock.check if lock else heartbeat.check_owner
                with report_full_disk(run), lock or nullcontext(), _set_up_logging(run, world):
                    code = _pack(rank) if only_packs else _train(rank, lock)
                break
            except BaseException as error:
                full = error if isinstance(error, OutOfDeviceMemory) else None
                starts_again = full is not None and full.next_micro_batch_size and world.world_size == 1
                # A full disk may leave no room for these two either; then the exit code and the message have to do.
                with suppress(OSError) if isinstance(error, DiskFull | DiskError) else nullcontext():
                    if isinstance(error, UserError) and not starts_again:
                        notes.write_exit_code(choose_exit_code(error))
                    record_error(run, error, attempt=attempt, rank=world.rank)
                if world.world_size > 1:
                    if full is None or not full.next_micro_batch_size:  # else all start again
                        watchdog.tell_others(error)
                    failure = error
                    break
                if not starts_again:
                    raise
            from trainyard.train.out_of_memory import release_memory

            gc.collect()  # the model and the data of the start that ended
            release_memory()
    if failure is not None:
        _end_process(run, failure, is_main=world.is_main)
    if world.is_main:
        notes.write_exit_code(code)
    return code


def _end_process(run: Path, error: BaseException, *, is_main: bool) -> NoReturn:
    """Log why one of several ranks failed, and exit at once.

    Without leaving the process group: NCCL waits there for the other ranks of the node, which wait for this one.
    """
    if isinstance(error, UserError):
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
    elif classify_error(error) == Cause.LOST_PEER:
        say(f"Another rank has failed: trainyard why {quote_path(run)}", file=sys.stderr)
    else:
        say(format_failure(error), file=sys.stderr)
    if is_main:
        from trainyard.report.board import update_board

        with suppress(OSError):  # the error on the way is more than a second one about this page
            update_board(run)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(choose_exit_code(error) if isinstance(error, UserError) else ExitCode.FAILED)


def _load_torch() -> None:
    """Load torch with garbage collection paused.

    Loading makes half a million objects and drops hardly any, so collecting meanwhile takes a sixth of the time and
    finds nothing. Frozen, they are not visited by later collections either, which would delay single steps.
    """
    if "torch" not in sys.modules:
        gc.disable()
        try:
            import torch  # noqa: F401
        finally:
            gc.freeze()
            gc.enable()


def _train(rank: RankContext, lock: RunLock | None) -> int:
    from trainyard.data.index import hold_packed
    from trainyard.train.stop import EXIT_CODES

    try:
        config = _prepare_data(rank, _make_hook(rank))
    except StopRequested:
        return EXIT_CODES[rank.stop.reason]
    with hold_packed(Path(config.data.path)):  # also while ranks read a copy: a resume may find none
        return _train_on(config, rank, lock)


def _train_on(config: TrainConfig, rank: RankContext, lock: RunLock | None) -> int:
    """Train on packed data."""
    from trainyard.train import distributed
    from trainyard.train.meters import read_peak_memory_gib
    from trainyard.train.stop import EXIT_CODES, RuntimeLimit
    from trainyard.train.trainer import fit

    run, world = rank.run, rank.world
    minutes = Duration.parse(config.max_runtime).to_minutes() if config.max_runtime else None
    limit = RuntimeLimit(minutes, started=rank.started)
    # the process's own environment: gloo and NCCL read it
    network = distributed.join(world, run, os.environ, deterministic=config.deterministic)
    if world.is_main:
        record_choices(run, network)
    staged = _stage_data(rank, config, limit)
    if staged.is_new:
        rank.notes.write_progress()
    context = build_context(run, config, staged, rank.jobs, world, rank.heartbeat, lock, rank.environ)
    if world.is_main:
        record_prediction(run, _read_prediction(context))
    code = EXIT_CODES[fit(context, stop=rank.stop, limit=limit)]
    if world.is_main:
        on_gpu = context.device.type == "cuda"
        record_usage(run, memory_gib=read_peak_memory_gib(context.device) if on_gpu else None)
    distributed.leave()
    return code


def _read_prediction(context: "RunContext") -> Usage | None:
    """Return the stored prediction for this run; None if there is none for these ranks in this precision."""
    from trainyard.train.run_context import compute_total_steps

    config = context.config
    split = split_batch(config.global_batch_size, ranks=context.world.world_size, micro_batch=context.micro_batch_size)
    setting = StepConfig.of(
        split, context.precision, device=context.device.type, recompute=config.gradient_checkpointing
    )
    step = read_cache(config.job, read_plan_key(context.run), os.environ).steps.get(setting)
    if step is None or step.refused:
        return None
    return Usage(step.peak_gib, count_disk_bytes(step, config, compute_total_steps(config, len(context.orders(0)))))


def _pack(rank: RankContext) -> int:
    """Prepare the data of the run, and check that every record can be read back as it was packed."""
    from trainyard.train.stop import EXIT_CODES

    hook = _make_hook(rank)
    try:
        config = _prepare_data(rank, hook)
        verify_packed(Path(config.data.path), hook=hook)
    except StopRequested:
        return EXIT_CODES[rank.stop.reason]
    return ExitCode.DONE


def _make_hook(rank: RankContext) -> Callable[[], None]:
    """Return what preparing data calls now and then; it raises StopRequested after a signal."""

    def hook() -> None:
        if rank.stop.reason:
            raise StopRequested
        if rank.world.is_main:
            rank.heartbeat.beat("packing")

    rank.heartbeat.beat("preparing", now=True)
    return hook


def _prepare_data(rank: RankContext, hook: Callable[[], None]) -> TrainConfig:
    """Return the run's config with packed data: rank 0 packs raw data and updates the config; other ranks wait.

    Raises:
        StopRequested: a signal arrived before that was done.
    """
    run, jobs_dir = rank.run, rank.jobs
    if rank.world.is_main:
        check_unchanged(run)
    config = load_config(run / CONFIG, jobs_dir)
    rank.watchdog.set_limit(config.hang_minutes)
    if rank.world.is_main:
        if config.data.path and not Path(config.data.path).exists():
            source = read_env(run).get("choices", {}).get("data_root", {}).get("value", "")
            config = restore_source(config, source, jobs_dir)
        if not is_packed(config):
            rank.heartbeat.beat("packing")
        ready = prepare_data(config, jobs_dir, hook=hook, on_shard=rank.notes.write_progress)
        if ready.data.path != config.data.path:
            save_config(ready, run / CONFIG)
        rank.heartbeat.beat("preparing")
        return ready
    rank.heartbeat.beat("waiting")
    while not is_packed(config):
        hook()
        time.sleep(1)
        config = load_config(run / CONFIG, jobs_dir)
    rank.heartbeat.beat("preparing")
    return config


def _stage_data(rank: RankContext, config: TrainConfig, limit: "RuntimeLimit") -> "Staged":
    """Return where this node reads the data. On a stop request it gives up copying; the first step saves and exits."""
    from trainyard.data.stage import stage

    def stop_requested() -> bool:
        rank.heartbeat.beat("preparing")
        return bool(rank.stop.reason) or limit.is_reached(reserve_s=0)

    folder, world = Path(config.data.path), rank.world
    staged = stage(
        folder, wanted=config.data.stage, environ=rank.environ, stop_requested=stop_requested, tell=logger.info
    )
    if staged.failed and world.local_rank == 0 and not world.is_main:  # rank 0's reason is among the recorded choices
        logger.warning("{} reads from {}: {}", socket.gethostname(), folder, staged.reason)
    return staged


class _BatchScriptNotes:
    """Files that tell the batch script, which may run outside the ranks' container image, what happened: attempt.sh."""

    def __init__(self, run: Path, attempt: str, *, enabled: bool) -> None:
        self._folder, self._attempt, self._enabled = run / "slurm", attempt, enabled

    def write_signal(self, number: "signal.Signals") -> None:
        """Write the first signal that any rank receives, with its time."""
        path = self._folder / f"signal-{self._attempt}"
        if self._enabled and not path.exists():
            write_atomically(path, f"{number.name} {time.time():.1f}\n", durable=False, inside=True)

    def write_progress(self) -> None:
        """Note that this attempt packed a shard or staged the data, which the next one finds."""
        if self._enabled:
            write_atomically(self._folder / f"progress-{self._attempt}", b"", durable=False, inside=True)

    def write_exit_code(self, code: int) -> None:
        """Write the code with which the ranks exit, if no rank has: after the first, srun tells the others to stop."""
        path = self._folder / f"left-{self._attempt}"
        if self._enabled and not path.exists():
            write_atomically(path, f"{code}\n", inside=True)


@contextmanager
def _set_up_logging(run: Path, world: World) -> Iterator[None]:
    """Log rank 0 to the console and to the run's log file; other ranks log warnings and errors only."""
    from trainyard.train.console import log_sink

    make_log_printable()
    logger.remove()
    with ExitStack() as files:
        if world.is_main:
            file = files.enter_context(closing(AppendedFile(run / "log")))
            logger.add(log_sink, format="{time:HH:mm:ss} {message}", level="INFO", colorize=False)
            line = "{time:YYYY-MM-DD HH:mm:ss} {level} {message}"
            logger.add(lambda text: file.write(text.encode()), format=line, level="DEBUG", catch=False)
        else:
            logger.add(sys.stderr, format=f"rank {world.rank}: {{message}}", level="WARNING")
        try:
            yield
        finally:
            logger.remove()
            logger.add(sys.stderr, format="{message}", level="INFO")
