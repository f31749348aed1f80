"""Checks of two ranks, which share a card over gloo or have one each over NCCL: collectives, DDP, BatchNorm, resume."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.batch_norm_kernels import use_on_the_cpu
from tests.gpu.check import Figures, Sizes, cannot_answer, try_work
from tests.gpu.preset_steps import find_largest_difference, open_preset, prepare_preset
from trainyard.config import compose as configs
from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.node.rank_task import execute
from trainyard.runs.create import create_run
from trainyard.runs.manifest import list_checkpoints
from trainyard.runs.state import ExitCode
from trainyard.tools.exact_runs import find_differences, flatten_state
from trainyard.train import checkpoint, distributed
from trainyard.train.data_parallel import wrap_in_ddp
from trainyard.train.distributed import average_rows
from trainyard.train.module import Batch, TrainModule
from trainyard.train.precision import make_autocast
from trainyard.train.step import TrainState, compute_gradients, make_optimizer, train_step
from trainyard.train.world import World

RANKS = 2

SUM_TOLERANCE = 1e-4
"""Relative, in fp32. Two ranks add the two terms that one rank adds, and scale by powers of two: the sums are equal but
for operators without a deterministic kernel, whose sums differ by some times 6e-8, and by more behind many layers."""

_STEPS = 24  # of a run that is stopped
_STOPPED_AFTER = 2  # lines of metrics
_GRACE_S = 5.0  # after one rank has failed, until the others, which may wait for it, are killed
_POLL_S = 0.005

RankWork = Callable[[World], Figures]


def find_collectives(device: torch.device) -> str:
    """Return what ranks here communicate with: nccl where each has a GPU of its own, gloo otherwise."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= RANKS else "gloo"


def _refuse_nccl(device: torch.device, collectives: str) -> None:
    if collectives == "nccl" and find_collectives(device) != "nccl":
        cannot_answer("NCCL needs two GPUs")


def run_on_ranks(work: RankWork, device: torch.device, sizes: Sizes, *, collectives: str) -> list[Figures]:
    """Do `work` on two ranks that have joined each other; return their figures.

    They are forked from this process, which has not started CUDA.

    Raises:
        AssertionError: one failed; says which, and how.
    """
    return _run_forked(
        [partial(_join_and_work, work, rank, device, sizes, collectives) for rank in range(RANKS)], sizes
    )


def _run_forked(works: Sequence[Callable[[], Figures]], sizes: Sizes) -> list[Figures]:
    files = [sizes.scratch / f"rank{rank}.json" for rank in range(len(works))]
    ranks = [_fork(partial(_write_end, work, file)) for work, file in zip(works, files, strict=True)]
    _wait(ranks)
    ends = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    for rank, end in enumerate(ends):
        if "reason" in end:
            pytest.skip(end["reason"])
        assert "error" not in end, f"rank {rank}: {end['error']}"
    for rank, end in enumerate(ends):
        assert end, f"rank {rank} ended with exit code {ranks[rank].exitcode} and without an answer"
    return [end["figures"] for end in ends]


def _fork(work: Callable[[], int]) -> ForkProcess:
    process = get_context("fork").Process(target=lambda: os._exit(work()))
    process.start()
    return process


def _wait(ranks: Sequence[ForkProcess]) -> list[int | None]:
    """Wait until all ranks have ended, and kill those that wait for one that failed; return their exit codes."""
    failed_at: float | None = None
    while any(rank.is_alive() for rank in ranks):
        if failed_at is None and any(rank.exitcode not in (None, 0, ExitCode.PREEMPTED) for rank in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_S)
    return [rank.exitcode for rank in ranks]


def _write_end(work: Callable[[], Figures], file: Path) -> int:
    end = try_work(work)
    file.write_text(json.dumps(end))
    return 0 if "figures" in end else 1


def _join_and_work(work: RankWork, rank: int, device: torch.device, sizes: Sizes, collectives: str) -> Figures:
    share_card(device, collectives)
    world = World(rank, rank, RANKS, RANKS, rendezvous="ranks")
    distributed.join(world, sizes.scratch, os.environ, deterministic=True)
    figures = work(world)
    distributed.barrier()
    distributed.leave()
    return figures


def share_card(device: torch.device, collectives: str) -> None:
    """Let both ranks of gloo compute on one card, as ranks on two MIG slices of a card do: NCCL refuses that."""
    if device.type == "cpu" or collectives == "nccl":
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    distributed.check_cards_differ = lambda cards: None
    choose = distributed.choose_collectives
    distributed.choose_collectives = lambda visible: choose("MIG-")


# Collectives


def check_collectives(device: torch.device, sizes: Sizes, *, collectives: str) -> Figures:
    """Exchange tensors on the device as training does, and compare every value that arrives.

    Raises:
        AssertionError: one is wrong.
    """
    _refuse_nccl(device, collectives)
    run_on_ranks(_exchange, device, sizes, collectives=collectives)
    return {"ranks": RANKS, "collectives": collectives}


