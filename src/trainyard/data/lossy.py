"""Measures what `packing.store=jpeg` saves and loses, on images that were just packed."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from trainyard.config.settings import ImageSettings
from trainyard.data.headers import read_image_shape
from trainyard.data.index import IMAGE, INPUT_RAW
from trainyard.data.shards import Sample, ShardSet
from trainyard.data.store import InputStore, find_region, name_store
from trainyard.files import write_atomically

LOSS = "loss.json"
_MOST_IMAGES = 64  # evenly spaced over the data set
_DEFINITION = (
    "10 log10(255^2 / MSE) of the model's input, resized from the stored image, against that from the file: 8 bits, "
    "all channels, without augmentation"
)


@dataclass(frozen=True)
class Loss:
    """Bytes saved, and detail lost, by packing some images."""

    store: str  # as typed after packing.store=
    images: int  # that were measured
    kept: int  # of these: with their files' bytes, because JPEG would have taken no fewer
    file_bytes: int  # of all images measured, as `load` returns them
    stored_bytes: int
    psnr_db_min: float | None  # of those not kept; None if all are, or if no pixel differs
    psnr_db_median: float | None
    definition: str = _DEFINITION

    def describe(self) -> str:
        """Return a summary in one sentence."""
        saved = (
            f"packing.store={self.store}: {self.images} images measured now take {self.stored_bytes / 1e6:.2f} MB "
            f"instead of {self.file_bytes / 1e6:.2f}, and {self.kept} of them keep their files, which JPEG would not "
            "make smaller"
        )
        if self.psnr_db_min is None:
            return f"{saved}; nothing is lost ({LOSS})"
        return (
            f"{saved}; the model's input differs from that of the others' files by a PSNR of {self.psnr_db_min:.1f} dB "
            f"at the worst, {self.psnr_db_median:.1f} dB in the median ({LOSS} defines it)"
        )


def measure_loss(samples: Iterable[Sample], data: ShardSet, image: ImageSettings) -> Loss:
    """Load some raw samples again and compare their images with those packed; write it next to the packed data.

    Args:
        samples: those that were packed.
        image: the model's input, to which both images are stretched.
    """
    ids = np.unique(np.linspace(0, data.count - 1, _MOST_IMAGES).astype(np.int64))
    by_key = dict(zip(data.read_keys(ids), ids.tolist(), strict=True))
    resizer = InputStore(INPUT_RAW, image.height_px, image.width_px, image.channels, image.fill)
    file_bytes = stored_bytes = kept = 0
    noise: list[float] = []
    for sample in samples:
        if sample.key not in by_key:
            continue
        loaded = sample.load(data.artifacts) if data.artifacts else sample.load()
        original, i = loaded[IMAGE], np.array([by_key[sample.key]])
        assert isinstance(original, bytes), "packing encoded it again"
        (stored,) = data.read_bytes(IMAGE, i)
        file_bytes, stored_bytes = file_bytes + len(original), stored_bytes + len(stored)
        if stored.tobytes() == original:
            kept += 1
            continue
        before = _resize(resizer, original, {**sample.columns, **loaded})
        after = _resize(resizer, stored.tobytes(), {name: int(column[i[0]]) for name, column in data.columns.items()})
        noise.append(float(np.square(before - after).mean()))
    psnr = [10 * float(np.log10(255**2 / value)) for value in noise if value > 0]
    worst, median = (min(psnr), statistics.median(psnr)) if psnr else (None, None)
    store = name_store(data.records, data.meta)
    loss = Loss(store, len(by_key), kept, file_bytes, stored_bytes, worst, median)
    write_atomically(data.folder / LOSS, json.dumps(asdict(loss), indent=1))
    return loss


def _resize(resizer: InputStore, encoded: bytes, row: dict[str, object]) -> np.ndarray:
    """Return the model's input, (H, W, C) float64 of 0..255."""
    height, width, _ = read_image_shape(encoded)
    return resizer.resize(encoded, find_region(row, height, width)).astype(np.float64)
