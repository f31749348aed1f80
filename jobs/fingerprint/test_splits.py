"""Splits by finger."""

import numpy as np
import pytest

from trainyard.errors import UserError

from .config import Config
from .pack import splits


def make_columns(*sets: tuple[str, int]) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Return columns and vocabulary of (set, number of fingers) with 3 prints each."""
    names = [f"{name}/{i}" for name, count in sets for i in range(count)]
    finger = np.repeat(np.arange(len(names)), 3)
    codes = np.repeat(np.arange(len(sets)), [3 * count for _, count in sets])
    return {"finger": finger, "set": codes}, {"finger": names, "set": [name for name, _ in sets]}


def test_splits_share_no_finger_and_use_every_sample_of_a_set() -> None:
    columns, vocabulary = make_columns(("", 50))
    parts = splits(columns, vocabulary, Config())
    assert {name: len(ids) for name, ids in parts.items()} == {"train": 105, "val": 15, "test": 30}
    owners = [set(columns["finger"][ids]) for ids in parts.values()]
    assert len(set.union(*owners)) == sum(map(len, owners)) == 50


def test_a_split_depends_only_on_the_seed_and_the_names() -> None:
    columns, vocabulary = make_columns(("", 50))
    first = splits(columns, vocabulary, Config())
    for name, ids in splits(columns, vocabulary, Config()).items():
        assert np.array_equal(ids, first[name])
    assert not np.array_equal(splits(columns, vocabulary, Config(seed=1))["val"], first["val"])


def test_named_test_sets_are_separate_splits_and_never_train() -> None:
    columns, vocabulary = make_columns(("FVC_1", 10), ("FVC_2", 10), ("UareU", 30))
    config = Config()
    config.split.test_sets = ["FVC_*"]
    parts = splits(columns, vocabulary, config)
    assert {name: len(ids) for name, ids in parts.items()} == {
        "train": 81,
        "val": 9,
        "test_FVC_1": 30,
        "test_FVC_2": 30,
    }
    assert set(columns["set"][parts["train"]]) == {2}
    config.split.val_sets, config.split.test_sets = ["FVC_1"], ["FVC_2"]
    assert np.array_equal(splits(columns, vocabulary, config)["val"], np.flatnonzero(columns["set"] == 0))


def test_a_pattern_that_matches_no_set_lists_the_sets_found() -> None:
    columns, vocabulary = make_columns(("FVC_1", 10), ("UareU", 30))
    config = Config()
    config.split.test_sets = ["FVC2004_*"]
    with pytest.raises(UserError, match=r"'FVC2004_\*' matches no set.*FVC_1, UareU"):
        splits(columns, vocabulary, config)


def test_a_set_that_both_trains_and_tests_is_refused() -> None:
    columns, vocabulary = make_columns(("FVC_1", 10), ("UareU", 30))
    config = Config()
    config.split.train_sets, config.split.test_sets = ["UareU", "FVC_1"], ["FVC_1"]
    with pytest.raises(UserError, match="'FVC_1' is named in two"):
        splits(columns, vocabulary, config)


def test_too_few_fingers_to_hold_out_any_are_refused() -> None:
    columns, vocabulary = make_columns(("", 5))
    with pytest.raises(UserError, match="5 fingers to train on"):
        splits(columns, vocabulary, Config())
