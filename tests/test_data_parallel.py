"""Ranks that train together: a resume repeats their sums bit by bit, and they score what a checkpoint has."""

import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.batch_norm_kernels import use_on_the_cpu
from tests.training import FORKSERVER, find_differences
from trainyard.config.settings import AugmentSettings, ImageSettings, OptimizerSettings, TrainConfig
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import split_into_micro_batches
from trainyard.data.shards import ShardSet
from trainyard.errors import ContractError, UserError
from trainyard.hardware import choose_sync_batchnorm
from trainyard.train import distributed
from trainyard.train.data_parallel import check_buffers_agree, explain_unused, hash_constant_buffers, wrap_in_ddp
from trainyard.train.evaluate import evaluate, predict_share
from trainyard.train.module import Batch, Rows, TrainModule
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


class Brightness(TrainModule):
    """The mean of normalised images, which depends on running statistics; with a constant, and a value to save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.norm(batch["image"]).square().mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"sample_id": batch["sample_id"], "value": self.norm(batch["image"]).mean((1, 2, 3))}

    def score(self, rows: Rows) -> dict[str, float]:
        return {"mean": float(rows["value"].astype(np.float64).mean())}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "find_unused"), [(3, False), (4, False), (3, True)])
def test_a_resumed_step_sums_gradients_as_an_undisturbed_run_does(world_size, find_unused, tmp_path):
    run_on_ranks(_compare_resumed_with_undisturbed, world_size, tmp_path, find_unused)


def _compare_resumed_with_undisturbed(rank: int, world_size: int, folder: Path, find_unused: bool) -> None:
    for accumulation in (1, 2):
        whole = _make_state(find_unused)
        _take_steps(whole, range(1), rank=rank, world_size=world_size, accumulation=accumulation)
        assert _count_buckets(whole) == 2, "the first step already uses the final buckets"
        _take_steps(whole, range(1, 4), rank=rank, world_size=world_size, accumulation=accumulation)

        stopped = _make_state(find_unused)
        _take_steps(stopped, range(2), rank=rank, world_size=world_size, accumulation=accumulation)
        saved = encode_state(stopped, fingerprint="", metrics_position=0, artifacts={})
        resumed = _make_state(find_unused, distributed.broadcast_from_rank0(saved), folder)
        _take_steps(resumed, range(2, 4), rank=rank, world_size=world_size, accumulation=accumulation)
        if rank == 0:  # whose state is saved
            assert find_differences(whole.module.state_dict(), resumed.module.state_dict()) == [], accumulation
            assert find_differences(whole.ema.state_dict(), resumed.ema.state_dict()) == [], accumulation


@pytest.mark.slow
def test_ranks_score_with_the_buffers_that_rank_0_saves_and_steps_send_statistics_only(packed_images, tmp_path):
    run_on_ranks(_compare_scores_with_those_of_rank_0, 2, tmp_path, packed_images)


def _compare_scores_with_those_of_rank_0(rank: int, world_size: int, folder: Path, packed: Path) -> None:
    module = Brightness()
    model = wrap_in_ddp(module, device=CPU, sync_batchnorm=False)
    module.table.fill_(rank)
    module.threshold.fill_(rank)
    for _ in range(2):
        generator = torch.Generator().manual_seed(rank)
        model({"image": torch.randn(4, 1, 8, 8, generator=generator) * (rank + 1) + rank})["loss"].backward()
    assert module.table.tolist() == [rank] * 3 and module.threshold == rank, "a step sends no constants"
    values = distributed.gather_to_rank0(float(module.norm.running_mean))
    assert values is None or values[0] != values[1], "each rank has its own statistics after a step"

    ids = np.arange(24)
    share, alone = (_make_loader(packed, rank, size) for size in (world_size, 1))
    metrics, _ = evaluate(module, share, ids, batch_size=6, autocast=nullcontext)
    buffers = distributed.gather_to_rank0({name: value.clone() for name, value in module.state_dict().items()})
    if buffers is not None:
        parts: list[Rows] = []
        assert predict_share(module, alone, ids, parts, batch_size=6, autocast=nullcontext) == 6
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert metrics == module.score(rows), "one process scores the same with what rank 0 saves"
        assert find_differences(*buffers) == []
        assert module.threshold == 0


class Filter(TrainModule):
    """Convolutions of signals with BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.Tanh(), nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.Tanh()
        )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (self.layers(batch["signal"]).mean(2) - batch["wanted"]).square().mean()}


