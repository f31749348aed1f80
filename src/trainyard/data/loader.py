"""Reads, decodes and augments samples in the background, and yields batches on the device."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainyard.config.settings import TrainConfig
from trainyard.data import augment, decode_cpu
from trainyard.data.arrays import BatchMemory, read_arrays
from trainyard.data.decode_cpu import Request
from trainyard.data.device import prepare_model_input, shape_channels
from trainyard.data.host_batch import HostBatch, RandomDraws
from trainyard.data.host_memory import count_pinned_bytes
from trainyard.data.index import (
    ARRAY,
    AUDIO,
    ENCODED_IMAGE,
    IMAGE,
    INPUT_RAW,
    INPUTS,
    MASK,
    PCM,
    VARYING_AXES,
    list_followers,
)
from trainyard.data.order import EpochOrder, split_into_micro_batches
from trainyard.data.prefetch import count_prefetched, prefetch
from trainyard.data.shards import ShardSet
from trainyard.data.store import check_inputs, has_inputs, read_regions
from trainyard.data.transfer import CopyStream
from trainyard.errors import UserError
from trainyard.split import split_batch

Decoded = TypeVar("Decoded")

_UNFINISHED_COPIES = 1  # batches that a GPU may still be reading from their buffers when the next one is taken
_AHEAD_ON_GPU = 1  # micro-batches whose copy to a GPU starts before their turn
_LARGE_BYTES = 1 << 19  # of a micro-batch: to hand it to another thread takes as long as to copy less


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device."""

    batch: dict[str, Tensor]
    weight: float  # its share of the global batch's samples; 0 for a placeholder
    last: bool  # whether it is the last of its optimizer step
    wait_s: float  # how long the caller waited for it


