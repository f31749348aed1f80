"""The shard format: HDF5 files of encoded records and columns, written in parallel, checked when opened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Loaded = dict[str, "bytes | np.ndarray | int | float | str"]


class BadRecord(ValueError):
    """One raw file cannot become a sample: unreadable, truncated, of a kind the job does not know."""


@dataclass(frozen=True)
class Sample:
    """One training sample as a family's `pack.samples(raw, config)` yields it: cheap to list, loaded later.

    `samples` is a generator in a deterministic order and touches no file contents; `load` runs in a worker process,
    so it must pickle (a module-level function, or functools.partial of one).
    """

    key: str  # unique and stable, such as the path relative to the raw folder
    load: Callable[[], Loaded]  # bytes: an encoded picture; array: equal shape in all samples; number, text: a column
    columns: Mapping[str, int | float | str] = field(default_factory=dict)  # what the listing already knows
    source: Path | None = None  # the raw file, whose size and time tell whether packed data is stale
