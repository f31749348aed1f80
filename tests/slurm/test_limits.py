"""Limits of accounts and QOS, and reservations: what Slurm says of them, and what submit, why and cluster-check say."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import LAB_FILE, make_starter, read_slurm_job_id, trainyard
from tests.slurm.conftest import Lab
from tests.training import FAMILIES
from trainyard.cluster import query as slurm
from trainyard.cluster.limits import Demand, describe_exceeded, explain_wait, find_exceeded
from trainyard.cluster.query import Limit, Rules
from trainyard.config.families import load_family

# As Slurm 22.05 prints them.
OWN = """\
Def Acct|Partition|QOS|Def QOS|Account|MaxWall|MaxTRES|GrpTRES|MaxJobs|MaxSubmit
root||normal||vision|00:20:00||||3
root||normal,tiny||root|||||
"""
SHARED = """\
Account|MaxWall|MaxTRES|GrpTRES|MaxJobs|MaxSubmit
root|||||
vision|00:20:00||gres/gpu=4||
"""
QOS = """\
Name|Flags|MaxWall|MaxTRES|MaxTRESPU|GrpTRES|MaxJobsPU|MaxSubmitPU
normal|||||||
tiny||00:30:00||gres/gpu=2|||1
wide|OverPartQOS|1-12:00:00|cpu=64,mem=64G||||
"""
PARTITIONS = (
    "PartitionName=a100 AllowGroups=ALL QoS=N/A DefaultTime=00:10:00 GraceTime=0 Nodes=a100-0 PreemptMode=REQUEUE\n"
    "PartitionName=brief AllowGroups=ALL QoS=tiny DefaultTime=00:10:00 GraceTime=0 Nodes=a100-0 PreemptMode=REQUEUE\n"
)
RESERVATIONS = (
    "ReservationName=class StartTime=2026-11-27T22:39:48 EndTime=2026-11-28T22:39:48 Duration=1-00:00:00 Nodes=p100-0 "
    "NodeCnt=1 CoreCnt=16 Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=16 Users=root State=ACTIVE\n"
    "ReservationName=upkeep StartTime=2026-11-27T23:39:48 EndTime=2026-11-28T00:39:48 Duration=01:00:00 Nodes=a100-0 "
    "NodeCnt=1 CoreCnt=16 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=16 "
    "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a\n"
)
JOB = (
    "JobId=7 JobName=wrap UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901752 Nice=0 Account={account} "
    "QOS={qos} JobState=PENDING Reason={reason} Dependency=(null) TimeLimit={time} TimeMin=N/A Partition=a100 "
    "NodeList= NumNodes=1 NumCPUs=1 CPUs/Task=1 TRES=cpu=1,mem=500M,node=1,billing=1,gres/gpu={gpus} "
    "TresPerNode=gres:gpu:a100:{gpus} \n"
)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of what Slurm answered, which commands on PATH repeat; returns the file for `scontrol show job`."""
    texts = {"own": OWN, "shared": SHARED, "qos": QOS, "partition": PARTITIONS, "reservation": RESERVATIONS}
    texts["config"] = "AccountingStorageEnforce = associations,limits,qos\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    commands = {
        "sacctmgr": "*'show user'*) cat own ;; *associations*) cat shared ;; *'show qos'*) cat qos ;;",
        "scontrol": "*hostnames*) echo $3 ;; *) for last; do :; done; [ -e $last ] || last=job; cat $last ;;",
    }
    for name, cases in commands.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\ncd {tmp_path}\ncase "$*" in {cases} esac\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "job"


