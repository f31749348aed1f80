"""Compiles the model for a step: each repeated layer by itself, or the whole model if it names none."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainyard.train.module import TrainModule

Backend = str | Callable[..., Any]
"""Back ends of torch.compile: "inductor" generates kernels, "eager" and "aot_eager" only trace, in a second."""


def compile_layers(module: TrainModule, *, backend: Backend = "inductor", cuda_graphs: bool = False) -> int:
    """Compile the forward method of each repeated layer, in place; return their number.

    Layers of one kind share the code of the first of them, so starting up takes as long as for one layer,
    not for the whole model. Names in the state dict stay as they are.

    Only training steps use compiled code: scoring, with other batch sizes, and deep copies of the module do not. Call
    it after activation checkpointing is enabled, which is then compiled too, and before DDP wraps the module.

    Args:
        cuda_graphs: start the kernels of a layer's forward or backward pass with one call. Tensors that it returns,
            gradients included, are memory that it writes again after the next `begin_step_of_graphs`.
    """
    layers = list(module.repeated_layers())
    if not layers:
        return 0
    run = torch.compile(
        _run_forward,
        backend=backend,
        dynamic=False if cuda_graphs else None,  # each shape has its own graph in any case
        options=_list_graph_options() if cuda_graphs else None,
    )
    for layer in layers:
        layer.forward = _CompiledForward(layer, run)
    # All layers share one code object, which has an entry for each shape, type, and whether a gradient is needed.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    # Splitting compiled graphs by DDP's buckets is for whole models, and refuses activation checkpointing.
    torch._dynamo.config.optimize_ddp = False
    return len(layers)


def begin_step_of_graphs() -> None:
    """Let CUDA graphs write again to the memory of the step before, which nobody may read from here on.

    Without it they would do so at every micro-batch, and overwrite gradients that are being accumulated.
    """
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def _list_graph_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Return the options of "inductor": graphs, and, where torch knows it, an error where it would compute without."""
    from torch._inductor import config

    strict = {"triton.cudagraph_or_error": True} if hasattr(config.triton, "cudagraph_or_error") else {}
    return {"triton.cudagraphs": True, **strict}


class _CompiledForward:
    """A layer's forward method, compiled where it trains."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        self._layer, self._forward, self._run = layer, layer.forward, run
        is_of_class = getattr(self._forward, "__func__", None) is type(layer).forward
        self._traced = (layer, None) if is_of_class else (None, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._layer.training and torch.is_grad_enabled():
            return self._run(*self._traced, *args, **kwargs)
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)


def _run_forward(layer: nn.Module | None, forward: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward method: that of its class, or another one.

    For torch 2.7.1 a method that belongs to another object is another function, which it compiles again. An object
    passed as an argument is compared by its kind.

    Dynamo traces no function of torch.nn that is called from outside a traced one. So `nn.Module.compile`, which
    compiles a method of torch.nn, does nothing for a layer whose forward is torch.nn's too, such as nn.Sequential.
    """
    if layer is not None:
        return type(layer).forward(layer, *args, **kwargs)
    assert forward is not None
    return forward(*args, **kwargs)
