"""Compiled layers: generated once for each kind, used by training steps alone, and loaded again from a kept cache."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_step import Classifier, copy_gradients, make_batch, make_classifier, make_state, split_batch, step
from tests.training import FAMILIES, FORKSERVER, new_run, read_run_metrics
from trainyard.hardware import explain_missing_compiler
from trainyard.node.compile_cache import CACHE_VARIABLES, choose_cache
from trainyard.node.rank_task import execute
from trainyard.runs.folder import read_env
from trainyard.train.compiled_layers import begin_step_of_graphs, compile_layers
from trainyard.train.step import copy_for_average, enable_activation_checkpointing


class CountingBackend:
    """Generates nothing, and keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.options: dict[str, bool] | None = None

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[Tensor], options: dict[str, bool] | None = None
    ) -> Callable[..., Any]:
        self.options = options
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    """Return a backend, and put torch's settings back afterwards."""
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True):
        yield CountingBackend()
    torch._dynamo.reset()


def make_deep_classifier(count: int) -> Classifier:
    """Return a classifier with `count` layers of one kind: those of torch.nn, whose code dynamo skips by itself."""
    module = make_classifier()
    module.layers.extend(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh()) for _ in range(count))
    return module


@pytest.mark.slow
def test_layers_of_one_kind_are_compiled_once(backend):
    graphs = []
    for count in (1, 12):
        torch._dynamo.reset()
        module = make_deep_classifier(count)
        backend.graphs.clear()
        assert compile_layers(module, backend=backend) == 2 + count
        module(make_batch(4))["loss"].backward()
        graphs.append(len(backend.graphs))
    assert graphs == [3, 3]


@pytest.mark.slow
def test_layers_of_many_kinds_are_all_compiled(backend):
    module = make_classifier()
    module.layers = nn.ModuleList(nn.Conv2d(2 if k == 0 else 1 + k, 2 + k, 1) for k in range(5))
    module.layers.extend(nn.Conv2d(6, 6, k, padding="same") for k in range(2, 8))
    compile_layers(module, backend=backend)
    module(make_batch(4))["loss"].backward()
    assert len(backend.graphs) == 11


@pytest.mark.slow
def test_compiled_layers_train_to_the_same_bits_and_keep_their_names(backend):
    eager, compiled = (make_state(make_classifier(batch_norm=True)) for _ in range(2))
    names = list(compiled.module.state_dict())
    compile_layers(compiled.module, backend=backend)
    for _ in range(2):
        for state in (eager, compiled):
            step(state, split_batch(make_batch(12), 6, 6))
    assert backend.graphs, "nothing was compiled"
    assert list(compiled.module.state_dict()) == names
    expected = eager.module.state_dict()
    assert [k for k, v in compiled.module.state_dict().items() if not torch.equal(v, expected[k])] == []


def test_scoring_and_copies_compile_nothing(backend):
    module = make_classifier(batch_norm=True)
    compile_layers(module, backend=backend)
    module(make_batch(4))
    trained = len(backend.graphs)
    assert trained > 0
    with torch.inference_mode():
        module.eval()(make_batch(7))
    copied = copy.deepcopy(module).train()
    copied(make_batch(5))["loss"].backward()
    assert [p.grad for p in module.parameters()] == [None] * len(list(module.parameters()))
    assert all(p.grad is not None for p in copied.parameters())
    copy_for_average(module)(make_batch(6))
    assert len(backend.graphs) == trained


def test_cuda_graphs_are_an_option_of_the_compiler_and_each_shape_has_its_own(backend):
    import torch._inductor.config

    module = make_classifier()
    compile_layers(module, backend=backend, cuda_graphs=True)
    for samples in (4, 6, 8):
        module(make_batch(samples))["loss"].backward()
    assert len(backend.graphs) == 2 * 3, "a graph for any number of samples would be recorded again and again"
    assert backend.options["triton.cudagraphs"] is True
    assert set(backend.options) <= set(torch._inductor.config.get_config_copy()), "the compiler would refuse these"


@pytest.mark.slow
def test_a_step_tells_cuda_graphs_where_it_begins_once_however_many_micro_batches_it_has(backend):
    from torch._inductor.cudagraph_trees import MarkStepBox

    state, marked = make_state(make_classifier()), []
    state.begin_step = lambda: marked.append([p.grad for p in state.module.parameters()])
    for _ in range(2):
        step(state, split_batch(make_batch(12), 4, 4, 4))
    assert [all(gradient is None for gradient in gradients) for gradients in marked] == [True, True]
    before = MarkStepBox.mark_step_counter
    begin_step_of_graphs()
    assert MarkStepBox.mark_step_counter == before - 1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch counts them twice, so a run refuses")
