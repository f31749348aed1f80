"""Scores prints by the two methods that need no training: BLPOC (`baseline`) and the matcher of pairs (`matching`)."""

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from trainyard import scoring
from trainyard.report.score_figures import decode_image
from trainyard.train.module import DataInfo, SampleSource

from . import baseline, matching
from .pairs import number_fingers, subsample_fingers

MATCHER = "matcher"
MOST_PRINTS_PAIRS = 140_000  # cross-finger pairs of the prints that are read; of more, fingers are skipped evenly
PRINTS_AT_ONCE = 2048  # that the matcher holds: about 2 GB

Integers = NDArray[np.int64]


def score_untrained(
    evaluated: SampleSource, *, most: int, device: torch.device
) -> dict[str, tuple[scoring.Pairs, NDArray[np.bool_]]]:
    """Score pairs of labelled prints without a model, the same pairs by both methods.

    All genuine pairs, all of the FVC protocol and all cross-finger pairs are scored, up to `most` of each kind, of
    more a fixed random part.

    Returns:
        By method the pairs, and (I,) bool: which impostor pairs belong to the FVC protocol, as `pairs.score_pairs`.
    """
    columns = evaluated.data.columns
    kept = evaluated.ids[subsample_fingers(columns["finger"][evaluated.ids], MOST_PRINTS_PAIRS)]
    identity, is_first = number_fingers(columns["finger"][kept], columns["impression"][kept])
    one, other = choose_pairs(identity, is_first, most=most)
    images, dpi = read_images(evaluated.data, kept)
    prints = [baseline.normalise_print(*print_) for print_ in zip(images, dpi, strict=True)]
    scores = {"BLPOC": baseline.correlate_pairs(torch.from_numpy(np.stack(prints)).to(device), one, other)}
    scores[MATCHER] = match_images(images, dpi, one, other, device=device)
    same = identity[one] == identity[other]
    whose = identity[one[same]], np.stack([identity[one[~same]], identity[other[~same]]], axis=1)
    is_fvc = (is_first[one] & is_first[other])[~same]
    return {name: (scoring.Pairs(score[same], score[~same], *whose), is_fvc) for name, score in scores.items()}


def choose_pairs(identity: np.ndarray, is_first: np.ndarray, *, most: int) -> tuple[Integers, Integers]:
    """Return the indices of the pairs to score, (P,) each: at most `most` of each kind, drawn with a fixed seed."""
    one, other = np.triu_indices(len(identity), 1)
    same = identity[one] == identity[other]
    kinds = (same, ~same & is_first[one] & is_first[other], ~same)
    generator = np.random.default_rng(0)
    drawn = [generator.permutation(np.flatnonzero(kind))[:most] for kind in kinds]
    chosen = np.unique(np.concatenate(drawn))
    return one[chosen], other[chosen]


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
        scores[part] = match_images(images, dpi, *places.reshape(2, -1), device=device)
    return scores


def match_images(
    images: list[NDArray[np.uint8]], dpi: list[float], one: Integers, other: Integers, *, device: torch.device
) -> NDArray[np.float64]:
    """Return the matcher's score of pairs of images, (P,)."""
    return matching.match_pairs(matching.prepare_prints(images, dpi, device=device), one, other)
