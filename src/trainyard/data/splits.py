"""Reads how a family splits packed data into sets, and refuses what would train on validation samples. No torch."""

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from trainyard.config.families import require_mapping
from trainyard.config.settings import TrainConfig
from trainyard.errors import ContractError, UserError
from trainyard.text import join_names

if TYPE_CHECKING:
    import numpy as np

_TRAIN, _SET = "train", "set"
SETS = (_TRAIN, "val", "test")


class Samples(Protocol):
    """Columns of a data set that are known without opening a sample: an index, or shards."""

    @property
    def count(self) -> int: ...
    @property
    def columns(self) -> "Mapping[str, np.ndarray]": ...
    @property
    def vocabulary(self) -> Mapping[str, list[str]]: ...


def find_splits(pack: ModuleType, data: Samples, config: TrainConfig) -> "dict[str, np.ndarray]":
    """Return the sample ids of each set, (n,) int64, as the family's `pack.splits` says, or else the text column `set`.

    An id may be repeated in "train", where it means oversampling. Test sets may share samples.

    Raises:
        UserError: there is no "train", the column has no "val", ids are not those of samples, a sample is in "train"
            and another set, or an id is repeated in another set.
    """
    import numpy as np  # here: submitting loads this file, and must respond quickly

    where, count = f"{pack.__file__}: splits", data.count
    if hasattr(pack, "splits"):
        returned = pack.splits(data.columns, data.vocabulary, config)
        named = require_mapping(pack.splits, returned, "the sample ids of each set, (n,) int64, by its name")
    elif _SET in data.vocabulary:
        named = find_sets(data.columns, data.vocabulary)
    else:
        raise ContractError(
            f"{pack.__file__}: expected splits(columns, vocabulary, config), or a text column '{_SET}' of each sample: "
            f"{', '.join(SETS)}. It has neither."
        )
    splits = {name: np.asarray(ids) for name, ids in named.items()}
    if _TRAIN not in splits:
        raise ContractError(f"{where}: expected a set 'train', found {join_names(list(splits)) or 'none'}.")
    for name, ids in splits.items():
        if ids.shape == (0,):
            splits[name] = ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ContractError(f"{where}: '{name}' is {ids.dtype} {ids.shape}; expected sample ids, int64 (n,).")
        if ids.size and not 0 <= ids.min() <= ids.max() < count:
            wrong = next(i for i in ids.tolist() if not 0 <= i < count)
            raise ContractError(f"{where}: '{name}' has the id {wrong}, but the samples are 0 .. {count - 1}.")
    trains = np.zeros(count, dtype=bool)
    trains[splits[_TRAIN]] = True
    for name in splits.keys() - {_TRAIN}:
        ids = splits[name]
        if shared := int(trains[ids].sum()):
            raise ContractError(
                f"{where}: {shared} of the {len(ids)} ids in '{name}' are also in 'train', so its scores would be too "
                "good. A sample is in one set."
            )
        if len(np.unique(ids)) < len(ids):
            raise ContractError(f"{where}: ids are repeated in '{name}'. Only 'train' may repeat them, to oversample.")
    return {name: ids.astype(np.int64, copy=False) for name, ids in splits.items()}


def find_sets(columns: "Mapping[str, np.ndarray]", vocabulary: Mapping[str, list[str]]) -> "dict[str, np.ndarray]":
    """Return the sample ids of each set, from the text column `set`.

    Raises:
        UserError: there is no validation set, which selects the best checkpoint.
    """
    import numpy as np

    names = np.array(vocabulary[_SET])[columns[_SET]]
    ids_by_set = {name: np.flatnonzero(names == name) for name in SETS if name in vocabulary[_SET]}
    if "val" not in ids_by_set:
        raise UserError(
            f"{len(names)} samples, and none of them in the validation set, which selects the best checkpoint. "
            "Expected three or more of a class, and packing.val_share above 0."
        )
    return ids_by_set
