"""`trainyard gpu-check`: what a check's end means, what is kept when something dies, and its smallest run on a CPU."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training import FAMILIES, FORKSERVER, run_as_command
from trainyard.cli import main
from trainyard.errors import UserError
from trainyard.settings import OptimizerSettings
from trainyard.tools import gpu_check
from trainyard.tools.gpu_check import Budget, format_table, read_lines, run_checks, run_in_process
from trainyard.tools.gpu_checks import overflow
from trainyard.tools.gpu_checks.check import STEPS, Check, CheckFailed, Figures, NotRun, Sizes
from trainyard.tools.gpu_checks.exact_runs import compare_runs
from trainyard.tools.gpu_checks.overflow import check_overflow
from trainyard.tools.gpu_checks.plan import list_checks, select_checks
from trainyard.tools.gpu_checks.preset_steps import check_equal_losses, compare_graphs, take_first_steps
from trainyard.train import step
from trainyard.train.compare import find_differences, flatten_state
from trainyard.train.module import TrainModule

JOBS = Path(__file__).parents[1] / "jobs"
HEADER = {
    "kind": "header",
    "suite": "gpu-check",
    "card": "Tesla Test",
    "device": "cuda",
    "repeat": "trainyard gpu-check",
    "options": {"minutes": 10},
    "environment": {"versions": {"torch": "2.13.0"}},
}


def pass_check(device: torch.device, sizes: Sizes) -> Figures:
    return {"device": str(device), "rate": 1.5}


def fail_check(device: torch.device, sizes: Sizes) -> Figures:
    print("what it printed")
    raise ValueError("Two tensors differ. They are both on the card.")


def hang(device: torch.device, sizes: Sizes) -> Figures:
    """Start a process and write its number, then neither ever ends."""
    pid = os.fork()
    if pid:
        (sizes.data / "pids").write_text(f"{os.getpid()} {pid}")
    time.sleep(600)
    return {}


def die(device: torch.device, sizes: Sizes) -> Figures:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave(device: torch.device, sizes: Sizes) -> Figures:
    raise NotRun("there is one GPU. Peers need two.")


def is_alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(*pids: str) -> bool:
    """Return whether these processes end: SIGKILL takes effect a moment after it was sent."""
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def run_all(
    folder: Path, *work: Callable[[torch.device, Sizes], Figures], device: str = "cpu", budget: Budget | None = None
) -> dict[str, dict[str, object]]:
    """Run functions as checks of step "contact"; return the written lines by the functions' names."""
    sizes = Sizes(JOBS, folder, folder)
    checks = [Check("contact", function.__name__, function) for function in work]
    path, text = folder / "gpu-test.jsonl", ""

    def tell(part: str) -> None:
        nonlocal text
        text += part

    budget = budget or Budget(60.0, 60.0)
    lines = run_checks(checks, device=device, sizes=sizes, budget=budget, header=HEADER, path=path, tell=tell)
    assert read_lines(path) == lines
    assert text.count("\n") == len(checks)
    return {str(line["check"]): line for line in lines[1:]}


def test_each_end_of_a_check_has_its_own_words_and_the_next_one_runs(tmp_path):
    lines = run_all(tmp_path, fail_check, die, leave, pass_check)
    assert {name: line["status"] for name, line in lines.items()} == {
        "fail_check": "failed",
        "die": "failed",
        "leave": "not run",
        "pass_check": "ok",
    }
    assert lines["fail_check"]["error"] == "ValueError: Two tensors differ."
    log = Path(str(lines["fail_check"]["log"])).read_text()
    assert "what it printed" in log and "They are both on the card" in log and "Traceback" in log
    assert "SIGKILL" in str(lines["die"]["error"]) and "memory" in str(lines["die"]["error"])
    assert lines["leave"]["reason"] == "there is one GPU." and "log" not in lines["leave"]
    assert lines["pass_check"]["rate"] == 1.5 and lines["pass_check"]["device"] == "cpu"


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    work = partial(hang, torch.device("cpu"), Sizes(JOBS, tmp_path, tmp_path))
    outcome = run_in_process(work, limit_s=1.5, log=tmp_path / "log")
    assert outcome.status == "failed" and "did not end within 2 s" in outcome.error
    assert wait_until_dead(*(tmp_path / "pids").read_text().split())


