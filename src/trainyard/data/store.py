"""Stores images as the model's input: option `packing.store`.

Where loading does nothing to an image but crop a fixed region, resize it and mirror it, packing can do the first two
once: a batch is then the same, bit by bit, for a fraction of the work. Stored are the pixels of the reference
decoder (`decode_cpu.py`); mirroring, warping and levels are still drawn for each epoch.
"""

import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from trainyard.choice import Choice
from trainyard.config.settings import JPEG, KEEP, AugmentSettings, ImageSettings, explain_more_than_resize
from trainyard.data.index import IMAGE, INPUT_PNG, INPUTS, REGION, Records
from trainyard.errors import UserError

if TYPE_CHECKING:
    from trainyard.data.shards import ShardSet

_PNG_LEVEL = 1  # of zlib: higher ones save a few per cent, take several times as long to write, and decode no sooner
_PNG_UP = 2  # filter type "Up" (PNG specification, 9.2)
_PNG_COLOR = {1: 0, 3: 2}  # colour type by channels


@dataclass(frozen=True)
class JpegStore:
    """Options of encoding images again, with losses. Its fields are part of the identity of packed data."""

    longest_side_px: int  # 0: no image is scaled
    quality: int

    def encode(self, data: bytes) -> bytes:
        """Return an image as JPEG, scaled down if it is longer; the same bytes if JPEG would take no fewer."""
        with Image.open(io.BytesIO(data)) as file:
            image = file if file.mode in ("L", "RGB") else file.convert("RGB")
            longest = max(image.size)
            if 0 < self.longest_side_px < longest:
                scale = self.longest_side_px / longest
                size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
                image = image.resize(size, Image.Resampling.LANCZOS)
            image.save(jpeg := io.BytesIO(), "JPEG", quality=self.quality, optimize=True)
        return min(data, jpeg.getvalue(), key=len)


@dataclass(frozen=True)
class InputStore:
    """Options of resizing images. Its fields are part of the identity of packed data."""

    kind: str  # of the records: INPUT_PNG or INPUT_RAW
    height_px: int
    width_px: int
    channels: int
    fill: int  # gray level of pixels outside the image

    @property
    def pixel_bytes(self) -> int:
        """Bytes of an image, uncompressed."""
        return self.height_px * self.width_px * self.channels

    def encode(self, data: bytes, region: np.ndarray) -> bytes | memoryview:
        """Return the record of an image.

        Args:
            data: the encoded image.
            region: (4,) y, x, height, width in px of it.
        """
        pixels = self.resize(data, region)
        return encode_png(pixels) if self.kind == INPUT_PNG else pixels.reshape(-1).data

    def resize(self, data: bytes, region: np.ndarray) -> np.ndarray:
        """Return (height_px, width_px, channels) uint8, as the loader's host stage makes them; see `encode`."""
        import torch

        from trainyard.data.decode_cpu import crop, decode_image, resize

        image_HWC = decode_image(np.frombuffer(data, dtype=np.uint8), self.channels)
        out_HWC = torch.empty((self.height_px, self.width_px, self.channels), dtype=torch.uint8)
        resize(crop(image_HWC, region, self.fill), out_HWC, flip=False)
        return out_HWC.numpy()


def load_resizing() -> None:
    """Load what `InputStore.encode` needs. Packing that keeps bytes starts sooner and is smaller without torch."""
    import torch

    import trainyard.data.decode_cpu  # noqa: F401

    torch.set_num_threads(1)  # packing has a process for each core


def describe_store(kind: str, image: ImageSettings) -> dict[str, Any]:
    """Return the entry `input` of the `meta` of packed data, for `packing.store` other than keep."""
    return asdict(InputStore(kind, image.height_px, image.width_px, image.channels, image.fill))


Store = InputStore | JpegStore


def read_store(meta: Mapping[str, Any]) -> Store | None:
    """Return how packing changes images by its `meta`; None if it keeps their bytes."""
    if JPEG in meta:
        return JpegStore(**meta[JPEG])
    return InputStore(**meta["input"]) if "input" in meta else None


def name_store(records: Mapping[str, Records], meta: Mapping[str, Any]) -> str:
    """Return the value of `packing.store=` that stores images as in some packed data."""
    if JPEG in meta:
        return " ".join([JPEG, *(f"packing.{name}={value}" for name, value in meta[JPEG].items())])
    return records[IMAGE].kind if has_inputs(records) else KEEP


