"""Metrics: error rates and operating points of genuine and impostor scores, classification, regression; intervals.

A pair is accepted when its score is at least the threshold. FMR, the false match rate, is the share of impostor
pairs accepted; FNMR, the false non-match rate, the share of genuine pairs rejected. All rates are in 0..1.
Definitions follow Maio et al., "FVC2000: Fingerprint verification competition" (TPAMI 24(3), 2002).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.errors import UserError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_COVERAGE = 0.95  # of an interval
_DRAWS_LOST = "draws_lost"
_FPIRS = (0.1, 0.01, 0.001)
_LEAST_HIGHEST = 4096  # thresholds that a bootstrap draw looks at first


@dataclass(frozen=True)
class EqualErrorRate:
    """The rate at which FMR and FNMR are equal. With finitely many pairs they may cross without being equal.

    `low` and `high` are the two rates at the threshold where they are closest, and `rate` is their mean. They are not
    a confidence interval: for that, see `bootstrap`.
    """

    rate: float
    low: float
    high: float
    threshold: float


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, and the share of impostor pairs accepted and of genuine pairs rejected with it."""

    threshold: float
    fmr: float
    fnmr: float


@dataclass(frozen=True)
class ErrorRates:
    """Both error rates at every threshold that changes them: each score once, ascending, then infinity (accept none).

    `fmr` never rises and `fnmr` never falls along the thresholds; all three are (T,) float64.
    """

    thresholds: Floats
    fmr: Floats
    fnmr: Floats
    left_out: int = 0  # thresholds below these

    def equal_error_rate(self) -> EqualErrorRate:
        """Return the mean of FMR and FNMR at the threshold where they differ least; in a tie, the lower threshold.

        FMR - FNMR never rises, so that threshold is where its sign changes, or the one before.
        """
        after = self._find_first(lambda k: bool(self.fmr[k] <= self.fnmr[k]))
        k = min(after - 1, after, key=lambda k: abs(self.fmr[k] - self.fnmr[k]))
        a, b = float(self.fmr[k]), float(self.fnmr[k])
        return EqualErrorRate((a + b) / 2, min(a, b), max(a, b), float(self.thresholds[k]))

    def find_point_at_fmr(self, limit: float) -> OperatingPoint:
        """Return the lowest threshold with FMR <= `limit`, which has the lowest FNMR; it may be infinite."""
        k = self._find_first(lambda k: bool(self.fmr[k] <= limit))
        return OperatingPoint(float(self.thresholds[k]), float(self.fmr[k]), float(self.fnmr[k]))

    def _find_first(self, holds: Callable[[int], bool]) -> int:
        """Return the lowest threshold at which something holds that holds at all higher ones.

        Raises:
            _LeftOut: it may be one of those that are left out.
        """
        k = bisect_left(range(len(self.fmr)), True, key=holds)
        if k == 0 and self.left_out:
            raise _LeftOut
        return k

    def fnmr_at_fmr(self, limit: float) -> float:
        """Return the lowest FNMR with FMR <= `limit`: FMR100 is 0.01, FMR1000 is 0.001, ZeroFMR is 0."""
        return self.find_point_at_fmr(limit).fnmr

    def tar_at_far(self, limit: float) -> float:
        """Return the share of genuine pairs accepted at the best threshold with FMR <= `limit`."""
        return 1.0 - self.fnmr_at_fmr(limit)

    def area_under_curve(self) -> float:
        """Return the area under TAR over FAR: the probability that a genuine pair scores above an impostor pair."""
        if self.left_out:
            raise _LeftOut
        accepted = 1 - self.fnmr
        return float(-np.sum(np.diff(self.fmr) * (accepted[1:] + accepted[:-1]) / 2))


class _LeftOut(Exception):
    """Error rates at lower thresholds are needed."""


def compute_error_rates(genuine: ArrayLike, impostor: ArrayLike) -> ErrorRates:
    """Return FMR and FNMR at every score.

    Costs three sorts: about 3 s and 0.6 GiB for 10^7 scores.

    Args:
        genuine: (G,) scores of pairs of one identity; higher means more similar.
        impostor: (I,) scores of pairs of two identities.

    Raises:
        UserError: either is empty or holds a number that is not finite.
    """
    genuine, impostor = _check_pair_scores("genuine", genuine), _check_pair_scores("impostor", impostor)
    weights = np.ones(len(genuine), np.int64), np.ones(len(impostor), np.int64)
    return _Counter(genuine, impostor).compute_rates(*weights, totals=(len(genuine), len(impostor)))


