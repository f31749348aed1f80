"""The evaluation pairs: drawn once when packing, and how scores of them become metrics.

A pair is `same` (two pictures of a person), `twin` (one of each twin) or `random` (two strangers). All pairs of the
first two kinds count; strangers are drawn. Both sides of a pair lie in one set, and no pair comes twice.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard import scoring as verification
from trainyard.scoring import ErrorRates

KINDS = ("same", "twin", "random")
SAME, TWIN, RANDOM = range(3)
LETTERS = "str"
PAIRS_AT_ONCE = 65536
FARS = {"1e-2": 0.01, "1e-3": 0.001}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def draw(person: Sequence[str], family: Sequence[str], *, strangers: int, seed: int) -> list[list[tuple[int, int]]]:
    """Draw the pairs of one set.

    Args:
        person, family: of each of N pictures.
        strangers: pairs of strangers drawn per picture; fewer where there are not as many.

    Returns:
        For each picture its (kind, other picture), the other one being later in the order: each pair once.
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
        # a picture early in the order has more later ones: draw in proportion, and all have as many on the whole
        wanted = min(len(others), round(2 * strangers * len(later) / max(1, count - 1)))
        unknown = np.sort(rng.choice(others, wanted, replace=False)) if wanted else others[:0]
        chosen.append([(kind, int(j)) for kind, ids in enumerate((same, twin, unknown)) for j in ids])
    return chosen


def written(pairs: Sequence[tuple[int, int]]) -> str:
    """Return pairs as the text of a column: "s12 t30 r77", a letter for the kind and the number of the other side."""
    return " ".join(f"{LETTERS[kind]}{number}" for kind, number in pairs)


@dataclass(frozen=True)
class PairList:
    """All evaluation pairs of a data set, in sample ids."""

    one: Integers  # (P,)
    other: Integers  # (P,)
    kind: Integers  # (P,)

    @classmethod
    def read(cls, columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]]) -> "PairList":
        """Read the column `pairs`; pairs with a picture that packing had to leave out are dropped."""
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

    def sha256(self) -> str:
        """Return a digest of the list: two results with equal ones were scored on the same pairs."""
        return hashlib.sha256(np.stack([self.one, self.other, self.kind]).astype("<i8").tobytes()).hexdigest()

    def count(self, kind: int) -> int:
        return int((self.kind == kind).sum())

    def within(self, ids: Integers) -> "PairList":
        """Return the pairs whose sides are both among the ascending `ids`, as positions in them."""
        one, other = np.searchsorted(ids, self.one), np.searchsorted(ids, self.other)
        clipped = [np.minimum(side, max(0, len(ids) - 1)) for side in (one, other)]
        inside = (ids[clipped[0]] == self.one) & (ids[clipped[1]] == self.other)
        return PairList(one[inside], other[inside], self.kind[inside])


@dataclass(frozen=True)
class Scores:
    """Scored pairs, with the families of both sides."""

    score: Floats  # (P,) higher is more alike
    kind: Integers  # (P,)
    families: Integers  # (P, 2)

    def of(self, *kinds: int) -> "Scores":
        return self._kept(np.isin(self.kind, kinds))

    def above(self, score: float) -> "Scores":
        return self._kept(self.score > score)

    def joined(self, other: "Scores") -> "Scores":
        return Scores(
            np.concatenate([self.score, other.score]),
            np.concatenate([self.kind, other.kind]),
            np.concatenate([self.families, other.families]),
        )

    def _kept(self, chosen: NDArray[np.bool_]) -> "Scores":
        return Scores(self.score[chosen], self.kind[chosen], self.families[chosen])


