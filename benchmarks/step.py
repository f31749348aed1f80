"""The suite "step": what a training step of the engine costs compared with the same step in a plain PyTorch loop."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contract import BATCH

LR, CLIP_GRAD_NORM, SEED = 1e-3, 1.0, 0
INPUT_PX, CLASSES = 64, 10
Step = Callable[[], object]
Autocast = Callable[[], AbstractContextManager[None]]


def measure_interleaved(*, warmup: int, samples: int, seconds: float) -> list[dict[str, Any]]:
    """Time both steps alternately, in a random order each turn, on one device in one process.

    Returns:
        one line per step: the medians of ms_per_step and of the rates that `bench.measure` returns.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    steps = build_steps(device)
    for _ in range(-(-warmup // BATCH)):
        for step in steps.values():
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order, begin, turns = random.Random(SEED), time.perf_counter(), 0
    while turns * BATCH < samples or time.perf_counter() - begin < seconds:
        for name in order.sample(list(steps), len(steps)):
            times[name].append(time_step(steps[name], device))
        turns += 1
    return [summarise_times(name, *zip(*pairs, strict=True)) for name, pairs in times.items()]


def time_step(step: Step, device: torch.device) -> tuple[float, float]:
    """Return wall and CPU seconds of one step, including the device's work."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    wait()
    return time.perf_counter() - wall, time.process_time() - cpu


def summarise_times(name: str, wall_s: tuple[float, ...], cpu_s: tuple[float, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "steps": len(wall_s),
        "ms_per_step": 1e3 * median(wall_s),
        "samples_per_s": BATCH / median(wall_s),
        "samples_per_core_s": BATCH / median(cpu_s),
    }


def build_steps(device: torch.device) -> dict[str, Step]:
    """Build both steps, on equal models and batches, with the precision that the engine chooses here."""
    from trainyard.hardware import choose_precision
    from trainyard.train.precision import make_autocast, set_switches

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    precision = choose_precision(None if capability is None else capability[0] * 10 + capability[1])
    set_switches(precision, deterministic=False)
    layout = torch.channels_last if precision.channels_last else torch.contiguous_format
    random = torch.Generator().manual_seed(SEED)
    image = torch.rand(BATCH, 3, INPUT_PX, INPUT_PX, generator=random)
    label = torch.randint(CLASSES, (BATCH,), generator=random).to(device)
    batch = {"image": image.to(device, memory_format=layout), "label": label}
    context = make_autocast(precision, device)
    models = [build_classifier().to(device, memory_format=layout) for _ in range(2)]
    scalers = [torch.amp.GradScaler(device.type, enabled=precision.loss_scaling) for _ in range(2)]
    return {
        "ours": build_engine_step(models[0], batch, scalers[0], context),
        "plain_loop": build_plain_step(models[1], batch, scalers[1], context),
    }


def build_classifier() -> Any:
    """Build a small residual network with its loss; dozens of parameters, as overhead grows with their number."""
    from trainyard.train.module import TrainModule

    class Classifier(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            stages = [Residual(width, 2 * width) for width in (16, 32, 64)]
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), *stages)
            self.head = nn.Linear(128, CLASSES)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            scores = self.head(self.body(batch["image"]).mean(dim=(2, 3)))
            return {"loss": nn.functional.cross_entropy(scores, batch["label"])}

    torch.manual_seed(SEED)
    return Classifier()


class Residual(nn.Module):
    """Two normalised convolutions in parallel with a strided 1 x 1 convolution."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer)
        self.second, self.second_norm = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def build_engine_step(model: Any, batch: dict[str, Tensor], scaler: torch.amp.GradScaler, context: Autocast) -> Step:
    from trainyard.config.settings import OptimizerSettings
    from trainyard.data.loader import MicroBatch
    from trainyard.train.step import TrainState, make_optimizer, train_step

    optimizer = make_optimizer(model, OptimizerSettings(lr=LR))
    state = TrainState(model, model, optimizer, scaler, ema=None, ema_decay=0.0)
    micro_batches = [MicroBatch(batch, weight=1.0, last=True, wait_s=0.0)]
    limits = {"world_size": 1, "seed": SEED, "clip_grad_norm": CLIP_GRAD_NORM}
    return lambda: train_step(state, micro_batches, lr=LR, autocast=context, **limits)


def build_plain_step(model: Any, batch: dict[str, Tensor], scaler: torch.amp.GradScaler, context: Autocast) -> Step:
    """Build a step as one would write it by hand for one device; even its loss stays on the device, unread."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = model(batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step
