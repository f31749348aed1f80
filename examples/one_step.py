"""One optimizer step, from raw files to a loss, with the functions that a run uses: `python examples/one_step.py`.

A run adds what a cluster needs around these lines: choices for the GPU, several ranks, checkpoints, evaluation.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for jobs/

from jobs.fingerprint import module as model
from jobs.fingerprint import pack as family
from trainyard.config.compose import compose
from trainyard.config.families import find_own_families
from trainyard.data.loader import Loader
from trainyard.data.order import order_epoch
from trainyard.data.pack import pack
from trainyard.data.prepare import build_meta
from trainyard.train.module import DataInfo
from trainyard.train.run_state import build_state
from trainyard.train.step import train_step


def take_one_step(folder: Path) -> float:
    """Draw fingerprints, pack them, take one step of training; return its loss."""
    config = compose("fingerprint_smoke", ["global_batch_size=16"], find_own_families())

    # Raw files: here drawn ones. Your own are a folder that `samples` can list.
    family.synthesize(folder / "raw", count=48, seed=0)
    samples = family.samples(folder / "raw", config)

    # Shards: HDF5 files and one index, readable at random without decoding anything.
    data = pack(samples, folder / "shards", meta=build_meta(config), workers=1)
    ids = family.splits(data.columns, data.vocabulary, config)["train"]

    # The order is a function of the seed and the epoch; the loader reads, decodes and augments in it.
    loader = Loader(config, data, device=torch.device("cpu"), decode="cpu")
    batches = loader.train(
        lambda epoch: order_epoch(ids, data.columns, config, epoch=epoch), epoch=0, start=0, micro_batch_size=8
    )

    # The model, its optimizer, and a step of two micro-batches: `last` marks the second one.
    torch.manual_seed(config.seed)
    module = model.build(config, DataInfo.from_shards(data, ids))
    state = build_state(module, config, scaler=torch.amp.GradScaler("cpu", enabled=False))
    step = [next(batches), next(batches)]
    settings = {"lr": config.optimizer.lr, "clip_grad_norm": config.clip_grad_norm, "seed": config.seed}
    result = train_step(state, step, **settings, world_size=1, autocast=nullcontext)
    batches.close()
    return float(result.losses["loss"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(f"loss of the first step: {take_one_step(Path(folder)):.3f}")
