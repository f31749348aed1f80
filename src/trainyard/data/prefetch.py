"""Prepares items in background threads, ahead of whoever uses them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Started = TypeVar("Started")


class _Slot:
    """The place of one item in the order. Its lock is held until the item is prepared: no signal costs less."""

    def __init__(self) -> None:
        self.item: Any = None  # what `prepare`, later `start` made; None if there is an error
        self.error: BaseException | None = None
        self.is_end = False
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def finish(self) -> None:
        self._unfinished.release()

    @property
    def is_ready(self) -> bool:
        return not self._unfinished.locked()

    def wait(self) -> None:
        with self._unfinished:
            pass


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
        prepare: called in the background, by each thread for an item of its own.
        start: called in the caller's thread, in order.
        ahead: items to start before their turn, if they are ready then.
    """
    stream, turn = iter(items), threading.Lock()
    waiting: deque[_Slot] = deque()  # in order
    free: SimpleQueue[_Slot | None] = SimpleQueue()  # those that no thread has begun; None: stop
    started: deque[_Slot] = deque()
    stop = threading.Event()

    def add_slot() -> None:
        waiting.append(slot := _Slot())
        free.put(slot)

    def work() -> None:
        while True:
            with turn:  # slots are begun in the order of the items
                slot = free.get()
                if slot is None or stop.is_set():
                    free.put(None)
                    return
                try:
                    item = next(stream)
                except BaseException as error:
                    slot.error, slot.is_end = error, isinstance(error, StopIteration)
                    slot.finish()
                    free.put(None)
                    return
            try:
                slot.item = prepare(item)
            except BaseException as error:
                slot.error = error
            slot.finish()
            del item, slot

    def start_first() -> None:
        slot = waiting.popleft()
        add_slot()
        if slot.error is None:
            slot.item = start(slot.item)
        started.append(slot)

    for _ in range(depth + threads):
        add_slot()
    workers = [threading.Thread(target=work, name="loader", daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        while True:
            wait_s = 0.0
            if not started:
                begin = time.perf_counter()
                waiting[0].wait()
                wait_s = time.perf_counter() - begin
                start_first()
            while len(started) <= ahead and waiting[0].is_ready:
                start_first()
            slot = started.popleft()
            if slot.is_end:
                return
            if slot.error is not None:
                raise slot.error
            yield slot.item, wait_s
            del slot
    finally:
        stop.set()
        free.put(None)
        for worker in workers:
            worker.join()


def count_prefetched(depth: int, threads: int = 1) -> int:
    """Return how many items of `prefetch` exist at once: in preparation in each thread, ready, one with the caller."""
    return threads + depth + 1
