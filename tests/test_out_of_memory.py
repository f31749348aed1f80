"""A GPU without memory left: a run halves the micro-batch and changes nothing else, or says what to type."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_choose_data import JOBS
from tests.training import FAMILIES, find_differences, load_state, new_run, read_run_metrics, train, train_on_ranks
from tests.waiting import wait_until
from trainyard.config import compose as configs
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.data.host_memory import read_available_memory
from trainyard.data.order import EpochOrder, order_epoch
from trainyard.data.prepare import prepare_data
from trainyard.data.shards import ShardSet
from trainyard.errors import OutOfDeviceMemory, UserError, is_out_of_memory
from trainyard.node.choices import warn_of_few_samples
from trainyard.runs.events import read_events
from trainyard.runs.folder import read_env
from trainyard.runs.state import ExitCode
from trainyard.runs.why import explain_run
from trainyard.train.data_parallel import describe_batch_statistics
from trainyard.train.memory_probe import build_largest_batch, list_lengths, select_largest_eval_ids

EXACT = ("model.batch_norm=false", "model.dropout=0", "global_batch_size=16", "max_duration=4st", "eval_every=3st")
"""Without batch statistics and dropout, only rounding depends on the micro-batch."""
ROUNDING = 1e-4
"""float32 sums in another order, over four steps of Adam at 1e-2."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packed")


def make_run(tmp_path: Path, cache: Path, *overrides: str) -> Path:
    return new_run(tmp_path, f"data.cache={cache}", *EXACT, *overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache) -> Path:
    """Return a run that had enough memory."""
    run = make_run(tmp_path_factory.mktemp("whole"), cache)
    assert train(run) == 0
    return run


@pytest.fixture(scope="module")
def halved(tmp_path_factory, cache) -> Path:
    """Return a run that had enough memory, with micro-batches of 8 from the start."""
    run = make_run(tmp_path_factory.mktemp("halved"), cache, "micro_batch_size=8")
    assert train(run) == 0
    return run


def measure_difference(one: Path, other: Path) -> float:
    a, b = load_state(one), load_state(other)
    assert a["progress/samples_seen"] == b["progress/samples_seen"]
    return max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith(("model/", "ema/")))


def assert_same_training(one: Path, other: Path) -> None:
    assert measure_difference(one, other) < ROUNDING
    for a, b in zip(read_run_metrics(one), read_run_metrics(other), strict=True):
        assert a.keys() == b.keys() and a["step"] == b["step"]
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), abs=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_out_of_memory_in_a_step_halves_the_micro_batch_and_keeps_the_mathematics(phase, tmp_path, cache, whole):
    run = make_run(tmp_path, cache, "model.full_above=8", f"model.full_phase={phase}", "model.full_step=32")
    assert train(run) == 0
    assert_same_training(whole, run)
    choice = read_env(run)["choices"]["micro_batch_size"]
    assert choice["value"] == 8
    assert "2 micro-batches each; halved from 16: out of memory in the " + phase in choice["reason"]
    (event,) = [event for event in read_events(run) if event["event"] == "out_of_memory"]
    assert event["micro_batch_size"] == 8 and "Tried to allocate 20.00 GiB" in event["message"]
    assert not list(run.glob("errors/*.json")), "what was dealt with is no fault of the run"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["optimizer", pytest.param("backward", marks=pytest.mark.long)])
def test_what_failed_in_the_first_step_leaves_no_bit_behind(phase, tmp_path, cache, halved):
    run = make_run(tmp_path, cache, "model.full_above=8", f"model.full_phase={phase}")
    assert train(run) == 0
    assert find_differences(load_state(halved), load_state(run)) == []
    assert read_run_metrics(halved) == read_run_metrics(run)


@pytest.mark.long
def test_a_resume_keeps_the_halved_micro_batch(tmp_path, cache):
    run = make_run(tmp_path, cache, "model.full_above=8", "max_duration=3st")
    assert train(run) == 0
    shutil.rmtree(run / "checkpoints")
    assert train(run) == 0
    starts = [event["event"] for event in read_events(run)]
    assert starts.count("out_of_memory") == 1
    assert read_env(run)["choices"]["micro_batch_size"]["value"] == 8


