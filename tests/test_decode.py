import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images import encode, texture
from trainyard.data import decode_cpu
from trainyard.data.augment import Parameters, neutral
from trainyard.data.decode_cpu import Request

dali = pytest.importorskip("trainyard.data.decode_dali", reason="needs nvidia.dali")

SIZE = (32, 40)
FILL = 200


def boxes(height: int, width: int) -> list[list[int]]:
    """Return a box of each kind: whole, inside, over each edge, around, outside, of the size of the result."""
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


def encoded(format: str, channels: int) -> list[np.ndarray]:
    images = [texture(i, 60 + 13 * i, 95 - 7 * i, channels) for i in range(5)]
    return [np.frombuffer(encode(image, format), dtype=np.uint8) for image in images]


def request(records: list[np.ndarray], box: list[list[int]], flip: bool, channels: int) -> Request:
    shapes = [Image.open(io.BytesIO(record.data)).size[::-1] for record in records]
    p = neutral(np.array(box, dtype=np.int32))
    mirrored = Parameters(p.box, np.full(len(box), flip), p.theta, p.gain, p.contrast)
    out = torch.zeros((len(box), *SIZE, channels), dtype=torch.uint8)
    return Request(records, np.array([[*shape, channels] for shape in shapes], dtype=np.int32), mirrored, out)


def requests(format: str, source_channels: int, channels: int) -> list[Request]:
    """Return every image with every box, unmirrored and mirrored; the last batch is smaller than the others."""
    made = []
    for number, record in enumerate(encoded(format, source_channels)):
        height, width = Image.open(io.BytesIO(record.data)).size[::-1]
        box = boxes(height, width)[: 3 if number == 4 else None]
        made += [request([record] * len(box), box, flip, channels) for flip in (False, True)]
    return made


def by_cpu(asked: list[Request], channels: int, threads: int = 2) -> list[torch.Tensor]:
    return [out.clone() for out in decode_cpu.decode(iter(asked), channels=channels, fill=FILL, threads=threads)]


def by_dali(asked: list[Request], channels: int) -> list[torch.Tensor]:
    stream = dali.decode(
        iter(asked),
        channels=channels,
        fill=FILL,
        threads=2,
        max_batch_size=10,
        device_id=None,
    )
    return [out.clone() for out in stream]


FORMATS = [("jpg", 1, 1), ("png", 1, 1), ("jpg", 3, 3), ("png", 3, 3), ("jpg", 3, 1), ("jpg", 1, 3)]


@pytest.mark.parametrize(("format", "source_channels", "channels"), FORMATS)
def test_dali_and_the_reference_give_the_same_bytes(format, source_channels, channels):
    ours = by_cpu(requests(format, source_channels, channels), channels)
    theirs = by_dali(requests(format, source_channels, channels), channels)
    assert [len(batch) for batch in theirs] == [10] * 8 + [3] * 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def pillow(record: np.ndarray, box: list[int], channels: int) -> np.ndarray:
    """Return the box with FILL around the image, resized: Pillow alone."""
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
    asked = requests(format, channels, channels)
    for wanted, found in zip(asked, by_cpu(asked, channels), strict=True):
        for i, box in enumerate(wanted.parameters.box.tolist()):
            expected = pillow(wanted.records[i], box, channels).astype(int)
            expected = expected[:, ::-1] if wanted.parameters.flip[i] else expected
            assert np.abs(found[i].numpy() - expected).max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_a_box_of_the_size_of_the_result_is_copied_unchanged(channels, flip):
    source = texture(0, 70, 80, channels)
    record = np.frombuffer(encode(source, "png"), dtype=np.uint8)
    expected = source[4:36, 6:46]
    for decode in (by_cpu, by_dali):
        (found,) = decode([request([record], [[4, 6, *SIZE]], flip, channels)], channels)
        assert np.array_equal(found[0], expected[:, ::-1] if flip else expected)


def test_gray_of_a_colour_jpeg_is_its_luma_plane():
    """Converting decoded RGB instead clips saturated colours: several levels off, and not what DALI gives."""
    colours = np.kron(np.random.default_rng(0).integers(0, 2, (4, 5, 3)) * 255, np.ones((8, 8, 1))).astype(np.uint8)
    record = np.frombuffer(encode(colours, "jpg"), dtype=np.uint8)
    with Image.open(io.BytesIO(record.data)) as image:
        image.draft("YCbCr", image.size)
        luma = np.asarray(image)[..., 0]
        assert image.mode == "YCbCr"
    for decode in (by_cpu, by_dali):
        (found,) = decode([request([record], [[0, 0, *SIZE]], False, 1)], 1)
        assert np.array_equal(found[0, :, :, 0], luma)


def test_the_number_of_threads_changes_nothing():
    one, four = (by_cpu(requests("jpg", 3, 3), 3, threads) for threads in (1, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


def test_no_request_gives_no_batch():
    assert by_cpu([], 1) == by_dali([], 1) == []


def test_pictures_of_very_different_sizes_share_a_batch():
    records = [
        np.frombuffer(encode(texture(i, *size), "jpg"), dtype=np.uint8)
        for i, size in enumerate([(1, 1), (9, 700), (800, 16)])
    ]
    box = [[0, 0, 1, 1], [0, 0, 9, 700], [0, 0, 800, 16]]
    ours, theirs = (decode([request(records, box, True, 1)], 1)[0] for decode in (by_cpu, by_dali))
    assert torch.equal(ours, theirs)
    assert (ours[0] == ours[0, 0, 0]).all()


@pytest.mark.parametrize("limit_bytes", [1, 60_000])
def test_how_many_requests_dali_takes_at_once_changes_nothing(limit_bytes, monkeypatch):
    together = by_dali(requests("jpg", 3, 3), 3)
    monkeypatch.setattr(dali, "_TOGETHER_BYTES", limit_bytes)
    apart = by_dali(requests("jpg", 3, 3), 3)
    assert len(apart) == len(together) == 10
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_threads_of_a_pool_ask_for_no_helpers_and_leave_the_process_its_number():
    def number() -> int:
        return torch.get_num_threads()

    before = number()
    try:
        torch.set_num_threads(3)
        with decode_cpu.get_pool(2) as pool, ThreadPoolExecutor(1) as later:
            assert {future.result() for future in [pool.submit(number) for _ in range(8)]} == {1}
            assert number() == later.submit(number).result() == 3
    finally:
        torch.set_num_threads(before)
