"""Pairs of prints: which are scored, by which protocol, and the metrics of their scores."""

from math import sqrt

import numpy as np

from trainyard import scoring

BLOCK_ROWS = 1024  # of the score matrix
ScoredPair = tuple[float, int, int]


def find_extreme_pairs(embedding: np.ndarray, finger: np.ndarray, *, count: int) -> dict[str, list[ScoredPair]]:
    """Return the pairs of N prints that are worth a look: their kind -> (cosine, row, row), the most extreme first.

    Args:
        embedding: (N, D) float32 of unit length.
        finger: (N,) codes.
        count: pairs of each kind, at most.
    """
    kinds = {
        "One finger, lowest scores": (True, 1),
        "Two fingers, highest scores": (False, -1),
        "One finger, highest scores": (True, -1),
    }
    extremes: dict[str, list[ScoredPair]] = {title: [] for title in kinds}
    for start in range(0, len(finger), BLOCK_ROWS):
        cosine = embedding[start : start + BLOCK_ROWS] @ embedding[start:].T
        row, column = np.triu_indices(len(cosine), 1, cosine.shape[1])
        score, same = cosine[row, column], finger[start + row] == finger[start + column]
        for title, (is_genuine, sign) in kinds.items():
            places = np.flatnonzero(same == is_genuine)
            places = places[np.argsort(sign * score[places], kind="stable")[:count]]
            extremes[title] += [(float(score[i]), start + int(row[i]), start + int(column[i])) for i in places.tolist()]
            extremes[title].sort(key=lambda pair: pair[0], reverse=sign < 0)
            del extremes[title][count:]
    return {title: pairs for title, pairs in extremes.items() if pairs}


def compute_pair_metrics(pairs: scoring.Pairs, is_fvc: np.ndarray) -> dict[str, float]:
    """Return the metrics of scored pairs; `FingerprintModule.score` documents them.

    Args:
        is_fvc: (I,) bool, which impostor pairs belong to the FVC protocol.
    """
    metrics = {"d_prime": scoring.d_prime(pairs.genuine, pairs.impostor)}
    for suffix, protocol_pairs in _split_protocols(pairs, is_fvc).items():
        metrics |= {name + suffix: value for name, value in protocol_pairs.compute_metrics().items()}
        metrics["impostors" + suffix] = len(protocol_pairs.impostor)
    fingers = np.unique(np.append(pairs.genuine_identity, pairs.impostor_identities))
    return metrics | {"fingers": len(fingers), "genuine": len(pairs.genuine)}


def compute_pair_intervals(pairs: scoring.Pairs, is_fvc: np.ndarray, *, draws: int) -> dict[str, float]:
    """Return the ends of the intervals of `compute_pair_metrics`, over resampled fingers."""
    intervals: dict[str, float] = {}
    for suffix, protocol_pairs in _split_protocols(pairs, is_fvc).items():
        intervals |= protocol_pairs.compute_intervals(draws=draws).to_metrics(suffix)
    return intervals


def _split_protocols(pairs: scoring.Pairs, is_fvc: np.ndarray) -> dict[str, scoring.Pairs]:
    """Return the pairs of the FVC protocol, and all, by the suffix of their metrics."""
    fvc = scoring.Pairs(
        pairs.genuine, pairs.impostor[is_fvc], pairs.genuine_identity, pairs.impostor_identities[is_fvc]
    )
    return {"": fvc, "_all_pairs": pairs}


def subsample_fingers(finger: np.ndarray, impostors_max: int) -> np.ndarray:
    """Return the rows of evenly spaced fingers, as many as keep the cross-finger pairs below about `impostors_max`."""
    codes = np.unique(finger)
    per_finger = len(finger) / max(1, len(codes))
    affordable = max(2, int(sqrt(2 * impostors_max) / per_finger))
    if affordable >= len(codes):
        return np.arange(len(finger))
    return np.flatnonzero(np.isin(finger, codes[np.linspace(0, len(codes) - 1, affordable).astype(np.int64)]))


def number_fingers(finger: np.ndarray, impression: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) fingers numbered from 0, and (N,) bool: which prints are the first of their finger."""
    identity = np.unique(finger, return_inverse=True)[1]
    order = np.lexsort((impression, identity))
    is_first = np.zeros(len(finger), dtype=bool)
    is_first[order[np.unique(identity[order], return_index=True)[1]]] = True
    return identity, is_first


def score_pairs(embedding: np.ndarray, finger: np.ndarray, impression: np.ndarray) -> tuple[scoring.Pairs, np.ndarray]:
    """Score every pair of N prints by the cosine of their embeddings.

    Costs one matrix product, computed in blocks of rows, and 40 bytes per pair.

    Args:
        embedding: (N, D) float32 of unit length.
        finger: (N,) codes.
        impression: (N,) numbers; a finger's lowest number is its first impression.

    Returns:
        The pairs, with identities numbered from 0, and (I,) bool: which impostor pairs belong to the FVC protocol.
    """
    identity, is_first = number_fingers(finger, impression)
    genuine, impostor, genuine_identity, impostor_identities, is_fvc = [], [], [], [], []
    for start in range(0, len(finger), BLOCK_ROWS):
        cosine = embedding[start : start + BLOCK_ROWS] @ embedding[start:].T
        row, column = np.triu_indices(len(cosine), 1, cosine.shape[1])
        score, one, other = cosine[row, column], identity[start + row], identity[start + column]
        same = one == other
        genuine.append(score[same])
        genuine_identity.append(one[same])
        impostor.append(score[~same])
        impostor_identities.append(np.stack([one[~same], other[~same]], axis=1))
        is_fvc.append((is_first[start + row] & is_first[start + column])[~same])
    pairs = scoring.Pairs(
        *(np.concatenate(blocks) for blocks in (genuine, impostor, genuine_identity, impostor_identities))
    )
    return pairs, np.concatenate(is_fvc)


def split_kinds(pairs: scoring.Pairs, is_fvc: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores of genuine pairs, of all cross-finger pairs, and of those of the FVC protocol."""
    return {"genuine": pairs.genuine, "all_pairs": pairs.impostor, "fvc": pairs.impostor[is_fvc]}


def choose_pairs(identity: np.ndarray, is_first: np.ndarray, *, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the pairs to score, (P,) each: at most `most` of each kind, drawn with a fixed seed."""
    one, other = np.triu_indices(len(identity), 1)
    same = identity[one] == identity[other]
    kinds = (same, ~same & is_first[one] & is_first[other], ~same)
    generator = np.random.default_rng(0)
    drawn = [generator.permutation(np.flatnonzero(kind))[:most] for kind in kinds]
    chosen = np.unique(np.concatenate(drawn))
    return one[chosen], other[chosen]


def label_pairs(
    score: np.ndarray, finger: np.ndarray, impression: np.ndarray, one: np.ndarray, other: np.ndarray
) -> tuple[scoring.Pairs, np.ndarray]:
    """Return scored pairs by kind, and which impostor pairs belong to the FVC protocol, as `score_pairs`.

    Args:
        score: (P,).
        finger, impression: (N,) of the prints.
        one, other: (P,) rows of the prints.
    """
    identity, is_first = number_fingers(finger, impression)
    same = identity[one] == identity[other]
    whose = identity[one[same]], np.stack([identity[one[~same]], identity[other[~same]]], axis=1)
    return scoring.Pairs(score[same], score[~same], *whose), (is_first[one] & is_first[other])[~same]
