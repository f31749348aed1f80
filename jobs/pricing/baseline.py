"""What a network has to beat: TF-IDF and ridge regression, the median, the geometric mean."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix, hstack, spmatrix
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge

ALPHAS = (0.1, 0.3, 1.0, 3.0)
WORDS_MAX = 200_000  # features; a bound on memory, out of reach of small catalogues


class TfidfRidge:
    """Words and pairs of words, weighted by TF-IDF, into ridge regression on log1p of the price.

    Args:
        alpha: strength of the penalty.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self._words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=1, max_features=WORDS_MAX)
        self._ridge = Ridge(alpha=alpha, solver="auto")

    def fit(self, texts: Sequence[str], prices: np.ndarray, numbers: np.ndarray | None = None) -> "TfidfRidge":
        """Fit on texts and prices above 0; `numbers` (N, F), if given, stand beside the words."""
        self._ridge.fit(self._joined(self._words.fit_transform(texts), numbers), np.log1p(prices))
        return self

    def predict(self, texts: Sequence[str], numbers: np.ndarray | None = None) -> np.ndarray:
        """Return (N,) float64 prices above 0."""
        log = self._ridge.predict(self._joined(self._words.transform(texts), numbers))
        prices: np.ndarray = np.expm1(np.maximum(log, 1e-3))
        return prices

    @staticmethod
    def _joined(words: spmatrix, numbers: np.ndarray | None) -> spmatrix:
        return words if numbers is None else hstack([words, csr_matrix(numbers)], format="csr")
