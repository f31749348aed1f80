"""Metrics of countermeasure scores: EER, t-DCF, DCF and CLLR, as the challenges define them.

A high score means bona fide; a trial is accepted when its score is above the threshold. All rates are in 0..1.
FRR is the share of bona fide trials rejected (misses), FAR the share of spoofed trials accepted (false alarms).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.errors import UserError
from trainyard.report.figures import draw_figure
from trainyard.scoring import Intervals, check_scores, draw_groups, summarize_draws

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

SPOOF_PRIOR, COST_MISS, COST_FALSE_ALARM = 0.05, 1.0, 10.0
MAX_CURVES = 13  # attacks in one plot
TARGET_PRIOR, NONTARGET_PRIOR = 0.95 * 0.99, 0.95 * 0.01


@dataclass(frozen=True)
class DetCurve:
    """Both error rates as the threshold rises past one score at a time; all arrays are (M + 1,) for M trials."""

    frr: Floats
    far: Floats
    thresholds: Floats

    def eer(self) -> tuple[float, float]:
        """Return the mean of FRR and FAR where they differ least, and the threshold there."""
        k = int(np.argmin(np.abs(self.frr - self.far)))
        return float(self.frr[k] + self.far[k]) / 2, float(self.thresholds[k])


def compute_det_curve(bonafide: ArrayLike, spoof: ArrayLike) -> DetCurve:
    """Return the curve of the ASVspoof 2019 evaluation plan.

    One point per trial, not per distinct score: among equal scores the threshold passes bona fide ones first, so ties
    count against the system, and scores that are all equal give an EER of 1.

    Args:
        bonafide, spoof: scores, any order.

    Raises:
        UserError: either is empty, or contains a non-finite number.
    """
    genuine, fake = _validate("bona fide", bonafide), _validate("spoofed", spoof)
    scores = np.concatenate([genuine, fake])
    order = np.argsort(scores, kind="stable")
    return _pass_trials(scores[order], order < len(genuine))


def _pass_trials(scores: Floats, is_bonafide: NDArray[np.bool_]) -> DetCurve:
    """Return the curve of trials in the order in which the threshold passes them; both classes must be there."""
    passed, genuine_passed = np.arange(1, len(scores) + 1), np.cumsum(is_bonafide)
    bonafide = int(genuine_passed[-1])
    spoof = len(scores) - bonafide
    frr = np.concatenate([[0.0], genuine_passed / bonafide])
    far = np.concatenate([[1.0], (spoof - (passed - genuine_passed)) / spoof])
    return DetCurve(frr, far, np.concatenate([[scores[0] - 0.001], scores]))


def eer(bonafide: ArrayLike, spoof: ArrayLike) -> float:
    """Return the equal error rate; see `compute_det_curve`."""
    return compute_det_curve(bonafide, spoof).eer()[0]


@dataclass(frozen=True)
class AsvRates:
    """Error rates of the speaker verification (ASV) behind the countermeasure, at its own EER threshold."""

    miss: float  # of target trials
    false_alarm: float  # of nontarget trials
    miss_spoof: float  # of spoofed trials: share rejected
    false_alarm_spoof: float  # of spoofed trials: share accepted

    @classmethod
    def from_scores(cls, target: ArrayLike, nontarget: ArrayLike, spoof: ArrayLike) -> "AsvRates":
        """Compute the rates from the scores of the three kinds of ASV trials.

        Raises:
            UserError: a group is empty, or contains a non-finite number.
        """
        targets, nontargets = _validate("ASV target", target), _validate("ASV nontarget", nontarget)
        spoofs = _validate("ASV spoof", spoof)
        _, threshold = compute_det_curve(targets, nontargets).eer()
        return cls(
            miss=float((targets < threshold).mean()),
            false_alarm=float((nontargets >= threshold).mean()),
            miss_spoof=float((spoofs < threshold).mean()),
            false_alarm_spoof=float((spoofs >= threshold).mean()),
        )


def min_tdcf_2019(curve: DetCurve, asv: AsvRates) -> float:
    """Return the minimum normalised t-DCF of Kinnunen et al. 2018 (arXiv:1804.09618, equation 10), with 2019 costs.

    Raises:
        UserError: the ASV system is so bad that a cost coefficient is not positive.
    """
    c1 = TARGET_PRIOR * (COST_MISS - COST_MISS * asv.miss) - NONTARGET_PRIOR * COST_FALSE_ALARM * asv.false_alarm
    c2 = COST_FALSE_ALARM * SPOOF_PRIOR * (1 - asv.miss_spoof)
    if c1 <= 0 or c2 <= 0:
        raise UserError(
            f"t-DCF of 2019: C1 = {c1:.4f} and C2 = {c2:.4f} must be above 0. The ASV system does not work, or its "
            "scores are inverted: high must mean the claimed speaker."
        )
    return float(np.min(c1 * curve.frr + c2 * curve.far) / min(c1, c2))


def min_tdcf_2021(curve: DetCurve, asv: AsvRates) -> float:
    """Return the minimum normalised t-DCF of Kinnunen et al. 2020 (arXiv:2007.05979, equations 14 to 16).

    It also counts the errors of the ASV system, so a perfect countermeasure does not reach 0.

    Raises:
        UserError: the ASV system is so bad that a cost coefficient is not positive.
    """
    c0 = TARGET_PRIOR * COST_MISS * asv.miss + NONTARGET_PRIOR * COST_FALSE_ALARM * asv.false_alarm
    c1 = TARGET_PRIOR * COST_MISS - c0
    c2 = SPOOF_PRIOR * COST_FALSE_ALARM * asv.false_alarm_spoof
    if c1 <= 0 or c2 <= 0:
        raise UserError(
            f"t-DCF of 2021: C1 = {c1:.4f} and C2 = {c2:.4f} must be above 0. The ASV system does not work, or its "
            "scores are inverted: high must mean the claimed speaker."
        )
    return float(np.min(c0 + c1 * curve.frr + c2 * curve.far) / (c0 + min(c1, c2)))


def min_dcf(curve: DetCurve) -> float:
    """Return the minimum normalised detection cost of ASVspoof 5, track 1 (evaluation plan, section 4.1)."""
    return float(np.min(_compute_cost(curve.frr, curve.far)))


def act_dcf(bonafide: ArrayLike, spoof: ArrayLike) -> float:
    """Return the cost at the Bayes threshold for log-odds: -ln(beta), beta = C_miss (1 - pi) / (C_fa pi)."""
    threshold = -math.log(COST_MISS * (1 - SPOOF_PRIOR) / (COST_FALSE_ALARM * SPOOF_PRIOR))
    frr = (_validate("bona fide", bonafide) < threshold).mean()
    far = (_validate("spoofed", spoof) >= threshold).mean()
    return float(_compute_cost(frr, far))


def cllr(bonafide: ArrayLike, spoof: ArrayLike) -> float:
    """Return the cost of the log-likelihood ratio in bits (Brummer and du Preez 2006): 0 perfect, 1 uninformative."""
    genuine, fake = _validate("bona fide", bonafide), _validate("spoofed", spoof)
    return float(np.logaddexp(0, -genuine).mean() + np.logaddexp(0, fake).mean()) / (2 * math.log(2))


def compute_metrics(
    scores: ArrayLike, is_bonafide: ArrayLike, attack: Sequence[str], *, asv: AsvRates | None = None
) -> dict[str, float]:
    """Return every metric of one set of trials.

    Args:
        scores: (M,), high for bona fide.
        is_bonafide: (M,) bool.
        attack: of each trial; ignored for bona fide ones.
        asv: rates of the ASV system on the same set; None: no t-DCF.

    Returns:
        `eer` (pooled), `min_tdcf_2019` and `min_tdcf_2021` if `asv` is given, `min_dcf`, `act_dcf`, `cllr`, the counts
        `bonafide` and `spoof`, and `eer_<attack>` (all bona fide trials against those of one attack) if there are
        several attacks.

    Raises:
        UserError: a class is missing, or a score is not finite.
    """
    values, genuine = np.asarray(scores, dtype=np.float64), np.asarray(is_bonafide, dtype=bool)
    bonafide, spoof = values[genuine], values[~genuine]
    metrics = _summarize_curve(compute_det_curve(bonafide, spoof), asv)
    metrics |= {"act_dcf": act_dcf(bonafide, spoof), "cllr": cllr(bonafide, spoof)}
    metrics |= {"bonafide": float(len(bonafide)), "spoof": float(len(spoof))}
    groups = group_by_attack(values, genuine, attack)
    if len(groups) > 1:
        metrics |= {f"eer_{name}": eer(bonafide, group) for name, group in groups.items()}
    return metrics


def compute_intervals(
    scores: ArrayLike,
    is_bonafide: ArrayLike,
    speaker: Sequence[str],
    *,
    asv: AsvRates | None = None,
    draws: int,
    seed: int = 0,
) -> Intervals:
    """Return the 95 % intervals of the pooled EER, the t-DCFs and the minimum DCF over resampled speakers.

    A speaker's trials are not independent, so speakers are drawn with replacement, each with all their trials; an
    utterance whose speaker is unknown is drawn alone. The rates of the ASV system stay as they are. A draw of one
    class alone is of no use, and fewer than four speakers have no interval (`scoring.draw_groups`). The trials are
    sorted once; a draw of 71,000 trials then costs about 6 ms.

    Args:
        scores, is_bonafide, asv: as for `compute_metrics`.
        speaker: of each trial; "": unknown.
        draws: resamples; 0: no intervals.
    """
    values, genuine = np.asarray(scores, dtype=np.float64), np.asarray(is_bonafide, dtype=bool)
    names = [name or f" {number}" for number, name in enumerate(speaker)]  # no name begins with a space
    order = np.lexsort([~genuine, values])  # among equal scores bona fide trials come first
    values, genuine, group = values[order], genuine[order], np.unique(names, return_inverse=True)[1][order]
    groups = int(group.max()) + 1
    found: list[dict[str, float]] = []
    for drawn in draw_groups(groups, draws, seed=seed):
        copies = np.bincount(drawn, minlength=groups)[group]
        kept = genuine.repeat(copies)
        if kept.any() and not kept.all():
            found.append(_summarize_curve(_pass_trials(values.repeat(copies), kept), asv))
    return summarize_draws(found, draws=draws)


def _summarize_curve(curve: DetCurve, asv: AsvRates | None) -> dict[str, float]:
    tdcf = (
        {} if asv is None else {"min_tdcf_2019": min_tdcf_2019(curve, asv), "min_tdcf_2021": min_tdcf_2021(curve, asv)}
    )
    return {"eer": curve.eer()[0], **tdcf, "min_dcf": min_dcf(curve)}


def group_by_attack(scores: Floats, is_bonafide: NDArray[np.bool_], attack: Sequence[str]) -> dict[str, Floats]:
    """Return the scores of spoofed trials by attack, in alphabetical order."""
    names, codes = np.unique(np.asarray(attack), return_inverse=True)
    groups = {str(name): scores[(codes == code) & ~is_bonafide] for code, name in enumerate(names)}
    return {name: group for name, group in groups.items() if len(group)}


def draw_det_plot(bonafide: ArrayLike, attacks: Mapping[str, ArrayLike]) -> bytes:
    """Return a DET plot as PNG, on normal-deviate axes: one curve for all attacks, one for each of the worst."""
    from scipy.special import ndtri  # type: ignore[import-untyped]

    groups = {name: np.asarray(scores, dtype=np.float64) for name, scores in attacks.items()}
    worst = sorted(groups, key=lambda name: -eer(bonafide, groups[name]))[:MAX_CURVES] if len(groups) > 1 else []
    curves = {"all": np.concatenate(list(groups.values())), **{name: groups[name] for name in sorted(worst)}}
    ticks = np.array([0.001, 0.01, 0.05, 0.1, 0.2, 0.4])

    def draw(axes: "Axes") -> None:
        for name, spoof in curves.items():
            curve = compute_det_curve(bonafide, spoof)
            far, frr = (ndtri(np.clip(rate, 5e-4, 0.6)) for rate in (curve.far, curve.frr))
            axes.plot(far, frr, label=f"{name}  {100 * curve.eer()[0]:.2f} %", linewidth=2.0 if name == "all" else 1.0)
        axes.plot(ndtri(ticks[[0, -1]]), ndtri(ticks[[0, -1]]), color="0.6", linestyle=":")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ndtri(ticks), [f"{100 * tick:g}" for tick in ticks])
        axes.set(ylabel="bona fide rejected (%)", xlim=ndtri([5e-4, 0.55]), ylim=ndtri([5e-4, 0.55]))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="EER")

    return draw_figure("Detection error trade-off", draw, x_label="spoofed accepted (%)")


def _compute_cost(frr: ArrayLike, far: ArrayLike) -> Floats:
    """Return the detection cost, divided by that of the better trivial system: accept all or reject all."""
    miss, false_alarm = COST_MISS * (1 - SPOOF_PRIOR), COST_FALSE_ALARM * SPOOF_PRIOR
    cost: Floats = (miss * np.asarray(frr) + false_alarm * np.asarray(far)) / min(miss, false_alarm)
    return cost


def _validate(kind: str, scores: ArrayLike) -> Floats:
    return check_scores(
        kind,
        scores,
        empty_message=f"no {kind} trial among the scores: error rates need both bona fide and spoofed trials. "
        "Check the labels and the splits.",
    )
