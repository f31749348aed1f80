"""`make gpu-check`: each check finds what is planted, what its end means, and what is kept in the result file."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import card, conftest, decoding, preset_steps, test_gpu, trust
from tests.gpu.check import Figures, Running, Sizes, run_in_process, run_in_time
from tests.gpu.faults import FAULTS, Check, break_nothing, find_fault, plan_check, write_test_family
from tests.gpu.overflow import check_overflow
from tests.gpu.preset_steps import LEAST_LOST, ROUNDING, compare_graphs, find_largest_difference
from trainyard.errors import UserError, is_out_of_memory
from trainyard.hardware import GPUS
from trainyard.tools.exact_runs import find_differences, flatten_state

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "jobs"
CPU = torch.device("cpu")


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
    run = partial(run_in_time, partial(Running, partial(time.sleep, 60), tmp_path / "log"), over="the time was over")
    for left_s in (0.0, 0.2):
        with pytest.raises(pytest.skip.Exception, match="the time was over"):
            run(left_s=left_s, longest_s=60.0)
    with pytest.raises(pytest.fail.Exception, match=r"did not end within \d s and was killed"):
        run(left_s=60.0, longest_s=0.2)


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    with pytest.raises(TimeoutError, match=r"did not end within [12] s"):
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the test family, and for its data."""
    folder = tmp_path_factory.mktemp("faults")
    write_test_family(folder)
    return folder


