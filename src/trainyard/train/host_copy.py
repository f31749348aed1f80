"""Copies a run's state to host memory, so that it can be written while training changes the original."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from trainyard.train.checkpoint import State


class HostCopy:
    """Buffers in host memory that hold one copy of a state; they are kept, and used again for the next copy."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """The host memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, state: State) -> State:
        """Return a copy of a state that training may change afterwards. It is valid until the next call.

        Each storage is copied once and whole, so tensors that share memory share it in the copy, too. What comes from
        a GPU goes to pinned memory. Returns once the copy is complete.
        """
        storages: dict[int, Tensor] = {}
        copied: State = self._copy(state, storages)
        del self._buffers[len(storages) :]
        if any(buffer.is_pinned() for buffer in self._buffers):
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, value: Any, storages: dict[int, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, storages)
        if type(value) in (dict, OrderedDict):
            copied = copy.copy(value)  # with the versions that torch attaches to a state_dict
            copied.update((key, self._copy(item, storages)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, storages) for item in value)
        return value  # a number, a text or None; anything else is refused by the save

    def _copy_tensor(self, tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
        source = tensor.untyped_storage()
        if source.data_ptr() not in storages:
            storages[source.data_ptr()] = self._fill_buffer(len(storages), source)
        buffer = storages[source.data_ptr()].untyped_storage()
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        copied = torch.empty(0, dtype=tensor.dtype).set_(buffer, *layout)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _fill_buffer(self, index: int, source: torch.UntypedStorage) -> Tensor:
        if index == len(self._buffers) or self._buffers[index].nbytes != source.nbytes():
            self._buffers[index:] = []  # the model has changed: what follows is of another size, too
            pinned = source.device.type == "cuda"
            self._buffers.append(torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned))
        bytes_ = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        return self._buffers[index].copy_(bytes_, non_blocking=True)
