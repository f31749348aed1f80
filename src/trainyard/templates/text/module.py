"""The model: a small GPT on characters, with the optimizer Lion and a schedule of warm-up, plateau and decay."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.train.module import Batch, DataInfo, Histogram, Rows, Signature, TrainModule

from .config import Config, ModelSettings

DECAY_SHARE = 0.2  # of the run, at its end


def build(config: Config, data: DataInfo) -> "GPT":
    """Build the network for the characters of the data."""
    return GPT(config.model, json.loads(data.artifacts["characters"]), context=config.packing.context)


class GPT(TrainModule):
    """Predicts each next character. Axes: B windows, T characters, V tokens, C width."""

    monitor = ("bits_per_character", "min")

    def __init__(self, model: ModelSettings, characters: Sequence[str], *, context: int) -> None:
        super().__init__()
        self.characters = characters
        tokens = len(characters) + 1
        self.token, self.place = nn.Embedding(tokens, model.width), nn.Embedding(context + 1, model.width)
        self.blocks = nn.ModuleList(Block(model.width, model.heads) for _ in range(model.layers))
        self.head = nn.Sequential(nn.LayerNorm(model.width), nn.Linear(model.width, tokens))
        self.baseline = ("equal probabilities", math.log2(tokens))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the mean cross-entropy, in nats."""
        return {"loss": self._compute(batch["tokens"])[0].mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return `nats` (B,), the mean cross-entropy of each window, and `next` (B,), the token after it."""
        nats_B, next_B = self._compute(batch["tokens"])
        return {"nats": nats_B, "next": next_B, "sample_id": batch["sample_id"]}

    def _compute(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTC = self.token(tokens_BT) + self.place.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        log_BTV = functional.log_softmax(self.head(x_BTC).float(), dim=2)
        nats_BT = -log_BTV[:, :-1].gather(2, tokens_BT[:, 1:, None])[:, :, 0]
        return nats_BT.mean(1), log_BTV[:, -1].argmax(1)

    def score(self, rows: Rows) -> dict[str, float | Histogram]:
        """Return the mean cross-entropy, in bits, and that of each window as a histogram."""
        bits = rows["nats"] / math.log(2)
        return {"bits_per_character": float(bits.mean()), "bits of a window": Histogram(bits)}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the bits of each window, and the character that would come next."""
        for key, nats, token in zip(keys, rows["nats"].tolist(), rows["next"].tolist(), strict=True):
            yield {"window": key, "bits_per_character": nats / math.log(2), "next": ["", *self.characters][token]}

    def describe_predict(self) -> Signature:
        """Describe the inputs and outputs of the network."""
        outputs = {"nats": "mean cross-entropy of the window", "next": "the likeliest next token"}
        return Signature({"tokens": "places in `characters`, from 1"}, outputs, {"characters": list(self.characters)})

    def repeated_layers(self) -> Iterable[nn.Module]:
        """Return the blocks."""
        return self.blocks

    def build_optimizer(self, groups: list[dict[str, Any]], config: TrainConfig) -> "Lion":
        """Return Lion: a step has the same length for every weight, so its learning rate is a tenth of Adam's."""
        return Lion(groups, lr=config.optimizer.lr, betas=(config.optimizer.beta1, config.optimizer.beta2))

    def build_schedule(
        self, config: TrainConfig, *, total_steps: int | None, steps_per_epoch: int
    ) -> Callable[[int], float]:
        """Return linear warm-up, a plateau, and linear decay (Hu et al. 2024, arXiv:2404.06395)."""
        if total_steps is None:
            raise UserError(
                "max_duration is a time, but the schedule decays at the end: write max_duration=20ep, or 2000st"
            )
        warmup = max(1, Duration.parse(config.schedule.warmup).to_steps(steps_per_epoch))
        decay = max(1, round(DECAY_SHARE * total_steps))
        return lambda step: min(1.0, (step + 1) / warmup, (total_steps - step) / decay)


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend = nn.ModuleList([nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)])
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.think = nn.Sequential(nn.LayerNorm(width), *layers)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return (B, T, C)."""
        norm, project, merge = self.attend
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in project(norm(x_BTC)).chunk(3, dim=2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + merge(seen.transpose(1, 2).flatten(2))
        thought_BTC: Tensor = self.think(x_BTC)
        return x_BTC + thought_BTC


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each weight by the learning rate, in the direction of the sign of its averaged gradient."""
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                sign = mean.lerp(weight.grad, 1 - group["betas"][0]).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(sign, alpha=-group["lr"])
                mean.lerp_(weight.grad, 1 - group["betas"][1])
