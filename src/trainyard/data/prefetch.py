"""Prepares items in threads, ahead of whoever uses them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Started = TypeVar("Started")


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
    background = _Background(iter(items), prepare, slots=depth + threads, threads=max(1, threads - 1))
    started: deque[_Slot] = deque()

    def start_next() -> None:
        slot = background.take()
        if slot.error is None:
            slot.item = start(slot.item)
        started.append(slot)

    try:
        while True:
            wait_s = 0.0
            if not started:
                begin = time.perf_counter()
                background.wait(help_out=threads > 1)
                wait_s = time.perf_counter() - begin
                start_next()
            while len(started) <= ahead and background.is_ready():
                start_next()
            slot = started.popleft()
            if slot.is_end:
                return
            if slot.error is not None:
                raise slot.error
            yield slot.item, wait_s
            del slot
    finally:
        background.stop()


def count_prefetched(depth: int, threads: int = 1) -> int:
    """Return how many items of `prefetch` exist at once: in preparation in each thread, ready, one with the caller."""
    return threads + depth + 1


class _Slot:
    """The place of one item in the order. Its lock is held until the item is prepared: no signal costs less."""

    def __init__(self) -> None:
        self.item: Any = None  # what `prepare`, later `start` made; None if there is an error
        self.error: BaseException | None = None
        self.is_end = False
        self.unfinished = threading.Lock()
        self.unfinished.acquire()


class _Background:
    """Threads that prepare items in slots: as many slots as items may exist before they are taken."""

    def __init__(self, stream: Iterator[Any], prepare: Callable[[Any], object], *, slots: int, threads: int) -> None:
        self._stream, self._prepare, self._turn = stream, prepare, threading.Lock()
        self._waiting: deque[_Slot] = deque()  # in order
        self._free: deque[_Slot] = deque()  # those of them that no thread has begun
        self._permits: SimpleQueue[bool] = SimpleQueue()  # True: to begin one of those; False: to end
        self._stop = threading.Event()
        for _ in range(slots):
            self._add_slot()
        self._threads = [threading.Thread(target=self._work, name="loader", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def wait(self, *, help_out: bool) -> None:
        """Wait until the next item is prepared; if asked to help out, prepare others meanwhile."""
        while help_out and not self.is_ready() and self._prepare_one(patient=False):
            pass
        with self._waiting[0].unfinished:
            pass

    def is_ready(self) -> bool:
        """Return whether the next item is prepared."""
        return not self._waiting[0].unfinished.locked()

    def take(self) -> _Slot:
        """Return the slot of the next item, which is prepared."""
        slot = self._waiting.popleft()
        self._add_slot()
        return slot

    def stop(self) -> None:
        """End the threads, each after the item that it prepares."""
        self._stop.set()
        self._permits.put(False)
        for thread in self._threads:
            thread.join()

    def _add_slot(self) -> None:
        self._waiting.append(slot := _Slot())
        self._free.append(slot)
        self._permits.put(True)

    def _work(self) -> None:
        while self._prepare_one(patient=True):
            pass

    def _prepare_one(self, *, patient: bool) -> bool:
        """Prepare an item; return whether there was one to begin: at once, or, if patient, ever."""
        try:
            may_begin = self._permits.get(block=patient)
        except Empty:
            return False
        begun = self._begin() if may_begin and not self._stop.is_set() else None
        if begun is None:
            self._permits.put(False)  # for the other threads
            return False
        slot, item = begun
        try:
            slot.item = self._prepare(item)
        except BaseException as error:
            slot.error = error
        slot.unfinished.release()
        return True

    def _begin(self) -> tuple[_Slot, Any] | None:
        """Return the next free slot and the item for it; None if there are no more."""
        with self._turn:  # slots are begun in the order of the items
            slot = self._free.popleft()
            try:
                return slot, next(self._stream)
            except BaseException as error:
                slot.error, slot.is_end = error, isinstance(error, StopIteration)
        slot.unfinished.release()
        return None
