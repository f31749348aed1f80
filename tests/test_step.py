"""One optimizer step: the same mathematics however the batch is split, and no step on a gradient that is not finite."""

import copy
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import MicroBatch
from trainyard.errors import UserError
from trainyard.hardware import choose_precision
from trainyard.train.meters import count_skipped_in_a_row
from trainyard.train.module import Batch, TrainModule
from trainyard.train.precision import make_autocast
from trainyard.train.step import (
    StepResult,
    TrainState,
    check_running_statistics,
    copy_for_average,
    enable_activation_checkpointing,
    make_optimizer,
    train_step,
)

FP32 = make_autocast(choose_precision(None), torch.device("cpu"))
SUM_TOLERANCE = 1e-6
"""Of float32 gradients near 1 that are summed in another order."""


class Classifier(TrainModule):
    """Two convolutions and a linear layer on 8 x 8 images of 5 classes."""

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, 6, 3),
                nn.BatchNorm2d(6) if batch_norm else nn.Identity(),
                nn.Dropout(dropout),
                nn.Tanh(),
            )
            for channels in (2, 6)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        x = batch["image"]
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x.mean((2, 3))), batch["label"])
        return {"loss": loss * batch.get("factor", torch.ones(1)).max()}

    def repeated_layers(self) -> nn.ModuleList:
        return self.layers


def make_state(module: TrainModule, *, scaling: bool = False, ema: bool = False, **optimizer: object) -> TrainState:
    return TrainState(
        module=module,
        model=module,
        optimizer=make_optimizer(module, OptimizerSettings(**optimizer)),  # type: ignore[arg-type]
        scaler=torch.amp.GradScaler("cpu", enabled=scaling),
        ema=copy_for_average(module) if ema else None,
        ema_decay=0.75,
    )


def make_classifier(seed: int = 0, **options: object) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(**options)  # type: ignore[arg-type]


def make_batch(size: int) -> Batch:
    g = torch.Generator().manual_seed(size)
    return {"image": torch.randn(size, 2, 8, 8, generator=g), "label": torch.randint(5, (size,), generator=g)}


def split_batch(batch: Batch, *sizes: int) -> list[MicroBatch]:
    total, first, parts = sum(sizes), 0, []
    for size in sizes:
        part = {name: values[first : first + size] for name, values in batch.items()}
        first += size
        parts.append(MicroBatch(part, size / total, first == total, 0.0))
    return parts


def step(state: TrainState, micro_batches: list[MicroBatch], *, clip: float = 0.0) -> StepResult:
    return train_step(state, micro_batches, lr=0.1, world_size=1, seed=0, clip_grad_norm=clip, autocast=FP32)


def copy_gradients(state: TrainState) -> list[Tensor]:
    return [p.grad.clone() for p in state.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2), (11, 1), (1,) * 12])
def test_micro_batches_give_the_gradient_of_the_whole_batch_even_with_a_ragged_last_one(sizes):
    batch = make_batch(12)
    whole, parts = make_state(make_classifier()), make_state(make_classifier())
    loss = step(whole, split_batch(batch, 12)).losses["loss"]
    loss_of_parts = step(parts, split_batch(batch, *sizes)).losses["loss"]
    assert abs(loss - loss_of_parts) < SUM_TOLERANCE
    for a, b in zip(copy_gradients(whole), copy_gradients(parts), strict=True):
        assert torch.allclose(a, b, atol=SUM_TOLERANCE, rtol=0)


