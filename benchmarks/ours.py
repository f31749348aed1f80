"""Trainyard's own loader in the suites rgb, gray and raw: what a training run would use, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import pictures
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Compared, Setting

if TYPE_CHECKING:  # listing and preparing need no torch, and are several seconds faster without
    from torch import Tensor


def rgb_shards(setting: Setting) -> Path:
    return picture_shards(setting, kind="rgb")


def picture_shards(setting: Setting, *, kind: str) -> Path:
    """Return the packed JPEG files of one kind."""
    files = pictures.paths(pictures.picture_files(setting, kind))
    write = partial(_pack, files, _encoded, setting.threads)
    return pictures.make_once(setting.place(f"{kind}-shards"), write)


def raw_shards(setting: Setting) -> Path:
    """Return the gray pictures packed decoded and resized."""
    files = pictures.paths(pictures.picture_files(setting, "gray"))
    write = partial(_pack, files, _decoded, setting.threads)
    return pictures.make_once(setting.place("gray-raw-shards"), write)


def _encoded(path: Path) -> dict[str, Any]:
    return {"image": path.read_bytes()}


def _decoded(path: Path) -> dict[str, Any]:
    return {"image": np.array(pictures.decoded(path))[..., None]}


def _pack(files: list[Path], load: Any, workers: int, out: Path) -> None:
    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample

    samples = (Sample(path.stem, partial(load, path), source=path) for path in files)
    pack(samples, out, meta={}, workers=workers).close()


def host_batches(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    """Yield what the loader hands to the device: its uint8 buffers, which are used again after a few batches."""
    from trainyard.data.loader import Loader

    class HostLoader(Loader):
        """The loader up to where the copy to a device begins: what follows is the device's work."""

        def _to_device(self, item: Any, *, warp: bool) -> dict[str, Tensor]:
            return {"image": item.pictures}

    return _batches(HostLoader, folder, setting, kind=kind)


def model_batches(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    """Yield what a model on the CPU takes: cast to float32, changed in brightness and normalised, on one thread."""
    from trainyard.data.loader import Loader

    return _batches(Loader, folder, setting, kind=kind)


def _batches(loader: Any, folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    import torch

    from trainyard.data.loader import choose_decoder
    from trainyard.data.shards import ShardSet
    from trainyard.settings import AugmentSettings, DataSettings, ImageSettings
    from trainyard.train.precision import keep_freed_memory

    keep_freed_memory(torch.device("cpu"))  # as a run does
    data = ShardSet(folder)
    crop = {"crop_area_min": CROP_AREA[0], "crop_aspect_max": CROP_ASPECT[1]} if kind == "rgb" else {}
    stream = loader(
        data,
        settings=DataSettings(),
        image=ImageSettings(height_px=SIZE_PX, width_px=SIZE_PX, channels=3 if kind == "rgb" else 1),
        augmentation=AugmentSettings(flip=0.5, **crop),
        seed=0,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        threads=setting.threads,
        channels_last=True,
        decode=choose_decoder("auto", importable=find_spec("nvidia.dali") is not None)[0],
    )
    orders = partial(_order, np.arange(data.count))
    for micro in stream.train(orders, epoch=0, start=0, micro_batch_size=0):
        yield micro.batch["image"]


def _order(ids: np.ndarray, epoch: int) -> Any:
    from trainyard.data.order import shuffle

    return shuffle(ids, seed=0, epoch=epoch, global_batch_size=BATCH)


def configurations() -> list[Compared]:
    versions = ("trainyard", "torch", "nvidia-dali-cuda130", "nvidia-dali-cuda120")
    return [
        *(_pictures(kind, versions) for kind in ("rgb", "gray")),
        *(_pictures_float(kind, versions) for kind in ("rgb", "gray")),
        Compared("raw", "ours", raw_shards, partial(model_batches, kind="gray"), versions),
    ]


def _pictures(kind: str, versions: tuple[str, ...]) -> Compared:
    data, batches = partial(picture_shards, kind=kind), partial(host_batches, kind=kind)
    return Compared(kind, "ours", data, batches, versions, "antialiased; checksums compared at first reading")


def _pictures_float(kind: str, versions: tuple[str, ...]) -> Compared:
    data, batches = partial(picture_shards, kind=kind), partial(model_batches, kind=kind)
    return Compared(kind, "ours_float", data, batches, versions, "as ours, then normalised to float32 on the host")
