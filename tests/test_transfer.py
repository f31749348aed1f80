"""The order of decoding, copying and computing on a GPU: real loaders and decoders on an imitated device."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.check_images import compare_with_synchronised_decode, delay_compute
from tests.late_device import GARBAGE, LateDevice
from tests.test_loader import AUGMENTATION, HAS_DALI, IMAGE, are_equal, make_loader, make_orders, train
from trainyard.config.settings import DataSettings, ImageSettings, TrainConfig
from trainyard.data.augment import build_neutral
from trainyard.data.decode_cpu import Request
from trainyard.data.loader import Loader
from trainyard.data.prefetch import prefetch
from trainyard.data.shards import ShardSet
from trainyard.data.transfer import CopyStream

GPU = torch.device("cuda", 0)
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="needs nvidia.dali")


def test_a_gpu_gets_the_batches_of_the_host_from_pinned_memory_and_alongside_compute(images, monkeypatch):
    expected = train(images, 8, micro=3)
    device = LateDevice(monkeypatch, eager=True)
    found = train(images, 8, micro=3, device=GPU)
    for ours, theirs in zip(itertools.chain(*expected), itertools.chain(*found), strict=True):
        assert are_equal(ours, theirs)
        assert all(values.data_ptr() in device.handed_over for name, values in theirs.batch.items() if name != "image")
    assert len(device.uploads) >= 13 * sum(map(len, expected))  # 9 values, 3 of the augmentation, and the images
    assert set(device.uploads) == {("copies", True)}


class ObservedLoader(Loader):
    """Yields the images as they arrive on the device, and keeps what the background thread made."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.prepared: list[dict[str, Tensor]] = []

    def _add_values(self, item):
        self.prepared.append((item := super()._add_values(item)).values)
        return item

    def _make_batch(self, item) -> dict[str, Tensor]:
        return super()._make_batch(item) if self.device.type == "cpu" else {"uint8": item.images}


def make_observed_loader(images, device: torch.device, depth: int = 2) -> ObservedLoader:
    config = TrainConfig(seed=5, data=DataSettings(prefetch=depth), image=IMAGE, augment=AUGMENTATION)
    return ObservedLoader(config, images, device=device, decode="cpu", threads=2)


class ObservedShards(ShardSet):
    """Keeps where arrays were read to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.places: list[int] = []

    def read_into(self, name, ids, out, **options) -> None:
        super().read_into(name, ids, out, **options)
        self.places.append(out.ctypes.data)


@pytest.mark.parametrize("device", [torch.device("cpu"), GPU])
def test_arrays_are_read_into_the_memory_that_leaves_for_the_device(images, monkeypatch, device):
    data = ObservedShards(images.folder)
    LateDevice(monkeypatch, eager=True)
    loader = make_observed_loader(data, device)
    stream = loader.train(make_orders(), epoch=0, start=0, micro_batch_size=0)
    assert len(list(itertools.islice(stream, 6))) == 6
    stream.close()
    assert len(loader.prepared) >= 6
    assert {values["points"].data_ptr() for values in loader.prepared} <= set(data.places)


def test_on_the_host_the_caller_gets_the_memory_that_the_background_filled(images):
    loader = make_observed_loader(images, torch.device("cpu"))
    stream = loader.train(make_orders(), epoch=0, start=0, micro_batch_size=0)
    batch = next(stream).batch
    stream.close()
    assert set(batch) == {"image", *loader.prepared[0]}
    assert all(batch[name] is values for name, values in loader.prepared[0].items())


class PreparingLoader(Loader):
    """Queues the preparation of images on the stream that computes, where a step's kernels are, too."""

    def _make_model_input(self, images, augmentation) -> Tensor:
        torch.cuda.current_stream().push(lambda: self.queue.append(("prepare", images.flatten()[0] != GARBAGE)))
        return images


