"""Numeric features of an item."""

import math

import numpy as np
import pytest

from . import features, parsing


def fit_features(prices: list[float]) -> tuple[features.Features, list[parsing.Item], list[int]]:
    items = [parsing.parse(f"Item Name: Acme thing{i}, {i + 1} kg") for i in range(len(prices))]
    inner = [i % features.INNER_FOLDS for i in range(len(prices))]
    fitted = features.fit(items, [(float(i),) for i in range(len(prices))], np.log(prices), inner, columns=["width"])
    return fitted, items, inner


def test_features_are_standardised_bounded_and_zero_for_unknown_values() -> None:
    fitted, items, inner = fit_features([1.0 + i for i in range(50)])
    rows = np.stack([fitted.compute_row(item, (float(i),), inner_fold=inner[i]) for i, item in enumerate(items)])
    varied = rows.std(axis=0) > 1e-3
    assert rows.dtype == np.float32 and varied.sum() >= 5 and len(set(fitted.names)) == rows.shape[1]
    np.testing.assert_allclose(rows[:, varied].mean(axis=0), 0, atol=0.05)  # clipping shifts the mean a little
    np.testing.assert_allclose(rows[:, varied].std(axis=0), 1, atol=0.1)
    odd = fitted.compute_row(parsing.parse("Item Name: x\nValue: 1e9\nUnit: Bushel\n"), (math.nan,), inner_fold=None)
    values = {name: float(value) for name, value in zip(fitted.names, odd, strict=True)}
    assert np.abs(odd).max() <= features.CLIP and np.isfinite(odd).all()
    assert values["width_log"] == values["g_log"] == 0.0
    assert values["width_known"] < 0 or values["width_known"] == 0.0
    assert features.Features.from_json(fitted.to_json()) == fitted


def test_the_mean_price_of_a_brand_excludes_the_rows_own_price() -> None:
    prices = [10.0] * 50
    with_outlier = [*prices[:-1], 10_000.0]
    (plain, items, inner), (changed, _, _) = fit_features(prices), fit_features(with_outlier)
    assert plain._estimate_brand_price(items[-1], inner[-1]) == pytest.approx(
        plain._estimate_brand_price(items[0], inner[0])
    )
    own, other = (changed._estimate_brand_price(items[i], inner[i])[0] for i in (49, 0))
    assert own - changed.log_price < 0 < other - own  # it sees the others' prices, and they see its own
    acme, unknown = changed.brands["acme"], changed._estimate_brand_price(parsing.parse("Item Name: Nobody"), None)
    assert sum(acme[0]) == 50 and unknown == (changed.log_price, 0.0)
