"""TF-IDF and ridge regression: the baseline that a network must beat, and the other half of a blend."""

import json
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix, hstack, spmatrix  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
from sklearn.linear_model import Ridge  # type: ignore[import-untyped]

from trainyard.train.module import SampleSource

from .metrics import smape

ALPHAS = (0.1, 0.3, 1.0, 3.0)
MAX_FEATURES = 200_000  # bounds memory; small catalogues never reach it
_FOLDS = 5  # that choose a penalty


def predict_prices(training: SampleSource, evaluated: SampleSource) -> np.ndarray:
    """Return the prices (n,) that a ridge fitted on the training split predicts, from a model's own inputs."""
    columns = training.data.columns
    groups, prices = columns["group"][training.ids], columns["price"][training.ids]
    ridge = tune_ridge(*_read_inputs(training), prices, groups % _FOLDS)
    return ridge.predict(*_read_inputs(evaluated))


def tune_ridge(words: Sequence[str], numbers: np.ndarray, prices: np.ndarray, folds: np.ndarray) -> "TfidfRidge":
    """Fit a ridge with the penalty of `ALPHAS` whose predictions have the least SMAPE on the folds it has not seen.

    Args:
        words: (N,) texts, or tokens as words.
        folds: (N,) numbers; near-duplicates share one. If all do, the penalty is 1.
    """
    text_N, predicted = np.array(words, dtype=object), np.empty((len(ALPHAS), len(words)))
    if len(np.unique(folds)) < 2:
        return TfidfRidge().fit(text_N, prices, numbers)
    for fold in np.unique(folds):
        own = folds == fold
        for i, alpha in enumerate(ALPHAS):
            ridge = TfidfRidge(alpha).fit(text_N[~own], prices[~own], numbers[~own])
            predicted[i, own] = ridge.predict(text_N[own], numbers[own])
    best = min(range(len(ALPHAS)), key=lambda i: smape(predicted[i], prices))
    return TfidfRidge(ALPHAS[best]).fit(text_N, prices, numbers)


def _read_inputs(source: SampleSource) -> tuple[list[str], np.ndarray]:
    """Return the ids of each sample's tokens as words, because packed data has no text, and its numbers (n, F)."""
    words = [" ".join(f"t{token}" for token in ids.tolist()) for ids in source.data.read("tokens", source.ids)]
    return words, np.stack(source.data.read("numbers", source.ids))


class TfidfRidge:
    """Ridge regression on log1p of the price, from words and word pairs weighted by TF-IDF.

    Args:
        alpha: strength of the penalty.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self._vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=1, max_features=MAX_FEATURES)
        self._ridge = Ridge(alpha=alpha, solver="auto")

    def fit(
        self, texts: Sequence[str] | np.ndarray, prices: np.ndarray, numbers: np.ndarray | None = None
    ) -> "TfidfRidge":
        """Fit on texts and prices above 0; `numbers` (N, F), if given, are further features."""
        self._ridge.fit(self._stack_features(self._vectorizer.fit_transform(texts), numbers), np.log1p(prices))
        return self

    def predict(self, texts: Sequence[str] | np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray:
        """Return (N,) float64 prices above 0."""
        log_prices = self._ridge.predict(self._stack_features(self._vectorizer.transform(texts), numbers))
        prices: np.ndarray = np.expm1(np.maximum(log_prices, 1e-3))
        return prices

    def to_json(self) -> str:
        """Serialize the fit as JSON, weights and coefficients to seven digits."""
        words = sorted(self._vectorizer.vocabulary_, key=self._vectorizer.vocabulary_.__getitem__)
        idf, coefficients = (
            [float(f"{value:.7g}") for value in values] for values in (self._vectorizer.idf_, self._ridge.coef_)
        )
        intercept = float(self._ridge.intercept_)
        return json.dumps({"words": words, "idf": idf, "coefficients": coefficients, "intercept": intercept})

    @classmethod
    def from_json(cls, text: str) -> "TfidfRidge":
        """Read what `to_json` wrote."""
        state, fitted = json.loads(text), cls()
        fitted._vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, vocabulary=state["words"])
        fitted._vectorizer.idf_ = np.array(state["idf"])
        fitted._ridge.coef_, fitted._ridge.intercept_ = np.array(state["coefficients"]), state["intercept"]
        return fitted

    @staticmethod
    def _stack_features(words: spmatrix, numbers: np.ndarray | None) -> spmatrix:
        return words if numbers is None else hstack([words, csr_matrix(numbers)], format="csr")