def test_a_micro_batch_arrives_after_its_copy_and_before_the_kernels_that_prepare_it(images, monkeypatch):
    device = LateDevice(monkeypatch, eager=False)
    config = TrainConfig(seed=5, image=IMAGE, augment=AUGMENTATION)
    loader = PreparingLoader(config, images, device=GPU, decode="cpu")
    loader.queue = []
    uploads, arrive = [], device.compute.push
    upload = loader._copies.upload

    def observe(*groups):
        uploaded, copied = upload(*groups)
        uploads.append(copied)
        return uploaded, copied

    monkeypatch.setattr(loader._copies, "upload", observe)
    numbers = itertools.count()
    stream = loader.train(
        make_orders(),
        epoch=0,
        start=0,
        micro_batch_size=4,
        on_arrival=lambda: arrive(
            lambda number=next(numbers): loader.queue.append(("arrive", uploads[number].happened))
        ),
    )
    taken = list(itertools.islice(stream, 4))
    stream.close()
    device.finish()
    assert len(taken) == 4 and loader.queue == 4 * [("arrive", True), ("prepare", True)]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_buffer_is_not_refilled_before_the_event_of_its_copy(images, monkeypatch, depth):
    """The caller's kernels are all still queued, so only the loader itself can make a copy happen."""
    count = 6 * (depth + 3)

    def take(loader: Loader) -> list[Tensor]:
        stream = loader.train(make_orders(), epoch=0, start=0, micro_batch_size=2)
        taken = [micro.batch["uint8"] for micro in itertools.islice(stream, count)]
        stream.close()
        return taken

    with monkeypatch.context() as patch:
        device = LateDevice(patch, eager=False)
        unlimited = take(make_observed_loader(images, GPU, depth=64))  # a buffer for each batch
        device.finish()
    device = LateDevice(monkeypatch, eager=False)
    found = take(make_observed_loader(images, GPU, depth=depth))
    device.finish()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(unlimited, found, strict=True))


def test_an_item_starts_before_its_turn_only_if_it_is_ready():
    reached, started = [], []
    go = threading.Event()

    def items() -> Iterator[int]:
        yield from (0, 1, 2)
        reached.append(2)
        go.wait(10)
        yield from (3, 4)
        raise RuntimeError("broken here")

    def start(item: int) -> int:
        started.append(item)
        return item

    stream = prefetch(items(), 2, prepare=int, start=start, ahead=1)
    assert next(stream)[0] == 0
    end = time.monotonic() + 10
    while not reached and time.monotonic() < end:
        time.sleep(0.001)
    assert next(stream)[0] == 1 and started == [0, 1, 2]
    assert next(stream)[0] == 2 and started == [0, 1, 2]  # 3 is not ready, and 2 does not wait for it
    go.set()
    assert [next(stream)[0], next(stream)[0]] == started[3:] == [3, 4]
    with pytest.raises(RuntimeError, match="broken here"):
        next(stream)


class OverwritingPipeline:
    """DALI's pipeline as the host sees it: decodes ahead into its own memory, which `run` takes back.

    An "image" is filled with a number that its record gives: the sum of its bytes, modulo 251.
    """

    def __init__(self, graph: Any, batch_size: int, shape: tuple[int, ...], queue: int) -> None:
        self.graph, self.queue = graph, queue  # a real pipeline, so that DALI checks its operators and their arguments
        self.memory = np.zeros((batch_size, *shape), dtype=np.uint8)
        self.ahead: deque[np.ndarray] = deque()
        self.feed: Callable[[], tuple] | None = None

    def __enter__(self) -> Any:
        return self.graph.__enter__()

    def __exit__(self, *error) -> None:
        self.graph.__exit__(*error)

    def set_outputs(self, *outputs) -> None:
        self.graph.set_outputs(*outputs)

    def build(self) -> None:
        pass

    def reset(self) -> None:
        assert not self.ahead

    def run(self) -> tuple:
        self.memory.fill(255)
        while len(self.ahead) < self.queue:
            try:
                numbers = [np.asarray(record).sum(dtype=np.int64) % 251 for record in self.feed()[0]]
                self.ahead.append(np.array(numbers, dtype=np.uint8))
            except StopIteration:
                break
        if not self.ahead:
            raise StopIteration
        numbers = self.ahead.popleft()
        decoded = self.memory[: len(numbers)]
        decoded[:] = numbers.reshape(-1, *[1] * (decoded.ndim - 1))
        return (SimpleNamespace(as_tensor=lambda: decoded),)


