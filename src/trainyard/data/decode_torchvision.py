"""Decodes JPEG with torchvision, on a GPU with nvJPEG; all else on the host, as the reference does."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from trainyard.data.decode_cpu import AnyRequest, crop, decode_image, get_pool, resize
from trainyard.data.transfer import CopyStream

_SEQUENTIAL_OR_PROGRESSIVE = (0xC0, 0xC1, 0xC2)  # Huffman-coded frames (ITU T.81, table B.1); nvJPEG has no other
_OTHER_FRAMES = (*range(0xC3, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_SCAN = 0xDA


def decode(
    requests: Iterator[AnyRequest],
    *,
    channels: int,
    fill: int,
    threads: int,
    device: torch.device,
    copies: CopyStream | None,
) -> Iterator[tuple[AnyRequest, Tensor]]:
    """Decode, crop, resize and mirror, one micro-batch per request, as `decode_cpu.decode` does.

    Against it, JPEG differs by at most one level on the host, where the same decoder runs and only the resizing is in
    float32; on a GPU, by nvJPEG's rounding as well. Images that nvJPEG would decode to something else
    (`is_decodable_on_gpu`) are decoded on the host, bit-equal to the reference.

    Args:
        copies: the stream to decode on; None if `device` is the host.

    Yields:
        request: in the order of `requests`.
        images: (B, H, W, C) uint8, new memory on the GPU; or the request's `out`, if no image was decoded there.
    """
    with get_pool(threads) as pool:

        def run() -> tuple[AnyRequest, dict[int, Tensor]] | None:
            request = next(requests, None)
            return None if request is None else (request, _decode_jpegs(request.records, channels, device))

        def resize_all(decoded: tuple[AnyRequest, dict[int, Tensor]]) -> tuple[AnyRequest, Tensor]:
            return decoded[0], _resize_all(*decoded, channels=channels, fill=fill, device=device, pool=pool)

        # torchvision decodes on a stream of its own, into memory that torch's allocator may have taken back while this
        # stream still read it; so the previous batch must be finished, as if the memory were the decoder's.
        yield from map(resize_all, iter(run, None)) if copies is None else copies.run_and_copy(run, resize_all)


def is_decodable_on_gpu(record: np.ndarray, channels: int) -> bool:
    """Return whether nvJPEG, as torchvision calls it, decodes an image to what the reference does.

    Of JPEG that is gray, and colour whose chroma is stored at full resolution, because torchvision cannot ask for the
    interpolation of chroma that libjpeg does ("fancy upsampling"); gray of colour JPEG is its luma, which needs none.

    Args:
        record: an encoded image of any format.
        channels: of the result.
    """
    sampling = _read_sampling(record.data)
    if sampling is None:
        return False
    luma, *chroma = sampling
    return not chroma or (set(chroma) == {(1, 1)} and max(luma) <= (1 if channels == 3 else 2))


def explain_unusable(device: torch.device) -> str | None:
    """Return why torchvision cannot decode JPEG on a device; None if it can. Decodes a small image to find out."""
    try:
        _decode_jpegs([_encode_probe()], 1, device)
    except (ImportError, AttributeError, RuntimeError) as error:  # not installed, built without, no such device
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _encode_probe() -> np.ndarray:
    target = io.BytesIO()
    Image.new("L", (16, 16), 128).save(target, "JPEG")
    return np.frombuffer(bytearray(target.getvalue()), dtype=np.uint8)


def _decode_jpegs(records: list[np.ndarray], channels: int, device: torch.device) -> dict[int, Tensor]:
    """Decode the images that are decodable on a GPU; return each (C, H, W) uint8 by its index."""
    # takes a second to import, and fails with a CPU-only torch
    from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-untyped]

    chosen = [i for i, record in enumerate(records) if is_decodable_on_gpu(record, channels)]
    if not chosen:
        return {}
    encoded = [torch.from_numpy(records[i]) for i in chosen]
    mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
    return dict(zip(chosen, decode_jpeg(encoded, mode=mode, device=device), strict=True))


def _resize_all(
    request: AnyRequest,
    decoded: dict[int, Tensor],
    *,
    channels: int,
    fill: int,
    device: torch.device,
    pool: ThreadPoolExecutor,
) -> Tensor:
    """Crop, resize and mirror what was decoded; decode the rest on the host, where the device's part goes on."""
    boxes, flip = request.parameters.box, request.parameters.flip.tolist()
    out = torch.empty_like(request.out, device=device) if decoded and device.type != "cpu" else request.out

    def decode_on_host(i: int) -> None:
        resize(crop(decode_image(request.records[i], channels), boxes[i], fill), request.out[i], flip=flip[i])

    rest = [i for i in range(len(request.records)) if i not in decoded]
    on_host = [pool.submit(decode_on_host, i) for i in rest]
    for i, image_CHW in decoded.items():
        _resize_in_float(crop(image_CHW.permute(1, 2, 0), boxes[i], fill), out[i], flip=flip[i])
    for i, done in zip(rest, on_host, strict=True):
        done.result()
        if out is not request.out:
            out[i].copy_(request.out[i], non_blocking=True)
    return out


def _resize_in_float(image_HWC: Tensor, out_HWC: Tensor, *, flip: bool) -> None:
    """Resize an image into `out_HWC`, mirrored if `flip`, as `decode_cpu.resize` does; CUDA has no kernel for uint8."""
    height, width, _ = out_HWC.shape
    if image_HWC.shape != out_HWC.shape:
        source_1CHW = image_HWC.permute(2, 0, 1)[None].float()
        resized_1CHW = F.interpolate(source_1CHW, (height, width), mode="bilinear", antialias=True)
        image_HWC = resized_1CHW.round_()[0].permute(1, 2, 0)
    out_HWC.copy_(image_HWC.flip(1) if flip else image_HWC)


def _read_sampling(data: memoryview) -> list[tuple[int, int]] | None:
    """Return the vertical and horizontal sampling factor of each component; None if nvJPEG does not decode the image.

    Three components are taken for YCbCr only if the file says so (JFIF, or Adobe's transform 1), as libjpeg does.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    at, is_ycc = 2, False
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        body = bytes(data[at + 4 : at + 2 + length])
        if marker == 0xE0 and body[:4] == b"JFIF":
            is_ycc = True
        elif marker == 0xEE and body[:5] == b"Adobe":
            is_ycc = is_ycc or body[11:12] == b"\x01"
        elif marker in _SEQUENTIAL_OR_PROGRESSIVE:
            precision, count = (body[0], body[5]) if len(body) > 5 else (0, 0)
            if precision != 8 or count not in (1, 3) or (count == 3 and not is_ycc) or len(body) < 6 + 3 * count:
                return None
            return [(factors & 15, factors >> 4) for factors in body[7 : 7 + 3 * count : 3]]
        elif marker in _OTHER_FRAMES or marker == _SCAN:
            return None
        at += 2 + length
    return None
