"""`python -m benchmarks.sampling`: forward and backward pass of deformable attention, by `grid_sample` and by sums.

On a GPU the sums are those of deterministic=true, which refuses `grid_sample` there.
"""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import format_results
from benchmarks.step import time_step
from jobs.tinydet.multiscale import sample_levels, sum_cells
from trainyard.measure import Summary, make_header, write_new
from trainyard.train.precision import set_determinism

WAYS = {"grid_sample": sample_levels, "sums": sum_cells}
CASES = {  # B, Q, M, c, grids, P
    "tinydet": (2, 400, 8, 32, [(80, 80), (40, 40), (20, 20)], 4),
    "tinydet_demo": (16, 90, 4, 16, [(32, 40), (16, 20), (8, 10)], 4),
    "tinydet_smoke": (16, 40, 4, 8, [(8, 8), (4, 4)], 2),
}
"""One decoder layer with the preset's sizes; of tinydet two images, as two cores take no more in a second."""

WARMUP, ROUNDS, SEED = 3, 15, 0


def measure_case(name: str, device: torch.device) -> dict[str, Any]:
    """Time both ways alternately, in a random order each round; return the ms of each, and their ratio by round."""
    batch, queries, heads, size, grids, points = CASES[name]
    torch.manual_seed(SEED)
    cells, at = sum(h * w for h, w in grids), (batch, queries, heads, len(grids), points)
    values = torch.randn(batch, cells, heads, size, device=device, requires_grad=True)
    places = torch.rand(*at, 2, device=device, requires_grad=True)
    weights = torch.rand(*at, device=device, requires_grad=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(SEED)
    for number in range(WARMUP + ROUNDS):
        for way in order.sample(list(WAYS), len(WAYS)):
            set_determinism(way == "sums")
            seconds, _ = time_step(lambda way=way: _take_step(way, values, grids, places, weights), device)  # type: ignore[misc]
            if number >= WARMUP:
                times[way].append(1e3 * seconds)
    times["sums / grid_sample"] = [sums / samples for samples, sums in zip(*times.values(), strict=True)]
    return {
        "kind": "result",
        "name": name,
        **{way: asdict(Summary.from_values(values)) for way, values in times.items()},
        "rounds": times,
    }


def _take_step(way: str, values: Tensor, grids: list[tuple[int, int]], places: Tensor, weights: Tensor) -> None:
    torch.autograd.grad(WAYS[way](values, grids, places, weights).sum(), (values, places, weights))


if __name__ == "__main__":
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = make_header("sampling", {"threads": torch.get_num_threads(), "device": here.type})
    head["command"] = "python -m benchmarks.sampling"
    lines = [head, *(measure_case(name, here) for name in CASES)]
    print(format_results(lines))
    print(write_new(Path("benchmarks"), "sampling", lines))
