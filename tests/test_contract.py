"""The contract of a job, tested for every folder in jobs/ and for a copy of one of them."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.cuda_operators import find_refused_operators
from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train, wait_for_lines
from trainyard import scoring
from trainyard.cli import main
from trainyard.config import compose as configs
from trainyard.config.families import load_family
from trainyard.data.shards import ShardSet
from trainyard.report.run_page import write_report
from trainyard.runs.evaluations import read_evaluations
from trainyard.runs.events import select_metrics
from trainyard.runs.folder import read_env
from trainyard.tools import check_family
from trainyard.tools.embeddings import CHECKPOINT, open_embeddings, write_embeddings
from trainyard.train import precision
from trainyard.train.module import TrainModule

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "jobs"
FAMILIES = sorted(path.parent.name for path in JOBS.glob("*/config.py"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def cache(scratch):
    return scratch / "data"


@pytest.fixture(scope="module")
def subjects(scratch):
    return {family: check_family.Family(JOBS, family, scratch) for family in FAMILIES}


def test_families_are_found():
    assert "fingerprint" in FAMILIES


IN_PROCESS = [name for name, check in check_family.CHECKS.items() if check is not check_family.check_resume]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", IN_PROCESS)
def test_every_family_meets_the_contract(name, family, subjects):
    check_family.CHECKS[name](subjects[family])


NETWORKS = {
    "antispoof": [["model.name=seresnet", "loss.name=am_softmax", "frontend.mean=sliding"]],
    "fingerprint": [["model.stn=true", "head.name=ce"]],
    "pricing": [["objective=text"]],
    "tinydet": [["model.variant=cond"], ["model.variant=vanilla"], ["model.variant=fcos"]],
    "twins": [["model.stem=conv"], ["objective=image"]],
}
"""Options with which a family computes with other operators than its smoke preset does."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_of_a_step_has_a_deterministic_kernel_on_a_gpu(family, subjects, monkeypatch):
    subject = subjects[family]
    monkeypatch.setattr(precision, "can_use_grid_sample", lambda device: False)  # computes what a GPU would
    batch = subject.read_micro_batch().batch
    for options in [[], *NETWORKS.get(family, [])]:
        module = subject.build(configs.apply_overrides(subject.config, options) if options else None)
        assert find_refused_operators(lambda: module(batch)["loss"].backward()) == set(), options  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stopped_run_resumes_bitwise_equal(family, cache, tmp_path):
    options = ["log_every=1st", f"data.cache={cache}"]
    whole, stopped = (new_run(tmp_path, *options, job=f"{family}_smoke", jobs=JOBS) for _ in range(2))
    assert train(whole, jobs=JOBS) == 0
    assert ("sampling" in read_env(whole)["choices"]) == (family == "tinydet"), "and nothing else samples maps"
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
def test_a_family_that_predicts_does_so_from_a_checkpoint_alone(family, cache, tmp_path, capsys):
    pack = load_family(JOBS, family, "pack")
    if not hasattr(pack, "unlabelled"):
        pytest.skip(f"{family} has no predictions for a table")
    run = new_run(tmp_path, "max_duration=1st", f"data.cache={cache}", job=f"{family}_smoke", jobs=JOBS)
    assert train(run, jobs=JOBS) == 0
    config = configs.load_config(run / "config.yaml", JOBS)
    raw = next(cache.glob(f"{family}-synthetic-*"))
    samples = list(pack.unlabelled(raw, config, ShardSet(Path(config.data.path)).artifacts))
    assert main(["predict", str(run), str(raw), str(tmp_path / "out.csv"), "--jobs", str(JOBS)]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    module = load_family(JOBS, family, "module")
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
    check_matcher(run, raw, tmp_path / "all.safetensors", capsys, has_matcher=bool(kind.matcher))


def check_evaluation(run: Path, raw: Path, capsys) -> None:
    """Check that `evaluate` scores the run's own split as the run did, and lists raw files as packing does."""
    config = configs.load_config(run / "config.yaml", JOBS)
    *during, own = read_run_metrics(run)
    resamples = bool(getattr(config, "evaluation", None)) and hasattr(config.evaluation, "bootstrap_draws")
    ends = ["_low" in " ".join(line) or "draws_lost" in " ".join(line) for line in (during[-1], own)]
    assert during[-1]["split"] == "val" and ends == [False, resamples], "intervals are computed at the end alone"
    packed = Path(config.data.path)
    options = ["report.samples=on", *["evaluation.baseline_pairs=4"] * (config.family == "fingerprint")]
    assert main(["evaluate", str(run), str(packed), *options, "--split", own["split"], "--jobs", str(JOBS)]) == 0
    shown = capsys.readouterr().out
    (found,) = read_evaluations(run)
    line, *baselines = found.lines
    again = {name: line[name] for name in select_metrics(own)}
    assert again == pytest.approx(select_metrics(own), rel=1e-4, abs=1e-6, nan_ok=True)
    assert bool(baselines) == (config.family != "tinydet"), "it has no method without a network"
    assert all(set(select_metrics(one)) <= set(select_metrics(line)) for one in baselines)
    assert all(one["system"] in shown for one in found.lines)
    assert found.about["seen_in_training"]["samples"] == 0
    figures, samples = ({path.name for path in (found.path / name).iterdir()} for name in ("figures", "samples"))
    own_figures, own_samples = (
        {path.name.removeprefix(f"{own['split']} - ") for path in run.glob(f"{folder}/*.png")}
        for folder in ("figures", "samples")
    )
    assert figures - {"Error trade-off of all systems.png"} == own_figures and samples
    assert own_samples == (samples if config.report.samples == "on" else set())
    page = write_report(run).read_text()
    assert f"{found.path / 'samples'} " in page and all(name.removesuffix(".png") in page for name in samples)
    shutil.rmtree(found.path / "samples")
    shutil.rmtree(run / "samples", ignore_errors=True)
    page = write_report(run).read_text()
    assert not any(name.removesuffix(".png") in page for name in samples), "whose images are deleted"


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
    cut = out / f"cut{Path(one).suffix}"
    cut.write_bytes((raw / one).read_bytes()[:300])
    assert main(["compare", str(run), str(raw / one), str(cut), "--fmr", "0.5", "--jobs", str(JOBS)]) == 2
    assert f"2: {cut}: " in capsys.readouterr().err
    (run / "validation_scores.safetensors").unlink()
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
    assert float(lines[0]["score"]) == pytest.approx(max(own.values()), abs=1e-6)
    best = own.get(one + lines[0]["gallery"], own.get(lines[0]["gallery"] + one))
    assert best == pytest.approx(max(own.values()), abs=1e-6)
    assert "rank 1" not in type_line("search", run, raw / one, path, "--top", 3)
    write_embeddings(out / "b.safetensors", [found.vectors], found.keys, identities=None, metadata={CHECKPOINT: "0"})
    assert main(["search", str(run), str(out / "b.safetensors"), str(path), "--jobs", str(JOBS)]) == 2
    assert f"Embed the files again: trainyard embed {run} FOLDER" in capsys.readouterr().err


def check_matcher(run: Path, raw: Path, gallery: Path, capsys, *, has_matcher: bool) -> None:
    """Check that a search that the matcher orders prints the scores of `compare --matcher`, best first."""
    keys = open_embeddings(gallery).keys[:6]
    if has_matcher:  # a gallery of these six, so that embeddings that learned nothing leave none out
        few, gallery = gallery.with_name("few"), gallery.with_name("few.safetensors")
        few.mkdir()
        for key in keys:
            shutil.copy(raw / key, few)
        raw = few
        assert main(["embed", str(run), str(raw), str(gallery), "--jobs", str(JOBS)]) == 0
    probe = raw / keys[0]
    compared = ["compare", str(run), str(probe), str(raw / keys[1]), "--matcher", "--fmr", "0.5", "--jobs", str(JOBS)]
    searched = ["search", str(run), str(probe), str(gallery), "--rerank", "6", "--top", "2", "--jobs", str(JOBS)]
    if not has_matcher:
        for words in (compared, [*searched, "--files", str(raw)]):
            assert main(words) == 2 and "has no matcher" in capsys.readouterr().err
        return
    assert main(searched) == 2 and "--files FOLDER belong together" in capsys.readouterr().err
    assert main([*searched, "--top", "7", "--files", str(raw)]) == 2
    assert "--top 7: expected 1 to 6" in capsys.readouterr().err
    assert main([*searched, "--files", str(probe)]) == 2
    assert f"--files {probe}: has no '" in capsys.readouterr().err
    capsys.readouterr()
    assert main([*searched, "--files", str(raw)]) == 0
    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[2:4])
    assert first[1:3] == ["1", keys[0]] and second[1] == "2" and float(first[3]) > float(second[3])
    compared[3] = str(raw / second[2])
    assert main(compared) == 0
    shown = capsys.readouterr().out
    assert float(shown.split()[1]) == pytest.approx(float(second[3]), abs=1e-5) and "of the evaluation " in shown
    (evaluation,) = read_evaluations(run)
    resized = {**evaluation.about, "packing": {**evaluation.about["packing"], "store": "input-png"}}
    (evaluation.path / "evaluation.json").write_text(json.dumps(resized))
    assert main(compared) == 2 and f"evaluate {run} FOLDER packing.store=keep" in capsys.readouterr().err
    shutil.rmtree(run / "evaluations")
    assert main(compared) == 2 and f"trainyard evaluate {run} FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copied_folder_is_a_family_of_its_own(tmp_path):
    jobs = tmp_path / "mine"
    shutil.copytree(JOBS / "fingerprint", jobs / "thumbs", ignore=shutil.ignore_patterns("__pycache__", "*.yaml"))
    (jobs / "__init__.py").touch()
    (jobs / "thumbs" / "test_fingerprint.py").rename(jobs / "thumbs" / "test_thumbs.py")
    for name in ("fingerprint", "fingerprint_smoke"):
        preset = (JOBS / "fingerprint" / f"{name}.yaml").read_text().replace("[fingerprint, ", "[thumbs, ")
        (jobs / "thumbs" / f"{name.replace('fingerprint', 'thumbs')}.yaml").write_text(preset)
    thumbs = check_family.Family(jobs, "thumbs", tmp_path)
    check_family.check_packing(thumbs)
    check_family.check_loss(thumbs)
