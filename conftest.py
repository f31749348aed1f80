"""Set-up that precedes every test module: thread policy, and how many processes `pytest -n auto` starts."""

import os
from pathlib import Path

import pytest

from trainyard.hardware import count_cores, set_openmp_wait_policy

set_openmp_wait_policy(os.environ)

CLUSTER_FOLDERS = ("slurm", "container")
"""Below tests/: what starts a Slurm or a container, and mostly waits for it."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one process per core and two that wait for Slurm, fewer where memory is short (2 GiB each)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    by_memory = int(lines["MemAvailable"].split()[0]) // 2**21
    return max(1, min(count_cores() + 2, by_memory))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, where they share fixtures; start with those that wait for Slurm."""
    for item in items:
        if item.path.parent.name in CLUSTER_FOLDERS:
            item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath).with_suffix(""))))
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
