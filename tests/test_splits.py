"""A family's sets are checked before anything trains on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trainyard.config.settings import TrainConfig
from trainyard.data.splits import find_splits
from trainyard.errors import UserError


@dataclass
class Data:
    count: int = 10
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    vocabulary: Mapping[str, list[str]] = field(default_factory=dict)


def split(**sets: Any) -> dict[str, np.ndarray]:
    pack = ModuleType("pack")
    pack.__file__, pack.splits = "jobs/mine/pack.py", lambda *_: sets  # type: ignore[attr-defined]
    return find_splits(pack, Data(), TrainConfig())


def test_training_ids_may_be_repeated_and_test_sets_may_share_samples():
    found = split(train=[3, 1, 1, 1], val=[2], test_a=[4, 5], test_b=[5, 6], test_none=[])
    assert {name: ids.tolist() for name, ids in found.items()}["train"] == [3, 1, 1, 1]
    assert all(ids.dtype == np.int64 for ids in found.values())


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"val": [1]}, "expected a set 'train', found val"),
        ({"train": [0, 1, 2], "val": [2, 3]}, "1 of the 2 ids in 'val' are also in 'train'"),
        ({"train": [0], "test": [1, 1]}, "ids are repeated in 'test'"),
        ({"train": [0, 10]}, r"'train' has the id 10, but the samples are 0 \.\. 9"),
        ({"train": [0], "val": [-1]}, "'val' has the id -1"),
        ({"train": [0.5]}, r"'train' is float64 \(1,\); expected sample ids"),
        ({"train": [[0, 1]]}, r"'train' is int64 \(1, 2\)"),
        ({"train": np.array([True, False])}, "'train' is bool"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused_with_the_familys_file(sets, said):
    with pytest.raises(UserError, match=f"jobs/mine/pack.py: splits: .*{said}"):
        split(**sets)


def test_without_a_function_the_text_column_set_divides_the_samples():
    pack = ModuleType("pack")
    pack.__file__ = "jobs/mine/pack.py"
    data = Data(3, {"set": np.array([1, 0, 1])}, {"set": ["val", "train"]})
    assert {name: ids.tolist() for name, ids in find_splits(pack, data, TrainConfig()).items()} == {
        "train": [0, 2],
        "val": [1],
    }
    with pytest.raises(UserError, match="none of them in the validation set"):
        find_splits(pack, Data(1, {"set": np.array([0])}, {"set": ["train"]}), TrainConfig())
    with pytest.raises(UserError, match=r"jobs/mine/pack\.py: expected splits\(columns, vocabulary, config\), or"):
        find_splits(pack, Data(), TrainConfig())
