"""Several ranks compute what one does."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_loader import damage_images
from tests.training import FAMILIES, FORKSERVER, load_state, new_run, read_run_metrics, train, train_on_ranks
from trainyard.cli import main
from trainyard.config.compose import load_config
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.node import ranks
from trainyard.node.rank_task import execute
from trainyard.runs.folder import CONFIG, read_env
from trainyard.runs.state import ExitCode
from trainyard.runs.why import explain_run
from trainyard.train import distributed
from trainyard.train.distributed import (
    Agreement,
    Card,
    Decision,
    check_cards_differ,
    choose_gpu_index,
    identify_card,
)
from trainyard.train.stop import Stop
from trainyard.train.world import World, read_world

EXACT = ("model.batch_norm=false", "model.dropout=0", "max_duration=4st", "eval_every=4st", "ema_decay=0")
"""Without batch statistics and dropout, whose values belong to a micro-batch and a rank, only rounding differs."""


@pytest.mark.slow
def test_two_ranks_of_two_micro_batches_equal_one_rank_on_the_whole_batch(tmp_path):
    one = new_run(tmp_path, *EXACT, "global_batch_size=16")
    two = new_run(tmp_path, *EXACT, "global_batch_size=16", "micro_batch_size=4")
    assert train(one) == 0
    assert train_on_ranks(two, 2, rendezvous="a") == [0, 0]
    choices = read_env(two)["choices"]
    assert choices["gloo_socket_ifname"]["value"] == "lo"
    assert choices["nccl_socket_ifname"]["reason"] == "left to NCCL: all ranks are on one node"
    a, b = load_state(one), load_state(two)
    worst = max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith("model/"))
    assert worst < 1e-4, "float32 sums in another order, over four steps of Adam at 1e-2"
    for x, y in zip(read_run_metrics(one), read_run_metrics(two), strict=True):
        assert x.keys() == y.keys()
        assert x.get("loss", 0) == pytest.approx(y.get("loss", 0), abs=1e-5)


@pytest.mark.slow
def test_a_last_batch_smaller_than_the_ranks_still_counts_each_sample_once(tmp_path):
    one = new_run(tmp_path, *EXACT, "global_batch_size=59", "max_duration=1ep", "eval_every=1ep")
    three = new_run(tmp_path, *EXACT, "global_batch_size=59", "max_duration=1ep", "eval_every=1ep")
    assert train(one) == 0
    assert train_on_ranks(three, 3, rendezvous="b") == [0, 0, 0]
    a, b = load_state(one), load_state(three)
    assert a["progress/samples_seen"] == b["progress/samples_seen"] == 60
    assert max(float((a[n] - b[n]).abs().max()) for n in a if n.startswith("model/")) < 1e-4


@pytest.mark.slow
def test_three_ranks_score_an_evaluation_set_as_one_does(tmp_path):
    one = new_run(tmp_path, *EXACT, "optimizer.lr=0", "max_duration=1st", "eval_every=1st")
    three = new_run(tmp_path, *EXACT, "optimizer.lr=0", "max_duration=1st", "eval_every=1st")
    assert train(one) == 0
    assert train_on_ranks(three, 3, rendezvous="c") == [0, 0, 0]
    scores = [[line for line in read_run_metrics(run) if line["kind"] == "eval"] for run in (one, three)]
    assert scores[0] == scores[1]
    assert [line["split"] for line in scores[0]] == ["val", "test"]


@pytest.mark.slow
def test_slurm_variables_start_the_same_training(tmp_path):
    run = new_run(tmp_path, *EXACT)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    words = ["rank", str(run), "--jobs", str(FAMILIES), "--since", str(time.time())]
    ranks = [
        FORKSERVER.Process(
            target=_run_command, args=(words, {**slurm, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
        )
        for r in range(2)
    ]
    assert _wait_for_codes(ranks) == [0, 0]
    assert load_state(run)["progress/step"] == 4


@pytest.mark.slow
def test_one_task_of_several_that_were_not_started_says_what_it_waits_for(tmp_path):
    run = new_run(tmp_path, *EXACT)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    command = [
        sys.executable,
        "-m",
        "trainyard",
        "rank",
        str(run),
        "--jobs",
        str(FAMILIES),
        "--since",
        str(time.time()),
    ]
    environ = {**os.environ, **slurm, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as lone:
        said = next(line for line in lone.stderr or () if "waits" in line)
        lone.kill()
    assert "rank 0 waits for ranks 1, 2, 3 of 4" in said
    assert "put this before the command: env -u SLURM_STEP_ID" in said


@pytest.mark.slow
def test_torchrun_starts_the_same_training(tmp_path):
    run = new_run(tmp_path, *EXACT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    trainyard = ["trainyard", "rank", str(run), "--jobs", str(FAMILIES), "--since", str(time.time())]
    assert subprocess.run([*torchrun, *trainyard], timeout=240).returncode == 0
    assert load_state(run)["progress/step"] == 4


@pytest.mark.slow
def test_our_launcher_passes_a_signal_on_and_ends_with_the_ranks_code(tmp_path):
    run = new_run(tmp_path, "max_duration=10000ep", "eval_every=10000ep")
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES), "--cpu-ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 85
    assert f"Resume: trainyard resume {run}" in said


@pytest.mark.slow
def test_killing_the_launcher_leaves_no_rank_behind(tmp_path):
    run = new_run(tmp_path, "max_duration=10000ep", "eval_every=10000ep")
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES), "--cpu-ranks", "2"]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (run / "metrics.jsonl").exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while _find_processes(str(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _find_processes(str(run)) == []


@pytest.mark.slow
def test_two_ranks_train_under_a_launcher_that_is_process_1(tmp_path):
    """The first process of a container, where an image's entry point is not used: Kubernetes' `command:`."""
    run = new_run(tmp_path, *EXACT)
    as_process_1 = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*as_process_1, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a process namespace: unshare --user --pid")
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES), "--cpu-ranks", "2"]
    done = subprocess.run([*as_process_1, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert load_state(run)["progress/step"] == 4


def test_a_rank_that_exits_without_a_word_is_named(tmp_path, monkeypatch):
    run = new_run(tmp_path, *EXACT)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert ranks.train_on_ranks(run, FAMILIES, 2, environ=os.environ, started=time.time()) == 3
    explained = explain_run(run)
    assert re.search(r"failed: crashed, rank [01] on ", explained)
    assert "exited with code 3 and recorded no error" in explained


@pytest.mark.slow
def test_a_rank_with_a_damaged_record_leaves_at_once_also_where_leaving_the_group_waits_for_all(tmp_path):
    """NCCL's communicators of one node are destroyed together, so a rank that fails may not wait for that."""
    run = new_run(tmp_path, *EXACT, "max_duration=2ep", "hang_minutes=10")
    data = ShardSet(Path(load_config(run / CONFIG, FAMILIES).data.path))
    damage_images(data, np.array([5]))
    barrier = FORKSERVER.Barrier(2)
    begin = time.monotonic()
    started = time.time()  # one for all, as a launcher gives it: the attempt is named after its second
    ranks = [
        FORKSERVER.Process(target=_train_where_leaving_waits, args=(run, rank, barrier, started)) for rank in (0, 1)
    ]
    codes = _wait_for_codes(ranks)
    print(f"all ranks have left after {time.monotonic() - begin:.1f} s")
    assert sorted(codes) == [ExitCode.FAILED, ExitCode.USER_ERROR]
    explained = explain_run(run)
    [key] = data.read_keys(np.array([5]))
    assert re.search(rf": user error, rank {codes.index(ExitCode.USER_ERROR)} on ", explained), explained
    assert re.search(rf"image of '{re.escape(key)}' is damaged: its checksum differs", explained), explained


