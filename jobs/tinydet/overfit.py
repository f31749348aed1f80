"""Overfits a few tiles: a variant that cannot do that cannot learn at all."""

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import MicroBatch
from trainyard.data.shards import Ragged
from trainyard.errors import UserError
from trainyard.measure import make_header, write_new
from trainyard.terminal import say
from trainyard.train.module import Batch, DataInfo
from trainyard.train.step import TrainState, make_optimizer, train_step

from .config import Config
from .module import TinyDet, build
from .pack import TRUTH, fit_artifacts, samples

FILL = 114


def overfit(
    raw: Path, *, variants: Sequence[str], steps: int, tiles: int, tile_px: int, scale: float, results: Path
) -> Path:
    """Train each variant on the same few tiles for the same number of steps, and print AP50 on them meanwhile.

    Returns:
        the file `tinydet-overfit-<date>.jsonl`: a header line, and a line per evaluation.
    """
    unknown = sorted(set(variants) - {"ms", "cond", "vanilla"})
    if unknown:
        raise UserError(f"--variants {','.join(variants)}: expected some of ms, cond, vanilla, found {unknown[0]}.")
    config = make_small_config(variants[0], tile_px=tile_px, scale=scale)
    chosen, artifacts = find_busiest_tiles(raw, config, tiles), fit_artifacts(raw, config)
    lines: list[dict[str, Any]] = []
    for variant in variants:
        config = make_small_config(variant, tile_px=tile_px, scale=scale)
        for line in record_learning_curve(config, chosen, artifacts, steps=steps, every=max(1, steps // 12)):
            lines.append({"kind": "result", "variant": variant, **line})
            say(f"{variant:8} " + "  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)
    options = {"steps": steps, "tile_px": tile_px, "scale": scale, "tiles": [key for key, *_ in chosen]}
    options["objects"] = sum(len(labels) for *_, labels in chosen)
    return write_new(results, "tinydet-overfit", [make_header("tinydet-overfit", options), *lines])


LabelledTile = tuple[str, bytes, np.ndarray, np.ndarray]  # key, encoded image, boxes (n, 4), labels (n,)


def make_small_config(variant: str, *, tile_px: int, scale: float) -> Config:
    """Return the config of a detector of any variant that a CPU can train in minutes."""
    config = Config()
    config.packing.tile_px, config.packing.scale = tile_px, scale
    side = -(-tile_px // 32) * 32
    config.image.height_px = config.image.width_px = side
    config.image.channels, config.image.fit = 3, "letterbox"
    model = config.model
    model.variant, model.backbone, model.width = variant, "small", 32
    model.strides, model.dims, model.heads, model.feedforward = [4, 8, 16], 96, 4, 192
    model.decoder_layers, model.queries, model.denoising = 3, 100, 60
    model.encoder_layers = 1 if variant == "ms" else 3
    config.evaluation.detections = 100
    return config


def find_busiest_tiles(raw: Path, config: Config, count: int) -> list[LabelledTile]:
    """Return the training tiles with the most objects, at most one per image."""
    tiles: dict[str, LabelledTile] = {}
    all_samples = [sample for sample in samples(raw, config) if sample.columns["set"] == "train"]
    sizes = [len(sample.load.args[2]) for sample in all_samples]  # type: ignore[attr-defined]
    for number in np.argsort([-size for size in sizes], kind="stable").tolist():
        image_name = str(all_samples[number].columns["image_name"])
        if image_name not in tiles and len(tiles) < count:
            loaded = all_samples[number].load()
            image, boxes, labels = (loaded[name] for name in ("image", "boxes", "labels"))
            assert isinstance(image, bytes) and isinstance(boxes, Ragged) and isinstance(labels, Ragged)
            tiles[image_name] = (all_samples[number].key, image, boxes.values, labels.values)
    return list(tiles.values())


def record_learning_curve(
    config: Config,
    tiles: Sequence[LabelledTile],
    artifacts: dict[str, str],
    *,
    steps: int,
    every: int,
    lr: float = 1e-3,
) -> Iterator[dict[str, float]]:
    """Train on all tiles at once; every `every` steps, yield step, loss and the metrics on the same tiles."""
    module, batch = prepare(config, tiles, artifacts)
    optimizer = make_optimizer(module, OptimizerSettings(lr=lr, weight_decay=1e-4))
    state = TrainState(module, module, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, 0.0)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        warmup, decay = min(1.0, step / 20), 0.5 * (1 + np.cos(np.pi * step / (steps + 1)))
        state.progress.step = step
        micro = [MicroBatch(dict(batch), 1.0, True, 0.0)]
        result = train_step(
            state, micro, lr=lr * warmup * float(decay), world_size=1, seed=0, clip_grad_norm=1.0, autocast=nullcontext
        )
        if step % every == 0 or step == steps:
            names = ("ap", "ap50", "ap_verytiny", "ap_tiny", "ap_small")
            metrics = {name: value for name, value in compute_metrics(module, batch).items() if name in names}
            seconds = time.perf_counter() - begin
            yield {"step": step, "loss": float(result.losses["loss"]), **metrics, "seconds": seconds}


def prepare(config: Config, tiles: Sequence[LabelledTile], artifacts: dict[str, str]) -> tuple[TinyDet, Batch]:
    """Build a module with seed 0, and the tiles as one batch; each tile counts as a separate image."""
    truth = [
        np.column_stack([boxes, (boxes[:, 2:] - boxes[:, :2]).prod(axis=1), labels, np.zeros(len(labels))])
        for _, _, boxes, labels in tiles
    ]
    records = {
        "truth": [table.reshape(-1, len(TRUTH)).astype(np.float64) for table in truth],
        "boxes": [boxes for _, _, boxes, _ in tiles],
        "image": [np.frombuffer(image, dtype=np.uint8) for _, image, _, _ in tiles],
    }
    number = np.arange(len(tiles))
    columns = {"image_name": number, "tile_x": np.zeros_like(number), "tile_y": np.zeros_like(number)}
    data = DataInfo(
        columns,
        {"image_name": [key for key, *_ in tiles]},
        number,
        artifacts,
        lambda name, ids: [records[name][i] for i in ids.tolist()],
    )
    torch.manual_seed(0)
    return build(config, data), make_batch(tiles, size_px=(config.image.height_px, config.image.width_px))


def make_batch(tiles: Sequence[LabelledTile], *, size_px: tuple[int, int]) -> Batch:
    """Make the batch that the loader makes without augmentation: each tile at its own size in the upper left corner."""
    images = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for _, image, _, _ in tiles]
    canvas = np.full((len(tiles), *size_px, 3), FILL, dtype=np.uint8)
    for number, pixels in enumerate(images):
        canvas[number, : pixels.shape[0], : pixels.shape[1]] = pixels
    boxes, labels = ([torch.from_numpy(tile[part]) for tile in tiles] for part in (2, 3))
    return {
        "image": torch.from_numpy(canvas).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last) / 255,
        "boxes": nn.utils.rnn.pad_sequence(boxes, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True),
        "boxes_count": torch.tensor([len(label) for label in labels]),
        "affine": torch.eye(3)[:2].expand(len(tiles), -1, -1),
        "image_px": torch.tensor([pixels.shape[:2] for pixels in images], dtype=torch.float32),
        "sample_id": torch.arange(len(tiles)),
    }


def compute_metrics(module: TinyDet, batch: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics on a batch that is the whole data set."""
    module.eval()
    with torch.inference_mode():
        rows = {name: values.numpy() for name, values in module.predict(batch).items()}
    module.train()
    return module.score(rows)