SIZE = (6, 4)


@pytest.fixture
def gpu_pipelines(monkeypatch) -> list[Any]:
    """Let DALI's pipelines run without a GPU; return those that were built, and how often memory was released."""
    dali = pytest.importorskip("trainyard.data.decode_dali")
    build_graph, external_source = dali.Pipeline, dali.fn.external_source
    built: list[Any] = []

    def build(*, batch_size: int, prefetch_queue_depth: int, **options) -> OverwritingPipeline:
        graph = build_graph(batch_size=batch_size, prefetch_queue_depth=prefetch_queue_depth, **options)
        built.append(OverwritingPipeline(graph, batch_size, (*SIZE, 1), prefetch_queue_depth))
        return built[-1]

    def observe_source(*, source, **options):
        built[-1].feed = source
        return external_source(source=source, **options)

    monkeypatch.setattr(dali, "Pipeline", build)
    monkeypatch.setattr(dali.fn, "external_source", observe_source)
    monkeypatch.setattr(dali.backend, "ReleaseUnusedMemory", lambda: built.append("released"))
    return built


def make_numbered_requests(batches: int = 40, count: int = 5) -> list[Request]:
    """Return requests whose records are their images' numbers."""
    requests = []
    for first in range(0, batches * count, count):
        records = [np.array([number], dtype=np.uint8) for number in range(first, first + count)]
        box, shapes = (np.tile(np.array([row], dtype=np.int32), (count, 1)) for row in ([0, 0, 8, 8], [8, 8, 1]))
        out = torch.zeros((count, *SIZE, 1), dtype=torch.uint8)
        requests.append(Request(records, shapes, build_neutral(box), out))
    return requests


@pytest.mark.parametrize("group_bytes", [1, 32 << 20])
def test_what_dali_decodes_on_a_gpu_is_copied_before_the_pipeline_takes_its_memory_back(
    gpu_pipelines, monkeypatch, group_bytes
):
    """The compute stream is behind by the whole run; on a card by a step, which accumulation makes long."""
    from trainyard.data import decode_dali

    monkeypatch.setattr(decode_dali, "_GROUP_BYTES", group_bytes)  # one micro-batch per run of the pipeline, or several
    device = LateDevice(monkeypatch, eager=False)
    copies = CopyStream(GPU)
    decoder = decode_dali.ImageDecoder(channels=1, fill=0, threads=1, copies=copies)
    read: list[list[int]] = []
    for _ in range(2):
        requests = make_numbered_requests()
        for expected, (request, images) in zip(requests, decoder.decode(iter(requests), max_batch_size=5), strict=True):
            assert request is expected
            _, copied = copies.upload({"image": images})
            copies.wait_on_current_stream(copied, [images])
            device.compute.push(lambda images=images: read.append(images.flatten(1).unique(dim=1).flatten().tolist()))
    assert read == [] and device.uploads == []
    device.finish()
    assert read == 2 * [[int(record[0]) for record in request.records] for request in requests]
    assert gpu_pipelines[1:] == ["released", "released"]  # one pipeline for both streams


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    LateDevice(monkeypatch, eager=True)
    torch.cuda.set_device(torch.device("cuda", 3))
    assert CopyStream(torch.device("cuda")).device == torch.device("cuda", 3)


def test_a_thread_that_decodes_for_one_of_several_gpus_starts_cuda_on_no_other(monkeypatch):
    """Each rank would take memory of GPU 0: torch comes back to the device that a thread was on before a stream."""
    device = LateDevice(monkeypatch, eager=True)
    copies = CopyStream(torch.device("cuda", 1))
    decoded, copied = iter([torch.ones(2), torch.zeros(2), None]), []
    work = copies.run_and_copy(lambda: next(decoded), lambda batch: batch.clone())
    thread = threading.Thread(target=lambda: copied.extend(work))
    thread.start()
    thread.join()
    assert len(copied) == 2 and device.stray_contexts == []