@pytest.mark.slow
def test_time_that_is_over_is_no_failure(tmp_path):
    lines = run_all(tmp_path, hang, pass_check, budget=Budget(1.5, 60.0))
    assert lines["hang"]["status"] == "not run" and "time of the whole command" in str(lines["hang"]["reason"])
    assert lines["pass_check"]["status"] == "not run" and "time of its step" in str(lines["pass_check"]["reason"])
    assert wait_until_dead(*(tmp_path / "pids").read_text().split())


def run_and_wait(folder: Path) -> None:
    run_all(folder, pass_check, hang)


@pytest.mark.slow
def test_a_command_that_is_killed_keeps_its_lines_and_ends_its_check(tmp_path):
    process = FORKSERVER.Process(target=run_and_wait, args=(tmp_path,))
    process.start()
    while process.is_alive() and not (tmp_path / "pids").exists():
        time.sleep(0.01)
    process.kill()
    process.join(30)
    head, line = read_lines(tmp_path / "gpu-test.jsonl")
    assert head == HEADER and line["check"] == "pass_check" and line["status"] == "ok"
    check, child = (tmp_path / "pids").read_text().split()
    assert wait_until_dead(check)
    os.kill(int(child), signal.SIGKILL)  # a check's own processes end with the command only if they watch its pipe


def interrupt(device: torch.device, sizes: Sizes) -> Figures:
    """Press Ctrl-C while this check and a process that it started run."""
    pid = os.fork()
    if pid:
        (sizes.data / "pids").write_text(f"{os.getpid()} {pid}")
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
    return {}


