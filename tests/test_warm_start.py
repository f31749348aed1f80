"""A new run begins with the weights of a run or of a file, says what matched, and never needs them again."""

import hashlib
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training import FAMILIES, load_state, new_run, train, train_on_ranks
from trainyard.cli import main
from trainyard.cli.choices import find_start
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.runs.folder import read_env
from trainyard.train import checkpoint
from trainyard.train.module import AdaptedWeights
from trainyard.train.warm_start import find_file, load_weights
from trainyard.train.weights_file import read_weights

KEEP = ("optimizer.lr=0", "max_duration=1st", "data.decode=cpu")
"""One step that changes no weight."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    run = new_run(tmp_path_factory.mktemp("source"), "max_duration=2ep")
    assert train(run) == 0
    return run


def select_result(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run's test sets are scored with."""
    return dict(checkpoint.select_weights(checkpoint.load(find_file(str(run), "start_from"))))


def read_choice(run: Path) -> dict[str, Any]:
    return read_env(run)["choices"]["start_from"]


@pytest.mark.slow
def test_a_run_begins_with_the_result_of_another_and_resumes_without_it(source, tmp_path, capfd):
    expected, gone = select_result(source), tmp_path / "gone"
    shutil.copytree(source, gone)
    run = new_run(source.parents[2], f"start_from={gone}", "expects_weights=a trained network", *KEEP)
    assert train(run) == 0
    state = load_state(run)
    for name in ("head.weight", "head.bias", "layers.0.0.weight", "layers.1.1.weight"):
        assert torch.equal(state[f"model/{name}"], expected[name]), name
        assert torch.equal(state[f"ema/{name}"], expected[name]), name
    choice = read_choice(run)
    assert choice["loaded"] == len([name for name in expected if "num_batches" not in name]) and choice["new"] == []
    file = find_file(str(source), "start_from")
    assert choice["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and choice["value"].endswith(file.name)
    said = capfd.readouterr().err
    assert f"{file.name}: 14 of 14 tensors loaded" in said and "random weights" not in said
    shutil.rmtree(gone)
    assert train(run) == 0, "a resume needs the run no more"


@pytest.mark.slow
def test_a_part_is_loaded_and_the_rest_keeps_its_seeded_values(source, tmp_path):
    expected = select_result(source)
    file = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in expected.items()}, file)
    partial, plain = (
        new_run(source.parents[2], *options, *KEEP)
        for options in ((f"start_from={file}", "start_from_partial=[layers.*]"), ())
    )
    assert train(partial) == train(plain) == 0
    mine, fresh = load_state(partial), load_state(plain)
    assert torch.equal(mine["model/layers.0.0.weight"], expected["layers.0.0.weight"])
    assert torch.equal(mine["model/head.weight"], fresh["model/head.weight"])
    assert read_choice(partial)["new"] == read_choice(partial)["not_used"] == ["head.bias", "head.weight"]
    assert "start_from" not in read_env(plain)["choices"]