def compute_smallest_rate(trials: int) -> float:
    """Return the lowest error rate that so many independent trials can establish: without any error in n trials, the
    true rate is at most 3 / n with 95 % confidence, because (1 - 3 / n)**n is about exp(-3) = 0.05.

    The Rule of 3, ISO/IEC 19795-1:2006, annex B.1. Trials that share a sample are not independent and establish less.
    """
    return min(1.0, 3 / trials) if trials else 1.0


def compare_embeddings(one_ND: ArrayLike, other_ND: ArrayLike) -> Floats:
    """Return the inner product of each row of one with the same row of the other, (N,) float64.

    Of unit-length rows it is their cosine. Products of float32 are exact in float64, and each row is summed in the
    same order whatever N is, so a pair has one score wherever it is computed.
    """
    product: Floats = np.asarray(one_ND, dtype=np.float64) * np.asarray(other_ND, dtype=np.float64)
    scores: Floats = product.sum(axis=1)
    return scores


def d_prime(genuine: ArrayLike, impostor: ArrayLike) -> float:
    """Return the distance between the two means in units of the root mean square of both standard deviations.

    Infinite when neither group varies and the means differ; 0 when nothing differs.

    Raises:
        UserError: either is empty or holds a number that is not finite.
    """
    genuine, impostor = _check_pair_scores("genuine", genuine), _check_pair_scores("impostor", impostor)
    distance = abs(float(genuine.mean() - impostor.mean()))
    spread = float(np.sqrt((genuine.var() + impostor.var()) / 2))
    return distance / spread if spread > 0 else (np.inf if distance > 0 else 0.0)


def compute_operating_points(rates: ErrorRates, *, impostors: int) -> dict[str, float]:
    """Return the usual metrics by name, without those that need more impostor pairs than there are.

    An FMR of 1/n cannot be measured with fewer than n impostor pairs, so FMR100 needs 100 of them, FMR1000 and
    TAR@FAR=1e-3 need 1,000, and TAR@FAR=1e-4 needs 100,000 (ten errors, because it is used to rank systems).

    Args:
        impostors: number of impostor pairs behind `rates`.
    """
    metrics = {"eer": rates.equal_error_rate().rate, "zero_fmr": rates.fnmr_at_fmr(0.0)}
    if impostors >= 100:
        metrics["fmr100"] = rates.fnmr_at_fmr(0.01)
    if impostors >= 1_000:
        metrics["fmr1000"] = rates.fnmr_at_fmr(0.001)
        metrics["tar_at_far_1e-3"] = rates.tar_at_far(0.001)
    if impostors >= 100_000:
        metrics["tar_at_far_1e-4"] = rates.tar_at_far(0.0001)
    return metrics


@dataclass(frozen=True)
class Pairs:
    """Scores of pairs, with the identity (cluster) of each side. Identities are numbered 0 .. F-1."""

    genuine: Floats  # (G,)
    impostor: Floats  # (I,)
    genuine_identity: Integers  # (G,)
    impostor_identities: Integers  # (I, 2)

    def compute_metrics(self) -> dict[str, float]:
        """Return `compute_operating_points` of these scores.

        Raises:
            UserError: there is no genuine or no impostor pair, or a score is not finite.
        """
        return compute_operating_points(compute_error_rates(self.genuine, self.impostor), impostors=len(self.impostor))

    def compute_intervals(self, *, draws: int, seed: int = 0) -> "Intervals":
        """Return the 95 % bootstrap intervals of the metrics of `compute_metrics`; see `bootstrap`."""
        return bootstrap(
            self, lambda r: compute_operating_points(r, impostors=len(self.impostor)), draws=draws, seed=seed
        )


@dataclass(frozen=True)
class Intervals:
    """The bootstrap intervals of some metrics, or why there are none."""

    ends: Mapping[str, tuple[float, float]]  # by metric; empty if too many draws were of no use
    draws_lost: float  # share of the draws that were of no use, 0..1

    def to_metrics(self, suffix: str = "") -> dict[str, float]:
        """Return `<metric><suffix>_low` and `_high` of each metric; without intervals, `draws_lost<suffix>`."""
        ends = {
            f"{name}{suffix}_{side}": value
            for name, (low, high) in self.ends.items()
            for side, value in (("low", low), ("high", high))
        }
        return ends if ends or not self.draws_lost else {_DRAWS_LOST + suffix: self.draws_lost}


