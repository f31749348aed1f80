"""Decides once for a run which operators of its step may be nondeterministic; every attempt keeps to the decision."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.choice import Choice
from trainyard.data.loader import MicroBatch
from trainyard.errors import NoDeterministicKernel
from trainyard.runs.folder import read_env, update_env
from trainyard.runs.history import read_object
from trainyard.text import quote_path
from trainyard.train import distributed, precision
from trainyard.train.contract import try_gradients
from trainyard.train.module import TrainModule

SECTION = "determinism"
"""The section of env.json with a `Findings` for each kind of device and version of torch that the run was on."""


@dataclass(frozen=True)
class Findings:
    """Operators and attention of a run's step that matter for determinism; sorted."""

    operators: list[str]  # that have no deterministic kernel
    attention: list[str]  # back ends of scaled_dot_product_attention, while none of them is refused


def choose_determinism(
    module: TrainModule,
    peek: Callable[[], MicroBatch],
    *,
    run: Path,
    device: torch.device,
    is_main: bool,
    autocast: Callable[[], AbstractContextManager[None]],
) -> Findings:
    """Switch this process to the run's deterministic kernels, and return the findings behind that choice.

    The first attempt tries the forward and backward pass of one micro-batch on a copy of the module, and records
    its findings. Later attempts on the same kind of device with the same torch read the record: another choice would
    change bits. An operator that only a later step met, which ended that attempt, is among the run's errors.

    Every rank takes part; all make the same choice.

    Args:
        peek: returns this rank's next micro-batch, which is used only to try it.
    """
    place = f"{device.type}, torch {torch.__version__}"
    recorded = distributed.broadcast_from_rank0(read_env(run).get(SECTION, {}).get(place) if is_main else None)
    if recorded is None:
        by_rank = distributed.gather_to_rank0(_try_micro_batch(module, peek, autocast)) or []
    else:
        by_rank = [Findings(**recorded)]
    if is_main:
        operators = _read_failed_operators(run).union(*(findings.operators for findings in by_rank))
        attention = set[str]().union(*(findings.attention for findings in by_rank))
        recorded = asdict(Findings(sorted(operators), sorted(attention)))
        update_env(run, SECTION, {place: recorded})
    chosen = Findings(**distributed.broadcast_from_rank0(recorded))
    precision.set_determinism(True, exceptions=chosen.operators)
    return chosen


def describe_determinism(findings: Findings | None) -> dict[str, Choice[str]]:
    """Return the choices for operators and for attention, each with its reason, for the run's env.json.

    Args:
        findings: None: the run does not ask for determinism.
    """
    if findings is None:
        return {
            "deterministic": Choice("off", "deterministic=false: a resume is close, not bitwise equal"),
            "attention": Choice("any back end", "deterministic=false: torch chooses among all of them"),
        }
    used = ", ".join(findings.attention) or "none"
    if not findings.operators:
        fused = "deterministic, because torch refuses operators that are not; cuDNN's, which never is, is switched off"
        return {
            "deterministic": Choice(
                "all operators", "each has a deterministic kernel on this device; others are refused"
            ),
            "attention": Choice(used, fused if findings.attention else "the first micro-batch computed none"),
        }
    return {
        "deterministic": Choice(
            f"all operators but {', '.join(findings.operators)}",
            "torch has no deterministic kernel for these on this device: a resume is close, not bitwise equal",
        ),
        "attention": Choice(
            "math",
            f"torch's fused kernels are deterministic only while it refuses operators that are not (else: {used})",
        ),
    }


def describe_sampling(device: torch.device) -> Choice[str]:
    """Return how a module with `samples_maps` samples them, and why."""
    if not precision.can_use_grid_sample(device):
        return Choice("gathered cells", "grid_sample has no deterministic backward pass on CUDA")
    return Choice("grid_sample", "deterministic on the CPU" if device.type == "cpu" else "deterministic=false")


@contextmanager
def explain_nondeterministic_operator(run: Path) -> Iterator[None]:
    """Turn torch's refusal of an operator in a step into an error with the way to continue.

    Raises:
        NoDeterministicKernel: instead of it. The next attempt finds the operator among the run's errors.
    """
    try:
        yield
    except RuntimeError as error:
        operator = precision.parse_nondeterministic_operator(str(error))
        if operator is None:
            raise
        raise NoDeterministicKernel(
            operator,
            f"{operator} has no deterministic kernel on this device. The first micro-batch did not use it, so this run "
            "computed as if it needed none. From its last checkpoint it can continue with this operator as it is and "
            f"attention by torch's math back end: trainyard resume {quote_path(run)}",
        ) from error


def _try_micro_batch(
    module: TrainModule, peek: Callable[[], MicroBatch], autocast: Callable[[], AbstractContextManager[None]]
) -> Findings:
    """Compute a gradient with a copy of the module, which is then gone: parameters, buffers and DDP notice nothing."""
    seen = _AttentionBackEnds()

    def compute_gradient() -> None:
        with seen:
            try_gradients(module, peek().batch, autocast)

    operators = precision.find_nondeterministic_operators(compute_gradient)
    return Findings(operators, sorted(seen.names))


_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_safe_softmax": "math",  # math is several operators: this is the one that only it uses
}


class _AttentionBackEnds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes by which back ends scaled_dot_product_attention is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in _ATTENTION:
            self.names.add(_ATTENTION[func.name()])
        return func(*args, **(kwargs or {}))


def _read_failed_operators(run: Path) -> set[str]:
    """Return the operators that ended an earlier attempt of this run, on whichever rank."""
    operators = (read_object(path).get("operator") for path in (run / "errors").glob("*.json"))
    return {operator for operator in operators if isinstance(operator, str)}
