"""Times matching, reading and waiting, compared with the reference loop, which resizes images twice on the CPU."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor

from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import shuffle
from trainyard.data.pack import pack
from trainyard.data.shards import ShardSet
from trainyard.measure import Candidate, format_table, make_header, measure_candidates, write_new
from trainyard.settings import OptimizerSettings
from trainyard.train.module import DataInfo
from trainyard.train.step import TrainState, make_optimizer, train_step

from .config import Config
from .matching import LossTerms, Objects, compute_costs, match
from .module import TinyDet, build
from .network import Predictions
from .overfit import make_small_config
from .pack import fit_artifacts, samples, splits
from .synthesis import CATEGORIES, HEIGHT_PX, WIDTH_PX, draw_scene

SIDE_PX = 800
"""Side of the network's input in both loops, which the reference's second resizing produces."""

FIRST_PX = 1333
"""Side of the square to which the reference's first resizing stretches every image."""

BATCH, STEPS, READS = 4, 8, 24
TERMS = LossTerms("focal", 2, 2, 5, 2)


def bench(*, rounds: int, images: int, results: Path) -> Path:
    """Measure all candidates in each round, in a newly shuffled order; print and write medians, spreads and ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = measure_candidates(make_candidates(Path(scratch), images), rounds=rounds, warm_up=True)
    print(format_table(lines))
    options = {"rounds": rounds, "pictures": images, "batch": BATCH, "threads": torch.get_num_threads()}
    path = write_new(results, "tinydet-bench", [make_header("tinydet-bench", options), *lines])
    print(f"written: {path}")
    return path


def make_candidates(scratch: Path, images: int) -> list[Candidate]:
    """Return the candidates, which read frames drawn and packed into `scratch`.

    The network is very small: on a CPU it simulates a fast GPU, without which nothing would ever wait for data.
    """
    raw = scratch / "raw"
    draw_frames(raw, images)
    config = make_bench_config()
    data = pack(samples(raw, config), scratch / "packed", meta={}, workers=1, artifacts=fit_artifacts(raw, config))
    predictions, objects = _make_predictions(), _make_objects()
    reference_note = {"note": "stretched to 1333 x 1333, then to 800 x 800, not overlapped with the step"}
    our_note = {"note": "resized once, decoded ahead in one thread"}
    matching_note = "6 layers, 16 images, 300 queries, 5 to 40 objects"
    return [
        Candidate(
            "matching",
            lambda: _time_ms(lambda: match(*predictions, objects, TERMS)),
            "ms/step",
            matching_note,
            "matching, reference",
        ),
        Candidate(
            "matching, reference",
            lambda: _time_ms(lambda: _match_each(predictions, objects)),
            "ms/step",
            "a copy for each layer",
        ),
        Candidate(
            "reading",
            lambda: _measure_reading(_stream_ours(data, config)),
            "images/s",
            **our_note,
            baseline="reading, reference",
        ),
        Candidate(
            "reading, reference", lambda: _measure_reading(_stream_reference(raw, data)), "images/s", **reference_note
        ),
        Candidate(
            "training",
            lambda: _measure_training(config, data, _stream_ours(data, config))[0],
            "images/s",
            baseline="training, reference",
        ),
        Candidate(
            "training, reference",
            lambda: _measure_training(config, data, _stream_reference(raw, data))[0],
            "images/s",
        ),
        Candidate("waiting", lambda: _measure_training(config, data, _stream_ours(data, config))[1], "% of time"),
        Candidate(
            "waiting, reference", lambda: _measure_training(config, data, _stream_reference(raw, data))[1], "% of time"
        ),
    ]


def make_bench_config() -> Config:
    """Return the config of a very small detector for inputs of 800 px."""
    config = make_small_config("ms", tile_px=0, scale=1.0)
    config.image.height_px = config.image.width_px = SIDE_PX
    model = config.model
    model.width, model.strides, model.dims, model.feedforward = 8, [16, 32], 32, 32
    model.decoder_layers, model.queries, model.denoising = 1, 50, 20
    return config


def draw_frames(raw: Path, count: int) -> None:
    """Write `count` JPEG frames of 8 x 6 synthetic scenes, 1280 x 768 px, with annotations."""
    (raw / "images").mkdir(parents=True)
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES],
    }
    scenes = [draw_scene(number, 0) for number in range(64)]
    for number in range(count):
        frame = np.zeros((6 * HEIGHT_PX, 8 * WIDTH_PX, 3), dtype=np.uint8)
        content["images"].append({"id": number, "file_name": f"{number}.jpg", "width": 1280, "height": 768})
        for place in range(48):
            pixels, boxes, labels = scenes[(number * 7 + place) % len(scenes)]
            y, x = place // 8 * HEIGHT_PX, place % 8 * WIDTH_PX
            frame[y : y + HEIGHT_PX, x : x + WIDTH_PX] = pixels
            for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
                bbox = [box[0] + x, box[1] + y, box[2] - box[0], box[3] - box[1]]
                entry = {"id": len(content["annotations"]), "image_id": number, "category_id": CATEGORIES[label][0]}
                content["annotations"].append({**entry, "bbox": bbox, "iscrowd": 0})
        Image.fromarray(frame).save(raw / "images" / f"{number}.jpg", quality=90)
    (raw / "instances_train.json").write_text(json.dumps(content))


def _make_predictions() -> Predictions:
    """Make the predictions of 6 layers with 300 queries for 16 images."""
    torch.manual_seed(0)
    boxes = torch.cat([torch.rand(6, 16, 300, 2), 0.02 + 0.02 * torch.rand(6, 16, 300, 2)], dim=-1)
    return Predictions(torch.randn(6, 16, 300, 2), boxes)


def _make_objects() -> Objects:
    torch.manual_seed(1)
    boxes = torch.cat([torch.rand(16, 40, 2), 0.02 + 0.02 * torch.rand(16, 40, 2)], dim=-1)
    valid = torch.arange(40) < torch.randint(5, 41, (16, 1))
    return Objects(boxes, torch.randint(2, (16, 40)), valid, (SIDE_PX, SIDE_PX))


def _match_each(predictions: Predictions, objects: Objects) -> None:
    """Match as the reference does: per layer, the objects of all images with all predictions, then split by image."""
    counts = objects.valid_BL.sum(dim=1).tolist()
    for logits_BQK, boxes_BQ4 in zip(predictions.logits_DBQK, predictions.boxes_DBQ4, strict=True):
        flat = Predictions(logits_BQK.flatten(0, 1)[None, None], boxes_BQ4.flatten(0, 1)[None, None])
        chosen = objects.valid_BL.flatten()
        all_boxes, all_labels = objects.boxes_BL4.flatten(0, 1)[chosen], objects.labels_BL.flatten()[chosen]
        all_objects = Objects(all_boxes[None], all_labels[None], torch.ones(1, len(all_labels)) > 0, objects.size_px)
        cost = compute_costs(*flat, all_objects, TERMS).view(*logits_BQK.shape[:2], -1).cpu()
        for image, part in enumerate(torch.split(cost, counts, dim=-1)):
            linear_sum_assignment(part[image])


def _time_ms(work: Callable[[], object], *, repeats: int = 5) -> float:
    work()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1000 * (time.perf_counter() - begin) / repeats


def _stream_ours(data: ShardSet, config: Config) -> Iterator[MicroBatch]:
    loader = Loader(
        data,
        settings=config.data,
        image=config.image,
        augmentation=config.augment,
        seed=0,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        threads=1,
        channels_last=True,
        decode="cpu",
    )
    ids = splits(data.columns, data.vocabulary, config)["train"]
    return loader.train(
        lambda epoch: shuffle(ids, seed=0, epoch=epoch, global_batch_size=BATCH),
        epoch=0,
        start=0,
        micro_batch_size=BATCH,
    )


def _stream_reference(raw: Path, data: ShardSet) -> Iterator[MicroBatch]:
    """Yield batches as the reference makes them: stretched to 1333 x 1333, converted back, shrunk to 800 x 800.

    It runs in one process, as ours does, which decodes ahead in one thread. Values are in 0..1; both loops normalise in
    the network.
    """
    files = sorted((raw / "images").iterdir(), key=lambda path: int(path.stem))
    boxes, labels = (data.read_arrays(name, np.arange(data.count)) for name in ("boxes", "labels"))
    number = 0
    while True:
        begin = time.perf_counter()
        chosen = [(number + i) % len(files) for i in range(BATCH)]
        number += BATCH
        images = [_resize_twice(files[i]) for i in chosen]
        most = max(len(labels[i]) for i in chosen)
        box, label = torch.zeros(BATCH, most, 4), torch.zeros(BATCH, most, dtype=torch.long)
        for row, i in enumerate(chosen):
            box[row, : len(labels[i])] = torch.tensor(boxes[i])
            label[row, : len(labels[i])] = torch.tensor(labels[i])
        scale = torch.tensor([[SIDE_PX / 1280, 0, 0], [0, SIDE_PX / 768, 0]])
        batch = {
            "image": torch.stack(images),
            "boxes": box,
            "labels": label,
            "boxes_count": torch.tensor([len(labels[i]) for i in chosen]),
            "affine": scale.expand(BATCH, -1, -1),
            "image_px": torch.tensor([[768.0, 1280.0]]).expand(BATCH, -1),
            "sample_id": torch.tensor(chosen),
        }
        yield MicroBatch(batch, 1.0, True, time.perf_counter() - begin)


def _resize_twice(path: Path) -> Tensor:
    with Image.open(path) as image:
        square = image.convert("RGB").resize((FIRST_PX, FIRST_PX), Image.Resampling.BILINEAR)
    tensor = torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255  # what the reference's data set yields
    again = Image.fromarray((tensor * 255).byte().permute(1, 2, 0).numpy())  # what its step passes to the processor
    small = again.resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255


def _measure_reading(stream: Iterator[MicroBatch]) -> float:
    """Return images per second of reading alone."""
    for _ in range(3):  # batches that were decoded ahead do not count
        next(stream)
    begin = time.perf_counter()
    for _ in range(READS):
        next(stream)
    seconds = time.perf_counter() - begin
    stream.close()  # type: ignore[attr-defined]
    return READS * BATCH / seconds


def _measure_training(config: Config, data: ShardSet, stream: Iterator[MicroBatch]) -> tuple[float, float]:
    """Return images per second of training, and the percentage of time spent waiting for data."""
    ids = splits(data.columns, data.vocabulary, config)["train"]
    torch.manual_seed(0)
    module: TinyDet = build(config, DataInfo.from_shards(data, ids))
    optimizer = make_optimizer(module, OptimizerSettings(lr=1e-4))
    state = TrainState(module, module, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, 0.0)

    def step() -> float:
        micro = next(stream)
        train_step(state, [micro], lr=1e-4, world_size=1, seed=0, clip_grad_norm=1.0, autocast=nullcontext)
        return micro.wait_s

    step()
    begin = time.perf_counter()
    wait = sum(step() for _ in range(STEPS))
    seconds = time.perf_counter() - begin
    stream.close()  # type: ignore[attr-defined]
    return STEPS * BATCH / seconds, 100 * wait / seconds
