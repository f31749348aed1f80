"""What a configuration of a benchmark is, and what it is given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 64  # samples
SIZE_PX = 224  # width and height of what a loader yields
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Setting:
    """Where data are kept, how much of them, and how many threads or worker processes to use."""

    data: Path
    rgb: int  # pictures
    gray: int
    threads: int

    def place(self, form: str) -> Path:
        """Return the place of one form of one set, such as "rgb-files"; the number of pictures is in its name."""
        number = self.rgb if form.startswith("rgb") else self.gray
        return self.data / f"{form}-{number}"


@dataclass(frozen=True)
class Compared:
    """One configuration.

    `batches` yields without end. In the suites rgb, gray and raw each item is a batch of 64 pictures as a uint8
    tensor, in any memory layout; in read an int array with the sizes of the 64 records gathered, in bytes.
    """

    suite: str
    name: str
    data: Callable[[Setting], Path]  # makes what is read, if it is not there, and returns the file or folder
    batches: Callable[[Path, Setting], Iterator[Any]]
    distributions: tuple[str, ...]  # whose versions belong to the result
    note: str = ""
