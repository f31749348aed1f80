import importlib.util
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images import edit_index, make_points
from tests.late_device import LateDevice
from trainyard.config.settings import AugmentSettings, DataSettings, ImageSettings, TrainConfig
from trainyard.data import augment
from trainyard.data.arrays import BatchMemory
from trainyard.data.hdf5 import ShardError
from trainyard.data.host_memory import count_pinned_bytes
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import EpochOrder, EpochOrders, group_by_identity, shuffle
from trainyard.data.pack import pack
from trainyard.data.prefetch import prefetch
from trainyard.data.shards import Sample, ShardSet
from trainyard.errors import UserError
from trainyard.node.choices import choose_decoder

AUGMENTATION = AugmentSettings(
    rotate_deg=20, shift=0.1, zoom=0.2, crop_area_min=0.4, crop_aspect_max=1.3, flip=0.5, gain=0.2, contrast=0.3
)
IMAGE = ImageSettings(height_px=24, width_px=32, channels=1, fill=255, mean=0.5, std=0.25)
HAS_DALI = all(importlib.util.find_spec(name) for name in ("nvidia", "nvidia.dali"))
BACK_ENDS = ["cpu", pytest.param("dali", marks=pytest.mark.skipif(not HAS_DALI, reason="needs nvidia.dali"))]
COUNT = 26
Orders = Callable[[int], EpochOrder]


def make_loader(data: ShardSet, *, decode: str = "cpu", rank: int = 0, world_size: int = 1, **changes) -> Loader:
    settings = DataSettings(**{"prefetch": 2} | {name: changes.pop(name) for name in ("prefetch",) if name in changes})
    image, augmentation = changes.pop("image", IMAGE), changes.pop("augmentation", AUGMENTATION)
    config = TrainConfig(data=settings, image=image, augment=augmentation, seed=changes.pop("seed", 5))
    options = {"device": torch.device("cpu"), "threads": 2} | changes
    return Loader(config, data, rank=rank, world_size=world_size, decode=decode, **options)


def make_orders(batch: int = 8) -> Orders:
    return lambda epoch: shuffle(np.arange(COUNT), seed=5, epoch=epoch, global_batch_size=batch)


def take_steps(batches: Iterable[MicroBatch], count: int) -> list[list[MicroBatch]]:
    """Take the micro-batches of the first `count` optimizer steps."""
    taken: list[list[MicroBatch]] = [[]]
    for micro in batches:
        taken[-1].append(micro)
        if micro.last and len(taken) == count:
            return taken
        if micro.last:
            taken.append([])
    raise AssertionError(f"the stream ended in step {len(taken)} of {count}")


def train(
    data: ShardSet, count: int, *, start: int = 0, micro: int = 0, batch: int = 8, **changes
) -> list[list[MicroBatch]]:
    stream = make_loader(data, **changes).train(make_orders(batch), epoch=3, start=start, micro_batch_size=micro)
    try:
        return take_steps(stream, count)
    finally:
        stream.close()


def are_equal(one: MicroBatch, other: MicroBatch) -> bool:
    assert one.batch.keys() == other.batch.keys()
    values_equal = all(torch.equal(one.batch[name], other.batch[name]) for name in one.batch)
    return values_equal and (one.weight, one.last) == (other.weight, other.last)


def list_ids(micro_batches: Iterable[MicroBatch]) -> list[int]:
    return [i for micro in micro_batches if micro.weight for i in micro.batch["sample_id"].tolist()]


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_training_reads_the_order_epoch_after_epoch(images, decode):
    read = train(images, 10, decode=decode)
    expected = [make_orders()(epoch).batch(i).tolist() for epoch in (3, 4, 5) for i in range(4)][:10]
    assert [list_ids(step) for step in read] == expected
    assert [len(ids) for ids in expected] == [8, 8, 8, 2, 8, 8, 8, 2, 8, 8]


