"""Prepares items in threads, ahead of whoever uses them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Started = TypeVar("Started")

_END = object()


def prefetch(
    items: Iterable[Item],
    depth: int,
    *,
    prepare: Callable[[Item], Prepared],
    start: Callable[[Prepared], Started],
    threads: int = 1,
    ahead: int = 0,
) -> Iterator[tuple[Started, float]]:
    """Prepare items in threads, up to `depth` ahead; yield what `start` makes of each, and the seconds waited.

    Items keep their order. An exception of the iterator or of `prepare` is raised here, in its turn. Closing the
    generator early stops the threads. Nothing here holds an item that was yielded once the next is asked for.

    Args:
        items: advanced by one thread at a time.
        prepare: called by each thread for a separate item.
        start: called in the caller's thread, in order.
        threads: that prepare. If several, the caller's is one of them: it prepares instead of waiting, because
            another thread would take turns with it on one core.
        ahead: items to start before their turn, if they are ready then.
    """
    stream, turn = iter(items), threading.Lock()
    waiting: deque[Future[Any]] = deque()  # in the order of the items
    free: deque[Future[Any]] = deque()  # those of them that no thread has begun
    permits: SimpleQueue[bool] = SimpleQueue()  # True: to begin one of those; False: to end
    started: deque[Started] = deque()

    def add_future() -> None:
        future: Future[Any] = Future()
        waiting.append(future)
        free.append(future)
        permits.put(True)

    def prepare_next() -> None:
        with turn:  # items are begun in their order
            if not free:
                return  # the generator is closed
            future = free.popleft()
            try:
                item: Any = next(stream, _END)
            except BaseException as error:
                future.set_exception(error)
                return
        try:
            future.set_result(item if item is _END else prepare(item))
        except BaseException as error:
            future.set_exception(error)

    def work() -> None:
        while permits.get():
            prepare_next()

    def help_out() -> None:
        with suppress(Empty):
            while not waiting[0].done() and permits.get(block=False):
                prepare_next()

    def is_ready() -> bool:
        return waiting[0].done() and waiting[0].exception() is None and waiting[0].result() is not _END

    def start_next() -> None:
        prepared = waiting.popleft().result()
        add_future()
        started.append(start(prepared))

    # daemons, unlike an executor's: a process may end while a stream is open
    workers = [threading.Thread(target=work, name="loader", daemon=True) for _ in range(max(1, threads - 1))]
    for _ in range(depth + threads):
        add_future()
    for worker in workers:
        worker.start()
    try:
        while True:
            wait_s = 0.0
            if not started:
                begin = time.perf_counter()
                if threads > 1:
                    help_out()
                if waiting[0].result() is _END:
                    return
                wait_s = time.perf_counter() - begin
                start_next()
            while len(started) <= ahead and is_ready():
                start_next()
            yield started.popleft(), wait_s
    finally:
        with turn:
            free.clear()
        for _ in workers:
            permits.put(False)
        for worker in workers:
            worker.join()


def count_prefetched(depth: int, threads: int = 1) -> int:
    """Return how many items of `prefetch` exist at once: in preparation in each thread, ready, one with the caller."""
    return threads + depth + 1
