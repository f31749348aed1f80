"""Finds samples that are equal byte for byte, under two names: one person's print as another's, or in two sets."""

import hashlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from trainyard.data.index import AUDIO, ENCODED_IMAGE, INPUTS, PCM
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.text import join_names

_OWNERS = ("finger", "person", "label")
"""Columns of whose or of what kind a sample is: equal bytes must not be of two."""

_MOST_NAMED = 3


def describe_copies(data: ShardSet, split: Callable[[], Mapping[str, np.ndarray]]) -> Iterator[str]:
    """Yield a sentence for each record name of which samples have equal bytes.

    Args:
        split: returns the sample ids of each set; called only if there are equal samples.
    """
    for name, records in data.records.items():
        if records.kind not in (ENCODED_IMAGE, AUDIO, PCM, *INPUTS):
            continue
        there = data.columns.get(f"has_{name}")  # a family may pack one gray image for all that are missing
        groups = _find_equal(data, name, np.arange(data.count) if there is None else np.flatnonzero(there))
        if not groups:
            continue
        members = np.concatenate(groups)
        pairs = [" = ".join(data.read_keys(group[:2])) for group in groups[:_MOST_NAMED]]
        sentences = [f"{len(members)} samples have the same {name}, byte for byte, as another one: {join_names(pairs)}"]
        for column in _OWNERS:
            if column in data.columns:
                mixed = [group for group in groups if len(np.unique(data.columns[column][group])) > 1]
                sentences += [f"{sum(map(len, mixed))} of them are under another {column}"] if mixed else []
        in_sets = _count_in_two_sets(groups, split)
        sentences += [f"{in_sets} of them are in two sets, where they make scores too good"] if in_sets else []
        yield f"{'; '.join(sentences)}. Remove all but one of each."


def _find_equal(data: ShardSet, name: str, ids: np.ndarray) -> list[np.ndarray]:
    """Return the ids in each group of equal records; reads those whose sizes and checksums are equal."""
    records = data.records[name]
    marks = (records.size.astype(np.uint64) << np.uint64(32)) | records.crc.astype(np.uint64)
    order = ids[np.argsort(marks[ids], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(marks[order])) + 1)
    equal = []
    for group in (group for group in groups if len(group) > 1):
        by_digest: dict[bytes, list[int]] = {}
        for i in group.tolist():
            shape = records.shape[i].tobytes()
            digest = hashlib.sha256(data.read_bytes(name, np.array([i]))[0].data).digest()
            by_digest.setdefault(digest + shape, []).append(i)
        equal += [np.array(ids) for ids in by_digest.values() if len(ids) > 1]
    return equal


def _count_in_two_sets(groups: list[np.ndarray], split: Callable[[], Mapping[str, np.ndarray]]) -> int:
    try:
        sets = split()
    except UserError:  # there are no such sets: the run that needs them reports it
        return 0
    count = 0
    for group in groups:
        where = [name for name, ids in sets.items() if np.isin(group, ids).any()]
        count += len(group) if len(where) > 1 else 0
    return count
