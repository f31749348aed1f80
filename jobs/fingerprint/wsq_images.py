"""Decodes WSQ, the FBI's format for prints, in a separate process."""

import importlib.util
import struct
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from trainyard.data.shards import BadRecord

WSQ_START = b"\xff\xa0"
DECODER = "_wsq"  # the compiled half of PyPI's `wsq`, which wraps NIST's decoder (NBIS 5.0)
TIMEOUT_S = 60  # a damaged file may never end; a whole one takes milliseconds
MEMORY_BYTES = 2**30  # a header may claim 65,535 x 65,535 pixels
_HEADER = struct.Struct("<iii")  # width, height, ppi

_PROGRAM = f"""
import resource, struct, sys, {DECODER} as wsq
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    pixels, width, height, ppi = wsq.decompress(sys.stdin.buffer.read())
except Exception as error:
    sys.exit(str(error))
sys.stdout.buffer.write(struct.pack({_HEADER.format!r}, width, height, ppi) + pixels)
"""


def can_decode_wsq() -> bool:
    """Return whether the decoder is installed: only the container images have it for certain."""
    return importlib.util.find_spec(DECODER) is not None


def decode_wsq(data: bytes) -> tuple[NDArray[np.uint8], int]:
    """Return the pixels (H, W) of a WSQ file and its resolution in dots per inch, 0 if the file does not say.

    NIST's decoder is C code that trusts the file: on one of about 500 damaged files it ends the process that runs it.
    So it runs in a separate process, with a limit on time and memory. About 60 ms of one core.

    Raises:
        BadRecord: the file is not a complete WSQ file.
    """
    if not data:
        raise BadRecord("the file is empty")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM], input=data, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadRecord(f"the WSQ decoder did not finish within {TIMEOUT_S} s: the file is damaged") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = f"it was ended by signal {-done.returncode}" if done.returncode < 0 else "; ".join(lines[:2])
        raise BadRecord(f"the WSQ image cannot be decoded: {reason}")
    width, height, ppi = _HEADER.unpack_from(done.stdout)
    pixels = np.frombuffer(done.stdout, np.uint8, offset=_HEADER.size)
    if width < 1 or height < 1 or len(pixels) != width * height:
        raise BadRecord(f"the WSQ image cannot be decoded: {width} x {height} pixels, {len(pixels)} bytes")
    return pixels.reshape(height, width), max(0, ppi)
