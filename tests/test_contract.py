"""The contract of a job, tested for every folder in jobs/ and for a copy of one of them."""

import csv
import importlib
import io
import os
import re
import shlex
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train, wait_for_lines
from trainyard import config as configs
from trainyard import scoring
from trainyard.cli import main
from trainyard.data.loader import MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.data.shards import Audio, Ragged, ShardSet
from trainyard.runs.evaluations import read_evaluations
from trainyard.runs.events import select_metrics
from trainyard.settings import TrainConfig
from trainyard.tools.embeddings import CHECKPOINT, open_embeddings, write_embeddings
from trainyard.train.module import DataInfo, TrainModule
from trainyard.train.step import TrainState, make_optimizer, train_step

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "jobs"
FAMILIES = sorted(path.parent.name for path in JOBS.glob("*/config.py"))


def load_family_tests(jobs_dir: Path, family: str) -> ModuleType:
    """Return a family's test module, which defines `perfect_rows`."""
    configs.load_family(jobs_dir, family, "config")  # puts the folder on the import path
    return importlib.import_module(f"{jobs_dir.name}.{family}.test_{family}")


def prepare_family(jobs_dir: Path, family: str, root: Path) -> tuple[TrainConfig, ShardSet]:
    """Return the family's small config, with its data packed and open."""
    config = configs.compose(f"{family}_smoke", [f"data.cache={root}"], jobs_dir)
    config = prepare_data(config, jobs_dir)
    return config, ShardSet(Path(config.data.path))


def build_module(jobs_dir: Path, config: TrainConfig, data: ShardSet) -> tuple[TrainModule, dict[str, np.ndarray]]:
    """Return the family's model and its splits."""
    splits = configs.load_family(jobs_dir, config.family, "pack").splits(data.columns, data.vocabulary, config)
    torch.manual_seed(config.seed)
    info = DataInfo.from_shards(data, splits["train"])
    return configs.load_family(jobs_dir, config.family, "module").build(config, info), splits


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_families_are_found():
    assert "fingerprint" in FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(configs.find_jobs(JOBS)))
