"""Checks the archive of a checkpoint before torch opens it, and its state afterwards: sizes, and nothing but data.

torch.load(weights_only=True) runs no code, but it believes the sizes that a file declares: of a record that is
compressed a million times, or of a tensor larger than its record, whose rest it reads from the memory behind it.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

_ITEM_BYTES = {
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
"""Bytes of an item by the name of its storage in the file; those of all other storages are single bytes."""

_MOST_REPEATED_BYTES = 2**30
"""A view may repeat its data, as `Tensor.expand` does, but no model repeats them to more than this."""


def check_archive(path: Path) -> None:
    """Check that a file is an archive as torch.save writes it, whose tensors are as large as their records.

    Raises:
        pickle.UnpicklingError: it is not; has the reason.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos, comment = archive.infolist(), archive.comment
            names = [info.filename for info in infos]
            pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
            if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
                raise pickle.UnpicklingError("its records are compressed, which torch.save never does")
            if sum(info.file_size for info in infos) > path.stat().st_size:
                raise pickle.UnpicklingError("its records are larger than the file")
            if comment or len(set(names)) < len(names) or len(pickles) != 1:
                raise pickle.UnpicklingError("it is not the zip archive that torch.save writes")
            content = archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is not the zip archive that torch.save writes ({error})") from None
    folder = pickles[0].removesuffix("data.pkl")
    sizes = {i.filename.removeprefix(f"{folder}data/"): i.file_size for i in infos}
    _SizeChecker(io.BytesIO(content), sizes).load()


class _SizeChecker(pickle.Unpickler):
    """Goes through a pickle without importing or calling anything, and compares each tensor's size with its record."""

    def __init__(self, content: io.BytesIO, sizes: dict[str, int]) -> None:
        super().__init__(content)
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Data,), {})  # torch.load decides which names are allowed

    def persistent_load(self, saved: Any) -> Any:
        match saved:
            case ("storage", type() as kind, str() as key, str(), int() as count) if key in self._sizes:
                declared = count * _ITEM_BYTES.get(kind.__name__, 1)
                if declared != self._sizes[key]:
                    raise pickle.UnpicklingError(
                        f"a tensor declares {declared} bytes, but its record has {self._sizes[key]}"
                    )
                return _Data()
        raise pickle.UnpicklingError("a tensor has no record in it")


class _Data(dict[Any, Any]):
    """Stands for an object that a pickle makes by calling a name, which is a subclass of it; accepts every method."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


def check_state(state: object) -> None:
    """Check that a loaded state is a dict that holds nothing but what `checkpoint.State` allows.

    Raises:
        pickle.UnpicklingError: it is not; names the type that it holds.
    """
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"it holds a {type(state).__name__}, not a dict")
    seen: set[int] = set()
    left: list[Any] = [state]
    while left:
        value = left.pop()
        if type(value) in (dict, OrderedDict, list, tuple):
            if id(value) not in seen:  # a crafted one may contain itself, or one list a million times
                seen.add(id(value))
                left += [*value, *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_meta:
                raise pickle.UnpicklingError(f"it holds a {value.layout} tensor on {value.device}")
            if value.numel() * value.itemsize > max(value.untyped_storage().nbytes(), _MOST_REPEATED_BYTES):
                raise pickle.UnpicklingError(f"a tensor of shape {tuple(value.shape)} repeats very few data")
        elif type(value) not in (bool, int, float, str, type(None)):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}")