def _exchange(world: World) -> Figures:
    device = distributed.select_device(world, os.environ)
    for dtype in (torch.float32, torch.float16, torch.int64):  # integers that each of them holds
        own, other = (torch.arange(70_000, device=device).remainder(500 + rank).to(dtype) for rank in range(RANKS))
        own, other = (own, other) if world.is_main else (other, own)
        kind = str(dtype).removeprefix("torch.")
        _compare(f"a sum of {kind}", distributed.sum_over_ranks(own.clone()), own + other)
        copied = own.clone()
        distributed.overwrite_with_rank0([copied])
        _compare(f"a broadcast of {kind}", copied, own if world.is_main else other)
        gathered = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(gathered, own)
        _compare(f"what is gathered of {kind}", gathered[1 - world.rank], other)
    rows = torch.zeros(9, 3, device=device)
    rows[[3 + world.rank, 7]] = 2.0
    distributed.average_rows(rows, most=4)
    _compare("an average of rows", rows[:, 0].cpu(), torch.tensor([0.0, 0, 0, 1, 1, 0, 0, 2, 0]))
    agreement = distributed.Agreement()
    agreement.exchange(distributed.Decision(save=world.rank == 1))
    assert agreement.exchange(distributed.Decision()).save, "a decision of rank 1 does not arrive"
    agreement.wait()
    return {}


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    wrong = int((found != expected).sum())
    assert not wrong, f"{what} over two ranks arrives wrong in {wrong} of {expected.numel()} values"


# Gradients


def compare_gradients(device: torch.device, sizes: Sizes, *, family: str) -> Figures:
    """Take a step of a preset under DDP; compare its gradients with the sum of those that each rank computes alone.

    That sum is the gradient of one rank with the same global batch in two micro-batches, but for losses that use counts
    of all ranks, which is why both are computed by the ranks.

    Raises:
        AssertionError: they differ by more than `SUM_TOLERANCE`.
    """
    collectives = find_collectives(device)
    overrides = ["precision=fp32", "deterministic=true", "compile=off"]
    _run_forked([partial(_pack, f"{family}_smoke", overrides, sizes)], sizes)
    work = partial(_compare_with_sum, sizes, family, overrides)
    found = run_on_ranks(work, device, sizes, collectives=collectives)
    figures = {"preset": f"{family}_smoke", "ranks": RANKS, "collectives": collectives}
    return {**figures, "gradients": found[0]["gradients"], "largest_difference": max(f["difference"] for f in found)}


def _pack(preset: str, overrides: Sequence[str], sizes: Sizes) -> Figures:
    """Pack the data that both ranks then find."""
    prepare_preset(preset, overrides, sizes)
    return {}


def _compare_with_sum(sizes: Sizes, family: str, overrides: Sequence[str], world: World) -> Figures:
    with open_preset(f"{family}_smoke", overrides, sizes, world=world) as steps:
        compute = partial(
            compute_gradients, seed=world.rank, autocast=make_autocast(steps.context.precision, steps.context.device)
        )
        with closing(steps.open_stream()) as stream:
            micro_batches = steps.read_step(stream)
        compute(replace(steps.state, model=steps.state.module), micro_batches, world_size=1)
        torch.save(steps.copy_gradients(), sizes.scratch / f"gradients{world.rank}.pt")
        distributed.barrier()
        parts = [torch.load(sizes.scratch / f"gradients{rank}.pt") for rank in range(RANKS)]
        compute(steps.state, micro_batches, world_size=RANKS)
        for name, most in steps.state.module.sparse_gradients().items():
            average_rows(cast(Tensor, steps.state.module.get_parameter(name).grad), most=most)
        found = steps.copy_gradients()
    expected = {name: parts[0].get(name, 0) + parts[1].get(name, 0) for name in parts[0].keys() | parts[1].keys()}
    difference, name = find_largest_difference(expected, found)
    assert difference <= SUM_TOLERANCE, (
        f"the {name} of a step on two ranks differs by {difference:.1e} from the sum of what the ranks compute, "
        f"allowed is {SUM_TOLERANCE:.0e}"
    )
    return {"difference": difference, "gradients": len(found)}


# Batch statistics


