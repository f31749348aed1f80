"""From an order of sample ids to batches on the device: read, decode ahead in the background, cast."""

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainyard.data import augment, decode_cpu
from trainyard.data.augment import Parameters
from trainyard.data.decode_cpu import Request
from trainyard.data.device import to_model_input
from trainyard.data.order import EpochOrder, micro_batches
from trainyard.data.shards import ARRAY, ENCODED_IMAGE, PCM, RAGGED, SOUND, ShardSet
from trainyard.errors import UserError
from trainyard.settings import AudioSettings, AugmentSettings, DataSettings, ImageSettings

IMAGE = "image"
REGION = ("box_y", "box_x", "box_height", "box_width")


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device."""

    batch: dict[str, Tensor]
    weight: float  # its share of the global batch's samples; 0 for a stand-in
    last: bool  # of its optimizer step
    wait_s: float  # time the caller waited for it


@dataclass(frozen=True)
class _Item:
    """What the background thread prepares: everything of a micro-batch that is not on the device yet."""

    ids: np.ndarray
    weight: float
    last: bool
    epoch: int | None  # None in evaluation
    size: tuple[int, int] = (0, 0)  # height and width of the input
    parameters: Parameters | None = None  # where there are images
    arrays: dict[str, Tensor] = field(default_factory=dict)  # all other records, in fresh memory
    images: Tensor | None = None  # (B, H, W, C) uint8, decoded into a buffer that is used again


class Loader:
    """Batches of one data set for one rank; `train.module.Batch` says what is in them.

    Images and sounds are decoded by `decode` "dali" or "cpu", which agree bit for bit on the host (colour
    images other than JPEG, read as gray, to one level; 16-bit images belong converted when packing). Buffers are
    reused: what a batch holds is new memory on the device, so a caller may keep it.
    """

    def __init__(
        self,
        data: ShardSet,
        *,
        settings: DataSettings,
        image: ImageSettings,
        sound: AudioSettings | None = None,
        augmentation: AugmentSettings,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        threads: int,
        channels_last: bool,
        decode: str,
    ) -> None:
        self.data = data
        self.rank, self.world_size, self.device = rank, world_size, device
        self._settings, self._image, self._augmentation = settings, image, augmentation
        self._seed, self._threads, self._channels_last, self._decode = seed, threads, channels_last, decode
        self._sound = sound or AudioSettings()
        self._columns = {name: torch.from_numpy(values) for name, values in data.columns.items()}
        self._has_images = IMAGE in data.records and data.records[IMAGE].kind == ENCODED_IMAGE
        self._regions = _regions(data) if self._has_images else np.zeros((data.count, 4), dtype=np.int32)
        self._letterbox = image.fit == "letterbox"
        _check(image, augmentation)

    def train(
        self, orders: Callable[[int], EpochOrder], *, epoch: int, start: int, micro_batch_size: int
    ) -> Generator[MicroBatch, None, None]:
        """Yield this rank's micro-batches from global batch `start` of `epoch` on, epoch after epoch, without end.

        Starting late costs nothing: what comes before is neither read nor drawn.

        Args:
            orders: the order of an epoch; all have the same global batch size.
            micro_batch_size: samples at once; 0: this rank's share of the global batch.
        """
        _check_boxes(self._augmentation.crop_keeps, self.data)
        first = orders(epoch)
        largest = micro_batch_size or -(-first.global_batch_size // self.world_size)

        def items() -> Iterator[_Item]:
            for number in itertools.count(epoch):
                order = first if number == epoch else orders(number)
                for index in range(start if number == epoch else 0, len(order)):
                    yield from self._split_batch(order.batch(index), number, index, micro_batch_size)

        yield from self._stream(items(), largest, warp=augment.warps(self._augmentation))

    def _split_batch(self, ids: np.ndarray, epoch: int, index: int, micro_batch_size: int) -> Iterator[_Item]:
        """Cut one global batch into this rank's micro-batches, each with its augmentation."""
        size = self._size(augment.crop_scale(self._image.scales, seed=self._seed, epoch=epoch, batch=index))
        parts = micro_batches(ids, rank=self.rank, world_size=self.world_size, micro_batch_size=micro_batch_size)
        for position, (part, counted) in enumerate(parts):
            last = position == len(parts) - 1
            yield _Item(part, counted / len(ids), last, epoch, size, self._draw(part, epoch, size))

    def _size(self, scale: float) -> tuple[int, int]:
        return round(self._image.height_px * scale), round(self._image.width_px * scale)

    def _draw(self, ids: np.ndarray, epoch: int, size: tuple[int, int]) -> Parameters | None:
        if not self._has_images:
            return None
        keeps = self._augmentation.crop_keeps
        return augment.draw(
            self._augmentation,
            seed=self._seed,
            epoch=epoch,
            sample_ids=ids,
            regions=self._regions[ids],
            height_px=size[0],
            width_px=size[1],
            letterbox=self._letterbox,
            kept=self.data.read_arrays(keeps, ids, check_crc=self._settings.check_crc) if keeps else (),
        )

    def evaluate(self, ids: np.ndarray, *, batch_size: int) -> Generator[MicroBatch, None, None]:
        """Yield this rank's part of an evaluation set, each sample once over all ranks, without augmentation."""
        low, high = (len(ids) * r // self.world_size for r in (self.rank, self.rank + 1))
        mine, size = ids[low:high], self._size(1.0)

        def items() -> Iterator[_Item]:
            for i in range(0, len(mine), batch_size):
                part = mine[i : i + batch_size]
                fitted = size if self._letterbox else None
                neutral = augment.neutral(self._regions[part], letterbox=fitted) if self._has_images else None
                yield _Item(part, len(part) / len(ids), True, None, size, neutral)

        yield from self._stream(items(), batch_size, warp=False)

    def _stream(self, items: Iterator[_Item], largest: int, *, warp: bool) -> Generator[MicroBatch, None, None]:
        depth = self._settings.prefetch
        stream = self._read_arrays(items)
        for name, records in self.data.records.items():
            if records.kind in (SOUND, PCM):
                stream = self._decode_audio(name, stream, largest)
        if self._has_images:  # buffers: in the queue, one held back, one in use, one being filled
            stream = self._decode_images(stream, self._slots(depth + 3, largest), largest)
        copied: list[Any] = []
        for item, wait_s in in_background(stream, depth):
            batch = self._to_device(item, warp=warp)
            if self.device.type == "cuda":
                copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                copied[-1].record()
                if len(copied) > 1:  # the buffer before this one is refilled at the earliest from now on
                    copied.pop(0).synchronize()
            yield MicroBatch(batch, item.weight, item.last, wait_s)

    def _read_arrays(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Add the arrays to each item. One thread does it: two would fight over new memory."""
        for item in items:
            arrays: dict[str, np.ndarray] = {}
            for name, records in self.data.records.items():
                if records.kind == ARRAY:
                    shape = (len(item.ids), *records.shape[item.ids[0]].tolist())
                    arrays[name] = np.empty(shape, dtype=records.dtype)
                    self.data.read_into(name, item.ids, arrays[name], check_crc=self._settings.check_crc)
                elif records.kind == RAGGED:
                    values = self.data.read_arrays(name, item.ids, check_crc=self._settings.check_crc)
                    arrays[name], arrays[f"{name}_count"] = pad_ragged(values)
            yield replace(item, arrays={name: torch.from_numpy(values) for name, values in arrays.items()})

    def _decode_audio(self, name: str, items: Iterator[_Item], largest: int) -> Iterator[_Item]:
        """Add the part of each sound that the model takes, as int16; the device makes fractions of it."""
        records, check_crc = self.data.records[name], self._settings.check_crc
        ahead: deque[_Item] = deque()
        stored = records.kind == PCM  # and cut before the next are read: one buffer serves all but unusual batches
        buffer = np.empty(largest * int(records.size.mean() * 1.5), dtype=np.uint8) if stored else None

        def asked() -> Iterator[list[np.ndarray]]:
            for item in items:
                ahead.append(item)
                yield self.data.read_arrays(name, item.ids, check_crc=check_crc, buffer=buffer)

        for sounds in asked() if stored else self._audio_decoder(largest)(asked()):
            item = ahead.popleft()
            count = records.shape[item.ids, 0].astype(np.int64)
            frames = self._sound.frames
            start = np.zeros_like(count)
            if item.epoch is not None:
                start = augment.starts(seed=self._seed, epoch=item.epoch, sample_ids=item.ids, spare=count - frames)
            cut = np.empty((len(sounds), frames), dtype=np.int16)
            for row, sound, first in zip(cut, sounds, start.tolist(), strict=True):
                part = sound[first : first + frames]
                row[:] = part if len(part) == frames else np.resize(part, frames)
            found = {name: torch.from_numpy(cut), f"{name}_count": torch.from_numpy(count)}
            yield replace(item, arrays=item.arrays | found)

    def _audio_decoder(self, largest: int) -> Callable[[Iterator[list[np.ndarray]]], Iterator[list[np.ndarray]]]:
        if self._decode == "cpu":
            return lambda records: decode_cpu.decode_audio(records, threads=self._threads)
        from trainyard.data import decode_dali

        return lambda records: decode_dali.decode_audio(records, threads=self._threads, max_batch_size=largest)

    def _slots(self, count: int, largest: int) -> list[Tensor]:
        height, width = self._size(max(1.0, *self._image.scales))
        flat = largest * height * width * self._image.channels
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # a thread that is not in the caller's mode will write to them
            return [torch.empty(flat, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]

    def _decode_images(self, items: Iterator[_Item], slots: list[Tensor], largest: int) -> Iterator[_Item]:
        """Decode the images of each item. Decoders may ask for items ahead of what they have given."""
        ahead: deque[_Item] = deque()
        index, check_crc = self.data.records[IMAGE], self._settings.check_crc

        def requests() -> Iterator[Request]:
            for number, item in enumerate(items):
                ahead.append(item)
                records = self.data.read_bytes(IMAGE, item.ids, check_crc=check_crc)
                assert item.parameters is not None
                shape = (len(item.ids), *item.size, self._image.channels)
                out = slots[number % len(slots)][: math.prod(shape)].view(shape)
                yield Request(records, index.shape[item.ids], item.parameters, out)

        for images in self._decoder(largest)(requests()):
            yield replace(ahead.popleft(), images=images)

    def _decoder(self, largest: int) -> Callable[[Iterator[Request]], Iterator[Tensor]]:
        image = self._image
        common: dict[str, Any] = {"channels": image.channels, "fill": image.fill, "threads": self._threads}
        if self._decode == "cpu":
            return lambda requests: decode_cpu.decode(requests, **common)
        from trainyard.data import decode_dali  # DALI takes a second to import, and is absent from small images

        return lambda requests: decode_dali.decode(
            requests,
            **common,
            max_batch_size=largest,
            device_id=self.device.index if self.device.type == "cuda" else None,
        )

    def _to_device(self, item: _Item, *, warp: bool) -> dict[str, Tensor]:
        ids = torch.tensor(item.ids)  # a copy: the caller's, where `item.ids` is a slice of the order
        host = {"sample_id": ids, **{name: values[ids] for name, values in self._columns.items()}, **item.arrays}
        if item.epoch is not None:
            host["noise"] = torch.from_numpy(augment.noise(seed=self._seed, epoch=item.epoch, sample_ids=item.ids))
        if item.parameters is not None:
            moved = augment.affine(item.parameters, height_px=item.size[0], width_px=item.size[1])
            stored = self.data.records[IMAGE].shape[item.ids, :2].astype(np.float32)
            host |= {"affine": torch.from_numpy(moved), "image_px": torch.from_numpy(stored)}
        batch = {name: values.to(self.device, non_blocking=True) for name, values in host.items()}
        if item.images is not None and item.parameters is not None:
            batch[IMAGE] = self._model_input(item.images, item.parameters, warp=warp)
        for name, records in self.data.records.items():
            if records.kind in (SOUND, PCM):
                batch[name] = batch[name] * (1 / 32768)  # exact: a power of two
        return batch

    def _model_input(self, images: Tensor, p: Parameters, *, warp: bool) -> Tensor:
        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self.device, non_blocking=True)

        return to_model_input(
            images.to(self.device, non_blocking=True),
            theta=moved(p.theta) if warp else None,
            gain=moved(p.gain),
            contrast=moved(p.contrast),
            fill=self._image.fill,
            mean=self._image.mean,
            std=self._image.std,
            channels_last=self._channels_last,
        )


def choose_decoder(wanted: str, *, importable: bool) -> tuple[str, str]:
    """Return the decoder for data.decode=`wanted` and the reason.

    Raises:
        UserError: DALI is asked for and not installed.
    """
    if wanted == "cpu":
        return "cpu", "asked for"
    if importable:
        return "dali", "asked for" if wanted == "dali" else "installed, and bit-equal to the CPU reference on the host"
    if wanted == "dali":
        raise UserError(
            "data.decode=dali, but nvidia.dali is not installed here. Use data.decode=cpu, or an image that has it."
        )
    return "cpu", "nvidia.dali is not installed here"


def in_background(items: Iterable[_Item], depth: int) -> Iterator[tuple[_Item, float]]:
    """Run an iterator in a thread, up to `depth` items ahead; yield each item with the seconds waited for it.

    An exception of the iterator is raised here, at its place. Leaving early stops the thread.
    """
    ready: queue.Queue[tuple[_Item | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def offer(entry: tuple[_Item | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                offer((item, None))
                if stop.is_set():
                    return
            offer((None, None))
        except BaseException as error:
            offer((None, error))

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            begin = time.perf_counter()
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item, time.perf_counter() - begin
    finally:
        stop.set()
        thread.join()


def pad_ragged(values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays of differing length as one, (B, L, ...) with zeros at their ends, and their lengths (B,) int64."""
    count = np.array([len(one) for one in values], dtype=np.int64)
    together = np.zeros((len(values), int(count.max()), *values[0].shape[1:]), dtype=values[0].dtype)
    for row, one in zip(together, values, strict=True):
        row[: len(one)] = one
    return together, count


def _check(image: ImageSettings, augmentation: AugmentSettings) -> None:
    """Refuse options that exclude each other."""
    if image.fit != "letterbox" and (
        augmentation.crop_keeps or (augmentation.scale_min, augmentation.scale_max) != (1, 1)
    ):
        raise UserError("augment.scale_min, scale_max and crop_keeps work on image.fit=letterbox only. Set that too.")
    if image.fit == "letterbox" and (augmentation.crop_area_min, augmentation.crop_aspect_max) != (1, 1):
        raise UserError(
            "augment.crop_area_min and crop_aspect_max stretch; with image.fit=letterbox use augment.scale_min."
        )
    if augmentation.scale_min > augmentation.scale_max:
        raise UserError(f"augment.scale_min={augmentation.scale_min} is above scale_max={augmentation.scale_max}.")


def _check_boxes(name: str, data: ShardSet) -> None:
    """Refuse to keep boxes in crops that the data do not have."""
    if name and (name not in data.records or data.records[name].kind != RAGGED):
        raise UserError(f"augment.crop_keeps={name}: the data have no such boxes, only {', '.join(data.records)}.")


def _regions(data: ShardSet) -> np.ndarray:
    """Return (N, 4) int32: what of each image counts as the whole; all of it unless packing chose a part."""
    if all(name in data.columns for name in REGION):
        return np.stack([data.columns[name] for name in REGION], axis=1).astype(np.int32)
    size = data.records[IMAGE].shape[:, :2]
    return np.concatenate([np.zeros_like(size), size], axis=1)
