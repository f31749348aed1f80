"""Tensors without values that torch takes for tensors of the CPU: a model's step runs on them in seconds.

Autocast, autograd and the backward pass act as on the CPU; what would compute runs the operator of torch's meta
device, which makes shapes, strides, types and storages only.

torch has the same in torch._subclasses.FakeTensorMode, which takes several times as long for the thousands of
operators of a step: most of it goes to caches and to symbolic shapes, which are not needed here. Tests compare the
layouts with those of real steps.
"""

import copy
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Module = TypeVar("Module", bound=nn.Module)

_CPU, _META = torch.device("cpu"), torch.device("meta")


class ValuesAreReadError(Exception):
    """An operator reads values, as tensor.item() does, or makes a tensor whose size depends on them."""


class MetaTensor(Tensor):
    """A tensor of the CPU to those who ask, and of the meta device to operators."""

    _running = False  # while an operator of the meta device runs, which must see tensors of its own device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor) -> "MetaTensor":
        """Return a tensor with the storage of one of the meta device."""
        made: MetaTensor = Tensor._make_subclass(
            cls, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device, that of the CPU except to operators."""
        return _META if MetaTensor._running else _CPU

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor with a storage of its own."""
        copied: Tensor = memo.setdefault(id(self), remove_values(self))
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_on_meta(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Refuse to return values: there are none."""
        raise ValuesAreReadError("aten::tolist")


class MetaTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes new tensors without values, too. One that is made of Python numbers, by `torch.tensor`, has some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_meta(func, args, kwargs or {})


class SkippedFills(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves new tensors as they are where they would be filled with random numbers, for a model whose values go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _FILLS else func(*args, **(kwargs or {}))


_FILLS = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)


def copy_without_values(module: Module) -> Module:
    """Return a copy of a module whose parameters and buffers have no values."""
    return copy.deepcopy(module, {id(t): remove_values(t) for t in chain(module.parameters(), module.buffers())})


def remove_values(tensor: Tensor) -> Tensor:
    """Return a tensor without values of the same layout."""
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(MetaTensor(meta), requires_grad=tensor.requires_grad)
    return MetaTensor(meta).requires_grad_(tensor.requires_grad)


def run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of tensors without values. On tensors with values alone it runs as ever.

    Raises:
        ValuesAreReadError: it needs values.
    """
    if func is torch.ops.prim.device.default:
        return args[0].device
    tensors = list(_list_tensors((*args, *kwargs.values())))
    has_device, reads_values = _look_up(func)
    if tensors and not any(isinstance(tensor, MetaTensor) for tensor in tensors):
        return func(*args, **kwargs)
    if reads_values and not (func is torch.ops.aten.index.Tensor and not _has_mask(args[1])):
        raise ValuesAreReadError(func.name())
    if not all(isinstance(tensor, MetaTensor) for tensor in tensors):
        args, kwargs = _replace(args), {name: _replace(value) for name, value in kwargs.items()}
    if has_device:
        kwargs = {**kwargs, "device": _META, "pin_memory": False}
    call = _describe_call(func, args, kwargs)
    if call in _LAYOUTS:
        return _make(_LAYOUTS[call])
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        MetaTensor._running = True
        try:
            made = _SHORT_CUTS.get(func, func)(*args, **kwargs)
        finally:
            MetaTensor._running = False
    if func in _CONVOLUTIONS:
        made = _lay_out(func, args, made)
    if call is not None and _owns_memory(made, tensors):
        _LAYOUTS[call] = _describe_results(made)
    return _wrap(made)


_LAYOUTS: dict[Any, Any] = {}
"""What operators made of arguments of the same layout: torch's meta kernels, written in Python, take up to 20 ms."""


class _Layout(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _describe_call(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what decides on the layout of an operator's results, hashable; None if the operator changes or views."""
    if not _makes_all(func):
        return None
    try:
        return func, _describe(args), *((name, _describe(value)) for name, value in kwargs.items())
    except TypeError:
        return None


def _describe(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.shape, arg.stride(), arg.dtype
    if isinstance(arg, list | tuple):
        return tuple(map(_describe, arg))
    if type(arg) not in _PLAIN:
        raise TypeError("it decides in a way that is not known")
    return type(arg), arg  # a 1 is no True and no 1.0


_PLAIN = (
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@cache
def _makes_all(func: Any) -> bool:
    """Return whether an operator makes all that it returns, by its schema."""
    return not func._schema.is_mutable and all(result.alias_info is None for result in func._schema.returns)


def _owns_memory(made: Any, tensors: Iterable[Tensor]) -> bool:
    """Return whether each result has memory of its own, of just its size."""
    results = list(_list_tensors(made if isinstance(made, list | tuple) else (made,)))
    storages = {tensor.untyped_storage()._cdata for tensor in chain(results, tensors)}
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    return len(storages) == len(results) + len(given) and all(
        tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == _count_bytes(tensor) for tensor in results
    )


def _count_bytes(tensor: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _describe_results(made: Any) -> Any:
    if isinstance(made, list | tuple):
        return type(made), [_describe_results(item) for item in made]
    return _Layout(tuple(made.shape), made.stride(), made.dtype) if isinstance(made, Tensor) else made


def _make(described: Any) -> Any:
    """Return results of these layouts."""
    if isinstance(described, _Layout):
        size, stride, dtype = described
        return MetaTensor(torch.empty_strided(size, stride, dtype=dtype, device=_META))
    if isinstance(described, tuple):
        kind, items = described
        return kind(_make(item) for item in items)
    return described


@cache
def _look_up(func: Any) -> tuple[bool, bool]:
    """Return whether an operator takes a device, and whether its result depends on values."""
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    return takes_device, any(tag in func.tags for tag in _VALUE_TAGS)


_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def _list_tensors(args: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the tensors among an operator's arguments, which may be lists of tensors."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (item for item in arg if isinstance(item, Tensor))


def _replace(arg: Any) -> Any:
    """Return an argument without the values of its tensors."""
    if isinstance(arg, list | tuple):
        return [_replace(item) for item in arg]
    return remove_values(arg) if isinstance(arg, Tensor) and not isinstance(arg, MetaTensor) else arg


def _wrap(made: Any) -> Any:
    if isinstance(made, Tensor):
        return made if isinstance(made, MetaTensor) else MetaTensor(made)
    if isinstance(made, list | tuple):
        return type(made)(_wrap(item) for item in made)
    return made


def _has_mask(indices: Iterable[Any]) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def _lay_out(func: Any, args: Any, made: Any) -> Any:
    """Return what a convolution made in the memory format that it has on the CPU; the meta device does not know it."""
    backward = func is _CONVOLUTIONS[1]
    images, weight, bias, *options = args[1:10] if backward else args
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    sizes = {"bias": None, "bias_sizes": bias} if backward else {"bias": bias}
    backend = torch._C._select_conv_backend(images, weight, **dict(zip(names, options, strict=True)), **sizes)
    if weight.ndim == 3:  # one dimension is computed as two
        images, weight = images.contiguous().unsqueeze(2), weight.unsqueeze(2)
    memory_format = torch._C._conv_determine_backend_memory_format(images, weight, backend)
    if not backward:
        return _set_format(made, memory_format)
    return (*(_set_format(gradient, memory_format) for gradient in made[:2]), made[2])


def _set_format(made: Tensor | None, memory_format: torch.memory_format) -> Tensor | None:
    if made is None or (made.ndim == 3 and memory_format != torch.channels_last):
        return made
    if made.ndim == 3:
        return made.unsqueeze(2).to(memory_format=memory_format).squeeze(2)
    return made.to(memory_format=memory_format)


def _normalize_batch(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any) -> Any:
    """Make what aten::native_batch_norm does: statistics of half-precision images are float32."""
    statistics = x.new_empty(x.shape[1] if training else 0, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


def _normalize_batch_backward(gradient: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> Any:
    """Make what aten::native_batch_norm_backward does."""
    of_weight = x.new_empty(x.shape[1], dtype=x.dtype if weight is None else weight.dtype)
    made = (torch.empty_like(x), of_weight, torch.empty_like(of_weight))
    return tuple(tensor if needed else None for tensor, needed in zip(made, rest[-1], strict=True))


_SHORT_CUTS = {
    torch.ops.aten.native_batch_norm.default: _normalize_batch,
    torch.ops.aten.native_batch_norm_backward.default: _normalize_batch_backward,
}
"""Instead of operators whose meta kernels, written in Python, take milliseconds."""
