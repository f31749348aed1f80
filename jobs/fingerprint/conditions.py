"""Measures errors by the quality of prints, and for probes that are turned or off centre.

The threshold is the one of an evaluation as it is: at FMR 0.1 %, below 1,000 impostor pairs at 1 %, so that FNMRs under
several conditions can be compared. Probes are turned and moved in either direction alternately.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from trainyard import scoring
from trainyard.train.module import Batch

from .methods import Trials, score_methods
from .print_statistics import find_foreground, measure_quality

TURNS_DEG = (7.5, 15, 30, 45, 60)
SHIFTS_PX = (20, 40)  # at 500 dpi
THIRDS = ("low", "middle", "high")

Scores = NDArray[np.float64]


def compute_quality_metrics(trials: Trials, scores: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """Return for each system the FNMR in thirds of the genuine pairs, by the quality of the worse print of each.

    Quality is `print_statistics.measure_quality`: about 0.05 s of one core for each print.
    """
    quality_N = np.array([measure_quality(*print_) for print_ in zip(trials.images, trials.dpi, strict=True)])
    worse_G = np.minimum(quality_N[trials.one], quality_N[trials.other])[trials.is_genuine]
    third_G = np.searchsorted(np.quantile(worse_G, [1 / 3, 2 / 3]), worse_G)
    return {
        system: {
            f"fnmr_{name}_quality": float(np.mean(score_P[trials.is_genuine][third_G == third] < threshold))
            for third, name in enumerate(THIRDS)
            if (third_G == third).any()
        }
        for system, score_P in scores.items()
        if (threshold := _find_threshold(trials, score_P)) is not None
    }


def compute_turn_metrics(
    trials: Trials, scores: Mapping[str, Scores], *, device: torch.device
) -> Iterator[tuple[str, str, float]]:
    """Yield system, metric and value: EER and FNMR of BLPOC and the matcher for each turn of the probe.

    Their images are turned, and no pixel is lost. Both centre a print, so moving its image changes nothing.
    """
    count = len(trials.images)
    for degrees in TURNS_DEG:
        turned = [turn_image(gray, degrees * (-1) ** row) for row, gray in enumerate(trials.images)]
        images, dpi = turned + trials.images, trials.dpi * 2
        for system, score_P in score_methods(images, dpi, trials.one, trials.other + count, device=device).items():
            yield from _compare_pose(trials, system, scores[system], score_P, f"turn_{degrees:g}")


def compute_run_metrics(
    trials: Trials, system: str, score_P: Scores, embedding_ND: NDArray[np.float32], embed: Callable[..., Any]
) -> Iterator[tuple[str, str, float]]:
    """Yield system, metric and value: EER and FNMR of a model for each turn and shift of its input.

    Args:
        embedding_ND: of the prints as they are.
        embed: returns the embeddings (N, D) of the prints, turned by `degrees` and moved by `shift_px`.
    """
    poses = {f"turn_{degrees:g}": (degrees, 0) for degrees in TURNS_DEG}
    poses |= {f"shift_{shift}": (0, shift) for shift in SHIFTS_PX}
    for name, (degrees, shift_px) in poses.items():
        probe_ND = embed(degrees=degrees, shift_px=shift_px)
        moved_P = scoring.compare_embeddings(probe_ND[trials.one], embedding_ND[trials.other])
        yield from _compare_pose(trials, system, score_P, moved_P, name)


def turn_image(gray: NDArray[np.uint8], degrees: float) -> NDArray[np.uint8]:
    """Return a print turned counter-clockwise in a frame that holds all of it, on its median background."""
    outside = gray[~find_foreground(gray)]
    fill = int(np.median(outside)) if len(outside) else 255
    turned = Image.fromarray(gray).rotate(degrees, Image.Resampling.BICUBIC, expand=True, fillcolor=fill)
    return np.asarray(turned)


def move_input(image_BCHW: Tensor, degrees_B: Tensor, shift_B: Tensor) -> Tensor:
    """Return inputs turned counter-clockwise about their middle and moved to the right; gaps get the border's value.

    Args:
        shift_B: share of the width.
    """
    angle_B, zero_B = degrees_B.deg2rad(), torch.zeros_like(shift_B)
    cos, sin = angle_B.cos(), angle_B.sin()
    affine_B23 = torch.stack([cos, -sin, -2 * shift_B, sin, cos, zero_B], dim=1).view(-1, 2, 3)
    grid = functional.affine_grid(affine_B23, list(image_BCHW.shape), align_corners=False)
    return functional.grid_sample(image_BCHW, grid, padding_mode="border", align_corners=False)


def embed_moved(
    network: Callable[[Tensor], Tensor], batches: Iterator[Batch], *, degrees: float, shift: float
) -> NDArray[np.float32]:
    """Return the embeddings (N, D) of turned and moved inputs."""
    parts, seen = [], 0
    for batch in batches:
        image_BCHW = batch["image"]
        sign_B = 1.0 - 2 * (torch.arange(seen, seen + len(image_BCHW), device=image_BCHW.device) % 2)
        seen += len(image_BCHW)
        with torch.inference_mode():
            parts.append(network(move_input(image_BCHW, sign_B * degrees, sign_B * shift)).float().cpu().numpy())
    return np.concatenate(parts)


def _compare_pose(
    trials: Trials, system: str, score_P: Scores, moved_P: Scores, pose: str
) -> Iterator[tuple[str, str, float]]:
    genuine, impostor = trials.split_kinds(moved_P)
    yield system, f"eer_{pose}", scoring.compute_error_rates(genuine, impostor).equal_error_rate().rate
    if (threshold := _find_threshold(trials, score_P)) is not None:
        yield system, f"fnmr_{pose}", float(np.mean(genuine < threshold))


def _find_threshold(trials: Trials, score_P: Scores) -> float | None:
    """Return the threshold at FMR 0.1 %, below 1,000 impostor pairs at 1 %; None below 100."""
    genuine, impostor = trials.split_kinds(score_P)
    if len(impostor) < 100:
        return None
    return (
        scoring.compute_error_rates(genuine, impostor)
        .find_point_at_fmr(0.001 if len(impostor) >= 1000 else 0.01)
        .threshold
    )
