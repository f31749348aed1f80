import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.config.settings import DataSettings, TrainConfig
from trainyard.data.order import (
    EpochOrder,
    bucket_by_length,
    draw_by_weight,
    group_by_identity,
    order_epoch,
    shuffle,
    split_into_micro_batches,
    take_rank_share,
)
from trainyard.errors import UserError


def list_batches(order: EpochOrder) -> list[np.ndarray]:
    return [order.batch(i) for i in range(len(order))]


@given(n=st.integers(0, 300), batch=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_shuffled_epoch_contains_each_sample_exactly_once(n, batch, seed, epoch):
    ids = 7 * np.arange(n) + 3
    read = list_batches(shuffle(ids, seed=seed, epoch=epoch, global_batch_size=batch))
    assert [len(b) for b in read[:-1]] == [batch] * (len(read) - 1)
    assert sorted(i for b in read for i in b.tolist()) == ids.tolist()


@given(n=st.integers(0, 300), batch=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_in_buckets_contains_each_sample_exactly_once(n, batch, seed, epoch):
    ids = 7 * np.arange(n) + 3
    order = bucket_by_length(ids, ids % 11, seed=seed, epoch=epoch, global_batch_size=batch)
    read = list_batches(order)
    assert [len(b) for b in read[:-1]] == [batch] * (len(read) - 1)
    assert sorted(i for b in read for i in b.tolist()) == ids.tolist()


@given(
    weight=st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 7.0]), min_size=1, max_size=200).filter(any),
    batch=st.integers(1, 50),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
def test_a_weighted_epoch_draws_each_sample_by_its_share_rounded_down_or_up(weight, batch, seed, epoch):
    n, ids = len(weight), 7 * np.arange(len(weight)) + 3
    order = draw_by_weight(ids, np.array(weight), seed=seed, epoch=epoch, global_batch_size=batch)
    assert len(order.ids) == n and set(order.ids.tolist()) <= set(ids.tolist())
    counts, expected = np.array([(order.ids == i).sum() for i in ids]), n * np.array(weight) / sum(weight)
    assert (abs(counts - expected) < 1 + 1e-9).all() and not counts[np.array(weight) == 0].any()
    again = draw_by_weight(ids, np.array(weight), seed=seed, epoch=epoch, global_batch_size=batch)
    assert np.array_equal(order.ids, again.ids)


def test_weighted_epochs_draw_other_remainders_and_ranks_share_them_without_loss():
    weight = np.random.default_rng(0).random(100)
    drawn = [draw_by_weight(np.arange(100), weight, seed=3, epoch=epoch, global_batch_size=12) for epoch in range(2000)]
    counts = np.mean([np.bincount(order.ids, minlength=100) for order in drawn], axis=0)
    assert np.allclose(counts, 100 * weight / weight.sum(), atol=0.06), "0.06: five standard errors of a coin"
    for world_size in (1, 2, 3, 7):
        shares = [
            take_rank_share(batch, rank=rank, world_size=world_size)
            for batch in list_batches(drawn[0])
            for rank in range(world_size)
        ]
        assert np.array_equal(np.concatenate(shares), drawn[0].ids)


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_weights_that_are_none_are_refused(values):
    config = TrainConfig(data=DataSettings(order="weighted", order_by="rarity"))
    with pytest.raises(UserError, match=r"data\.order_by=rarity: .* in the training split; expected weights"):
        order_epoch(np.arange(2), {"rarity": np.array(values)}, config, epoch=0)


@pytest.mark.parametrize("order", ["weighted", "buckets"])
def test_codes_of_texts_are_neither_weights_nor_lengths(order):
    config = TrainConfig(data=DataSettings(order=order, order_by="name"))
    columns = {"name": np.arange(2), "rarity": np.ones(2)}
    with pytest.raises(UserError, match=r"order_by=name: a column of texts; .* Columns of numbers: rarity\."):
        order_epoch(np.arange(2), columns, config, epoch=0, texts=["name"])


def test_buckets_contain_similar_lengths_in_an_order_that_changes_each_epoch():
    length = np.random.default_rng(0).integers(10, 400, size=5003)
    how = {"seed": 0, "global_batch_size": 32}
    first, second = (bucket_by_length(np.arange(5003), length, epoch=epoch, **how) for epoch in (0, 1))
    padding = [length[b].max() * len(b) / length[b].sum() - 1 for b in list_batches(first)]
    assert len(first.batch(len(first) - 1)) == 5003 % 32
    assert np.mean(padding[:-1]) < 0.06, "shuffled, it is above 0.8"
    means = np.array([length[b].mean() for b in list_batches(first)[:-1]])
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2, "short and long batches come mixed"
    compositions = [{tuple(sorted(b.tolist())) for b in list_batches(order)} for order in (first, second)]
    assert not compositions[0] & compositions[1]