@pytest.mark.slow
def test_a_run_that_did_not_reach_a_checkpoint_refuses_other_weights(source, tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(select_result(source), file)
    run = new_run(source.parents[2], f"start_from={file}", *KEEP)
    assert train(run) == 0
    shutil.rmtree(run / "checkpoints")
    assert train(run) == 0, "the same weights again"
    shutil.rmtree(run / "checkpoints")
    torch.save({name: value + 1 for name, value in select_result(source).items()}, file)
    with pytest.raises(UserError, match=r"changed since this run began: it had SHA-256"):
        train(run)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_before_the_first_step(source):
    run = new_run(source.parents[2], f"start_from={source}", "model.channels=4")
    with pytest.raises(UserError, match=r"(?s)'layers.0.0.weight' is \(8, 1, 3, 3\).*start_from_partial="):
        train(run)
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_learning_rates_for_loaded_weights_warn_about_random_ones(source, capfd):
    cold = new_run(source.parents[2], "expects_weights=a trained network", *KEEP)
    assert train(cold) == 0
    assert "starts from random weights, but its learning rates are for a trained network" in capfd.readouterr().err
    assert read_choice(cold)["value"] == "random weights"


# What matches


class Net(torch.nn.Module):
    """A backbone and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
        self.head = torch.nn.Linear(2, classes)


def adapt(net: torch.nn.Module, **more: torch.Tensor) -> AdaptedWeights:
    return AdaptedWeights({**{name: value.clone() for name, value in net.state_dict().items()}, **more})


def test_all_tensors_must_match_on_both_sides():
    net = Net()
    with pytest.raises(UserError, match=r"1 of its tensors have no place in this model.*: extra\."):
        load_weights(net, adapt(Net(), extra=torch.zeros(1)), source="f")
    missing = AdaptedWeights({n: v for n, v in Net().state_dict().items() if n != "head.bias"})
    with pytest.raises(
        UserError, match=r"no 'head.bias'; nearest: .*1 of 8 tensors.*start_from_partial=\[backbone.0.\*"
    ):
        load_weights(net, missing, source="f")
    with pytest.raises(UserError, match=r"(?s)2 tensors have other shapes.*'head.weight' is \(5, 2\).*\(3, 2\)"):
        load_weights(net, adapt(Net(5)), source="f")
    other = Net()
    match = load_weights(net, adapt(other), source="f")
    assert (len(match.loaded), match.new, match.not_used) == (8, [], [])
    assert torch.equal(net.head.weight, other.head.weight)


def test_a_part_must_match_wholly_and_names_that_match_nothing_are_refused():
    net, other = Net(), Net(5)
    before = net.head.weight.clone()
    match = load_weights(net, adapt(other), source="f", partial=["backbone.*"])
    assert torch.equal(net.backbone[0].weight, other.backbone[0].weight) and torch.equal(net.head.weight, before)
    assert match.new == match.not_used == ["head.bias", "head.weight"]
    with pytest.raises(UserError, match=r"no tensor of this model is called 'bakbone.\*'; nearest: backbone"):
        load_weights(net, adapt(other), source="f", partial=["bakbone.*"])
    with pytest.raises(UserError, match=r"2 tensors have other shapes"):
        load_weights(net, adapt(other), source="f", partial=["*"])


def test_counters_of_batches_are_not_required():
    found = {name: value for name, value in Net().state_dict().items() if "num_batches" not in name}
    assert load_weights(Net(), AdaptedWeights(found), source="f").new == []


# Files


def test_weights_are_found_where_training_code_nests_them(tmp_path):
    weights, other = {"module.a.weight": torch.ones(2)}, {"a.weight": torch.zeros(2)}
    for content in ({"state_dict": weights}, {"ema": {"module": weights}, "model": other}, {"model": weights, "lr": 1}):
        torch.save(content, tmp_path / "w.pth")
        found = read_weights(tmp_path / "w.pth", option="start_from")
        assert list(found.tensors) == ["a.weight"] and torch.equal(found.tensors["a.weight"], torch.ones(2))
    assert len(found.sha256) == 64


def test_files_of_strangers_are_data_or_refused(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for info in good.infolist():
            bomb.writestr(info.filename, good.read(info))
    with pytest.raises(UserError, match=r"its records are compressed"):
        read_weights(tmp_path / "bomb.pth", option="start_from")
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"not the zip archive that torch.save writes"):
        read_weights(path, option="start_from")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match=r"not a file of tensors"):
        read_weights(tmp_path / "w.safetensors", option="start_from")
    torch.save({"epoch": 3}, path)
    with pytest.raises(UserError, match=r"it contains no tensors, only epoch"):
        read_weights(path, option="start_from")


def test_a_run_may_be_named_as_for_other_commands(source):
    root = source.parents[1]
    config = configs.compose("stripes", [f"start_from={source.name}"], FAMILIES)
    assert find_start(config, root).start_from == str(source.absolute())
    config = configs.compose("stripes", ["start_from=nothing.pth"], FAMILIES)
    with pytest.raises(UserError, match=r"start_from=nothing.pth: no such file, and no such run"):
        find_start(config, root)
    found = find_start(config, root, needed=False).start_from
    assert found == str(Path("nothing.pth").absolute()), "the same command resumes a run whose file is gone"


def test_a_file_that_is_none_of_tensors_is_refused_before_a_run_is_made(tmp_path, capsys):
    (tmp_path / "notes.pth").write_text("not weights")
    words = ["run", "stripes", f"start_from={tmp_path / 'notes.pth'}", f"data.cache={tmp_path}"]
    assert main([*words, "--jobs", str(FAMILIES), "--runs", str(tmp_path / "runs")]) == 2
    assert "notes.pth: not a file of tensors. Expected .safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.pth"]


def test_a_folder_without_weights_and_a_run_without_checkpoints_are_refused(tmp_path, capsys):
    with pytest.raises(UserError, match=r"is no run, and has no model.safetensors and no pytorch_model.bin"):
        find_file(str(tmp_path), "start_from")
    run = new_run(tmp_path)
    with pytest.raises(UserError, match=r"is a run without checkpoints"):
        find_file(str(run), "start_from")
    assert main(["run", "stripes", "start_from=nowhere", "--jobs", str(FAMILIES), "--runs", str(tmp_path)]) == 2
    assert "start_from=nowhere" in capsys.readouterr().err


@pytest.mark.long
def test_ranks_load_the_same_weights(source):
    run = new_run(source.parents[2], f"start_from={source}", "data.decode=cpu", "optimizer.lr=0", "max_duration=1st")
    assert train_on_ranks(run, 2, rendezvous="warm") == [0, 0]
    assert torch.equal(load_state(run)["model/head.weight"], select_result(source)["head.weight"])