@pytest.mark.long
def test_memory_that_is_short_twice_halves_twice(tmp_path, cache, whole):
    run = make_run(tmp_path, cache, "model.full_above=4", "model.full_phase=backward")
    assert train(run) == 0
    assert_same_training(whole, run)
    assert read_env(run)["choices"]["micro_batch_size"]["value"] == 4


@pytest.mark.slow
def test_out_of_memory_in_evaluation_halves_its_batches_alone(tmp_path, cache, whole):
    run = make_run(tmp_path, cache, "model.full_above=8", "model.full_phase=evaluation")
    assert train(run) == 0
    assert find_differences(load_state(whole), load_state(run)) == []
    assert read_run_metrics(whole) == read_run_metrics(run)
    choices = read_env(run)["choices"]
    assert (choices["micro_batch_size"]["value"], choices["eval_batch_size"]["value"]) == (16, 8)
    assert choices["eval_batch_size"]["reason"].startswith("halved from 64: ")
    (event,) = [event for event in read_events(run) if event["event"] == "out_of_memory"]
    assert event["eval_batch_size"] == 8


@pytest.mark.slow
def test_where_results_depend_on_the_micro_batch_it_is_not_halved_unless_told(tmp_path, cache):
    run = make_run(tmp_path, cache, "model.batch_norm=true", "model.full_above=8")
    with pytest.raises(OutOfDeviceMemory, match="not halved unless told, because results would change: BatchNorm"):
        train(run)
    (error,) = run.glob("errors/*.json")
    recorded = json.loads(error.read_text())
    assert (
        recorded["cause"] == "device_oom" and f"trainyard resume {run} halve_micro_batch=always" in recorded["message"]
    )
    told = make_run(tmp_path / "told", cache, "model.batch_norm=true", "model.full_above=8", "halve_micro_batch=always")
    assert train(told) == 0
    assert read_env(told)["choices"]["micro_batch_size"]["value"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "advice"),
    [("backward", "gradient_checkpointing=true"), pytest.param("evaluation", "--hw TYPE", marks=pytest.mark.long)],
)
def test_a_single_sample_that_does_not_fit_ends_the_run_with_what_to_type(phase, advice, tmp_path, cache):
    options = ("global_batch_size=2", "deterministic=false")  # else the first micro-batch is tried on a copy before
    run = make_run(tmp_path, cache, "model.full_above=0", f"model.full_phase={phase}", *options)
    with pytest.raises(OutOfDeviceMemory) as caught:
        train(run)
    said = str(caught.value)
    assert said.startswith("Rank 0 of 1 on ") and f"out of memory in the {phase}" in said
    assert "GPU 0 has a total capacity of 79.11 GiB" in said and "expandable_segments" not in said
    assert advice in said and ("one sample" in said or "micro-batches of 1." in said)
    assert "out of memory on the GPU" in explain_run(run)


@pytest.mark.long
def test_the_probe_halves_before_training_without_another_start(tmp_path, cache, halved):
    run = make_run(tmp_path, cache, "model.full_above=8", "model.full_phase=optimizer", "probe_memory=on")
    assert train(run) == 0
    assert find_differences(load_state(halved), load_state(run)) == []
    assert [event["event"] for event in read_events(run)][:2] == ["start", "out_of_memory"]
    choices = read_env(run)["choices"]
    assert choices["micro_batch_size"]["value"] == 8 and choices["memory_probe"]["value"] == "fits"
    assert not (run / "errors").exists()


@pytest.mark.long
def test_the_probe_halves_evaluation_batches_too(tmp_path, cache):
    run = make_run(tmp_path, cache, "model.full_above=8", "model.full_phase=evaluation", "probe_memory=on")
    assert train(run) == 0
    assert read_env(run)["choices"]["eval_batch_size"]["reason"].startswith("halved from 64: the memory probe")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.long)])
def test_the_probe_changes_no_bit(optimizer, tmp_path, cache):
    options = ("model.batch_norm=true", "model.dropout=0.3", f"optimizer.name={optimizer}", "image.scales=[1.0,1.5]")
    runs = []
    for probe in ("off", "on"):
        run = make_run(tmp_path / probe, cache, *options, f"probe_memory={probe}")
        assert train(run) == 0
        for path in run.glob("checkpoints/step-000000004.*"):
            path.unlink()
        assert train(run) == 0  # from the checkpoint before it, which has moments
        runs.append(run)
    assert find_differences(load_state(runs[0]), load_state(runs[1])) == []
    assert read_run_metrics(runs[0]) == read_run_metrics(runs[1])


