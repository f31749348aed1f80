"""How a global batch is split on each card, from predictions of memory; and the file that keeps them."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.test_choose_data import JOBS
from tests.training import FAMILIES
from trainyard.cli import main
from trainyard.cli.choices import compose_job
from trainyard.cli.plan import USUAL_CARDS, check_memory
from trainyard.cli.plan_table import describe_preset
from trainyard.cluster.description import load_cluster
from trainyard.config import compose as configs
from trainyard.config.families import Root, find_jobs
from trainyard.config.settings import TrainConfig
from trainyard.data.order import order_epoch, split_into_micro_batches
from trainyard.environment import name_chosen_gpus
from trainyard.errors import UserError
from trainyard.hardware import get_gpu
from trainyard.plan.make_plan import make_plan
from trainyard.plan.memory import (
    FITS,
    MISFIT,
    CardFit,
    NotPredicted,
    PredictionCache,
    StepConfig,
    StepPrediction,
    check_fit,
    choose_fit,
    open_cache,
)
from trainyard.plan.resources import Plan, ResourceRequest, RunRequest
from trainyard.plan.screen import PlanInputs, describe_plan

GIB = 2**30
TI, A100 = "NVIDIA GeForce RTX 2080 Ti, 11264, [N/A]", "NVIDIA A100-SXM4-40GB, 40960, Disabled"


def predict(setting: StepConfig) -> StepPrediction:
    """Predict 1 GiB of weights, and 1 GiB for each sample, or a quarter if it is recomputed."""
    each = GIB // 4 if setting.recompute else GIB
    gradients = GIB // 2
    activations = setting.micro_batch * each + gradients * setting.accumulates
    return StepPrediction(parameters=GIB, activations=activations, gradients=gradients)


def split(job: str, card: str, *overrides: str, gpus: int = 1, predict=predict):
    found = get_gpu(card)
    assert found is not None
    return choose_fit(configs.compose(job, overrides, JOBS), found, gpus=gpus, predict=predict)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_every_card_computes_the_same_global_batch(gpus):
    """pricing: results do not depend on the micro-batch."""
    for card in USUAL_CARDS:
        made = split("pricing", card, "global_batch_size=64", "micro_batch_size=0", gpus=gpus)
        assert made.split.micro_batch * made.split.accumulation_steps * gpus == 64
        assert made.verdict == FITS and not made.setting.recompute


def test_the_micro_batch_is_the_largest_divisor_that_fits():
    sizes = {card: split("pricing", card, "global_batch_size=64", "micro_batch_size=0") for card in USUAL_CARDS}
    assert [made.setting.micro_batch for made in sizes.values()] == [8, 4, 16, 16, 64, 64]
    assert sizes["2080ti"].reason == "reduced from 64: results do not depend on it"


def test_a_micro_batch_on_which_results_depend_stays_and_layers_are_recomputed_where_memory_binds():
    made = split("fingerprint", "2080ti", "global_batch_size=32", "micro_batch_size=0")
    assert (made.setting.micro_batch, made.setting.recompute, made.verdict) == (32, True, FITS) or made.verdict != FITS
    tight = split("fingerprint", "a5000", "global_batch_size=32", "micro_batch_size=0")
    assert (tight.setting.micro_batch, tight.setting.recompute, tight.verdict) == (32, True, FITS)
    assert tight.reason.endswith("with gradient_checkpointing=true, because memory binds")
    roomy = split("fingerprint", "a100-80-sxm", "global_batch_size=32", "micro_batch_size=0")
    assert (roomy.setting.micro_batch, roomy.setting.recompute, roomy.verdict) == (32, False, FITS)


def test_what_fits_nowhere_is_a_misfit():
    made = split("fingerprint", "2080ti", "global_batch_size=512", "micro_batch_size=0")
    assert made.verdict == MISFIT and made.step.peak_gib > made.has_gib


def test_a_model_without_layers_to_recompute_is_a_misfit_at_its_own_size():
    def refuse(setting: StepConfig) -> StepPrediction:
        return StepPrediction(refused="no layers") if setting.recompute else predict(setting)

    made = split("fingerprint", "2080ti", "global_batch_size=512", "micro_batch_size=0", predict=refuse)
    assert (made.verdict, made.step.refused, made.setting.recompute) == (MISFIT, "", False)


def test_predictions_are_stored_by_what_they_depend_on(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    config = configs.compose("pricing", [], JOBS)
    store = open_cache(config, JOBS, environ)
    card = get_gpu("a5000")
    assert card is not None
    with pytest.raises(NotPredicted):
        choose_fit(config, card, gpus=1, predict=store.read)
    setting = StepConfig("cuda", "bf16", True, False, 8, False)
    store.steps[setting] = predict(setting)
    store.about["data"] = "240 synthetic samples"
    store.save()
    same = open_cache(replace(config, eval_batch_size=7), JOBS, environ)
    assert same == store
    for changed in ("model.layers=1", "optimizer.name=sgd", "ema_decay=0.9"):
        assert not open_cache(configs.compose("pricing", [changed], JOBS), JOBS, environ).steps, changed
    store.path.write_text(store.path.read_text().replace("bf16", 'bf16"'))
    with pytest.raises(UserError, match="rm /"):
        open_cache(config, JOBS, environ)


def test_a_plan_is_one_screen_that_says_what_was_never_observed_and_its_lines_fit(tmp_path):
    config = configs.compose("pricing", ["global_batch_size=64"], JOBS)
    cards = {key: get_gpu(key) for key in USUAL_CARDS}
    store = PredictionCache(tmp_path / "x.json", {}, {"data": "240 synthetic samples"})
    store.read = predict  # type: ignore[method-assign]
    inputs = PlanInputs(["pricing", "global_batch_size=64", "micro_batch_size=0"])
    lines = list(describe_plan(config, cards, store, inputs, gpus=1))  # type: ignore[arg-type]
    assert len(lines) <= 24 and max(len(line) for line in lines if "submit" not in line) < 100
    text = "\n".join(lines)
    assert lines[0] == "pricing on 1 GPU: global batch 64, learning rate 0.001 and seed 0 on every card"
    assert "never observed on these cards. To fit: 1 GiB more for CUDA and 10% for" in " ".join(text.split())
    assert re.search(r"^2080ti +64 = 4 x 16 x 1 +fp16 +5\.50 +10\.1 +fits$", text, re.MULTILINE), text
    commands = [line for line in lines if "trainyard submit" in line]
    assert commands == [
        "next         trainyard submit pricing micro_batch_size=8 global_batch_size=64  # p100-16-pcie",
        "             trainyard submit pricing micro_batch_size=4 global_batch_size=64  # 2080ti",
        "             trainyard submit pricing micro_batch_size=16 global_batch_size=64  # a5000, a100-40-sxm",
        "             trainyard submit pricing global_batch_size=64 micro_batch_size=0  # a100-80-sxm, h200",
    ]
    for command in commands:
        card = get_gpu(command.split()[-1])
        own = configs.compose("pricing", [word for word in command.split() if "=" in word], JOBS)
        assert card is not None and check_fit(own, card, gpus=1, predict=predict).verdict == FITS


def test_a_card_that_cannot_compute_a_job_hides_no_column_of_the_others(tmp_path):
    stated = ["compile=on", "schedule.name=constant", "max_duration=90min"]
    config = configs.compose("pricing", ["global_batch_size=64", *stated], JOBS)
    cards = {key: get_gpu(key) for key in ("p100-16-pcie", "a100-80-sxm")}
    store, inputs = PredictionCache(tmp_path / "x.json", {}, {}), PlanInputs(["pricing"])
    store.read = predict  # type: ignore[method-assign]
    lines = list(describe_plan(config, cards, store, inputs, gpus=1))  # type: ignore[arg-type]
    (row,) = (line for line in lines if line.startswith("a100-80-sxm "))
    assert re.search(r" 64 = 64 x 1 x 1 .* 65\.0 +73\.6 +(fits|may not fit)$", row), row
    text = " ".join("\n".join(lines).split())
    assert "why p100-16-pcie: compile=on requested, but torch.compile generates Triton kernels" in text
    assert "never observed on these cards, without torch.compile" in text


def test_a_plan_of_what_fits_nowhere_says_so_and_what_to_try(tmp_path):
    config = configs.compose("fingerprint", ["global_batch_size=512", "micro_batch_size=0"], JOBS)
    store, inputs = PredictionCache(tmp_path / "x.json", {}, {}), PlanInputs(["fingerprint", "global_batch_size=512"])
    store.read = predict  # type: ignore[method-assign]
    lines = list(describe_plan(config, {"2080ti": get_gpu("2080ti")}, store, inputs, gpus=2))  # type: ignore[dict-item]
    assert lines[-2].startswith("next         nothing fits here: state a smaller micro_batch_size")
    assert lines[-1].strip() == "trainyard plan fingerprint global_batch_size=512 --gpus 4"


def test_a_step_that_cannot_be_predicted_says_why(tmp_path):
    config = configs.compose("pricing", ["global_batch_size=64"], JOBS)
    store = PredictionCache(tmp_path / "x.json", {}, {})
    store.read = lambda _: StepPrediction(refused="a step reads values")  # type: ignore[method-assign]
    cards = {"a5000": get_gpu("a5000")}
    text = "\n".join(describe_plan(config, cards, store, PlanInputs(["pricing"]), gpus=1))  # type: ignore[arg-type]
    assert re.search(r"^a5000 .* not predicted$", text, re.MULTILINE)
    assert "why          all: a step reads values" in text and "micro_batch_size" not in text.splitlines()[-1]


@pytest.mark.parametrize("job", ["fingerprint_1m", "fingerprint_500k"])
def test_a_plan_says_what_uncompressed_images_will_take_on_disk(job, tmp_path):
    store, inputs = PredictionCache(tmp_path / "x.json", {}, {}), PlanInputs([job])
    store.read = predict  # type: ignore[method-assign]
    cards = {"a100-80-sxm": get_gpu("a100-80-sxm")}

    def describe(*options: str) -> str:
        config = configs.compose(job, [*options], JOBS)
        return " ".join(" ".join(describe_plan(config, cards, store, inputs, gpus=8)).split())  # type: ignore[arg-type]

    assert "not packed yet, 89.4 kB a sample, 89.4 GB a million (packing.store=input-raw)" in describe()
    assert "not packed yet, its disk not known" in describe("packing.store=input-png")


# All presets in one table


def list_order(config: TrainConfig, fit: CardFit, gpus: int) -> list[np.ndarray]:
    """Return the samples of each step of an epoch, as the micro-batches of all ranks put them together."""
    columns = {name: np.arange(500) // 3 for name in (config.data.order_by, "identity") if name}
    order = order_epoch(np.arange(500), columns, config, epoch=1)
    steps = []
    for i in range(len(order)):
        parts = [
            split_into_micro_batches(order.batch(i), rank=rank, world_size=gpus, micro_batch_size=fit.split.micro_batch)
            for rank in range(gpus)
        ]
        assert {len(one) for one in parts[: None if len(order.batch(i)) == config.global_batch_size else 0]} <= {
            fit.split.accumulation_steps
        }
        steps.append(np.concatenate([ids[:counted] for one in parts for ids, counted in one]))
    return steps


@pytest.mark.parametrize("job", ["antispoof", "fingerprint", "pricing", "tinydet", "twins"])
def test_every_card_gets_the_same_samples_in_the_same_order(job):
    """Each card's own micro-batch, on one GPU and on four: what a step computes is the same, and so is its rate."""
    preset = configs.compose(job, [], JOBS)
    taken, rates, sizes = [], set(), set()
    for card in USUAL_CARDS:
        for gpus in (1, 4):
            found = get_gpu(card)
            assert found is not None
            made = choose_fit(preset, found, gpus=gpus, predict=predict)
            own = [f"micro_batch_size={made.setting.micro_batch}", f"gradient_checkpointing={made.setting.recompute}"]
            config = configs.apply_overrides(preset, own)
            taken.append(list_order(config, made, gpus))
            rates.add((config.global_batch_size, config.optimizer.lr, config.seed))
            sizes.add(made.setting.micro_batch)
    assert rates == {(preset.global_batch_size, preset.optimizer.lr, preset.seed)}
    assert len(sizes) > 1 or preset.micro_batch_size, "cards of 10 and of 130 GiB get different micro-batches"
    for other in taken[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(taken[0], other, strict=True))


