"""Prepares items in a background thread, ahead of whoever uses them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Started = TypeVar("Started")


def prefetch(
    items: Iterable[Item], depth: int, *, start: Callable[[Item], Started], ahead: int = 0
) -> Iterator[tuple[Started, float]]:
    """Run an iterator in a thread, up to `depth` items ahead; yield what `start` makes of each, and the seconds waited.

    An exception of the iterator is raised here, in its turn. Closing the generator early stops the thread.

    Args:
        start: called in the caller's thread, in order.
        ahead: items to start before their turn, if they are ready then.
    """
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    started: deque[tuple[Started | None, BaseException | None]] = deque()
    stop = threading.Event()

    def put(entry: tuple[Item | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((item, None))
                if stop.is_set():
                    return
            put((None, None))
        except BaseException as error:
            put((None, error))

    def start_entry(entry: tuple[Item | None, BaseException | None]) -> None:
        item, error = entry
        started.append((None if item is None else start(item), error))

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            wait_s = 0.0
            if not started:
                begin = time.perf_counter()
                entry = ready.get()
                wait_s = time.perf_counter() - begin
                start_entry(entry)
            while len(started) <= ahead and not ready.empty():
                start_entry(ready.get())
            item, error = started.popleft()
            if error is not None:
                raise error
            if item is None:
                return
            yield item, wait_s
    finally:
        stop.set()
        thread.join()


def count_prefetched(depth: int) -> int:
    """Return how many items of `prefetch` exist at once: one in preparation, `depth` ready, one with the caller."""
    return 1 + depth + 1
