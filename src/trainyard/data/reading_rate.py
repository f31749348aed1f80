"""Measures how many packed images a core of this machine reads."""

import time

import numpy as np
import torch

from trainyard.config.settings import TrainConfig
from trainyard.data.index import IMAGE
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.data.store import name_store

_MEASURED_ROUNDS, _MEASURED_S = 2, 0.2  # the first warms up
_MEASURED_IMAGES, _MEASURED_BATCH = 1024, 64


def describe_reading(data: ShardSet, config: TrainConfig) -> str:
    """Return the size of a stored image and how many a core of this machine reads; measuring takes half a second."""
    records, store = data.records[IMAGE], name_store(data.records, data.meta)
    loader = Loader(config, data, device=torch.device("cpu"), decode="cpu")
    order = np.random.default_rng(0).permutation(data.count)
    rates = []
    for _ in range(_MEASURED_ROUNDS):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < _MEASURED_S:
            for images in loader.read_images(order[:_MEASURED_IMAGES], batch_size=_MEASURED_BATCH):
                count += len(images)
                if time.perf_counter() - begin > _MEASURED_S:
                    break
        rates.append(count / (time.perf_counter() - begin))
    return (
        f"an image takes {records.size.mean() / 1e3:.1f} kB on average (packing.store={store}), and one core of this "
        f"machine reads and decodes {max(rates):,.0f}/s with the reference decoder (measured now, files in memory)"
    )
