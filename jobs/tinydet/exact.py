"""A linear layer that computes coordinates: its products are float32, whatever autocast and TF32 say."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.train.precision import multiply_in_float32


class ExactLinear(nn.Linear):
    """`nn.Linear` for the layers of a box head: float32 in, out, and between.

    With products in bfloat16, an edge in an image of 640 px is off by two to three pixels (`test_precision.py`). These
    layers are small and see only the queries.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs) float32."""
        if torch.compiler.is_exporting():  # programs that run without this file know torch's operators alone
            return F.linear(x.float(), self.weight, self.bias)
        out: Tensor = multiply(x.float(), self.weight, self.bias)
        return out


@torch.library.custom_op(
    f"{__package__.replace('.', '_')}::exact_linear", mutates_args=()
)  # a copied family has its own
def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x (..., I) times weight (O, I), plus bias (O,), in float32.

    A custom operator, because torch.compile cannot trace the switch of TF32.
    """
    with multiply_in_float32(x.device.type):
        return F.linear(x, weight, bias)


@multiply.register_fake
def _describe_output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _multiply_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; they are no coordinates, and as precise as those of any layer."""
    x, weight = ctx.saved_tensors
    flat = grad.flatten(0, -2)
    return grad @ weight, flat.T @ x.flatten(0, -2), flat.sum(dim=0)


multiply.register_autograd(_multiply_backward, setup_context=_save_inputs)
