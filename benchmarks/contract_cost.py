"""`python -m benchmarks.contract_cost`: what the checks of a family's contract at the first batch add to a start.

Each time is taken in a new process, because a check may be the first to call something. With the checks, `predict` of
two samples and a first step are timed; without them, a later step, which has none.
"""

import random
import time
from contextlib import nullcontext
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trainyard.config.families import find_own_families
from trainyard.measure import Summary, make_header, write_new
from trainyard.tools.check_family import Family
from trainyard.train.contract import try_predict
from trainyard.train.step import TrainState, build_optimizer, train_step

JOBS, ROUNDS, SEED = find_own_families(), 9, 0
FAMILIES = sorted(path.parent.name for path in JOBS.glob("*/config.py"))


def time_start(family: str, scratch: Path, checks: bool) -> float:
    """Return the seconds of the first step of a smoke preset, in a process that has computed nothing before."""
    subject = Family(JOBS, family, scratch)
    module, micro = subject.build(), subject.read_micro_batch()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainState(module, module, build_optimizer(module, subject.config), scaler, None, 0.0)
    state.progress.step = 0 if checks else 1
    begin = time.perf_counter()
    if checks:
        try_predict(module, micro.batch, nullcontext)
    train_step(state, [micro], lr=1e-3, world_size=1, seed=0, clip_grad_norm=1.0, autocast=nullcontext)
    return time.perf_counter() - begin


def measure_family(family: str) -> dict[str, Any]:
    """Time both ways alternately, in a random order each round; return the seconds of each, and what the checks add."""
    times: dict[str, list[float]] = {"without_s": [], "with_s": []}
    order = random.Random(SEED)
    with TemporaryDirectory() as folder, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        Family(JOBS, family, Path(folder)).data.close()  # packed here, once
        for _ in range(ROUNDS):
            for way in order.sample(list(times), len(times)):
                times[way].append(pool.apply(time_start, (family, Path(folder), way == "with_s")))
    times["added_s"] = [more - less for less, more in zip(*times.values(), strict=True)]
    summaries = {what: asdict(Summary.from_values(values)) for what, values in times.items()}
    return {"kind": "result", "name": f"{family}_smoke", **summaries, "rounds": times}


if __name__ == "__main__":
    lines = [make_header("contract", {"rounds": ROUNDS, "threads": torch.get_num_threads(), "device": "cpu"})]
    for name in FAMILIES:
        lines.append(measure_family(name))
        print(
            lines[-1]["name"], {what: round(lines[-1][what]["median"], 4) for what in lines[-1]["rounds"]}, flush=True
        )
    print(write_new(Path("benchmarks"), "contract", lines))
