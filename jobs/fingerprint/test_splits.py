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


def make_shared_columns(split: str = "") -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Return columns and vocabulary of 20 fingers with one print in each of two sets; `split`: a letter per finger."""
    names = {"a": "train", "v": "val", "t": "test_one", "": ""}
    vocabulary = {
        "finger": [f"f{i:02d}" for i in range(20)],
        "set": ["one", "two"],
        "split": sorted(set(names.values())),
    }
    given = [names[letter] for letter in split or [""] * 20]
    return {
        "finger": np.tile(np.arange(20), 2),
        "set": np.repeat([0, 1], 20),
        "split": np.tile([vocabulary["split"].index(name) for name in given], 2),
    }, vocabulary


def test_fingers_that_sets_share_are_held_out_in_all_sets() -> None:
    columns, vocabulary = make_shared_columns()
    parts = splits(columns, vocabulary, Config())
    owners = [set(columns["finger"][ids]) for ids in parts.values()]
    assert len(set.union(*owners)) == sum(map(len, owners)) == 20
    assert {name: len(ids) for name, ids in parts.items()} == {"train": 28, "val": 4, "test": 8}
    config = Config()
    config.split.train_sets = ["one"]
    assert set(columns["set"][np.concatenate(list(splits(columns, vocabulary, config).values()))]) == {0}


def test_a_finger_that_trains_in_one_set_and_tests_in_another_is_refused() -> None:
    columns, vocabulary = make_shared_columns()
    config = Config()
    config.split.test_sets = ["two"]
    with pytest.raises(UserError, match=r"18 fingers, such as f\d\d, are in 'train' and in 'test'.*index\.csv"):
        splits(columns, vocabulary, config)


def test_the_split_column_of_index_csv_wins() -> None:
    columns, vocabulary = make_shared_columns("a" * 12 + "v" * 3 + "t" * 5)
    parts = splits(columns, vocabulary, Config())
    assert {name: set(columns["finger"][ids]) for name, ids in parts.items()} == {
        "train": set(range(12)),
        "val": set(range(12, 15)),
        "test_one": set(range(15, 20)),
    }
    columns, vocabulary = make_shared_columns("a" * 15 + "t" * 5)
    parts = splits(columns, vocabulary, Config())
    assert [len(parts[name]) for name in ("train", "val", "test_one")] == [26, 4, 10]
    config = Config()
    config.split.test_sets = ["two"]
    with pytest.raises(UserError, match=r"both choose training prints.*split\.test_sets=\[\]"):
        splits(columns, vocabulary, config)
    with pytest.raises(UserError, match="leaves 0 fingers to train on"):
        splits(*make_shared_columns("t" * 20), Config())
