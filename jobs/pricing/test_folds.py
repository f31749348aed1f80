"""Folds of near-duplicate groups."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.pricing import VALID_ROWS, make_config, write_catalogue
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError

from . import folds, pack
from .pack import fit_artifacts, splits


def test_too_few_groups_for_the_folds_are_refused(tmp_path: Path) -> None:
    same = [[str(i), f"Item Name: Rice, {i} oz", "3"] for i in range(40)]
    with pytest.raises(
        UserError, match=r"the 40 valid rows form 1 groups of near-duplicates, such as 'rice'; expected 20"
    ):
        fit_artifacts(write_catalogue(tmp_path, same), make_config())


def test_a_catalogue_without_a_valid_row_and_a_fold_beyond_the_last_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row can train: some.csv, line 2: price is 'x'"):
        fit_artifacts(write_catalogue(tmp_path, [["1", "a", "x"]]), make_config())
    with pytest.raises(UserError, match=r"packing.fold=5: expected -1 .. 4, for packing.folds=5"):
        fit_artifacts(write_catalogue(tmp_path, VALID_ROWS), make_config(fold=5))


@given(st.lists(st.integers(0, 30), min_size=20, max_size=200), st.integers(0, 3))
def test_folds_share_no_group_and_are_reproducible(groups: list[int], seed: int) -> None:
    names = [f"g{number}" for number in groups]
    log_price = np.sin(np.arange(len(groups)))
    fold = folds.assign_folds(names, log_price, folds=4, seed=seed)
    assert all(len({f for f, n in zip(fold, names, strict=True) if n == name}) == 1 for name in names)
    assert np.array_equal(fold, folds.assign_folds(names, log_price, folds=4, seed=seed))


def test_folds_are_balanced_in_rows_and_in_every_price_decile() -> None:
    rng = np.random.default_rng(0)
    size = rng.integers(1, 8, 600)
    log_price = np.concatenate([rng.normal(rng.normal(3, 1), 0.2, n) for n in size])
    names = np.repeat([f"g{i}" for i in range(600)], size).tolist()
    fold = folds.assign_folds(names, log_price, folds=5, seed=0)
    edges = np.quantile(log_price, np.linspace(0, 1, 11)[1:-1])
    counts = np.stack([np.bincount(np.searchsorted(edges, log_price[fold == k]), minlength=10) for k in range(5)])
    assert counts.sum(axis=1).max() - counts.sum(axis=1).min() <= 3
    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 0.1 * counts.mean()


def test_packed_parts_share_no_near_duplicates_and_cover_every_row(data: ShardSet) -> None:
    parts = splits(data.columns, data.vocabulary, make_config())
    assert set(parts) == {"train", "val", "test"}
    assert sum(map(len, parts.values())) == data.count == 400
    groups = [set(data.columns["group"][ids].tolist()) for ids in parts.values()]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    assert len(parts["test"]) == pytest.approx(80, abs=4) and len(parts["val"]) == pytest.approx(32, abs=4)


def test_without_a_test_fold_all_rows_train_or_validate(catalogue_folder: Path) -> None:
    parts = pack.read_table(catalogue_folder, make_config(fold=-1)).parts
    assert set(parts) == {"train", "val"}
