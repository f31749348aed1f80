"""Copies to a GPU on a separate stream, alongside the model's kernels, and makes each stream wait where it must."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Decoded = TypeVar("Decoded")
Result = TypeVar("Result")


class CopyStream:
    """A CUDA stream on which a loader copies.

    On the stream that computes, a copy would wait behind everything that is queued there, and so would whoever owns its
    source and wants to use that memory again. The model may use a copy only after `wait_on_current_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:  # DALI takes a GPU without a number for the CPU
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, *groups: Mapping[str, Tensor]) -> tuple[list[dict[str, Tensor]], Any]:
        """Start copying groups of tensors to the device.

        Args:
            groups: in pinned memory, or on the device already if `run_and_copy` made them.

        Returns:
            uploaded: the same groups.
            copied: the event after which the sources may be overwritten, and that `wait_on_current_stream` takes.
        """
        with torch.cuda.stream(self._stream):
            uploaded = [
                {name: values.to(self.device, non_blocking=True) for name, values in group.items()} for group in groups
            ]
        return uploaded, self._stream.record_event()

    def wait_on_current_stream(self, copied: Any, tensors: Iterable[Tensor]) -> None:
        """Let the caller's current stream use uploaded tensors.

        The stream waits, the host does not. torch's allocator does not reuse their memory before this stream has
        finished with it.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for values in tensors:
            values.record_stream(current)

    def run_and_copy(self, run: Callable[[], Decoded | None], copy: Callable[[Decoded], Result]) -> Iterator[Result]:
        """Run a decoder until it returns None, and copy each batch before the decoder runs again.

        A decoder takes its memory back on the host, at its next run, whether or not the device has finished reading.
        So the host waits for the copy before that run, which is short, because nothing else is ahead of it.

        Args:
            run: returns a batch in memory that belongs to the decoder.
            copy: returns new memory; it is ready for whatever is queued on this stream, as `upload` does.
        """
        torch.cuda.set_device(self.device)  # a thread begins on GPU 0, and leaving the stream would start CUDA there
        while True:
            with torch.cuda.stream(self._stream):
                decoded = run()
                if decoded is None:
                    return
                result = copy(decoded)
            copied = self._stream.record_event()
            try:
                yield result
            finally:
                copied.synchronize()