def test_dali_and_the_reference_give_bitwise_equal_batches(images):
    pytest.importorskip("nvidia.dali")
    ours, theirs = (train(images, 8, decode=decode, micro=3) for decode in ("cpu", "dali"))
    assert all(are_equal(a, b) for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_each_channel_has_a_mean_and_a_deviation_of_its_own(images, decode):
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    plain, normalised = (
        train(images, 2, decode=decode, image=replace(IMAGE, channels=3, mean=m, std=s))
        for m, s in ((0.0, 1.0), (mean, std))
    )
    for a, b in zip(itertools.chain(*plain), itertools.chain(*normalised), strict=True):
        for channel in range(3):
            expected = (a.batch["image"][:, channel] - mean[channel]) / std[channel]
            assert torch.equal(b.batch["image"][:, channel], expected)
    one, each = (
        train(images, 1, decode=decode, image=replace(IMAGE, channels=3, mean=m, std=s))
        for m, s in ((0.5, 0.25), ([0.5] * 3, [0.25] * 3))
    )
    assert all(are_equal(a, b) for a, b in zip(one[0], each[0], strict=True))


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_batch_contains_everything_of_its_samples(images, decode):
    (micro,) = train(images, 1, decode=decode)[0]
    ids = make_orders()(3).batch(0)
    numbers = images.columns["number"][ids]
    expected = {"sample_id", "image", "affine", "image_px", "noise", "points", "who", "number", "weight", "listed"}
    assert set(micro.batch) == expected
    for name in ("who", "number", "weight", "listed"):
        assert np.array_equal(micro.batch[name].numpy(), images.columns[name][ids])
    assert np.array_equal(micro.batch["points"].numpy(), np.stack([make_points(i) for i in numbers.tolist()]))
    assert micro.batch["image"].shape == (8, 1, 24, 32) and micro.batch["image"].dtype == torch.float32
    assert micro.batch["image"].min() >= -2 and micro.batch["image"].max() <= 2  # (0..1 - mean) / std


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_late_start_yields_the_tail_of_an_early_start(images, decode):
    whole, tail = train(images, 9, decode=decode), train(images, 6, decode=decode, start=3)
    for a, b in zip(whole[3:], tail, strict=True):
        assert all(are_equal(*pair) for pair in zip(a, b, strict=True))


def test_nothing_before_the_start_is_read(packed_copy):
    data = ShardSet(packed_copy)
    before, after = np.split(make_orders()(3).ids, [2 * 8])
    damage_images(data, before)
    read = train(data, 2, start=2)
    assert [i for step in read for i in list_ids(step)] == after.tolist()
    with pytest.raises(ShardError):
        train(data, 1, start=1)


def damage_images(data: ShardSet, ids: np.ndarray) -> None:
    """Overwrite the first bytes of some images."""
    for i in ids.tolist():
        shard = next(shard for shard in reversed(data.shards) if shard.first <= i)
        with shard.path.open("r+b") as file:
            file.seek(int(data.records["image"].start[i]))
            file.write(b"damaged")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("micro", [0, 2])
def test_the_ranks_together_read_the_batches_that_one_rank_reads(images, world_size, micro):
    alone = train(images, 5, batch=7)
    ranks = [train(images, 5, batch=7, rank=r, world_size=world_size, micro=micro) for r in range(world_size)]
    for step, whole in enumerate(alone):
        parts = [part for rank in ranks for part in rank[step]]
        counted = [part.batch for part in parts if part.weight]
        for name, values in whole[0].batch.items():
            assert torch.equal(torch.cat([batch[name] for batch in counted]), values), name
        assert len({len(rank[step]) for rank in ranks}) == 1
        assert sum(part.weight for part in parts) == pytest.approx(1)
        for part in parts:
            assert part.weight in (0, pytest.approx(len(part.batch["sample_id"]) / len(whole[0].batch["sample_id"])))


def test_ranks_without_a_sample_of_the_last_batch_get_a_placeholder(images):
    ranks = [train(images, 1, start=3, rank=r, world_size=4)[0] for r in range(4)]
    last = make_orders()(3).batch(3).tolist()
    assert len(last) == 2
    assert sorted(i for rank in ranks for i in list_ids(rank)) == sorted(last)
    assert sorted(micro.weight for (micro,) in ranks) == [0, 0, 0.5, 0.5]
    assert all(micro.batch["sample_id"].tolist() == last[:1] for (micro,) in ranks if micro.weight == 0)


@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_reads_each_sample_once_over_all_ranks_without_augmentation(images, decode, world_size):
    ids = np.arange(1, 24)
    ranks = [make_loader(images, decode=decode, rank=r, world_size=world_size) for r in range(world_size)]
    read = [micro for one in ranks for micro in one.evaluate(ids, batch_size=5)]
    assert list_ids(read) == ids.tolist()
    assert sum(micro.weight for micro in read) == pytest.approx(1)
    plain = make_loader(images, augmentation=AugmentSettings()).evaluate(ids, batch_size=23)
    assert torch.equal(torch.cat([micro.batch["image"] for micro in read]), next(plain).batch["image"])
    plain.close()


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_rank_without_samples_to_evaluate_gets_no_batch(images, decode):
    ranks = [make_loader(images, decode=decode, rank=r, world_size=3) for r in range(3)]
    assert [list_ids(one.evaluate(np.array([4, 9]), batch_size=8)) for one in ranks] == [[], [4], [9]]


def test_images_are_cropped_to_the_region_that_packing_chose(images):
    whole = next(make_loader(images).evaluate(np.array([2]), batch_size=1)).batch["image"]
    height, width, _ = images.records["image"].shape[2].tolist()
    for name, values in zip(("box_y", "box_x", "box_height", "box_width"), (0, 0, height, 2 * width), strict=True):
        images.columns[name] = np.full(COUNT, values)
    cut = next(make_loader(images).evaluate(np.array([2]), batch_size=1)).batch["image"]
    assert (cut[..., 17:] == (1 - 0.5) / 0.25).all()  # the right half is outside the image: fill
    assert (cut[..., :15] - whole.unfold(3, 2, 2).mean(4)[..., :15]).abs().mean() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_batch_that_is_kept_is_not_overwritten_by_later_ones(images, decode, prefetch):
    kept: list[MicroBatch] = []
    copies: list[torch.Tensor] = []
    stream = make_loader(images, decode=decode, prefetch=prefetch).train(
        make_orders(), epoch=0, start=0, micro_batch_size=2
    )
    for micro in itertools.islice(stream, 40):
        time.sleep(0.002)  # let the background run ahead as far as it can
        kept.append(micro)
        copies.append(micro.batch["image"].clone())
    stream.close()
    fresh = make_loader(images, decode=decode, prefetch=prefetch).train(
        make_orders(), epoch=0, start=0, micro_batch_size=2
    )
    for micro, copy, again in zip(kept, copies, fresh, strict=False):
        assert torch.equal(micro.batch["image"], copy) and are_equal(micro, again)
    fresh.close()


class HostLoader(Loader):
    """Yields the host buffers themselves, and counts the buffers filled."""

    filled = 0

    def _decode_images(self, *args, **kwargs) -> Iterator:
        for item in super()._decode_images(*args, **kwargs):
            self.filled += 1
            yield item

    def _make_batch(self, item) -> dict[str, torch.Tensor]:
        return {"image": item.images}


@pytest.mark.slow
@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_buffer_is_reused_only_after_the_two_next_batches_were_taken(images, decode, depth):
    """A GPU may still be copying from the buffer of a batch when the caller takes the next one."""
    count = 5 * (depth + 3)
    unlimited = stream_host_batches(make_host_loader(images, decode=decode, prefetch=64))  # a buffer for each batch
    expected = [micro.batch["image"].clone() for micro in itertools.islice(unlimited, count)]
    unlimited.close()
    loader = make_host_loader(images, decode=decode, prefetch=depth)
    stream = stream_host_batches(loader)
    previous = None
    for number, micro in enumerate(itertools.islice(stream, count)):
        end = time.monotonic() + 10
        while loader.filled < number + depth + 2 and time.monotonic() < end:
            time.sleep(0.001)
        assert loader.filled == number + depth + 2, "the background has filled every buffer that it may"
        assert torch.equal(micro.batch["image"], expected[number])
        assert previous is None or torch.equal(previous.batch["image"], expected[number - 1])
        previous = micro
    stream.close()


def make_host_loader(data: ShardSet, *, decode: str, prefetch: int) -> HostLoader:
    config = TrainConfig(seed=5, data=DataSettings(prefetch=prefetch), image=IMAGE, augment=AUGMENTATION)
    return HostLoader(config, data, device=torch.device("cpu"), decode=decode)


def stream_host_batches(loader: HostLoader) -> Iterator[MicroBatch]:
    return loader.train(make_orders(), epoch=0, start=0, micro_batch_size=2)


def test_a_caller_may_change_a_batch_and_its_ids(images):
    order = shuffle(np.arange(COUNT), seed=0, epoch=0, global_batch_size=8)
    before = order.ids.copy()
    stream = make_loader(images).train(lambda _: order, epoch=0, start=0, micro_batch_size=0)
    for value in next(stream).batch.values():
        value.fill_(0)
    stream.close()
    assert np.array_equal(order.ids, before)
    assert images.columns["number"].any()


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_damaged_record_ends_training_with_an_error_that_names_it(packed_copy, decode):
    data = ShardSet(packed_copy)
    victim = make_orders()(3).batch(2)[1:2]
    damage_images(data, victim)
    with pytest.raises(ShardError, match=f"image of '{data.read_keys(victim)[0]}' is damaged: its checksum differs"):
        train(data, 4, decode=decode)
    assert not list_background_threads()


@pytest.mark.parametrize(
    ("decode", "px"),
    [("cpu", 60_000), ("cpu", 8), *(pytest.param("dali", 60_000, marks=one.marks) for one in BACK_ENDS[1:])],
)
def test_a_shape_that_is_not_that_of_its_record_ends_training_with_an_error_that_names_it(packed_copy, decode, px):
    victim = make_orders()(3).batch(2)[1]
    with edit_index(packed_copy) as file:
        file["records/image/shape"][victim, :2] = px
    data = ShardSet(packed_copy)
    (key,), shape = data.read_keys(np.array([victim])), ShardSet(packed_copy).records["image"].shape[victim]
    said = rf"image of '{key}' is damaged: its header says \d+ x \d+ x 1, the index {px} x {px} x {shape[2]}\."
    with pytest.raises(ShardError, match=said):
        train(data, 4, decode=decode)
    assert not list_background_threads()


def list_background_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("loader", "decode", "resize"))]


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_closing_a_stream_early_ends_every_thread(images, decode):
    stream = make_loader(images, decode=decode).train(make_orders(), epoch=0, start=0, micro_batch_size=0)
    next(stream)
    assert "loader" in list_background_threads()
    stream.close()
    assert list_background_threads() == []