def test_the_largest_batch_has_the_largest_scale_and_the_longest_samples_on_every_rank():
    order = EpochOrder(np.arange(22)[::-1].copy(), 8)
    lengths = [np.arange(22) % 7, np.where(np.arange(22) == 1, 9, 2)]  # sample 1 is in the last batch, which is smaller
    tried, index = build_largest_batch(order, lengths, np.array([1.0, 1.5, 2.0]), world_size=2)
    assert index == 1, "the last batch is not full"
    shares = tried.batch(index).reshape(2, 4)
    assert all(lengths[0][share].max() == 6 and 1 in share for share in shares)
    assert np.array_equal(tried.batch(0), order.batch(0)) and len(tried.ids) == len(order.ids)


@pytest.mark.slow
def test_where_batches_follow_length_the_probe_tries_the_longest_samples_of_each_set(tmp_path):
    config = prepare_data(configs.compose("pricing_smoke", [f"data.cache={tmp_path}"], JOBS), JOBS)
    assert config.data.order == "buckets"
    data = ShardSet(Path(config.data.path))
    splits = load_family(JOBS, "pricing", "pack").splits(data.columns, data.vocabulary, config)
    column, lengths = data.columns[config.data.order_by], list_lengths(data, config)
    order = order_epoch(splits["train"], data.columns, config, epoch=0)
    tried, index = build_largest_batch(order, lengths, np.ones(len(order)), world_size=2)
    longest = column[splits["train"]].max()
    assert column[order.batch(index)].max() < longest, "the epoch's own batch is in another bucket"
    assert all(column[share].max() == longest for share in np.array_split(tried.batch(index), 2))
    held_out = np.concatenate([ids for name, ids in splits.items() if name != "train"])
    chosen = select_largest_eval_ids(splits, lengths, count=3)
    assert list(column[chosen]) == sorted(column[held_out], reverse=True)[:3]


@pytest.mark.long
def test_two_ranks_agree_on_what_fits_before_they_train(tmp_path, cache, whole):
    run = make_run(tmp_path, cache, "model.full_above=4", "model.full_rank=1", "probe_memory=on")
    assert train_on_ranks(run, 2, rendezvous="probe") == [0, 0]
    assert_same_training(whole, run)
    assert read_env(run)["choices"]["micro_batch_size"]["value"] == 4


def test_a_batch_for_which_the_host_has_no_memory_is_refused_before_it_is_allocated(tmp_path, cache):
    run = make_run(tmp_path, cache, "global_batch_size=100000000000")
    with pytest.raises(UserError) as caught:
        train(run)
    said = str(caught.value)
    assert said.startswith("micro_batch_size=100000000000: the loader's buffers of 1 rank on this host would take ")
    assert " GiB, and " in said and " available (" in said
    assert "The training set has 60 samples, fewer than global_batch_size=100000000000." in said
    assert "Start again with a smaller one: trainyard run stripes micro_batch_size=" in said
    assert said.endswith(", or trainyard run stripes global_batch_size=60")
    run = make_run(tmp_path, cache, "eval_batch_size=100000000000")
    with pytest.raises(UserError, match=rf"Resume with a smaller one: trainyard resume {run} eval_batch_size=\d+$"):
        train(run)


def test_a_step_for_which_the_host_has_no_memory_is_refused_before_it_is_taken(tmp_path, cache, whole):
    assert read_env(whole)["choices"]["memory_probe"]["value"] == "off", "a small batch costs no prediction"
    size = read_available_memory().bytes // 4 // (16 * 16 * 9)  # its buffers fit, what 8 channels make of it does not
    run = make_run(tmp_path, cache, f"global_batch_size={size}")
    with pytest.raises(UserError) as caught:
        train(run)
    said = str(caught.value)
    assert said.startswith(f"micro_batch_size={size}: the loader's buffers and the activations of a step of 1 rank")
    assert "Start again with a smaller one: trainyard run stripes micro_batch_size=" in said