def test_a_row_of_the_table_says_what_fits_on_each_card():
    notes: dict[str, int] = {}
    cards = {key: card for key in ("2080ti", "a5000", "a100-80-sxm") if (card := get_gpu(key))}

    def describe(config: TrainConfig, predict=predict, cards=cards) -> list[str]:
        return describe_preset(config, cards, gpus=1, predict=predict, notes=notes)

    fingerprint = configs.compose("fingerprint", ["global_batch_size=32", "micro_batch_size=0"], JOBS)
    sizes = ["32 x 1 recomputed, may not fit", "32 x 1 recomputed", "32 x 1"]
    assert describe(fingerprint) == ["fingerprint", "32", *describe(fingerprint)[2:4], *sizes]
    large = replace(fingerprint, global_batch_size=512)
    assert describe(large)[4:] == [MISFIT] * 3
    assert describe(large, predict=PredictionCache(Path("none.json"), {}, {}).read)[4:] == ["not predicted"] * 3
    assert notes == {}
    p100 = {key: card for key in ("p100-16-pcie",) if (card := get_gpu(key))}
    for _ in range(2):  # the same reason has one number
        assert describe(replace(large, compile="on"), cards=p100)[4:] == ["no [1]"]
    assert [reason[:45] for reason in notes] == ["compile=on requested, but torch.compile gener"]