def _train_where_leaving_waits(run: Path, rank: int, barrier: Any, started: float) -> None:
    import torch.distributed as dist

    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: (barrier.wait(), destroy())
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    environ = {name: str(value) for name, value in numbers.items()} | {"TRAINYARD_MEETING": "damaged"}
    sys.exit(execute(run, FAMILIES, environ=environ, started=started))


def test_ranks_are_read_from_each_launcher_and_a_batch_script_is_no_task():
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert read_world(torchrun) == World(3, 1, 4, 2, "torchrun")
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "9"}
    step = {**slurm, "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_RESTART_COUNT": "2"}
    assert read_world(step) == World(5, 1, 8, 4, "slurm", "9-0-2")
    assert read_world({**step, "SLURM_CPUS_PER_TASK": "6"}).cores == 6
    local = {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1"}
    assert read_world({**local, "SUBMITIT_LOCAL_JOB_ID": "77"}) == World(1, 1, 2, 2, "submitit, here", "local-77")
    assert read_world(slurm) == World()
    assert read_world({**step, "SLURM_PTY_PORT": "4711"}) == World(), "srun -n8 --pty bash: a person types here"
    assert read_world({}) == World()
    with pytest.raises(UserError, match="LOCAL_RANK is not set"):
        read_world({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [(0, 0, None), (3, 0, None), (0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3)]
)
def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_one_it_sees(local_rank, visible, index):
    assert choose_gpu_index(World(4 + local_rank, local_rank, 8, 4), visible) == index


def test_fewer_gpus_than_local_ranks_are_refused_with_flags_that_help():
    with pytest.raises(UserError, match=r"local rank 2, but sees only 2 GPUs.*--ntasks-per-node=2.*--gpus-per-task=1"):
        choose_gpu_index(World(6, 2, 8, 4), 2)


def test_ranks_that_would_share_a_gpu_are_refused():
    one, other, elsewhere = Card("a", "GPU-1"), Card("a", "GPU-2"), Card("b", "GPU-1")
    check_cards_differ([one, other, elsewhere])
    check_cards_differ([Card("a", ""), Card("a", "")])  # on the CPU
    with pytest.raises(UserError, match=r"Ranks 0, 2 on a use the same GPU \(GPU-1\).*Start 2 there \(--gpus 2"):
        check_cards_differ([one, other, one, elsewhere])


def test_slices_of_one_gpu_are_told_apart_by_their_names():
    slices = [f"MIG-{i}" for i in range(2)]
    check_cards_differ([Card("a", identify_card("GPU-1", name)) for name in slices])
    assert identify_card("GPU-1", "MIG-5,MIG-6") == "MIG-5"
    assert identify_card("GPU-1", "0") == identify_card("GPU-1", "") == "GPU-1"
    assert identify_card("", "MIG-5") == "", "the rank uses the CPU"


def test_an_agreement_returns_what_was_proposed_at_the_call_before():
    proposals = [Decision(stop=reason) for reason in Stop]
    proposals += [Decision(time_is_up=True), Decision(evaluate=True), Decision(save=True, stop=Stop.PREEMPTED)]
    agreement = Agreement()
    returned = [agreement.exchange(proposal) for proposal in [*proposals, Decision()]]
    assert returned == [Decision(), *proposals]
    assert all(type(value) is type(default) for value, default in zip(returned[-1], Decision(), strict=True))


@pytest.mark.slow
def test_ranks_agree_on_the_maximum_of_each_field(tmp_path):
    assert _wait_for_codes([FORKSERVER.Process(target=_agree, args=(rank, tmp_path)) for rank in range(2)]) == [0, 0]


def _agree(rank: int, folder: Path) -> None:
    distributed.join(World(rank, rank, 2, 2, rendezvous="agree"), folder, os.environ, deterministic=True)
    agreement = Agreement()
    agreement.exchange((Decision(Stop.MAX_RUNTIME, save=True), Decision(Stop.PREEMPTED, evaluate=True))[rank])
    agreed = agreement.exchange(Decision())
    agreement.wait()
    distributed.leave()
    sys.exit(0 if agreed == Decision(Stop.PREEMPTED, evaluate=True, save=True) else f"rank {rank}: {agreed}")


def _run_command(words: list[str], environ: dict[str, str]) -> None:
    os.environ.update(environ)
    sys.exit(main(words))


def _wait_for_codes(processes: Sequence[Any]) -> list[int]:
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    return [process.exitcode for process in processes]


def _find_processes(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended between being listed and being read
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found
