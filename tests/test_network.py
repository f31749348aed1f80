"""Ranks on nodes with addresses of their own find each other."""

import json
import os
import subprocess
import sys

import pytest

from tests.two_nodes import ADDRESSES, make_two_nodes
from trainyard.train.distributed import find_interface, find_own_address

_RANK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
from trainyard.train import distributed
from trainyard.train.world import read_world

distributed._STEP_TIMEOUT = timedelta(seconds=30)
choices = distributed.join(read_world(os.environ), Path(sys.argv[1]), os.environ, deterministic=True)
print(json.dumps([distributed.sum_over_ranks(torch.ones(1)).item(), choices]))
distributed.leave()
"""


def test_the_address_and_interface_of_the_loopback_route():
    assert find_own_address("127.0.0.1") == "127.0.0.1"
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("127.0.1.1") is None


@pytest.mark.slow
def test_ranks_meet_where_host_names_map_to_loopback_and_another_node_launched(tmp_path):
    """Rank 0 runs on node 1, while node 0 launched the ranks; node 1's user has named gloo's interface."""
    try:
        with make_two_nodes(tmp_path) as nodes:
            ranks = [
                subprocess.Popen(
                    [*nodes[node], sys.executable, "-c", _RANK, str(tmp_path)],
                    env=_describe_rank(rank) | ({"GLOO_SOCKET_IFNAME": "veth1"} if node == 1 else {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank, node in enumerate((1, 0))
            ]
            try:
                answers = [rank.communicate(timeout=120) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in answers]
    (total, main), (same, other) = (json.loads(output) for output, _ in answers)
    assert total == same == 2
    assert json.loads((tmp_path / "meeting-7-0-0.json").read_text())["address"] == ADDRESSES[1]
    assert main["gloo_socket_ifname"] == ["veth1", "GLOO_SOCKET_IFNAME was set"]
    assert other["network"][0] == ADDRESSES[0]
    assert other["gloo_socket_ifname"][0] == other["nccl_socket_ifname"][0] == "veth0"
    assert f"{ADDRESSES[0]}, from which this node reaches rank 0" in other["gloo_socket_ifname"][1]


def _describe_rank(rank: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GLOO_", "NCCL_"))}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LAUNCH_NODE_IPADDR": ADDRESSES[0]}
    return kept | slurm
