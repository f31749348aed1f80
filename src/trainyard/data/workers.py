"""Writes shards in worker processes, which are forked from one process that has loaded what all of them need.

The packing process forks nothing itself: its other threads may hold locks. It starts one process, which has no other
thread, and which forks the workers once everything is loaded. So libraries are loaded once, and take memory once.
Each worker has a pipe to the packing process. There are no locks and no named semaphores, so a kill leaves
nothing behind.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainyard.config.families import get_aliases, import_aliases
from trainyard.data.store import load_resizing
from trainyard.data.write_shard import ShardTask, WrittenShard, locate_load, write_shard
from trainyard.errors import ContractError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal and Slurm send to the whole tree: the packing process decides what follows."""

_PROGRESS_S = 0.1  # between two reports of a worker
_WAIT_S = 0.2  # between two calls of `progress`, at most


class WorkerEnded(Exception):
    """Raised if a worker, or the process that forked the workers, ended without having been told to."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code  # negative: the signal that ended it


def write_shards(
    tasks: Iterator[ShardTask], *, workers: int, resizes: bool, progress: Callable[[int], object]
) -> Generator[tuple[ShardTask, WrittenShard], None, None]:
    """Write shards in several processes; yield each task with its result as soon as the shard is on disk.

    When the generator ends or is closed, all workers have ended, whatever they were doing.

    Args:
        tasks: read one ahead of the writing. Without any, no process starts.
        resizes: whether tasks resize images, for which workers need torch.
        progress: called with the number of samples done since the last call, several times a second.

    Raises:
        WorkerEnded: a process was killed, for example because memory ran out, or failed elsewhere than in a shard.
        Exception: whatever writing a shard raised, with the worker's traceback as a note.
    """
    upcoming = next(tasks, None)
    if upcoming is None:
        return
    with _start_workers(workers, resizes) as (idle, forker):
        busy: dict[Connection, ShardTask] = {}
        while busy or upcoming is not None:
            while idle and upcoming is not None:
                connection = idle.pop()
                with _explain_end(forker), _explain_unpicklable(upcoming):
                    connection.send(upcoming)  # never blocks for long: the worker waits for it
                busy[connection] = upcoming
                upcoming = next(tasks, None)
            samples_done = 0
            for ready in wait([forker.sentinel, *busy], timeout=_WAIT_S):
                if not isinstance(ready, Connection):
                    raise _describe_end(forker)
                with _explain_end(forker):
                    message = ready.recv()
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, int):
                    samples_done += message
                else:
                    idle.append(ready)
                    yield busy.pop(ready), message
            progress(samples_done)


@contextmanager
def _explain_end(forker: BaseProcess) -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise _describe_end(forker) from None


@contextmanager
def _explain_unpicklable(task: ShardTask) -> Iterator[None]:
    """Name the sample of a task that cannot be sent."""
    try:
        yield
    except _UNPICKLABLE:
        for sample in task.samples:
            try:
                pickle.dumps(sample)
            except _UNPICKLABLE as error:
                raise ContractError(
                    f"{locate_load(sample)} cannot be sent to the process that packs: {error}. Expected a function of "
                    "the module, or functools.partial of one with plain values."
                ) from None
        raise


_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def _describe_end(forker: BaseProcess) -> WorkerEnded:
    forker.join()  # it ends as the worker did
    return WorkerEnded(forker.exitcode or 0)


@contextmanager
def _start_workers(count: int, resizes: bool) -> Iterator[tuple[list[Connection], BaseProcess]]:
    """Yield a connection to each worker, and the process that forks them and ends once one of them has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
    forker = context.Process(target=_fork_workers, args=(theirs, sys.path, get_aliases(), resizes))
    resource_tracker.ensure_running()  # its start would unblock signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none arrives before the process ignores them
    try:
        forker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for connection in theirs:
        connection.close()
    try:
        yield list(ours), forker
    finally:
        forker.kill()  # workers end with it
        forker.join()
        for connection in ours:
            with suppress(EOFError, ConnectionResetError):
                while True:
                    connection.recv_bytes()
            connection.close()


def _fork_workers(
    connections: Sequence[Connection], path: list[str], aliases: Mapping[str, Path], resizes: bool
) -> None:
    """Load what workers need, fork them, and end with the packing process, or as the first of them that ends."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    sys.path[:] = path
    import_aliases(aliases)
    if resizes:
        load_resizing()
    gc.freeze()  # a collection in a worker would write to every object, and so copy the memory that it shares
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(connections, own)) for own in range(len(connections))]
    for worker in workers:
        worker.start()
    for connection in connections:
        connection.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    ready = wait([parent.sentinel, *(worker.sentinel for worker in workers)])
    ended = [worker for worker in workers if worker.sentinel in ready]
    for worker in ended:
        worker.join()  # its files are closed before it has an exit code
    exit_code = (ended[0].exitcode if ended else None) or 1
    if exit_code < 0:
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def _work(connections: Sequence[Connection], own: int) -> None:
    """Write the shards that the packing process sends, until it or the process that forked this one ends.

    A worker that outlived a killed packing process would write into the output of the next.
    """
    for i, connection in enumerate(connections):
        if i != own:
            connection.close()
    exit_with_parent()
    connection = connections[own]
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_write(connection.recv(), connection))


def exit_with_parent() -> None:
    """Let this process end when the one that started it ends, even if that is killed."""
    threading.Thread(target=_wait_for_parent, name="exit with parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(task: ShardTask, connection: Connection) -> WrittenShard | Exception:
    """Write a shard; send how many samples are done meanwhile."""
    done, sent_at = 0, time.monotonic()

    def count() -> None:
        nonlocal done, sent_at
        done += 1
        if time.monotonic() - sent_at > _PROGRESS_S:
            connection.send(done)
            done, sent_at = 0, time.monotonic()

    try:
        written = write_shard(task, on_sample=count)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error
    connection.send(done)
    return written
