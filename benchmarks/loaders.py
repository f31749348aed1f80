"""The usual ways to feed a model, with what our own environment holds: torch's DataLoader, and DALI by itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks import pictures
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Compared, Setting

if TYPE_CHECKING:  # listing and preparing need no torch, and are several seconds faster without
    from torch import Tensor

MODES = {"rgb": "RGB", "gray": "L"}
ENDLESS = 10**9
TORCH = ("torch", "torchvision", "pillow")


def picture_transform(kind: str) -> Callable[[Image.Image], Tensor]:
    """Return torchvision's augmentation of one Pillow picture, to (C, 224, 224) uint8."""
    from torchvision import transforms

    cut = {
        "rgb": transforms.RandomResizedCrop(SIZE_PX, scale=CROP_AREA, ratio=CROP_ASPECT),
        "gray": transforms.Resize((SIZE_PX, SIZE_PX)),
    }[kind]
    return transforms.Compose([cut, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])


class Decode:
    """Turn an encoded picture into a training sample, as people write it with Pillow and torchvision."""

    def __init__(self, kind: str) -> None:
        self.mode = MODES[kind]
        self.transform = picture_transform(kind)

    def __call__(self, record: bytes) -> Tensor:
        with Image.open(io.BytesIO(record)) as picture:
            return self.transform(picture.convert(self.mode))


class PictureFiles:
    """One JPEG file per sample."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.files = [str(path) for path in pictures.paths(folder)]
        self.decode = Decode(kind)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.decode(Path(self.files[index]).read_bytes())


class Hdf5Rows:
    """One row of an HDF5 array per sample, opened where it is read: a handle must not cross a fork."""

    def __init__(self, path: Path) -> None:
        import h5py

        self.path, self.rows = path, None
        with h5py.File(path, "r") as file:
            self.count = len(file["images"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        import h5py
        import torch

        if self.rows is None:
            self.rows = h5py.File(self.path, "r")["images"]
        return torch.from_numpy(self.rows[index])


class Hdf5Pictures(Hdf5Rows):
    """One encoded picture of variable length per sample: the layout most HDF5 image data sets have."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(path)
        self.decode = Decode(kind)

    def __getitem__(self, index: int) -> Tensor:
        return self.decode(super().__getitem__(index).numpy().tobytes())


def torch_loader(dataset: Any, workers: int) -> Iterator[Tensor]:
    """Yield shuffled batches without end; drawing with replacement costs the same and spares it the epochs' ends."""
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS)
    prefetch = 4 if workers else None
    return iter(DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, prefetch_factor=prefetch))


def torch_files(folder: Path, setting: Setting, *, kind: str, parallel: bool) -> Iterator[Tensor]:
    return torch_loader(PictureFiles(folder, kind), setting.threads if parallel else 0)


def torch_hdf5(path: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    return torch_loader(Hdf5Pictures(path, kind), setting.threads)


def torch_rows(path: Path, setting: Setting, *, parallel: bool) -> Iterator[Tensor]:
    return torch_loader(Hdf5Rows(path), setting.threads if parallel else 0)


def dali_files(folder: Path, setting: Setting, *, kind: str, antialias: bool) -> Iterator[Tensor]:
    """Yield DALI's own output buffers, which the next batch overwrites: no copy is charged to it."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=setting.threads, device_id=None, seed=0)
    def graph() -> Any:
        files = [str(path) for path in pictures.paths(folder)]
        records, _ = fn.readers.file(files=files, random_shuffle=True, initial_fill=1024, name="reader")
        if kind == "rgb":
            decoded = fn.decoders.image_random_crop(
                records,
                device="cpu",
                output_type=types.RGB,
                random_area=list(CROP_AREA),
                random_aspect_ratio=list(CROP_ASPECT),
            )
        else:
            decoded = fn.decoders.image(records, device="cpu", output_type=types.GRAY)
        resized = fn.resize(decoded, size=[SIZE_PX, SIZE_PX], interp_type=types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(resized, horizontal=fn.random.coin_flip())

    pipeline = graph()
    pipeline.build()
    while True:
        yield torch.from_dlpack(pipeline.run()[0].as_tensor())


def dali_rows(path: Path, setting: Setting) -> Iterator[Tensor]:
    """DALI over views of a memory map of the rows: its external source is the only way to HDF5."""
    import h5py
    import torch
    from nvidia.dali import fn, pipeline_def, types
    from torch.utils.data import RandomSampler

    with h5py.File(path, "r") as file:
        shape, offset = file["images"].shape, file["images"].id.get_offset()
    rows = np.memmap(path, np.uint8, "r", offset=offset, shape=shape)
    sampler = iter(RandomSampler(range(len(rows)), replacement=True, num_samples=ENDLESS))

    @pipeline_def(batch_size=BATCH, num_threads=setting.threads, device_id=None)
    def graph() -> Any:
        source = fn.external_source(
            lambda: [rows[next(sampler)] for _ in range(BATCH)], batch=True, no_copy=True, dtype=types.UINT8
        )
        return fn.copy(source)

    pipeline = graph()
    pipeline.build()
    while True:
        yield torch.from_dlpack(pipeline.run()[0].as_tensor())


def configurations() -> list[Compared]:
    return [*_pictures("rgb"), *_pictures("gray"), *_rows()]


def _pictures(kind: str) -> list[Compared]:
    files, vlen = partial(pictures.picture_files, kind=kind), partial(pictures.vlen_hdf5, kind=kind)
    one, several = partial(torch_files, parallel=False, kind=kind), partial(torch_files, parallel=True, kind=kind)
    plain, smooth = partial(dali_files, antialias=False, kind=kind), partial(dali_files, antialias=True, kind=kind)
    dali = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")
    return [
        Compared(kind, "torch_files_w0", files, one, TORCH, "Pillow, in this process"),
        Compared(kind, "torch_files", files, several, TORCH, "Pillow, worker processes"),
        Compared(kind, "torch_hdf5_vlen", vlen, partial(torch_hdf5, kind=kind), (*TORCH, "h5py"), "Pillow, workers"),
        Compared(kind, "dali_files", files, smooth, dali, "antialiased as ours"),
        Compared(kind, "dali_files_aliased", files, plain, dali, "no antialiasing: a cheaper filter than ours"),
    ]


def _rows() -> list[Compared]:
    versions = ("torch", "h5py")
    one, several = partial(torch_rows, parallel=False), partial(torch_rows, parallel=True)
    return [
        Compared("raw", "torch_hdf5_w0", pictures.raw_hdf5, one, versions, "in this process"),
        Compared("raw", "torch_hdf5", pictures.raw_hdf5, several, versions, "worker processes"),
        Compared("raw", "dali_rows", pictures.raw_hdf5, dali_rows, ("nvidia-dali-cuda130",), "no flip"),
    ]
