"""Checks that training does not load torch's compiler, and that whatever needs it still gets it."""

import subprocess
import sys

import pytest

from tests.training import FAMILIES, new_run

SCRIPT = """
import sys, time
from pathlib import Path
from trainyard.launch.rank_task import execute

run, jobs = map(Path, sys.argv[1:])
assert execute(run, jobs, environ={}, started=time.time()) == 0

import torch
torch.distributed.init_process_group("gloo", init_method=f"file://{run}/meeting", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
import inspect
inspect.getmodule(torch.ones)
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(allow_non_fake_inputs=True):
    assert (torch.empty(2) + torch.tensor([1.0, 2.0])).shape == (2,)
assert "torch._dynamo.convert_frame" not in sys.modules, "the compiler was loaded"

compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
assert sys.modules["torch._dynamo"] is torch._dynamo and hasattr(torch._dynamo, "__path__")
assert torch._dynamo.config is sys.modules["torch._dynamo.config"] and torch._dynamo.utils.__spec__
assert torchvision.ops.roi_align.__globals__["is_compile_supported"]("cpu")
step = torch.optim.Optimizer.zero_grad.__wrapped__
assert not hasattr(step, "__dynamo_disable"), "what was answered for the compiler is still in place"
optimizer.zero_grad()
assert getattr(step, "__dynamo_disable") is not step
torch.distributed.destroy_process_group()
print("whole")
"""


@pytest.mark.slow
def test_a_run_leaves_the_compiler_unloaded_until_something_is_compiled(tmp_path):
    run = new_run(tmp_path, "max_duration=3st")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run), str(FAMILIES)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.endswith("whole\n"), done.stderr