def test_a_stand_in_of_weight_zero_adds_nothing():
    batch = make_batch(12)
    alone, accompanied = make_state(make_classifier()), make_state(make_classifier())
    step(alone, split_batch(batch, 12))
    micro_batches = split_batch(batch, 12)
    stand_in = MicroBatch({name: v[:1] for name, v in batch.items()}, 0.0, True, 0.0)
    step(accompanied, [MicroBatch(micro_batches[0].batch, 1.0, False, 0.0), stand_in])
    assert all(torch.equal(a, b) for a, b in zip(copy_gradients(alone), copy_gradients(accompanied), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stand_in_of_weight_zero_changes_no_batch_statistics(recompute):
    alone, accompanied = (make_state(make_classifier(batch_norm=True)) for _ in range(2))
    if recompute:
        enable_activation_checkpointing(alone.module)
        enable_activation_checkpointing(accompanied.module)
    batch = make_batch(12)
    stand_in = MicroBatch({name: v[:1] for name, v in batch.items()}, 0.0, True, 0.0)
    for _ in range(2):
        step(alone, split_batch(batch, 12))
        step(accompanied, [MicroBatch(batch, 1.0, False, 0.0), stand_in])
    states = [state.module.state_dict() for state in (alone, accompanied)]
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []
    assert all(part.training and "forward" not in vars(part) for part in accompanied.module.layers[0])


def test_a_stand_in_needs_no_variance():
    class Vectors(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))

    batch, state = make_batch(12), make_state(Vectors())
    step(state, [MicroBatch(batch, 1.0, False, 0.0), MicroBatch({n: v[:1] for n, v in batch.items()}, 0.0, True, 0.0)])


def test_activation_checkpointing_changes_no_bit_of_gradients_or_batch_statistics():
    options = {"batch_norm": True, "dropout": 0.3}
    plain, recomputed = make_state(make_classifier(**options)), make_state(make_classifier(**options))
    assert enable_activation_checkpointing(recomputed.module) == 2
    for _ in range(3):
        step(plain, split_batch(make_batch(12), 6, 6))
        step(recomputed, split_batch(make_batch(12), 6, 6))
    assert all(torch.equal(a, b) for a, b in zip(copy_gradients(plain), copy_gradients(recomputed), strict=True))
    a, b = plain.module.state_dict(), recomputed.module.state_dict()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch counts them twice, so a run refuses")
def test_activation_checkpointing_works_under_torch_compile_and_counts_batch_statistics_once():
    plain, compiled = (make_state(make_classifier(batch_norm=True)) for _ in range(2))
    enable_activation_checkpointing(compiled.module)
    compiled.model = torch.compile(compiled.module, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        step(plain, split_batch(make_batch(12), 6, 6))
        step(compiled, split_batch(make_batch(12), 6, 6))
    for a, b in zip(copy_gradients(plain), copy_gradients(compiled), strict=True):
        assert torch.allclose(a, b, atol=SUM_TOLERANCE)
    for (name, a), b in zip(plain.module.named_buffers(), compiled.module.buffers(), strict=True):
        assert torch.allclose(a, b, atol=SUM_TOLERANCE), name


@pytest.mark.parametrize(
    ("version", "batch_norm", "refused"),
    [("2.7.1+cu126", True, True), ("2.12.1", True, True), ("2.13.0+cu130", True, False), ("2.7.1", False, False)],
)
def test_a_torch_that_would_count_batch_statistics_twice_is_refused(version, batch_norm, refused):
    module = make_classifier(batch_norm=batch_norm)
    if refused:
        with pytest.raises(UserError, match=rf"torch {re.escape(version)} would .*Use compile=off"):
            check_running_statistics(module, version)
    else:
        check_running_statistics(module, version)


def test_activation_checkpointing_recomputes_what_it_dropped():
    state = make_state(make_classifier())
    calls = []
    state.module.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    enable_activation_checkpointing(state.module)
    step(state, split_batch(make_batch(4), 4))
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_step_on_a_gradient_that_is_not_finite_changes_nothing(name):
    state = make_state(make_classifier(), name=name, weight_decay=0.1)
    step(state, split_batch(make_batch(12), 12))
    before = copy.deepcopy([state.module.state_dict(), state.optimizer.state_dict()["state"]])
    batch = make_batch(12) | {"factor": torch.full((12,), float("inf"))}
    result = step(state, split_batch(batch, 12), clip=1.0)
    after = [state.module.state_dict(), state.optimizer.state_dict()["state"]]
    assert result.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(_list_tensors(before), _list_tensors(after), strict=True))
    assert step(state, split_batch(make_batch(12), 12)).skipped == 0
    assert not torch.equal(before[0]["head.weight"], state.module.head.weight)


@pytest.mark.parametrize("scaling", [False, True])
def test_a_step_whose_gradient_is_finite_but_for_its_norm_changes_nothing(scaling):
    state = make_state(make_classifier(), weight_decay=0.1)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaling)
    for parameter in state.module.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    before = copy.deepcopy(state.module.state_dict())
    result = step(state, split_batch(make_batch(12), 12), clip=1.0)
    assert (result.skipped, result.grad_norm) == (1, float("inf"))
    assert [name for name, value in state.module.state_dict().items() if not torch.equal(value, before[name])] == []


