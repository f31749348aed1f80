"""Decodes whole recordings while packing, so that a broken or silent one is found before training."""

import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

from trainyard.data.shards import BadRecord

_BLOCK = 1 << 16  # frames read at once: a file may not know how many it has
_UNKNOWN = 1 << 62  # frames announced, from which on the header does not say
_MOST_LEVEL = 2.0  # of floats, of which 1 is full scale; lossy codecs and filters exceed it, but not twice


class Sound(NamedTuple):
    """A decoded recording."""

    data: bytes  # of the file
    frames: NDArray[np.int16] | NDArray[np.float64]  # (frames, channels); int16 if the file has 16 bits, else 1 is full
    rate_hz: int
    is_plain: bool  # the bytes are a WAV or FLAC file of 16 bits that states its length, so they can be stored


def read_sound(path: Path) -> Sound:
    """Read a recording in any format of libsndfile.

    Raises:
        BadRecord: it is empty, incomplete, in no known format, or has samples that are not finite or far above full
            scale.
    """
    data = path.read_bytes()
    if not data:
        raise BadRecord("the file is empty")
    try:
        with _Stream(io.BytesIO(data)) as file:
            is_16_bit, announced = file.subtype == "PCM_16", file.frames if file.frames < _UNKNOWN else 0
            blocks = [file.read(0, dtype="int16" if is_16_bit else "float64", always_2d=True)]
            while len(block := file.read(_BLOCK, dtype=blocks[0].dtype.name, always_2d=True)):
                blocks.append(block)
            frames, rate_hz, kind, log = np.concatenate(blocks), file.samplerate, file.format, file.extra_info
    except soundfile.LibsndfileError as error:
        raise BadRecord(f"not a complete audio file in a known format ({error.error_string})") from None
    if len(frames) < announced or _is_truncated(data, log, len(frames)):
        raise BadRecord(f"truncated: {len(frames)} frames can be decoded, and there should be more")
    if not len(frames):
        raise BadRecord("no audio: 0 frames")
    if not is_16_bit:
        _check_levels(frames)
    return Sound(data, frames, rate_hz, is_16_bit and announced > 0 and kind in ("WAV", "WAVEX", "FLAC"))


class _Stream(soundfile.SoundFile):  # type: ignore[misc]  # has no types
    """A recording that is read from its first frame to its last: one of unknown length cannot be searched."""

    def seekable(self) -> bool:
        """Return False: then reading does not check the position, for which it would search."""
        return False


def convert_to_pcm(wave: NDArray[np.float64]) -> NDArray[np.int16]:
    """Return floats, of which 1 is full scale, as 16-bit samples."""
    return np.clip(np.round(wave * 32768), -32768, 32767).astype(np.int16)


def _check_levels(frames: NDArray[np.float64]) -> None:
    finite = np.isfinite(frames)
    if not finite.all():
        raise BadRecord(f"{frames.size - np.count_nonzero(finite)} of {frames.size} samples are NaN or infinite")
    peak = float(np.abs(frames).max())
    if peak > _MOST_LEVEL:
        raise BadRecord(
            f"its floats reach {peak:g}, but 1 is full scale: if they are 16-bit numbers, divide them by 32768"
        )


def _is_truncated(data: bytes, log: str, frames: int) -> bool:
    """Return whether the end of a file is missing, where libsndfile reads the rest without an error.

    Stream writers leave 0 or all ones in a WAV.

    Args:
        log: what libsndfile says of the file; it notes the sizes of chunks that it corrects.
    """
    if data[:4] == b"RIFF":
        announced = int.from_bytes(data[4:8], "little")
        return announced not in (0, 0xFFFFFFFF) and announced + 8 > len(data) + 1
    if data[:4] == b"OggS":
        page = data[
            data.rfind(b"OggS") :
        ]  # the last one: its flag, and the sizes of its segments (RFC 3533, section 6)
        is_last, sizes = page[5:6] and page[5] & 4, page[27 : 27 + page[26]] if len(page) > 26 else b""
        return not is_last or len(page) < 27 + len(sizes) + sum(sizes)
    if data[:4] == b"NIST":
        counted = re.search(rb"\nsample_count -i (\d+)", data[:1024])
        return counted is not None and int(counted[1]) > frames
    chunks = re.findall(r"(?im)^ *(?:riff|riff size|form|data|data size) *: (\d+) \(should be (\d+)\)", log)
    return any(int(announced) > int(there) + 1 for announced, there in chunks)
