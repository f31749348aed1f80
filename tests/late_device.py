"""Imitates the streams of a GPU on a machine without one: what is queued on a stream runs only when somebody waits."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

GARBAGE = 77
"""What new device memory contains until its copy has run."""


class LateEvent:
    def __init__(self, stream: "LateStream") -> None:
        self.stream, self.happened = stream, False

    def synchronize(self) -> None:
        self.stream.run_until(lambda: self.happened)


class LateStream:
    """A queue of work; `eager`: work runs at once, as if the device had nothing else to do, but for `delay`."""

    def __init__(self, name: str, lock: threading.RLock, *, eager: bool = False) -> None:
        self.name, self._lock, self._eager, self._delayed = name, lock, eager, False
        self.index = 0  # of its GPU
        self._work: deque[Callable[[], object]] = deque()

    def push(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
        if self._eager and not self._delayed:
            self.synchronize()

    def delay(self) -> None:
        """Let nothing run until somebody waits, as behind a kernel that takes long."""
        with self._lock:
            self._delayed = True

    def run_until(self, reached: Callable[[], bool]) -> None:
        with self._lock:
            while not reached() and self._work:
                self._work.popleft()()
            self._delayed = self._delayed and bool(self._work)

    def synchronize(self) -> None:
        self.run_until(lambda: False)

    def record_event(self) -> LateEvent:
        event = LateEvent(self)
        self.push(lambda: setattr(event, "happened", True))
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.push(event.synchronize)


class LateDevice:
    """Takes the place of the CUDA device 0 in `torch.cuda`, and of what tensors do with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, eager: bool) -> None:
        """Replace the device.

        Args:
            eager: whether the compute stream runs at once; otherwise it falls as far behind as a stream can.
        """
        self._lock, self._thread = threading.RLock(), threading.local()
        self.compute = LateStream("compute", self._lock, eager=eager)
        self.uploads: list[tuple[str, bool]] = []  # the stream of each copy from the host, and if its source is pinned
        self.handed_over: list[int] = []  # tensors that the allocator keeps for the compute stream
        self.stray_contexts: list[int] = []  # GPUs on which CUDA would start because a thread comes back to them
        self._streams = [self.compute]
        self._memory: list[Tensor] = []  # of the device; kept, so that no address is used twice
        self._pinned: list[Tensor] = []
        to, cpu, clone, empty = Tensor.to, Tensor.cpu, Tensor.clone, torch.empty

        def move(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if not (args and isinstance(args[0], torch.device) and args[0].type == "cuda"):
                return to(tensor, *args, **options)
            if self.holds(tensor):
                return tensor
            assert options.get("non_blocking"), "a copy that blocks the host"
            self.uploads.append((self.current_stream().name, _contains(self._pinned, tensor)))
            return self._copy_late(tensor)

        def read(tensor: Tensor) -> Tensor:
            if self.holds(tensor):
                self.current_stream().synchronize()
            return cpu(tensor)

        def pin(tensor: Tensor) -> Tensor:
            if _contains(self._pinned, tensor):
                return tensor
            self._pinned.append(clone(tensor))
            return self._pinned[-1]

        def allocate(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = empty(*args, **options)
            if pin_memory:
                self._pinned.append(tensor)
            return tensor

        def record(tensor: Tensor, stream: LateStream) -> None:
            assert stream is self.compute
            self.handed_over.append(tensor.data_ptr())

        monkeypatch.setattr(torch.cuda, "Stream", self._create_stream)
        monkeypatch.setattr(torch.cuda, "stream", self._use)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self._thread, "index", 0))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self._thread, "index", device.index))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current_stream())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.finish())
        monkeypatch.setattr(Tensor, "to", move)
        monkeypatch.setattr(Tensor, "cpu", read)
        monkeypatch.setattr(Tensor, "clone", lambda tensor: self._copy_late(tensor))
        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(Tensor, "record_stream", record)
        monkeypatch.setattr(torch, "empty", allocate)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        return _contains(self._memory, tensor)

    def finish(self) -> None:
        """Run everything that is queued."""
        for stream in self._streams:
            stream.synchronize()

    def _create_stream(self, device: torch.device) -> LateStream:
        self._streams.append(LateStream("copies", self._lock))
        self._streams[-1].index = device.index
        return self._streams[-1]

    def current_stream(self) -> LateStream:
        stream: LateStream = getattr(self._thread, "stream", self.compute)
        return stream

    @contextmanager
    def _use(self, stream: LateStream) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before
            if (own := getattr(self._thread, "index", 0)) != stream.index:
                self.stray_contexts.append(own)

    def _copy_late(self, source: Tensor) -> Tensor:
        """Queue a copy that reads its source when it runs."""
        target = torch.full_like(source, GARBAGE)
        self._memory.append(target)
        self.current_stream().push(lambda: target.copy_(source))
        return target


def _contains(memory: Iterable[Tensor], tensor: Tensor) -> bool:
    return any(one.data_ptr() <= tensor.data_ptr() < one.data_ptr() + max(one.nbytes, 1) for one in memory)
