"""Checkpoints survive kills, damage and full disks, and never run code."""

import contextlib
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from loguru import logger
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.training import FORKSERVER
from trainyard import files
from trainyard.errors import UserError
from trainyard.train import checkpoint
from trainyard.train.checkpoint import (
    CheckpointError,
    export,
    list_checkpoints,
    load,
    load_newest_valid,
    prune,
    save,
    verify,
)
from trainyard.train.saver import compute_interval_s


def make_state(value):
    return {"model": {"w": torch.full((300,), float(value)), "b": torch.arange(5)}, "step": value}


def save_steps(directory, *steps):
    for step in steps:
        save(directory, make_state(step), step=step, meta={"epoch": step // 10})
    return directory


def list_steps(directory):
    return [entry.step for entry in list_checkpoints(directory)]


def check_newest(directory):
    """Return the step that a resume would load, after checking that its weights are of that step."""
    entry, state = load_newest_valid(directory)
    assert state["step"] == entry.step
    assert torch.equal(state["model"]["w"], make_state(entry.step)["model"]["w"])
    return entry.step


@pytest.fixture
def warnings():
    """Collect the log's warnings."""
    messages = []
    sink = logger.add(lambda message: messages.append(message.record["message"]), level="WARNING")
    yield messages
    logger.remove(sink)


def test_a_model_and_its_optimizer_come_back_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    tied = torch.randn(4, dtype=torch.bfloat16)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tied": [tied, tied], "none": None}
    state |= {"nan": math.nan, "big": 2**62, "text": "\u00e9", "empty": {}, "half": torch.tensor([65504.0]).half()}

    done = save(tmp_path, state, step=7, meta={"epoch": 1, "eer": math.nan, "at": {2: "a", 10: "b"}})
    entry, loaded = load_newest_valid(tmp_path)

    assert flatten(loaded) == flatten(state)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert loaded["model"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert (entry.step, entry.meta["epoch"], entry.meta["at"]) == (7, 1, {"2": "a", "10": "b"})
    assert done == entry.path == tmp_path / "step-000000007.ckpt"
    assert entry.bytes == done.stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000007.ckpt", "step-000000007.json"]


def flatten(value):
    """Return a nested state with tensors as their dtype and bytes, so that == is bitwise and NaN equals itself."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: flatten(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [flatten(item) for item in value]
    return repr(value)


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path):
    save_steps(tmp_path, 9, 999_999_999, 1_000_000_000, 10)
    assert list_steps(tmp_path) == [1_000_000_000, 999_999_999, 10, 9]
    assert check_newest(tmp_path) == 1_000_000_000


def test_a_folder_without_checkpoints_has_none(tmp_path):
    (tmp_path / "notes.txt").write_text("step-000000001.ckpt")
    assert load_newest_valid(tmp_path) is None
    assert load_newest_valid(tmp_path / "missing") is None


DISK = ("save", "_remove_leftovers", "_write", "write", "fsync_path", "_delete")
"""The functions of checkpoint.py that change the disk; `write`, called for each chunk of data, counts as one line."""


def save_and_kill_at(number, directory, step):
    """Save in a forked child that kills itself before line `number` of those that may change the disk.

    Returns:
        Whether the save finished before that line.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return not os.WIFSIGNALED(status)
    try:
        lines = iter(range(number))

        def trace(frame, event, _):
            code = frame.f_code
            if code.co_filename not in (checkpoint.__file__, files.__file__) or code.co_name not in DISK:
                return None
            if next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return None if code.co_name == "write" else trace

        sys.settrace(trace)
        save(directory, make_state(step), step=step, meta={})
        sys.settrace(None)
        os._exit(0)
    finally:
        os._exit(1)


def kill_everywhere(folder, step):
    """Kill a save before each of its lines in turn, until one finishes before it is killed.

    Returns:
        For each save, the step found afterwards and whether it is the earlier checkpoint; and all warnings logged.
    """
    outcomes, messages, finished = [], [], False
    logger.add(messages.append, level="WARNING")
    while not finished:
        directory = folder / str(len(outcomes))
        save(directory, make_state(1) | {"old": True}, step=1, meta={})
        finished = save_and_kill_at(len(outcomes), directory, step)
        entry, state = load_newest_valid(directory)
        assert torch.equal(state["model"]["w"], make_state(entry.step)["model"]["w"])
        outcomes.append((entry.step, "old" in state))
        save_steps(directory, 3)  # the next save cleans up
        whole = {
            entry.path.with_suffix(suffix) for entry in list_checkpoints(directory) for suffix in (".ckpt", ".json")
        }
        assert set(directory.iterdir()) == whole and check_newest(directory) == 3
    return outcomes, messages


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["a further step", "the same step again"])
def test_kill_9_before_any_line_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, step):
    with ProcessPoolExecutor(1, mp_context=FORKSERVER) as pool:
        outcomes, messages = pool.submit(kill_everywhere, tmp_path, step).result()
    old = outcomes.count((1, True))
    assert outcomes == [(1, True)] * old + [(step, False)] * (len(outcomes) - old)
    assert 0 < old < len(outcomes) and len(outcomes) > 100
    assert not messages, "a killed save must not look like damage"


def save_and_record_calls(directory: Path) -> list[str]:
    """Save a checkpoint; return the files that were flushed and renamed, in order. Runs in a process of its own."""
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def shorten(path):
        return re.sub(r"^\.(.*)\.[0-9a-f]{16}\.partial$", r"\1.partial", Path(path).name)

    def fsync(descriptor):
        calls.append(f"fsync {shorten(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        real_fsync(descriptor)

    def replace(source, target, **folders):
        calls.append(f"rename {shorten(source)} {shorten(target)}")
        real_replace(source, target, **folders)

    os.fsync, os.replace = fsync, replace
    save(directory, {"x": torch.ones(3)}, step=5, meta={})
    return calls


@pytest.mark.slow
def test_bytes_reach_the_disk_before_their_names_do(tmp_path):
    with ProcessPoolExecutor(1, mp_context=FORKSERVER) as pool:
        calls = pool.submit(save_and_record_calls, tmp_path / "new").result()
    assert calls == [
        f"fsync {tmp_path.name}",
        "fsync step-000000005.ckpt.partial",  # then it may have lost the run
        "fsync step-000000005.json.partial",
        "rename step-000000005.json.partial step-000000005.json",
        "fsync new",  # the data never have their name without their manifest
        "fsync step-000000005.ckpt.partial",
        "rename step-000000005.ckpt.partial step-000000005.ckpt",
        "fsync new",
    ]


def test_a_step_saved_again_replaces_the_older_file_without_writing_over_it(tmp_path):
    first = save(tmp_path, make_state(1), step=1, meta={"try": 1})
    second = save(tmp_path, make_state(1), step=1, meta={"try": 2})
    third = save(tmp_path, make_state(1), step=1, meta={"try": 3})
    assert [path.name for path in (first, second, third)] == [
        "step-000000001.ckpt",
        "step-000000001-1.ckpt",
        "step-000000001-2.ckpt",
    ]
    assert [(entry.path, entry.meta["try"]) for entry in list_checkpoints(tmp_path)] == [(third, 3)]


def test_one_flipped_bit_anywhere_is_detected_and_reported_and_the_previous_checkpoint_is_used(tmp_path, warnings):
    save_steps(tmp_path, 1, 2)
    generator = random.Random(0)
    for name in ("step-000000002.ckpt", "step-000000002.json"):
        path = tmp_path / name
        good = path.read_bytes()
        offsets = [0, len(good) - 1] + [generator.randrange(len(good)) for _ in range(60)]
        for offset in offsets:
            bad = bytearray(good)
            bad[offset] ^= 1 << generator.randrange(8)
            path.write_bytes(bad)
            if name.endswith(".json") and is_same_json(good, bytes(bad)):
                continue  # white space
            warnings.clear()
            assert check_newest(tmp_path) == 1, (name, offset)
            assert len(warnings) == 1 and "step-000000002.ckpt" in warnings[0]
        path.write_bytes(good)
    assert check_newest(tmp_path) == 2
    assert list_steps(tmp_path) == [2, 1], "readers delete nothing"


def is_same_json(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda data, manifest: os.truncate(data, data.stat().st_size - 1), "bytes, the manifest says"),
        (lambda data, manifest: os.truncate(data, 0), "0 bytes, the manifest says"),
        (lambda data, manifest: manifest.unlink(), "step-000000002.json cannot be read: No such file"),
        (lambda data, manifest: manifest.write_bytes(b"\x00\xff garbage"), "the manifest is damaged"),
        (lambda data, manifest: manifest.write_text("[1, 2]"), "the manifest is damaged: not a JSON object"),
        (lambda data, manifest: manifest.write_text(""), "the manifest is damaged"),
        (lambda data, manifest: manifest.write_text('{"format": 2}'), "its own SHA-256 does not match"),
        (lambda data, manifest: (data.unlink(), data.mkdir()), "bytes, the manifest says"),
    ],
)
def test_each_kind_of_damage_is_reported(tmp_path, warnings, damage, reason):
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-000000002.ckpt", tmp_path / "step-000000002.json")
    bad, good = list_checkpoints(tmp_path)
    assert reason in verify(bad) and verify(good) is None
    assert check_newest(tmp_path) == 1
    assert "step-000000002.ckpt" in warnings[0] and reason in warnings[0]
    with pytest.raises(CheckpointError, match=r"step-000000002\.ckpt: damaged"):
        load(bad.path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    save_steps(tmp_path, 1, 2)
    for suffix in (".ckpt", ".json"):
        (tmp_path / f"step-000000001{suffix}").rename(tmp_path / f"step-000000009{suffix}")
    assert verify(list_checkpoints(tmp_path)[0]) == "renamed: the manifest is of step 1"
    assert check_newest(tmp_path) == 2


def test_if_every_checkpoint_is_damaged_the_error_lists_them_and_nothing_is_deleted(tmp_path):
    save_steps(tmp_path, 1, 2)
    for path in tmp_path.glob("*.ckpt"):
        os.truncate(path, 10)
    with pytest.raises(UserError, match=r"(?s)all 2 checkpoints.*step-000000002.*step-000000001.*mv ") as raised:
        load_newest_valid(tmp_path)
    assert "Nothing was deleted" in str(raised.value) and list_steps(tmp_path) == [2, 1]


def mount_small_disk(tmp_path, size_mib):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    return disk


@pytest.fixture
def disk(tmp_path):
    disk = mount_small_disk(tmp_path, size_mib=4)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("early", [True, False], ids=["found before writing", "found while writing"])
def test_a_full_disk_is_an_error_that_says_so_and_the_last_checkpoint_stays(disk, early, monkeypatch):
    directory = save_steps(disk / "checkpoints", 1)
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    if early:
        monkeypatch.setattr(checkpoint, "_write", lambda *args, **kwargs: pytest.fail("wrote nevertheless"))
    else:  # what a quota does: free space is reported, and then there is none
        monkeypatch.setattr(checkpoint, "_require_room", lambda directory, needed: None)
    with pytest.raises(CheckpointError) as raised:
        save(directory, {"x": torch.zeros(8 * 2**20, dtype=torch.uint8)}, step=2, meta={})
    message = str(raised.value)
    for part in (str(directory / "step-000000002.ckpt"), "No space left", "0.008 GiB", "0.004 GiB are free", "df -h"):
        assert part in message
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    assert check_newest(directory) == 1
    monkeypatch.undo()
    save_steps(directory, 2)
    assert check_newest(directory) == 2


def save_within_a_limit(directory: Path) -> str:
    """Return the error of a save that needs more than a file may take. Runs in a process of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(directory, {"x": torch.zeros(10), "y": torch.zeros(500_000)}, step=2, meta={})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_limit_met_in_the_middle_of_a_save_leaves_no_partial_file(tmp_path):
    save_steps(tmp_path, 1)
    with ProcessPoolExecutor(1, mp_context=FORKSERVER) as pool:
        error = pool.submit(save_within_a_limit, tmp_path).result()
    assert "step-000000002.ckpt: not saved: File too large" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001.ckpt", "step-000000001.json"]
    assert check_newest(tmp_path) == 1


class Planted:
    """Code in a pickle: an unsafe load creates a directory."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("write", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))])
def test_code_in_a_file_with_a_matching_manifest_is_refused_and_not_run(tmp_path, write):
    directory, proof = save_steps(tmp_path / "run", 1), tmp_path / "proof"
    path = directory / "step-000000001.ckpt"
    write({"model": {}, "x": Planted(proof)}, path)
    sha256 = checkpoint.hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(checkpoint._encode_manifest(1, path.stat().st_size, sha256, {}))
    assert verify(list_checkpoints(directory)[0]) is None
    for read in (lambda: load(path), lambda: load_newest_valid(directory), lambda: export(path, tmp_path / "o")):
        with pytest.raises(CheckpointError, match=r"step-000000001\.ckpt: refused: it contains more than tensors"):
            read()
    assert not proof.exists()
    with contextlib.suppress(RuntimeError):  # "corrupt file", after the code has run
        torch.load(path, weights_only=False)
    assert proof.exists(), "the planted code would have worked"


@pytest.mark.parametrize(
    "state, where",
    [
        ({"a": [0, {"path": Path("x")}]}, r"state\['a'\]\[1\]\['path'\] is a value of type pathlib"),
        ({"loss": np.float64(1)}, r"state\['loss'\] is a value of type numpy\.float64"),
        ({"array": np.zeros(2)}, r"state\['array'\] .* numpy\.ndarray"),
        ({"set": {1}}, r"state\['set'\] .* builtins\.set"),
        ({"size": torch.zeros(1).shape}, r"state\['size'\] .* torch\.Size"),
        ({("a", 1): 0}, r"a key of state is a value of type builtins\.tuple"),
        ({"sparse": torch.eye(2).to_sparse()}, r"state\['sparse'\] is a torch\.sparse_coo tensor"),
        ({"meta": torch.empty(2, device="meta")}, r"state\['meta'\] is a torch\.strided tensor on meta"),
        ({"planted": Planted("x")}, r"state\['planted'\] .*Planted"),
    ],
)
def test_what_could_not_be_loaded_safely_is_refused_when_saved(tmp_path, state, where):
    with pytest.raises(CheckpointError, match=where):
        save(tmp_path / "new", state, step=1, meta={})
    assert not (tmp_path / "new").exists()


def test_a_save_that_fails_in_its_manifest_leaves_nothing(tmp_path):
    save_steps(tmp_path, 1)
    with pytest.raises(TypeError, match="Path"):
        save(tmp_path, make_state(2), step=2, meta={"folder": tmp_path})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001.ckpt", "step-000000001.json"]


def test_a_writer_that_lost_its_run_while_it_wrote_gives_nothing_a_name(tmp_path):
    def take_over() -> None:
        save(tmp_path, make_state(2), step=2, meta={"by": "new"})
        raise UserError("no longer owns the run")

    save_steps(tmp_path, 1)
    with pytest.raises(UserError, match="no longer owns"):
        save(tmp_path, make_state(1), step=2, meta={"by": "old"}, check_owner=take_over)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"step-00000000{step}.{kind}" for step in (1, 2) for kind in ("ckpt", "json"))
    ]
    newest = checkpoint.find_newest_valid(tmp_path)
    assert newest is not None and newest.meta == {"by": "new"}


