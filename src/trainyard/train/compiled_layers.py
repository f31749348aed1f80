"""Compiles what a step calls: each layer that the model repeats by itself, or the whole model if it names none."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainyard.train.module import TrainModule

Backend = str | Callable[..., Any]
"""What torch.compile takes: "inductor" generates kernels, "eager" and "aot_eager" only trace, in a second."""


def compile_layers(module: TrainModule, *, backend: Backend = "inductor") -> int:
    """Compile the forward method of each repeated layer, in place; return their number.

    Layers of one kind share what is generated for the first of them, so starting up takes as long as for one layer,
    not for the whole model. Names in the state dict stay as they are.

    Only training steps use compiled code: scoring, with other batch sizes, and deep copies of the module do not. Call
    it after activation checkpointing is enabled, which is then compiled too, and before DDP wraps the module.
    """
    layers = list(module.repeated_layers())
    if not layers:
        return 0
    run = torch.compile(_run_forward, backend=backend)
    for layer in layers:
        layer.forward = _CompiledForward(layer, run)
    # All layers share one code object, which has an entry for each shape, type, and whether a gradient is needed.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    # Splitting compiled graphs by DDP's buckets is for whole models, and refuses activation checkpointing.
    torch._dynamo.config.optimize_ddp = False
    return len(layers)


class _CompiledForward:
    """A layer's forward method, compiled where it trains."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        self._layer, self._forward, self._run = layer, layer.forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._layer.training and torch.is_grad_enabled():
            return self._run(self._forward, *args, **kwargs)
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)


def _run_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward method.

    Dynamo traces no function of torch.nn that is called from outside a traced one. So `nn.Module.compile`, which
    compiles a method of torch.nn, does nothing for a layer whose forward is torch.nn's too, such as nn.Sequential.
    """
    return forward(*args, **kwargs)