def summarize_draws(values: Sequence[Mapping[str, float]], *, draws: int) -> Intervals:
    """Return the 95 % percentile interval of each metric over bootstrap draws (`draw_groups`).

    There is none if more draws were of no use than an interval leaves outside, because the missing values could then
    lie anywhere: with only a few independent clusters, the draws that remain are nearly all the same.

    Args:
        values: the metrics of each draw that could be scored.
        draws: how many were drawn; 0: no intervals are wanted.
    """
    lost = 1 - len(values) / draws if draws else 0.0
    if not values or lost > 1 - _COVERAGE:
        return Intervals({}, lost)
    edges = [(1 - _COVERAGE) / 2, (1 + _COVERAGE) / 2]
    names = values[0]
    quantiles = {name: np.quantile([value[name] for value in values], edges) for name in names}
    return Intervals({name: (float(low), float(high)) for name, (low, high) in quantiles.items()}, lost)


def draw_groups(count: int, draws: int, *, seed: int = 0) -> Iterator[Integers]:
    """Yield the groups that each bootstrap draw has, (count,) from 0, drawn with replacement.

    A draw that repeats one group alone says nothing about the spread between groups, and is left out: fewer than four
    groups have no interval (`summarize_draws`).
    """
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        drawn = rng.integers(count, size=count)
        if (drawn != drawn[0]).any():
            yield drawn


def explain_missing_intervals(metrics: Iterable[str]) -> str:
    """Return a sentence about the intervals that `to_metrics` left out; "" if these metrics lack none."""
    lost = [name for name in metrics if name.startswith(_DRAWS_LOST)]
    return f"No 95 % interval where bootstrap draws were of no use ({', '.join(lost)}): too few groups." if lost else ""