def test_every_preset_loads_and_begins_with_a_comment_on_its_purpose(preset):
    config = configs.compose(preset, [], JOBS)
    assert config.job == preset
    assert all(option.doc for option in configs.list_options(config))
    assert configs.find_jobs(JOBS)[preset].read_text().startswith("# ")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_base_preset_a_readme_and_the_usual_files(family):
    names = {path.name for path in (JOBS / family).iterdir()}
    assert {"config.py", "pack.py", "module.py", "README.md", f"test_{family}.py"} <= names
    assert {f"{family}.yaml", f"{family}_smoke.yaml"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_packed_reads_back_equal(family, cache):
    check_packing(JOBS, family, cache)


def check_packing(jobs_dir: Path, family: str, cache: Path) -> None:
    config, data = prepare_family(jobs_dir, family, cache)
    raw = next(cache.glob(f"{family}-synthetic-*"))
    pack = configs.load_family(jobs_dir, family, "pack")
    samples = list(pack.samples(raw, config))
    artifacts = (pack.fit_artifacts(raw, config),) if hasattr(pack, "fit_artifacts") else ()
    assert data.artifacts == dict(*artifacts)
    assert len(samples) == data.count > 10
    assert data.read_keys(np.arange(data.count)) == [sample.key for sample in samples]
    for i, sample in enumerate(samples):
        for name, value in {**sample.columns, **sample.load(*artifacts)}.items():
            if isinstance(value, Ragged | Audio):
                stored, found = data.read_arrays(name, np.array([i]))[0], getattr(value, "values", None)
                found = value.data if found is None else found
                assert stored.tobytes() == (found if isinstance(found, bytes) else found.tobytes())
            elif isinstance(value, bytes):
                assert data.read_bytes(name, np.array([i]))[0].tobytes() == value
            elif isinstance(value, np.ndarray):
                read = np.empty((1, *value.shape), dtype=value.dtype)
                data.read_into(name, np.array([i]), read)
                assert np.array_equal(read[0], value)
            elif isinstance(value, str):
                assert data.vocabulary[name][data.columns[name][i]] == value
            else:
                assert data.columns[name][i] == value


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_sample_and_train_is_among_them(family, cache):
    config, data = prepare_family(JOBS, family, cache)
    _, splits = build_module(JOBS, config, data)
    assert "train" in splits and "val" in splits
    ids = np.concatenate(list(splits.values()))
    assert len(np.unique(ids)) == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_falls_on_one_batch(family, cache):
    check_loss(JOBS, family, cache)


def check_loss(jobs_dir: Path, family: str, cache: Path) -> None:
    from contextlib import nullcontext

    config, data = prepare_family(jobs_dir, family, cache)
    module, splits = build_module(jobs_dir, config, data)
    micro = read_micro_batch(config, data, splits)
    optimizer = make_optimizer(module, config.optimizer)
    state = TrainState(module, module, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, 0.0)
    losses = [
        float(
            train_step(state, [micro], lr=3e-3, world_size=1, seed=0, clip_grad_norm=1.0, autocast=nullcontext).losses[
                "loss"
            ]
        )
        for _ in range(12)
    ]
    assert min(losses[-3:]) < 0.9 * losses[0], losses


def read_micro_batch(config: TrainConfig, data: ShardSet, splits: dict[str, np.ndarray]) -> MicroBatch:
    """Return the first micro-batch of training."""
    from trainyard.data.loader import Loader
    from trainyard.data.order import shuffle

    loader = Loader.from_config(config, data, device=torch.device("cpu"), decode="cpu")
    stream = loader.train(
        lambda epoch: shuffle(splits["train"], seed=0, epoch=epoch, global_batch_size=16),
        epoch=0, start=0, micro_batch_size=0,
    )  # fmt: skip
    micro = next(stream)
    stream.close()
    return micro


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_parameter_gets_a_gradient_also_in_the_shallowest_network(family, cache):
    config, data = prepare_family(JOBS, family, cache)
    depths = [f for f in fields(config.model) if f.name.endswith("layers") and isinstance(f.metadata["low"], int)]
    shallowest = [f"model.{f.name}={f.metadata['low']}" for f in depths]
    for options in [[], shallowest] if shallowest else [[]]:
        config = configs.compose(f"{family}_smoke", [f"data.cache={cache}", *options], JOBS)
        module, splits = build_module(JOBS, config, data)
        module(read_micro_batch(config, data, splits).batch)["loss"].backward()
        untrained = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        assert untrained == [], f"{options}: ranks would wait for these gradients forever"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stopped_run_resumes_bitwise_equal(family, cache, tmp_path):
    options = ["log_every=1st", f"data.cache={cache}"]
    whole, stopped = (new_run(tmp_path, *options, job=f"{family}_smoke", jobs=JOBS) for _ in range(2))
    assert train(whole, jobs=JOBS) == 0
    process = start(stopped, jobs=JOBS)
    wait_for_lines(stopped, 2, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(240)
    assert process.exitcode == 85, "expected it to stop in the middle"
    assert train(stopped, jobs=JOBS) == 0
    assert find_differences(load_state(whole), load_state(stopped)) == []
    assert read_run_metrics(whole) == read_run_metrics(stopped)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_perfect_predictor_scores_perfectly(family, cache):
    config, data = prepare_family(JOBS, family, cache)
    module, splits = build_module(JOBS, config, data)
    rows, expected = load_family_tests(JOBS, family).perfect_rows(data.columns, splits["val"])
    metrics = module.score(rows)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert module.monitor[0] in metrics
    for title, png in module.report_figures(rows).items():
        assert title and Image.open(io.BytesIO(png)).format == "PNG"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_predicts_does_so_from_a_checkpoint_alone(family, cache, tmp_path, capsys):
    pack = configs.load_family(JOBS, family, "pack")
    if not hasattr(pack, "unlabelled"):
        pytest.skip(f"{family} has no predictions for a table")
    run = new_run(tmp_path, "max_duration=1st", f"data.cache={cache}", job=f"{family}_smoke", jobs=JOBS)
    assert train(run, jobs=JOBS) == 0
    config = configs.thaw(run / "config.yaml", JOBS)
    raw = next(cache.glob(f"{family}-synthetic-*"))
    samples = list(pack.unlabelled(raw, config, ShardSet(Path(config.data.path)).artifacts))
    assert main(["predict", str(run), str(raw), str(tmp_path / "out.csv"), "--jobs", str(JOBS)]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    module = configs.load_family(JOBS, family, "module")
    kind = next(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__
                and issubclass(v, TrainModule))  # fmt: skip
    assert (kind.select_embeddings is TrainModule.select_embeddings) == (
        kind.select_pair_scores is TrainModule.select_pair_scores
    )
    check_evaluation(run, raw, capsys)
    if kind.select_embeddings is TrainModule.select_embeddings:
        assert len(lines) == len(samples) > 10
        assert main(["embed", str(run), str(raw), str(tmp_path / "a.npz"), "--jobs", str(JOBS)]) == 2
        assert f"{family} has no embeddings" in capsys.readouterr().err
        return
    assert len(lines) == len(samples) * (len(samples) - 1) // 2 > 45
    check_embeddings(run, raw, lines, tmp_path, capsys)


def check_evaluation(run: Path, raw: Path, capsys) -> None:
    """Check that `evaluate` scores the run's own split as the run did, and lists raw files as packing does."""
    config = configs.thaw(run / "config.yaml", JOBS)
    *during, own = read_run_metrics(run)
    resamples = bool(getattr(config, "evaluation", None)) and hasattr(config.evaluation, "bootstrap_draws")
    ends = ["_low" in " ".join(line) or "draws_lost" in " ".join(line) for line in (during[-1], own)]
    assert during[-1]["split"] == "val" and ends == [False, resamples], "intervals are computed at the end alone"
    packed, options = Path(config.data.path), ["evaluation.baseline_pairs=4"] * (config.family == "fingerprint")
    assert main(["evaluate", str(run), str(packed), *options, "--split", own["split"], "--jobs", str(JOBS)]) == 0
    shown = capsys.readouterr().out
    (found,) = read_evaluations(run)
    line, *baselines = found.lines
    assert select_metrics(line) == pytest.approx(select_metrics(own), rel=1e-4, abs=1e-6, nan_ok=True)
    assert baselines and all(set(select_metrics(one)) <= set(select_metrics(line)) for one in baselines)
    assert all(one["system"] in shown for one in found.lines)
    assert found.about["seen_in_training"]["samples"] == 0
    assert {path.name for path in (found.path / "figures").iterdir()} == {
        path.name.removeprefix(f"{own['split']} - ") for path in (run / "exhibits").iterdir()
    }
    pack, data = configs.load_family(JOBS, config.family, "pack"), ShardSet(packed)
    listed, artifacts = pack.list_labelled(raw, config, data.artifacts)
    samples = list(listed)
    assert [sample.key for sample in samples] == data.read_keys(np.arange(data.count)) and artifacts == data.artifacts


def check_embeddings(run: Path, raw: Path, pairs: list[dict[str, str]], out: Path, capsys) -> None:
    """Check that embed, compare, search and listed pairs give the scores of `predict`, with or without the data."""

    def type_line(*words: object) -> str:
        code = main([*map(str, words), "--jobs", str(JOBS)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    path = out / "all.safetensors"
    assert f"next: trainyard search {run} PROBES {path}" in type_line("embed", run, raw, path, "--identity", "(.+)")
    found = open_embeddings(path)
    index = {key: i for i, key in enumerate(found.keys)}
    for pair in pairs[:: len(pairs) // 20]:
        score = scoring.compare_embeddings(*(found.vectors[[index[pair[name]]]] for name in ("one", "other")))
        assert float(pair["score"]) == score[0]
    one, other = pairs[0]["one"], pairs[0]["other"]
    shown = type_line("compare", run, raw / one, raw / other, "--fmr", "0.5")
    score, threshold = (float(line.split()[1]) for line in shown.splitlines()[:2])
    # Batches of another size may sum in another order.
    assert score == pytest.approx(float(pairs[0]["score"]), abs=1e-5)
    assert ("verdict    match" in shown) == (score >= threshold) or score == threshold, "printed to six digits"
    assert "impostor trials (" in shown
    (run / "validation_scores.safetensors").unlink()  # as of an older version
    assert main(["compare", str(run), str(raw / one), str(raw / other), "--jobs", str(JOBS)]) == 2
    assert f"writes them: trainyard resume {run}" in capsys.readouterr().err
    assert train(run, jobs=JOBS) == 0  # what resume does
    capsys.readouterr()
    assert type_line("compare", run, raw / one, raw / other, "--fmr", "0.5") == shown
    assert main(["compare", str(run), str(raw / one), str(raw / other), "--fmr", "1e-9", "--jobs", str(JOBS)]) == 2
    command = re.search("type (trainyard compare .*)", capsys.readouterr().err)
    assert command is not None and "verdict" in type_line(*shlex.split(command[1])[1:])
    (out / "pairs.csv").write_text(f"one,other\n{other},{one}\n")
    assert "1 pair is" in type_line("predict", run, raw, out / "two.csv", "--pairs", out / "pairs.csv")
    assert (out / "two.csv").read_text().splitlines()[1] == f"{other},{one},{pairs[0]['score']}"
    (out / "pairs.csv").write_text(f"one,other\n{other},x{one}\n")
    typed = ["predict", str(run), str(raw), str(out / "no.csv"), "--pairs", str(out / "pairs.csv"), "--jobs", str(JOBS)]
    assert main(typed) == 2 and f"'x{one}' is no sample of the raw folder. Nearest: " in capsys.readouterr().err
    shown = type_line("search", run, path, path, "--top", 2, "--out", out / "found.csv")
    assert f"{len(index):,} probes in {len(index):,} gallery rows, the best 2 of each" in shown
    with (out / "found.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["probe"] == one and line["rank"] == "1"]
    own = {p["one"] + p["other"]: float(p["score"]) for p in pairs if one in (p["one"], p["other"])}
    assert (
        float(lines[0]["score"])
        == max(own.values())
        == own.get(one + lines[0]["gallery"], own.get(lines[0]["gallery"] + one))
    )
    assert "rank 1" not in type_line("search", run, raw / one, path, "--top", 3)
    write_embeddings(out / "b.safetensors", [found.vectors], found.keys, identities=None, metadata={CHECKPOINT: "0"})
    assert main(["search", str(run), str(out / "b.safetensors"), str(path), "--jobs", str(JOBS)]) == 2
    assert f"Embed the files again: trainyard embed {run} FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copied_folder_is_a_family_of_its_own(tmp_path):
    jobs = tmp_path / "mine"
    shutil.copytree(JOBS / "fingerprint", jobs / "thumbs", ignore=shutil.ignore_patterns("__pycache__", "*.yaml"))
    (jobs / "__init__.py").touch()
    (jobs / "thumbs" / "test_fingerprint.py").rename(jobs / "thumbs" / "test_thumbs.py")
    for name in ("fingerprint", "fingerprint_smoke"):
        preset = (JOBS / "fingerprint" / f"{name}.yaml").read_text().replace("[fingerprint, ", "[thumbs, ")
        (jobs / "thumbs" / f"{name.replace('fingerprint', 'thumbs')}.yaml").write_text(preset)
    check_packing(jobs, "thumbs", tmp_path / "cache")
    check_loss(jobs, "thumbs", tmp_path / "cache")
