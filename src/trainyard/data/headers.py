"""Reads the shape of encoded images and audio from their own headers, and compares it with the index."""

import io
from collections.abc import Sequence

import numpy as np
import soundfile
from PIL import Image, UnidentifiedImageError

from trainyard.data.index import AUDIO, ENCODED_IMAGE, INPUT_PNG, MASK


class BadRecord(ValueError):
    """A raw file cannot become a sample: it is unreadable, truncated, or of a kind that the job does not know."""


def read_image_shape(data: bytes | memoryview) -> tuple[int, int, int]:
    """Return height, width and channels.

    Raises:
        BadRecord: not an image header, or the image is too large.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:  # reads only the header
            return image.height, image.width, len(image.getbands())
    except UnidentifiedImageError:
        raise BadRecord("not an image of a known format") from None
    except Image.DecompressionBombError as error:
        raise BadRecord(str(error)) from None


def read_audio_shape(data: bytes | memoryview) -> tuple[int, int]:
    """Return frames and rate in Hz; raises BadRecord for anything but frames of 16 bits in one channel."""
    try:
        info = soundfile.info(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise BadRecord(f"not an audio file of a known format: {error}") from None
    if info.channels != 1 or info.subtype != "PCM_16" or not info.frames:
        raise BadRecord(
            f"{info.frames} frames of {info.channels} channels in {info.subtype}: expected one channel of 16 bits"
        )
    return info.frames, info.samplerate


def find_misfit(kind: str, data: np.ndarray, shape: Sequence[int]) -> str:
    """Return how a record differs from the shape in the index; "" if it does not.

    Records without a header have been compared by `read_index`: their shape gives their size.
    """
    images = dict.fromkeys((ENCODED_IMAGE, MASK, INPUT_PNG), read_image_shape)
    read = {**images, AUDIO: read_audio_shape}.get(kind)
    if read is None:
        return ""
    try:
        shape_read = read(data.data)
    except Exception as error:  # Pillow's readers raise struct.error, IndexError and others for broken files
        return f"its header cannot be read: {error}"
    stated = tuple(shape)[: len(shape_read)]
    return "" if shape_read == stated else f"its header says {_format(shape_read)}, the index {_format(stated)}"


def _format(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
