"""The order of samples: which pairs the batches of an epoch form."""

import itertools

from tests.cases.twins import make_batch, make_config, make_data, make_module
from trainyard.data.order import group_by_identity

from .synthesis import IMAGES_PER_FAMILY, IMAGES_PER_PERSON


def test_an_epoch_encodes_each_image_once_and_forms_the_pairs_of_whole_families() -> None:
    data = make_data(family_counts={"train": 12, "val": 2, "test": 2}, per_person=8)
    family = data.columns["family"]
    order = group_by_identity(
        data.train_ids, family[data.train_ids], samples_per_identity=8, seed=0, epoch=3, global_batch_size=32
    )
    assert sorted(order.ids.tolist()) == data.train_ids.tolist()
    module, encoded = make_module(data=data), []
    module.network.patch_embed.register_forward_hook(lambda _, arguments, out: encoded.append(len(arguments[0])))
    for i in range(len(order)):
        ids = order.batch(i)
        assert (family[ids].reshape(-1, 8) == family[ids].reshape(-1, 8)[:, :1]).all()
        module(make_batch(data, ids))
    assert sum(encoded) == len(data.train_ids)


def test_batches_of_whole_families_form_every_pair_of_the_list_with_at_most_a_fortieth_of_its_encodings() -> None:
    data = make_data(family_counts={"train": 6, "val": 2, "test": 2}, per_person=IMAGES_PER_PERSON)
    family, train = data.columns["family"], data.train_ids
    listed = {(i, j) for i, j in itertools.combinations(train.tolist(), 2) if family[i] == family[j]}
    size = IMAGES_PER_FAMILY
    order = group_by_identity(
        train, family[train], samples_per_identity=size, seed=0, epoch=0, global_batch_size=2 * size
    )
    batch_pairs = [
        tuple(sorted(pair)) for b in range(len(order)) for pair in itertools.combinations(order.batch(b).tolist(), 2)
    ]
    assert sorted(pair for pair in batch_pairs if family[pair[0]] == family[pair[1]]) == sorted(listed)
    assert 2 * len(listed) / len(order.ids) == 2 * IMAGES_PER_PERSON - 1 > 40


def test_the_pair_list_preset_encodes_two_images_for_each_pair() -> None:
    data = make_data(family_counts={"train": 20, "val": 2, "test": 2}, per_person=6)
    module = make_module(make_config(arcface_weight=0.0, pair_weight=1.0, pair_strangers=False), data)
    family, train = data.columns["family"], data.train_ids
    order = group_by_identity(train, family[train], samples_per_identity=2, seed=0, epoch=0, global_batch_size=32)
    losses = module(make_batch(data, order.batch(0)))
    assert float(losses["pairs_per_image"]) == 0.5
    assert sorted(order.ids.tolist()) == train.tolist()