def test_an_order_depends_only_on_its_arguments():
    ids, identity = np.arange(1000), np.arange(1000) // 7

    def orders(seed: int, epoch: int) -> tuple[bytes, bytes]:
        how = {"seed": seed, "epoch": epoch, "global_batch_size": 12}
        return shuffle(ids, **how).ids.tobytes(), group_by_identity(
            ids, identity, samples_per_identity=4, **how
        ).ids.tobytes()

    first = orders(1, 2)
    np.random.default_rng(0).random(5)
    assert orders(1, 2) == first
    assert all(
        a != b for other in (orders(1, 3), orders(2, 2), orders(2, 1)) for a, b in zip(first, other, strict=True)
    )


def test_old_runs_keep_their_order():
    """A change here means that runs do not resume across the commit: say so in the change log."""
    how = {"seed": 3, "epoch": 2, "global_batch_size": 4}
    shuffled = shuffle(np.arange(12), **how)
    grouped = group_by_identity(np.arange(9), np.array([0, 0, 0, 1, 1, 2, 2, 2, 2]), samples_per_identity=2, **how)
    assert shuffled.ids.tolist() == [0, 10, 5, 6, 1, 8, 3, 7, 4, 2, 9, 11]
    assert grouped.ids.tolist() == [0, 1, 8, 5, 3, 4, 7, 6, 2, 0]


@given(n=st.integers(0, 100), world_size=st.integers(1, 17))
def test_the_shares_of_all_ranks_are_the_batch_in_order(n, world_size):
    ids = np.arange(n) * 3
    shares = [take_rank_share(ids, rank=r, world_size=world_size) for r in range(world_size)]
    assert np.array_equal(np.concatenate(shares), ids)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_an_epoch_that_changes_its_number_of_ranks_twice_reads_each_sample_once():
    order = shuffle(np.arange(103), seed=0, epoch=5, global_batch_size=10)
    read: list[int] = []
    for world_size, steps in ((2, range(0, 3)), (1, range(3, 7)), (2, range(7, len(order)))):
        for step in steps:
            for rank in range(world_size):
                read += take_rank_share(order.batch(step), rank=rank, world_size=world_size).tolist()
    assert sorted(read) == list(range(103))


@given(n=st.integers(1, 60), world_size=st.integers(1, 9), size=st.integers(0, 20))
def test_all_ranks_get_the_same_number_of_micro_batches_which_count_each_sample_once(n, world_size, size):
    ids = np.arange(n) + 100
    per_rank = [
        split_into_micro_batches(ids, rank=r, world_size=world_size, micro_batch_size=size) for r in range(world_size)
    ]
    assert len({len(parts) for parts in per_rank}) == 1
    parts = [part for parts in per_rank for part in parts]
    assert all(len(part) >= 1 for part, _ in parts)
    assert all(size == 0 or len(part) <= size for part, _ in parts)
    assert np.array_equal(np.concatenate([part[:counted] for part, counted in parts]), ids)
    assert all(counted == len(part) or (counted == 0 and part.tolist() == [100]) for part, counted in parts)


def test_a_rank_without_samples_reads_a_placeholder_that_counts_0():
    parts = [split_into_micro_batches(np.array([8, 9]), rank=r, world_size=3, micro_batch_size=1) for r in range(3)]
    assert [[(part.tolist(), counted) for part, counted in mine] for mine in parts] == [
        [([8], 0)],
        [([8], 1)],
        [([9], 1)],
    ]


counts = st.lists(st.integers(1, 23), min_size=0, max_size=12)


