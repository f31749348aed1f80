"""Scores of labelled pairs, from which thresholds come: training and `evaluate` write them, `compare` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.runs.tensor_file import create_tensor_file, map_tensor_file
from trainyard.text import quote_path

FILE = "validation_scores.safetensors"
GENUINE = "genuine"


@dataclass(frozen=True)
class PairScores:
    """Scores of genuine pairs and of one kind of impostor pairs."""

    genuine: NDArray[np.float32]
    impostor: NDArray[np.float32]
    kind: str  # of the impostors
    precision: str  # in which they were computed
    source: str = "this run's validation set"  # whose pairs they are
    more: str = "Train with a larger validation set"  # how to get more of them

    def find_point(self, fmr: float, *, command: str) -> scoring.OperatingPoint:
        """Return the threshold whose false match rate on these impostors is at most `fmr`.

        Args:
            command: to type with another rate, for the error.

        Raises:
            UserError: the rate is not between 0 and 1, or lower than so many trials can establish.
        """
        least = scoring.compute_smallest_rate(len(self.impostor))
        highest = float(np.mean(self.impostor >= max(self.impostor.max(), self.genuine.max())))
        reachable = _round_up(max(least, highest))  # no threshold is above the highest score of all
        instead = f", or type {command} --fmr {reachable:g}" if reachable < 1 else "."
        if not 0 < fmr < 1:
            raise UserError(f"--fmr {fmr:g}: expected a rate between 0 and 1, such as {max(reachable, 0.001):g}.")
        if fmr < least:
            raise UserError(
                f"--fmr {fmr:g}: the {len(self.impostor):,} impostor trials ({self.kind}) of {self.source} establish "
                f"no rate below 3/{len(self.impostor)} = {least:.2g} (rule of 3, ISO/IEC 19795-1). {self.more}{instead}"
            )
        point = scoring.compute_error_rates(self.genuine, self.impostor).find_point_at_fmr(fmr)
        if not np.isfinite(point.threshold):
            raise UserError(
                f"--fmr {fmr:g}: {highest:.2%} of the impostor trials have the highest score of all, so no threshold "
                f"has this rate: the run has learned too little. Train longer{instead}"
            )
        return point


def write_pair_scores(path: Path, scores: Mapping[str, np.ndarray], *, step: int, precision: str) -> None:
    """Write the scores that weights of training step `step` gave; empty kinds are left out.

    Args:
        scores: as `TrainModule.select_pair_scores` returns them; finite.
        precision: in which they were computed.
    """
    by_kind = {kind: values for kind, values in scores.items() if len(values)}
    metadata = {"step": str(step), "precision": precision, "kinds": " ".join(by_kind)}
    shapes = {kind: (len(values),) for kind, values in by_kind.items()}
    with create_tensor_file(path, shapes, metadata=metadata) as arrays:
        for kind, values in by_kind.items():
            arrays[kind][:] = values


def read_validation_scores(run: Path, *, step: int, kind: str) -> PairScores:
    """Read the validation scores of a run.

    Args:
        step: of the weights in use.
        kind: of impostors; "": the first that the family names.

    Raises:
        UserError: there are none, they belong to other weights, or they are damaged.
    """
    path, again = run / FILE, f"trainyard resume {quote_path(run)}"
    if not path.exists():
        raise UserError(
            f"{run}: holds no scores of its validation pairs, from which a threshold comes: it has not ended, or they "
            f"were deleted. Resuming a run that has ended trains no further, and writes them: {again}"
        )
    scores, of_step = read_pair_scores(path, kind=kind, remedy=again)
    if of_step != str(step):
        raise UserError(
            f"{path}: of the weights of step {of_step}, and the weights in use are of step {step}. Write it again: "
            f"{again}"
        )
    return scores


def read_pair_scores(path: Path, *, kind: str, remedy: str) -> tuple[PairScores, str]:
    """Read scores of genuine pairs and of one kind of impostor pairs, and of which step the weights were.

    Args:
        kind: of impostors; "": the first that the family names.
        remedy: the command that writes the file again.

    Raises:
        UserError: the file is damaged, or has no impostors of this kind.
    """
    mapped = map_tensor_file(path, remedy=remedy)
    kinds = [name for name in mapped.metadata.get("kinds", "").split() if name != GENUINE]
    if mapped.arrays.keys() != {GENUINE, *kinds} or any(array.ndim != 1 for array in mapped.arrays.values()):
        raise UserError(f"{path}: does not hold the scores of genuine and impostor pairs. Write it again: {remedy}")
    if kind and kind not in kinds:
        raise UserError(f"--impostors {kind}: this run has {', '.join(kinds) or 'none'}.")
    if not kinds:
        raise UserError(f"{path}: there were no impostor pairs among these samples. Use data that has some.")
    chosen = kind or kinds[0]
    scores = PairScores(mapped.arrays[GENUINE], mapped.arrays[chosen], chosen, mapped.metadata.get("precision", ""))
    return scores, mapped.metadata.get("step", "")


def _round_up(rate: float) -> float:
    """Return the rate rounded up to two digits, so that it can be typed."""
    exponent = 10.0 ** (np.floor(np.log10(rate)) - 1)
    return float(np.ceil(rate / exponent - 1e-9) * exponent)
