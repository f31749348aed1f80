"""What needs a GPU: decoding on it, and exact resume with its kernels. Skipped with a reason without one."""

import os
import signal

import numpy as np
import pytest
import torch

from tests.training import find_differences, load_state, new_run, start, train, wait_for_lines
from trainyard.data.loader import Loader
from trainyard.data.order import shuffle
from trainyard.settings import AugmentSettings, ImageSettings, TrainConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

LEVELS = 3
"""Of 255: nvJPEG's inverse transform and DALI's GPU resize round differently from the host's."""


def read_first_batch(images, device: torch.device, decode: str) -> torch.Tensor:
    config = TrainConfig(image=ImageSettings(height_px=32, width_px=32), augment=AugmentSettings(flip=0.5))
    loader = Loader.from_config(config, images, device=device, decode=decode, threads=2, channels_last=True)
    ids = np.arange(images.count)
    stream = loader.train(
        lambda epoch: shuffle(ids, seed=0, epoch=epoch, global_batch_size=16), epoch=0, start=0, micro_batch_size=0
    )
    first = next(stream).batch["image"].cpu()
    stream.close()
    return first


def test_images_decoded_on_the_gpu_agree_with_the_host(images):
    on_gpu, on_host = (
        read_first_batch(images, torch.device("cuda", 0), "dali"),
        read_first_batch(images, torch.device("cpu"), "cpu"),
    )
    assert float((on_gpu - on_host).abs().max()) * 255 <= LEVELS


def test_a_run_stopped_on_a_gpu_resumes_bitwise_equal(tmp_path):
    whole, stopped = new_run(tmp_path), new_run(tmp_path)
    assert train(whole) == 0
    process = start(stopped)
    wait_for_lines(stopped, 7, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(240)
    assert process.exitcode == 85
    assert train(stopped) == 0
    assert find_differences(load_state(whole), load_state(stopped)) == []