@given(counts=counts, k=st.integers(2, 6), p=st.integers(1, 6), seed=st.integers(0, 99))
def test_pxk_contains_each_sample_in_groups_of_k_of_one_identity(counts, k, p, seed):
    identity = np.repeat(np.arange(len(counts)) * 5, counts)
    ids = 2 * np.arange(len(identity)) + 1
    order = group_by_identity(ids, identity, samples_per_identity=k, seed=seed, epoch=0, global_batch_size=p * k)
    identity_of = dict(zip(ids.tolist(), identity.tolist(), strict=True))
    groups = order.ids.reshape(-1, k).tolist()
    owners = [{identity_of[i] for i in group} for group in groups]
    assert all(len(owner) == 1 for owner in owners)
    for number, n in enumerate(counts):
        own = [group for group, owner in zip(groups, owners, strict=True) if owner == {number * 5}]
        assert len(own) == -(-n // k)
        repeats = [sum(group.count(i) for group in own) for i in ids[identity == number * 5].tolist()]
        assert min(repeats) >= 1 and max(repeats) - min(repeats) <= 1  # its own samples are repeated evenly
        assert all(len(set(group)) == min(n, k) for group in own)


@given(counts=counts, k=st.integers(2, 4), p=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_identities_of_a_pxk_batch_are_distinct_as_long_as_enough_are_left(counts, k, p, seed):
    identity = np.repeat(np.arange(len(counts)), counts)
    order = group_by_identity(
        np.arange(len(identity)), identity, samples_per_identity=k, seed=seed, epoch=1, global_batch_size=p * k
    )
    left = [-(-n // k) for n in counts]
    for batch in list_batches(order):
        owners = identity[batch[::k]].tolist()
        if sum(groups > 0 for groups in left) >= p:
            assert len(set(owners)) == p
        for owner in owners:
            left[owner] -= 1
    assert not any(left)


@given(
    twins=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12),
    half=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_balanced_groups_hold_both_twins_equally_often_until_one_has_no_image_left(twins, half, seed):
    person = np.concatenate([np.repeat([2 * i, 2 * i + 1], counts) for i, counts in enumerate(twins)])
    ids, family = 7 * np.arange(len(person)) + 3, person // 2
    order = group_by_identity(
        ids, family, samples_per_identity=2 * half, seed=seed, epoch=1, global_batch_size=2 * half, balanced=person
    )
    assert set(order.ids.tolist()) == set(ids.tolist())
    groups = (order.ids.reshape(-1, 2 * half) - 3) // 7
    even = [family[group[0]] for group in groups if (person[group] % 2).sum() == half]
    assert all(even.count(i) >= min(counts) // half for i, counts in enumerate(twins))


def test_an_unknown_column_or_another_order_to_balance_is_refused():
    columns = {"family": np.arange(4) // 2, "person": np.arange(4)}
    config = TrainConfig(job="j", family="f", data=DataSettings(order="pxk", order_by="family", balance_by="persn"))
    with pytest.raises(UserError, match=r"data\.balance_by=persn: no such column. The data set has family, person"):
        order_epoch(np.arange(4), columns, config, epoch=0)
    config = TrainConfig(job="j", family="f", data=DataSettings(balance_by="person"))
    with pytest.raises(UserError, match=r"data\.balance_by=person is for .*=pxk, not shuffle.*: data\.balance_by=$"):
        order_epoch(np.arange(4), columns, config, epoch=0)
    data = DataSettings(order="pxk", order_by="family", balanced_repeats=3)
    config = TrainConfig(job="j", family="f", data=data)
    with pytest.raises(UserError, match=r"balanced_repeats=3 repeats .* is empty. Name a column: data\.balance_by="):
        order_epoch(np.arange(4), columns, config, epoch=0)


@given(
    images=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=9),
    per_person=st.integers(1, 3),
    repeats=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_families_with_twins_come_as_often_as_asked_and_people_without_one_once(images, per_person, repeats, seed):
    people = [(family, count) for family, counts in enumerate(images) for count in counts]
    family = np.concatenate([[owner] * count for owner, count in people])
    person = np.concatenate([[i] * count for i, (_, count) in enumerate(people)])
    k, columns = 2 * per_person, {"family": family, "person": person}
    data = DataSettings(
        order="pxk", order_by="family", samples_per_identity=k, balance_by="person", balanced_repeats=repeats
    )
    config = TrainConfig(job="j", family="f", seed=seed, global_batch_size=2 * k, data=data)
    groups = order_epoch(np.arange(len(family)), columns, config, epoch=2).ids.reshape(-1, k)
    owners = family[groups]
    assert (owners == owners[:, :1]).all()
    for number, counts in enumerate(images):
        own = groups[owners[:, 0] == number]
        times = repeats if len(counts) > 1 else 1
        assert len(own) == times * -(-sum(counts) // k)
        counted = np.bincount(own.reshape(-1), minlength=len(family))[family == number]
        assert counted.min() >= times
        if sum(counts) % k == 0:
            assert (counted == times).all()


def test_one_identity_with_almost_all_samples_does_not_crowd_out_the_others_early():
    identity = np.concatenate([np.zeros(1000, dtype=int), np.arange(1, 9)])
    order = group_by_identity(np.arange(1008), identity, samples_per_identity=4, seed=0, epoch=0, global_batch_size=12)
    first = [set(identity[order.batch(i)].tolist()) for i in range(3)]
    assert [len(owners) for owners in first] == [3, 3, 3]
    assert set.union(*first) == set(range(9))


@pytest.mark.parametrize(("k", "batch", "advice"), [(4, 30, "global_batch_size=28"), (8, 6, "global_batch_size=8")])
def test_a_global_batch_that_k_does_not_divide_is_refused_with_a_size_that_works(k, batch, advice):
    with pytest.raises(UserError, match=rf"{batch} is not a multiple of data.samples_per_identity={k}.*{advice}"):
        group_by_identity(
            np.arange(50), np.arange(50) // 5, samples_per_identity=k, seed=0, epoch=0, global_batch_size=batch
        )


def test_a_late_batch_of_two_million_samples_is_a_view_that_costs_no_more_than_an_early_one():
    ids = np.arange(2_000_000)
    for order in (
        shuffle(ids, seed=0, epoch=0, global_batch_size=16),
        group_by_identity(ids, ids // 10, samples_per_identity=4, seed=0, epoch=0, global_batch_size=16),
    ):
        for index in (10, 100_000):
            batch = order.batch(index)
            assert batch.base is not None and np.shares_memory(batch, order.ids)
            assert np.array_equal(batch, order.ids[16 * index : 16 * index + 16])
