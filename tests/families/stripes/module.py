"""A network that classifies the direction of stripes."""

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from families.stripes.config import Config
from PIL import Image
from torch import Tensor, distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from trainyard.train.module import Batch, DataInfo, Rows, Signature, TrainModule


class StripesModule(TrainModule):
    """Two convolutions, mean, dropout, linear."""

    monitor = ("accuracy", "max")
    hook: RemovableHandle | None = None

    def __init__(self, config: Config, directions: list[str]) -> None:
        super().__init__()
        self.directions = directions
        width, norm = config.model.channels, config.model.batch_norm
        self.layers = nn.ModuleList(_build_layer(i, width, norm) for i in (1, width))
        self.dropout = nn.Dropout(config.model.dropout)
        self.head = nn.Linear(width, len(directions))
        self.branch = nn.Linear(width, len(directions)) if config.model.branch else None
        self.poison_step = config.model.poison_step
        self.unpool_step = config.model.unpool_step
        self.diary = config.model.diary
        self.sleep_s = config.model.sleep_ms / 1000
        self.full = config.model

    def compute_logits(self, image_BCHW: Tensor) -> Tensor:
        x_BCHW = image_BCHW
        for layer in self.layers:
            x_BCHW = layer(x_BCHW)
        if self.training and self.is_full("backward", len(x_BCHW)):  # with that of the head done
            x_BCHW.register_hook(raise_out_of_memory)
        return self.head(self.dropout(x_BCHW.mean((2, 3)))).float()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.diary and self.training:
            with Path(self.diary).open("a") as file:  # one write per line, so that ranks do not interleave
                file.write(f"{int(batch['samples_seen'])} {' '.join(map(str, batch['sample_id'].tolist()))}\n")
        if self.training:
            time.sleep(self.sleep_s)
        self.samples_seen = int(batch["samples_seen"]) if self.full.full_above >= 0 else 0
        image_BCHW = batch["image"]
        if self.is_full("forward", len(image_BCHW)):
            raise_out_of_memory()
        if self.is_full("optimizer", len(image_BCHW)):
            self.fill_after_step()
        if self.training and 0 <= self.unpool_step <= int(batch["samples_seen"]):
            pooled, indices = F.max_pool2d(image_BCHW, 1, return_indices=True)
            image_BCHW = F.max_unpool2d(pooled, indices, 1)
        loss = F.cross_entropy(self.compute_logits(image_BCHW), batch["direction"])
        if self.branch is not None and int(batch["direction"][0]) == 0:
            loss = loss + F.cross_entropy(self.branch(self.layers[0](image_BCHW).mean((2, 3))), batch["direction"])
        if self.poison_step >= 0:
            loss = loss * torch.where(batch["samples_seen"] >= self.poison_step, torch.inf, 1.0)
        return {"loss": loss}

    def fill_after_step(self) -> None:
        """Run out of memory when the optimizer has changed weights."""
        if StripesModule.hook is not None:  # of a pass that was no step
            StripesModule.hook.remove()
        StripesModule.hook = hook = register_optimizer_step_post_hook(lambda *_: (hook.remove(), raise_out_of_memory()))

    def is_full(self, phase: str, samples: int) -> bool:
        """Tell whether this rank has no memory for so many samples."""
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        return (
            phase in self.full.full_phase.split("+")
            and 0 <= self.full.full_above < samples
            and self.full.full_rank in (-1, rank)
            and (not self.training or self.samples_seen >= self.full.full_step)
        )

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        if self.is_full("evaluation", batch["image"].shape[0]):
            raise_out_of_memory()
        predicted = self.compute_logits(batch["image"]).argmax(1)
        return {"sample_id": batch["sample_id"], "chosen": predicted, "direction": batch.get("direction", predicted)}

    def describe_predict(self) -> Signature:
        return Signature({"image": "stripes"}, {"chosen": "index in settings.names"}, {"names": self.directions})

    def score(self, rows: Rows) -> dict[str, float]:
        return {"accuracy": float(np.mean(rows["chosen"] == rows["direction"]))}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        confusion = np.zeros((len(self.directions),) * 2, dtype=np.uint8)
        np.add.at(confusion, (rows["direction"], rows["chosen"]), 1)
        png = io.BytesIO()
        Image.fromarray(confusion).save(png, "PNG")
        return {"Confusion, true/chosen": png.getvalue()}

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        png = io.BytesIO()
        Image.new("L", (8, 8)).save(png, "PNG")
        return {f"sample {rows['sample_id'][0]}": png.getvalue()}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        for key, predicted in zip(keys, rows["chosen"].tolist(), strict=True):
            yield {"image": key, "direction": self.directions[predicted]}

    def repeated_layers(self) -> Iterable[nn.Module]:
        return self.layers


def raise_out_of_memory(*_: object) -> None:
    """Raise what torch's allocator raises."""
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.41 GiB is "
        "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True."
    )


def _build_layer(channels_in: int, channels: int, batch_norm: bool) -> nn.Module:
    norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), norm, nn.ReLU())


def build(config: Config, data: DataInfo) -> StripesModule:
    """Build the network for the directions in the data."""
    return StripesModule(config, data.artifacts["directions"].split())