@pytest.mark.long
def test_the_table_of_all_presets_reads_what_is_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", "--all", "--stored", "--hw", "a5000,h200", "--jobs", str(JOBS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| preset | global batch | learning rate | seed | a5000 | h200 |"
    rows = {line.split("|")[1].strip(): line for line in lines[2:] if line.startswith("|")}
    assert set(rows) == set(find_jobs(JOBS))
    assert rows["pricing"] == "| pricing | 64 | 0.001 | 0 | not predicted | not predicted |"
    (legend,) = (line for line in lines if line.startswith("A cell: "))
    assert "Estimated, never observed on these cards." in legend
    assert not (tmp_path / "trainyard" / "plans").exists()


def test_the_name_of_a_card_means_each_of_its_variants(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for typed, shown in (
        ("p100", "p100-12-pcie | p100-16-pcie | p100-16-sxm"),
        ("v100-32,2080ti", "v100-32-pcie | v100-32-sxm | 2080ti"),
        ("a100-80-sxm,sm89-48gib,cpu", "a100-80-sxm | sm89-48gib | cpu"),
    ):
        assert main(["plan", "--all", "--stored", "--hw", typed, "--jobs", str(FAMILIES)]) == 0
        assert f" | {shown} |\n" in capsys.readouterr().out
    assert main(["plan", "--all", "--stored", "--hw", "p10", "--jobs", str(FAMILIES)]) == 2
    assert "--hw p10: no such card. Cards: cpu, p100-12-pcie, " in capsys.readouterr().err
    typed = ["plan", "--all", "--stored", "--cluster", str(CLUSTER), "--jobs", str(FAMILIES)]
    for hw, shown in (("a100-80", "a100"), ("a100", "a100"), ("p100,2080ti", "p100 | 2080ti")):
        assert main([*typed, "--hw", hw]) == 0
        assert f" | {shown} |\n" in capsys.readouterr().out


@pytest.mark.long
def test_the_table_has_the_presets_of_ones_own_families_and_of_trainyards(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(JOBS.parent / "tests" / "families" / "stripes", tmp_path / "jobs" / "stripes")
    assert main(["plan", "--all", "--stored", "--hw", "a5000"]) == 0
    rows = {line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:] if line.startswith("|")}
    assert rows == {"stripes", *find_jobs(JOBS)}


def test_a_plan_of_one_job_and_one_of_all_are_told_apart():
    for typed in (["plan"], ["plan", "pricing", "--stored"], ["plan", "pricing", "--all"]):
        assert main(typed) == 2


# What submit asks of the stored file

CLUSTER = Path(__file__).parent / "slurm" / "golden" / "cluster.yaml"


def request_memory(
    *overrides: str, hw: str = "2080ti", no_plan: bool = False, dry: bool = False
) -> tuple[Plan, RunRequest]:
    """Return what `submit` hands over for a job of 64 samples a step on one GPU."""
    own = ["global_batch_size=64", *overrides]
    config = configs.compose("pricing", own, JOBS)
    plan = make_plan(config, load_cluster(CLUSTER), ResourceRequest(gpus=1, hw=hw))
    typed = ("submit", "pricing", *own, "--hw", hw)
    request = RunRequest(
        job="pricing",
        overrides=tuple(own),
        families=Root(JOBS, ""),
        runs_dir=CLUSTER.parent / "no-runs",
        typed=typed,
        resources=ResourceRequest(gpus=1, hw=hw),
        is_dry=dry,
        predicts_memory=not no_plan,
    )
    return plan, request


def store_plan(plan: Plan, environ: dict[str, str], jobs: Path = JOBS) -> None:
    """PredictionCache what `trainyard plan` would, of a step with 1 GiB for each sample."""
    store, card = open_cache(plan.config, jobs, environ), get_gpu(plan.kind.card)
    assert card is not None

    def remember(setting: StepConfig) -> StepPrediction:
        store.steps[setting] = predict(setting)
        return store.steps[setting]

    choose_fit(plan.config, card, gpus=plan.gpus, predict=remember)
    store.save()


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_submit_refuses_a_stored_misfit_and_its_line_fits(environ, capsys):
    plan, request = request_memory("micro_batch_size=0")
    store_plan(plan, environ)
    with pytest.raises(UserError, match=r"micro-batches of 64 takes 65\.0 GiB") as caught:
        check_memory(plan, request)
    line = shlex.split(str(caught.value).partition("fits: ")[2])
    assert line == ["trainyard", "submit", "pricing", "micro_batch_size=4", "global_batch_size=64", "--hw", "2080ti"]
    assert main([*line[1:], "--dry", "--cluster", str(CLUSTER)]) == 0
    assert "64 = 4 x 16 micro-batches x 1 rank" in capsys.readouterr().out
    value, reason = check_memory(*request_memory("micro_batch_size=4")) or ("", "")
    assert value == "5.50 GiB" and "never observed on this card" in reason and ": fits;" in reason


def test_submit_refuses_a_misfit_where_no_smaller_size_is_stored_and_says_what_to_type(environ):
    plan, request = request_memory("micro_batch_size=0")
    store_plan(plan, environ)
    store = open_cache(plan.config, JOBS, environ)
    store.steps = {setting: step for setting, step in store.steps.items() if setting.micro_batch == 64}
    store.save()
    with pytest.raises(UserError, match=re.escape(f"--cluster {CLUSTER}. To try it all the same: ")) as caught:
        check_memory(plan, request)
    assert shlex.split(str(caught.value).partition("all the same: ")[2]) == ["trainyard", *request.typed, "--no-plan"]
    assert check_memory(*request_memory("micro_batch_size=0", no_plan=True)) == ("not checked", "--no-plan")


def test_a_dry_submit_predicts_nothing_and_says_which_line_does(environ):
    plan, request = request_memory("micro_batch_size=8", dry=True)
    value, reason = check_memory(plan, request) or ("", "")
    assert value == "not checked"
    line = shlex.split(reason.partition("as does: ")[2])
    own = "micro_batch_size=8"
    assert line == ["trainyard", "plan", "pricing", own, "--gpus", "1", "--cluster", str(CLUSTER), "--hw", "2080ti"]


def test_runs_that_differ_in_what_takes_no_memory_share_a_prediction(environ):
    path = open_cache(configs.compose("pricing", [], JOBS), JOBS, environ).path
    for alike in ("optimizer.lr=1e-5", "schedule.warmup=7st", "max_duration=3ep", "micro_batch_size=4", "seed=1"):
        assert open_cache(configs.compose("pricing", [alike], JOBS), JOBS, environ).path == path, alike
    assert open_cache(configs.compose("pricing", ["model.layers=2"], JOBS), JOBS, environ).path != path


def test_a_run_that_exists_keeps_its_micro_batch_and_is_refused_with_a_line_that_goes_without(environ):
    plan, request = request_memory("micro_batch_size=0")
    store_plan(plan, environ)
    with pytest.raises(UserError, match=r"the same: trainyard resume pricing/a --hw 2080ti --no-plan$"):
        check_memory(plan, replace(request, typed=("resume", "pricing/a", "--hw", "2080ti")), allow_smaller_batch=False)


@pytest.mark.long
def test_submit_predicts_first_and_goes_on_where_it_cannot(environ, tmp_path, capsys):
    plan, request = request_memory("model.layers=1", "micro_batch_size=4")
    value, reason = check_memory(plan, request) or ("", "")
    assert value.endswith(" GiB") and ": fits; estimated" in reason
    assert "pricing: predicting its memory on 2080ti first, once; --no-plan goes" in capsys.readouterr().err
    assert check_memory(plan, request) == (value, reason) and capsys.readouterr().err == ""
    jobs = tmp_path / "broken"
    shutil.copytree(JOBS / "pricing", jobs / "pricing")
    (jobs / "__init__.py").touch()
    with (jobs / "pricing" / "module.py").open("a") as file:
        file.write("\nraise OSError('cannot allocate memory')\n")
    found = check_memory(plan, replace(request, families=Root(jobs, "")))
    assert found == ("not checked", "its memory cannot be predicted: OSError: cannot allocate memory")


@pytest.mark.long
def test_a_plan_is_made_once_for_cards_that_compute_in_different_types(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    typed = ["plan", "pricing_smoke", "--hw", "p100-16-pcie,2080ti,a5000", "--jobs", str(JOBS)]
    assert main(typed) == 0
    first = capsys.readouterr()
    assert first.err == "pricing_smoke: predicting its memory on these cards, once ...\n"
    rows = [line for line in first.out.splitlines() if line.startswith(("p100", "2080", "a5000"))]
    assert len(rows) == 3 and all(re.search(r" \d+\.\d +fits$", row) for row in rows)
    (file,) = (tmp_path / "trainyard" / "plans").glob("*.json")
    config = configs.compose("pricing_smoke", [], JOBS)
    steps = open_cache(config, JOBS, {"XDG_CACHE_HOME": str(tmp_path)}).steps
    peaks = {setting.dtype: step.peak_gib for setting, step in steps.items()}
    assert peaks["bf16"] == peaks["fp16"] < peaks["fp32"]
    written = file.stat().st_mtime_ns
    assert main(typed) == 0
    second = capsys.readouterr()
    assert (second.err, second.out) == ("", first.out) and file.stat().st_mtime_ns == written


# submit --local


@pytest.fixture
def submit_here(environ, tmp_path, monkeypatch):
    """Return what submits a job of 64 samples a step to this machine, whose GPUs are as stated, without starting it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it may hide all GPUs
    words = ["submit", "pricing", "global_batch_size=64", "--synthetic", "--local", "--dry", "--jobs", str(JOBS)]

    def call(*more: str, gpus: Sequence[str]) -> int:
        smi = tmp_path / "bin" / "nvidia-smi"
        smi.parent.mkdir(exist_ok=True)
        smi.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(smi.parent))
        return main([*words, *more])

    store = complete_by_hand(environ, words)
    assert len(store.steps) > 1
    return call


def complete_by_hand(environ: dict[str, str], words: Sequence[str]) -> PredictionCache:
    """Store what `trainyard plan` would for a 2080 Ti, of a step with 1 GiB for each sample."""
    request = RunRequest(
        job=words[1],
        overrides=(words[2],),
        families=Root(JOBS, ""),
        runs_dir=Path("runs"),
        typed=tuple(words),
        resources=ResourceRequest(),
        wants_synthetic=True,
    )
    config, card = compose_job(request, None).config, get_gpu("2080ti")
    store = open_cache(config, JOBS, environ)
    assert card is not None

    def remember(setting: StepConfig) -> StepPrediction:
        store.steps[setting] = predict(setting)
        return store.steps[setting]

    choose_fit(config, card, gpus=1, predict=remember)
    check_fit(replace(config, micro_batch_size=4), card, gpus=1, predict=remember)
    store.save()
    return store


@pytest.mark.parametrize(
    ("gpus", "more", "row"),
    [
        ([], [], "checked at start  (ranks on the CPU; a run that needs more than this host's memory is refused)"),
        ([TI], ["--cpu-ranks", "2"], "checked at start  (ranks on the CPU; "),
        ([TI, TI], ["micro_batch_size=4"], "5.50 GiB  (and 1.6 in reserve, of 10.1: fits; estimated, never observed "),
        ([TI], ["--no-plan"], "not checked  (--no-plan)"),
        (
            [TI],
            ["micro_batch_size=2"],
            "not checked  (never predicted; submit does it first, as does: trainyard plan p",
        ),
        ([TI, A100], [], "not checked  (NVIDIA GeForce RTX 2080 Ti and NVIDIA A100-SXM4-40GB: several types; when the"),
        (["NVIDIA X9, 8192, [N/A]"], [], "not checked  (NVIDIA X9: no card that plans know; when the run starts, it"),
        (
            [A100.replace("Dis", "En")],
            [],
            "not checked  (NVIDIA A100-SXM4-40GB, in MIG slices: no card that plans know",
        ),
    ],
)
def test_a_local_submission_says_what_a_step_takes_on_this_machines_gpus(gpus, more, row, submit_here, capsys):
    assert submit_here(*more, gpus=gpus) == 0
    assert f"memory     {row}" in capsys.readouterr().out


def test_where_cards_differ_those_that_the_user_chose_are_not_guessed_and_get_the_run(submit_here, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert submit_here(gpus=[TI, A100]) == 0
    assert "NVIDIA GeForce RTX 2080 Ti and NVIDIA A100-SXM4-40GB: several types" in capsys.readouterr().out
    assert name_chosen_gpus(1, os.environ) == ["CUDA_VISIBLE_DEVICES=1"], "submitit would show GPU 0"
    assert name_chosen_gpus(2, os.environ) == ["CUDA_VISIBLE_DEVICES=1,3"]
    assert name_chosen_gpus(0, os.environ) == [] and name_chosen_gpus(2, {}) == []
    for none in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert submit_here(gpus=[TI, A100]) == 0
        assert "checked at start  (ranks on the CPU; " in capsys.readouterr().out


def test_a_local_submission_of_what_cannot_fit_is_refused_with_a_line_that_fits(submit_here, capsys):
    assert submit_here("micro_batch_size=0", gpus=[TI]) == 2
    said = capsys.readouterr().err
    assert said.startswith("UserError: GeForce RTX 2080 Ti: a step of pricing with micro-batches of 64 takes 65.0 GiB")
    line = shlex.split(said.partition("fits: ")[2])
    assert line[:4] == ["trainyard", "submit", "pricing", "micro_batch_size=4"] and "--local" in line
    assert main(line[1:]) == 0
    assert "memory     5.50 GiB" in capsys.readouterr().out
