"""Data-parallel training: the order in which ranks sum gradients."""

import torch
from torch.nn.parallel import DistributedDataParallel

from trainyard.train.module import TrainModule


def wrap_in_ddp(module: TrainModule, *, device: torch.device) -> DistributedDataParallel:
    """Wrap a module so that ranks train it together."""
    # torch writes the name of a parameter of the root module once as "name" and once as ".name"
    ignored = [spelling for name in module.sparse_gradients() for spelling in (name, f".{name}")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    _fix_bucket_order(model)
    return model


def _fix_bucket_order(model: DistributedDataParallel) -> None:
    """Have DDP choose its gradient buckets now, from parameters in reverse order, not from the first step's gradients.

    DDP puts all gradients into one bucket at first. After one reduction it forms the final buckets, of 1 MiB and then
    25 MiB, in the order in which that reduction got its gradients. From three ranks on, rounding depends on a
    gradient's place in its bucket, so the first step of an attempt would round unlike the same step of a run that was
    not interrupted. A reduction of zeros before the first step makes every step use the final buckets. Their order is a
    function of the module alone; it suits layers that are defined in the order in which they compute.
    """
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(trained):
        parameter.backward(torch.zeros_like(parameter))
    model.zero_grad(set_to_none=True)
