"""Loaders that need an environment of their own (peers.lock): webdataset, MosaicML Streaming, FFCV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import images
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Configuration, Setting
from benchmarks.loaders import MODES, TORCH, Decode

if TYPE_CHECKING:  # listing and preparing do not need torch, and are several seconds faster without it
    from torch import Tensor

FFCV = ("ffcv", "numba", "torch")
EPOCH_SAMPLES = 1_000_000
TAR_RECORDS = 250  # small enough to give every worker process several tar files


def make_tar_files(setting: Setting, *, kind: str) -> Path:
    files = images.list_files(images.make_jpeg_files(setting, kind))
    return images.make_once(setting.get_path(f"{kind}-tar"), partial(_write_tars, files))


def _write_tars(files: list[Path], out: Path) -> None:
    from webdataset import ShardWriter

    out.mkdir()
    with ShardWriter(str(out / "%05d.tar"), maxcount=TAR_RECORDS, verbose=0) as writer:
        for path in files:
            writer.write({"__key__": path.stem, "jpg": path.read_bytes()})


def iterate_webdataset(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    import torch
    from webdataset import WebDataset, WebLoader

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = WebDataset(tars, resampled=True).shuffle(1000).to_tuple("jpg").map_tuple(Decode(kind))
    batches = samples.map(lambda sample: sample[0]).batched(BATCH, collation_fn=torch.stack)
    return iter(WebLoader(batches, batch_size=None, num_workers=setting.threads, prefetch_factor=4))


def make_mosaic_shards(setting: Setting, *, kind: str) -> Path:
    files = images.list_files(images.make_jpeg_files(setting, kind))
    return images.make_once(setting.get_path(f"{kind}-mds"), partial(_write_mosaic, files))


def _write_mosaic(files: list[Path], out: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"jpg": "bytes"}) as writer:
        for path in files:
            writer.write({"jpg": path.read_bytes()})


def iterate_mosaic(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Images(StreamingDataset):
        decode = Decode(kind)

        def __getitem__(self, index: int) -> Tensor:
            return self.decode(super().__getitem__(index)["jpg"])

    clean_stale_shared_memory()
    samples = Images(local=str(folder), shuffle=True, batch_size=BATCH)
    loader = DataLoader(samples, BATCH, num_workers=setting.threads, prefetch_factor=4, drop_last=True)
    while True:
        yield from loader


class DecodedImages:
    """The input of FFCV's writer: decoded images by index."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any]:
        from PIL import Image

        with Image.open(self.files[index]) as image:
            return (image.convert(MODES["rgb"]),)


class DecodedRows(DecodedImages):
    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (images.decode_gray(self.files[index]),)


def make_beton(setting: Setting, *, kind: str) -> Path:
    """Make FFCV's file of encoded images; FFCV encodes them itself, at the quality of the originals."""
    from ffcv.fields import RGBImageField

    files = images.list_files(images.make_jpeg_files(setting, kind))
    field = RGBImageField(write_mode="jpg", jpeg_quality=images.QUALITY)
    write = partial(_write_beton, DecodedImages(files), field)
    return images.make_once(setting.get_path(f"{kind}-beton"), write)


def make_raw_beton(setting: Setting) -> Path:
    from ffcv.fields import NDArrayField

    files = images.list_files(images.make_jpeg_files(setting, "gray"))
    field = NDArrayField(np.dtype("uint8"), (SIZE_PX, SIZE_PX))
    return images.make_once(setting.get_path("gray-raw-beton"), partial(_write_beton, DecodedRows(files), field))


def _write_beton(samples: DecodedImages, field: Any, out: Path) -> None:
    from ffcv.writer import DatasetWriter

    DatasetWriter(str(out), {"image": field}, num_workers=1).from_indexed_dataset(samples)


def iterate_ffcv(path: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    size = (SIZE_PX, SIZE_PX)
    if kind == "rgb":
        decoder = RandomResizedCropRGBImageDecoder(size, scale=CROP_AREA, ratio=CROP_ASPECT)
    else:
        decoder = CenterCropRGBImageDecoder(size, ratio=1.0)
    return _iterate_ffcv(
        path, setting, getattr(setting, kind), [decoder, RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    )


def iterate_ffcv_rows(path: Path, setting: Setting) -> Iterator[Tensor]:
    from ffcv.fields.ndarray import NDArrayDecoder
    from ffcv.transforms import ToTensor

    return _iterate_ffcv(path, setting, setting.gray, [NDArrayDecoder(), ToTensor()])


def _iterate_ffcv(path: Path, setting: Setting, count: int, pipeline: list[Any]) -> Iterator[Tensor]:
    """Yield batches from long epochs that repeat each index many times: starting an epoch takes FFCV as long as several
    batches, and the other loaders have no epoch boundaries either.
    """
    from ffcv.loader import Loader, OrderOption

    loader = Loader(
        str(path),
        indices=np.tile(np.arange(count), -(-EPOCH_SAMPLES // count)),
        batch_size=BATCH,
        num_workers=setting.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": pipeline},
    )
    while True:
        for (batch,) in loader:
            yield batch


def list_configurations() -> list[Configuration]:
    rows = Configuration("raw", "ffcv", make_raw_beton, iterate_ffcv_rows, FFCV, "no flip")
    found = [*_list_image_configurations("rgb"), *_list_image_configurations("gray"), rows]
    return [replace(configuration, environment="peers") for configuration in found]


def _list_image_configurations(kind: str) -> list[Configuration]:
    note = {
        "rgb": "re-encoded by its writer; area filter",
        "gray": "no gray JPEG: decodes and yields 3 channels; center crop; area filter",
    }[kind]
    of_kind = {"kind": kind}
    tars, webs = partial(make_tar_files, **of_kind), partial(iterate_webdataset, **of_kind)
    shards, streams = partial(make_mosaic_shards, **of_kind), partial(iterate_mosaic, **of_kind)
    betons, ffcvs = partial(make_beton, **of_kind), partial(iterate_ffcv, **of_kind)
    pillow = "Pillow, worker processes"
    return [
        Configuration(kind, "webdataset", tars, webs, ("webdataset", *TORCH), pillow),
        Configuration(kind, "mosaic", shards, streams, ("mosaicml-streaming", *TORCH), pillow),
        Configuration(kind, "ffcv", betons, ffcvs, FFCV, note),
    ]
