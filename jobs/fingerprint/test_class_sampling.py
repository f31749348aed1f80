"""The head that compares with a sample of the classes, alone and on two ranks, compared with the dense one."""

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional

from tests.cases.fingerprint import make_config, make_module
from tests.training import FORKSERVER
from trainyard.data.loader import MicroBatch
from trainyard.hardware import choose_precision
from trainyard.train import distributed
from trainyard.train.module import DataInfo
from trainyard.train.precision import make_autocast
from trainyard.train.run_context import RunContext
from trainyard.train.run_state import prepare_state, wrap_model
from trainyard.train.step import train_step
from trainyard.train.world import World

from .class_sampling import compute_sampled_cosines, draw_classes
from .config import Config
from .module import FingerprintModule, compute_cosface_logits
from .network import BranchOutputs

CLASSES, FEATURES, BATCH, STEPS = 30, 12, 16, 3
SUM_TOLERANCE = 1e-6  # of float32 gradients and losses below 10 that are summed in another order


def test_the_sample_has_distinct_classes_and_depends_on_seed_and_step_alone() -> None:
    def draw(seen: int, seed: int = 0) -> list[int]:
        return draw_classes(20, classes=100, seed=seed, samples_seen=torch.tensor(seen)).tolist()

    assert len(set(draw(512))) == 20
    assert draw(512) == draw(512) != draw(1024)
    assert draw(512) != draw(512, seed=1)
    drawn = np.bincount(np.concatenate([draw(512 * step) for step in range(500)]), minlength=100)
    # binomial(500, 0.2) has mean 100 and standard deviation 8.9; of 100 classes none is 4.5 deviations off
    assert abs(drawn - 100).max() < 40
    everything = draw_classes(100, classes=100, seed=0, samples_seen=torch.tensor(0))
    assert sorted(everything.tolist()) == list(range(100))


