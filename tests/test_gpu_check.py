"""`make gpu-check`: each check finds what is planted, what its end means, and what is kept in the result file."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import card, conftest, decoding, overflow, preset_steps, test_gpu
from tests.gpu.card import find_changed_copies
from tests.gpu.check import Figures, Sizes, run_in_process, run_in_time
from tests.gpu.overflow import check_overflow
from tests.gpu.preset_steps import check_equal_losses, compare_graphs
from tests.training import FAMILIES
from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import Loader
from trainyard.errors import UserError, is_out_of_memory
from trainyard.plan.predict import Predictor
from trainyard.tools.exact_runs import find_differences, flatten_state
from trainyard.train import step
from trainyard.train.module import TrainModule

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "jobs"
CPU = torch.device("cpu")
Check = Callable[..., Figures]


# How a check ends


def pass_check() -> Figures:
    return {"rate": 1.5}


def fail_check() -> Figures:
    print("what it printed")
    raise ValueError("two tensors differ")


def skip_check() -> Figures:
    pytest.skip("there is one GPU")


def fill_card() -> Figures:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def die() -> Figures:
    os.abort()


def hang(folder: Path) -> Figures:
    """Start a process and write its number, then neither ever ends."""
    pid = os.fork()
    if pid:
        (folder / "pids").write_text(f"{os.getpid()} {pid}")
    time.sleep(600)
    return {}


def is_alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_end_of_a_check_has_its_own_words(tmp_path):
    run = partial(run_in_process, limit_s=60.0, log=tmp_path / "log")
    assert run(pass_check) == {"rate": 1.5}
    with pytest.raises(pytest.fail.Exception, match=r"(?s)^ValueError: two tensors differ\nwhat it printed.*Traceback"):
        run(fail_check)
    with pytest.raises(pytest.skip.Exception, match="there is one GPU"):
        run(skip_check)
    with pytest.raises(pytest.skip.Exception, match="does not fit into this card"):
        run(fill_card)
    with pytest.raises(pytest.fail.Exception, match="ended by signal SIGABRT without an answer"):
        run(die)


def test_time_that_is_over_is_no_failure_of_a_check(tmp_path):
    run = partial(run_in_time, partial(time.sleep, 60), over="the time was over", log=tmp_path / "log")
    for left_s in (0.0, 0.2):
        with pytest.raises(pytest.skip.Exception, match="the time was over"):
            run(left_s=left_s, longest_s=60.0)
    with pytest.raises(pytest.fail.Exception, match="did not end within 0 s and was killed"):
        run(left_s=60.0, longest_s=0.2)


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    with pytest.raises(TimeoutError, match="did not end within 2 s"):
        run_in_process(partial(hang, tmp_path), limit_s=1.5, log=tmp_path / "log")
    deadline = time.monotonic() + 30  # SIGKILL takes effect a moment after it was sent
    pids = (tmp_path / "pids").read_text().split()
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[/opt/dali/core/mm/cuda_vm_resource.h] dali::CUDABadAlloc: CUDA allocation failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_a_full_card_is_told_from_an_error(error, full):
    assert is_out_of_memory(error) is full


def test_one_bit_of_a_state_is_a_difference_and_so_is_a_missing_entry():
    a = flatten_state({"model": {"w": torch.tensor([1.0])}, "list": [1, (2, None)], "progress": {"train_s": 1.0}})
    assert set(a) == {"model/w", "list/0", "list/1/0", "list/1/1", "progress/train_s"}
    b = a | {"model/w": torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0])), "progress/train_s": 2.0}
    assert find_differences(a, dict(a)) == [] and find_differences(a, b) == ["model/w"]
    assert find_differences(a, {name: a[name] for name in a if name != "list/0"}) == ["list/0"]


# Each check fails where what it checks is broken


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of jobs with the test family: a smoke preset, and a demo preset whose loss is infinite."""
    jobs = tmp_path_factory.mktemp("jobs") / "families"  # the name under which its modules import each other
    shutil.copytree(FAMILIES / "stripes", jobs / "stripes", ignore=shutil.ignore_patterns("__pycache__"))
    (jobs / "__init__.py").touch()
    base = (jobs / "stripes" / "stripes.yaml").read_text()
    # a step takes some time, so that a run can be stopped before it ends
    (jobs / "stripes" / "stripes_smoke.yaml").write_text(f"{base}model: {{sleep_ms: 20}}\n")
    (jobs / "stripes" / "stripes_demo.yaml").write_text(f"{base}model: {{poison_step: 0}}\n")
    return jobs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