def bootstrap(
    pairs: Pairs, statistic: Callable[[ErrorRates], Mapping[str, float]], *, draws: int, seed: int = 0
) -> Intervals:
    """Return 95 % percentile intervals of a statistic over resampled identities.

    Pairs that share an identity are not independent, so identities, not pairs, are drawn with replacement. An identity
    drawn c times gives its own pairs weight c, and its pairs with an identity drawn d times weight c * d. This equals
    copying the drawn identities and leaving out pairs of two copies of one identity. Nothing is scored or sorted again.
    Of the sorted scores, only as many of the highest are weighted as the statistic asks about: one draw costs about
    10 ns for each of these. Draws without a genuine or without an impostor pair are of no use.

    Args:
        statistic: uses the methods of the rates, which are those of the highest thresholds, to find its scores.

    Raises:
        UserError: a kind of pair is missing.
    """
    genuine, impostor = _check_pair_scores("genuine", pairs.genuine), _check_pair_scores("impostor", pairs.impostor)
    counter = _Counter(genuine, impostor)
    own = pairs.genuine_identity[counter.genuine_order]
    one, other = pairs.impostor_identities[counter.impostor_order].T.copy()
    identities = 1 + int(max(pairs.genuine_identity.max(), pairs.impostor_identities.max()))
    genuine_of = np.bincount(own, minlength=identities)
    both, impostors_of = np.unique(one * identities + other, return_counts=True)
    both_one, both_other = np.divmod(both, identities)

    def weigh(counts: Integers, one: Integers, other: Integers) -> Integers:
        return counts[one] * np.where(one == other, 1, counts[other])

    thresholds = len(counter.thresholds)
    highest = max(_LEAST_HIGHEST, thresholds // 64)
    results: list[Mapping[str, float]] = []
    for drawn in draw_groups(identities, draws, seed=seed):
        counts = np.bincount(drawn, minlength=identities)
        totals = int(genuine_of @ counts), int(impostors_of @ weigh(counts, both_one, both_other))
        while all(totals):
            left_out = max(0, thresholds - highest)
            a, b = counter.find_pairs(left_out)
            weights = counts[own[a:]], weigh(counts, one[b:], other[b:])
            try:
                results.append(statistic(counter.compute_rates(*weights, totals=totals, left_out=left_out)))
                break
            except _LeftOut:
                highest *= 2
    return summarize_draws(results, draws=draws)


@dataclass(frozen=True)
class Identification:
    """The result of a search, as far as the identities of samples are known.

    Definitions of ISO/IEC 19795-1:2021: a mated probe's identity is in the gallery, a non-mated probe's is not. FPIR at
    a threshold is the share of non-mated probes for which any gallery row scores at least the threshold; FNIR the share
    of mated probes for which no row of their identity is among the k candidates returned with at least that score.
    """

    mated: int  # probes
    non_mated: int
    rank1: float | None  # share of the mated probes whose best row is of their identity; None without mated probes
    mate_score_M: NDArray[np.floating]  # (mated,) best score of the own identity among the candidates; -inf: none
    top_score_U: NDArray[np.floating]  # (non_mated,) best score of anybody

    def find_fnir(self, fpir: float) -> tuple[float, float]:
        """Return FNIR and the threshold, the lowest with at most this FPIR.

        Raises:
            UserError: there is no mated probe, or too few non-mated probes to establish the rate.
        """
        if not 0 < fpir < 1:
            raise UserError(f"--fpir {fpir:g}: expected a rate between 0 and 1, such as 0.01.")
        if not self.mated or fpir < compute_smallest_rate(self.non_mated):
            raise UserError(
                f"--fpir {fpir:g}: needs mated probes, found {self.mated:,}, and {round(3 / fpir):,} or more non-mated "
                f"ones (rule of 3, ISO/IEC 19795-1), found {self.non_mated:,}. Add probes of people who are not in the "
                "gallery, or type a higher --fpir."
            )
        is_found = np.isfinite(self.mate_score_M)
        top = np.sort(self.top_score_U)
        accepted = int(np.floor(fpir * len(top) + 1e-9))
        # the lowest threshold that at most `accepted` of the top scores reach; ties count as reached
        threshold = float(np.nextafter(top[len(top) - accepted - 1], np.inf))
        return float(np.mean(~is_found | (self.mate_score_M < threshold))), threshold

    def list_supported(self) -> list[float]:
        """Return which of the usual FPIRs these probes can establish."""
        least = compute_smallest_rate(self.non_mated)
        return [fpir for fpir in _FPIRS if self.mated and fpir >= least]


def compute_error_metrics(predicted_N: ArrayLike, target_N: ArrayLike) -> dict[str, float]:
    """Return the root of the mean squared error, the mean absolute error, and the share of the variance explained.

    `rmse_constant` is the error of the mean of these targets; R^2 is NaN if all targets are equal.

    Raises:
        UserError: a prediction is not finite.
    """
    predicted, target = np.asarray(predicted_N, dtype=np.float64), np.asarray(target_N, dtype=np.float64)
    if not np.isfinite(predicted).all():
        bad = int((~np.isfinite(predicted)).sum())
        raise UserError(f"{bad:,} of {len(predicted):,} predictions are not finite. Try a lower optimizer.lr.")
    error, variance = predicted - target, float(target.var())
    squared = float((error**2).mean())
    explained = 1 - squared / variance if variance > 0 else float("nan")
    mae = float(np.abs(error).mean())
    return {"rmse": squared**0.5, "mae": mae, "r2": explained, "rmse_constant": variance**0.5}


def bootstrap_error_metrics(predicted_N: ArrayLike, target_N: ArrayLike, *, draws: int) -> Intervals:
    """Return the 95 % percentile intervals of `compute_error_metrics` over resampled samples."""
    predicted, target = np.asarray(predicted_N), np.asarray(target_N)
    drawn = draw_groups(len(target), draws)
    return summarize_draws([compute_error_metrics(predicted[ids], target[ids]) for ids in drawn], draws=draws)


def compute_class_metrics(logits_NK: ArrayLike, labels: Integers) -> dict[str, float]:
    """Return the accuracy, its mean over the classes (balanced), and the cross-entropy in nats, of N samples.

    `accuracy_constant` is that of the most frequent class.

    Args:
        logits_NK: (N, K) float, one for each of K classes.
        labels: (N,) the true classes, 0 .. K-1.

    Raises:
        UserError: a logit is not finite.
    """
    return _average_classes(_score_samples(logits_NK, labels), labels)


def bootstrap_class_metrics(logits_NK: ArrayLike, labels: Integers, *, draws: int) -> Intervals:
    """Return the 95 % percentile intervals of `compute_class_metrics` over resampled samples."""
    scores, drawn = _score_samples(logits_NK, labels), draw_groups(len(labels), draws)
    return summarize_draws([_average_classes(scores[ids], labels[ids]) for ids in drawn], draws=draws)


def describe_class(logits_K: Floats, classes: Sequence[str]) -> dict[str, object]:
    """Return the likeliest class, and its probability by softmax."""
    shifted = np.exp(logits_K - logits_K.max())
    best = int(logits_K.argmax())
    return {"class": classes[best], "probability": float(shifted[best] / shifted.sum())}


def _score_samples(logits_NK: ArrayLike, labels: Integers) -> Floats:
    """Return for each sample whether the largest logit is the true class's, and its cross-entropy: (N, 2)."""
    logits = np.asarray(logits_NK, dtype=np.float64)
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits)).any(axis=1).sum())
        raise UserError(
            f"{bad:,} of {len(logits):,} samples have scores that are not finite. Try a lower optimizer.lr."
        )
    shifted = logits - logits.max(axis=1, keepdims=True)
    entropy = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    return np.stack([logits.argmax(axis=1) == labels, entropy], axis=1)


