"""Loaders that need an environment of their own (peers.lock): webdataset, MosaicML Streaming, FFCV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import pictures
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Compared, Setting
from benchmarks.loaders import MODES, TORCH, Decode

if TYPE_CHECKING:  # listing and preparing need no torch, and are several seconds faster without
    from torch import Tensor

EPOCH_SAMPLES = 1_000_000
TAR_RECORDS = 250  # small enough that every worker process has several tar files


def tar_files(setting: Setting, *, kind: str) -> Path:
    files = pictures.paths(pictures.picture_files(setting, kind))
    return pictures.make_once(setting.place(f"{kind}-tar"), partial(_write_tars, files))


def _write_tars(files: list[Path], out: Path) -> None:
    from webdataset import ShardWriter

    out.mkdir()
    with ShardWriter(str(out / "%05d.tar"), maxcount=TAR_RECORDS, verbose=0) as writer:
        for path in files:
            writer.write({"__key__": path.stem, "jpg": path.read_bytes()})


def webdataset(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    import torch
    from webdataset import WebDataset, WebLoader

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = WebDataset(tars, resampled=True).shuffle(1000).to_tuple("jpg").map_tuple(Decode(kind))
    batches = samples.map(lambda sample: sample[0]).batched(BATCH, collation_fn=torch.stack)
    return iter(WebLoader(batches, batch_size=None, num_workers=setting.threads, prefetch_factor=4))


def mosaic_shards(setting: Setting, *, kind: str) -> Path:
    files = pictures.paths(pictures.picture_files(setting, kind))
    return pictures.make_once(setting.place(f"{kind}-mds"), partial(_write_mosaic, files))


def _write_mosaic(files: list[Path], out: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"jpg": "bytes"}) as writer:
        for path in files:
            writer.write({"jpg": path.read_bytes()})


def mosaic(folder: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Pictures(StreamingDataset):
        decode = Decode(kind)

        def __getitem__(self, index: int) -> Tensor:
            return self.decode(super().__getitem__(index)["jpg"])

    clean_stale_shared_memory()
    samples = Pictures(local=str(folder), shuffle=True, batch_size=BATCH)
    loader = DataLoader(samples, BATCH, num_workers=setting.threads, prefetch_factor=4, drop_last=True)
    while True:
        yield from loader


class Decoded:
    """What FFCV's writer takes: decoded pictures by index."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any]:
        from PIL import Image

        with Image.open(self.files[index]) as picture:
            return (picture.convert(MODES["rgb"]),)


class Rows(Decoded):
    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (pictures.decoded(self.files[index]),)


def beton(setting: Setting, *, kind: str) -> Path:
    """Return FFCV's file of encoded pictures: it encodes them itself, at the same quality as the originals."""
    from ffcv.fields import RGBImageField

    files = pictures.paths(pictures.picture_files(setting, kind))
    field = RGBImageField(write_mode="jpg", jpeg_quality=pictures.QUALITY)
    write = partial(_write_beton, Decoded(files), field)
    return pictures.make_once(setting.place(f"{kind}-beton"), write)


def raw_beton(setting: Setting) -> Path:
    from ffcv.fields import NDArrayField

    files = pictures.paths(pictures.picture_files(setting, "gray"))
    field = NDArrayField(np.dtype("uint8"), (SIZE_PX, SIZE_PX))
    return pictures.make_once(setting.place("gray-raw-beton"), partial(_write_beton, Rows(files), field))


def _write_beton(samples: Decoded, field: Any, out: Path) -> None:
    from ffcv.writer import DatasetWriter

    DatasetWriter(str(out), {"image": field}, num_workers=1).from_indexed_dataset(samples)


def ffcv(path: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    size = (SIZE_PX, SIZE_PX)
    if kind == "rgb":
        decoder = RandomResizedCropRGBImageDecoder(size, scale=CROP_AREA, ratio=CROP_ASPECT)
    else:
        decoder = CenterCropRGBImageDecoder(size, ratio=1.0)
    return _ffcv(path, setting, getattr(setting, kind), [decoder, RandomHorizontalFlip(), ToTensor(), ToTorchImage()])


def ffcv_rows(path: Path, setting: Setting) -> Iterator[Tensor]:
    from ffcv.fields.ndarray import NDArrayDecoder
    from ffcv.transforms import ToTensor

    return _ffcv(path, setting, setting.gray, [NDArrayDecoder(), ToTensor()])


def _ffcv(path: Path, setting: Setting, count: int, pipeline: list[Any]) -> Iterator[Tensor]:
    """Iterate over long epochs, made of each index many times: at its full speed, starting one takes FFCV as long as
    several batches, and the other loaders are spared their epochs' ends as well.
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


def configurations() -> list[Compared]:
    return [*_pictures("rgb"), *_pictures("gray"), _raw()]


def _pictures(kind: str) -> list[Compared]:
    differs = {
        "rgb": "encoded anew by its writer; area filter",
        "gray": "no gray JPEG: decodes and yields 3 channels; center crop; area filter",
    }[kind]
    of_kind = {"kind": kind}
    tars, webs = partial(tar_files, **of_kind), partial(webdataset, **of_kind)
    shards, streams = partial(mosaic_shards, **of_kind), partial(mosaic, **of_kind)
    betons, ffcvs = partial(beton, **of_kind), partial(ffcv, **of_kind)
    pillow = "Pillow, worker processes"
    return [
        Compared(kind, "webdataset", tars, webs, ("webdataset", *TORCH), pillow),
        Compared(kind, "mosaic", shards, streams, ("mosaicml-streaming", *TORCH), pillow),
        Compared(kind, "ffcv", betons, ffcvs, ("ffcv", "numba", "torch"), differs),
    ]


def _raw() -> Compared:
    return Compared("raw", "ffcv", raw_beton, ffcv_rows, ("ffcv", "numba", "torch"), "no flip")
