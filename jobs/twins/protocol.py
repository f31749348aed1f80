"""The evaluation pairs, drawn once at packing time, and the metrics computed from their scores.

A pair is `same` (two images of one person), `twin` (one image of each twin) or `random` (two strangers). All pairs of
the first two kinds are used; pairs of strangers are sampled. Both images of a pair are in one set; no pair repeats.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainyard import scoring
from trainyard.scoring import ErrorRates

KINDS = ("same", "twin", "random")
SAME, TWIN, RANDOM = range(3)
LETTERS = "str"
PAIRS_AT_ONCE = 65536
FARS = {"1e-2": 0.01, "1e-3": 0.001}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def draw_pairs(
    person: Sequence[str], family: Sequence[str], *, strangers: int, seed: int
) -> list[list[tuple[int, int]]]:
    """Draw the pairs of one set.

    Args:
        person, family: of each of N images.
        strangers: pairs of strangers to draw per image; fewer if there are not enough.

    Returns:
        For each image, its pairs as (kind, index of the other image), which always comes later: each pair once.
    """
    people, families = (np.unique(names, return_inverse=True)[1] for names in (person, family))
    count = len(people)
    rng = np.random.default_rng([seed, count])
    chosen: list[list[tuple[int, int]]] = []
    for i in range(count):
        later = np.arange(i + 1, count)
        same = later[people[later] == people[i]]
        twin = later[(families[later] == families[i]) & (people[later] != people[i])]
        others = later[families[later] != families[i]]
        # earlier images have more later ones: draw in proportion, so that all appear in about as many pairs
        wanted = min(len(others), round(2 * strangers * len(later) / max(1, count - 1)))
        stranger = np.sort(rng.choice(others, wanted, replace=False)) if wanted else others[:0]
        chosen.append([(kind, int(j)) for kind, ids in enumerate((same, twin, stranger)) for j in ids])
    return chosen


def format_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    """Format pairs as column text, "s12 t30 r77": a letter for the kind and the number of the other image."""
    return " ".join(f"{LETTERS[kind]}{number}" for kind, number in pairs)


@dataclass(frozen=True)
class PairList:
    """All evaluation pairs of a data set, in sample ids."""

    one: Integers  # (P,)
    other: Integers  # (P,)
    kind: Integers  # (P,)

    @classmethod
    def read(cls, columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]]) -> "PairList":
        """Read the column `pairs`, dropping pairs with an image that packing left out."""
        number = columns["number"]
        id_of_number = np.full(number.max(initial=-1) + 1, -1, dtype=np.int64)
        id_of_number[number] = np.arange(len(number))
        rows: list[tuple[int, int, int]] = []
        for i, code in enumerate(columns["pairs"].tolist()):
            rows += [(i, int(word[1:]), LETTERS.index(word[0])) for word in vocabulary["pairs"][code].split()]
        one, other, kind = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        known = other < len(id_of_number)
        one, other, kind = one[known], id_of_number[other[known]], kind[known]
        return cls(one[other >= 0], other[other >= 0], kind[other >= 0])

    def compute_sha256(self) -> str:
        """Return a digest of the list: results with equal digests were scored on the same pairs."""
        return hashlib.sha256(np.stack([self.one, self.other, self.kind]).astype("<i8").tobytes()).hexdigest()

    def count(self, kind: int) -> int:
        return int((self.kind == kind).sum())

    def restrict_to(self, ids: Integers) -> "PairList":
        """Return the pairs with both images in the ascending `ids`, as indices into `ids`."""
        one, other = np.searchsorted(ids, self.one), np.searchsorted(ids, self.other)
        clipped = [np.minimum(side, max(0, len(ids) - 1)) for side in (one, other)]
        inside = (ids[clipped[0]] == self.one) & (ids[clipped[1]] == self.other)
        return PairList(one[inside], other[inside], self.kind[inside])


@dataclass(frozen=True)
class Scores:
    """Scored pairs, with the families of both images."""

    score: Floats  # (P,) higher is more alike
    kind: Integers  # (P,)
    families: Integers  # (P, 2)

    def select_kinds(self, *kinds: int) -> "Scores":
        return self._select(np.isin(self.kind, kinds))

    def select_above(self, score: float) -> "Scores":
        return self._select(self.score > score)

    def _select(self, chosen: NDArray[np.bool_]) -> "Scores":
        return Scores(self.score[chosen], self.kind[chosen], self.families[chosen])


@dataclass(frozen=True)
class EvaluationSet:
    """Columns of a data set of N images that scoring needs."""

    pairs: PairList
    family: Integers  # (N,) codes
    is_validation: NDArray[np.bool_]  # (N,) whether an image is in the validation set

    @classmethod
    def from_columns(cls, columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]]) -> "EvaluationSet":
        set_names = np.array(vocabulary["set"])[columns["set"]]
        return cls(PairList.read(columns, vocabulary), columns["family"], set_names == "val")

    @classmethod
    def make_empty(cls) -> "EvaluationSet":
        """Return the evaluation set of no images."""
        none = np.empty(0, dtype=np.int64)
        return cls(PairList(none, none, none), none, none.astype(bool))

    @property
    def deciding_impostor(self) -> int:
        """The kind of impostor that selects the checkpoint: twins, or strangers if validation has no twins."""
        return TWIN if self.is_validation[self.pairs.one[self.pairs.kind == TWIN]].any() else RANDOM

    def score_pairs(self, embedding: np.ndarray, ids: Integers) -> Scores:
        """Return the cosine of every pair among the given images; costs one dot product per pair.

        Args:
            embedding: (n, D), unit length.
            ids: (n,) ascending sample ids.
        """
        pairs = self.pairs.restrict_to(ids)
        cosine = np.empty(len(pairs.one))
        for start in range(0, len(cosine), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            cosine[part] = np.einsum("pd,pd->p", embedding[pairs.one[part]], embedding[pairs.other[part]])
        return Scores(cosine, pairs.kind, self.family[ids][np.stack([pairs.one, pairs.other], axis=1)])


def compute_metrics(genuine: Scores, impostor: Scores, *, suffix: str) -> dict[str, float]:
    """Return EER, AUC, d' and TAR@FAR against one kind of impostor.

    TAR@FAR=1 % needs 100 impostor pairs, 0.1 % needs 1,000; with fewer it is left out.
    """
    metrics = {"d_prime": scoring.d_prime(genuine.score, impostor.score)}
    metrics |= _summarize(scoring.compute_error_rates(genuine.score, impostor.score), impostors=len(impostor.score))
    return {f"{name}_{suffix}": value for name, value in metrics.items()}


def compute_intervals(genuine: Scores, impostor: Scores, *, suffix: str, draws: int) -> dict[str, float]:
    """Return the ends of the 95 % intervals of these metrics, but for d', over resampled families."""
    families = np.concatenate([genuine.families, impostor.families])
    codes = np.unique(families, return_inverse=True)[1].reshape(families.shape)
    own, of_impostors = codes[: len(genuine.score), 0], codes[len(genuine.score) :]
    pairs = scoring.Pairs(genuine.score, impostor.score, own, of_impostors)
    statistic = partial(_summarize, impostors=len(impostor.score))
    return scoring.bootstrap(pairs, statistic, draws=draws).to_metrics(f"_{suffix}")


def _summarize(rates: ErrorRates, *, impostors: int) -> dict[str, float]:
    metrics = {"eer": rates.equal_error_rate().rate, "auc": rates.area_under_curve()}
    return metrics | {f"tar_at_far_{name}": rates.tar_at_far(far) for name, far in FARS.items() if impostors * far >= 1}


def accuracy(genuine: Scores, impostor: Scores, threshold: float) -> float:
    """Return balanced accuracy: the mean of the shares of genuine pairs accepted and impostor pairs rejected."""
    return float(((genuine.score >= threshold).mean() + (impostor.score < threshold).mean()) / 2)