def test_leftovers_are_removed_by_the_next_save_and_foreign_files_stay(tmp_path):
    save_steps(tmp_path, 1)
    old = ("step-000000002.ckpt.partial", "step-000000002.json.partial", ".step-000000002.ckpt.0a1b.partial")
    for name in (*old, "step-000000003.json", "step-x.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.partial").write_text("mine")
    assert check_newest(tmp_path) == 1 and (tmp_path / "step-000000002.ckpt.partial").exists(), "readers delete nothing"
    save_steps(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.partial",
        "step-000000001.ckpt",
        "step-000000001.json",
        "step-000000004.ckpt",
        "step-000000004.json",
        "step-x.json",
    ]


def test_pruning_keeps_the_newest_and_the_protected_and_deletes_the_oldest_first(tmp_path):
    save_steps(tmp_path, *range(1, 9))
    deleted = prune(tmp_path, keep_last=2, protect=lambda step: step in (3, 5))
    assert list_steps(tmp_path) == [8, 7, 5, 3]
    assert [p.name for p in deleted] == [f"step-{step:09d}.ckpt" for step in (1, 2, 4, 6)]
    assert len(list(tmp_path.iterdir())) == 2 * 4
    assert prune(tmp_path, keep_last=2, protect=lambda step: step in (3, 5)) == []


