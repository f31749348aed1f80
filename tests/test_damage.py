"""Damage to a run: every flipped bit is noticed or changes nothing, and no damaged file ends a run for ever."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from tests.training import FAMILIES, find_differences, load_state, new_run, read_run_metrics, train
from trainyard.cli import main
from trainyard.config import compose as configs
from trainyard.config.families import load_family
from trainyard.data.shards import ShardError, ShardSet
from trainyard.errors import UserError
from trainyard.report.run_page import format_summary, write_report
from trainyard.runs.changes import check_unchanged, find_changes
from trainyard.runs.events import read_events, read_metrics, read_sampled_metrics, read_thinned_metrics
from trainyard.runs.folder import read_env
from trainyard.runs.manifest import CheckpointError, list_checkpoints
from trainyard.runs.why import explain_run
from trainyard.train import checkpoint
from trainyard.train.recorder import Recorder

JOBS = ["--jobs", str(FAMILIES)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints, the older of which is the best."""
    module = load_family(FAMILIES, "stripes", "module").StripesModule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "monitor", ("accuracy", "min"))  # so that training makes it worse
        run = new_run(tmp_path_factory.mktemp("done"), "max_duration=3ep", "checkpoint.keep_last=1")
        assert train(run) == 0
    steps = [entry.step for entry in list_checkpoints(run / "checkpoints")]
    assert len(steps) == 2, steps
    return run


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A copy of that run, which a test may damage."""
    return Path(shutil.copytree(done, tmp_path / "runs" / "stripes" / "mine"))


def refuse(run: Path) -> str:
    with pytest.raises(UserError) as raised:
        check_unchanged(run)
    return str(raised.value)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def change_loss(run: Path) -> None:
    """Change a digit of the first loss, and no length."""
    text = (run / "metrics.jsonl").read_text()
    digit = text.index('"loss": ') + len('"loss": ')
    (run / "metrics.jsonl").write_text(f"{text[:digit]}{'8' if text[digit] == '9' else '9'}{text[digit + 1 :]}")


# Flipped bits


class Detected(Exception):
    """The run noticed the damage."""


def open_run(run: Path) -> dict[str, Any]:
    """Read a run as a resume does, without training, and return everything that it would use.

    Raises:
        Detected: a file is refused, or a checkpoint is named as damaged.
    """

    def detect(message: Any) -> None:
        raise Detected(message)

    sink = logger.add(detect, level="WARNING", catch=False)
    try:
        check_unchanged(run)
        config = configs.load_config(run / "config.yaml", FAMILIES)
        found = checkpoint.load_newest_valid(run / "checkpoints")
        assert found is not None
        Recorder.rewind(run, found[1]["metrics_position"], step=found[0].step)
        data = ShardSet(Path(config.data.path))
        data.close()
        assert data.fingerprint == found[1]["data"]
        metrics = (run / "metrics.jsonl").read_bytes()
        return {"config": config, "state": found[1], "step": found[0].step, "metrics": metrics, "env": read_env(run)}
    except UserError as error:
        raise Detected(error) from error
    finally:
        logger.remove(sink)


def list_flips(run: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    """Yield file, offset and bit, with offsets in `count` equal regions of each of the run's five files."""
    newest = list_checkpoints(run / "checkpoints")[0].path
    generator = random.Random(15)
    for path in (newest, newest.with_suffix(".json"), *(run / n for n in ("config.yaml", "env.json", "metrics.jsonl"))):
        size = path.stat().st_size
        for region in range(count):
            begin, end = (size * r // count for r in (region, region + 1))
            yield path, generator.randrange(begin, max(end, begin + 1)), generator.randrange(8)


def count_detected(run: Path, flips: Iterator[tuple[Path, int, int]]) -> tuple[int, int]:
    """Flip one bit at a time; return how many were noticed, and how many changed nothing that is used."""
    flips_of_run = list(flips)
    before = {path: path.read_bytes() for path, _, _ in flips_of_run} | {
        run / "metrics.jsonl": (run / "metrics.jsonl").read_bytes()
    }
    expected = open_run(run)
    detected = harmless = 0
    for path, offset, bit in flips_of_run:
        for name, content in before.items():
            name.write_bytes(content)
        damaged = bytearray(before[path])
        damaged[offset] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            found = open_run(run)
        except Detected as error:
            is_place_of_data = path.name == "config.yaml" and isinstance(error.__cause__, ShardError)  # data.path
            assert str(run) in str(error) or is_place_of_data, error
            detected += 1
        else:
            assert is_same(found, expected), f"bit {bit} of byte {offset} of {path.name} is used, and nobody noticed"
            harmless += 1
    return detected, harmless


def is_same(a: Any, b: Any) -> bool:
    """Compare bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


@pytest.mark.slow
def test_a_flipped_bit_of_any_file_of_a_run_is_noticed_or_changes_nothing(run):
    detected, harmless = count_detected(run, list_flips(run, 12))
    assert detected + harmless == 60 and detected > 45


@pytest.mark.long
def test_six_hundred_flipped_bits_are_noticed_or_change_nothing(run):
    detected, harmless = count_detected(run, list_flips(run, 120))
    assert detected + harmless == 600 and detected > 450


# Files that the checkpoint recorded


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        ("config.yaml", "lr: 0.01", "lr: 0.02", "since the newest checkpoint: optimizer.lr is 0.02, not 0.01."),
        ("config.yaml", "seed: 0", "seed: 1", "since the newest checkpoint: seed is 1, not 0."),
        ("config.yaml", "keep_last: 1", "keep_last: 9", "checkpoint.keep_last is 9, not 1."),
        ("config.yaml", "\njob: stripes", "Jjob: stripes", "its options do not match the digest above them"),
        ("config.yaml", "seed: 0", "seed: [", "config.yaml: line "),
        ("env.json", '"commit"', '"kommit"', "env.json: was changed: its content does not match the digest in it."),
        ("env.json", '"device"', '"decive"', "env.json: was changed: its content does not match the digest in it."),
        ("env.json", '"sha256"', '"shc256"', "env.json: was changed: its content does not match the digest in it."),
        ("env.json", "{", "[", "env.json: is damaged, not JSON"),
        ("metrics.jsonl", '"loss": ', '"loss": 9', "metrics.jsonl: was changed: its first"),
        ("metrics.jsonl", '"test", "accuracy": 0', '"test", "accuracy": 1', "metrics.jsonl: was changed: its first"),
    ],
)  # fmt: skip
def test_a_changed_file_is_refused_by_resume_and_named_by_why(run, capsys, name, old, new, found):
    assert find_changes(run) == []
    edit(run / name, old, new)
    assert main(["resume", str(run), *JOBS]) == 2
    error = capsys.readouterr().err
    assert f"{run}/{name}: " in error and found in error and "Restore it" in error and "Traceback" not in error
    assert found in explain_run(run)


@pytest.mark.slow
def test_the_report_says_which_files_were_changed(run):
    edit(run / "metrics.jsonl", '"loss": ', '"loss": 9')
    assert "metrics.jsonl: was changed" in write_report(run).read_text()
    assert "metrics.jsonl: was changed" in format_summary(run)


def test_a_file_of_another_run_is_refused_although_its_digest_is_right(run, tmp_path):
    other = new_run(tmp_path, "seed=7", "max_duration=3ep")
    shutil.copy(other / "config.yaml", run / "config.yaml")
    assert "seed is 7, not 0" in refuse(run)
    (run / "config.yaml").write_bytes((other / "config.yaml").read_bytes().replace(b"# SHA", b"# sha"))
    assert "seed is 7, not 0" in refuse(run)
    shutil.copy(other / "env.json", run / "env.json")
    assert "env.json: was changed since the newest checkpoint: created" in refuse(run)


@pytest.mark.slow
def test_changed_files_are_restored_or_accepted_as_the_message_says(run, capsys):
    edit(run / "config.yaml", "lr: 0.01", "lr: 0.02")
    edit(run / "env.json", "{", "[")
    assert f"trainyard resume {run} --changed-files restore" in refuse(run)
    assert main(["resume", str(run), "--changed-files", "restore", *JOBS]) == 0
    assert configs.load_config(run / "config.yaml", FAMILIES).optimizer.lr == 0.01 and "created" in read_env(run)
    assert find_changes(run) == []

    change_loss(run)
    edit(run / "config.yaml", "lr: 0.01", "lr: 0.02")
    assert main(["resume", str(run), "--changed-files", "restore", *JOBS]) == 2
    assert "metrics.jsonl: was changed" in capsys.readouterr().err, "no checkpoint has them"
    edit(run / "config.yaml", "lr: 0.01", "lr: 0.02")
    assert main(["resume", str(run), "eval_batch_size=7", "--changed-files", "accept", *JOBS]) == 0
    config = configs.load_config(run / "config.yaml", FAMILIES)
    assert (config.optimizer.lr, config.eval_batch_size) == (0.02, 7) and find_changes(run) == []
    assert "accepted" in [event["event"] for event in read_events(run)]


def test_zeros_that_a_power_cut_left_after_the_last_flush_are_no_damage(run):
    events, results = read_events(run), read_run_metrics(run)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\0" * 300 + b'a": "rest"}\n')
    with (run / "metrics.jsonl").open("ab") as file:  # a train line of which the second page is there
        file.write(b'{"kind": "train", "step": 99, ' + b"\0" * 300 + b"}\n")
    metrics = read_metrics(run)
    assert read_events(run) == events and metrics[-1]["step"] < 99
    assert read_sampled_metrics(run, most=1000) == metrics
    assert read_thinned_metrics(run, most=1000) == (metrics, 1)
    assert train(run) == 0
    assert b"\0" not in (run / "events.jsonl").read_bytes() + (run / "metrics.jsonl").read_bytes()
    assert read_run_metrics(run) == results and read_events(run)[: len(events)] == events


def test_a_legal_change_of_an_option_is_no_damage(run):
    config = configs.load_config(run / "config.yaml", FAMILIES)
    configs.save_config(configs.apply_overrides(config, ["checkpoint.keep_last=5"]), run / "config.yaml")
    assert find_changes(run) == []
    configs.save_config(configs.apply_overrides(config, ["seed=5"]), run / "config.yaml")
    assert "seed is 5, not 0" in refuse(run)


# The best checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_a_lost_best_checkpoint_does_not_end_a_run(run, damage, tmp_path, capfd):
    newest, best = list_checkpoints(run / "checkpoints")
    if damage == "deleted":
        best.path.unlink()
        reason = f"the one of step {best.step} is missing from {run}/checkpoints"
    else:
        data = bytearray(best.path.read_bytes())
        data[len(data) // 2] ^= 1
        best.path.write_bytes(data)
        reason = f"{best.path.name} is damaged (SHA-256 is "
    instead = f"{newest.path.name}, the newest undamaged one, is used instead"
    assert main(["resume", str(run), *JOBS]) == 0
    assert reason in (error := capfd.readouterr().err) and instead in error
    choice = read_env(run)["choices"]["final_weights"]
    assert choice["value"] == f"step {newest.step}" and reason in choice["reason"] and instead in choice["reason"]
    assert instead in (run / "report.html").read_text()
    assert main(["export", str(run), str(tmp_path / "w.safetensors"), *JOBS]) == 0
    assert instead in (output := capfd.readouterr()).err and f"step {newest.step} -> " in output.out


@pytest.mark.slow
def test_the_report_says_which_weights_were_tested(run):
    _, best = list_checkpoints(run / "checkpoints")
    choice = read_env(run)["choices"]["final_weights"]
    assert choice["value"] == f"step {best.step}" and "best on validation: accuracy" in choice["reason"]
    assert choice["reason"] in write_report(run).read_text()


# Checkpoints whose digests are right, and whose content is not


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    fields = {name: value for name, value in manifest.items() if name != "self_sha256"}
    digest = {"self_sha256": checkpoint.hash_fields(fields)}
    path.with_suffix(".json").write_text(json.dumps(fields | digest))


def change_manifest(run: Path, **fields: Any) -> str:
    """Change the newest manifest, keep its digest right, and return what is then said about the checkpoint."""
    path = list_checkpoints(run / "checkpoints")[0].path
    manifest = json.loads(path.with_suffix(".json").read_text()) | fields
    write_manifest(path, {name: value for name, value in manifest.items() if value != "remove"})
    assert main(["ckpt", "verify", str(run), *JOBS]) == 1
    problem = list_checkpoints(run / "checkpoints")[0].problem
    assert problem is not None and "\n" not in problem and len(problem) < 200
    return problem


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"step": "remove"}, "the manifest has no valid 'step': expected int, found nothing"),
        ({"step": "12"}, "no valid 'step': expected int, found '12'"),
        ({"step": True}, "no valid 'step': expected int, found True"),
        ({"step": -3}, "renamed: the manifest is of step -3"),
        ({"step": 10**300}, "renamed: the manifest is of step 10000000000000000000"),
        ({"bytes": 2**70}, "the manifest says 1180591620717411303424"[:20]),
        ({"bytes": [1]}, "no valid 'bytes'"),
        ({"sha256": None}, "no valid 'sha256'"),
        ({"meta": []}, "no valid 'meta': expected dict"),
        ({"meta": {"best": [1]}}, "no valid 'best'"),
        ({"meta": {"best": {"step": "x"}}}, "no valid 'best'"),
    ],
)
def test_a_manifest_with_strange_fields_is_described_in_one_sentence(run, fields, found):
    assert found in change_manifest(run, **fields)


def remove(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for name in names[:-1]:
            state = state[name]
        del state[names[-1]]

    return change


def put(value: Any, *names: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for name in names[:-1]:
            state = state[name]
        state[names[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (remove("model"), "it lacks 'model'"),
        (remove("model", "head.weight"), 'Missing key(s) in state_dict: "head.weight"'),
        (put(torch.zeros(3), "model", "head.weight"), "size mismatch for head.weight"),
        (put(5, "model"), "'model' is 5, expected OrderedDict"),
        (remove("optimizer", "state"), "it lacks 'state'"),
        (put(torch.zeros(3, 3), "optimizer", "state", 0, "exp_avg"), "'exp_avg' has shape (3, 3)"),
        (remove("progress"), "it lacks 'progress'"),
        (put(-1, "progress", "step"), "'step' is -1, expected a number from 0"),
        (put(2**80, "progress", "samples_seen"), "'samples_seen' is 1208925819614629174706176"),
        (put("x", "progress", "epoch"), "'epoch' is 'x'"),
        (put(1, "progress", "other"), "unexpected keyword argument 'other'"),
        (put(10**9, "progress", "batches_done"), "the newest is in batch 1000000000 of an epoch of"),
        (put({"step": "x"}, "best"), "it lacks 'metric'"),
        (remove("metrics_position"), "it lacks 'metrics_position'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_run_is_refused_in_one_sentence(run, capsys, change, found):
    newest = list_checkpoints(run / "checkpoints")[0]
    state = checkpoint.load(newest.path)
    change(state)
    checkpoint.save(run / "checkpoints", state, step=newest.step, meta=newest.meta)
    with pytest.raises(CheckpointError) as raised:
        train(run)
    assert found in str(raised.value) and "\n" not in str(raised.value) and f"{run}/checkpoints" in str(raised.value)


@pytest.mark.parametrize("family", ["nobody", "../../etc", "a.b", "[1]", "{a: 1}"])
def test_a_run_of_an_unknown_family_is_refused_in_one_sentence(run, capsys, family):
    edit(run / "config.yaml", "family: stripes", f"family: {family}")
    assert main(["resume", str(run), *JOBS]) == 2
    with pytest.raises(UserError, match=r"family|nobody"):
        configs.load_config(run / "config.yaml", FAMILIES)
    assert find_differences(load_state(run), load_state(run)) == []
