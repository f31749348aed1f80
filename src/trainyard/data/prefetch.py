"""Prepares items in threads, ahead of whoever uses them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
        prepare: called by each thread for an item of its own.
        start: called in the caller's thread, in order.
        threads: that prepare. If several, the caller's is one of them: it prepares instead of waiting, because
            another thread would take turns with it on one core.
        ahead: items to start before their turn, if they are ready then.
    """
    stream, turn = iter(items), threading.Lock()
    waiting: deque[Future[Any]] = deque()  # in the order of the items
    free: deque[Future[Any]] = deque()  # those of them that no thread has begun
    started: deque[Started] = deque()
    pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="loader")

    def add_future() -> None:
        future: Future[Any] = Future()
        waiting.append(future)
        free.append(future)
        pool.submit(prepare_next)

    def prepare_next() -> None:
        with turn:  # items are begun in their order
            if not free:
                return  # the caller's thread has prepared it
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

    def is_ready() -> bool:
        return waiting[0].done() and waiting[0].exception() is None and waiting[0].result() is not _END

    def start_next() -> None:
        prepared = waiting.popleft().result()
        add_future()
        started.append(start(prepared))

    try:
        for _ in range(depth + threads):
            add_future()
        while True:
            wait_s = 0.0
            if not started:
                begin = time.perf_counter()
                while threads > 1 and free and not waiting[0].done():
                    prepare_next()
                if waiting[0].result() is _END:
                    return
                wait_s = time.perf_counter() - begin
                start_next()
            while len(started) <= ahead and is_ready():
                start_next()
            yield started.popleft(), wait_s
    finally:
        pool.shutdown(cancel_futures=True)


def count_prefetched(depth: int, threads: int = 1) -> int:
    """Return how many items of `prefetch` exist at once: in preparation in each thread, ready, one with the caller."""
    return threads + depth + 1