def test_compiled_layers_recompute_activations_and_count_batch_statistics_once(backend):
    plain, compiled = (make_state(make_classifier(batch_norm=True)) for _ in range(2))
    assert enable_activation_checkpointing(compiled.module) == 2
    assert compile_layers(compiled.module, backend="aot_eager") == 2
    for state in (plain, compiled):
        step(state, split_batch(make_batch(12), 6, 6))
    for a, b in zip(copy_gradients(plain), copy_gradients(compiled), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=0)  # sums in another order
    for (name, a), b in zip(plain.module.named_buffers(), compiled.module.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=0), name


_COMPILE = """
import json, torch
from torch._dynamo.utils import counters
from tests.test_compiled_layers import make_deep_classifier, make_batch
from trainyard.train.compiled_layers import compile_layers
torch.manual_seed(0)
module = make_deep_classifier(2)
compile_layers(module)
module(make_batch(4))["loss"].backward()
found = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({name: found.get(name, 0) for name in ("fxgraph_cache_hit", "fxgraph_cache_miss",
                                                        "autograd_cache_hit", "autograd_cache_miss")}))
"""


@pytest.mark.long
@pytest.mark.skipif(bool(explain_missing_compiler(None, os.environ)), reason="there is no C++ compiler here")
def test_a_second_process_loads_what_the_first_one_compiled(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder, _ = choose_cache(environ, card=None, torch_version=torch.__version__, attempt="local-0")
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-c", _COMPILE]
    done = [subprocess.run(command, env=environ, capture_output=True, text=True, check=True) for _ in range(2)]
    cold, warm = (json.loads(process.stdout.splitlines()[-1]) for process in done)
    assert cold["autograd_cache_miss"] > 0, cold
    assert warm["autograd_cache_hit"] == cold["autograd_cache_hit"] + cold["autograd_cache_miss"], warm
    assert warm["autograd_cache_miss"] == warm["fxgraph_cache_miss"] == 0, warm


@pytest.mark.long
@pytest.mark.skipif(bool(explain_missing_compiler(None, os.environ)), reason="there is no C++ compiler here")
def test_a_run_compiles_with_activation_checkpointing_and_says_what_and_where(tmp_path, monkeypatch, backend):
    for name in CACHE_VARIABLES:
        monkeypatch.setenv(name, "")  # a run sets them: put back what was there
    options = ("compile=on", "gradient_checkpointing=true", "model.batch_norm=false")  # refused with it by torch 2.7.1
    run = new_run(tmp_path, *options, "max_duration=3st")
    assert execute(run, FAMILIES, environ={"XDG_CACHE_HOME": str(tmp_path / "home")}, started=time.time()) == 0
    choices = read_env(run)["choices"]
    assert choices["compile"] == {"value": True, "reason": "requested"}
    assert choices["compiled"]["value"].endswith("repeated layers")
    folder = Path(choices["compile_cache"]["value"])
    assert folder.is_relative_to(tmp_path / "home") and list(folder.rglob("*.so"))


@pytest.mark.long
@pytest.mark.skipif(bool(explain_missing_compiler(None, os.environ)), reason="there is no C++ compiler here")
def test_two_ranks_that_compile_train_as_two_that_do_not(tmp_path):
    options = ("max_duration=3st", "log_every=1st", "global_batch_size=16", "micro_batch_size=4")
    losses = {}
    for mode in ("off", "on"):
        run = new_run(tmp_path / mode, f"compile={mode}", *options)
        ranks = [FORKSERVER.Process(target=_train_rank, args=(run, tmp_path, rank)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(500)
        assert [process.exitcode for process in ranks] == [0, 0], (run / "log").read_text()
        losses[mode] = [line["loss"] for line in read_run_metrics(run) if line["kind"] == "train"]
    choices = read_env(run)["choices"]
    assert choices["compiled"]["value"] == "2 repeated layers"
    assert list(Path(choices["compile_cache"]["value"]).rglob("*.so"))
    assert len(losses["off"]) == 3
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)  # sums in another order


def _train_rank(run: Path, folder: Path, rank: int) -> None:
    """Train one of two ranks, with a home in `folder`."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    environ = {"TRAINYARD_MEETING": "m", "XDG_CACHE_HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
    environ |= {name: str(value) for name, value in numbers.items()}
    os._exit(execute(run, FAMILIES, environ=environ, started=time.time()))