def test_an_exception_in_the_background_is_raised_in_its_turn():
    def items() -> Iterator[int]:
        yield from (1, 2, 3)
        raise RuntimeError("broken here")

    received = []
    with pytest.raises(RuntimeError, match="broken here"):
        for item, wait_s in prefetch(items(), 2, prepare=int, start=int):
            received.append(item)
            assert wait_s >= 0
    assert received == [1, 2, 3]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_items_keep_their_order_and_errors_their_turn_whatever_thread_prepares_them(threads):
    def prepare(item: int) -> int:
        time.sleep(0.002 * (item % 3))  # later items are ready sooner
        if item == 20:
            raise ValueError("twenty")
        return -item

    received: list[int] = []
    with pytest.raises(ValueError, match="twenty"):
        for item, _ in prefetch(itertools.count(), 3, prepare=prepare, start=str, threads=threads):
            received.append(int(item))
    assert received == [-item for item in range(20)]
    assert list(prefetch(iter([]), 3, prepare=prepare, start=str, threads=threads)) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_of_several_threads_one_is_the_callers_which_prepares_instead_of_waiting(threads):
    together, used = threading.Barrier(threads), set()

    def prepare(item: int) -> int:
        together.wait(timeout=60)  # nobody goes on before as many threads prepare
        used.add(threading.current_thread())
        return item

    items = range(6 * threads)
    with closing(prefetch(items, threads, prepare=prepare, start=int, threads=threads)) as stream:
        assert [item for item, _ in stream] == list(items)
    assert len(used) == threads and (threading.current_thread() in used) == (threads > 1)