Plant = Callable[[pytest.MonkeyPatch], None]


def run_planted(plant: Plant, work: Check, device: torch.device, sizes: Sizes, **options) -> Figures:
    plant(pytest.MonkeyPatch())
    return work(device, sizes, **options)


@pytest.fixture
def make_check(jobs: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Check]:
    """Return a function that returns what tests of a card get as `check`: it runs checks on the CPU.

    Its argument plants a defect where the check runs: here, or in a process of its own if it trains a preset.
    """
    sizes = Sizes(jobs, data, tmp_path, {}, small=True)

    def make(plant: Plant) -> Check:
        def check(work: Check, **options) -> Figures:
            if "preset" not in options:
                plant(monkeypatch)
                return work(CPU, sizes, **options)
            planted = partial(run_planted, plant, work, CPU, sizes, **options)
            return run_in_process(planted, limit_s=120, log=tmp_path / "log")

        return check

    return make


def break_nothing(patch: pytest.MonkeyPatch) -> None:
    """Plant no defect."""


def leave_out_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "read_capability", lambda device: 60)
    patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])


def multiply_coarsely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "DTYPES", {"fp32": torch.bfloat16, "bf16": torch.bfloat16})


def keep_buffers(patch: pytest.MonkeyPatch) -> None:
    """Leave NaN in batch statistics."""
    patch.setattr(step, "_put_back_buffers", lambda copied, skipped: None)


def move_ema(patch: pytest.MonkeyPatch) -> None:
    """Move averaged weights although the step was skipped."""

    def move(ema: TrainModule, module: TrainModule, decay: float, skipped: torch.Tensor) -> None:
        next(ema.parameters()).add_(1.0)

    patch.setattr(step, "_update_ema", move)


def use_torch_sgd(patch: pytest.MonkeyPatch) -> None:
    def make(module: TrainModule, settings: OptimizerSettings) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=settings.lr, momentum=settings.beta1, fused=True)

    patch.setattr(overflow, "make_optimizer", make)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self)


def swap_images(patch: pytest.MonkeyPatch) -> None:
    """Give a batch of training another order of images than of labels."""
    original = Loader._make_batch

    def make_batch(self, item):
        batch = original(self, item)
        return batch if item.epoch is None else batch | {"image": batch["image"].flip(0)}

    patch.setattr(Loader, "_make_batch", make_batch)


def brighten(patch: pytest.MonkeyPatch) -> None:
    """Decode other images than the reference decoder."""
    original = decoding.make_loader

    def make_loader(context):
        loader = original(context)
        make_batch = loader._make_batch

        def make_brighter(item):
            batch = make_batch(item)
            return batch | {"image": batch["image"] + 0.1}

        loader._make_batch = make_brighter
        return loader

    patch.setattr(decoding, "make_loader", make_loader)


def predict_half(patch: pytest.MonkeyPatch) -> None:
    original = Predictor.predict_batch

    def predict(self, *arguments):
        found = original(self, *arguments)
        return replace(found, activations=found.activations // 2)

    patch.setattr(Predictor, "predict_batch", predict)


def change_losses_of_graphs(patch: pytest.MonkeyPatch) -> None:
    losses = {"compile=on": [1.0, 1.0], "compile=graphs": [1.0, 1.1]}
    patch.setattr(preset_steps, "refuse_unsupported_settings", lambda config: None)
    patch.setattr(preset_steps, "_take_accumulated_steps", lambda preset, overrides, *rest: losses[overrides[0]])


def draw_seeds(patch: pytest.MonkeyPatch) -> None:
    """Start each run from another seed than its own."""
    original = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda seed: original(int.from_bytes(os.urandom(4), "big")))


