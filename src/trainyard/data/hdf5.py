"""Opens HDF5 files that a stranger may have written: refuses everything that our own writer never writes.

HDF5 can name other files (external storage, links, virtual datasets), run filters, and declare more bytes than it has.
Packed data needs none of it: groups, and contiguous arrays of numbers that lie within the file.
"""

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5t

from trainyard.errors import UserError
from trainyard.files import PACKED_DATA, check_format, raise_failed_disk

NUMBERS = frozenset(
    {"bool", "float16", "float32", "float64"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)
"""NumPy names of the dtypes that packed data may contain."""

_MAX_DEPTH = 3  # /records/image/start
_MAX_OBJECTS = 100_000  # groups and datasets; a column needs two or three
_LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}
_LAYOUTS = {
    h5d.COMPACT: "stored in its header",
    h5d.CHUNKED: "stored in chunks, which may run filters",
    h5d.VIRTUAL: "made of other files",
}


class ShardError(UserError):
    """Packed data is missing, damaged, not trustworthy or of another format."""


def open_hdf5(path: Path) -> h5py.File:
    """Open a file of packed data for reading, after checking everything in it that reading could follow.

    Costs about 20 us per group or dataset, whatever their size.

    Raises:
        FormatError: it states another format number, or none.
        ShardError: it is not an HDF5 file, or contains something that we never write.
    """
    _check_regular_file(path)
    try:
        file = h5py.File(path, "r", locking=False)  # locks fail on many network file systems; nobody writes here
    except OSError as error:
        raise_failed_disk(error, path)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES):  # says nothing about the file's content
            raise ShardError(f"{path}: cannot be opened: {os.strerror(error.errno)}.") from None
        raise ShardError(f"{path}: not a readable HDF5 file ({error}). Pack the data again.") from None
    try:
        with explain_malformed(path):
            check_format(path, read_number(file, "format") if "format" in file.attrs else None, kind=PACKED_DATA)
            _TreeCheck(path).check_group(file.id, "", 0)
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def explain_malformed(path: Path) -> Iterator[None]:
    """Turn what h5py raises on a malformed file into one sentence."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        number = re.search(r"errno = (\d+)", str(error))  # libhdf5 writes it into the text of a RuntimeError
        raise_failed_disk(OSError(int(number[1]), os.strerror(int(number[1]))) if number else error, path)
        raise make_refusal(path, f"is malformed ({str(error).strip()})") from None


def make_refusal(path: Path, what: str) -> ShardError:
    """Return the error for a file that our writer did not write, or that was changed since."""
    return ShardError(
        f"{path}: {what}. Packing never writes that, so it is not used. "
        "Get the data from somebody you trust, or pack the raw files again: trainyard pack JOB RAW OUT"
    )


def read_number(parent: h5py.HLObject, name: str) -> int:
    """Read an attribute that is one whole number."""
    attribute = parent.attrs.get_id(name)
    if attribute.get_type().get_class() != h5t.INTEGER or attribute.shape != ():
        raise make_refusal(Path(parent.file.filename), f"attribute '{name}' is not a whole number")
    return int(parent.attrs[name])


def read_string(parent: h5py.HLObject, name: str) -> str:
    """Read an attribute that is one text."""
    attribute = parent.attrs.get_id(name)
    if attribute.get_type().get_class() != h5t.STRING or attribute.shape != ():
        raise make_refusal(Path(parent.file.filename), f"attribute '{name}' is not a text")
    value = parent.attrs[name]
    return value.decode() if isinstance(value, bytes) else str(value)


def read_array(group: h5py.Group, name: str, *, dtype: str, length: int | None = None, axes: int = 1) -> np.ndarray:
    """Read a dataset whose dtype, number of axes and, unless None, length are known."""
    dataset = group.get(name)
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.name != dtype or dataset.ndim != axes:
        raise make_refusal(Path(group.file.filename), f"{group.name}/{name} is not an array of {dtype}")
    if length is not None and len(dataset) != length:
        raise make_refusal(Path(group.file.filename), f"{group.name}/{name} has {len(dataset)} rows, expected {length}")
    values: np.ndarray = dataset[:]
    return values


def read_group(group: h5py.Group, name: str) -> h5py.Group:
    """Return a group of a group."""
    member = group.get(name)
    if not isinstance(member, h5py.Group):
        raise make_refusal(Path(group.file.filename), f"{group.name.rstrip('/')}/{name} is not a group")
    return member


def read_texts(group: h5py.Group) -> list[str]:
    """Read a text column: UTF-8 bytes and N + 1 offsets."""
    blob, offset = read_array(group, "blob", dtype="uint8").tobytes(), read_array(group, "offset", dtype="int64")
    if not len(offset) or offset[0] != 0 or offset[-1] != len(blob) or (np.diff(offset) < 0).any():
        raise make_refusal(Path(group.file.filename), f"the texts in {group.name} overlap or are cut off")
    ends = offset.tolist()
    return [blob[a:b].decode() for a, b in itertools.pairwise(ends)]


def _check_regular_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ShardError(f"{path}: missing. Copy it again, or pack the data again.") from None
    if not stat.S_ISREG(mode):  # opening a named pipe would block
        raise make_refusal(path, "is not a regular file")


class _TreeCheck:
    """Walks a file without reading any values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size_bytes = self._left_bytes = path.stat().st_size
        self._left_objects = _MAX_OBJECTS

    def check_group(self, group: h5g.GroupID, where: str, depth: int) -> None:
        """Check a group and everything below it; the limit on depth also ends cycles."""
        if depth > _MAX_DEPTH:
            raise make_refusal(self._path, f"{where} is nested more than {_MAX_DEPTH} deep")
        self._left_objects -= group.get_num_objs()
        if self._left_objects < 0:
            raise make_refusal(self._path, f"has more than {_MAX_OBJECTS} groups and datasets")
        for raw_name in group:
            name = raw_name.decode(errors="replace")
            inner = f"{where}/{name}"
            if not name.isprintable() or "\ufffd" in name:
                raise make_refusal(self._path, f"{inner!a} is not a printable name")
            kind = group.links.get_info(raw_name).type
            if kind != h5l.TYPE_HARD:
                raise make_refusal(self._path, f"{inner} is {_LINKS.get(kind, 'a link of an unknown kind')}")
            member = h5o.open(group, raw_name)
            if isinstance(member, h5g.GroupID):
                self.check_group(member, inner, depth + 1)
            elif isinstance(member, h5d.DatasetID):
                self._check_dataset(member, inner)
            else:
                raise make_refusal(self._path, f"{inner} is neither a group nor a dataset")

    def _check_dataset(self, dataset: h5d.DatasetID, where: str) -> None:
        """Check layout and type before anything else: asking a virtual dataset for its shape opens other files."""
        created = dataset.get_create_plist()
        if created.get_layout() != h5d.CONTIGUOUS:
            raise make_refusal(
                self._path, f"{where} is {_LAYOUTS.get(created.get_layout(), 'stored in a strange way')}"
            )
        if created.get_external_count():
            raise make_refusal(self._path, f"{where} is stored in another file")
        if created.get_nfilters():
            raise make_refusal(self._path, f"{where} has a filter")
        dtype = _read_number_dtype(dataset.get_type())
        if dtype is None:
            raise make_refusal(self._path, f"{where} is no array of numbers")
        needed = dtype.itemsize
        for side in dataset.shape:
            needed *= side  # a Python int: it cannot overflow
        if needed and (needed != dataset.get_storage_size() or dataset.get_offset() is None):
            raise make_refusal(self._path, f"{where} declares {needed} bytes, but stores {dataset.get_storage_size()}")
        self._left_bytes -= needed
        if self._left_bytes < 0 or (needed and dataset.get_offset() + needed > self._size_bytes):
            raise make_refusal(self._path, f"{where} declares more bytes than the file has")


def _read_number_dtype(kind: h5t.TypeID) -> np.dtype | None:
    """Return the dtype of a dataset; None if it is not among `NUMBERS` in this machine's byte order."""
    is_bool = kind.get_class() == h5t.ENUM and kind.get_nmembers() == 2
    if kind.get_class() not in (h5t.INTEGER, h5t.FLOAT) and not is_bool:
        return None
    dtype: np.dtype = kind.dtype
    return dtype if dtype.name in NUMBERS and dtype.isnative else None