@needs_dali
def test_all_evaluations_of_a_loader_share_one_pipeline(images, monkeypatch):
    from trainyard.data import decode_dali

    built = []
    build = decode_dali.Pipeline
    monkeypatch.setattr(decode_dali, "Pipeline", lambda **options: built.append(build(**options)) or built[-1])
    loader, reference = make_loader(images, decode="dali"), make_loader(images, decode="cpu")
    sets = [(np.arange(20), 4), (np.arange(7, 26), 4), (np.arange(3), 2)]
    for ids, batch_size in sets:
        read, expected = (list(one.evaluate(ids, batch_size=batch_size)) for one in (loader, reference))
        assert all(are_equal(ours, theirs) for ours, theirs in zip(expected, read, strict=True))
    assert len(built) == 1
    left_early = loader.evaluate(np.arange(20), batch_size=4)
    next(left_early)
    left_early.close()  # with batches of it under way
    assert len(built) == 1
    (first, *_) = list(loader.evaluate(np.arange(20), batch_size=4))
    assert len(built) == 2 and first.batch["sample_id"].tolist() == [0, 1, 2, 3]


class MislabellingLoader(Loader):
    """Hands out a later batch's images under a label now and then, as a decoder that overwrites its memory does."""

    def _make_batch(self, item) -> dict[str, Tensor]:
        batch = super()._make_batch(item)
        if item.epoch is not None and 9 in item.ids:
            batch["image"] = batch["image"].flip(0)
        return batch


@pytest.mark.parametrize("decode", ["cpu", pytest.param("dali", marks=needs_dali)])
def test_the_check_for_a_gpu_names_the_samples_that_have_another_image(images, decode):
    config = TrainConfig(image=IMAGE)
    results = []
    for loader_type in (Loader, MislabellingLoader):
        loader = loader_type(config, images, device=torch.device("cpu"), decode=decode)
        results.append(
            compare_with_synchronised_decode(
                loader, make_orders(), steps=3, micro_batch_size=4, delay=delay_compute(loader.device)
            )
        )
    right, wrong = results
    assert (right.images, right.wrong) == (24, [])
    ids = [part.tolist() for i in range(3) for part in np.split(make_orders()(0).batch(i), 2)]
    assert wrong.wrong == next(part for part in ids if 9 in part)


class HastyCopyStream(CopyStream):
    """Copies on the stream that computes, and lets the decoder run again before the copy has happened."""

    def run_and_copy(self, run: Callable[[], Any], copy: Callable[[Any], Any]) -> Iterator[Any]:
        while (decoded := run()) is not None:
            yield copy(decoded)


class RawLoader(Loader):
    """Yields the decoder's images as they are: what a model's kernels would do with them is not imitated."""

    def _make_batch(self, item) -> dict[str, Tensor]:
        return {"sample_id": item.values["sample_id"], "image": item.images}


@pytest.mark.parametrize("copies_type", [CopyStream, HastyCopyStream])
def test_the_check_for_a_gpu_fails_if_the_decoders_memory_is_overwritten_before_it_is_copied(
    images, gpu_pipelines, monkeypatch, copies_type
):
    from trainyard.data import decode_dali

    monkeypatch.setattr(decode_dali, "_GROUP_BYTES", 1)  # the pipeline runs once for each micro-batch
    device = LateDevice(monkeypatch, eager=True)
    config = TrainConfig(image=ImageSettings(height_px=SIZE[0], width_px=SIZE[1], channels=1))
    loader = RawLoader(config, images, device=GPU, decode="dali")
    loader._copies = copies_type(GPU)
    found = compare_with_synchronised_decode(
        loader, make_orders(), steps=3, micro_batch_size=2, delay=device.compute.delay
    )
    assert found.images == 24
    if copies_type is CopyStream:
        assert found.wrong == []
    else:  # the pipeline has run again after all micro-batches of the first step but the last
        assert set(make_orders()(0).batch(0)[:6].tolist()) <= set(found.wrong)