SGD = {"optimizer": "sgd"}
STRIPES = {"base_preset": "stripes_smoke"}
DECODING = "decoding_in_the_background_gives_the_images_of_a_decoder_that_waits"
PLANTS = [
    ("torch_has_kernels_for_this_card", leave_out_kernels, {}, "sm_60"),
    ("products_agree_with_float64", multiply_coarsely, {}, "a fp32 product of .* differs by"),
    ("a_step_that_overflows_changes_nothing", keep_buffers, SGD, "skipped changed layers.1.running_mean, layers.1.run"),
    ("a_step_that_overflows_changes_nothing", move_ema, SGD, "skipped changed ema.layers.0.weight"),
    ("a_step_that_overflows_changes_nothing", use_torch_sgd, SGD, "leaves layers.0.weight, .*momentum_buffer.* not"),
    ("copies_to_and_from_the_card_arrive", copy_nothing, {"needs_card": None}, "from pinned memory, arrives changed"),
    (DECODING, swap_images, STRIPES, "images change when the device is busy"),
    (DECODING, brighten, STRIPES, "differ from the reference decoder's by"),
    ("a_step_takes_the_predicted_memory", predict_half, STRIPES, "assert 0.9 <= 0.5"),
    (
        "losses_with_cuda_graphs_are_those_without",
        change_losses_of_graphs,
        {"needs_card": None, **STRIPES},
        "with CUDA graphs the loss of step 1 is 1.1",
    ),
    pytest.param(
        *("a_stopped_run_ends_bitwise_equal", draw_seeds, {"family": "stripes"}, "a second run differs from the first"),
        marks=pytest.mark.long,
    ),
]
PLANTED_BELOW = {"copies_between_cards_arrive", "first_steps_are_finite"}
SAME_CHECK = {
    "first_steps_in_fp16_are_finite": "first_steps_are_finite",
    "first_compiled_steps_are_finite": "first_steps_are_finite",
    "a_stopped_run_with_cuda_graphs_ends_bitwise_equal": "a_stopped_run_ends_bitwise_equal",
}


def run_check(name: str, check: Check, arguments: dict[str, object]) -> None:
    getattr(test_gpu, f"test_{name}")(check=check, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plant", "arguments", "said"), PLANTS)
def test_a_check_fails_if_what_it_checks_is_broken(name, plant, arguments, said, make_check):
    with pytest.raises((pytest.fail.Exception, AssertionError), match=said):
        run_check(name, make_check(plant), arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch_has_kernels_for_this_card", {}),
        ("products_agree_with_float64", {}),
        ("copies_to_and_from_the_card_arrive", {"needs_card": None}),
    ],
)
def test_a_check_passes_if_nothing_is_broken(name, arguments, make_check):
    """Others pass below, in test_transfer.py, test_step_memory.py and, with all families, in test_contract.py."""
    run_check(name, make_check(break_nothing), arguments)


def test_every_check_has_a_plant():
    checks = {name.removeprefix("test_") for name in vars(test_gpu) if name.startswith("test_")}
    planted = {getattr(plant, "values", plant)[0] for plant in PLANTS} | PLANTED_BELOW
    assert checks == planted | set(SAME_CHECK) and set(SAME_CHECK.values()) <= planted


def test_copies_between_devices_that_arrive_changed_are_found(monkeypatch):
    assert find_changed_copies([CPU, CPU]) == []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, copy: self + 1)
    assert find_changed_copies([CPU, CPU]) == ["0-1", "1-0"]


def compare_eager_steps(device: torch.device, sizes: Sizes, *, preset: str) -> Figures:
    """Compare steps with themselves, and see that CUDA graphs are not run on the CPU."""
    with pytest.raises(pytest.skip.Exception, match="compile=graphs requested on the CPU, but CUDA graphs need a GPU"):
        compare_graphs(device, sizes, preset=preset, modes=("off", "graphs"))
    return compare_graphs(device, sizes, preset=preset, modes=("off", "off"))