def test_with_all_classes_in_the_sample_loss_and_gradients_equal_those_of_the_dense_head() -> None:
    torch.manual_seed(0)
    embedding = functional.normalize(torch.randn(8, FEATURES, dtype=torch.float64), dim=1).requires_grad_()
    directions = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    true_B = torch.tensor([0, 3, 3, 29, 7, 7, 7, 1])
    dense = functional.linear(embedding, functional.normalize(directions, dim=1))
    sampled = compute_sampled_cosines(embedding, directions, true_B, torch.randperm(CLASSES))
    losses = [
        functional.cross_entropy(compute_cosface_logits(cosine, column, scale=32.0, margin=0.35), column)
        for cosine, column in ((dense, true_B), (sampled, torch.zeros_like(true_B)))
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    expected, found = (torch.autograd.grad(loss, (embedding, directions)) for loss in losses)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_only_sampled_classes_and_those_of_the_batch_get_a_gradient() -> None:
    module = make_head(sampled=4)
    module(make_head_batch(0))["loss"].backward()
    sampled = draw_classes(4, classes=CLASSES, seed=0, samples_seen=torch.tensor(0)).tolist()
    own = make_head_batch(0)["finger"].tolist()
    for name, rows in (("directions", {*sampled, *own}), ("centres.weight", {*own})):
        gradient = module.get_parameter(name).grad
        assert gradient is not None
        assert set(gradient.any(dim=1).nonzero().flatten().tolist()) == rows
        assert len(rows) <= module.sparse_gradients()[name]


def test_the_head_is_dense_by_default_and_a_sample_is_no_larger_than_the_classes() -> None:
    assert make_module().sparse_gradients() == {}
    assert make_head(sampled=10**6).sampled_classes == CLASSES


@pytest.mark.slow
def test_two_ranks_train_as_one_does_and_never_all_reduce_a_dense_gradient_of_the_classes(tmp_path: Path) -> None:
    ranks = [FORKSERVER.Process(target=train_as_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    network = sum(p.numel() for p in make_head(sampled=0).network.parameters())
    for sampled in (0, 4, CLASSES):
        alone, pair = train_head(tmp_path / "alone", World(), sampled=sampled), first[sampled]
        assert all(torch.equal(pair["weights"][name], second[sampled]["weights"][name]) for name in pair["weights"])
        for name, value in alone["weights"].items():
            torch.testing.assert_close(pair["weights"][name], value, rtol=0, atol=SUM_TOLERANCE, msg=name)
        total = torch.stack([pair["loss"], second[sampled]["loss"]]).sum(dim=0)
        torch.testing.assert_close(total, alone["loss"], rtol=SUM_TOLERANCE, atol=0)
        assert pair["reduced"] == network + (0 if sampled else 2 * CLASSES * FEATURES)
    for name, value in first[0]["weights"].items():
        torch.testing.assert_close(first[CLASSES]["weights"][name], value, rtol=0, atol=SUM_TOLERANCE, msg=name)
        assert name == "class_of_code" or not torch.allclose(first[4]["weights"][name], value, rtol=0, atol=1e-4)
    torch.testing.assert_close(first["rows"], first["rows expected"])
    assert first["too many rows"].isnan().any() and not first["too many rows"].isinf().any()


class Embedder(nn.Module):
    """A network without batch statistics, so that ranks and micro-batches compute what one process does."""

    branches, minutia = ("texture",), None

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, FEATURES)

    def compute_branches(self, x: Tensor) -> BranchOutputs:
        return BranchOutputs([functional.normalize(self.out(x), dim=1)], None, None)


def make_head_config(sampled: int) -> Config:
    config = make_config()
    config.head.sampled_classes, config.global_batch_size, config.ema_decay = sampled, BATCH, 0.9
    config.optimizer.name, config.optimizer.lr = "sgd", 0.1
    config.model.embedding_dims, config.head.margin_warmup = FEATURES, ""
    config.find_unused_parameters = "off"
    return config


def make_head(*, sampled: int) -> FingerprintModule:
    torch.manual_seed(0)
    every = np.arange(CLASSES)
    data = DataInfo({"finger": every}, {"finger": [f"f{i}" for i in every]}, every)
    return FingerprintModule(cast(Any, Embedder()), make_head_config(sampled), data)


def make_head_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "image": torch.randn(BATCH, FEATURES, generator=generator),
        "finger": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


def train_head(folder: Path, world: World, *, sampled: int) -> dict[str, Any]:
    """Train the head alone for a few steps of four micro-batches, through the engine."""
    config, missing = make_head_config(sampled), cast(Any, None)
    device, precision = torch.device("cpu"), choose_precision(None, compile="off")
    context = RunContext(
        config, make_head(sampled=sampled), missing, {}, world, device, precision, "cpu", 1, folder, missing, missing,
        4, 4,
    )  # fmt: skip
    state, _ = prepare_state(context)
    wrap_model(context, state, list, autocast=make_autocast(precision, device))
    reduced: list[int] = []
    if world.world_size > 1:
        model = cast(nn.parallel.DistributedDataParallel, state.model)
        model.register_comm_hook(reduced, record_bucket)
    losses = []
    for step in range(STEPS):
        batch, share, parts = make_head_batch(step), BATCH // world.world_size, []
        for position in range(0, share, 4):
            rows = slice(world.rank * share + position, world.rank * share + position + 4)
            part = {name: values[rows] for name, values in batch.items()}
            part["samples_seen"] = torch.tensor(step * BATCH)
            parts.append(MicroBatch(part, 4 / BATCH, position + 4 == share, 0.0))
        result = train_step(
            state, parts, lr=0.1, world_size=world.world_size, seed=world.rank, clip_grad_norm=1.0,
            autocast=make_autocast(precision, device),
        )  # fmt: skip
        assert not result.skipped
        losses.append(result.losses["loss"])
    weights = {name: value.detach().clone() for name, value in state.module.state_dict().items()}
    return {"weights": weights, "loss": torch.stack(losses), "reduced": sum(reduced) // STEPS}


def record_bucket(
    sizes: list[int],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket of gradients as DDP does, and note its size."""
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(cast(Any, None), bucket)


def train_as_rank(rank: int, folder: Path) -> None:
    """Be one of two ranks; write what came out to a file."""
    torch.set_num_threads(1)
    world = World(rank=rank, local_rank=rank, world_size=2, local_world_size=2, rendezvous="sampling")
    distributed.join(world, folder, os.environ, deterministic=False)
    found: dict[Any, Any] = {sampled: train_head(folder, world, sampled=sampled) for sampled in (0, 4, CLASSES)}
    found["rows"] = torch.zeros(9, 2)
    found["rows"][[1, 4 + rank]] = torch.tensor([[2.0, 4.0], [6.0, 0.0]])
    found["rows expected"] = distributed.sum_over_ranks(found["rows"].clone()) / 2
    found["too many rows"] = found["rows"].clone()
    distributed.average_rows(found["rows"], most=3)
    distributed.average_rows(found["too many rows"], most=2)
    torch.save(found, folder / f"rank-{rank}.pt")
    distributed.leave()
