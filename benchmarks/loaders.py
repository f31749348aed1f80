"""The usual loaders that our own environment has: torch's DataLoader, and DALI on its own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks import images
from benchmarks.contract import BATCH, CROP_AREA, CROP_ASPECT, SIZE_PX, Configuration, Setting

if TYPE_CHECKING:  # listing and preparing do not need torch, and are several seconds faster without it
    from torch import Tensor

MODES = {"rgb": "RGB", "gray": "L"}
ENDLESS = 10**9
TORCH = ("torch", "torchvision", "pillow")


def build_transform(kind: str) -> Callable[[Image.Image], Tensor]:
    """Build torchvision's augmentation of one Pillow image, to (C, 224, 224) uint8."""
    from torchvision import transforms

    crop = {
        "rgb": transforms.RandomResizedCrop(SIZE_PX, scale=CROP_AREA, ratio=CROP_ASPECT),
        "gray": transforms.Resize((SIZE_PX, SIZE_PX)),
    }[kind]
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])


class Decode:
    """Decodes and augments one image, as it is usually written with Pillow and torchvision."""

    def __init__(self, kind: str) -> None:
        self.mode = MODES[kind]
        self.transform = build_transform(kind)

    def __call__(self, record: bytes) -> Tensor:
        with Image.open(io.BytesIO(record)) as image:
            return self.transform(image.convert(self.mode))


class ImageFiles:
    """One JPEG file per sample."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.files = [str(path) for path in images.list_files(folder)]
        self.decode = Decode(kind)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.decode(Path(self.files[index]).read_bytes())


class Hdf5Rows:
    """One row of an HDF5 array per sample; opens the file in the reading process, as a handle must not cross a fork."""

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


class Hdf5Images(Hdf5Rows):
    """One encoded image of variable length per sample, the layout of most HDF5 image data sets."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(path)
        self.decode = Decode(kind)

    def __getitem__(self, index: int) -> Tensor:
        return self.decode(super().__getitem__(index).numpy().tobytes())


def iterate_torch_loader(dataset: Any, workers: int) -> Iterator[Tensor]:
    """Yield shuffled batches without end; sampling with replacement costs the same and avoids epoch boundaries."""
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS)
    prefetch = 4 if workers else None
    return iter(DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, prefetch_factor=prefetch))


def iterate_torch_files(folder: Path, setting: Setting, *, kind: str, parallel: bool) -> Iterator[Tensor]:
    return iterate_torch_loader(ImageFiles(folder, kind), setting.threads if parallel else 0)


def iterate_torch_hdf5(path: Path, setting: Setting, *, kind: str) -> Iterator[Tensor]:
    return iterate_torch_loader(Hdf5Images(path, kind), setting.threads)


def iterate_torch_rows(path: Path, setting: Setting, *, parallel: bool) -> Iterator[Tensor]:
    return iterate_torch_loader(Hdf5Rows(path), setting.threads if parallel else 0)


def iterate_dali_files(folder: Path, setting: Setting, *, kind: str, antialias: bool) -> Iterator[Tensor]:
    """Yield DALI's own output buffers, which the next batch overwrites, so no copy is measured."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=setting.threads, device_id=None, seed=0)
    def build_graph() -> Any:
        files = [str(path) for path in images.list_files(folder)]
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

    pipeline = build_graph()
    pipeline.build()
    while True:
        yield torch.from_dlpack(pipeline.run()[0].as_tensor())


def iterate_dali_rows(path: Path, setting: Setting) -> Iterator[Tensor]:
    """Yield batches from DALI over views of a memory map: only its external source can read HDF5."""
    import h5py
    import torch
    from nvidia.dali import fn, pipeline_def, types
    from torch.utils.data import RandomSampler

    with h5py.File(path, "r") as file:
        shape, offset = file["images"].shape, file["images"].id.get_offset()
    rows = np.memmap(path, np.uint8, "r", offset=offset, shape=shape)
    sampler = iter(RandomSampler(range(len(rows)), replacement=True, num_samples=ENDLESS))

    @pipeline_def(batch_size=BATCH, num_threads=setting.threads, device_id=None)
    def build_graph() -> Any:
        source = fn.external_source(
            lambda: [rows[next(sampler)] for _ in range(BATCH)], batch=True, no_copy=True, dtype=types.UINT8
        )
        return fn.copy(source)

    pipeline = build_graph()
    pipeline.build()
    while True:
        yield torch.from_dlpack(pipeline.run()[0].as_tensor())


def list_configurations() -> list[Configuration]:
    return [*_list_image_configurations("rgb"), *_list_image_configurations("gray"), *_list_row_configurations()]


def _list_image_configurations(kind: str) -> list[Configuration]:
    files, vlen = partial(images.make_jpeg_files, kind=kind), partial(images.make_vlen_hdf5, kind=kind)
    one, several = (partial(iterate_torch_files, parallel=parallel, kind=kind) for parallel in (False, True))
    plain, smooth = (partial(iterate_dali_files, antialias=antialias, kind=kind) for antialias in (False, True))
    rows, h5py = partial(iterate_torch_hdf5, kind=kind), (*TORCH, "h5py")
    dali = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")
    return [
        Configuration(kind, "torch_files_w0", files, one, TORCH, "Pillow, in this process"),
        Configuration(kind, "torch_files", files, several, TORCH, "Pillow, worker processes"),
        Configuration(kind, "torch_hdf5_vlen", vlen, rows, h5py, "Pillow, workers"),
        Configuration(kind, "dali_files", files, smooth, dali, "antialiased as ours"),
        Configuration(kind, "dali_files_aliased", files, plain, dali, "no antialiasing: a cheaper filter than ours"),
    ]


def _list_row_configurations() -> list[Configuration]:
    versions = ("torch", "h5py")
    one, several = partial(iterate_torch_rows, parallel=False), partial(iterate_torch_rows, parallel=True)
    return [
        Configuration("raw", "torch_hdf5_w0", images.make_raw_hdf5, one, versions, "in this process"),
        Configuration("raw", "torch_hdf5", images.make_raw_hdf5, several, versions, "worker processes"),
        Configuration("raw", "dali_rows", images.make_raw_hdf5, iterate_dali_rows, ("nvidia-dali-cuda130",), "no flip"),
    ]
