"""Queries of a real Slurm: its answers, its timeouts and its absence."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab
from trainyard.cluster import query as slurm
from trainyard.cluster.check import check_cluster, render_findings
from trainyard.cluster.description import load_cluster
from trainyard.cluster.query import NodeKind, Partition, SlurmJob
from trainyard.errors import UserError

GONE = "999999999"  # an id that no lab has given

NO_ACCOUNTING = "sacct: Slurm accounting storage is disabled."


@pytest.fixture
def current_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab, as the Slurm that this process uses."""
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    return lab


def replace_command(folder: Path, command: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a Slurm command by a shell script that comes first on PATH."""
    path = folder / "bin" / command
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)


def query_job(id: str) -> SlurmJob:
    return slurm.query_jobs([id])[0][id]


def test_a_slurm_that_answers_is_not_absent_and_returns_its_name(current_lab):
    assert slurm.explain_absence() is None
    assert slurm.query_cluster_name() == "lab"


def test_jobs_have_state_reason_and_nodes_as_slurm_prints_them(current_lab):
    running = current_lab.submit("sleep 60", "--partition=a100", "--nodelist=a100-1")
    waiting = current_lab.submit("true", "--partition=a100", f"--dependency=afterok:{running}")
    failed = current_lab.submit("exit 3", "--partition=a100")
    current_lab.wait_for(running, "RUNNING")
    current_lab.wait_for(failed, "FAILED")
    found, note = slurm.query_jobs([running, waiting, failed, GONE])
    assert found == {
        running: SlurmJob(running, "RUNNING", "None", "a100-1", 0, "squeue"),
        waiting: SlurmJob(waiting, "PENDING", "Dependency", "", 0, "squeue"),
        failed: SlurmJob(failed, "FAILED", "NonZeroExitCode", found[failed].nodes, 0, "squeue"),
    }
    assert note == NO_ACCOUNTING
    slurm.cancel([running, waiting])
    current_lab.wait_for(running, "CANCELLED")
    assert query_job(waiting).state == "CANCELLED"


def test_array_elements_are_returned_one_by_one_even_while_squeue_shows_them_as_one_line(current_lab):
    array = current_lab.submit("sleep 60", "--partition=p100", "--array=0-3%1")
    current_lab.wait_for(f"{array}_0", "RUNNING")
    assert (
        len(current_lab.run("squeue", "-h", "-j", array).splitlines()) == 2
    )  # without -r the waiting ones are one line
    found, note = slurm.query_jobs([f"{array}_0", f"{array}_3"])
    assert {id: job.state for id, job in found.items()} == {f"{array}_0": "RUNNING", f"{array}_3": "PENDING"}
    assert note == ""
    slurm.cancel([array])


def test_an_element_cancelled_alone_while_it_waits_is_forgotten_at_once(current_lab):
    array = current_lab.submit("sleep 60", "--partition=p100", "--array=0-3%1")
    current_lab.wait_for(f"{array}_0", "RUNNING")
    slurm.cancel([f"{array}_3"])
    found, note = slurm.query_jobs([f"{array}_2", f"{array}_3"])
    assert {id: job.state for id, job in found.items()} == {f"{array}_2": "PENDING"}
    assert note == NO_ACCOUNTING
    slurm.cancel([array])
    assert query_job(f"{array}_2").state == "CANCELLED"  # with its array, it is remembered


def test_a_requeued_job_counts_its_restarts(current_lab):
    job = current_lab.submit("sleep 60", "--partition=a100", "--requeue")
    current_lab.wait_for(job, "RUNNING")
    current_lab.run("scontrol", "requeue", job)
    current_lab.wait_for(job, "PENDING")
    assert query_job(job).restarts == 1
    slurm.cancel([job])


def test_ids_that_slurm_never_knew_are_absent_from_the_answer(current_lab):
    assert slurm.query_jobs([GONE]) == ({}, NO_ACCOUNTING)
    assert slurm.query_jobs([GONE, f"{GONE}_1"]) == ({}, NO_ACCOUNTING)
    assert slurm.query_jobs([]) == ({}, "")


def test_cancelling_an_ended_or_unknown_job_is_not_an_error(current_lab):
    ended = current_lab.submit("true", "--partition=a100")
    current_lab.wait_for(ended, "COMPLETED")
    slurm.cancel([ended, GONE])
    slurm.cancel([])
    assert query_job(ended).state == "COMPLETED"


def test_a_sacct_that_hangs_is_killed_and_noted(current_lab, tmp_path, monkeypatch):
    replace_command(tmp_path, "sacct", "sleep 60", monkeypatch)
    before = time.monotonic()
    assert slurm.query_jobs([GONE]) == ({}, "sacct: no answer within 5 s.")
    assert time.monotonic() - before < 8


def test_without_sacct_only_squeue_answers(current_lab, tmp_path, monkeypatch):
    job = current_lab.submit("true", "--partition=a100")
    (tmp_path / "squeue").symlink_to(shutil.which("squeue"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found, note = slurm.query_jobs([job, GONE])
    assert (list(found), note) == ([job], "sacct: is not on PATH.")


def test_squeue_takes_precedence_over_sacct_which_reports_a_requeued_job_as_lost(current_lab, tmp_path, monkeypatch):
    job = current_lab.submit("sleep 60", "--partition=a100")
    current_lab.wait_for(job, "RUNNING")
    rows = [f"{job}|NODE_FAIL|a100-0|None", f"{GONE}|CANCELLED by 1000|None assigned|Dependency|odd"]
    answer = "\n".join(["JobID|State|NodeList|Reason", *rows])
    replace_command(tmp_path, "sacct", f"cat <<'END'\n{answer}\nEND", monkeypatch)
    found, note = slurm.query_jobs([job, GONE])
    assert found[job].state == "RUNNING"
    assert found[GONE] == SlurmJob(GONE, "CANCELLED", "Dependency|odd", "", None, "sacct", cancelled_by=1000)
    assert note == ""
    slurm.cancel([job])


def test_only_sacct_knows_who_cancelled_a_job_that_squeue_still_lists(current_lab, tmp_path, monkeypatch):
    job = current_lab.submit("sleep 60", "--partition=a100")
    slurm.cancel([job])
    current_lab.wait_for(job, "CANCELLED")
    seen, note = slurm.query_jobs([job])
    assert (seen[job].state, seen[job].cancelled_by, note) == ("CANCELLED", None, "")
    answer = f"JobID|State|NodeList|Reason\n{job}|CANCELLED by 1000|a100-0|None"
    replace_command(tmp_path, "sacct", f"cat <<'END'\n{answer}\nEND", monkeypatch)
    assert query_job(job) == replace(seen[job], cancelled_by=1000)


def test_partitions_have_limits_preemption_and_node_resources(current_lab):
    found = slurm.query_partitions()
    nodes = NodeKind(nodes=2, unavailable=0, cpus=16, memory_mib=64000, features=("a100",), gres={"gpu:a100": 8})
    assert found["a100"] == Partition("a100", "up", None, "REQUEUE", 0, (nodes,))
    assert found["a100-grace"].grace_s == 20
    assert found["short"].time_limit_min == 1


def test_a_node_that_is_down_counts_as_unavailable(current_lab):
    current_lab.run("scontrol", "update", "NodeName=a5000-1", "State=DOWN", "Reason=test")
    try:
        (kind,) = slurm.query_partitions()["a5000"].kinds
    finally:
        current_lab.run("scontrol", "update", "NodeName=a5000-1", "State=RESUME")
    assert (kind.nodes, kind.unavailable) == (2, 1)


def test_a_partition_of_different_nodes_with_sockets_and_shards_is_parsed(current_lab, tmp_path, monkeypatch):
    answer = (
        "PARTITION|AVAIL|TIMELIMIT|NODES(A/I/O/T)|CPUS|MEMORY|AVAIL_FEATURES|GRES\n"
        "a100|up|2-12:30:00|3/1/0/4|128|1031000|a100,ib|gpu:a100:8(S:0-1),shard:a100:32(S:0,1)\n"
        "a100|up|2-12:30:00|0/0/0/0|1|1|(null)|(null)\n"
        "a100|up|2-12:30:00|0/1/1/2|64|515000|(null)|gpu:4,lustre:no_consume:10K"
    )
    replace_command(tmp_path, "sinfo", f"cat <<'END'\n{answer}\nEND", monkeypatch)
    assert slurm.query_partitions()["a100"] == Partition(
        "a100",
        "up",
        3630,
        "REQUEUE",
        0,
        (
            NodeKind(4, 0, 128, 1031000, ("a100", "ib"), {"gpu:a100": 8, "shard:a100": 32}),
            NodeKind(2, 1, 64, 515000, (), {"gpu": 4}),
        ),
    )


def test_without_sbatch_there_is_no_slurm_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.explain_absence() == "There is no Slurm here: sbatch is not on PATH."


def test_a_slurm_that_is_not_configured_is_distinguished_from_one_that_is_down(current_lab, tmp_path, monkeypatch):
    conf = Path(current_lab.environ["SLURM_CONF"]).read_text()
    (tmp_path / "empty.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "empty.conf"))
    assert slurm.explain_absence() == (
        "Slurm is installed here but not configured (is SLURM_CONF right?). scontrol: Unable to process configuration "
        "file."
    )
    (line,) = (line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    (tmp_path / "down.conf").write_text(conf.replace(line, "SlurmctldPort=9"))  # where nothing listens
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "down.conf"))
    down = slurm.explain_absence()
    assert down is not None
    assert down.startswith("The Slurm controller does not answer. scontrol: Slurmctld(primary) at ")
    assert down.endswith(" is DOWN.")


@pytest.mark.slow  # Slurm's commands try for nine seconds
def test_a_controller_that_is_down_raises_one_sentence_within_the_time_limit(current_lab, tmp_path, monkeypatch):
    conf = Path(current_lab.environ["SLURM_CONF"]).read_text()
    (line,) = (line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    (tmp_path / "down.conf").write_text(conf.replace(line, "SlurmctldPort=9"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "down.conf"))
    before = time.monotonic()
    with pytest.raises(UserError, match=r"^squeue: (no answer within 10 s|.*[Uu]nable to contact slurm controller)"):
        slurm.query_jobs(["1"])
    assert time.monotonic() - before < 13


# A cluster file against this Slurm

FITS = """\
slurm_name: lab
shared: [{shared}]
time_default: 30m
gpus:
  a100: {{card: a100-80-sxm, partition: a100, per_node: 8, nodes: 2, gres: "gpu:a100",
         constraint: a100, cores_per_gpu: 2, memory_gib_per_gpu: 7}}
  p100: {{card: p100-16-pcie, partition: p100, per_node: 4, nodes: 2, gres: gpu,
         cores_per_gpu: 4, memory_gib_per_gpu: 15}}
  cpu: {{card: cpu, partition: a5000, per_node: 4, nodes: 2, cores_per_gpu: 4, memory_gib_per_gpu: 15}}
"""


def check_lines(folder: Path, *replacements: tuple[str, str]) -> list[str]:
    text = FITS.format(shared=folder)
    for right, wrong in replacements:
        assert right in text
        text = text.replace(right, wrong, 1)
    (folder / "lab.yaml").write_text(text)
    return render_findings(check_cluster(load_cluster(folder / "lab.yaml"))).splitlines()


def test_nothing_is_wrong_with_a_file_that_fits(current_lab, tmp_path):
    lines = check_lines(tmp_path)
    assert [line for line in lines if line.startswith("wrong")] == []
    for expected in (
        "ok     slurm_name: lab.",
        "ok     gpus.a100: partition a100 has 2 nodes with 8 x gpu:a100, and cores and memory for them.",
        "ok     gpus.p100: partition p100 has 2 nodes with 4 x gpu, and cores and memory for them.",
        "ok     gpus.cpu: partition a5000 has 2 nodes with 4 x cpu, and cores and memory for them.",
        "note   gpus: Slurm has partitions that the file does not name: rtx2080ti, a100-urgent, a100-grace, short.",
        "ok     AuthInfo: a job that is started again waits 7 s first (cred_expire in AuthInfo).",
        "ok     MaxArraySize: a sweep has at most 10000 runs.",
        "note   AccountingStorageType: off: Slurm forgets a job 600 sec after its end, and takes any account and QOS. "
        "status and why also read the run folder.",
    ):
        assert expected in lines
    assert lines[-1].startswith("Nothing is wrong (notes: ")


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        (
            "slurm_name: lab",
            "slurm_name: tower",
            "wrong  slurm_name: the file is for 'tower', but the Slurm here is 'lab'. Check on the right cluster, or "
            "take its file.",
        ),
        (
            "partition: a100,",
            "partition: a1000,",
            "wrong  gpus.a100.partition: there is no partition 'a1000'. Nearest: a100. There are: p100, rtx2080ti, "
            "a5000, a100, a100-urgent, a100-grace, short.",
        ),
        (
            "gpu:a100",
            "gpu:a10",
            "wrong  gpus.a100.gres: no node of partition a100 has 'gpu:a10'. Nearest: gpu:a100. There are: gpu:a100.",
        ),
        (
            "constraint: a100",
            "constraint: a101",
            "wrong  gpus.a100.constraint: no such node meets 'a101'. Nearest: a100. Their features: a100.",
        ),
        (
            "per_node: 8",
            "per_node: 16",
            "wrong  gpus.a100.per_node: 16, but the nodes have at most 8 x gpu:a100. Write per_node: 8",
        ),
        ("nodes: 2", "nodes: 3", "wrong  gpus.a100.nodes: 3, but there are 2 such nodes. Write nodes: 2"),
        (
            "cores_per_gpu: 2",
            "cores_per_gpu: 3",
            "wrong  gpus.a100.cores_per_gpu: 3 x 8 is more than the 16 cores of a node. Write cores_per_gpu: 2",
        ),
        (
            "memory_gib_per_gpu: 7",
            "memory_gib_per_gpu: 8",
            "wrong  gpus.a100.memory_gib_per_gpu: 8 x 8 is more than the 62 GiB that Slurm may allocate on a node. "
            "Write memory_gib_per_gpu: 7",
        ),
        (
            "partition: p100",
            "partition: short, time_max: 1h",
            "wrong  gpus.p100.time_max: 1h, but partition short ends jobs after 1m. Write time_max: 1m",
        ),
        (
            "partition: p100",
            "partition: short",
            "wrong  gpus.p100.time_max: unlimited, but partition short ends jobs after 1m. Write time_max: 1m",
        ),
        (
            "partition: p100",
            "partition: short, time_max: 1m",
            "note   time_default: 30m is more than time_max of p100. Jobs there get time_max.",
        ),
        (
            "gpus:",
            "signal_delay_s: 600\ngpus:",
            "note   signal_delay_s: 600 s is more than a quarter of 30m, the usual time of a job. Such a job is warned "
            "when a quarter of its time is left.",
        ),
        (
            "gpus:",
            "signal_delay_s: 30\ngpus:",
            "note   signal_delay_s: 30 s, but Slurm may warn up to 60 s earlier than requested: a delay below 60 s "
            "guarantees no time.",
        ),
        (
            "gpus:",
            "python: pithon3\ngpus:",
            "wrong  python: there is no pithon3 here. Name one that the nodes also have.",
        ),
        (
            "partition: a100,",
            "partition: a100-grace,",
            "note   PreemptMode: partition a100-grace: a preempted job has 22 s between SIGTERM and its end. Steps "
            "since the last save are trained again: save often, or ask the administrator for a GraceTime.",
        ),
    ],
)
def test_a_mismatch_is_one_line_with_the_right_value(right, wrong, line, current_lab, tmp_path):
    assert line in check_lines(tmp_path, (right, wrong))


def test_a_partition_that_is_down_is_noted(current_lab, tmp_path):
    current_lab.run("scontrol", "update", "PartitionName=a100", "State=DOWN")
    try:
        lines = check_lines(tmp_path)
    finally:
        current_lab.run("scontrol", "update", "PartitionName=a100", "State=UP")
    assert "note   gpus.a100.partition: partition a100 is down: jobs wait. Ask the administrator." in lines


# With accounting


def test_sacct_remembers_what_squeue_has_forgotten(lab_accounting, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", lab_accounting.environ["SLURM_CONF"])
    ended = lab_accounting.submit("true", "--partition=a100")
    lab_accounting.wait_for(ended, "COMPLETED")
    replace_command(
        tmp_path, "squeue", "echo 'ID|STATE|RESTARTS|NODES|REASON'", monkeypatch
    )  # as it answers when MinJobAge has passed
    deadline = time.monotonic() + 30
    while (found := slurm.query_jobs([ended, GONE])[0]).get(ended) is None or found[ended].state != "COMPLETED":
        assert time.monotonic() < deadline, found  # slurmctld reports to the database in batches
        time.sleep(0.2)
    assert slurm.query_jobs([ended, GONE])[1] == ""
    assert (found[ended].source, found[ended].restarts) == ("sacct", None)
    assert GONE not in found


def test_an_account_that_the_user_may_not_charge_is_found_where_accounting_is_on(lab_accounting, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", lab_accounting.environ["SLURM_CONF"])
    user = lab_accounting.run("id", "-un").strip()
    for words in (("add", "account", "vision"), ("add", "user", user, "account=vision")):
        lab_accounting.run("sacctmgr", "--immediate", *words)
    assert slurm.query_accounts(user)["vision"] == {"normal"}
    lines = check_lines(tmp_path, ("gpus:", "account: visoin\ngpus:"))
    (line,) = (line for line in lines if " account: " in line)
    assert line.startswith(f"note   account: user {user} may not charge 'visoin'. Nearest: vision. Allowed: ")
    assert f"ok     account: user {user} may charge vision." in check_lines(
        tmp_path, ("gpus:", "account: vision\ngpus:")
    )


WELCOME = "Welcome to the cluster\\n--> job 7 of 10 slots is free | ask us | anything\\n"


@pytest.mark.parametrize("command", ["squeue", "sinfo", "scontrol"])
def test_lines_that_a_site_adds_to_an_answer_are_not_read(command, current_lab, tmp_path, monkeypatch):
    running = current_lab.submit("sleep 60", "--partition=a100", "--nodelist=a100-1")
    current_lab.wait_for(running, "RUNNING")
    before = slurm.query_partitions()
    replace_command(tmp_path, command, f"printf '{WELCOME}'; exec {shutil.which(command)} \"$@\"", monkeypatch)
    assert query_job(running) == SlurmJob(running, "RUNNING", "None", "a100-1", 0, "squeue")
    assert slurm.query_partitions().keys() == before.keys() and slurm.query_cluster_name() == "lab"
    slurm.cancel([running])


def test_an_answer_without_a_table_is_no_answer(current_lab, tmp_path, monkeypatch):
    replace_command(tmp_path, "squeue", "echo Maintenance until noon", monkeypatch)
    with pytest.raises(UserError, match=r"^squeue: expected a table of 5 columns, found: Maintenance until noon$"):
        slurm.query_jobs([GONE])


def test_variables_that_filter_or_format_answers_change_none(current_lab, monkeypatch):
    running = current_lab.submit("sleep 60", "--partition=a100", "--nodelist=a100-1")
    current_lab.wait_for(running, "RUNNING")
    others = {"STATES": "COMPLETED", "PARTITION": "p100", "USERS": "nobody", "NAMES": "x", "FORMAT": "%u", "SORT": "i"}
    for name, value in others.items():
        for command in ("SQUEUE", "SACCT", "SCANCEL", "SINFO"):
            monkeypatch.setenv(f"{command}_{name}", value)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SCANCEL_STATE", "PENDING")
    assert query_job(running).state == "RUNNING"
    assert slurm.query_partitions()["a100"].kinds[0].nodes == 2
    slurm.cancel([running])
    current_lab.wait_for(running, "CANCELLED")