class _Filter(TrainModule):
    """A convolution with BatchNorm; parameters of BatchNorm see the statistics in their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 4, 3))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.layers(batch["x"]).square().mean()}


def compare_statistics(device: torch.device, sizes: Sizes, *, collectives: str) -> Figures:
    """Take a step with synchronised BatchNorm on uneven shares; compare statistics and weights with one rank's.

    On the CPU with kernels in Python, for torch has none there.

    Raises:
        AssertionError: they differ.
    """
    _refuse_nccl(device, collectives)
    run_on_ranks(partial(_compare_statistics, device), device, sizes, collectives=collectives)
    return {"ranks": RANKS, "samples": " ".join(map(str, _SHARES))}


_SHARES = (5, 3)  # samples of the ranks: BatchNorm must weigh them


def _compare_statistics(device: torch.device, world: World) -> Figures:
    own = distributed.select_device(world, os.environ)
    x = torch.randn(sum(_SHARES), 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 + 1
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            use_on_the_cpu(patch)
        found = _step_once(x.split(_SHARES)[world.rank], own, world_size=RANKS, share=_SHARES[world.rank] / len(x))
    expected = _step_once(x, own, world_size=1, share=1.0)
    for name, values in expected.items():
        difference = float((found[name] - values).norm() / values.norm())
        assert difference <= SUM_TOLERANCE, (
            f"after a step of two ranks with synchronised BatchNorm, {name} differs by {difference:.1e} from that of "
            f"one rank with the whole batch, allowed is {SUM_TOLERANCE:.0e}"
        )
    return {}


def _step_once(x: Tensor, device: torch.device, *, world_size: int, share: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = _Filter().to(device).train()
    optimizer = make_optimizer(module, OptimizerSettings(name="sgd"))
    state = TrainState(module, module, optimizer, torch.amp.GradScaler(device.type, enabled=False), None, 0.0)
    if world_size > 1:
        state.model = wrap_in_ddp(module, device=device, sync_batchnorm=True)
    micro_batch = MicroBatch({"x": x.to(device)}, weight=share, last=True, wait_s=0.0)
    options = {"lr": 1.0, "world_size": world_size, "seed": 0, "clip_grad_norm": 0.0}
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        train_step(state, [micro_batch], autocast=nullcontext, **options)  # type: ignore[arg-type]
    return {name: value.clone() for name, value in module.state_dict().items() if value.is_floating_point()}


# Resume


def compare_stopped_run(device: torch.device, sizes: Sizes, *, family: str) -> Figures:
    """Train a preset on two ranks to its end, and again with a stop and a resume; compare all that they saved.

    Raises:
        AssertionError: a run fails, or they differ in a bit.
    """
    collectives = find_collectives(device)
    preset = f"{family}_smoke"
    _run_forked([partial(_create_runs, sizes, preset)], sizes)
    whole, stopped = (sizes.scratch / preset / name for name in ("whole", "stopped"))
    start = partial(_start_ranks, device, sizes, collectives)
    undisturbed, interrupted = start(whole, "first"), start(stopped, "first")
    _stop(interrupted, stopped / "metrics.jsonl")
    _expect(ExitCode.PREEMPTED, interrupted, stopped)
    stopped_at = max(entry.step for entry in list_checkpoints(stopped / "checkpoints"))
    _expect(ExitCode.DONE, start(stopped, "second"), stopped)
    _expect(ExitCode.DONE, undisturbed, whole)
    saved = [checkpoint.load_newest_valid(run / "checkpoints") for run in (whole, stopped)]
    states = [flatten_state(found[1]) for found in saved if found is not None]
    different = find_differences(*states)
    assert not different, (
        f"a run on two ranks that was stopped at step {stopped_at} differs from one that was not in {len(different)} "
        f"of {len(states[0])} entries of the last checkpoint, such as {different[0]}"
    )
    figures = {"preset": preset, "ranks": RANKS, "collectives": collectives}
    return {**figures, "stopped_at": stopped_at, "entries": len(states[0])}


def _create_runs(sizes: Sizes, preset: str) -> Figures:
    own = [f"data.cache={sizes.data}", f"max_duration={_STEPS}st", "log_every=1st", "deterministic=true"]
    config = configs.compose(preset, [*own, "trackers=[]", "data.stage=off"], sizes.jobs)
    config = prepare_data(config, sizes.jobs)
    for name in ("whole", "stopped"):
        create_run(sizes.scratch, config, name=name)
    return {}


def _start_ranks(device: torch.device, sizes: Sizes, collectives: str, run: Path, rendezvous: str) -> list[ForkProcess]:
    def train(rank: int) -> int:
        share_card(device, collectives)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
        own = {name: str(value) for name, value in numbers.items()} | {"TRAINYARD_MEETING": rendezvous}
        return execute(run, sizes.jobs, environ={**sizes.environ, **own}, started=time.time())

    return [_fork(partial(train, rank)) for rank in range(RANKS)]


def _stop(ranks: Sequence[ForkProcess], metrics: Path) -> None:
    """Ask one rank to stop as soon as the run has written some metrics: both agree on it."""
    while all(rank.is_alive() for rank in ranks):
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= _STOPPED_AFTER:
            ranks[1].terminate()
            return
        time.sleep(_POLL_S)


def _expect(expected: ExitCode, ranks: Sequence[ForkProcess], run: Path) -> None:
    codes = _wait(ranks)
    assert codes == [expected] * RANKS, (
        f"run '{run.name}' exits with {codes} on its ranks, expected {[int(expected)] * RANKS}"
    )