@pytest.mark.slow
def test_a_placeholder_stays_out_of_the_statistics_that_ranks_synchronise(tmp_path):
    run_on_ranks(_compare_synchronised_with_one_rank, 2, tmp_path)


def _compare_synchronised_with_one_rank(rank: int, world_size: int, folder: Path) -> None:
    """Five samples in micro-batches of two: rank 0 has none for the second one, and rank 1 has one."""
    generator = torch.Generator().manual_seed(3)
    ids, samples = np.arange(5), torch.randn(5, 2, 9, generator=generator)
    wanted = torch.randn(5, 4, generator=generator)

    def take_steps(parts: list[tuple[np.ndarray, int]], *, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Filter().train()
        # Adam would divide what rounding leaves of a gradient of 0, as that of a bias before BatchNorm, by itself
        optimizer = make_optimizer(module, OptimizerSettings(name="sgd"))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        state = TrainState(module, module, optimizer, scaler, None, 0.0)
        if world_size > 1:
            state.model = wrap_in_ddp(module, device=CPU, sync_batchnorm=True)
        for _ in range(2):
            micro_batches = [
                MicroBatch({"signal": samples[part], "wanted": wanted[part]}, counted / 5, index == 1, 0.0)
                for index, (part, counted) in enumerate(parts)
            ]
            options = {"lr": 0.01, "world_size": world_size, "seed": 0, "clip_grad_norm": 0.0}
            train_step(state, micro_batches, autocast=nullcontext, **options)
        return {name: value.clone() for name, value in module.state_dict().items()}

    with pytest.MonkeyPatch.context() as patch:
        use_on_the_cpu(patch)
        shares = split_into_micro_batches(ids, rank=rank, world_size=world_size, micro_batch_size=2)
        assert [counted for _, counted in shares] == ([2, 0], [2, 1])[rank]
        together = take_steps(shares, world_size=world_size)
    alone = take_steps([(ids[:4], 4), (ids[4:], 1)], world_size=1)
    found = {name: float((alone[name] - together[name]).abs().max()) for name in alone}
    assert max(found.values()) < 1e-5, found


def test_batch_statistics_are_synchronised_on_request_between_gpus_only():
    assert choose_sync_batchnorm(False, device_type="cuda", world_size=8)[0] is False
    assert choose_sync_batchnorm(True, device_type="cuda", world_size=8)[0] is True
    assert choose_sync_batchnorm(True, device_type="cpu", world_size=1) == (False, "one rank has the whole micro-batch")
    with pytest.raises(UserError, match=r"sync_batchnorm=true on 2 ranks on the CPU.*Use sync_batchnorm=false"):
        choose_sync_batchnorm(True, device_type="cpu", world_size=2)


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


class Queue(TrainModule):
    """Keeps what it saw last: in "seen" each rank its own, in "steps" all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def _change_buffers(rank: int, world_size: int, folder: Path) -> None:
    module = Queue()
    before = hash_constant_buffers(module)
    assert sorted(before) == ["seen", "steps"]
    module.steps += 1
    module.norm(torch.randn(4, 2) + rank)
    check_buffers_agree(module, before)
    module.seen += rank
    with pytest.raises(UserError, match=r"test_data_parallel\.py: Queue: a step changes the buffers seen to other"):
        check_buffers_agree(module, before)


@pytest.mark.slow
def test_buffers_that_a_step_changes_on_each_rank_to_its_own_are_refused_by_name(tmp_path):
    run_on_ranks(_change_buffers, 2, tmp_path)


class Branches(TrainModule):
    """Two branches of 2.4 MiB in DDP buckets of their own; a step uses one, and never the spare layer."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.used = used
        self.left, self.right, self.spare = (nn.Linear(16, 36_000) for _ in range(3))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        layers = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[self.used]
        return {"loss": torch.stack([layer(batch["point"]).square().mean() for layer in layers]).sum()}


def _train_branches(rank: int, world_size: int, folder: Path) -> None:
    for used, unused in (
        (("both", "both"), ("spare", "spare")),
        (("left", "right"), ("right, spare", "left, spare")),
    ):
        module = Branches(used[rank])
        state = TrainState(
            module=module,
            model=wrap_in_ddp(module, device=CPU, sync_batchnorm=False),
            optimizer=make_optimizer(module, OptimizerSettings()),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            ema=None,
            ema_decay=0.0,
        )
        named = ", ".join(f"{layer}.weight, {layer}.bias" for layer in unused[rank].split(", "))
        with pytest.raises(ContractError, match=rf"Branches\.forward: its loss gives {named}[ ,]"):
            batch = {"point": torch.ones(2, 16)}
            options = {"lr": 0.01, "world_size": world_size, "seed": 0, "clip_grad_norm": 0.0}
            train_step(state, [MicroBatch(batch, 1 / world_size, True, 0.0)], autocast=nullcontext, **options)
        distributed.barrier()


@pytest.mark.slow
def test_parameters_without_a_gradient_are_named_on_every_rank_also_if_ranks_use_different_ones(tmp_path):
    run_on_ranks(_train_branches, 2, tmp_path)


def _leave_out_later(rank: int, world_size: int, folder: Path) -> None:
    module = Branches("both")
    module.spare.requires_grad_(False)
    model = wrap_in_ddp(module, device=CPU, sync_batchnorm=False)
    for used in ("both", "left"):
        module.used = used
        model({"point": torch.ones(2, 16)})["loss"].backward()
    with (
        pytest.raises(
            ContractError, match=r"Branches\.forward: in the step before.*resume RUN find_unused_parameters=on"
        ),
        explain_unused(module),
    ):
        model({"point": torch.ones(2, 16)})
    distributed.barrier()


@pytest.mark.slow
def test_parameters_that_a_later_step_leaves_out_end_in_a_sentence(tmp_path):
    run_on_ranks(_leave_out_later, 2, tmp_path)


def _join_with_few_open_files(rank: int, world_size: int, folder: Path) -> None:
    spare = len(list(Path("/proc/self/fd").iterdir())) + 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    distributed.join(
        World(rank, rank, world_size, world_size, rendezvous="ranks"), folder, os.environ, deterministic=False
    )
    distributed.barrier()
    distributed.leave()


@pytest.mark.slow
def test_ranks_join_although_the_soft_limit_on_open_files_is_too_low(tmp_path):
    ranks: list[Any] = [
        FORKSERVER.Process(target=_join_with_few_open_files, args=(rank, 3, tmp_path)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0] * 3


def test_a_hard_limit_on_open_files_that_is_too_low_is_refused_before_ranks_meet(tmp_path):
    limits, many = resource.getrlimit(resource.RLIMIT_NOFILE), 10**9
    try:
        with pytest.raises(
            UserError, match=rf"Rank 1 needs \d+ more open files for {many} ranks, but .* allows .*LimitNOFILE"
        ):
            distributed.join(World(1, 1, many, many, rendezvous="ranks"), tmp_path, os.environ, deterministic=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _join_and_work(work: Callable[..., None], rank: int, world_size: int, folder: Path, *arguments: object) -> None:
    torch.set_num_threads(1)
    distributed.join(
        World(rank, rank, world_size, world_size, rendezvous="ranks"), folder, os.environ, deterministic=False
    )
    try:
        work(rank, world_size, folder, *arguments)
        distributed.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the other ranks
    distributed.leave()


def _make_state(find_unused: bool, saved: dict[str, Any] | None = None, path: Path = Path()) -> TrainState:
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
    state.model = wrap_in_ddp(module, device=CPU, sync_batchnorm=False, find_unused_parameters=find_unused)
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


def _make_loader(packed: Path, rank: int, world_size: int) -> Loader:
    config = TrainConfig(image=ImageSettings(height_px=24, width_px=32), augment=AugmentSettings())
    data = ShardSet(packed)
    return Loader(config, data, device=CPU, decode="cpu", rank=rank % world_size, world_size=world_size)