def test_predicting_a_large_step_changes_no_bit(tmp_path, cache, whole, monkeypatch):
    monkeypatch.setattr("trainyard.train.memory_probe.UNLIKELY_SHARE", 0.0)
    run = make_run(tmp_path, cache)
    assert train(run) == 0
    choice = read_env(run)["choices"]["memory_probe"]
    assert choice["value"] == "fits" and choice["reason"].startswith("predicted: ")
    assert find_differences(load_state(whole), load_state(run)) == []


@pytest.mark.parametrize(
    ("memory_max", "left_mib", "source"),
    [("max", 100, "MemAvailable"), (str(60 * 2**20), 60 - 50 + 30, "cgroup/a"), (str(10 * 2**20), 0, "cgroup/a")],
)
def test_available_memory_is_the_tightest_limit_without_what_the_page_cache_takes(
    memory_max, left_mib, source, tmp_path
):
    (tmp_path / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:  {100 * 1024} kB\n")
    (tmp_path / "cgroup" / "a").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n")
    texts = {"memory.max": memory_max, "memory.current": 50 * 2**20, "memory.stat": f"anon 1\nfile {30 * 2**20}\n"}
    for name, text in texts.items():
        (tmp_path / "cgroup" / "a" / name).write_text(f"{text}\n")
    found = read_available_memory(
        meminfo=tmp_path / "meminfo", hierarchy=tmp_path / "cgroup", membership=tmp_path / "membership"
    )
    assert found.bytes == left_mib * 2**20 and source in found.source


def test_the_limit_of_an_older_cgroup_counts(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemAvailable: {2**30} kB\n")
    group = tmp_path / "cgroup" / "memory" / "slurm" / "job_7"
    group.mkdir(parents=True)
    for name, text in {"memory.limit_in_bytes": 100, "memory.usage_in_bytes": 70, "memory.stat": "cache 5"}.items():
        (group / name).write_text(f"{text}\n")
    (tmp_path / "membership").write_text("9:memory:/slurm/job_7\n4:cpu:/x\n")
    found = read_available_memory(
        meminfo=tmp_path / "meminfo", hierarchy=tmp_path / "cgroup", membership=tmp_path / "membership"
    )
    assert found.bytes == 35


def test_a_batch_larger_than_the_training_set_and_few_samples_for_batch_statistics_are_said(tmp_path, cache):
    options = ("global_batch_size=61", "micro_batch_size=15", "model.batch_norm=true", "max_duration=1st")
    run = make_run(tmp_path, cache, *options)
    assert train(run) == 0
    log = (run / "log").read_text()
    assert "WARNING global_batch_size=61: the training set has 60 samples" in log
    assert "WARNING BatchNorm computes its statistics over 15 samples, fewer than 16" in log
    assert "WARNING the validation set has 20 samples: without any error they show an error rate below 15%" in log
    assert read_env(run)["choices"]["batch_statistics"]["value"] == 15


def test_few_steps_and_few_validation_samples_are_said_and_enough_are_not(log):
    config = compose("stripes", ["global_batch_size=16", "max_duration=5ep"], FAMILIES)
    warn_of_few_samples(config, {"train": 64, "val": 30}, FAMILIES)
    warn_of_few_samples(config, {"train": 15}, FAMILIES)
    assert log == []
    warn_of_few_samples(config, {"train": 63, "val": 29}, FAMILIES)
    assert log[0].startswith(
        "63 training samples are 4 steps of global_batch_size=16, and 20 in the whole run; more steps"
    )
    assert log[1].startswith("the validation set has 29 samples") and log[1].endswith(
        f"trainyard options stripes --jobs {FAMILIES}\n"
    )


@pytest.mark.parametrize(("size", "synced", "samples"), [(8, False, 8), (16, False, 16), (8, True, 32)])
def test_batch_statistics_over_few_samples_are_told_from_enough(size, synced, samples):
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    options = {"micro_batch_size": size, "world_size": 4, "sync_batchnorm": synced}
    found = describe_batch_statistics(module, **options)
    assert found is not None and found[0] == samples
    assert ("fewer than 16" in found[1]) == (samples < 16)
    assert describe_batch_statistics(torch.nn.Sequential(torch.nn.GroupNorm(1, 3)), **options) is None


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("forward", marks=pytest.mark.long),
        pytest.param("backward", marks=pytest.mark.slow),
        pytest.param("optimizer", marks=pytest.mark.long),
    ],
)
def test_one_of_two_ranks_without_memory_ends_both_and_both_start_again(phase, tmp_path, cache, whole):
    """In evaluation, which follows, that rank alone takes smaller batches, and the other one waits for it."""
    full = (f"model.full_phase={phase}+evaluation", "model.full_step=16")  # the other rank is in a collective then
    run = make_run(tmp_path, cache, "model.full_above=4", *full, "model.full_rank=1")
    codes = train_on_ranks(run, 2, rendezvous="first")
    assert codes[1] == ExitCode.DEVICE_OOM and codes[0] not in (0, None)
    assert explain_run(run).endswith(f"next: trainyard resume {run} (with half the micro-batch)")
    assert train_on_ranks(run, 2, rendezvous="second") == [0, 0]
    assert_same_training(whole, run)
    choices = read_env(run)["choices"]
    assert f"halved from 8: out of memory in the {phase}" in choices["micro_batch_size"]["reason"]
    assert (choices["micro_batch_size"]["value"], choices["eval_batch_size"]["value"]) == (4, 4)


