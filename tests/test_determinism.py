"""A run finds out which operators are nondeterministic, computes accordingly, and keeps to that in every attempt."""

import copy
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_operators import REFUSED, find_refused_operators
from tests.test_step import FP32, Classifier, make_batch, make_classifier, split_batch
from tests.training import FAMILIES, find_differences, load_state, new_run, run_as_command, train
from trainyard.data.loader import MicroBatch
from trainyard.errors import NoDeterministicKernel
from trainyard.hardware import choose_precision
from trainyard.node.rank_task import execute
from trainyard.runs.events import read_events
from trainyard.runs.folder import read_env, record_error, update_env, write_env
from trainyard.tools.exact_runs import RunsDiffer, compare_checkpoints
from trainyard.train import precision
from trainyard.train.determinism import (
    SECTION,
    Findings,
    choose_determinism,
    describe_sampling,
    explain_nondeterministic_operator,
)
from trainyard.train.module import Batch, TrainModule

UNPOOL = "max_unpooling2d_forward_out"
"""Writes to indices that may occur twice, so torch counts it as nondeterministic on the CPU as well."""


class Unpooling(Classifier):
    """A classifier that uses an operator without a deterministic kernel."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        pooled, indices = nn.functional.max_pool2d(batch["image"], 2, return_indices=True)
        return super().forward(batch | {"image": nn.functional.max_unpool2d(pooled, indices, 2)})


UNPOOLING = Findings([UNPOOL], [])


class Attention(Classifier):
    """A classifier whose image attends to itself."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        image = batch["image"]
        return super().forward(batch | {"image": nn.functional.scaled_dot_product_attention(image, image, image)})


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Begin as a run with deterministic=true does, and leave torch as other tests expect it."""
    precision.set_switches(choose_precision(None), deterministic=True)
    yield
    precision.set_switches(choose_precision(None), deterministic=False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_env(tmp_path, {})
    return tmp_path


def peek() -> MicroBatch:
    return split_batch(make_batch(4), 4)[0]


def refuse_to_peek() -> MicroBatch:
    raise AssertionError("a later attempt must not try again: another batch may use other operators")


def choose(module: TrainModule, run: Path, *, look=peek) -> Findings:
    return choose_determinism(module, look, run=run, device=torch.device("cpu"), is_main=True, autocast=FP32)


def read_switches() -> dict[str, bool]:
    return {
        "refuses": not torch.is_deterministic_algorithms_warn_only_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }


def test_where_every_operator_is_deterministic_others_are_refused_so_that_fused_attention_is_deterministic(run):
    assert choose(make_classifier(), run) == Findings([], [])
    assert torch.are_deterministic_algorithms_enabled()
    assert read_switches() == {"refuses": True, "flash": True, "memory-efficient": True, "cudnn": False, "math": True}
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.backends.cudnn.benchmark


def test_where_an_operator_is_not_attention_uses_the_math_back_end(run):
    assert choose(Unpooling(), run) == UNPOOLING
    assert torch.are_deterministic_algorithms_enabled()
    assert read_switches() == dict.fromkeys(["refuses", "flash", "memory-efficient", "cudnn"], False) | {"math": True}
    precision.set_determinism(False)
    assert read_switches() == {"refuses": True, "flash": True, "memory-efficient": True, "cudnn": True, "math": True}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("back_end", ["flash", "math"])
def test_the_back_end_that_computes_attention_is_noted(back_end, run):
    torch.backends.cuda.enable_flash_sdp(back_end == "flash")
    assert choose(Attention(), run) == Findings([], [back_end])


def test_a_later_attempt_keeps_the_choice_unless_torch_or_the_kind_of_device_changed(run):
    assert choose(Unpooling(), run) == UNPOOLING
    assert choose(make_classifier(), run, look=refuse_to_peek) == UNPOOLING
    assert read_env(run)[SECTION] == {f"cpu, torch {torch.__version__}": asdict(UNPOOLING)}
    write_env(run, {SECTION: {"cuda, torch 2.7.1": asdict(UNPOOLING)}})
    assert choose(make_classifier(), run) == Findings([], [])
    assert set(read_env(run)[SECTION]) == {"cuda, torch 2.7.1", f"cpu, torch {torch.__version__}"}


def test_trying_a_micro_batch_leaves_no_trace_in_the_module_or_the_batch(run):
    module, micro_batch = make_classifier(batch_norm=True), peek()
    before = copy.deepcopy((module.state_dict(), micro_batch.batch))
    choose(module, run, look=lambda: micro_batch)
    for old, new in zip(before, (module.state_dict(), micro_batch.batch), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(p.grad is None for p in module.parameters())


def test_an_operator_that_only_a_later_step_meets_is_named_and_allowed_in_the_next_attempt_on_any_rank(run):
    choose(make_classifier(), run)
    message = f"{UNPOOL} has no deterministic kernel.*trainyard resume"
    with pytest.raises(NoDeterministicKernel, match=message) as caught, explain_nondeterministic_operator(run):
        Unpooling()(make_batch(4))
    with pytest.raises(RuntimeError, match="another reason"), explain_nondeterministic_operator(run):
        raise RuntimeError("another reason")
    record_error(run, caught.value, attempt="local-1", rank=3)
    (run / "errors" / "torn.json").write_text('{"operator": ')
    assert choose(make_classifier(), run, look=refuse_to_peek) == UNPOOLING
    assert read_env(run)[SECTION] == {f"cpu, torch {torch.__version__}": asdict(UNPOOLING)}


def test_scoring_may_use_any_operator_and_leaves_the_switches_as_they_were():
    precision.set_determinism(True)
    with pytest.warns(UserWarning, match=UNPOOL), precision.allow_nondeterministic_operators():
        Unpooling()(make_batch(4))
    with pytest.raises(RuntimeError, match=UNPOOL):
        Unpooling()(make_batch(4))
    precision.set_determinism(False)
    with precision.allow_nondeterministic_operators():
        assert not torch.are_deterministic_algorithms_enabled()
    Unpooling()(make_batch(4))


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_process_group_is_made_with_the_determinism_of_the_config(deterministic, tmp_path):
    """NCCL's group reads the switch once, when it is made."""
    run = new_run(tmp_path, f"deterministic={deterministic}".lower(), "data.synthetic=60")
    done = run_as_command(partial(_start_until_the_group, run, not deterministic), tmp_path / "here")
    assert (done.returncode, done.stdout) == (0, f"{deterministic}\n"), done.stderr