def run_until_interrupted(folder: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sizes, path = Sizes(JOBS, folder, folder), folder / "gpu-test.jsonl"
    checks = [Check("contact", work.__name__, work) for work in (pass_check, interrupt, fail_check)]
    lines = run_checks(checks, device="cpu", sizes=sizes, budget=Budget(60.0, 60.0), header=HEADER, path=path)
    print(format_table(lines, path))
    return 0


@pytest.mark.slow
def test_ctrl_c_shows_what_is_finished_and_names_what_is_left(tmp_path):
    folder = tmp_path / "here"
    done = run_as_command(partial(run_until_interrupted, folder), folder)
    assert done.returncode == 0, done.stderr
    results = read_lines(folder / "gpu-test.jsonl")[1:]
    assert [(line["check"], line["status"], line.get("reason")) for line in results] == [
        ("pass_check", "ok", None),
        ("interrupt", "not run", "interrupted"),
        ("fail_check", "not run", "interrupted"),
    ]
    assert f"results: {folder / 'gpu-test.jsonl'}" in done.stdout
    left = "a new call checks from the start, into a new file; only what is left: trainyard gpu-check --only contact"
    assert done.stdout.endswith(f"next: {left}\n")
    assert wait_until_dead(*(folder / "pids").read_text().split())


def test_what_is_left_of_chosen_checks_is_named_one_by_one(tmp_path):
    chosen = HEADER | {"options": {"minutes": 10, "only": ["auto"]}}
    left = [make_line(name, "not run", reason="interrupted") for name in ("x/auto", "y/auto")]
    table = format_table([chosen, make_line("w/auto", "failed", error="no", log="l"), *left], tmp_path / "r.jsonl")
    assert table.endswith("trainyard gpu-check --only 'contact/x/auto' --only 'contact/y/auto'")


def test_what_needs_a_card_is_never_ok_without_one(tmp_path):
    check = Check("environment", "peers", pass_check, card_only="there is no card here")
    sizes, path = Sizes(JOBS, tmp_path, tmp_path), tmp_path / "r.jsonl"
    [line] = run_checks(
        [check], device="cpu", sizes=sizes, budget=Budget(60.0, 60.0), header=HEADER, path=path, tell=lambda text: None
    )[1:]
    assert (line["status"], line["reason"]) == ("not run", "there is no card here")


def test_time_that_a_step_leaves_goes_to_the_next_and_no_check_takes_more_than_a_fifth():
    budget = Budget.from_minutes(10)
    ends = budget.plan_step_ends(STEPS)
    assert list(ends) == list(STEPS) and ends["environment"] == pytest.approx(30) and max(ends.values()) <= 600.001
    assert budget.plan_step_ends(["decode"]) == {"decode": 600}
    assert budget.limit_check(elapsed_s=0, step_end_s=400) == budget.limit_check(elapsed_s=390, step_end_s=400) == 120
    assert budget.limit_check(elapsed_s=590, step_end_s=600) == 10
    assert budget.limit_check(elapsed_s=400, step_end_s=400) == 0


def make_line(check: str, status: str, **more: object) -> dict[str, object]:
    return {"kind": "result", "step": "contact", "check": check, "status": status, "seconds": 1.0, **more}


def test_the_table_fits_one_screen_and_says_what_failed_and_what_to_type(tmp_path):
    failed = [make_line(f"p{i}/auto", "failed", error=f"Error: number {i}." * 20, log="there.log") for i in range(50)]
    left = [make_line(f"q{i}/fp16", "not run", reason=f"{i} cats") for i in range(50)]
    table = format_table([HEADER, *failed, *left, make_line("x", "ok")], tmp_path / "r.jsonl").splitlines()
    assert len(table) < 45 and max(map(len, table)) <= 200
    assert any(line.split()[:4] == ["contact", "1", "50", "50"] for line in table)
    assert any("contact/p0/auto" in line and "number 0." in line for line in table)
    assert "there.log" in table[-1] and "trainyard gpu-check --only 'contact/p0/auto'" in table[-1]


def test_without_a_failure_the_table_says_what_to_do_with_the_result(tmp_path):
    path = tmp_path / "r.jsonl"
    assert f"commit {path}" in format_table([HEADER, make_line("x", "ok")], path)
    over = make_line("y", "not run", reason="the time of its step was over")
    assert "--minutes 20" in format_table([HEADER, over], path)
    assert "on a machine with a GPU" in format_table([HEADER | {"device": "cpu"}, make_line("x", "ok")], path)


def test_a_file_of_something_else_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_lines(tmp_path / "none")
    (tmp_path / "other").write_text('{"kind": "header", "suite": "rgb"}\n')
    with pytest.raises(UserError, match="not a result of trainyard gpu-check"):
        read_lines(tmp_path / "other")


def test_every_preset_and_family_is_checked_on_a_card():
    names = [check.full_name for check in list_checks(JOBS, small=False, quick=False)]
    presets = [path.stem for path in JOBS.glob("*/*.yaml") if not path.stem.endswith("_smoke")]
    families = [path.parent.name for path in JOBS.glob("*/config.py")]
    assert len(presets) > 20 and len(families) > 4 and len(names) == len(set(names))
    for mode in ("auto", "fp16", "compile"):
        assert {f"contact/{preset}/{mode}" for preset in presets} <= set(names)
    assert {f"bitwise/{family}{kind}" for family in families for kind in ("", "/graphs")} <= set(names)
    for kind in ("eager", "compiled", "graphs"):
        assert {f"speed/{family}/{kind}/deterministic/nhwc" for family in families} <= set(names)
    steps = [name.partition("/")[0] for name in names]
    assert list(dict.fromkeys(steps)) == list(STEPS)


def test_quick_leaves_out_checks_by_name_and_on_a_cpu_takes_each_step_and_each_demo():
    for small in (False, True):
        whole, quick = (list_checks(JOBS, small=small, quick=quick) for quick in (False, True))
        assert [check.full_name for check in quick] == [check.full_name for check in whole]
        assert not any(check.left_out for check in whole) and any(check.left_out for check in quick)
    taken = {check.full_name for check in quick if not check.explain_absence("cpu")}
    demos = {f"contact/{path.stem}/auto" for path in JOBS.glob("*/*_demo.yaml")}
    assert len(demos) > 4 and {name for name in taken if name.startswith("contact/")} == demos
    assert {name.partition("/")[0] for name in taken} == set(STEPS)
    assert sum(name.startswith("bitwise/") for name in taken) == 1


def test_what_quick_leaves_out_is_a_line_with_the_reason(tmp_path):
    sizes, path = Sizes(JOBS, tmp_path, tmp_path), tmp_path / "r.jsonl"
    checks = [Check("contact", "x", fail_check, left_out="--quick leaves it out"), Check("contact", "y", pass_check)]
    told: list[str] = []
    run_checks(
        checks, device="cuda", sizes=sizes, budget=Budget(60.0, 60.0), header=HEADER, path=path, tell=told.append
    )
    x, y = read_lines(path)[1:]
    assert (x["status"], x["reason"], y["status"]) == ("not run", "--quick leaves it out", "ok")
    assert "[1/1, " in told[0] and "contact/y" in told[0]


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
    assert gpu_check.is_out_of_memory(error) is full


def test_only_selects_by_step_preset_or_pattern_and_refuses_the_unknown():
    checks = list_checks(JOBS, small=True, quick=True)
    assert {check.step for check in select_checks(checks, ["bitwise"])} == {"bitwise"}
    assert {check.step for check in select_checks(checks, ["pricing_smoke"])} >= {"contact", "speed", "overlap"}
    assert [check.full_name for check in select_checks(checks, ["contact/pricing*/auto"])] == [
        "contact/pricing_smoke/auto",
        "contact/pricing_demo/auto",
    ]
    with pytest.raises(UserError, match=r"--only pricing_smok: there is no such check\. Nearest: pricing_smoke"):
        select_checks(checks, ["pricing_smok"])


def test_one_bit_of_a_state_is_a_difference_and_so_is_a_missing_entry():
    a = flatten_state({"model": {"w": torch.tensor([1.0])}, "list": [1, (2, None)], "progress": {"train_s": 1.0}})
    assert set(a) == {"model/w", "list/0", "list/1/0", "list/1/1", "progress/train_s"}
    b = a | {"model/w": torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0])), "progress/train_s": 2.0}
    assert find_differences(a, dict(a)) == [] and find_differences(a, b) == ["model/w"]
    assert find_differences(a, {name: a[name] for name in a if name != "list/0"}) == ["list/0"]


