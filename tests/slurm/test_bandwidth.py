"""The bandwidth job on a real Slurm whose two nodes have addresses of their own."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import LAB_FILE
from tests.slurm.conftest import skip_without
from tests.slurm.two_node_lab import TwoNodeLab, run_two_node_lab
from tests.two_nodes import ADDRESSES, make_two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def two_node_lab(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodeLab]:
    """A lab whose nodes have addresses of their own."""
    skip_without("slurmctld", "slurmd", "sinfo", packages="slurmctld slurmd slurm-client")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(make_two_nodes(tmp_path))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
        yield stack.enter_context(run_two_node_lab(tmp_path_factory.mktemp("lab"), hosts))


def test_two_nodes_measure_all_reduce_over_the_network_between_them(two_node_lab: TwoNodeLab, tmp_path: Path):
    lab, jobs = two_node_lab, tmp_path / "jobs"
    jobs.mkdir()
    words = ["bandwidth", "--hw", "a100", "--sizes", "1,4", "--rounds", "3", "--cluster", LAB_FILE]
    folders = ["--jobs", jobs, "--runs", tmp_path / "runs", "--results", tmp_path / "results"]
    said = lab.run("env", "SBATCH_EXPORT=NONE", sys.executable, "-m", "trainyard", *words, *folders)
    job = said.partition("submitted  Slurm job ")[2].split()[0]
    state = lab.wait_for(job, ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"))
    (folder,) = (tmp_path / "runs" / "bandwidth").iterdir()
    printed, errors = ((folder / "slurm" / f"{job}_0_log.{end}").read_text() for end in ("out", "err"))
    assert state == "COMPLETED", printed + errors
    sent = int(re.search(r"veth0:(?: *\d+){8} +(\d+)", lab.run("cat", "/proc/net/dev"))[1])
    assert sent > 3 * (5 << 20), "not all of it went over the network between the nodes"
    (path,) = (tmp_path / "results").iterdir()
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert path.name.startswith("bandwidth-a100-") and str(path) in printed
    assert [rank["host"] for rank in head["ranks"]] == ["node0", "node1"]
    assert head["choices"]["backend"]["value"] == "gloo"
    assert head["choices"]["network"]["value"] == ADDRESSES[0]
    assert head["choices"]["gloo_socket_ifname"]["value"] == "veth0"
    assert {"versions", "machine", "code"} <= head["environment"].keys() and head["command"].endswith("results")
    assert [line["size_bytes"] for line in lines] == [1 << 20, 4 << 20]
    for line in lines:
        assert line["ranks"] == 2 and len(line["seconds"]) == 3 and min(line["seconds"]) > 0
        assert line["bus_gb_s"]["median"] == pytest.approx(line["algorithm_gb_s"]["median"])  # 2(n-1)/n is 1
    assert "all_reduce 4 MiB" in printed and "backend" in printed and "ranks compute on the CPU" in printed