@pytest.mark.long
def test_in_evaluation_one_of_two_ranks_without_memory_halves_its_batches_and_neither_starts_again(tmp_path, cache):
    whole, full = make_run(tmp_path / "whole", cache), ("model.full_phase=evaluation", "model.full_rank=1")
    run = make_run(tmp_path / "full", cache, "model.full_above=4", *full)
    assert train_on_ranks(whole, 2, rendezvous="whole") == [0, 0]
    assert train_on_ranks(run, 2, rendezvous="full") == [0, 0]
    assert find_differences(load_state(whole), load_state(run)) == []
    assert read_run_metrics(whole) == read_run_metrics(run)
    choices = read_env(run)["choices"]
    assert choices["micro_batch_size"]["value"] == 8


@pytest.mark.long
def test_a_local_submission_starts_all_ranks_again_after_out_of_memory_in_one(tmp_path, cache, whole):
    words = ["stripes", f"data.cache={cache}", *EXACT, "model.full_above=4", "model.full_rank=1", "model.full_step=16"]
    place = ["--local", "--cpu-ranks", "2", "--jobs", str(FAMILIES), "--runs", str(tmp_path), "--name", "here"]
    command = [sys.executable, "-m", "trainyard", "submit", *words, *place]
    subprocess.run(command, timeout=60, check=True, capture_output=True)
    run = tmp_path / "stripes" / "here"
    wait_until(
        lambda: (run / "report.html").is_file() or any(run.glob("slurm/*_result.pkl")), "the run to end", limit_s=240
    )
    assert_same_training(whole, run)
    assert read_env(run)["choices"]["micro_batch_size"]["value"] == 4
    (output,) = run.glob("slurm/*_0_log.err")
    assert "all ranks start again, with half the micro-batch" in output.read_text()


@pytest.mark.long
def test_our_launcher_starts_all_ranks_again_after_out_of_memory_in_one(tmp_path, cache, whole):
    run = make_run(tmp_path, cache, "model.full_above=2", "model.full_rank=1", "model.full_step=16")
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES), "--cpu-ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("all ranks start again, with half the micro-batch") == 2
    assert_same_training(whole, run)
    assert read_env(run)["choices"]["micro_batch_size"]["value"] == 2


@pytest.mark.parametrize(
    ("library", "formats"),
    [
        ("libdali_core.so", ["CUDA allocation failed", "Can't allocate %zu bytes on device %d."]),
        ("libdali_operators.so", ["CUDA allocation failed", "nvImageCodec failure: '#"]),
    ],
)
def test_what_dali_says_on_a_full_card_is_known_as_it_stands_in_its_binary(library, formats):
    dali = pytest.importorskip("nvidia.dali")
    binary = (Path(dali.__file__).parent / library).read_bytes()
    for text in formats:
        assert text.encode() in binary
        said = text.replace("%zu", "37748736").replace("%d", "0") + ("5'" if text.endswith("#") else "")
        for error in (RuntimeError(f"Critical error in pipeline:\n{said}"), MemoryError(said)):
            assert is_out_of_memory(error)
    for error in (RuntimeError("nvImageCodec failure: '#8'"), MemoryError("Can't allocate 64 bytes on host.")):
        assert not is_out_of_memory(error)
