"""The bandwidth command without a Slurm: its numbers, its words, and the batch script that it would submit."""

from pathlib import Path

import pytest

from trainyard.cli import main
from trainyard.tools.bandwidth import compute_bandwidths, explain_nccl_network, parse_sizes, summarize

CLUSTER = str(Path(__file__).parent / "slurm" / "golden" / "cluster.yaml")


def test_bus_bandwidth_is_what_each_rank_must_send_and_receive():
    """A ring all-reduce over 8 ranks sends 7/8 of the data twice."""
    assert compute_bandwidths(2_000_000_000, 1.0, 8) == (2.0, 3.5)
    assert compute_bandwidths(1_000_000_000, 0.5, 2) == (2.0, 2.0)
    line = summarize(1 << 30, [1.0, 2.0, 4.0], 4)
    assert line["algorithm_gb_s"]["median"] == pytest.approx(0.5368709)
    assert line["bus_gb_s"]["median"] == pytest.approx(1.5 * 0.5368709)
    assert line["ms"] == {"median": 2000.0, "spread": 1.5, "quotable": False}


IB = "n:1:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>\nn:1:9 NCCL INFO Using network IB\n"
TCP = "node:1:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nnode:1:9 [0] NCCL INFO Using network Socket\n"


@pytest.mark.parametrize(
    ("log", "adapters", "has_verbs", "value", "reason"),
    [
        (IB, ["mlx5_0"], True, "IB", "[0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>"),
        (TCP, [], False, "Socket", "this node has no InfiniBand or RoCE adapter"),
        (TCP, ["mlx5_0"], False, "Socket", "although this node has mlx5_0: libibverbs.so.1 does not load. Type: apt"),
        (TCP, ["mlx5_0"], True, "Socket", "although this node has mlx5_0: nccl-rank0.log says why"),
        ("", ["mlx5_0"], True, "unknown", "does not say"),
    ],
)
def test_a_fall_back_to_tcp_is_named_with_what_to_type(log, adapters, has_verbs, value, reason):
    found = explain_nccl_network(log, adapters, has_verbs=has_verbs)
    assert found[0] == value and reason in found[1]


def test_a_dry_run_prints_the_request_and_a_script_that_starts_the_task_once(capsys):
    words = ["bandwidth", "--hw", "a100", "--gpus", "8", "--cluster", CLUSTER, "--runs", "/shared/runs", "--dry"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "all-reduce over 8 ranks, 4 per node\n" in printed and "time       10m  (requested)\n" in printed
    script = printed[printed.index("#!/bin/bash") :]
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gres=gpu:a100:4",
        "#SBATCH --no-requeue",
        "#SBATCH --job-name=bandwidth",
    ):
        assert f"{line}\n" in script
    assert "module load slurm-scripts\n" in script and "--export=ALL" in script and "attempt.sh" not in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "1"], "--gpus 1: an all-reduce needs at least two ranks"),
        (["--rounds", "0"], "--rounds 0: expected a number above 0"),
        (["--sizes", "1,x"], "--sizes 1,x: expected whole numbers of MiB from 1 to 65536"),
        (["--gpus", "3"], "3 GPUs cannot be split evenly over 2 nodes"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(words, said, capsys):
    assert main(["bandwidth", "--cluster", CLUSTER, "--runs", "/shared/runs", "--dry", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_sizes_are_sorted_and_distinct():
    assert parse_sizes("16,1,016") == (1, 16)