@pytest.fixture
def check(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return what runs a check where nothing is broken."""
    return plan_check(break_nothing, folder, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if fault.long else (), id=f"{fault.check}-{fault.what}")
        for fault in FAULTS
        if fault.plant is not None
    ],
)
def test_a_check_fails_if_what_it_checks_is_broken(fault, folder, tmp_path):
    assert re.search(fault.said, find_fault(fault, folder, tmp_path))


@pytest.mark.slow
def test_a_fault_that_no_check_finds_is_not_found(folder, tmp_path):
    kernels, *_ = FAULTS
    assert find_fault(replace(kernels, plant=break_nothing), folder, tmp_path) == "NOT FOUND: it passed"
    assert find_fault(replace(kernels, said="sm_61"), folder, tmp_path).startswith("NOT FOUND, but this torch has no")


def test_every_check_has_a_fault():
    checks = {name.removeprefix("test_") for name in vars(test_gpu) if name.startswith("test_")}
    assert checks == {fault.check for fault in FAULTS} and len(checks) > 15
    assert len([fault for fault in FAULTS if fault.plant is None]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch_has_kernels_for_this_card", {}),
        ("products_agree_with_float64", {}),
        ("what_two_ranks_exchange_arrives", {"collectives": "gloo"}),
        pytest.param(
            "synchronised_statistics_are_those_of_the_whole_batch", {"collectives": "gloo"}, marks=pytest.mark.long
        ),
        pytest.param("gradients_of_two_ranks_are_summed", {"family": "stripes"}, marks=pytest.mark.long),
        pytest.param("a_stopped_run_on_two_ranks_ends_bitwise_equal", {"family": "stripes"}, marks=pytest.mark.long),
    ],
)
def test_a_check_passes_if_nothing_is_broken(name, arguments, check):
    """Others pass below, in test_transfer.py, test_step_memory.py and, with all families, in test_contract.py."""
    getattr(test_gpu, f"test_{name}")(check=check, **arguments)


@pytest.mark.slow
def test_ranks_over_nccl_need_two_gpus(check):
    with pytest.raises(pytest.skip.Exception, match="cannot be answered here: NCCL needs two GPUs"):
        test_gpu.test_what_two_ranks_exchange_arrives(check, "nccl")


# Thresholds


def test_the_rates_of_a_sound_card_pass():
    """Rates of the slowest cards of the table: P100 and RTX 2080 Ti over PCIe 3.0, an RTX 3090's half types."""
    copies = {"pinned_to_card_gb_s": 11.5, "pinned_to_host_gb_s": 12.5}
    card.judge_copies({**copies, "pageable_to_card_gb_s": 6.0, "pageable_to_host_gb_s": 6.5})
    card.judge_overlap({"product_s": 0.11, "copies_s": 0.1, "both_s": 0.115})
    card.judge_clock({"clock_mhz": 1365.0, "highest_clock_mhz": 2100.0, "held_by": "0x4"})
    card.judge_product_rates({"sm": 86, "fp32_tflop_s": 25.0, "fp16_tflop_s": 65.0, "bf16_tflop_s": 64.0})
    card.judge_product_rates({"sm": 60, "fp32_tflop_s": 9.0, "fp16_tflop_s": 9.0})
    assert min(gpu.sm for gpu in GPUS) == 60, "an older card: is its bus as fast?"


def test_tf32_has_an_error_between_those_of_fp32_and_fp16():
    """Computed on the host with inputs rounded to 10 bits, as tensor cores round them."""
    a, b = (torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    rounded = [((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    exact = a.double() @ b.double()
    error = float(((rounded[0] @ rounded[1]).double() - exact).norm() / exact.norm())
    assert card.TF32_OVER_FP32 * card.LARGEST_ERROR["fp32"] < error < card.LARGEST_ERROR["tf32"]
    assert card.LARGEST_ERROR["tf32"] < card.LARGEST_ERROR["fp16"]


def test_a_gpu_has_decoded_jpeg_and_png_but_not_what_packing_resized():
    sound = {"decode": "dali", "decoders": "mixed", "images_on": "cuda", "resized_when_packed": False}
    for figures in (sound, sound | {"decoders": "cpu", "resized_when_packed": True}):
        decoding.judge_decoder(figures, torch.device("cuda"))
    for broken in ({"decoders": "cpu"}, {"decoders": "cpu mixed"}, {"decode": "cpu", "decoders": ""}):
        with pytest.raises(AssertionError, match=r"DALI's image decoder has the device '.*', not 'mixed'"):
            decoding.judge_decoder(sound | broken, torch.device("cuda"))
    decoding.judge_decoder({}, CPU)  # which cannot say what a GPU does


def test_a_timing_queues_no_more_than_its_time():
    started = []
    card.measure_device_rate(lambda: started.append(time.sleep(0.01)) or 1, CPU, seconds=0.05)
    assert 2 <= len(started) <= 6  # one to learn how long it takes


def compare_eager_steps(device: torch.device, sizes: Sizes, *, family: str) -> Figures:
    """Compare steps with themselves, and see that CUDA graphs are not run on the CPU."""
    with pytest.raises(pytest.skip.Exception, match="compile=graphs requested on the CPU, but CUDA graphs need a GPU"):
        compare_graphs(device, sizes, family=family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preset_steps, "GRAPH_MODES", ("off", "off", "off"))
        return compare_graphs(device, sizes, family=family)


@pytest.mark.long
def test_the_comparison_of_cuda_graphs_runs_but_for_the_graphs(check):
    figures = check(compare_eager_steps, family="stripes")
    assert (figures["compared_steps"], figures["accumulated"]) == (6, 2)
    assert figures["largest_difference"] == figures["spread_without"] == 0


def test_the_largest_difference_is_relative_to_a_gradient_but_not_to_one_that_is_rounding():
    a = {"loss": torch.tensor(2.0), "gradient of w": torch.ones(100), "gradient of b": torch.full((4,), 1e-7)}
    for name, change, least, most in (
        ("loss", 1 + LEAST_LOST, ROUNDING, LEAST_LOST * 1.01),
        ("gradient of w", 1 - LEAST_LOST, ROUNDING, LEAST_LOST),
        ("gradient of b", 2.0, 0, ROUNDING),
        ("loss", float("nan"), float("inf"), float("inf")),
    ):
        difference, where = find_largest_difference(a, a | {name: a[name] * change})
        assert where == name and least <= difference <= most
    assert find_largest_difference(a, {"loss": a["loss"]}) == (float("inf"), "gradient of b")


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_step_that_overflows_changes_nothing(optimizer, tmp_path):
    was_deterministic = torch.are_deterministic_algorithms_enabled()  # an earlier test may have chosen so
    figures = check_overflow(CPU, Sizes(JOBS, tmp_path, tmp_path), optimizer=optimizer)
    assert figures["loss_scale"] == 2.0**15 and torch.are_deterministic_algorithms_enabled() == was_deterministic


@pytest.mark.slow
def test_a_preset_that_cannot_be_prepared_fails_if_it_needs_nothing_but_generated_data(check):
    for preset, ends in (("stripes_smoke", pytest.fail.Exception), ("stripes", pytest.skip.Exception)):
        with pytest.raises(ends, match=r"data\.order_by=colour: no such column"):
            check(preset_steps.take_first_steps, preset=preset, overrides=["data.order=pxk", "data.order_by=colour"])


# The command


def test_every_family_is_checked():
    families = conftest.find_families(JOBS)
    assert families == sorted(path.parent.name for path in JOBS.glob("*/config.py")) and len(families) > 4
    assert {path.stem for path in JOBS.glob("*/*.yaml")} >= {*families, *(f"{name}_smoke" for name in families)}


@pytest.mark.slow
def test_the_result_has_a_line_for_each_check_with_its_figures_error_or_reason(folder, tmp_path):
    shutil.copytree(folder / "families", jobs := tmp_path / "families")
    (jobs / "stripes" / "stripes_demo.yaml").rename(jobs / "stripes" / "stripes_smoke.yaml")
    words = ["--cpu", "--results", str(tmp_path), "--jobs", str(jobs), "-k", "first_steps or kernels or copies"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu", "-vv", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    [path] = tmp_path.glob("gpu-cpu-*.jsonl")
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["suite"] == "gpu-check" and head["card"] and head["options"]["cpu"]
    assert head["environment"]["machine"]["cpu"] and "commit" in head["environment"]["code"]
    assert "decoding on the GPU: not asked" in head["trust"] and len(head["trust"]) < 10
    assert all(line in done.stdout for line in head["trust"])
    found = {line["check"]: line for line in lines}
    assert (
        found["torch_has_kernels_for_this_card"]["status"] == "ok" and found["torch_has_kernels_for_this_card"]["torch"]
    )
    bad = found["first_steps_are_finite[stripes_smoke]"]
    assert (bad["status"], bad["error"]) == ("failed", "the loss of step 0 is inf")
    assert "Traceback" in bad["output"]
    copies = found["copies_between_cards_arrive"]
    assert (copies["status"], copies["reason"]) == ("cannot be answered here", "it needs a card")
    counts = f"1 ok, 1 failed, 0 not run, {len(lines) - 2} cannot be answered here"
    assert f"{counts}. Figures, errors and reasons: {path}" in done.stdout


def end_checks(tmp_path: Path, *ends: str) -> tuple[int, list[str]]:
    """Return the exit code of a command whose checks end like this, and what it prints last."""
    names = [f"torch_has_kernels[{number}]" for number in range(len(ends))]
    items = [SimpleNamespace(nodeid=name, name=f"test_{name}") for name in names]
    session = SimpleNamespace(items=items, exitstatus=1 if "failed" in ends else pytest.ExitCode.OK)
    result = conftest.ResultFile(tmp_path / "r.jsonl", {"card": "Test", "sm": 60})
    result.pytest_collection_finish(session)
    for name, end in zip(names, ends, strict=True):
        outcome = end if end in ("passed", "failed") else "skipped"
        told = ("", 0, f"Skipped: {end}") if outcome == "skipped" else None
        if end != "unreached":
            result.pytest_runtest_logreport(
                SimpleNamespace(
                    when="call",
                    outcome=outcome,
                    nodeid=name,
                    duration=1.0,
                    longrepr=told,
                    longreprtext="E",
                    user_properties=[],
                )
            )
    result.pytest_sessionfinish(session)
    printed: list[str] = []
    result.pytest_terminal_summary(SimpleNamespace(write_line=printed.append))
    return int(session.exitstatus), printed


IMPOSSIBLE = "cannot be answered here: NCCL needs two GPUs"


@pytest.mark.parametrize(
    ("ends", "code", "first", "last"),
    [
        (("passed", "passed"), 0, "kernels and products: yes, 2 of 2 checks ok", "2 ok, 0 failed, 0 not run"),
        (
            ("passed", IMPOSSIBLE),
            0,
            "kernels and products: yes, 1 of 1 checks ok",
            "not run, 1 cannot be answered here",
        ),
        (
            ("passed", "the 8 minutes were over"),
            6,
            "not run: the 8 minutes were over (1 of 2",
            "did not run: the 8 min",
        ),
        (
            ("passed", "unreached"),
            6,
            "not run: it was not reached",
            "1 checks that can be answered here did not run: it",
        ),
        (("passed", "memory was short", "failed"), 1, "NO: torch_has_kernels[2]: E", "did not run: memory was short"),
        ((IMPOSSIBLE,), 1, "cannot be answered here (NCCL needs two GPUs)", "0 ok, 0 failed, 0 not run, 1 cannot be"),
    ],
)
def test_what_did_not_run_has_not_passed(ends, code, first, last, tmp_path):
    found, printed = end_checks(tmp_path, *ends)
    assert found == code
    assert first in printed[0] and last in printed[-1]
    assert json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])["trust"] == printed[:9]


def test_trust_names_what_each_precision_and_kind_of_ranks_can_do():
    lines = [
        {"check": "first_steps_are_finite[a]", "status": "ok", "precision": "fp16"},
        {"check": "first_steps_in_fp16_are_finite[a]", "status": "failed", "error": "the loss of step 0 is inf"},
        {"check": "what_two_ranks_exchange_arrives[gloo]", "status": "ok"},
        {"check": "what_two_ranks_exchange_arrives[nccl]", "status": "cannot be answered here", "reason": "one GPU"},
        {"check": "a_stopped_run_on_two_ranks_ends_bitwise_equal[a]", "status": "ok"},
    ]
    told = dict(line.split(": ", 1) for line in trust.describe_trust(lines, sm=75))
    assert told["precisions"].startswith("fp16 NO: first_steps_in_fp16_are_finite[a]: the loss of step 0 is inf")
    assert told["precisions"].endswith("no bf16 (sm_75)")
    assert told["two ranks on one card (gloo)"] == "yes, 1 of 1 checks ok"
    assert told["two cards (NCCL, copies)"] == "cannot be answered here (one GPU)"
    assert told["bitwise resume, 1 and 2 ranks"] == "yes, 1 of 1 checks ok"
    assert told["CUDA graphs"] == "not asked"


def test_every_check_answers_a_question():
    checks = {name.removeprefix("test_") for name in vars(test_gpu) if name.startswith("test_")}
    names = [*trust.QUESTIONS.values(), ("first_steps",), ("what_two_ranks", "synchronised_statistics")]
    asked = {check for check in checks for begin in sum(names, ()) if check.startswith(begin)}
    assert asked == checks


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_what_to_type():
    assert conftest.describe_card(cpu=True)["device"] == "cpu"
    with pytest.raises(UserError, match=r"^There is no GPU to check: .*make gpu-check CPU=1$"):
        conftest.describe_card(cpu=False)
