"""Puts off loading torch's compiler, which each optimizer asks for and only a compiled model needs.

Loading it takes about as long as loading torch itself, at every start and resume.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_WRAPPED = "_trace_wrapped_higher_order_op"


def defer_compiler() -> None:
    """Let `import torch._dynamo` find a stand-in that loads the compiler once anything of it takes effect."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _DeferredCompiler(_NAME)


def defer_symbols() -> None:
    """Answer what torch asks about sizes that are numbers, without loading half a second of SymPy.

    Nor is loaded what transformers imports for models in parts, where torch can distribute, and SciPy for detection.

    For a process that has neither symbolic sizes nor `DTensor` nor other ranks: torch asks for that class once, and
    remembers it.
    """
    shapes, optimize = "torch.fx.experimental.symbolic_shapes", "scipy.optimize"
    answers = {name: partial(_answer, shapes, name, answer) for name, answer in _OF_NUMBERS.items()}
    assignment = partial(_load_and_call, optimize, "linear_sum_assignment")
    for stand_in in (
        _StandIn("sympy", is_package=True, Basic=type("Basic", (), {})),
        _StandIn("torch.distributed.tensor", is_package=True, DTensor=type("DTensor", (), {})),
        _StandIn("torch.utils._sympy.functions", is_package=False, Max=max),
        _StandIn(shapes, is_package=False, free_unbacked_symbols=lambda x: frozenset(), **answers),
        _StandIn(optimize, is_package=True, linear_sum_assignment=assignment),
    ):
        sys.modules.setdefault(stand_in.__name__, stand_in)
    torch.distributed.is_available = lambda: False


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"),
        lambda truth, skip=0: truth,
    ),
    "guarding_hint_or_throw": lambda number: number,
    "has_guarding_hint": lambda number: True,
    "is_nested_int": lambda number: False,
    "sym_eq": lambda one, other: tuple(one) == tuple(other) if isinstance(one, tuple | list) else one == other,
    "sym_and": lambda *truths: all(truths),
    "sym_or": lambda *truths: any(truths),
}
"""What the functions for symbolic sizes and truths return for ints and bools."""


def _answer(module: str, name: str, answer: Callable[..., Any], *args: Any) -> Any:
    every = chain.from_iterable(arg if isinstance(arg, tuple | list) else (arg,) for arg in args)
    is_plain = all(type(one) in (bool, int) for one in every)
    return answer(*args) if is_plain else getattr(_load_instead(module), name)(*args)


def _load_and_call(module: str, name: str, *args: Any, **options: Any) -> Any:
    return getattr(_load_instead(module), name)(*args, **options)


