"""Finds the operators that torch refuses on CUDA where algorithms have to be deterministic, in what runs on the CPU.

Two sources, which agree but for what is noted: the second list of `torch.use_deterministic_algorithms`'s documentation,
and the callers of at::Context::alertNotDeterministic in libtorch_cuda.so; both of torch 2.13.0, read 2026-11-26.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

REFUSED: Mapping[str, tuple[str, ...]] = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),  # the library alone
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    "torch.nn.functional.interpolate": (
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "_upsample_bilinear2d_aa_backward",
        "upsample_bicubic2d_backward",
        "_upsample_bicubic2d_aa_backward",
        "upsample_trilinear3d_backward",
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.ReplicationPad1d": ("replication_pad1d_backward",),  # before torch 2.8
    "torch.nn.ReplicationPad3d": ("replication_pad3d_backward",),
    "torch.nn.NLLLoss": ("nll_loss2d_forward",),  # of images; the library says nothing of nll_loss_forward
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_backward",),
    "torch.Tensor.put_": ("put", "put_"),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.median": ("median", "nanmedian"),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.cumsum": ("cumsum", "cumsum_"),  # the documentation alone; the library did before 2.13
    "torch.Tensor.scatter_reduce": ("scatter_reduce", "scatter_reduce_", "scatter", "scatter_"),
    "torch.Tensor.resize_": (),  # of quantized tensors
    "index_reduce": ("index_reduce", "index_reduce_"),  # the library alone
}
"""The documentation's names, and the operators."""

_UNLESS: Mapping[str, Callable[[tuple[Any, ...], Any, Any], bool]] = {
    "cumsum": lambda args, options, out: not (out.is_floating_point() or out.is_complex()),
    "histc": lambda args, options, out: not args[0].is_floating_point(),
    "bincount": lambda args, options, out: len(args) < 2 and options.get("weights") is None,
    "median": lambda args, options, out: not isinstance(out, tuple),
    "nanmedian": lambda args, options, out: not isinstance(out, tuple),
    "_embedding_bag_backward": lambda args, options, out: args[8] != 2,  # mode="max"
    "scatter_reduce": lambda args, options, out: args[4] != "prod",
    "scatter": lambda args, options, out: "reduce" not in options,
    "nll_loss2d_forward": lambda args, options, out: args[3] == 0,  # reduction="none"
}
"""When an operator is not refused all the same; of an in-place one by the same name."""

_OPERATORS = {name for names in REFUSED.values() for name in names}


class _RefusedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes those that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        name = func.name().removeprefix("aten::").partition(".")[0]
        allowed = _UNLESS.get(name.removesuffix("_") if not name.startswith("_") else name)
        if name in _OPERATORS and not (allowed and allowed(args, options, out)):
            self.names.add(name)
        return out


def find_refused_operators(work: Callable[[], object]) -> set[str]:
    """Do `work`, and return the operators in it that torch would refuse on CUDA, those of the backward pass too."""
    found = _RefusedOperators()
    with found:
        work()
    return found.names
