"""Trainyard's own loader in the suites rgb, gray and raw, exactly as a training run uses it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import images
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Configuration, Setting

if TYPE_CHECKING:  # listing and preparing do not need torch, and are several seconds faster without it
    from torch import Tensor


def pack_images(setting: Setting, *, kind: str, decoded: bool = False) -> Path:
    """Pack the JPEG files of one kind, encoded, or decoded and resized; return the folder."""
    files = images.list_files(images.make_jpeg_files(setting, kind))
    write = partial(_pack, files, _read_decoded if decoded else _read_encoded, setting.threads)
    return images.make_once(setting.get_path(f"{kind}-raw-shards" if decoded else f"{kind}-shards"), write)


def _read_encoded(path: Path) -> dict[str, Any]:
    return {"image": path.read_bytes()}


def _read_decoded(path: Path) -> dict[str, Any]:
    return {"image": np.array(images.decode_gray(path))[..., None]}


def _pack(files: list[Path], load: Any, workers: int, out: Path) -> None:
    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample

    samples = (Sample(path.stem, partial(load, path), source=path) for path in files)
    pack(samples, out, meta={}, workers=workers).close()


def iterate_host_batches(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    """Yield what the loader copies to the device: its uint8 buffers, which are reused after a few batches.

    Everything after the copy is the device's work.
    """
    from trainyard.data.loader import Loader

    class HostLoader(Loader):
        def _make_batch(self, item: Any) -> dict[str, Tensor]:
            return {"image": item.images}

    return _iterate_batches(HostLoader, folder, setting, kind)


def iterate_model_batches(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    """Yield what a model on the CPU receives: float32, brightness augmented and normalised, on one thread."""
    from trainyard.data.loader import Loader

    return _iterate_batches(Loader, folder, setting, kind)


def _iterate_batches(loader: Any, folder: Path, setting: Setting, kind: str) -> Iterator[Tensor]:
    import torch

    from trainyard.config.settings import AugmentSettings, ImageSettings, TrainConfig
    from trainyard.data.order import shuffle
    from trainyard.data.shards import ShardSet
    from trainyard.node.choices import choose_decoder
    from trainyard.train.precision import keep_freed_memory

    keep_freed_memory(torch.device("cpu"))  # as a run does
    data = ShardSet(folder)
    crop = {"crop_area_min": CROP_AREA[0], "crop_aspect_max": CROP_ASPECT[1]} if kind == "rgb" else {}
    config = TrainConfig(
        image=ImageSettings(height_px=SIZE_PX, width_px=SIZE_PX, channels=3 if kind == "rgb" else 1),
        augment=AugmentSettings(flip=0.5, **crop),
    )
    decode = choose_decoder("auto", has_dali=find_spec("nvidia.dali") is not None).value
    stream = loader(
        config,
        data,
        device=torch.device("cpu"),
        decode=decode,
        threads=setting.threads,
        channels_last=True,
        reads_noise=False,  # the others draw none either
    )

    def order(epoch: int) -> Any:
        return shuffle(np.arange(data.count), seed=0, epoch=epoch, global_batch_size=BATCH)

    for micro_batch in stream.train(order, epoch=0, start=0, micro_batch_size=0):
        yield micro_batch.batch["image"]


def list_configurations() -> list[Configuration]:
    versions = ("trainyard", "torch", "nvidia-dali-cuda130", "nvidia-dali-cuda120")
    pack_raw, iterate_raw = partial(pack_images, kind="gray", decoded=True), partial(iterate_model_batches, kind="gray")
    found = [Configuration("raw", "ours", pack_raw, iterate_raw, versions)]
    for kind in ("rgb", "gray"):
        data, floats = partial(pack_images, kind=kind), partial(iterate_model_batches, kind=kind)
        buffers = partial(iterate_host_batches, kind=kind)
        found += [
            Configuration(kind, "ours", data, buffers, versions, "antialiased; checksums verified on first read"),
            Configuration(kind, "ours_float", data, floats, versions, "as ours, then normalised on the host"),
        ]
    return found
