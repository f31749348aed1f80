"""Decides which samples each global batch of an epoch contains: pure functions of (seed, epoch, columns)."""

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError

_POOL_BATCHES = 50  # enough for similar lengths in a batch, few enough that batches differ between epochs


@dataclass(frozen=True)
class EpochOrder:
    """The global batches of one epoch.

    The order does not depend on ranks, workers or back ends: ranks take slices of each global batch
    (`take_rank_share`), so a run that resumes on another number of GPUs reads the same batches. The position in an
    epoch is one number: the global batches that all ranks together have finished.
    """

    ids: np.ndarray  # (M,) int64 sample ids in reading order
    global_batch_size: int

    def __len__(self) -> int:
        """Return the number of global batches; the last one may be smaller than the others."""
        return -(-len(self.ids) // self.global_batch_size)

    def batch(self, index: int) -> np.ndarray:
        """Return the (B,) sample ids of global batch `index`; only the last batch may be smaller."""
        assert 0 <= index < len(self), (index, len(self))
        return self.ids[index * self.global_batch_size : (index + 1) * self.global_batch_size]


class EpochOrders:
    """The orders of epochs, each computed once, by the thread that asks first.

    During training that is a thread of the loader's, an epoch ahead: with ten million samples it takes seconds.
    """

    def __init__(self, compute: Callable[[int], EpochOrder]) -> None:
        self._compute, self._lock = compute, threading.Lock()
        self._kept: dict[int, Future[EpochOrder]] = {}

    def __call__(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the two that were asked for first most recently are kept.

        Waits if another thread is computing this one, and for no other.
        """
        with self._lock:
            is_first = epoch not in self._kept
            if is_first:
                self._kept = {**dict(list(self._kept.items())[-1:]), epoch: Future()}
            order = self._kept[epoch]
        if is_first:
            try:
                order.set_result(self._compute(epoch))
            except BaseException as error:
                order.set_exception(error)
        return order.result()


def order_epoch(
    train_ids: np.ndarray,
    columns: Mapping[str, np.ndarray],
    config: TrainConfig,
    *,
    epoch: int,
    texts: Collection[str] = (),
) -> EpochOrder:
    """Order an epoch as `data.order` says.

    Args:
        texts: columns whose numbers are codes of texts: no lengths and no weights.

    Raises:
        UserError: there is no column `data.order_by`, or it or the global batch size does not suit the order.
    """
    seed, size, by = config.seed, config.global_batch_size, config.data.order_by
    if config.data.balance_by and config.data.order != "pxk":
        raise UserError(
            f"data.balance_by={config.data.balance_by} is for data.order=pxk, not {config.data.order}. "
            "Empty it: data.balance_by="
        )
    if config.data.balanced_repeats > 1 and not config.data.balance_by:
        raise UserError(
            f"data.balanced_repeats={config.data.balanced_repeats} repeats the identities with several values of "
            "data.balance_by, which is empty. Name a column: data.balance_by=COLUMN"
        )
    if config.data.order == "shuffle":
        return shuffle(train_ids, seed=seed, epoch=epoch, global_batch_size=size)
    for name, column in {"order_by": by, "balance_by": config.data.balance_by or by}.items():
        if column not in columns:
            raise UserError(f"data.{name}={column}: no such column. The data set has {', '.join(columns)}.")
    if by in texts and config.data.order != "pxk":
        raise UserError(
            f"data.order_by={by}: a column of texts; data.order={config.data.order} needs numbers. Columns of numbers: "
            f"{', '.join(name for name in columns if name not in texts)}."
        )
    values = columns[by][train_ids]
    if config.data.order == "buckets":
        return bucket_by_length(train_ids, values, seed=seed, epoch=epoch, global_batch_size=size)
    if config.data.order == "weighted":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() > 0):
            raise UserError(
                f"data.order_by={by}: {values.min():g} to {values.max():g} in the training split; expected weights: "
                "finite numbers from 0, and one of them above 0."
            )
        return draw_by_weight(train_ids, values, seed=seed, epoch=epoch, global_batch_size=size)
    k = config.data.samples_per_identity
    balanced = columns[config.data.balance_by][train_ids] if config.data.balance_by else None
    return group_by_identity(
        train_ids,
        values,
        samples_per_identity=k,
        seed=seed,
        epoch=epoch,
        global_batch_size=size,
        balanced=balanced,
        balanced_repeats=config.data.balanced_repeats,
    )


def shuffle(train_ids: np.ndarray, *, seed: int, epoch: int, global_batch_size: int) -> EpochOrder:
    """Order an epoch at random. Coverage: every sample of `train_ids` exactly once."""
    return EpochOrder(_make_generator(seed, epoch).permutation(train_ids), global_batch_size)


def group_by_identity(
    train_ids: np.ndarray,
    identity: np.ndarray,
    *,
    samples_per_identity: int,
    seed: int,
    epoch: int,
    global_batch_size: int,
    balanced: np.ndarray | None = None,
    balanced_repeats: int = 1,
) -> EpochOrder:
    """Order an epoch so that each global batch contains P identities with K samples each ("P x K sampling").

    Coverage: every sample at least once. An identity with n samples gives ceil(n / K) groups of K; if K does not
    divide n, its last group repeats some of its samples (an identity of one sample repeats it). The
    identities of a batch are distinct as long as P of them have groups left.

    Args:
        train_ids: (n,) int64 sample ids.
        identity: (n,) the identity of each of them.
        samples_per_identity: K. The samples of a group are consecutive in the batch.
        global_batch_size: P * K.
        balanced: (n,) a value of each sample, such as the person in a family: an identity's samples are dealt in turn,
            one of each value, until one value has none left.
        balanced_repeats: how often an identity with two values or more is dealt, such as a family with twins, each
            time in another order; the others are dealt once.

    Raises:
        UserError: K does not divide the global batch size.
    """
    k = samples_per_identity
    if global_batch_size % k:
        raise UserError(
            f"global_batch_size={global_batch_size} is not a multiple of data.samples_per_identity={k}. "
            f"Use global_batch_size={global_batch_size // k * k or k}."
        )
    rng = _make_generator(seed, epoch)
    dealt = [_deal_groups(train_ids, identity, k, rng, balanced)]
    if balanced is not None and balanced_repeats > 1:
        several = _hold_several_values(identity, balanced)
        parts = train_ids[several], identity[several], k, rng, balanced[several]
        dealt += [_deal_groups(*parts) for _ in range(balanced_repeats - 1)]
    groups, names = (np.concatenate(part) for part in zip(*dealt, strict=True))
    group_identity = np.unique(names, return_inverse=True)[1]
    group_round = _count_earlier(group_identity, np.zeros(len(names)))
    order = _spread_identities(group_identity, group_round, global_batch_size // k, rng)
    return EpochOrder(groups[order].reshape(-1), global_batch_size)


def bucket_by_length(
    train_ids: np.ndarray, length: np.ndarray, *, seed: int, epoch: int, global_batch_size: int
) -> EpochOrder:
    """Order an epoch so that the samples of a global batch have similar lengths, which saves padding.

    Coverage: every sample of `train_ids` exactly once. The shuffled samples are split into pools of 50 global batches;
    each pool is sorted by length and split into batches, and the batches of all pools are shuffled. The remainder that
    does not fill a batch is set aside first, at random, and comes last.

    Args:
        train_ids: (n,) int64 sample ids.
        length: (n,) the length of each of them.
    """
    rng, size = _make_generator(seed, epoch), global_batch_size
    mixed = rng.permutation(len(train_ids))
    rest, mixed = mixed[: len(mixed) % size], mixed[len(mixed) % size :]
    pool = np.arange(len(mixed)) // (_POOL_BATCHES * size)
    mixed = mixed[np.lexsort((length[mixed], pool))]
    batches = rng.permutation(mixed.reshape(-1, size))
    return EpochOrder(train_ids[np.concatenate([batches.reshape(-1), rest])], size)


def draw_by_weight(
    train_ids: np.ndarray, weight: np.ndarray, *, seed: int, epoch: int, global_batch_size: int
) -> EpochOrder:
    """Order an epoch of n draws so that samples are in it in proportion to their weights.

    Coverage: a sample is drawn n times its share of all weights, rounded down or up at random (systematic sampling,
    Madow 1949), so with equal weights each exactly once.

    Args:
        train_ids: (n,) int64 sample ids.
        weight: (n,) from 0, not all 0.
    """
    rng, n = _make_generator(seed, epoch), len(train_ids)
    ends = np.cumsum(weight, dtype=np.float64)
    drawn = np.searchsorted(ends / ends[-1] * n, np.arange(n) + rng.random(), side="right")
    last = np.flatnonzero(weight)[-1]  # which n - 1 and a number that rounds to 1 would pass
    return EpochOrder(rng.permutation(train_ids[drawn.clip(max=last)]), global_batch_size)


def take_rank_share(batch_ids: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """Return this rank's slice of a global batch: contiguous and in order; sizes differ by at most one."""
    low, high = (len(batch_ids) * r // world_size for r in (rank, rank + 1))
    return batch_ids[low:high]


def split_into_micro_batches(
    batch_ids: np.ndarray, *, rank: int, world_size: int, micro_batch_size: int
) -> list[tuple[np.ndarray, int]]:
    """Split this rank's share of a global batch into micro-batches.

    Every rank gets the same number of micro-batches, because the ranks synchronise in collectives. A rank with fewer
    samples than the others may have none for one of them: it then reads the batch's first sample as a placeholder.

    Args:
        micro_batch_size: samples per micro-batch; 0: the whole share at once.

    Returns:
        (ids, counted) per micro-batch: `counted` is len(ids), or 0 for a placeholder.
    """
    share = take_rank_share(batch_ids, rank=rank, world_size=world_size)
    largest = -(-len(batch_ids) // world_size)
    size = micro_batch_size or largest
    parts = [share[i : i + size] for i in range(0, largest, size)]
    return [(part, len(part)) if len(part) else (batch_ids[:1], 0) for part in parts]


def _make_generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))


def _deal_groups(
    train_ids: np.ndarray, identity: np.ndarray, k: int, rng: np.random.Generator, balanced: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Deal each identity's shuffled samples into groups of k.

    Returns:
        ids: (G, k) int64 sample ids.
        identity: (G,) the identity of each group.
    """
    mixed = rng.permutation(len(train_ids))
    turn = np.zeros(len(mixed)) if balanced is None else _count_earlier(identity[mixed], balanced[mixed])
    mixed = mixed[np.lexsort((turn, identity[mixed]))]  # stable: at random within a turn
    names, first, count = np.unique(identity[mixed], return_index=True, return_counts=True)
    group_count = -(-count // k)
    identity_index = np.repeat(np.arange(len(names)), group_count)
    group_round = np.arange(len(identity_index)) - np.repeat(np.cumsum(group_count) - group_count, group_count)
    within = group_round[:, None] * k + np.arange(k)
    members = first[identity_index][:, None] + within % count[identity_index][:, None]
    return train_ids[mixed[members]], names[identity_index]


def _hold_several_values(identity: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return for each sample whether its identity has samples of two values or more."""
    code = np.unique(identity, return_inverse=True)[1]
    pairs = np.unique(np.stack([code, np.unique(value, return_inverse=True)[1]]), axis=1)
    return np.bincount(pairs[0])[code] > 1


def _count_earlier(identity: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return for each sample how many before it have the same identity and value."""
    order = np.lexsort((value, identity))
    same = (np.diff(identity[order]) == 0) & (np.diff(value[order]) == 0)
    place = np.arange(len(order))
    first = np.maximum.accumulate(np.where(np.r_[False, same], 0, place))
    earlier = np.empty(len(order), dtype=np.int64)
    earlier[order] = place - first
    return earlier


def _spread_identities(
    identity_index: np.ndarray, group_round: np.ndarray, per_batch: int, rng: np.random.Generator
) -> np.ndarray:
    """Order groups round by round; if a batch spans two rounds, postpone identities that it already contains."""
    order: list[np.ndarray] = []
    placed = 0
    tail = np.empty(0, dtype=identity_index.dtype)
    by_round = np.argsort(group_round, kind="stable")
    for members in np.split(by_round, np.cumsum(np.bincount(group_round))[:-1]):
        members = rng.permutation(members)
        members = members[np.argsort(np.isin(identity_index[members], tail), kind="stable")]
        order.append(members)
        placed += len(members)
        in_open_batch = placed % per_batch
        recent = np.concatenate([tail, identity_index[members]])
        tail = recent[len(recent) - in_open_batch :]
    return np.concatenate(order) if order else np.empty(0, dtype=np.int64)