def _average_classes(scores: Floats, labels: Integers) -> dict[str, float]:
    correct, entropy = scores.T
    present = np.bincount(labels)
    by_class = np.bincount(labels, weights=correct)[present > 0] / present[present > 0]
    return {
        "accuracy": float(correct.mean()),
        "balanced_accuracy": float(by_class.mean()),
        "cross_entropy": float(entropy.mean()),
        "accuracy_constant": float(present.max() / present.sum()),
    }


class _Counter:
    """Scores sorted once, with the position of each threshold, so that only the weights change from draw to draw."""

    def __init__(self, genuine: Floats, impostor: Floats) -> None:
        self.genuine_order, self.impostor_order = np.argsort(genuine), np.argsort(impostor)
        genuine, impostor = genuine[self.genuine_order], impostor[self.impostor_order]
        self.thresholds = np.append(np.unique(np.concatenate([genuine, impostor])), np.inf)
        self.genuine_below = np.searchsorted(genuine, self.thresholds, side="left")
        self.impostor_below = np.searchsorted(impostor, self.thresholds, side="left")

    def find_pairs(self, left_out: int) -> tuple[int, int]:
        """Return the first genuine and the first impostor pair, in sorted order, at or above a threshold."""
        return int(self.genuine_below[left_out]), int(self.impostor_below[left_out])

    def compute_rates(
        self, genuine_weight: Integers, impostor_weight: Integers, *, totals: tuple[int, int], left_out: int = 0
    ) -> ErrorRates:
        """Return the error rates of weighted pairs, without the lowest `left_out` thresholds.

        Args:
            genuine_weight, impostor_weight: of the sorted pairs from `find_pairs(left_out)` on.
            totals: the weights of all genuine and of all impostor pairs.
        """
        a, b = self.find_pairs(left_out)
        genuine = _sum_from(genuine_weight, self.genuine_below[left_out:] - a)
        impostor = _sum_from(impostor_weight, self.impostor_below[left_out:] - b)
        fmr, fnmr = impostor / totals[1], (totals[0] - genuine) / totals[0]
        return ErrorRates(self.thresholds[left_out:], fmr, fnmr, left_out)


def _sum_from(weight: Integers, begin: Integers) -> Integers:
    """Return the sums of the weights from these places on."""
    total = np.zeros(len(weight) + 1, np.int64)
    np.cumsum(weight, out=total[1:])
    sums: Integers = total[-1] - total[begin]
    return sums


def _check_pair_scores(kind: str, scores: ArrayLike) -> Floats:
    return check_scores(
        kind,
        scores,
        empty_message=f"no {kind} pair to score: the evaluation set needs at least two identities, and at least one "
        "identity with two samples. Check how the data is split.",
    )


def check_scores(kind: str, scores: ArrayLike, *, empty_message: str) -> Floats:
    """Return scores as float64.

    Args:
        kind: of the scored things, for the error message.
        empty_message: the error message if there are no scores.

    Raises:
        UserError: there are none, or one is not finite.
    """
    array = np.asarray(scores, dtype=np.float64)
    if array.size == 0:
        raise UserError(empty_message)
    wrong = int(np.count_nonzero(~np.isfinite(array)))
    if wrong:
        raise UserError(
            f"{wrong} of {array.size} {kind} scores are not finite numbers: the model's output is broken. "
            "Look for a diverged loss, and lower the learning rate."
        )
    return array