def test_of_several_limits_the_one_counts_that_slurm_looks_at_first(recorded):
    rules = slurm.query_rules("root")
    tiny = [Limit("QOS tiny", "MaxWall", "", 30), Limit("QOS tiny", "MaxTRESPerUser", "gres/gpu", 2)]
    tiny.append(Limit("QOS tiny", "MaxSubmitJobsPerUser", "", 1))
    assert rules.find_limits(partition="a100") == [], "root's own account has no limits, and its QOS normal neither"
    assert rules.find_limits(qos="tiny", partition="a100") == tiny
    assert rules.find_limits(partition="brief") == tiny, "the partition's QOS"
    assert rules.find_limits(account="vision") == [
        Limit("account vision", "MaxWall", "", 20),
        Limit("account vision", "MaxSubmitJobs", "", 3),
        Limit("account vision", "GrpTRES", "gres/gpu", 4),
    ]
    assert rules.find_limits(account="vision", qos="tiny")[:3] == tiny, "a QOS comes before an account"
    wide = {limit.name: limit for limit in rules.find_limits(qos="wide", partition="brief")}
    assert wide["MaxWall"] == Limit("QOS wide", "MaxWall", "", 2160)
    assert wide["MaxTRESPerJob"] == Limit("QOS wide", "MaxTRESPerJob", "cpu", 64)
    assert Rules(False, rules.own, rules.shared, rules.qos, {}).find_limits(qos="tiny") == []


@pytest.mark.parametrize(
    ("limit", "text", "options"),
    [
        (Limit("QOS a", "MaxWall", "", 90), "QOS a allows MaxWall=01:30:00, but the job requests 8h", "--time 1h30m"),
        (Limit("QOS a", "MaxWall", "", 480), "", ""),
        (
            Limit("QOS a", "MaxTRESPerUser", "gres/gpu", 7),
            "MaxTRESPerUser=gres/gpu=7, but the job requests 16",
            "--gpus 7",
        ),
        (Limit("QOS a", "MaxTRESPerJob", "cpu", 45), "MaxTRESPerJob=cpu=45, but the job requests 64", "--gpus 8"),
        (Limit("account b", "GrpTRES", "node", 1), "account b allows GrpTRES=node=1, but", "--gpus 8"),
        (Limit("account b", "GrpTRES", "gres/gpu", 0), "account b allows GrpTRES=gres/gpu=0, but", ""),
        (Limit("account b", "GrpTRES", "gres/gpu:h100", 0), "", ""),
        (Limit("QOS a", "MaxSubmitJobsPerUser", "", 1), "", ""),
    ],
)
def test_a_job_that_exceeds_a_limit_by_itself_is_told_what_fits(limit: Limit, text: str, options: str):
    demand = Demand(480, 2, 16, {"cpu": 64, "node": 2, "gres/gpu": 16, "gres/gpu:a100": 16})
    assert (find_exceeded([limit], demand) is not None) == bool(text)
    if text:
        wait = describe_exceeded(limit, demand)
        assert text in wait.text and wait.options == options


@pytest.mark.parametrize(
    ("reason", "words", "text", "options"),
    [
        (
            "QOSMaxWallDurationPerJobLimit",
            {"qos": "tiny", "time": "01:00:00"},
            "QOS tiny allows MaxWall=00:30:00, but the job requests 1h",
            "--time 30m",
        ),
        (
            "QOSMaxGRESPerUser",
            {"qos": "tiny", "gpus": 4},
            "QOS tiny allows MaxTRESPerUser=gres/gpu=2, but the job requests 4",
            "--gpus 2",
        ),
        (
            "QOSMaxGRESPerUser",
            {"qos": "tiny", "gpus": 2},
            "QOS tiny allows MaxTRESPerUser=gres/gpu=2, which other jobs use",
            "",
        ),
        (
            "AssocGrpGRES",
            {"account": "vision", "gpus": 6},
            "account vision allows GrpTRES=gres/gpu=4, but the job requests 6",
            "--gpus 4",
        ),
        (
            "AssocMaxWallDurationPerJobLimit",
            {"account": "vision", "time": "1-00:00:00"},
            "MaxWall=00:20:00",
            "--time 20m",
        ),
        ("Priority", {}, "", ""),
    ],
)
def test_a_pending_job_names_limit_and_value(reason, words, text, options, recorded):
    words = {"account": "root", "qos": "normal", "time": "00:10:00", "gpus": 1, **words}
    recorded.write_text(JOB.format(reason=reason, **words))
    wait = explain_wait("7", now=0.0)
    assert (text in wait.text, wait.options) == (True, options) and bool(wait.text) == bool(text)