def _start_until_the_group(run: Path, before: bool) -> int:
    """Run one of two ranks until it makes the group; print whether algorithms have to be deterministic then."""

    def end_here(*args: object, **options: object) -> None:
        print(torch.are_deterministic_algorithms_enabled(), flush=True)
        os._exit(0)  # a rank that fails otherwise would tell the other

    precision.set_determinism(before)
    torch.distributed.init_process_group = end_here
    return execute(run, FAMILIES, environ={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, started=0.0)


def test_what_the_documentation_says_that_cuda_refuses_is_known():
    lists = (torch.use_deterministic_algorithms.__doc__ or "").split("``mode=True``:")
    documented = re.findall(r"\* :\w+:`([\w.]+)`", lists[2])
    assert len(documented) > 20 and set(documented) <= set(REFUSED)


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (lambda x, grid: nn.functional.grid_sample(x, grid, align_corners=False), {"grid_sampler_2d_backward"}),
        (lambda x, grid: nn.functional.interpolate(x, size=3, mode="bilinear"), {"upsample_bilinear2d_backward"}),
        (lambda x, grid: nn.functional.interpolate(x, size=3, mode="nearest"), set()),
        (lambda x, grid: x.cumsum(2), {"cumsum"}),
        (lambda x, grid: x * (x > 0).cumsum(2), set()),
        (lambda x, grid: x.median(2).values, {"median"}),
    ],
)
def test_what_cuda_refuses_is_found_on_the_cpu(sample, found):
    x, grid = torch.rand(2, 1, 5, 5, requires_grad=True), torch.rand(2, 3, 3, 2)
    assert find_refused_operators(lambda: sample(x, grid).sum().backward()) == found


def test_maps_are_sampled_otherwise_where_cuda_refuses_grid_sample_and_the_record_says_why():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert describe_sampling(cpu) == ("grid_sample", "deterministic on the CPU")
    assert describe_sampling(gpu).value == "gathered cells" and "no deterministic" in describe_sampling(gpu).reason
    precision.set_determinism(False)
    assert describe_sampling(gpu) == ("grid_sample", "deterministic=false")


@pytest.mark.slow
def test_a_run_records_what_it_chose_and_why_and_resumes_where_an_operator_stopped_it(tmp_path):
    whole, run = (new_run(tmp_path, "max_duration=2ep", f"model.unpool_step={step}") for step in (-1, 60))
    assert train(whole) == 0
    choices = json.loads((whole / "env.json").read_text())["choices"]
    assert choices["deterministic"]["value"] == "all operators"
    assert choices["attention"]["value"] == "none"
    assert choices["cudnn_benchmark"]["value"] == "off" and "timing" in choices["cudnn_benchmark"]["reason"]

    with pytest.raises(NoDeterministicKernel, match=UNPOOL):
        train(run)
    assert train(run) == 0
    choices = json.loads((run / "env.json").read_text())["choices"]
    assert choices["deterministic"]["value"] == f"all operators but {UNPOOL}"
    assert choices["attention"]["value"] == "math"
    assert [e["operators"] for e in read_events(run) if e["event"] == "nondeterministic"] == [[UNPOOL]]
    assert find_differences(load_state(whole), load_state(run)) == [], "unpooling without pooling changes no bit"

    assert compare_checkpoints(whole, {"it": whole})["deterministic"] == "all operators"
    assert compare_checkpoints(whole, {"a resumed run": run})["deterministic"] == f"all operators but {UNPOOL}"
    max((run / "checkpoints").iterdir()).unlink()
    with pytest.raises(RunsDiffer, match=f"a resumed run differs .* likely cause: {UNPOOL}"):
        compare_checkpoints(whole, {"a resumed run": run})
    update_env(run, SECTION, {place: asdict(Findings([], [])) for place in read_env(run)[SECTION]})
    with pytest.raises(RunsDiffer, match=r"a resumed run differs .*, such as [\w/]+$"):
        compare_checkpoints(whole, {"a resumed run": run})