class Loader:
    """Batches of one data set for one rank; `train.module.Batch` describes their content.

    `decode` is "dali" or "cpu". On the host DALI and the CPU decoder agree bit for bit, except that gray levels of
    colour images other than JPEG may differ by one; packing should convert 16-bit images. Host buffers are reused, but
    a batch is new memory on the device, so a caller may keep it.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ShardSet,
        *,
        device: torch.device,
        decode: str,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 1,
        channels_last: bool = False,
        reads_noise: bool = True,
    ) -> None:
        """Build a loader from a typed config and the values that the config leaves open.

        Args:
            decode: "dali" or "cpu", see `choose_decoder`.
            threads: threads of this rank that decode, or read where there is nothing to decode; 0: only `read_here`.
            channels_last: memory layout of images on the device.
            reads_noise: whether the job reads `noise`: `TrainModule.reads_noise`. Without it there is none.

        Raises:
            UserError: options of the config exclude each other.
        """
        image, augmentation = config.image, config.augment
        self.data = data
        self.rank, self.world_size, self.device = rank, world_size, device
        self._settings, self._image, self._audio, self._augmentation = config.data, image, config.sound, augmentation
        self._seed, self._threads, self._channels_last, self._decode = config.seed, threads, channels_last, decode
        self._has_images = IMAGE in data.records and data.records[IMAGE].kind in (ENCODED_IMAGE, *INPUTS)
        self._regions = read_regions(data) if self._has_images else np.zeros((data.count, 4), dtype=np.int32)
        self._letterbox = image.fit == "letterbox"
        self._draws = RandomDraws(
            augmentation,
            seed=config.seed,
            regions=self._regions if self._has_images else None,
            letterbox=self._letterbox,
            read_boxes=self._read_boxes,
            noise=reads_noise,
        )
        self._mean, self._std = (shape_channels(values, device) for values in (image.mean, image.std))
        self._copies = CopyStream(device) if device.type == "cuda" else None
        self._memory = {name: BatchMemory() for name in data.records} if self._copies is None else None
        self._dali: Any = None  # built when it is first needed
        augment.check_options(image, augmentation)
        check_inputs(data.folder, data.records, data.meta, image=image, augmentation=augmentation)

    def train(
        self,
        orders: Callable[[int], EpochOrder],
        *,
        epoch: int,
        start: int,
        micro_batch_size: int,
        on_arrival: Callable[[], object] = lambda: None,
    ) -> Generator[MicroBatch, None, None]:
        """Yield this rank's micro-batches from global batch `start` of `epoch` on, epoch after epoch, without end.

        A late start costs nothing: earlier batches are neither read nor augmented.

        Args:
            orders: returns the order of an epoch; all have the same global batch size. Called in another thread, an
                epoch ahead.
            micro_batch_size: samples per micro-batch; 0: this rank's share of the global batch.
            on_arrival: called when the caller's stream has waited for a micro-batch, before it prepares the images.
        """
        boxes, records = self._augmentation.crop_keeps, self.data.records
        if boxes and (boxes not in records or records[boxes].varying_axes != 1):
            raise UserError(f"augment.crop_keeps={boxes}: the data has no such boxes, only {', '.join(records)}.")
        first = orders(epoch)
        split = split_batch(first.global_batch_size, ranks=self.world_size, micro_batch=micro_batch_size)

        def make_batches() -> Iterator[HostBatch]:
            with ThreadPoolExecutor(1, "order") as background:
                order, begin = first, start
                for number in itertools.count(epoch):
                    following = background.submit(orders, number + 1)  # ready long before this epoch ends
                    for index in range(begin, len(order)):
                        yield from self._split_batch(order.batch(index), number, index, micro_batch_size)
                    order, begin = following.result(), 0

        yield from self._load(make_batches(), split.micro_batch, on_arrival=on_arrival)

    def _split_batch(self, ids: np.ndarray, epoch: int, index: int, micro_batch_size: int) -> Iterator[HostBatch]:
        """Split one global batch into this rank's micro-batches."""
        size = self._scale_size(self._choose_scale(epoch, index))
        parts = split_into_micro_batches(
            ids, rank=self.rank, world_size=self.world_size, micro_batch_size=micro_batch_size
        )
        for position, (part, counted) in enumerate(parts):
            last = position == len(parts) - 1
            yield HostBatch(part, counted / len(ids), last, epoch, size)

    def _read_boxes(self, ids: np.ndarray) -> list[np.ndarray]:
        name = self._augmentation.crop_keeps
        return self.data.read_arrays(name, ids, check_crc=self._settings.check_crc) if name else []

    def _choose_scale(self, epoch: int, index: int) -> float:
        return augment.choose_scale(self._image.scales, seed=self._seed, epoch=epoch, batch=index)

    def _scale_size(self, scale: float) -> tuple[int, int]:
        return round(self._image.height_px * scale), round(self._image.width_px * scale)

    def evaluate(self, ids: np.ndarray, *, batch_size: int) -> Generator[MicroBatch, None, None]:
        """Yield this rank's part of an evaluation set, without augmentation; all ranks together read each sample once.

        Args:
            batch_size: samples per micro-batch.
        """
        low, high = (len(ids) * r // self.world_size for r in (self.rank, self.rank + 1))
        yield from self._load(self._make_neutral_batches(ids[low:high], batch_size, len(ids)), batch_size)

    def read_images(self, ids: np.ndarray, *, batch_size: int) -> Iterator[Tensor]:
        """Yield the images of an evaluation as they are copied to a device, read in this thread.

        Returns:
            (b, H, W, C) uint8 on the host, where the decoder works there; overwritten when the next is taken.
        """
        batches = self._make_neutral_batches(ids, batch_size, len(ids))
        for batch in self._add_images(batches, self._allocate_buffers(1, batch_size), batch_size):
            self._copy_images(batch)
            assert batch.images is not None
            yield batch.images

    def _make_neutral_batches(self, share: np.ndarray, batch_size: int, total: int) -> Iterator[HostBatch]:
        size = self._scale_size(1.0)
        letterbox = size if self._letterbox else None
        for i in range(0, len(share), batch_size):
            part = share[i : i + batch_size]
            neutral = augment.build_neutral(self._regions[part], letterbox=letterbox) if self._has_images else None
            yield HostBatch(part, len(part) / total, True, None, size, neutral)

    def _load(
        self, batches: Iterator[HostBatch], largest: int, *, on_arrival: Callable[[], object] = lambda: None
    ) -> Generator[MicroBatch, None, None]:
        """Read and decode batches in the background, and move each to the device.

        Args:
            largest: the largest number of samples in any batch.
        """
        depth, readers = self._settings.prefetch, self._count_readers(largest)
        stream = self._decode_records(batches, count_prefetched(depth, readers) + _UNFINISHED_COPIES, largest)
        upload = partial(self._upload, unfinished=deque())
        ahead = 0 if self._copies is None else _AHEAD_ON_GPU
        arrived = prefetch(stream, depth, prepare=self._prepare, start=upload, threads=readers, ahead=ahead)
        for batch, wait_s in arrived:
            self._wait_on_current_stream(batch)
            on_arrival()
            yield MicroBatch(self._make_batch(batch), batch.weight, batch.last, wait_s)
            del batch  # so that its memory can be lent to the next

    def read_here(self, ids: np.ndarray, *, epoch: int | None, index: int = 0) -> dict[str, Tensor]:
        """Read, decode and augment samples of global batch `index` in the caller's thread; epoch None: evaluation.

        For data sets of torch, whose worker processes have no other thread.
        """
        scale = 1.0 if epoch is None else self._choose_scale(epoch, index)
        batch = HostBatch(ids, 1.0, True, epoch, self._scale_size(scale))
        if epoch is None:
            [batch] = self._make_neutral_batches(ids, len(ids), len(ids))
        [batch] = self._decode_records(iter([batch]), 1, len(ids))
        return self._make_batch(self._prepare(batch))

    def _decode_records(self, batches: Iterator[HostBatch], buffers: int, largest: int) -> Iterator[HostBatch]:
        """Add random numbers, recordings and images to each batch.

        Args:
            buffers: of images, used one after another and again.
        """
        stream = self._draws.attach(batches)
        for name, records in self.data.records.items():
            if records.kind == AUDIO:
                stream = self._decode_audio(name, stream, largest)
            elif records.kind == PCM:
                stream = self._read_pcm(name, stream, largest)
        if self._has_images:
            for name in list_followers(self.data.records):
                stream = self._decode_follower(name, stream)
            stream = self._add_images(stream, self._allocate_buffers(buffers, largest), largest)
        return stream

    def _count_readers(self, largest: int) -> int:
        """Return how many threads copy records: one next to a decoder, and if a micro-batch takes next to no time."""
        kinds = {records.kind for records in self.data.records.values()}
        copied = [r for r in self.data.records.values() if r.kind in (ARRAY, INPUT_RAW)]
        is_large = largest * sum(math.prod(r.row_shape) * np.dtype(r.dtype).itemsize for r in copied) >= _LARGE_BYTES
        return self._threads if is_large and kinds <= {ARRAY, INPUT_RAW, *VARYING_AXES} else 1

    def _prepare(self, batch: HostBatch) -> HostBatch:
        """Copy the records of a batch that need no decoding, and add everything else of it."""
        arrays = read_arrays(self.data, batch.ids, check_crc=self._settings.check_crc, memory=self._memory)
        batch.values = batch.values | arrays
        self._copy_images(batch)
        return self._add_values(batch)

    def _read_pcm(self, name: str, batches: Iterator[HostBatch], largest: int) -> Iterator[HostBatch]:
        """Add a crop of each PCM recording; it is copied before the next read, so one buffer is enough."""
        usual_bytes = largest * int(self.data.records[name].size.mean() * 1.5)  # longer batches get new memory
        buffer = np.empty(usual_bytes, dtype=np.uint8)
        for batch in batches:
            recordings = self.data.read_arrays(name, batch.ids, check_crc=self._settings.check_crc, buffer=buffer)
            yield self._add_audio(name, batch, recordings)

    def _decode_audio(self, name: str, batches: Iterator[HostBatch], largest: int) -> Iterator[HostBatch]:
        """Add a crop of each encoded recording."""
        check = self._settings.check_crc
        pending: deque[HostBatch] = deque()

        def make_requests() -> Iterator[decode_cpu.AudioRequest]:
            for batch in batches:
                pending.append(batch)
                yield batch, self.data.read_arrays(name, batch.ids, check_crc=check)

        requests = make_requests()
        if self._decode == "dali":
            from trainyard.data import decode_dali

            decoded = decode_dali.decode_audio(requests, threads=self._threads, max_batch_size=largest)
        else:
            decoded = decode_cpu.decode_audio(requests, threads=self._threads)
        for batch, recordings in self._name_misfits(name, decoded, pending):
            yield self._add_audio(name, batch, recordings)

    def _add_audio(self, name: str, batch: HostBatch, recordings: list[np.ndarray]) -> HostBatch:
        """Add a crop of each recording as int16, which is scaled to [-1, 1) on the device."""
        count = self.data.records[name].shape[batch.ids, 0].astype(np.int64)
        frames = self._count_frames(count) if batch.epoch is None else self._audio.frames
        start = np.zeros_like(count)
        if batch.epoch is not None:
            start = augment.draw_starts(seed=self._seed, epoch=batch.epoch, sample_ids=batch.ids, spare=count - frames)
        crops = np.empty((len(recordings), frames), dtype=np.int16)
        if [len(recording) for recording in recordings] != count.tolist():
            self.data.check_headers(name, batch.ids)
        for row, recording, first in zip(crops, recordings, start.tolist(), strict=True):
            part = recording[first : first + frames]
            row[:] = part if len(part) == frames else np.resize(part, frames)
        batch.values |= {name: torch.from_numpy(crops), f"{name}_count": torch.from_numpy(count)}
        return batch

    def _count_frames(self, count: np.ndarray) -> int:
        """Return the frames of the longest of these recordings in evaluation, whole segments (`average_segments`)."""
        frames, hop = self._audio.frames, max(1, self._audio.frames // 2)
        spare = max(0, int(count.max()) - frames) if self._audio.segments == "sliding" else 0
        return frames + -(-spare // hop) * hop

    def count_host_bytes(self, largest: int) -> int:
        """Return how much memory reading allocates on the host for batches of up to `largest` samples."""
        batches = count_prefetched(self._settings.prefetch, self._count_readers(largest))
        on_cpu = self.device.type == "cpu"
        count_allocated = int if on_cpu else count_pinned_bytes
        total = 0
        for records in self.data.records.values():
            if records.kind in (AUDIO, PCM):
                total += batches * count_allocated(largest * 2 * self._count_frames(records.shape[:, 0]))
            elif records.kind in (ARRAY, *VARYING_AXES):  # padded to the longest
                longest = math.prod(records.shape.max(axis=0).tolist()) * np.dtype(records.dtype).itemsize
                total += batches * count_allocated(largest * longest)
        if self._has_images:
            pixels = largest * self._count_pixels()
            total += len(list_followers(self.data.records)) * batches * count_allocated(pixels)
            total += (batches + _UNFINISHED_COPIES) * count_allocated(pixels)
            total += 4 * pixels if on_cpu else 0  # the model's input
        return total

    def _count_pixels(self) -> int:
        """Return the elements of an image of the largest input size."""
        height, width = self._scale_size(max(1.0, *self._image.scales))
        return height * width * self._image.channels

    def _allocate_buffers(self, count: int, largest: int) -> list[Tensor]:
        flat = largest * self._count_pixels()
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # a thread outside the caller's inference mode writes to them
            return [torch.empty(flat, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]

    def _add_images(self, batches: Iterator[HostBatch], buffers: list[Tensor], largest: int) -> Iterator[HostBatch]:
        """Add the images, in one buffer after another and again; of uncompressed ones only where they will be."""
        if self.data.records[IMAGE].kind != INPUT_RAW:
            yield from self._decode_images(batches, buffers, largest)
            return
        for batch, buffer in zip(batches, itertools.cycle(buffers), strict=False):
            batch.images = self._view_images(buffer, batch)
            yield batch

    def _copy_images(self, batch: HostBatch) -> None:
        """Copy the uncompressed images of a batch to where `_add_images` said, and mirror them."""
        if batch.images is None or self.data.records[IMAGE].kind != INPUT_RAW:
            return
        assert batch.parameters is not None
        images = batch.images
        self.data.read_into(IMAGE, batch.ids, images.numpy(), check_crc=self._settings.check_crc)
        for i in np.flatnonzero(batch.parameters.flip).tolist():
            images[i].copy_(images[i].flip(1))  # NumPy takes 3 times (gray) to 14 times (RGB) as long

    def _decode_images(self, batches: Iterator[HostBatch], buffers: list[Tensor], largest: int) -> Iterator[HostBatch]:
        """Decode the images of each batch into the buffers, one after another and again."""
        pending: deque[HostBatch] = deque()

        def make_requests() -> Iterator[Request]:
            for batch, buffer in zip(batches, itertools.cycle(buffers), strict=False):
                assert batch.parameters is not None
                pending.append(batch)
                records = self.data.read_bytes(IMAGE, batch.ids, check_crc=self._settings.check_crc)
                shapes, parameters = self.data.records[IMAGE].shape[batch.ids, :3], batch.parameters
                if has_inputs(self.data.records):  # packing has cropped and resized them
                    parameters = replace(parameters, box=np.pad(shapes[:, :2], ((0, 0), (2, 0))))
                out = self._view_images(buffer, batch)
                yield Request(records, shapes, parameters, out, batch)

        for request, images in self._name_misfits(IMAGE, self._run_image_decoder(make_requests(), largest), pending):
            request.batch.images = images
            yield request.batch

    def _decode_follower(self, name: str, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """Add a mask or a further image, moved as each sample's image is, by the reference decoder."""
        records, original_px = self.data.records[name], self.data.records[IMAGE].original_px
        is_mask, pending = records.kind == MASK, deque[HostBatch]()

        def make_requests() -> Iterator[Request]:
            for batch in batches:
                assert batch.parameters is not None
                pending.append(batch)
                encoded = self.data.read_bytes(name, batch.ids, check_crc=self._settings.check_crc)
                shapes, parameters, to_stored = records.shape[batch.ids], batch.parameters, None
                scale = shapes[:, :2] / original_px[batch.ids]
                parameters = replace(parameters, box=augment.scale_boxes(parameters.box, scale))
                if is_mask:
                    to_stored = augment.invert_affine(batch.values["affine"].numpy(), stored_scale=scale)
                out = torch.empty((len(batch.ids), *batch.size, channels), dtype=torch.uint8)
                yield Request(encoded, shapes, parameters, out, batch, to_stored)

        channels, fill = 1 if is_mask else self._image.channels, self._image.fill
        decoded = decode_cpu.decode(make_requests(), channels=channels, fill=fill, threads=self._threads)
        for request, images in self._name_misfits(name, decoded, pending):
            request.batch.values[name] = images.squeeze(3) if is_mask else images
            yield request.batch

    def _name_misfits(self, name: str, decoded: Iterator[Decoded], pending: deque[HostBatch]) -> Iterator[Decoded]:
        """Yield what a decoder does; if it fails at a record that is not as the index says, name that record.

        Args:
            pending: batches that the decoder has taken and not yet returned, in order; emptied here.

        Raises:
            ShardError: instead of the decoder's error.
        """
        try:
            for found in decoded:
                pending.popleft()
                yield found
        except UserError:
            raise
        except Exception:
            for batch in pending:
                self.data.check_headers(name, batch.ids)
            raise

    def _view_images(self, buffer: Tensor, batch: HostBatch) -> Tensor:
        shape = (len(batch.ids), *batch.size, self._image.channels)
        return buffer[: math.prod(shape)].view(shape)

    def _run_image_decoder(self, requests: Iterator[Request], largest: int) -> Iterator[tuple[Request, Tensor]]:
        image = self._image
        common: dict[str, Any] = {"channels": image.channels, "fill": image.fill, "threads": self._threads}
        if self._decode == "cpu":
            return decode_cpu.decode(requests, **common)
        if self._dali is None:
            from trainyard.data import decode_dali  # takes a second to import, and small container images lack DALI

            # the same pixels on every device: GPUs do not decode PNG, and would resize
            copies = None if has_inputs(self.data.records) else self._copies
            self._dali = decode_dali.ImageDecoder(**common, copies=copies)
        stream: Iterator[tuple[Request, Tensor]] = self._dali.decode(requests, max_batch_size=largest)
        return stream

    def _add_values(self, batch: HostBatch) -> HostBatch:
        """Add all of the batch that is not read from a record; pin everything that a GPU will copy."""
        ids = torch.from_numpy(batch.ids.copy())  # because the caller owns these, and `batch.ids` is part of the order
        columns = {name: torch.from_numpy(column[batch.ids]) for name, column in self.data.columns.items()}
        values = {"sample_id": ids, **columns, **batch.values}
        augmentation: dict[str, Tensor] = {}
        if (p := batch.parameters) is not None:
            values["image_px"] = torch.from_numpy(self.data.records[IMAGE].original_px[batch.ids].astype(np.float32))
            resample = batch.epoch is not None and augment.needs_resampling(self._augmentation)
            arrays = p.select_for_device(resample=resample)
            augmentation = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._copies is not None:
            values, augmentation = (
                {name: tensor.pin_memory() for name, tensor in group.items()} for group in (values, augmentation)
            )
        batch.values, batch.augmentation = values, augmentation
        return batch

    def _upload(self, batch: HostBatch, *, unfinished: deque[Any]) -> HostBatch:
        """Start the copy of a batch to a GPU.

        Args:
            unfinished: events of earlier copies. All but `_UNFINISHED_COPIES` have happened when this returns, so that
                the background thread may use their buffers again.
        """
        if self._copies is None:
            return batch
        images = {} if batch.images is None else {IMAGE: batch.images}
        (values, augmentation, images), copied = self._copies.upload(batch.values, batch.augmentation, images)
        unfinished.append(copied)
        while len(unfinished) > _UNFINISHED_COPIES:
            unfinished.popleft().synchronize()
        batch.values, batch.augmentation, batch.images, batch.copied = values, augmentation, images.get(IMAGE), copied
        return batch

    def _wait_on_current_stream(self, batch: HostBatch) -> None:
        """Let the caller's stream use the tensors that were copied to a GPU."""
        if self._copies is not None:
            images = [] if batch.images is None else [batch.images]
            self._copies.wait_on_current_stream(
                batch.copied, [*batch.values.values(), *batch.augmentation.values(), *images]
            )

    def _make_batch(self, host_batch: HostBatch) -> dict[str, Tensor]:
        """Return the model's inputs from a batch whose tensors are on the device."""
        batch = dict(host_batch.values)
        if host_batch.images is not None and host_batch.parameters is not None:
            batch[IMAGE] = self._make_model_input(host_batch.images, host_batch.augmentation)
        for name, records in self.data.records.items():
            if records.kind in (AUDIO, PCM):
                batch[name] = batch[name] * (1 / 32768)  # exact: a power of two
            elif records.kind == MASK:
                batch[name] = batch[name].long()
            elif records.kind == ENCODED_IMAGE and name != IMAGE:
                batch[name] = self._make_model_input(batch[name], host_batch.augmentation)
        return batch

    def _make_model_input(self, images: Tensor, augmentation: Mapping[str, Tensor]) -> Tensor:
        return prepare_model_input(
            images,
            augmentation,
            fill=self._image.fill,
            mean=self._mean,
            std=self._std,
            channels_last=self._channels_last,
        )