def test_pruning_never_deletes_the_newest_undamaged_checkpoint(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    for step in (3, 4, 5):
        path = tmp_path / f"step-{step:09d}.ckpt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    prune(tmp_path, keep_last=1)
    assert list_steps(tmp_path) == [5, 4, 3, 2] and check_newest(tmp_path) == 2
    os.truncate(tmp_path / "step-000000002.ckpt", 0)
    assert prune(tmp_path, keep_last=1) == [] and list_steps(tmp_path) == [5, 4, 3, 2]


@pytest.mark.parametrize(
    "save_s, mtbf_hours, max_minutes, expected_s",
    [
        (1, 24, 15, math.sqrt(2 * 1 * 86400)),  # 416 s
        (60, 24, 15, 900),  # Young: 3220 s
        (60, 24, 120, 3219.9379),
        (10, 0.01, 15, 100),  # Young: 27 s, less than 10 saves
        (120, 24, 15, 900),  # the user's bound holds, though saving takes 13 % of it
    ],
)
def test_the_interval_is_youngs_within_its_bounds(save_s, mtbf_hours, max_minutes, expected_s):
    assert compute_interval_s(save_s, mtbf_hours=mtbf_hours, max_minutes=max_minutes) == pytest.approx(expected_s)


@pytest.mark.parametrize("save_s", [0.1, 1, 10, 86])
def test_youngs_interval_is_within_two_percent_of_dalys(save_s):
    mean_s = 24 * 3600
    ratio = save_s / (2 * mean_s)
    daly = math.sqrt(2 * save_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
    assert compute_interval_s(save_s, mtbf_hours=24, max_minutes=1e6) == pytest.approx(daly, rel=0.02)


def test_an_export_holds_the_averaged_weights_and_says_where_they_come_from(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4, bias=False))
    model = model.to(memory_format=torch.channels_last)
    state = {"model": OrderedDict(model.state_dict()), "optimizer": {"m": torch.randn(1000)}}
    state["model"]["tied"] = state["model"]["2.weight"]
    save(tmp_path, state, step=1, meta={"eer": 0.01})
    averaged = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    save(tmp_path, state | {"ema": averaged}, step=2, meta={})

    plain = load_file(export(tmp_path / "step-000000001.ckpt", tmp_path / "out" / "plain.safetensors"))
    assert flatten(plain) == flatten(dict(state["model"]))
    merged = load_file(export(tmp_path / "step-000000002.ckpt", tmp_path / "ema.safetensors"))
    assert flatten(merged) == flatten({**state["model"], **averaged}), "running statistics are not averaged"

    with safe_open(tmp_path / "out" / "plain.safetensors", "pt") as file:
        metadata = file.metadata()
    entry = list_checkpoints(tmp_path)[1]
    assert metadata == {
        "format": "pt",
        "step": "1",
        "weights": "model",
        "checkpoint_sha256": entry.sha256,
        "meta": '{"eer": 0.01}',
        "artifacts": "{}",
    }
    assert not list(tmp_path.rglob("*.partial"))


def test_an_export_refuses_to_overwrite(tmp_path):
    save_steps(tmp_path, 1)
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: exists already"):
        export(tmp_path / "step-000000001.ckpt", out)
    assert out.read_text() == "precious"


@pytest.mark.parametrize(
    "state, found",
    [
        ({"weights": 1}, "'model' is empty or missing"),
        ({"model": {"w": torch.ones(1), "n": 3}}, "'model' has n, which is not a tensor"),
        (
            {"model": {"w": torch.ones(1)}, "ema": {"module.w": torch.ones(1)}},
            "'ema' has module.w, which 'model' lacks",
        ),
    ],
)
def test_an_export_without_whole_weights_is_refused(tmp_path, state, found):
    path = save(tmp_path, state, step=1, meta={})
    with pytest.raises(CheckpointError, match=found):
        export(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_an_export_onto_a_full_disk_leaves_no_file(disk, tmp_path):
    path = save(tmp_path / "run", {"model": {"w": torch.zeros(2 * 2**20)}}, step=1, meta={})
    with pytest.raises(CheckpointError, match=r"not exported: .*o space left"):
        export(path, disk / "model.safetensors")
    assert list(disk.iterdir()) == []
