"""Process-group set-up and small collectives."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.train.stop import Stop
from trainyard.train.world import World

_JOIN_TIMEOUT_S = 600  # how long ranks wait for each other at the start: container images load at different speeds
_STEP_TIMEOUT = timedelta(minutes=30)  # longest save or evaluation that others wait for


def select_device(world: World) -> torch.device:
    """Return this rank's device: its GPU, or the CPU if the node has none.

    Raises:
        UserError: more ranks on this node than GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    if world.local_rank >= gpus:
        raise UserError(
            f"Rank {world.rank} has local rank {world.local_rank}, but its node shows {gpus} GPUs. "
            f"Request {gpus} tasks per node."
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def join(world: World, run: Path) -> None:
    """Join the process group. Collectives work on CPU tensors (gloo) and, with GPUs, on CUDA tensors (NCCL).

    Under Slurm and our own launcher, rank 0 listens on a port that the system chooses and writes it to the run
    folder: the port is always free, and never that of an earlier attempt.
    """
    if world.world_size == 1:
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = _connect_store(world, run) if world.rendezvous else None
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=_STEP_TIMEOUT)


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the host: a barrier over NCCL would start the GPUs' communicator


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks, on every rank."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def average_rows(gradient: Tensor, *, most: int) -> None:
    """Average a gradient (C, D) over ranks, in place, by exchanging only the rows that are not 0 on some rank.

    Ranks exchange a byte for each row, and then `most` rows. Nothing waits for the device.

    Args:
        most: a bound on the rows that are not 0 on some rank, equal on all ranks. If there are more, the gradient
            becomes NaN, so that no wrong step is taken.
    """
    if not dist.is_initialized():
        return
    touched = gradient.any(dim=1).to(torch.uint8)
    dist.all_reduce(touched, op=dist.ReduceOp.MAX)
    rows = touched.argsort(descending=True, stable=True)[:most]  # these first; then some that are 0 everywhere
    values = gradient[rows] / dist.get_world_size()
    dist.all_reduce(values)
    gradient.index_copy_(0, rows, torch.where(touched.sum() > most, torch.nan, values))


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_to_rank0(value: Any) -> list[Any] | None:
    """Return every rank's value, in order of rank, on rank 0; None elsewhere."""
    if not dist.is_initialized():
        return [value]
    # Objects go through CPU tensors: gather_object would pick the GPU if NCCL is present.
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box if dist.get_rank() == 0 else None


class Decision(NamedTuple):
    """What to do after a step. Each rank proposes one; what the ranks agree on has the maximum of each field."""

    stop: Stop = Stop.NONE
    time_is_up: bool = False  # a run whose length is a time has reached it
    evaluate: bool = False
    save: bool = False

    def encode(self) -> Tensor:
        return torch.tensor([int(value) for value in self], dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: Tensor) -> "Decision":
        stop, *flags = encoded.tolist()
        return cls(Stop(stop), *map(bool, flags))


class Agreement:
    """The decision on which all ranks agree, learned one call later.

    The exchange runs while the step computes, so no rank waits for it. All ranks read the same decision at the same
    step, so they act together.
    """

    def __init__(self) -> None:
        self._sent = Decision().encode()
        self._pending: dist.Work | None = None

    def exchange(self, proposal: Decision) -> Decision:
        """Propose a decision; return the one agreed on at the call before (at first, to do nothing)."""
        if self._pending is not None:
            self._pending.wait()
        agreed = Decision.decode(self._sent)
        self._sent = proposal.encode()
        if dist.is_initialized():
            self._pending = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, async_op=True)
        return agreed

    def settle(self) -> None:
        """Wait for a pending exchange, so that this rank's exit breaks no other rank's."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def _connect_store(world: World, run: Path) -> TCPStore:
    address_file = run / f"meeting-{world.rendezvous}.json"
    limit = timedelta(seconds=_JOIN_TIMEOUT_S)
    if world.is_main:
        store = TCPStore(world.address, 0, world.world_size, True, timeout=limit, wait_for_workers=False)
        write_atomically(address_file, json.dumps({"address": world.address, "port": store.port}))
        return store
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while not address_file.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"Rank {world.rank} waited {_JOIN_TIMEOUT_S} s for rank 0 to write {address_file}. Is the run folder "
                "on a file system that all nodes share?"
            )
        time.sleep(0.05)
    main = json.loads(address_file.read_text())
    return TCPStore(main["address"], main["port"], world.world_size, False, timeout=limit)