@pytest.mark.parametrize(
    ("now", "limit", "text", "options"),
    [
        (
            "22:49:48",
            "01:00:00",
            "begins 2026-11-27 23:39, in 50m, before the job could end (1h); 49m still fit",
            "--time 49m",
        ),
        ("23:38:30", "01:00:00", "begins 2026-11-27 23:39, in 1m18s, and ends 2026-11-28 00:39", ""),
        ("23:50:00", "01:00:00", "has its nodes until 2026-11-28 00:39", ""),
        ("22:00:00", "00:10:00", "", ""),
    ],
)
def test_a_job_that_waits_for_upkeep_says_what_still_fits(now: str, limit: str, text: str, options: str, recorded):
    reason = "ReqNodeNotAvail,_Reserved_for_maintenance"
    recorded.write_text(JOB.format(reason=reason, account="root", qos="normal", time=limit, gpus=1))
    at = time.mktime(time.strptime(f"2026-11-27 {now}", "%Y-%m-%d %H:%M:%S"))
    wait = explain_wait("7", now=at)
    assert (wait.text, wait.options) == (f"reservation upkeep {text}" if text else "", options)


# On a Slurm that enforces them


@pytest.fixture
def on_lab(lab_limits: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("SLURM_CONF", lab_limits.environ["SLURM_CONF"])
    yield lab_limits
    lab_limits.run("scancel", "--name=stripes")


def write_file(path: Path, **entries: object) -> Path:
    content = yaml.safe_load(LAB_FILE.read_text())
    for kind in content["gpus"].values():
        kind["nodes"] = 1
    path.write_text(yaml.safe_dump({**content, **entries}, sort_keys=False))
    return path


def follow_advice(output: str) -> None:
    """Type what the last line of `why` says."""
    line = output.splitlines()[-1].removeprefix("next: ")
    for command in line.split(" && "):
        assert trainyard(*shlex.split(command)[1:], *(["--jobs", FAMILIES] if " resume " in command else [])) == 0


@pytest.mark.slurm
def test_submit_refuses_what_a_limit_would_never_start_and_what_it_says_works(on_lab, tmp_path, capsys):
    cpus = {"card": "cpu", "partition": "p100", "per_node": 2, "nodes": 1, "cores_per_gpu": 1, "time_max": "30m"}
    content = yaml.safe_load(write_file(tmp_path / "tiny.yaml").read_text())
    gpus = {"a100": content["gpus"]["a100"], "cpus": cpus}
    file = write_file(tmp_path / "tiny.yaml", qos="tiny", gpus=gpus, sbatch={"hold": True}, data={})
    raw = tmp_path / "raw"
    load_family(FAMILIES, "stripes", "pack").synthesize(raw, count=64, seed=0)
    fixed = [
        "--jobs",
        FAMILIES,
        "--runs",
        tmp_path / "runs",
        "--cluster",
        file,
        f"data.cache={tmp_path}/cache",
        "--no-plan",
    ]
    words = ["submit", "stripes", "data.decode=cpu", *fixed, f"data.path={raw}"]

    def refuse(*more: object) -> str:
        assert trainyard(*words, *more) == 2
        assert not list((tmp_path / "runs").glob("*/*"))
        return capsys.readouterr().err

    error = refuse("--time", "8h")
    assert "QOS tiny allows MaxWall=00:30:00, but the job requests 8h" in error
    assert error.endswith("Request what fits: --time 30m (make: TIME=30m)\n")
    error = refuse("--time", "30m", "--gpus", 4)
    assert "QOS tiny allows MaxTRESPerUser=gres/gpu=2, but the job requests 4" in error
    assert error.endswith("Request what fits: --gpus 2 (make: GPUS=2)\n")
    error = refuse("--time", "30m", "--gpus", 2)
    assert "QOS tiny allows MaxSubmitJobsPerUser=1 of your jobs in the queue, and 0 are there, but 2 jobs are" in error
    pack = re.search(r"Pack first: trainyard (pack .*) OUT, then submit with data\.path=OUT", error)
    assert pack is not None
    out = tmp_path / "packed"
    assert trainyard(*shlex.split(pack[1]), out, "--jobs", FAMILIES) == 0
    words[-1] = f"data.path={out}"
    capsys.readouterr()
    assert trainyard(*words, "--time", "30m", "--gpus", 2, "--name", "fits") == 0
    assert trainyard(*words, "--time", "30m", "--name", "second") == 2
    assert "and 1 are there, but a job is submitted. Submit again when one of them has ended" in capsys.readouterr().err


@pytest.mark.slurm
def test_why_names_the_limit_of_a_job_that_waits_for_it_and_its_line_works(on_lab, tmp_path, capsys):
    file = write_file(tmp_path / "held.yaml", qos="tiny", sbatch={"hold": True})
    run = make_starter(tmp_path / "runs", tmp_path / "cache")("late", "--hw", "a100", "--time", "30m", cluster=file)
    on_lab.run("sacctmgr", "--immediate", "modify", "qos", "tiny", "set", "MaxWall=00:10:00")
    try:
        on_lab.run("scontrol", "release", read_slurm_job_id(run))
        wait_for_reason(on_lab, run, "QOSMaxWallDurationPerJobLimit")
        capsys.readouterr()
        assert trainyard("why", run) == 0
        output = capsys.readouterr().out
        assert "It waits: QOS tiny allows MaxWall=00:10:00, but the job requests 30m." in output
        assert output.endswith(f"next: trainyard cancel {run} && trainyard resume {run} --time 10m\n")
        follow_advice(output)
        on_lab.run("scontrol", "release", read_slurm_job_id(run))
        on_lab.wait_for(read_slurm_job_id(run), "RUNNING")
    finally:
        on_lab.run("sacctmgr", "--immediate", "modify", "qos", "tiny", "set", "MaxWall=00:30:00")


@pytest.mark.slurm
def test_why_names_the_upkeep_that_comes_before_the_end_and_the_run_uses_the_gap(on_lab, tmp_path, capsys):
    upkeep = ("ReservationName=upkeep", "StartTime=now+20minutes", "Duration=60", "Nodes=a100-0", "Flags=MAINT")
    on_lab.run("scontrol", "create", "reservation", *upkeep, "Users=root")
    try:
        file = write_file(tmp_path / "site.yaml")
        start = make_starter(tmp_path / "runs", tmp_path / "cache")
        run = start("gap", "max_duration=10000ep", "--hw", "a100", "--time", "1h", cluster=file)
        wait_for_reason(on_lab, run, "ReqNodeNotAvail, Reserved for maintenance")
        capsys.readouterr()
        assert trainyard("why", run) == 0
        output = capsys.readouterr().out
        assert "waiting: its nodes are reserved for maintenance before it could end" in output
        assert re.search(
            r"It waits: reservation upkeep begins .*, in \d+m\w*, before the job could end \(1h\);", output
        )
        assert re.search(rf"trainyard cancel {run} && trainyard resume {run} --time \d+m\n$", output)
        follow_advice(output)
        on_lab.wait_for(read_slurm_job_id(run), "RUNNING")
        assert trainyard("cancel", run) == 0
    finally:
        on_lab.try_run("scontrol", "delete", "ReservationName=upkeep")


def wait_for_reason(lab: Lab, run: Path, reason: str) -> None:
    deadline = time.monotonic() + 60
    while lab.run("squeue", "-h", "-j", read_slurm_job_id(run), "-o", "%r").strip() != reason:
        assert time.monotonic() < deadline, lab.run("squeue")
        time.sleep(0.2)


@pytest.mark.slurm
def test_a_check_names_the_limits_and_a_qos_that_does_not_exist(on_lab, tmp_path, capsys):
    assert trainyard("cluster-check", write_file(tmp_path / "tiny.yaml", qos="tiny", time_default="8h")) == 1
    output = capsys.readouterr().out
    for line in (
        "wrong  gpus.a100.time_max: QOS tiny allows MaxWall=00:30:00, but the job requests 8h. Write time_max: 30m",
        "note   gpus.a100: QOS tiny allows MaxTRESPerUser=gres/gpu=2, of 8 here. At most: --gpus 2",
        "note   gpus.a100: QOS tiny allows MaxSubmitJobsPerUser=1 of your jobs in the queue, but one submit may need "
        "two: one packs the data, one trains. Pack first: trainyard pack JOB RAW OUT",
    ):
        assert line in output.splitlines()
    assert trainyard("cluster-check", write_file(tmp_path / "gone.yaml", qos="tinny", account="none")) == 1
    output = capsys.readouterr().out
    assert "wrong  qos: there is no QOS 'tinny'. Nearest: tiny. There are: normal, tiny." in output.splitlines()
