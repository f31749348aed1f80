"""Process-group set-up, each rank's device, and small collectives."""

import fcntl
import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainyard.choice import Choice
from trainyard.errors import UserError
from trainyard.files import load_json, raise_open_files, write_atomically
from trainyard.text import join_names
from trainyard.train import precision
from trainyard.train.stop import Stop
from trainyard.train.world import World

_JOIN_TIMEOUT_S = 600  # how long ranks wait for each other at the start: container images load at different speeds
_SAY_SO_AFTER_S = 10
_STEP_TIMEOUT = timedelta(minutes=30)  # longest save or evaluation that others wait for


class Card(NamedTuple):
    """The GPU that a rank uses."""

    host: str
    identity: str  # the UUID of the GPU, or of its MIG slice; empty: the rank uses the CPU


def select_device(world: World, environ: Mapping[str, str]) -> torch.device:
    """Return this rank's device: its GPU, or the CPU if it sees none. Every rank takes part.

    Raises:
        UserError: there is no GPU for this rank, or several ranks would use the same one.
    """
    index = choose_gpu_index(world, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    uuid = "" if index is None else str(torch.cuda.get_device_properties(index).uuid)
    own = Card(socket.gethostname(), identify_card(uuid, environ.get("CUDA_VISIBLE_DEVICES", "")))
    check_cards_differ(_gather(own))
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_gpu_index(world: World, visible: int) -> int | None:
    """Return which of the GPUs that this rank sees it uses; None if it sees none.

    A rank that sees one GPU uses it, whatever its local rank: Slurm's --gpus-per-task and --gpu-bind, and MIG, show
    each task one. `check_cards_differ` notices a card that another rank has as well.

    Raises:
        UserError: it sees several GPUs, but none for its local rank.
    """
    if visible <= 1:
        return 0 if visible else None
    if world.local_rank >= visible:
        raise UserError(
            f"Rank {world.rank} has local rank {world.local_rank}, but sees only {visible} GPUs. Start {visible} ranks "
            f"on this node (--ntasks-per-node={visible}, --nproc-per-node={visible}), or have Slurm give each rank "
            "one GPU (--gpus-per-task=1)."
        )
    return world.local_rank


def identify_card(uuid: str, visible_devices: str) -> str:
    """Return what tells a rank's GPU from all others: its UUID, or that of the MIG slice in CUDA_VISIBLE_DEVICES.

    For a slice, CUDA may report the UUID of the whole GPU; a process uses the first slice only.
    """
    return visible_devices.split(",")[0] if uuid and visible_devices.startswith("MIG-") else uuid


def check_cards_differ(cards: Sequence[Card]) -> None:
    """Check that no two ranks use one GPU: NCCL would fail in the first collective.

    Args:
        cards: those of all ranks, in order of rank.

    Raises:
        UserError: names the ranks, the node and the GPU.
    """
    for card in dict.fromkeys(cards):
        ranks = [str(rank) for rank, other in enumerate(cards) if other == card]
        if card.identity and len(ranks) > 1:
            count = len({other for other in cards if other.host == card.host})
            raise UserError(
                f"Ranks {', '.join(ranks)} on {card.host} use the same GPU ({card.identity}), but two ranks cannot "
                f"share one. Start {count} there (--gpus {count}, --ntasks-per-node={count}, "
                f"--nproc-per-node={count}), or have Slurm give each rank one GPU (--gpus-per-task=1). To "
                "train on the CPU: CUDA_VISIBLE_DEVICES= (empty)."
            )


def choose_collectives(visible_devices: str) -> Choice[str]:
    """Return the libraries that ranks communicate with, as `init_process_group` reads them, and the reason."""
    if not torch.cuda.is_available():
        return Choice("gloo", "ranks compute on the CPU")
    if visible_devices.startswith("MIG-"):
        # not "cpu:gloo,cuda:gloo": SyncBatchNorm asks for the name, and gathers as gloo can only if it is "gloo"
        return Choice("gloo", "ranks compute on MIG slices, and NCCL refuses two slices of one GPU")
    return Choice("cpu:gloo,cuda:nccl", "ranks compute on GPUs")


def join(world: World, run: Path, environ: MutableMapping[str, str], *, deterministic: bool) -> dict[str, Choice[str]]:
    """Join the process group. Collectives work on CPU tensors (gloo) and, with GPUs, on CUDA tensors.

    Under Slurm and our own launcher, rank 0 listens on a port that the system chooses and writes it to the run
    folder: the port is always free, and never that of an earlier attempt.

    Args:
        environ: this process's own environment, which gloo and NCCL read; it gets their network interface.
        deterministic: whether algorithms have to be. torch (2.9 and later) reads its switch when the group is made,
            and then keeps NCCL from summing in switches (NVLS), whose order varies.

    Returns:
        The choices for the network, each with its reason, for the run's record.

    Raises:
        UserError: this process may not open a connection to each of the other ranks.
    """
    if world.world_size == 1:
        return {}
    _allow_connections(world)
    choices: dict[str, Choice[str]] = {}
    store = None
    if world.rendezvous:
        store, main = _connect_store(world, run)
        _wait_for_ranks(world, store)
        choices = _choose_interfaces(world, main, environ)
    precision.set_determinism(deterministic)
    backend = choose_collectives(environ.get("CUDA_VISIBLE_DEVICES", "")).value
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=_STEP_TIMEOUT)
    return choices