@dataclass(frozen=True)
class Exam:
    """What scoring needs to know of a data set of N pictures."""

    pairs: PairList
    family: Integers  # (N,) codes
    validates: NDArray[np.bool_]  # (N,) whether a picture is of the validation set

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]]) -> "Exam":
        set_of = np.array(vocabulary["set"])[columns["set"]]
        return cls(PairList.read(columns, vocabulary), columns["family"], set_of == "val")

    @property
    def rival(self) -> int:
        """The impostors that decide: twins, or strangers where the validation set has no twins."""
        return TWIN if self.validates[self.pairs.one[self.pairs.kind == TWIN]].any() else RANDOM

    def scores(self, embedding: np.ndarray, ids: Integers) -> Scores:
        """Return the cosine of every pair among some pictures; costs one product per pair.

        Args:
            embedding: (n, D) of unit length.
            ids: (n,) ascending sample ids.
        """
        pairs = self.pairs.within(ids)
        cosine = np.empty(len(pairs.one))
        for start in range(0, len(cosine), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            cosine[part] = np.einsum("pd,pd->p", embedding[pairs.one[part]], embedding[pairs.other[part]])
        return Scores(cosine, pairs.kind, self.family[ids][np.stack([pairs.one, pairs.other], axis=1)])


def metrics(genuine: Scores, impostor: Scores, *, suffix: str, draws: int) -> dict[str, float]:
    """Return EER, AUC, d' and TAR@FAR of one kind of impostors, each with its 95 % interval.

    TAR@FAR=1 % needs 100 impostor pairs, 0.1 % needs 1,000; below, they are left out. Intervals are of `draws`
    resamples of the families with replacement: pairs of one family are not independent. A family drawn c times counts
    c times in its own pairs, and c * d times in pairs with one drawn d times.
    """
    both = genuine.joined(impostor)
    is_genuine = np.arange(len(both.score)) < len(genuine.score)
    curve = _Curve(both.score, is_genuine)
    result = {f"d_prime_{suffix}": verification.d_prime(genuine.score, impostor.score)}
    resampled = [values for weight in _resamples(both.families, draws) if (values := curve.statistics(weight))]
    for name, value in curve.statistics(np.ones(len(both.score))).items():
        result[f"{name}_{suffix}"] = value
        if resampled:
            low, high = np.quantile([values[name] for values in resampled], [0.025, 0.975])
            result |= {f"{name}_{suffix}_low": float(low), f"{name}_{suffix}_high": float(high)}
    return result


def accuracy(genuine: Scores, impostor: Scores, threshold: float) -> float:
    """Return the mean of genuine pairs accepted and impostor pairs rejected, each as a share of its own."""
    return float(((genuine.score >= threshold).mean() + (impostor.score < threshold).mean()) / 2)


def area_under_curve(rates: ErrorRates) -> float:
    """Return the area under TAR over FAR: the chance that a genuine pair scores above an impostor pair."""
    accepted = 1 - rates.fnmr
    return float(-np.sum(np.diff(rates.fmr) * (accepted[1:] + accepted[:-1]) / 2))


def _resamples(families: Integers, draws: int) -> Iterator[Floats]:
    """Yield the weight of each pair in each resample of the families."""
    names, codes = np.unique(families, return_inverse=True)
    one, other = codes.reshape(families.shape).T
    rng = np.random.default_rng(0)
    for counts in rng.multinomial(len(names), np.full(len(names), 1 / len(names)), draws).astype(np.float64):
        yield np.where(one == other, counts[one], counts[one] * counts[other])


class _Curve:
    """Sorted scores, and the places where the threshold may lie, so that weights alone can change."""

    def __init__(self, score: Floats, is_genuine: NDArray[np.bool_]) -> None:
        self.order = np.argsort(score, kind="stable")
        self.is_genuine = is_genuine[self.order]
        thresholds, first = np.unique(score[self.order], return_index=True)
        self.thresholds, self.below = np.append(thresholds, np.inf), np.append(first, len(score))
        self.impostors = int(np.count_nonzero(~is_genuine))

    def statistics(self, weight: Floats) -> dict[str, float]:
        """Return the metrics of weighted pairs; none where a side has no weight."""
        ordered = weight[self.order]
        genuine = np.cumsum(np.append(0, ordered * self.is_genuine))
        impostor = np.cumsum(np.append(0, ordered * ~self.is_genuine))
        if not genuine[-1] or not impostor[-1]:
            return {}
        fmr = (impostor[-1] - impostor[self.below]) / impostor[-1]
        fnmr = genuine[self.below] / genuine[-1]
        rates = ErrorRates(self.thresholds, fmr, fnmr)
        result = {"eer": rates.equal_error_rate().rate, "auc": area_under_curve(rates)}
        for name, far in FARS.items():
            if self.impostors * far >= 1:
                result[f"tar_at_far_{name}"] = rates.tar_at_far(far)
        return result