class _StandIn(ModuleType):
    """Has some answers of a module; at anything else that is asked of it, it becomes that module."""

    def __init__(self, name: str, *, is_package: bool, **answers: Any) -> None:
        super().__init__(name)
        self._names = tuple(answers)
        self.__dict__.update(answers)
        if is_package:
            self.__path__ = _PackagePath(partial(_load_instead, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as in `_DeferredCompiler`
            raise AttributeError(f"{self.__name__} is not loaded, so it has no {name}")
        return getattr(_load_instead(self.__name__), name)

    def forget(self) -> None:
        """Have no answers any more: whoever kept this instead of the module asks the module from now on."""
        for name in self._names:
            vars(self).pop(name, None)


def _load_instead(name: str) -> ModuleType:
    """Return a module; if a stand-in has its place, load it."""
    if isinstance(stand_in := sys.modules.get(name), _StandIn):
        del sys.modules[name]
        stand_in.forget()
    return importlib.import_module(name)


class _PackagePath(list[str]):
    """The path of a stand-in for a package: empty, and who looks for a submodule there loads the package."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        super().__init__()
        self.load = load
        if not any(isinstance(finder, _SubmoduleFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _SubmoduleFinder())


class _SubmoduleFinder(MetaPathFinder):
    """Finds a submodule of a package that has a stand-in, after loading the package, which may load the submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not isinstance(path, _PackagePath):
            return None
        package = path.load()
        if loaded := sys.modules.pop(
            fullname, None
        ):  # `import` prefers the spec of what it finds there, and loads again
            return importlib.util.spec_from_loader(fullname, _KeepLoaded(loaded))
        return PathFinder.find_spec(fullname, package.__path__)


class _KeepLoaded(Loader):
    """Gives a module that is loaded, instead of loading a second one of the same name."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def use_deterministic_algorithms(mode: bool, *, warn_only: bool) -> None:
    """Do what torch's function of that name does, which loads the compiler to set an option of it, without loading it.

    The compiler gets the option when it is loaded.
    """
    if isinstance(sys.modules.get(_NAME), _DeferredCompiler):
        torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if mode else "default")
    else:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


class _Answers:
    """Answers some calls of a submodule without loading it; anything else is the submodule's."""

    __spec__ = None  # what `import` asks of a module that it finds loaded

    def __init__(self, name: str, **answers: Callable[..., Any]) -> None:
        self.__dict__ |= answers
        self.name = f"{_NAME}.{name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.name} is not loaded, so it has no {name}")
        _load_compiler()
        return getattr(importlib.import_module(self.name), name)


def _is_compile_supported(device: Any) -> Any:
    """Answer torchvision, which imports this function when it is loaded and calls it to compile an operator."""
    _load_compiler()
    return importlib.import_module(f"{_NAME}.utils").is_compile_supported(device)


def _transform_item_to_index(*args: Any) -> Any:
    """Answer transformers, which imports this class for masks that are made under `vmap`."""
    _load_compiler()
    return importlib.import_module(f"{_NAME}.{_WRAPPED}").TransformGetItemToIndex(*args)


def _disable_later(fn: FunctionType, *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that, once there is a compiler, is kept from being traced as it does that."""

    disabled: Callable[..., Any] | None = None

    @wraps(fn)
    def call(*call_args: Any, **call_options: Any) -> Any:
        nonlocal disabled
        if disabled is None and not isinstance(compiler := sys.modules[_NAME], _DeferredCompiler):
            disabled = compiler.disable(fn, *args, **options)
        return (disabled or fn)(*call_args, **call_options)

    call.__dict__["_torchdynamo_disable"] = True  # so the compiler calls it, too, and does not look into it
    return call


def _load_compiler() -> ModuleType:
    """Return the compiler; if the stand-in has its place, load it."""
    if isinstance(stand_in := sys.modules.get(_NAME), _DeferredCompiler):
        stand_in.load()
    return sys.modules[_NAME]


def _load_config() -> ModuleType:
    """Load the compiler's options alone: fake tensors read them."""
    spec = PathFinder.find_spec(f"{_NAME}.config", [f"{path}/_dynamo" for path in torch.__path__])
    assert spec is not None and spec.loader is not None
    config = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    return config


class _DeferredCompiler(ModuleType):
    """Answers what torch's optimizers, DDP, fake tensors and torchvision ask in eager mode.

    At anything else it becomes the real module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.utils = _Answers(
            "utils",
            get_optimize_ddp_mode=lambda: "ddp_optimizer",  # the default
            is_compile_supported=_is_compile_supported,
        )
        self.config = _load_config()
        self.source = _Answers("source", ConstantSource=str, RandomValueSource=type)  # names, for symbolic shapes only
        self._wrapped = _Answers(_WRAPPED, TransformGetItemToIndex=_transform_item_to_index)
        for module in (self.utils, self.source, self._wrapped):
            sys.modules[module.name] = module  # type: ignore[assignment]
        self.trace_rules = _Answers("trace_rules", clear_lru_cache=lambda: None)
        self._in_graph: list[Callable[..., Any]] = []
        self.__path__ = _PackagePath(_load_compiler)

    def graph_break(self, msg: str = "") -> None:
        """End a graph: there is none before the compiler is loaded."""

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Keep a function from being traced: before the compiler is loaded nothing is."""
        if fn is None:
            return lambda function: self.disable(function, *args, **options)
        if not isinstance(fn, FunctionType):
            return self.__getattr__("disable")(fn, *args, **options)
        return _disable_later(fn, *args, **options)

    def allow_in_graph(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Remember what is to stay one operation of a graph, and tell the compiler when it is loaded."""
        self._in_graph.append(fn)
        return fn

    def assume_constant_result(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Mark a function as the compiler's decorator does: transformers marks some when it is loaded."""
        fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file, at any moment
            raise AttributeError(f"{_NAME} is not loaded, so it has no {name}")
        if sys.modules.get(_NAME) is self:
            self.load()
        return getattr(sys.modules[_NAME], name)

    def load(self) -> None:
        """Replace this by the module; garbage is not collected meanwhile, as when torch is loaded."""
        del sys.modules[_NAME], torch._dynamo
        for module in (self.utils.name, self.source.name, self._wrapped.name, self.config.__name__):
            del sys.modules[module]
        collecting = gc.isenabled()
        gc.disable()
        try:
            torch._dynamo = importlib.import_module(_NAME)
        finally:
            if collecting:
                gc.enable()
        for function in self._in_graph:
            torch._dynamo.allow_in_graph(function)  # type: ignore[no-untyped-call]
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)
