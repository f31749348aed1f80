"""What defines a benchmark configuration, and the settings it receives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUITES = ("rgb", "gray", "raw", "read")
OURS = "ours"
BATCH = 64  # samples
SIZE_PX = 224  # width and height of the images that a loader yields
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Setting:
    """How to run a suite. A configuration is timed until both `samples` and `seconds` are reached."""

    data: Path  # cache of generated data; absolute
    results: Path
    threads: int  # or worker processes, of every configuration
    only: tuple[str, ...] = ()  # patterns of configurations to run alongside ours; empty: all
    rounds: int = 5
    rgb: int = 4000  # images generated
    gray: int = 6000
    warmup: int = 512  # samples
    samples: int = 2048
    seconds: float = 2.0

    def get_path(self, form: str) -> Path:
        """Return the path of one form of the data, such as "rgb-files"; its name includes the number of images."""
        kind = form.partition("-")[0]
        return self.data / f"{form}-{getattr(self, kind)}"


@dataclass(frozen=True)
class Configuration:
    """One configuration of a suite.

    `batches` yields without end. In the suites rgb, gray and raw, each item is a batch of 64 images as a uint8
    tensor, in any memory layout; in read, an int array with the sizes of the 64 gathered records, in bytes.
    """

    suite: str
    name: str
    data: Callable[[Setting], Path]  # prepares the data if it is missing, and returns the file or folder
    batches: Callable[[Path, Setting], Iterator[Any]]
    distributions: tuple[str, ...]  # packages whose versions are recorded with the result
    note: str = ""  # where its output or its work differs from ours

    @property
    def full_name(self) -> str:
        return f"{self.suite}/{self.name}"
