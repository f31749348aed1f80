"""Ranks that train together: a resume repeats their sums bit by bit."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import FORKSERVER, find_differences
from trainyard.data.loader import MicroBatch
from trainyard.settings import OptimizerSettings
from trainyard.train import distributed
from trainyard.train.data_parallel import wrap_in_ddp
from trainyard.train.module import Batch, TrainModule
from trainyard.train.run_state import encode_state, restore_state
from trainyard.train.step import TrainState, copy_for_average, make_optimizer, train_step
from trainyard.train.world import World

CPU = torch.device("cpu")


class Classifier(TrainModule):
    """Three linear layers with BatchNorm: gradients of 1.3 MiB, which DDP puts into two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 5)
        )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(batch["point"]), batch["label"])}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_a_resumed_step_sums_gradients_as_an_undisturbed_run_does(world_size, tmp_path):
    run_on_ranks(_compare_resumed_with_undisturbed, world_size, tmp_path)


def _compare_resumed_with_undisturbed(rank: int, world_size: int, folder: Path) -> None:
    for accumulation in (1, 2):
        whole = _make_state()
        _take_steps(whole, range(1), rank=rank, world_size=world_size, accumulation=accumulation)
        assert _count_buckets(whole) == 2, "the first step already uses the final buckets"
        _take_steps(whole, range(1, 4), rank=rank, world_size=world_size, accumulation=accumulation)

        stopped = _make_state()
        _take_steps(stopped, range(2), rank=rank, world_size=world_size, accumulation=accumulation)
        saved = encode_state(stopped, fingerprint="", metrics_position=0, artifacts={})
        resumed = _make_state(distributed.broadcast_from_rank0(saved), folder)
        _take_steps(resumed, range(2, 4), rank=rank, world_size=world_size, accumulation=accumulation)
        if rank == 0:  # whose state is saved
            assert find_differences(whole.module.state_dict(), resumed.module.state_dict()) == [], accumulation
            assert find_differences(whole.ema.state_dict(), resumed.ema.state_dict()) == [], accumulation


def run_on_ranks(work: Callable[..., None], world_size: int, folder: Path, *arguments: object) -> None:
    """Call `work(rank, world_size, folder, *arguments)` on ranks that have joined each other; no call may raise."""
    ranks: list[Any] = [
        FORKSERVER.Process(target=_join_and_work, args=(work, rank, world_size, folder, *arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0] * world_size


def _join_and_work(work: Callable[..., None], rank: int, world_size: int, folder: Path, *arguments: object) -> None:
    torch.set_num_threads(1)
    distributed.join(World(rank, rank, world_size, world_size, rendezvous="ranks"), folder)
    try:
        work(rank, world_size, folder, *arguments)
        distributed.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the other ranks
    distributed.leave()


def _make_state(saved: dict[str, Any] | None = None, path: Path = Path()) -> TrainState:
    torch.manual_seed(0)
    module = Classifier().train()
    state = TrainState(
        module=module,
        model=module,
        optimizer=make_optimizer(module, OptimizerSettings()),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        ema=copy_for_average(module),
        ema_decay=0.75,
    )
    if saved is not None:
        restore_state(state, saved, fingerprint="", path=path)
    state.model = wrap_in_ddp(module, device=CPU)
    return state


def _take_steps(state: TrainState, steps: range, *, rank: int, world_size: int, accumulation: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        micro_batches = [
            MicroBatch(
                {
                    "point": torch.randn(6, 16, generator=generator),
                    "label": torch.randint(5, (6,), generator=generator),
                },
                1 / (accumulation * world_size),
                index == accumulation - 1,
                0.0,
            )
            for index in range(accumulation)
        ]
        train_step(
            state, micro_batches, lr=0.01, world_size=world_size, seed=rank, clip_grad_norm=1.0, autocast=nullcontext
        )
        state.progress.step += 1


def _count_buckets(state: TrainState) -> int:
    return len(state.model.reducer._get_zeros_like_grad_buckets())  # type: ignore[attr-defined]