def make_jobs(folder: Path, planted: str = "") -> Path:
    """Copy the test family to a folder of jobs, with a smoke preset; `planted` is added to its model's forward."""
    jobs = folder / "jobs" / "families"  # the name under which its modules import each other
    shutil.copytree(FAMILIES / "stripes", jobs / "stripes", ignore=shutil.ignore_patterns("__pycache__"))
    (jobs / "__init__.py").touch()
    base = (jobs / "stripes" / "stripes.yaml").read_text()
    (jobs / "stripes" / "stripes_smoke.yaml").write_text(
        f"{base}model: {{sleep_ms: 20}}  # so that a run can be stopped before it ends\n"
    )
    module = jobs / "stripes" / "module.py"
    if planted:
        text = module.read_text()
        head, forward, rest = text.partition("    def forward(")
        assert forward
        line, end, body = rest.partition(":\n")
        module.write_text(f"{head}{forward}{line}{end}        {planted}\n{body}")
    return jobs


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_step_that_overflows_changes_nothing(optimizer, tmp_path):
    was_deterministic = torch.are_deterministic_algorithms_enabled()  # an earlier test may have chosen so
    figures = check_overflow(torch.device("cpu"), Sizes(JOBS, tmp_path, tmp_path), optimizer=optimizer)
    assert figures["loss_scale"] == 2.0**15 and torch.are_deterministic_algorithms_enabled() == was_deterministic


