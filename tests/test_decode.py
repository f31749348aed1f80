import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.images import encode_image, make_texture
from trainyard.data import decode_cpu
from trainyard.data.augment import build_neutral
from trainyard.data.decode_cpu import Request

dali = pytest.importorskip("trainyard.data.decode_dali", reason="needs nvidia.dali")

SIZE = (32, 40)
FILL = 200


def list_boxes(height: int, width: int) -> list[list[int]]:
    """Return a box of each kind: whole, inside, over each edge, around, outside, the size of the result."""
    return [
        [0, 0, height, width],
        [5, 3, height - 9, width - 4],
        [-10, -7, height, width],
        [height - 20, width - 30, 50, 50],
        [-8, -8, height + 16, width + 16],
        [height + 5, 2, 30, 30],
        [-40, -60, 30, 50],
        [4, 6, *SIZE],
        [-3, 6, *SIZE],
        [10, 10, 9, 7],
    ]


def encode_textures(format: str, channels: int) -> list[np.ndarray]:
    images = [make_texture(i, 60 + 13 * i, 95 - 7 * i, channels) for i in range(5)]
    return [wrap_bytes(encode_image(image, format)) for image in images]


def wrap_bytes(data: bytes) -> np.ndarray:
    """Return an encoded image as a record: in memory of its own, as the reader returns it."""
    return np.frombuffer(bytearray(data), dtype=np.uint8)


def make_request(records: list[np.ndarray], box: list[list[int]], flip: bool, channels: int) -> Request:
    shapes = [Image.open(io.BytesIO(record.data)).size[::-1] for record in records]
    p = build_neutral(np.array(box, dtype=np.int32))
    mirrored = replace(p, flip=np.full(len(box), flip))
    out = torch.zeros((len(box), *SIZE, channels), dtype=torch.uint8)
    return Request(records, np.array([[*shape, channels] for shape in shapes], dtype=np.int32), mirrored, out)


def make_requests(format: str, source_channels: int, channels: int) -> list[Request]:
    """Return every image with every box, unmirrored and mirrored; the last two batches are smaller."""
    requests = []
    for number, record in enumerate(encode_textures(format, source_channels)):
        height, width = Image.open(io.BytesIO(record.data)).size[::-1]
        box = list_boxes(height, width)[: 3 if number == 4 else None]
        requests += [make_request([record] * len(box), box, flip, channels) for flip in (False, True)]
    return requests


def decode_on_cpu(requests: list[Request], channels: int, threads: int = 2) -> list[torch.Tensor]:
    return [
        images.clone() for _, images in decode_cpu.decode(iter(requests), channels=channels, fill=FILL, threads=threads)
    ]


def decode_with_dali(requests: list[Request], channels: int) -> list[torch.Tensor]:
    decoder = dali.ImageDecoder(channels=channels, fill=FILL, threads=2)
    return [images.clone() for _, images in decoder.decode(iter(requests), max_batch_size=10)]


FORMATS = [("jpg", 1, 1), ("png", 1, 1), ("jpg", 3, 3), ("png", 3, 3), ("jpg", 3, 1), ("jpg", 1, 3)]


@pytest.mark.parametrize(("format", "source_channels", "channels"), FORMATS)
def test_dali_and_the_reference_give_the_same_bytes(format, source_channels, channels):
    ours = decode_on_cpu(make_requests(format, source_channels, channels), channels)
    theirs = decode_with_dali(make_requests(format, source_channels, channels), channels)
    assert [len(batch) for batch in theirs] == [10] * 8 + [3] * 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# The graph of a GPU


def list_operators(output: Any) -> dict[str, str]:
    """Return what DALI was told of each operator of a graph, by its name, from the output backwards."""
    told = {}
    pending = [output.source]
    while pending:
        operator = pending.pop()
        text = str(operator.spec)
        told[text.split(":")[0].removeprefix("OpSpec for ").strip()] = text
        pending += [node.source for node in operator.inputs]
    return told


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gpu_decodes_whole_images_with_kernels_whose_levels_do_not_depend_on_the_place_in_a_batch(channels):
    with dali.Pipeline(batch_size=4, num_threads=1, device_id=0):
        told = list_operators(dali._build_gpu_graph(lambda: None, channels=channels, fill=FILL))
    # neither decoders__ImageSlice nor decoders__ImageCrop, which decode a region
    assert set(told) == {"Flip", "Resize", "Cast", "Slice", "ExternalSource", "decoders__Image"}
    for argument in ("device: mixed", "hw_decoder_load: 0.000000", "jpeg_fancy_upsampling: True"):
        assert f"    {argument}\n" in told["decoders__Image"]