def test_a_forward_pass_that_overflows_leaves_buffers_and_averaged_weights_as_they_were():
    module = make_classifier(batch_norm=True)
    module.register_buffer("centres", torch.ones(2, 3, dtype=torch.float64))

    def move_centres(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        module.centres.mul_(output.detach().sum())

    module.head.register_forward_hook(move_centres)
    state = make_state(module, scaling=True, ema=True)
    step(state, split_batch(make_batch(12), 6, 6))
    before = copy.deepcopy([state.module.state_dict(), state.ema.state_dict()])
    batch = make_batch(12)
    batch["image"][3] = float("inf")
    assert step(state, split_batch(batch, 6, 6)).skipped == 1
    for old, new in zip(before, (state.module.state_dict(), state.ema.state_dict()), strict=True):
        assert [name for name in old if not torch.equal(old[name], new[name])] == []
    assert step(state, split_batch(make_batch(12), 6, 6)).skipped == 0
    norm = state.module.layers[0][1]
    assert norm.running_mean.isfinite().all() and norm.num_batches_tracked == 4
    assert not torch.equal(before[1]["head.weight"], state.ema.head.weight)


def test_sgd_whose_first_step_is_skipped_begins_with_the_second():
    plain, skipping = (make_state(make_classifier(), name="sgd", weight_decay=0.1) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        True  # with NaN; a run, also of another test, sets it to False
    )
    try:
        step(skipping, split_batch(make_batch(12) | {"factor": torch.full((12,), float("inf"))}, 12))
    finally:
        torch.use_deterministic_algorithms(False)
    for _ in range(2):
        step(plain, split_batch(make_batch(12), 12))
        assert step(skipping, split_batch(make_batch(12), 12)).skipped == 0
    assert all(torch.equal(a, b) for a, b in zip(plain.module.parameters(), skipping.module.parameters(), strict=True))


def test_loss_scaling_skips_an_overflow_lowers_the_scale_and_clips_true_gradients():
    state, plain = make_state(make_classifier(), scaling=True), make_state(make_classifier())
    batch = make_batch(12)
    assert step(state, split_batch(batch | {"factor": torch.full((12,), 1e38)}, 12)).skipped == 1
    scale = state.scaler.get_scale()
    assert scale == 2.0**15
    result, expected = step(state, split_batch(batch, 12), clip=0.01), step(plain, split_batch(batch, 12), clip=0.01)
    assert result.skipped == 0
    assert torch.allclose(result.grad_norm, expected.grad_norm, rtol=1e-5)
    for a, b in zip(copy_gradients(state), copy_gradients(plain), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("name", "reference"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_fused_steps_on_channels_last_weights_equal_the_textbook_loop(name, reference):
    ours, theirs = make_classifier().to(memory_format=torch.channels_last), make_classifier()
    state = make_state(ours, name=name, weight_decay=0.01)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = reference(groups, lr=0.1, foreach=False)
    for _ in range(4):
        step(state, split_batch(make_batch(12), 12), clip=0.5)
        optimizer.zero_grad()
        theirs(make_batch(12))["loss"].backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), "Adam's division by a small root magnifies rounding"


def test_averaged_weights_move_a_quarter_of_the_way_and_copy_buffers():
    state = make_state(make_classifier(batch_norm=True), ema=True)
    old = state.module.head.weight.detach().clone()
    step(state, split_batch(make_batch(12), 12))
    assert torch.allclose(state.ema.head.weight, old + 0.25 * (state.module.head.weight - old), atol=1e-7)
    assert torch.equal(state.ema.layers[0][1].running_mean, state.module.layers[0][1].running_mean)


def test_dropout_depends_on_the_step_and_the_seed_and_on_nothing_else():
    def compute_gradients(progress_step: int, seed: int) -> list[Tensor]:
        state = make_state(make_classifier(dropout=0.5))
        state.progress.step = progress_step
        torch.rand(17)
        train_step(
            state, split_batch(make_batch(4), 4), lr=0.1, world_size=1, seed=seed, clip_grad_norm=0.0, autocast=FP32
        )
        return copy_gradients(state)

    def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert are_equal(compute_gradients(3, 1), compute_gradients(3, 1))
    assert not are_equal(compute_gradients(3, 1), compute_gradients(4, 1))
    assert not are_equal(compute_gradients(3, 1), compute_gradients(3, 2))


def test_a_save_between_two_overflows_does_not_make_the_run_forget_the_first():
    count = 0
    for skipped in (1.0, None, 1.0):
        count = count_skipped_in_a_row(count, skipped)
    assert count == 2
    assert count_skipped_in_a_row(count, 0.0) == 0


def _list_tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in inner for tensor in _list_tensors(item)]


@pytest.mark.slow
def test_memory_that_a_step_frees_is_kept_for_the_next():
    script = """
import resource, torch
from trainyard.train.precision import keep_freed_memory

def steps(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        tensors = [torch.ones(1 << 20) for _ in range(20)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = steps(10)
choice, reason = keep_freed_memory(torch.device("cpu"))
steps(2)
print(choice, returned, steps(10))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    choice, returned, kept = done.stdout.split()
    assert choice == "kept"
    assert 10 * int(kept) < int(returned)


def test_a_parameter_that_no_group_or_two_groups_have_is_refused_by_name():
    class Forgetful(Classifier):
        def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
            return [{"params": self.layers.parameters(), "weight_decay": weight_decay}]

    class Eager(Classifier):
        def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
            return [{"params": self.parameters()}, {"params": [self.head.bias]}]

    said = r"test_step.py: Forgetful.parameter_groups: head.weight, head.bias are in no group, and would never train"
    with pytest.raises(UserError, match=said):
        make_optimizer(Forgetful(), OptimizerSettings())
    with pytest.raises(UserError, match=r"Eager.parameter_groups: head.bias: in two groups"):
        make_optimizer(Eager(), OptimizerSettings())
    frozen = Forgetful()
    frozen.head.requires_grad_(False)
    assert len(make_optimizer(frozen, OptimizerSettings()).param_groups) == 1