def find_region(row: Mapping[str, Any], height: int, width: int) -> np.ndarray:
    """Return (4,) int32, the part of an image that counts as the whole: all of it unless packing chose a part."""
    region = [row[name] for name in REGION] if all(name in row for name in REGION) else [0, 0, height, width]
    return np.array(region, dtype=np.int32)


def scale_region(row: Mapping[str, Any], old_px: tuple[int, ...], new_px: tuple[int, ...]) -> dict[str, int]:
    """Return the columns of the part that packing chose, in px of the scaled image; none if it chose none.

    Edges are rounded, so they move by half a pixel of the scaled image at most.

    Args:
        old_px, new_px: height and width of the image before and after.
    """
    if not all(name in row for name in REGION):
        return {}
    y, x, height, width = (row[name] for name in REGION)
    top, left, bottom, right = (
        round(edge * new / old)
        for edge, old, new in zip((y, x, y + height, x + width), 2 * old_px, 2 * new_px, strict=True)
    )
    return dict(zip(REGION, (top, left, max(1, bottom - top), max(1, right - left)), strict=True))


def read_regions(data: "ShardSet") -> np.ndarray:
    """Return (N, 4) int32, the part of each image that counts as the whole: all of it unless packing chose a part."""
    if all(name in data.columns for name in REGION):
        return np.stack([data.columns[name] for name in REGION], axis=1).astype(np.int32)
    size = data.records[IMAGE].original_px
    return np.concatenate([np.zeros_like(size), size], axis=1)


def has_inputs(records: Mapping[str, Records]) -> bool:
    """Return whether packed data has images that packing resized."""
    return IMAGE in records and records[IMAGE].kind in INPUTS


def explain_images(records: Mapping[str, Records], meta: Mapping[str, Any]) -> Choice[str] | None:
    """Return how images that packing changed are stored, and what reading does to them; None if there are none."""
    if JPEG in meta:
        how = "encoded again when packed, with losses that packing measured: loss.json in the packed data's folder"
        return Choice(name_store(records, meta), how)
    if not has_inputs(records):
        return None
    kind, (height, width) = records[IMAGE].kind, records[IMAGE].shape[0, :2].tolist()
    how = "decoded on the host" if kind == INPUT_PNG else "copied, not decoded"
    return Choice(kind, f"resized to {height} x {width} px when packed, by the reference decoder; {how}")


def check_inputs(
    folder: Path,
    records: Mapping[str, Records],
    meta: Mapping[str, Any],
    *,
    image: ImageSettings,
    augmentation: AugmentSettings,
) -> None:
    """Refuse options that need other images than those that packing resized; nothing to check if it kept them.

    Args:
        folder, records, meta: of the packed data.

    Raises:
        UserError: the model's input has another size, or loading would do more than resize.
    """
    if not has_inputs(records):
        return
    kind = records[IMAGE].kind
    if why := explain_more_than_resize(image, augmentation):
        raise UserError(
            f"{folder}: its images were resized when they were packed (packing.store={kind}), but {why}, which needs "
            f"the whole image. Leave that option out, or pack the raw files again: trainyard pack JOB RAW OUT "
            f"packing.store={KEEP}"
        )
    names = ("height_px", "width_px", "channels", "fill")
    stored = dict(zip(names, records[IMAGE].shape[0, :3].tolist(), strict=False))
    stored["fill"] = meta.get("fill", image.fill)  # none if `pack` was called directly
    differing = [name for name in names if stored[name] != getattr(image, name)]
    if differing:
        wanted, packed = (
            " ".join(f"image.{name}={value(name)}" for name in differing)
            for value in (lambda name: getattr(image, name), stored.__getitem__)
        )
        raise UserError(
            f"{folder}: its images were resized when they were packed (packing.store={kind}), for {packed}, but this "
            f"job has {wanted}. Type {packed}, or pack the raw files again: trainyard pack JOB RAW OUT {wanted}"
        )


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """Return an 8-bit gray or RGB image as PNG, every row filtered by "Up".

    Pillow chooses a filter for each row by size, mostly type 4, which no decoder undoes quickly: of its files a core
    decodes 0.67 times as many, and writes 0.55 times as many, for 7 per cent fewer bytes of a print and 1 of a photo
    (suite prints of benchmarks/README.md: input_png and pillow_png).
    """
    height, width, channels = pixels_HWC.shape
    rows = pixels_HWC.reshape(height, width * channels)
    filtered = np.empty((height, 1 + rows.shape[1]), dtype=np.uint8)
    filtered[:, 0] = _PNG_UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])  # modulo 256
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOR[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.data, _PNG_LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
