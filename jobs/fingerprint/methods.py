"""Scores prints without training: by BLPOC (`baseline`), and by the matcher of pairs (`matching`)."""

from dataclasses import dataclass

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from trainyard import scoring
from trainyard.report.score_figures import decode_image
from trainyard.train.module import DataInfo, SampleSource

from . import baseline, matching
from .pairs import choose_pairs, label_pairs, number_fingers, subsample_fingers

UNTRAINED, MATCHER = "untrained matcher", "matcher"  # by ridges alone, and with the descriptors that ship
MOST_PRINTS_PAIRS = 140_000  # cross-finger pairs of the prints that are read; of more, fingers are skipped evenly
PRINTS_AT_ONCE = 2048  # that the matcher holds: about 2 GB

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Trials:
    """N labelled prints and P pairs of them that are scored without a model, and by the model to compare.

    Attributes:
        ids: (N,) sample ids, ascending.
        images, dpi: N gray images, and their resolutions.
        identity, impression: (N,) fingers numbered from 0, and the numbers of their prints.
        one, other: (P,) the prints of each pair; one is the probe.
        is_genuine: (P,) bool: of one finger.
    """

    ids: Integers
    images: list[NDArray[np.uint8]]
    dpi: list[float]
    identity: Integers
    impression: Integers
    one: Integers
    other: Integers
    is_genuine: NDArray[np.bool_]

    def split_kinds(self, score_P: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the scores of genuine and of impostor pairs."""
        return score_P[self.is_genuine], score_P[~self.is_genuine]

    def select_pairs(self, score_P: NDArray[np.float64]) -> tuple[scoring.Pairs, NDArray[np.bool_]]:
        """Return the pairs, and (I,) bool: which impostor pairs belong to the FVC protocol, as `pairs.score_pairs`."""
        return label_pairs(score_P, self.identity, self.impression, self.one, self.other)

    def fill_matrix(self, score_P: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the scores (N, N) of all prints with all, one score for both orders; None if not all were scored."""
        prints = len(self.ids)
        if 2 * len(score_P) != prints * (prints - 1):
            return None
        score_NN = np.full((prints, prints), np.inf)
        score_NN[self.one, self.other] = score_NN[self.other, self.one] = score_P
        return score_NN


def choose_trials(evaluated: SampleSource, *, most: int) -> Trials:
    """Read labelled prints and choose pairs: all genuine ones, all of the FVC protocol and all cross-finger pairs.

    Up to `most` of each kind, of more a fixed random part.
    """
    columns = evaluated.data.columns
    kept = evaluated.ids[subsample_fingers(columns["finger"][evaluated.ids], MOST_PRINTS_PAIRS)]
    impression = columns["impression"][kept]
    identity, is_first = number_fingers(columns["finger"][kept], impression)
    one, other = choose_pairs(identity, is_first, most=most)
    is_genuine = identity[one] == identity[other]
    return Trials(kept, *read_images(evaluated.data, kept), identity, impression, one, other, is_genuine)


def score_methods(
    images: list[NDArray[np.uint8]], dpi: list[float], one: Integers, other: Integers, *, device: torch.device
) -> dict[str, NDArray[np.float64]]:
    """Return the scores (P,) of pairs of images by each method."""
    normalised = np.stack([baseline.normalise_print(*print_) for print_ in zip(images, dpi, strict=True)])
    prints = matching.prepare_prints(images, dpi, device=device)
    by_ridges = matching.match_ridges(prints, one, other)
    evidence = matching.compare_descriptors(matching.load_descriptors(device), prints, one, other)
    return {
        "BLPOC": baseline.correlate_pairs(torch.from_numpy(normalised).to(device), one, other),
        UNTRAINED: by_ridges,
        MATCHER: matching.add_descriptors(by_ridges, evidence),
    }


def read_images(data: DataInfo, ids: np.ndarray) -> tuple[list[NDArray[np.uint8]], list[float]]:
    """Return the gray images of samples, (H, W) each, and their resolution in dpi."""
    records, dpi = data.read("image", ids), data.columns["dpi"][ids].astype(np.float64)
    images = [np.atleast_3d(decode_image(record))[..., 0] for record in records]
    if data.has_inputs:
        dpi *= len(images[0]) / data.columns["box_height"][ids]
        logger.info(
            "These prints are read as packing.store left them, at {:.0f} dpi; with packing.store=keep, as files", dpi[0]
        )
    return images, dpi.tolist()


def match_samples(data: DataInfo, one: Integers, other: Integers, *, device: torch.device) -> NDArray[np.float64]:
    """Return the matcher's score of each pair of samples, (P,), as `matching.match_pairs`.

    Args:
        one, other: (P,) sample ids.
    """
    scores = np.empty(len(one))
    for begin in range(0, len(one), PRINTS_AT_ONCE // 2):
        part = slice(begin, begin + PRINTS_AT_ONCE // 2)
        ids, places = np.unique(np.stack([one[part], other[part]]), return_inverse=True)
        images, dpi = read_images(data, ids)
        prints = matching.prepare_prints(images, dpi, device=device)
        scores[part] = matching.match_pairs(prints, *places.reshape(2, -1))
    return scores