def _allow_connections(world: World) -> None:
    """Raise the limit on open files, often 1024, for what gloo opens: a connection to each rank, rank 0 two."""
    needed = (world.world_size - 1) * (2 if world.is_main else 1) + 16
    spare = raise_open_files(needed + 256)
    if spare < needed:
        raise UserError(
            f"Rank {world.rank} needs {needed} more open files for {world.world_size} ranks, but "
            f"{socket.gethostname()} allows {spare} (ulimit -Hn). Have the limit raised there: for Slurm jobs it is "
            "LimitNOFILE of slurmd, elsewhere 'nofile' in /etc/security/limits.conf."
        )


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


def overwrite_with_rank0(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors, which have the same shapes on all ranks, with rank 0's values."""
    if not dist.is_initialized():
        return
    dense = [(tensor, tensor.contiguous()) for tensor in tensors if tensor.numel()]  # what backends accept
    pending = [dist.broadcast(values, src=0, async_op=True) for _, values in dense]
    for work in pending:
        work.wait()
    for tensor, values in dense:
        if values is not tensor:
            tensor.copy_(values)


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_to_rank0(value: Any) -> list[Any] | None:
    """Return every rank's value, in order of rank, on rank 0; None elsewhere."""
    values = _gather(value)
    return values if is_rank0() else None


def has_ranks() -> bool:
    """Return whether several ranks train together."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def move_to_rank0(parts: list[dict[str, np.ndarray]], take: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Call `take` on rank 0 with each part of the other ranks, in order of rank; every rank takes part.

    Nothing but these parts travels, one at a time and as it is, so rank 0 needs room for one of them, and others none.

    Args:
        parts: of this rank; arrays with the same names, types and shapes, but for the first axis. Each is removed once
            it is sent; rank 0's own are left alone.
    """
    if not dist.is_initialized():
        return
    described = [(name, array.dtype.str, array.shape[1:]) for name, array in parts[0].items()] if parts else []
    ranks = _gather((described, [len(array) for part in parts for array in list(part.values())[:1]]))
    if dist.get_rank() > 0:
        while parts:
            part = parts.pop(0)
            assert [(name, array.dtype.str, array.shape[1:]) for name, array in part.items()] == described
            for array in filter(np.size, part.values()):
                dist.send(_view_as_bytes(np.ascontiguousarray(array)), dst=0)
        return
    for rank, (names, counts) in enumerate(ranks[1:], start=1):
        for count in counts:
            received = {name: np.empty((count, *shape), dtype) for name, dtype, shape in names}
            for array in filter(np.size, received.values()):
                dist.recv(_view_as_bytes(array), src=rank)
            take(received)


def _view_as_bytes(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


class Decision(NamedTuple):
    """The actions after a step. Each rank proposes some; the ranks agree on the maximum of each field."""

    stop: Stop = Stop.NONE
    time_is_up: bool = False  # a run whose length is a time has reached it
    evaluate: bool = False
    save: bool = False
    written: bool = False  # the save in flight has ended

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

    def abandon(self) -> None:
        """Forget a pending exchange: this rank ends at once, and others may have ended."""
        self._pending = None

    def wait(self) -> None:
        """Wait for a pending exchange, so that this rank's exit breaks no other rank's."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def _connect_store(world: World, run: Path) -> tuple[TCPStore, str]:
    """Return the store in which the ranks find each other, and the address at which rank 0 serves it."""
    address_file = run / f"meeting-{world.rendezvous}.json"
    limit = timedelta(seconds=_JOIN_TIMEOUT_S)
    if world.is_main:
        address = find_own_address(world.launch_address)
        store = TCPStore(address, 0, world.world_size, True, timeout=limit, wait_for_workers=False)
        write_atomically(address_file, json.dumps({"address": address, "port": store.port}))
        return store, address
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while not address_file.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"Rank {world.rank} waited {_JOIN_TIMEOUT_S} s for rank 0 to write {address_file}. Is the run folder "
                "on a file system that all nodes share?"
            )
        time.sleep(0.05)
    main = load_json(address_file)
    return TCPStore(main["address"], main["port"], world.world_size, False, timeout=limit), main["address"]


def _wait_for_ranks(world: World, store: TCPStore) -> None:
    """Have rank 0 wait until every rank has found it, and say which have not.

    Raises:
        UserError: one has not in ten minutes.
    """
    store.set(f"rank {world.rank}", "")
    missing = list(range(world.world_size)) if world.is_main else []
    began, is_said = time.monotonic(), False
    while missing := [rank for rank in missing if not store.check([f"rank {rank}"])]:
        waited_s = time.monotonic() - began
        named = f"ranks {join_names([str(rank) for rank in missing])} of {world.world_size}"
        alone = "To train on one rank, put this before the command: env -u SLURM_STEP_ID"
        hint = f" Slurm says that this step has so many tasks; each has to run the command. {alone}"
        hint = hint if world.launcher == "slurm" else ""
        if waited_s > _JOIN_TIMEOUT_S:
            raise UserError(f"Rank 0 has waited {_JOIN_TIMEOUT_S} s in vain for {named}.{hint}")
        if waited_s > _SAY_SO_AFTER_S and not is_said:
            logger.warning("rank 0 waits for {}, for up to {} s.{}", named, _JOIN_TIMEOUT_S, hint)
            is_said = True
        time.sleep(0.05)


def _choose_interfaces(world: World, main: str, environ: MutableMapping[str, str]) -> dict[str, Choice[str]]:
    """Have gloo and NCCL use the interface of the route to rank 0, unless the user has named one.

    Left alone, gloo uses the address of this host's name, which is 127.0.1.1 on many a node.
    """
    own = find_own_address(main)
    interface = find_interface(own)
    choices = {"network": Choice(own, f"the address from which {socket.gethostname()} reaches rank 0 at {main}")}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in environ:
            choices[name.lower()] = Choice(environ[name], f"{name} was set")
        elif interface is None:
            choices[name.lower()] = Choice("", f"left to the library: no interface has the address {own}")
        elif name == "NCCL_SOCKET_IFNAME" and world.local_world_size == world.world_size:
            choices[name.lower()] = Choice("", "left to NCCL: all ranks are on one node")
        else:
            environ[name] = interface
            choices[name.lower()] = Choice(interface, f"has the address {own}, from which this node reaches rank 0")
    return choices


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    # Objects go through CPU tensors: gather_object would pick the GPU if NCCL is present.
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def find_own_address(peer: str) -> str:
    """Return the address from which this node reaches `peer`, as the routing table says; nothing is sent.

    For an address of this node that is the address itself. No host name is resolved: /etc/hosts often maps a node's
    own name to 127.0.1.1, where no other node finds it.

    Raises:
        OSError: there is no route to `peer`.
    """
    family, kind, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]  # the port does not matter
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None if none has it (in 127.0.0.0/8 all but one)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
