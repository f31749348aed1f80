"""Compares what operators make of tensors without values with what they make of the same tensors with values."""

import copy
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.test_step_memory import JOBS, prepare
from trainyard import config as configs
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.settings import TrainConfig
from trainyard.train.meta_tensors import MetaTensorMode, ValuesAreReadError, copy_without_values, remove_values
from trainyard.train.module import DataInfo, has_values

CPU = torch.device("cpu")


class Record(TorchDispatchMode):
    """Records what operators allocate: their names, and the layouts of tensors that are no views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[tuple[Any, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list_storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if made := {key: tensor for key, tensor in list_storages(out).items() if key not in given}:
            self.made.append((func.name(), [describe_layout(tensor) for tensor in made.values()]))
        return out


def list_storages(values: Any) -> dict[int, Tensor]:
    return {leaf.untyped_storage()._cdata: leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def describe_layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return what matters of a tensor's layout: not the stride of an axis of one element."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device.type, tensor.untyped_storage().nbytes()


def record_step(config: TrainConfig, *, values: bool, dtype: torch.dtype | None) -> list[tuple[str, list[Any]]]:
    """Return the operators of a forward and backward pass, each with the layouts of what it made."""
    data = ShardSet(Path(config.data.path))
    module = configs.load_family(JOBS, config.family, "module").build(config, DataInfo.from_shards(data, np.arange(8)))
    module.train().to(memory_format=torch.channels_last)
    loader = Loader.from_config(config, data, device=CPU, decode="cpu", channels_last=True)
    with closing(loader.evaluate(np.arange(4), batch_size=4)) as stream:
        batch = dict(next(stream).batch)
    batch |= {"noise": torch.rand(4, 32), "samples_seen": torch.zeros((), dtype=torch.int64)}
    if not values:
        module = copy_without_values(module)
        batch = {name: remove_values(tensor) for name, tensor in batch.items()}
    with nullcontext() if values else MetaTensorMode(), Record() as found:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = module(batch)["loss"]
        loss.backward()
    return found.made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["antispoof", "fingerprint", "twins"])
def test_a_step_makes_tensors_of_the_same_layout_without_values(family, dtype, tmp_path):
    config = prepare(f"{family}_smoke", tmp_path)
    real, meta = (record_step(config, values=values, dtype=dtype) for values in (True, False))
    assert len(real) > 100 and meta == real


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: bool(x.any()),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_values_cannot_be_read(read):
    with MetaTensorMode(), pytest.raises(ValuesAreReadError):
        read(torch.arange(3.0))


def test_tensors_of_python_numbers_have_values_until_they_meet_one_without():
    with MetaTensorMode():
        known = torch.tensor([1.0, 2.0])
        assert (known * 2).tolist() == [2, 4]
        unknown = torch.zeros(2) + known
        assert unknown.device.type == "cpu" and unknown.shape == (2,)
        with pytest.raises(ValuesAreReadError):
            unknown.tolist()
        with pytest.raises(RuntimeError):
            unknown.numpy()


def test_views_share_a_storage_and_copies_do_not():
    tensor = remove_values(torch.zeros(4, 6)[:, ::2])
    assert tensor.stride() == (6, 2) and tensor[1:].untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert tensor.clone().untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert copy.deepcopy(tensor).untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_what_an_operator_made_before_is_made_again_with_memory_of_its_own():
    x = remove_values(torch.ones(4, 6, 5, 5).to(memory_format=torch.channels_last))
    half = remove_values(torch.ones(4, 6, 5, 5, dtype=torch.half))
    for tensor in (x, half):
        one, two = (nn.functional.group_norm(tensor, 3) for _ in range(2))
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
        assert one.dtype == tensor.dtype and one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert (x + 1).dtype == torch.float32 and (half + 1).dtype == (half + True).dtype == torch.half
    whole = remove_values(torch.arange(3))
    assert [(whole + number).dtype for number in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    flat = [x.reshape(4, -1) for _ in range(2)]
    assert torch.ops.aten._unsafe_view.default(half, (4, -1)).untyped_storage()._cdata == half.untyped_storage()._cdata
    again = torch.ops.aten._unsafe_view.default(half, (4, -1))
    assert again.untyped_storage()._cdata == half.untyped_storage()._cdata and flat[0].shape == (4, 150)


def test_a_copied_module_keeps_tied_weights_and_the_original_its_values():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    copied = copy_without_values(module)
    assert copied[1].weight is copied[0].weight and isinstance(copied[0].weight, nn.Parameter)
    assert len(list(copied.parameters())) == len(list(module.parameters()))
    copied(remove_values(torch.zeros(2, 3))).sum().backward()
    assert copied[1].weight.grad.shape == (3, 3) and module[1].weight.grad is None
    assert module[2].num_batches_tracked == 0
    assert not has_values(copied[2].running_mean) and has_values(module[2].running_mean)