def test_every_target_has_the_dali_whose_graph_is_looked_at_here():
    """And the nvImageCodec of which `_build_gpu_graph` says that regions fail: with another, look again."""
    installed = next(d.version for d in metadata.distributions() if d.name.startswith("nvidia-dali"))
    every = sorted(Path(__file__).parents[1].glob("containers/*.lock"))
    locks = [lock for lock in every if lock.stem != "tests"]  # what the tests need on top of an image
    for lock in locks:
        pinned = dict(re.findall(r"^(nvidia-\w+)-c\w+==(\S+)", lock.read_text(), re.MULTILINE))
        assert pinned["nvidia-dali"] == installed, lock.name
        assert pinned["nvidia-nvimgcodec"].startswith("0.9.0."), lock.name
    assert len(locks) == 5


@pytest.mark.parametrize(("format", "channels"), [("jpg", 1), ("jpg", 3), ("png", 3)])
def test_the_graph_of_a_gpu_crops_pads_resizes_and_mirrors_as_the_reference_does(format, channels):
    """With the decoder on the host, to two levels, for both round otherwise.

    At the edges DALI repeats the last pixel for the part of the filter that lies outside, where Pillow and torch leave
    it out of the mean: several levels in a noisy image, which are not compared.
    """
    requests = make_requests(format, channels, channels)
    feed = dali._Feed(most=3, channels=channels, on_gpu=True)
    feed.start(iter(requests))
    pipeline = dali.Pipeline(batch_size=30, num_threads=2, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        pipeline.set_outputs(dali._build_gpu_graph(feed.read_batch, channels=channels, fill=FILL, device="cpu"))
    pipeline.build()
    found = []
    while (images := dali._run_pipeline(pipeline)) is not None:
        found += [np.array(images.at(i)) for i in range(len(images))]
    expected = torch.cat(decode_on_cpu(make_requests(format, channels, channels), channels)).numpy()
    difference = np.abs(np.stack(found).astype(int) - expected.astype(int))
    assert difference[:, 1:-1, 1:-1].max() <= 2


@pytest.mark.parametrize(("on_gpu", "sizes"), [(False, [3, 3, 3]), (True, [1, 1, 1, 1, 1, 1, 1, 1, 1])])
def test_a_batch_is_as_large_as_what_is_decoded_of_it(on_gpu, sizes, monkeypatch):
    """An eighth of each image is used; a GPU decodes all of it."""
    monkeypatch.setattr(dali, "_GROUP_BYTES", 3 * 6 * 10 * 10)
    record = wrap_bytes(encode_image(make_texture(0, 60, 80, 1), "png"))
    requests = [make_request([record], [[0, 0, 30, 20]], False, 1) for _ in range(9)]
    feed = dali._Feed(most=9, channels=1, on_gpu=on_gpu)
    feed.start(iter(requests))
    found = []
    while feed.pending or not found:
        try:
            found.append(len(feed.read_batch()[0]))
        except StopIteration:
            break
    assert found == sizes


# JPEG


CHROMA = {"gray": None, "4:4:4": 0, "4:2:2": 1, "4:2:0": 2}  # what Pillow calls the subsampling
JPEG_KINDS = [(chroma, progressive) for chroma in CHROMA for progressive in (False, True)]


def encode_jpeg(height: int, width: int, chroma: str, progressive: bool) -> np.ndarray:
    """Encode colours that change from pixel to pixel, so that every way to interpolate chroma gives other levels."""
    image = make_texture(height * width, height, width, 1 if chroma == "gray" else 3)
    options = {} if chroma == "gray" else {"subsampling": CHROMA[chroma]}
    target = io.BytesIO()
    Image.fromarray(image.squeeze()).save(target, "JPEG", quality=92, progressive=progressive, **options)
    return wrap_bytes(target.getvalue())


@pytest.mark.parametrize(("chroma", "progressive"), JPEG_KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_pillow_and_dali_decode_jpeg_to_the_same_levels(chroma, progressive, channels):
    """Both call libjpeg-turbo with its integer transform and its interpolation of chroma ("fancy upsampling")."""
    for height, width in [(64, 48), (61, 83), (17, 9), (8, 7)]:
        record = encode_jpeg(height, width, chroma, progressive)
        expected = decode_cpu.decode_image(record, channels)
        p = build_neutral(np.array([[0, 0, height, width]], dtype=np.int32))
        out = torch.zeros((1, height, width, channels), dtype=torch.uint8)
        request = Request([record], np.array([[height, width, channels]], dtype=np.int32), p, out)
        assert torch.equal(decode_with_dali([request], channels)[0][0], expected)


def resize_with_pillow(record: np.ndarray, box: list[int], channels: int) -> np.ndarray:
    """Return the box, with FILL around the image, resized by Pillow only."""
    y, x, height, width = box
    mode, around = ("L", FILL) if channels == 1 else ("RGB", (FILL,) * 3)
    image = Image.open(io.BytesIO(record.data)).convert(mode)
    canvas = Image.new(mode, (width, height), around)
    canvas.paste(image, (-x, -y))
    resized = np.asarray(canvas.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR))
    return resized.reshape(*SIZE, channels)


@pytest.mark.parametrize(("format", "channels"), [("jpg", 1), ("png", 1), ("jpg", 3), ("png", 3)])
def test_the_reference_agrees_with_pillow_to_one_level(format, channels):
    """Both sum with integer weights, but round the weights to different numbers of bits."""
    requests = make_requests(format, channels, channels)
    for request, found in zip(requests, decode_on_cpu(requests, channels), strict=True):
        for i, box in enumerate(request.parameters.box.tolist()):
            expected = resize_with_pillow(request.records[i], box, channels).astype(int)
            expected = expected[:, ::-1] if request.parameters.flip[i] else expected
            assert np.abs(found[i].numpy() - expected).max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_a_box_of_the_size_of_the_result_is_copied_unchanged(channels, flip):
    source = make_texture(0, 70, 80, channels)
    record = wrap_bytes(encode_image(source, "png"))
    expected = source[4:36, 6:46]
    for decode in (decode_on_cpu, decode_with_dali):
        (found,) = decode([make_request([record], [[4, 6, *SIZE]], flip, channels)], channels)
        assert np.array_equal(found[0], expected[:, ::-1] if flip else expected)


def test_gray_of_a_colour_jpeg_is_its_luma_plane():
    """Converting decoded RGB clips saturated colours: several levels off, and different from DALI."""
    colours = np.kron(np.random.default_rng(0).integers(0, 2, (4, 5, 3)) * 255, np.ones((8, 8, 1))).astype(np.uint8)
    record = wrap_bytes(encode_image(colours, "jpg"))
    with Image.open(io.BytesIO(record.data)) as image:
        image.draft("YCbCr", image.size)
        luma = np.asarray(image)[..., 0]
        assert image.mode == "YCbCr"
    for decode in (decode_on_cpu, decode_with_dali):
        (found,) = decode([make_request([record], [[0, 0, *SIZE]], False, 1)], 1)
        assert np.array_equal(found[0, :, :, 0], luma)


def test_the_number_of_threads_changes_nothing():
    one, four = (decode_on_cpu(make_requests("jpg", 3, 3), 3, threads) for threads in (1, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_size_are_resized_together_to_the_levels_of_each_alone(channels, threads):
    """Three sizes, mixed: six images, two and one; every other one is mirrored."""
    sources = [make_texture(i, 70, 90, channels) for i in range(9)]
    sizes = [((48, 60), (33, 61), (62, 20))[kind] for kind in (0, 1, 0, 0, 2, 0, 1, 0, 0)]
    box = [[i, 2 * i, *size] for i, size in enumerate(sizes)]
    request = make_request([wrap_bytes(encode_image(image, "png")) for image in sources], box, False, channels)
    request.parameters.flip[::2] = True
    (ours,), (theirs,) = decode_on_cpu([request], channels, threads), decode_with_dali([request], channels)
    assert torch.equal(ours, theirs)
    for i, (y, x, height, width) in enumerate(box):
        crop_CHW = torch.from_numpy(sources[i]).permute(2, 0, 1)[:, y : y + height, x : x + width]
        resized_CHW = F.interpolate(crop_CHW[None], SIZE, mode="bilinear", antialias=True)[0]
        assert torch.equal(ours[i].permute(2, 0, 1), resized_CHW.flip(2) if i % 2 == 0 else resized_CHW)


def test_no_request_gives_no_batch():
    assert decode_on_cpu([], 1) == decode_with_dali([], 1) == []


def test_images_of_very_different_sizes_share_a_batch():
    records = [
        wrap_bytes(encode_image(make_texture(i, *size), "jpg")) for i, size in enumerate([(1, 1), (9, 700), (800, 16)])
    ]
    box = [[0, 0, 1, 1], [0, 0, 9, 700], [0, 0, 800, 16]]
    ours, theirs = (decode([make_request(records, box, True, 1)], 1)[0] for decode in (decode_on_cpu, decode_with_dali))
    assert torch.equal(ours, theirs)
    assert (ours[0] == ours[0, 0, 0]).all()


@pytest.mark.parametrize("limit_bytes", [1, 60_000])
def test_the_size_of_dalis_batches_changes_nothing(limit_bytes, monkeypatch):
    grouped = decode_with_dali(make_requests("jpg", 3, 3), 3)
    monkeypatch.setattr(dali, "_GROUP_BYTES", limit_bytes)
    single = decode_with_dali(make_requests("jpg", 3, 3), 3)
    assert len(single) == len(grouped) == 10
    assert all(torch.equal(a, b) for a, b in zip(single, grouped, strict=True))


def test_pool_threads_use_one_intra_op_thread_and_leave_the_process_its_number():
    def count_threads() -> int:
        return torch.get_num_threads()

    before = count_threads()
    try:
        torch.set_num_threads(3)
        with decode_cpu.get_pool(2) as pool, ThreadPoolExecutor(1) as later:
            assert {future.result() for future in [pool.submit(count_threads) for _ in range(8)]} == {1}
            assert count_threads() == later.submit(count_threads).result() == 3
    finally:
        torch.set_num_threads(before)
