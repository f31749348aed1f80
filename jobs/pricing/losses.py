"""Losses on the logarithm of the price."""

import torch
from torch import Tensor
from torch.nn import functional


def smooth_l1(log_error: Tensor, *, beta: float) -> Tensor:
    """Return the smooth L1 loss of an error in ln(price), over beta (Girshick 2015, arXiv:1504.08083, eq. 3).

    It equals SMAPE's term to first order, since 2 tanh(d / 2) = d - d^3 / 12 + ... .

    Args:
        log_error: (...) float32, ln p - ln t.
        beta: error in ln below which the loss is quadratic.
    """
    return functional.smooth_l1_loss(log_error, torch.zeros_like(log_error), reduction="none", beta=beta)


def smape_log(log_error: Tensor) -> Tensor:
    """Return SMAPE's own term, 0..2: |p - t| / ((p + t) / 2) = 2 tanh(|ln p - ln t| / 2) for p, t > 0.

    The gradient is bounded and vanishes for large errors, so use this loss late in training, not at the start.

    Args:
        log_error: (...) float32, ln p - ln t.
    """
    return 2 * torch.tanh(log_error.abs() / 2)


def blend(log_error: Tensor, *, beta: float, share: Tensor) -> Tensor:
    """Return (...) float32, (1 - share) x smooth L1 + share x SMAPE's term; `share` is () in 0..1."""
    return smooth_l1(log_error, beta=beta) * (1 - share) + smape_log(log_error) * share
