"""Which samples each global batch of an epoch holds: pure functions of (seed, epoch, columns)."""

from dataclasses import dataclass

import numpy as np

from trainyard.errors import UserError

_POOL_BATCHES = (
    50  # many enough for like lengths in a batch, few enough that neighbours in length meet others each epoch
)


@dataclass(frozen=True)
class EpochOrder:
    """The global batches of one epoch.

    Nothing here knows of ranks, workers or back ends: ranks take slices of each global batch (`rank_share`), so a run
    that resumes on another number of GPUs reads the same batches. The position in an epoch is one number, the global
    batches that the whole job has finished.
    """

    ids: np.ndarray  # (M,) int64 sample ids in reading order
    global_batch_size: int

    def __len__(self) -> int:
        """Return the number of global batches; the last one may be smaller than the others."""
        return -(-len(self.ids) // self.global_batch_size)

    def batch(self, index: int) -> np.ndarray:
        """Return the (B,) sample ids of global batch `index`; B is smaller than the rest only in the last one."""
        assert 0 <= index < len(self), (index, len(self))
        return self.ids[index * self.global_batch_size : (index + 1) * self.global_batch_size]


def shuffle(train_ids: np.ndarray, *, seed: int, epoch: int, global_batch_size: int) -> EpochOrder:
    """Order an epoch at random. Coverage: every sample of `train_ids` exactly once."""
    return EpochOrder(_generator(seed, epoch).permutation(train_ids), global_batch_size)


def pxk(
    train_ids: np.ndarray,
    identity: np.ndarray,
    *,
    samples_per_identity: int,
    seed: int,
    epoch: int,
    global_batch_size: int,
) -> EpochOrder:
    """Order an epoch so that each global batch holds P identities with K samples each.

    Coverage: every sample at least once. An identity with n samples gives ceil(n / K) groups of K; where K does not
    divide n its last group is filled up with its own samples again (an identity of one sample repeats it). The
    identities of a batch differ from each other as long as P of them have groups left.

    Args:
        train_ids: (n,) int64 sample ids.
        identity: (n,) the identity of each of them.
        samples_per_identity: K. The groups of one identity are neighbours in the batch.
        global_batch_size: P * K.

    Raises:
        UserError: K does not divide the global batch.
    """
    k = samples_per_identity
    if global_batch_size % k:
        raise UserError(
            f"global_batch_size={global_batch_size} is not a multiple of data.samples_per_identity={k}. "
            f"Use global_batch_size={global_batch_size // k * k or k}."
        )
    rng = _generator(seed, epoch)
    groups, group_identity, group_round = _groups(train_ids, identity, k, rng)
    order = _spread(group_identity, group_round, global_batch_size // k, rng)
    return EpochOrder(groups[order].reshape(-1), global_batch_size)


def buckets(train_ids: np.ndarray, length: np.ndarray, *, seed: int, epoch: int, global_batch_size: int) -> EpochOrder:
    """Order an epoch so that the samples of a global batch are of like length, which spares padding.

    Coverage: every sample of `train_ids` exactly once. The samples, shuffled, are cut into pools of 50 global batches;
    a pool is sorted by length and cut into batches, and the batches of all pools are shuffled. What does not fill a
    batch is drawn before all that, and comes last.

    Args:
        train_ids: (n,) int64 sample ids.
        length: (n,) the length of each of them.
    """
    rng, size = _generator(seed, epoch), global_batch_size
    mixed = rng.permutation(len(train_ids))
    rest, mixed = mixed[: len(mixed) % size], mixed[len(mixed) % size :]
    pool = np.arange(len(mixed)) // (_POOL_BATCHES * size)
    mixed = mixed[np.lexsort((length[mixed], pool))]
    batches = rng.permutation(mixed.reshape(-1, size))
    return EpochOrder(train_ids[np.concatenate([batches.reshape(-1), rest])], size)


def rank_share(batch_ids: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """Return this rank's slice of a global batch: contiguous, in order, sizes differing by one at most."""
    low, high = (len(batch_ids) * r // world_size for r in (rank, rank + 1))
    return batch_ids[low:high]


def micro_batches(
    batch_ids: np.ndarray, *, rank: int, world_size: int, micro_batch_size: int
) -> list[tuple[np.ndarray, int]]:
    """Cut this rank's share of a global batch into micro-batches.

    Every rank gets the same number of them, because the ranks meet at collectives. A rank that has fewer samples
    than the others may be left without any for one of them: it then reads the batch's first sample, counted 0.

    Args:
        micro_batch_size: samples per micro-batch; 0 takes the whole share at once.

    Returns:
        (ids, counted) per micro-batch: `counted` is len(ids), or 0 for the stand-in.
    """
    share = rank_share(batch_ids, rank=rank, world_size=world_size)
    largest = -(-len(batch_ids) // world_size)
    size = micro_batch_size or largest
    parts = [share[i : i + size] for i in range(0, largest, size)]
    return [(part, len(part)) if len(part) else (batch_ids[:1], 0) for part in parts]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))


def _groups(
    train_ids: np.ndarray, identity: np.ndarray, k: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deal each identity's samples, shuffled, into groups of k: (G, k) ids, (G,) identity, (G,) its how-manieth."""
    mixed = rng.permutation(len(train_ids))
    mixed = mixed[np.argsort(identity[mixed], kind="stable")]
    names, first, count = np.unique(identity[mixed], return_index=True, return_counts=True)
    groups_of = -(-count // k)
    owner = np.repeat(np.arange(len(names)), groups_of)
    round_of = np.arange(len(owner)) - np.repeat(np.cumsum(groups_of) - groups_of, groups_of)
    within = round_of[:, None] * k + np.arange(k)
    members = first[owner][:, None] + within % count[owner][:, None]
    return train_ids[mixed[members]], owner, round_of


def _spread(owner: np.ndarray, round_of: np.ndarray, per_batch: int, rng: np.random.Generator) -> np.ndarray:
    """Order groups round by round; where a batch straddles two rounds, put off the owners it already holds."""
    order: list[np.ndarray] = []
    placed = 0
    tail = np.empty(0, dtype=owner.dtype)
    by_round = np.argsort(round_of, kind="stable")
    for members in np.split(by_round, np.cumsum(np.bincount(round_of))[:-1]):
        members = rng.permutation(members)
        members = members[np.argsort(np.isin(owner[members], tail), kind="stable")]
        order.append(members)
        placed += len(members)
        in_open_batch = placed % per_batch
        recent = np.concatenate([tail, owner[members]])
        tail = recent[len(recent) - in_open_batch :]
    return np.concatenate(order) if order else np.empty(0, dtype=np.int64)