@pytest.mark.slow
def test_the_comparison_of_cuda_graphs_runs_but_for_the_graphs(make_check):
    figures = make_check(break_nothing)(compare_eager_steps, preset="stripes_smoke")
    assert (figures["compared_steps"], figures["accumulated"]) == (6, 2)


def test_losses_with_cuda_graphs_that_are_not_finite_fail_the_check():
    check_equal_losses([2.0, 1.0], [2.0, 1.009])
    with pytest.raises(AssertionError, match="step 0 is nan"):
        check_equal_losses([2.0, 1.0], [float("nan"), 1.0])


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_step_that_overflows_changes_nothing(optimizer, tmp_path):
    was_deterministic = torch.are_deterministic_algorithms_enabled()  # an earlier test may have chosen so
    figures = check_overflow(CPU, Sizes(JOBS, tmp_path, tmp_path), optimizer=optimizer)
    assert figures["loss_scale"] == 2.0**15 and torch.are_deterministic_algorithms_enabled() == was_deterministic


@pytest.mark.slow
def test_a_preset_that_cannot_be_prepared_fails_if_it_needs_nothing_but_generated_data(make_check):
    check = make_check(break_nothing)
    for preset, ends in (("stripes_smoke", pytest.fail.Exception), ("stripes", pytest.skip.Exception)):
        with pytest.raises(ends, match=r"data\.order_by=colour: no such column"):
            check(preset_steps.take_first_steps, preset=preset, overrides=["data.order=pxk", "data.order_by=colour"])


# The command


def test_every_preset_and_family_is_checked_on_a_card():
    families, presets = conftest.find_presets(JOBS, small=False)
    assert set(presets) == {path.stem for path in JOBS.glob("*/*.yaml") if not path.stem.endswith("_smoke")}
    assert families == sorted(path.parent.name for path in JOBS.glob("*/config.py")) and len(families) > 4
    demos = sum(preset.endswith("_demo") for preset in presets)
    assert presets[demos : demos + len(families)] == families and len(presets) > 20
    small = conftest.find_presets(JOBS, small=True)[1]
    assert set(small) == {path.stem for path in JOBS.glob("*/*.yaml") if path.stem.endswith(("_smoke", "_demo"))}


@pytest.mark.slow
def test_the_result_has_a_line_for_each_check_with_its_figures_error_or_reason(jobs, tmp_path):
    words = ["--cpu", "--results", str(tmp_path), "--jobs", str(jobs), "-k", "first_steps or copies"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu", "-vv", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    [path] = tmp_path.glob("gpu-cpu-*.jsonl")
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["suite"] == "gpu-check" and head["card"] and head["options"]["cpu"]
    assert head["environment"]["machine"]["cpu"] and "commit" in head["environment"]["code"]
    found = {line["check"]: line for line in lines}
    good = found["first_steps_are_finite[stripes_smoke]"]
    assert good["status"] == "ok" and good["samples_per_s"] > 0 and good["peak_memory_gib"] > 0
    bad = found["first_steps_are_finite[stripes_demo]"]
    assert (bad["status"], bad["error"]) == ("failed", "the loss of step 0 is inf")
    assert "Traceback" in bad["output"]
    copies = found["copies_to_and_from_the_card_arrive"]
    assert (copies["status"], copies["reason"]) == ("not run", "only a card can answer this")
    assert f"1 ok, 1 failed, {len(lines) - 2} not run. Figures, errors and reasons: {path}" in done.stdout


def test_checks_that_were_not_reached_or_did_not_run_have_not_passed(tmp_path):
    result = conftest.ResultFile(tmp_path / "r.jsonl", {"card": "Test"})
    session = SimpleNamespace(items=[SimpleNamespace(nodeid="x", name="test_x")], exitstatus=pytest.ExitCode.OK)
    result.pytest_collection_finish(session)
    line = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[1])
    assert (line["check"], line["status"], line["reason"]) == ("x", "not run", "it was not reached")
    result.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_what_to_type():
    assert conftest.describe_card(cpu=True)["device"] == "cpu"
    with pytest.raises(UserError, match=r"^There is no GPU to check: .*make gpu-check CPU=1$"):
        conftest.describe_card(cpu=False)