def keep_buffers(copied: object, skipped: torch.Tensor) -> None:
    """Leave NaN in batch statistics."""


def move_ema(ema: TrainModule, module: TrainModule, decay: float, skipped: torch.Tensor) -> None:
    """Move averaged weights although the step was skipped."""
    next(ema.parameters()).add_(1.0)


def make_torch_sgd(module: TrainModule, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=settings.lr, momentum=settings.beta1, fused=True)


@pytest.mark.parametrize(
    ("place", "name", "planted", "said"),
    [
        (step, "_put_back_buffers", keep_buffers, "skipped changed layers.1.running_mean, layers.1.running_var"),
        (step, "_update_ema", move_ema, "skipped changed ema.layers.0.weight"),
        (overflow, "make_optimizer", make_torch_sgd, "leaves layers.0.weight, .*layers.0.weight.momentum_buffer.* not"),
    ],
)
def test_a_step_that_does_not_recover_from_an_overflow_is_found(place, name, planted, said, tmp_path, monkeypatch):
    monkeypatch.setattr(place, name, planted)
    with pytest.raises(CheckFailed, match=said):
        check_overflow(torch.device("cpu"), Sizes(JOBS, tmp_path, tmp_path), optimizer="sgd")


def prepare_presets(jobs: Path, folder: Path) -> int:
    """Take steps with presets that cannot be prepared; print how each ends."""
    sizes, path = Sizes(jobs, folder / "data", folder, small=True, steps=1), folder / "r.jsonl"
    unknown = ["data.order=pxk", "data.order_by=colour"]
    checks = [
        Check("contact", name, partial(take_first_steps, preset=preset, overrides=overrides))
        for name, preset, overrides in [
            ("broken", "stripes_smoke", unknown),
            ("full", "stripes", unknown),
            ("fp16", "stripes_smoke", ["precision=fp16"]),
        ]
    ]
    run_checks(checks, device="cpu", sizes=sizes, budget=Budget(60.0, 60.0), header=HEADER, path=path)
    return 0


@pytest.mark.slow
def test_a_preset_that_cannot_be_prepared_fails_if_it_needs_nothing_but_generated_data(tmp_path):
    done = run_as_command(partial(prepare_presets, make_jobs(tmp_path), tmp_path / "here"), tmp_path / "here")
    assert done.returncode == 0, done.stderr
    broken, full, fp16 = read_lines(tmp_path / "here" / "r.jsonl")[1:]
    assert (broken["status"], full["status"], fp16["status"]) == ("failed", "not run", "not run")
    assert broken["error"] == full["reason"] == "data.order_by=colour: no such column."
    assert fp16["reason"].startswith("precision=fp16 requested, but this device (the CPU) runs only")


def check_on_cpu(jobs: Path, *words: str) -> int:
    return main(["gpu-check", "--cpu", "--quick", "--jobs", str(jobs), *words])


def test_losses_with_cuda_graphs_that_differ_or_are_not_finite_fail_the_check():
    check_equal_losses([2.0, 1.0], [2.0, 1.009])
    with pytest.raises(CheckFailed, match=r"with CUDA graphs the loss of step 1 is 1\.011, without them 1"):
        check_equal_losses([2.0, 1.0], [2.0, 1.011])
    with pytest.raises(CheckFailed, match="step 0 is nan"):
        check_equal_losses([2.0, 1.0], [float("nan"), 1.0])


