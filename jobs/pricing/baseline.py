"""The baseline that a network must beat: TF-IDF and ridge regression."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix, hstack, spmatrix  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
from sklearn.linear_model import Ridge  # type: ignore[import-untyped]

from trainyard.train.module import SampleSource

ALPHAS = (0.1, 0.3, 1.0, 3.0)
MAX_FEATURES = 200_000  # bounds memory; small catalogues never reach it


def predict_prices(training: SampleSource, evaluated: SampleSource) -> np.ndarray:
    """Return the prices (n,) that a ridge fitted on the training split predicts, from a model's own inputs.

    Words are tokens, because packed data has no others.
    """
    texts, numbers = _read_inputs(training)
    ridge = TfidfRidge().fit(texts, training.data.columns["price"][training.ids], numbers)
    return ridge.predict(*_read_inputs(evaluated))


def _read_inputs(source: SampleSource) -> tuple[list[str], np.ndarray]:
    """Return the tokens of each sample as words, and its numbers (n, F)."""
    words = [" ".join(f"t{token}" for token in tokens.tolist()) for tokens in source.data.read("tokens", source.ids)]
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

    @staticmethod
    def _stack_features(words: spmatrix, numbers: np.ndarray | None) -> spmatrix:
        return words if numbers is None else hstack([words, csr_matrix(numbers)], format="csr")
