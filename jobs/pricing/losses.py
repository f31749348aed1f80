"""Losses on the logarithm of the price."""

import torch
from torch import Tensor
from torch.nn import functional


def smooth_l1(off: Tensor, *, beta: float) -> Tensor:
    """Return the Huber-like loss of an error in ln(price), over beta (Girshick 2015, arXiv:1504.08083, eq. 3).

    To first order it is what SMAPE counts, since 2 tanh(d / 2) = d - d^3 / 12 + ... .

    Args:
        off: (...) float32, ln p - ln t.
        beta: error in ln below which the loss is quadratic.
    """
    return functional.smooth_l1_loss(off, torch.zeros_like(off), reduction="none", beta=beta)


def smape_log(off: Tensor) -> Tensor:
    """Return SMAPE's term itself, 0..2: |p - t| / ((p + t) / 2) = 2 tanh(|ln p - ln t| / 2) for p, t > 0.

    Its gradient is bounded and fades for prices that are far off, so it is for the end of training, not for the start.

    Args:
        off: (...) float32, ln p - ln t.
    """
    return 2 * torch.tanh(off.abs() / 2)


def blended(off: Tensor, *, beta: float, share: Tensor) -> Tensor:
    """Return (1 - share) of smooth L1 and `share`, () in 0..1, of SMAPE's term; (...) float32."""
    return smooth_l1(off, beta=beta) * (1 - share) + smape_log(off) * share