def test_a_caller_for_whom_items_are_ready_prepares_none():
    by: list[threading.Thread] = []

    def prepare(item: int) -> int:
        by.append(threading.current_thread())
        return item

    with closing(prefetch(itertools.count(), 4, prepare=prepare, start=int, threads=2)) as stream:
        next(stream)  # for which it may have helped
        for taken in range(1, 20):
            end = time.monotonic() + 60
            while len(by) < taken + 4 + 2 and time.monotonic() < end:  # all that may exist
                time.sleep(0.001)
            before = len(by)
            next(stream)
            assert threading.current_thread() not in by[before:]


@pytest.mark.parametrize("threads", [1, 3])
def test_nobody_holds_what_a_caller_has_dropped(threads):
    class Memory:
        pass

    stream = prefetch(range(50), 2, prepare=lambda _: Memory(), start=lambda item: item, threads=threads)
    for item, _ in stream:
        gone = weakref.ref(item)
        del item
        next(stream)
        assert gone() is None


def test_the_background_runs_ahead_only_by_its_depth():
    prepared = []

    def items() -> Iterator[int]:
        for i in range(100):
            prepared.append(i)
            yield i

    stream = prefetch(items(), 3, prepare=int, start=int)
    next(stream)
    end = time.monotonic() + 10
    while len(prepared) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert prepared == [0, 1, 2, 3, 4]  # one taken, three ready, one in preparation
    stream.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_process_may_end_while_a_stream_is_open(threads):
    script = f"""
import itertools
from trainyard.data.prefetch import prefetch
stream = prefetch(itertools.count(), 4, prepare=int, start=int, threads={threads})
print(next(stream)[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def make_row(number: int) -> dict[str, np.ndarray]:
    return {"rows": np.full((16, 16), number, dtype=np.uint8)}


@pytest.fixture
def arrays(tmp_path: Path) -> ShardSet:
    """40 arrays of 256 bytes in 5 shards."""
    source = tmp_path / "raw"
    source.write_bytes(bytes(256))
    samples = [Sample(str(number), partial(make_row, number), source=source) for number in range(40)]
    return pack(samples, tmp_path / "packed", meta={}, workers=1, shard_mib=8 * 256 / 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_batches_of_uncompressed_arrays_do_not_depend_on_the_threads_that_copy_them(arrays, threads, monkeypatch):
    monkeypatch.setattr("trainyard.data.loader._LARGE_BYTES", 1)
    config = TrainConfig(seed=5, augment=AugmentSettings())
    loader = Loader(config, arrays, device=torch.device("cpu"), decode="cpu", threads=threads)
    used = set()
    read_into = arrays.read_into

    def note(*args, **options) -> None:
        used.add(threading.get_ident())
        read_into(*args, **options)
        time.sleep(0.002)

    arrays.read_into = note
    order = shuffle(np.arange(arrays.count), seed=5, epoch=0, global_batch_size=4)
    with closing(loader.train(lambda epoch: order, epoch=0, start=0, micro_batch_size=0)) as stream:
        for index, micro in enumerate(itertools.islice(stream, 20)):
            ids = order.batch(index % len(order))
            expected = np.stack(arrays.read_arrays("rows", ids))
            assert np.array_equal(micro.batch["rows"], expected) and np.array_equal(micro.batch["sample_id"], ids)
    assert len(used) == threads


@pytest.mark.slow
def test_each_thread_that_copies_has_a_batch_in_memory(arrays):
    """Asked for before a run starts: the host may not have as much."""
    config, many = TrainConfig(data=DataSettings(prefetch=2)), 4096  # of 256 bytes
    one, three = (
        Loader(config, arrays, device=torch.device("cpu"), decode="cpu", threads=threads) for threads in (1, 3)
    )
    assert one.count_host_bytes(many) == 4 * many * 256, "in preparation, two ready, one with the caller"
    assert three.count_host_bytes(many) == 6 * many * 256
    assert three.count_host_bytes(4) == one.count_host_bytes(4), "few bytes are copied by one thread"


def test_memory_that_a_gpu_copies_from_is_counted_as_torch_takes_it(arrays, images, monkeypatch):
    """In powers of two: up to twice what is asked for."""
    LateDevice(monkeypatch, eager=True)
    assert [count_pinned_bytes(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    config, gpu = TrainConfig(data=DataSettings(prefetch=2), image=IMAGE), torch.device("cuda", 0)
    rows = Loader(config, arrays, device=gpu, decode="cpu", threads=1)
    assert rows.count_host_bytes(65) == 4 * 128 * 256
    pixels = IMAGE.height_px * IMAGE.width_px * IMAGE.channels
    found = Loader(config, images, device=gpu, decode="cpu", threads=1).count_host_bytes(33)
    boxes = sum(4 * count_pinned_bytes(33 * int(r.size.max())) for n, r in images.records.items() if n != "image")
    assert found - boxes == 5 * count_pinned_bytes(33 * pixels) > 5 * 33 * pixels


def test_a_job_that_reads_no_noise_gets_none_and_else_the_same(images):
    config = TrainConfig(seed=5, image=IMAGE, augment=AUGMENTATION)
    batches = []
    for reads_noise in (True, False):
        loader = Loader(config, images, device=torch.device("cpu"), decode="cpu", threads=1, reads_noise=reads_noise)
        with closing(loader.train(make_orders(), epoch=0, start=0, micro_batch_size=0)) as stream:
            batches.append([dict(micro.batch) for micro in itertools.islice(stream, 12)])
    for ours, theirs in zip(*batches, strict=True):
        del ours["noise"]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_memory_of_a_batch_is_lent_again_only_when_nobody_holds_it():
    memory = BatchMemory()
    first = torch.from_numpy(memory.lend((4, 8), "float32"))
    view, place = first.view(-1)[3:], first.data_ptr()
    del first
    other = torch.from_numpy(memory.lend((4, 8), "float32"))
    assert other.data_ptr() != place, "a view of it is alive"
    array = view.numpy()
    del view
    assert torch.from_numpy(memory.lend((4, 8), "float32")).data_ptr() not in (place, other.data_ptr())
    del array
    again = torch.from_numpy(memory.lend((3, 8), "float32"))
    assert again.data_ptr() == place and again.shape == (3, 8), "a smaller batch fits"
    del again
    assert torch.from_numpy(memory.lend((5, 8), "int16")).data_ptr() == place, "what came back last is lent first"
    larger = memory.lend((100, 8), "float32")
    assert larger.shape == (100, 8) and larger.ctypes.data % 64 == 0, "malloc aligns to 16"


def test_channels_last_changes_the_layout_but_no_value(images):
    (plain,), (last,) = (train(images, 1, channels_last=layout)[0] for layout in (False, True))
    assert torch.equal(plain.batch["image"], last.batch["image"])
    assert last.batch["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_data_without_images_is_read_too_from_any_batch_on(images, start):
    """Ten batches: more than those whose random numbers are drawn together, over the ends of epochs of four."""
    del images.records["image"]
    steps = train(images, 10, start=start)
    for number, (micro,) in enumerate(steps, start):
        epoch, ids = 3 + number // 4, make_orders()(3 + number // 4).batch(number % 4)
        assert "image" not in micro.batch and micro.batch["sample_id"].tolist() == ids.tolist()
        points = np.stack([make_points(i) for i in images.columns["number"][ids].tolist()])
        assert np.array_equal(micro.batch["points"], points) and micro.batch["points"].is_contiguous()
        assert np.array_equal(micro.batch["noise"], augment.draw_noise(seed=5, epoch=epoch, sample_ids=ids))
    assert not list_background_threads()


def test_a_damaged_array_is_an_error_in_its_turn(packed_copy):
    data = ShardSet(packed_copy)
    del data.records["image"]
    victim = make_orders()(3).batch(2)[5:6]
    shard = next(shard for shard in reversed(data.shards) if shard.first <= victim[0])
    with shard.path.open("r+b") as file:
        file.seek(int(data.records["points"].start[victim[0]]))
        file.write(b"?")
    stream = make_loader(data).train(make_orders(), epoch=3, start=0, micro_batch_size=0)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(ShardError, match=f"points of '{data.read_keys(victim)[0]}' is damaged: its checksum differs"):
        next(stream)
    assert not list_background_threads()


@pytest.mark.parametrize(
    ("wanted", "importable", "chosen", "reason"),
    [
        ("auto", True, "dali", "installed"),
        ("auto", False, "cpu", "not installed"),
        ("dali", True, "dali", "requested"),
        ("cpu", True, "cpu", "requested"),
        ("cpu", False, "cpu", "requested"),
    ],
)
def test_the_decoder_is_chosen_with_a_reason(wanted, importable, chosen, reason):
    decoder, why = choose_decoder(wanted, has_dali=importable)
    assert decoder == chosen and reason in why


def test_requesting_dali_without_dali_says_what_to_type():
    with pytest.raises(UserError, match=r"data.decode=dali, but nvidia.dali is not installed.*Use data.decode=cpu"):
        choose_decoder("dali", has_dali=False)


def test_the_next_order_is_computed_once_and_in_the_background_while_an_epoch_is_read(images):
    """And whoever asks for an order that is there does not wait for the one that is being computed."""
    computed: list[tuple[int, str]] = []
    is_held, may_end = threading.Event(), threading.Event()

    def compute(epoch: int) -> EpochOrder:
        computed.append((epoch, threading.current_thread().name))
        if epoch == 5:
            is_held.set()
            assert may_end.wait(60)
        return make_orders(1)(epoch)

    orders, main = EpochOrders(compute), threading.current_thread().name
    first = orders(3)
    stream = make_loader(images).train(orders, epoch=3, start=0, micro_batch_size=0)
    take_steps(stream, 1)  # of as many as there are samples
    deadline = time.monotonic() + 60
    while len(computed) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert computed == [(3, main), (4, "order_0")]
    take_steps(stream, len(first) - 1)
    assert is_held.wait(60), "it reads on by itself"
    with ThreadPoolExecutor(1) as training:
        asked = training.submit(orders, 4)
        try:
            assert asked.result(timeout=60) is orders(4)
        finally:
            may_end.set()
    take_steps(stream, len(first))
    assert orders(5) is orders(5) and computed[:3] == [(3, main), (4, "order_0"), (5, "order_0")]
    assert len({epoch for epoch, _ in computed}) == len(computed)
    stream.close()
    assert orders(3) is not first and computed[-1] == (3, main)  # two are kept


def test_an_order_that_cannot_be_computed_says_so_to_everyone_who_asks():
    orders = EpochOrders(
        lambda epoch: group_by_identity(
            np.arange(8), np.arange(8), samples_per_identity=3, seed=0, epoch=epoch, global_batch_size=8
        )
    )
    for _ in range(2):
        with pytest.raises(UserError, match=r"global_batch_size=8 is not a multiple"):
            orders(0)
