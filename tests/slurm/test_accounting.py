"""With slurmdbd and its database, status and why are as correct as without."""

import re
from collections.abc import Iterator

import pytest

from tests.slurm.cluster_runs import (
    kill_rank,
    make_starter,
    read_ends,
    read_last_step,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.slurm.conftest import Lab

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module", autouse=True)
def use_lab(lab_accounting: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab_accounting.environ["SLURM_CONF"])
        yield


@pytest.mark.long
def test_a_crash_a_requeue_a_cancel_and_a_lost_node_are_reported_correctly(lab_accounting, tmp_path, capsys):
    lab = lab_accounting
    start = make_starter(tmp_path / "runs", tmp_path / "cache")
    long = ("max_duration=12ep", "model.sleep_ms=250")
    crashed = start("crashed", *long, "--hw", "p100")
    cancelled = start("cancelled", *long, "--hw", "a100")
    lost = start("lost", *long, "--hw", "a5000")
    for run in (crashed, cancelled, lost):
        wait(f"a step of {run.name}", lambda run=run: read_last_step(run) >= 2)
    kill_rank(crashed, 0)
    lab.run("scancel", read_slurm_job_id(cancelled))
    lab.run("scontrol", "update", "nodename=a5000-0", "state=down", "reason=test")
    wait_for_end(lab, crashed)
    wait_for_end(lab, lost)
    lab.wait_for(read_slurm_job_id(cancelled), "CANCELLED")
    assert [end[1] for end in read_ends(crashed)] == ["crash", "done"]
    assert [end[1] for end in read_ends(lost)] == ["node_failure", "done"]
    capsys.readouterr()
    assert trainyard("status", crashed, cancelled, lost) == 0
    output = capsys.readouterr().out
    assert output.count(" done") == 2 and "stopped" in output
    assert trainyard("why", cancelled) == 0
    output = capsys.readouterr().out
    assert "cancelled" in output and f"trainyard resume {cancelled}" in output
    assert trainyard("status", "--used", crashed, cancelled, lost) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["RUN", "JOB", "FOR", "CORES"] and len(rows) == 5
    assert all(" 4 GiB " in row and re.search(r"GiB, \d+%", row) for row in rows[:3])
