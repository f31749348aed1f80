"""Compares prints with a sample of the classes, not with all: partial FC (An et al. 2020, arXiv:2010.05222)."""

import torch
from torch import Tensor
from torch.nn import functional


def draw_classes(count: int, *, classes: int, seed: int, samples_seen: Tensor) -> Tensor:
    """Return (count,) int64 distinct classes, on the device of `samples_seen`.

    A pure function of the arguments: all micro-batches and ranks of a step, and a resumed run, draw the same ones. The
    classes with the lowest hashes are drawn, so nothing is copied from the host. Costs a sort of `classes` numbers.

    Args:
        samples_seen: () int64, samples that all ranks used before this step.
    """
    stream = _hash(samples_seen ^ (seed * 0x9E3779B97F4A7C15) % 2**63)
    return _hash(stream + torch.arange(classes, device=samples_seen.device)).argsort(stable=True)[:count]


def compute_sampled_cosines(embedding_BD: Tensor, direction_CD: Tensor, class_B: Tensor, sampled_S: Tensor) -> Tensor:
    """Return (B, 1 + S) cosines: with the own class, which is column 0, and with the sampled ones.

    Where a sampled class is the print's own, the cosine is -inf: it counts once. So the softmax of a print depends on
    nothing but this print and the sample; if that has all classes, it equals the softmax over all.

    Args:
        embedding_BD: of unit length.
        direction_CD: of any length. Only the rows of `class_B` and `sampled_S` get a gradient.
    """
    rows = functional.normalize(functional.embedding(torch.cat([class_B, sampled_S]), direction_CD), dim=1)
    own_BD, sampled_SD = torch.split(rows, [len(class_B), len(sampled_S)])
    own_B1 = (embedding_BD * own_BD).sum(dim=1, keepdim=True)
    sampled_BS = functional.linear(embedding_BD, sampled_SD)
    return torch.cat([own_B1, sampled_BS.masked_fill(class_B[:, None] == sampled_S, -torch.inf)], dim=1)


def _hash(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers: the finalizer of SplitMix64 (Steele et al. 2014), modulo 2**64."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as if the numbers had no sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
