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
optimizer.zero_grad()
torch.distributed.destroy_process_group()
print("whole")
"""


DECORATED = """
import sys
import torch
from trainyard.train.deferred_compiler import defer_compiler
is_deferred = sys.argv[1] == "deferred"
if is_deferred:
    defer_compiler()
else:
    import torch._dynamo
traced = {}

def notice(name):
    traced[name] = torch.compiler.is_compiling()

@torch.compiler.disable
def whole(x):
    notice("whole")
    return helper(x)

@torch.compiler.disable(recursive=False, reason="a test")
def alone(x):
    notice("alone")
    return x + 1

@torch._disable_dynamo
def late(x):
    notice("late")
    return x

@torch._dynamo.assume_constant_result
def constant():
    return 3

@torch._dynamo.allow_in_graph
def operation(x):
    notice("operation")
    return x * 2

def helper(x):
    notice("helper")
    return x - 1

def step(x):
    notice("step")
    return late(operation(whole(x) + alone(x)) * constant())

assert torch.equal(step(torch.ones(2)), torch.full((2,), 12.0)) and not any(traced.values())
assert ("torch._dynamo.convert_frame" in sys.modules) != is_deferred, "the compiler was loaded"

from torch._dynamo.eval_frame import OptimizedModule
assert torch._dynamo.OptimizedModule is OptimizedModule, "there are two modules of one name"
assert sys.modules["torch._dynamo.eval_frame"].__spec__.loader.path.endswith("eval_frame.py")
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
with TransformGetItemToIndex():
    assert torch.ones(3)[torch.tensor(1)] == 1

operations = []
def compile_graph(graph, inputs):
    operations.extend(node.target for node in graph.graph.nodes)
    return graph.forward
traced.clear()
assert torch.equal(torch.compile(step, backend=compile_graph)(torch.ones(2)), torch.full((2,), 12.0))
assert operation in operations, operations
print(traced)
"""


SYMBOLS = """
import sys
import torch
from trainyard.train.deferred_compiler import defer_compiler, defer_symbols
defer_compiler()
defer_symbols()
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq
assert guard_or_false(True) is True and sym_eq((2, 3), [2, 3]) and not sym_eq((2,), (3,))
meta = torch.empty(4, 3, device="meta")
assert (meta + meta[:1]).clamp(min=0).shape == (4, 3)
assert torch.empty_like(meta, dtype=torch.half).dtype == torch.half
assert "sympy.core" not in sys.modules and "torch.distributed.tensor._ops" not in sys.modules, "they were loaded"

from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch._subclasses.fake_tensor import FakeTensorMode
mode = FakeTensorMode(shape_env=ShapeEnv())
fake = mode.from_tensor(torch.ones(5, 3))
assert "sympy.core" in sys.modules and isinstance(fake.shape[0], torch.SymInt)
assert guard_or_false(fake.shape[0] == fake.shape[0]) and sym_eq(fake.shape, fake.shape)
import torch.distributed.tensor.parallel
from torch.utils._sympy.functions import FloorDiv, Max
assert Max is not max
from scipy.optimize import linear_sum_assignment
assert "scipy.optimize._optimize" not in sys.modules
import numpy
assert linear_sum_assignment(numpy.eye(2))[1].tolist() == [1, 0]
assert linear_sum_assignment(numpy.eye(2), maximize=True)[1].tolist() == [0, 1]
from scipy.optimize import minimize
import scipy.optimize._lsap
assert scipy.optimize.linear_sum_assignment is scipy.optimize._lsap.linear_sum_assignment
print("whole")
"""


def test_sizes_that_are_numbers_need_no_symbols_and_others_get_them():
    done = subprocess.run([sys.executable, "-c", SYMBOLS], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout == "whole\n", done.stderr


@pytest.mark.slow
def test_what_was_decorated_before_the_compiler_was_loaded_is_compiled_as_after_it():
    traced = {}
    for when in ("deferred", "loaded"):
        done = subprocess.run([sys.executable, "-c", DECORATED, when], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        traced[when] = done.stdout
    assert traced["deferred"] == traced["loaded"]
    assert "'step': True, 'whole': False, 'helper': False" in traced["loaded"] and "'late': False" in traced["loaded"]


@pytest.mark.slow
def test_a_run_leaves_the_compiler_unloaded_until_something_is_compiled(tmp_path):
    run = new_run(tmp_path, "max_duration=3st")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run), str(FAMILIES)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.endswith("whole\n"), done.stderr