@pytest.mark.slow
def test_the_comparison_of_cuda_graphs_runs_but_for_the_graphs(tmp_path):
    done = run_as_command(partial(compare_graphs_on_cpu, make_jobs(tmp_path), tmp_path), tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["samples_per_s_graphs"] > 0 and figures["samples_per_s_without_graphs"] > 0
    assert (figures["compared_steps"], figures["accumulated"], figures["quotable"]) == (6, 2, False)


def compare_graphs_on_cpu(jobs: Path, folder: Path) -> int:
    """Compare steps with themselves, and see that CUDA graphs are not run there."""
    sizes = Sizes(jobs, folder / "data", folder, small=True, rounds=1, seconds=0.01)
    for _ in range(2):
        with pytest.raises(NotRun, match="compile=graphs requested on the CPU"):
            compare_runs(torch.device("cpu"), sizes, family="stripes", overrides=["compile=graphs"])
    compare = partial(compare_graphs, torch.device("cpu"), sizes, preset="stripes_smoke", overrides=[])
    with pytest.raises(NotRun, match="compile=graphs requested on the CPU, but CUDA graphs need a GPU"):
        compare(modes=("off", "graphs"))
    print(json.dumps(compare(modes=("off", "off"))))
    return 0


@pytest.mark.slow
def test_the_smallest_run_on_a_cpu_answers_every_step(tmp_path):
    jobs = make_jobs(tmp_path)
    done = run_as_command(partial(check_on_cpu, jobs), tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "here" / "benchmarks").glob("gpu-cpu-*.jsonl")
    head, *lines = read_lines(path)
    assert head["environment"]["machine"]["cpu"] and "commit" in head["environment"]["code"]
    statuses = {f"{line['step']}/{line['check']}": line["status"] for line in lines}
    not_run = {name for name, status in statuses.items() if status == "not run"}
    assert {"environment/copies", "environment/peers", "environment/clocks"} <= not_run
    assert {"contact/stripes_smoke/fp16", "contact/stripes_smoke/compile"} <= not_run
    ran = {"environment/kernels", "environment/products", "contact/stripes_smoke/auto", "bitwise/stripes"}
    ran |= {"environment/overflow/adamw", "environment/overflow/sgd", "memory/stripes_smoke"}
    ran |= {"decode/stripes_smoke", "overlap/stripes_smoke", "speed/stripes_smoke/eager/any-order/nhwc"}
    assert {name for name, status in statuses.items() if status == "ok"} == ran
    speed = next(line for line in lines if line["step"] == "speed" and line["status"] == "ok")
    assert speed["samples_per_s"] > 0 and speed["gflop_per_sample"] > 0 and 0 < speed["mfu"] < 1
    assert "on a machine with a GPU" in done.stdout
    assert not list((tmp_path / "here" / "data" / "gpu-check").glob("runs-*"))


@pytest.mark.long
def test_a_job_that_does_not_repeat_itself_fails_the_command(tmp_path):
    jobs = make_jobs(tmp_path, planted="batch = batch | {'image': batch['image'] + __import__('os').urandom(1)[0]}")
    done = run_as_command(partial(check_on_cpu, jobs, "--only", "bitwise"), tmp_path / "here")
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--jobs", "nowhere"], "nowhere: no such folder of jobs. Name one: --jobs DIR."),
        (["--minutes", "0"], "--minutes 0: expected a number above 0"),
        (["--show", "nothing.jsonl"], "nothing.jsonl: no such file"),
        (["--results", "/proc/x"], "--results /proc/x: nothing can be written there: "),
        (
            ["--results", "../here.stderr"],
            "--results ../here.stderr: nothing can be written there: Not a directory. Name",
        ),
        (["--data", "/proc/x/y"], "that you may write to: --data FOLDER"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tmp_path):
    done = run_as_command(partial(main, ["gpu-check", "--cpu", *words]), tmp_path / "here")
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_what_to_type(tmp_path):
    done = run_as_command(partial(main, ["gpu-check", "--only", "environment"]), tmp_path / "here")
    assert done.returncode == 2 and "trainyard gpu-check --cpu" in done.stderr
    assert not (tmp_path / "here" / "benchmarks").exists()
