import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
