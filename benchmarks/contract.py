"""What defines a benchmark configuration, and the settings it receives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 64  # samples
SIZE_PX = 224  # width and height of the images that a loader yields
PRINT_PX = 299  # in the suite prints
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Setting:
    """Where the data is, how much of it, and how many threads or worker processes to use."""

    data: Path
    rgb: int  # number of images
    gray: int
    prints: int
    threads: int

    def get_path(self, form: str) -> Path:
        """Return the path of one form of the data, such as "rgb-files"; its name includes the number of images."""
        kind = form.partition("-")[0]
        return self.data / f"{form}-{getattr(self, kind)}"


@dataclass(frozen=True)
class Configuration:
    """One configuration of a suite.

    `batches` yields without end. In the suites rgb, gray, raw and prints, each item is a batch of 64 images as a uint8
    tensor, in any memory layout; in read, an int array with the sizes of the 64 gathered records, in bytes.
    """

    suite: str
    name: str
    data: Callable[[Setting], Path]  # prepares the data if it is missing, and returns the file or folder
    batches: Callable[[Path, Setting], Iterator[Any]]
    distributions: tuple[str, ...]  # packages whose versions are recorded with the result
    note: str = ""
