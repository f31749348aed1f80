"""Queries Slurm for jobs, partitions and settings. If Slurm does not answer in time, the error is one sentence.

Each call runs one short-lived Slurm command from PATH. SLURM_CONF works as usual; variables that filter an answer or
change its form do not (`variables.select_for_slurm`), and lines that a site adds to it are not read (`_query_table`).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainyard.cluster.variables import select_for_slurm
from trainyard.errors import UserError

_TIMEOUT_S = 10.0
_DATABASE_TIMEOUT_S = 5.0  # if the database is down, sacct waits for minutes, which is too long for a listing


class SlurmError(UserError):
    """A failed request to Slurm. One line, with Slurm's message."""


@dataclass(frozen=True)
class SlurmJob:
    """A job, or an element of an array, as Slurm reports it."""

    id: str  # "12", or "12_3" for an element
    state: str  # as Slurm names it: PENDING, RUNNING, COMPLETED, NODE_FAIL, ...
    reason: str  # why it waits, or why it ended; "None" if Slurm gives no reason
    nodes: str  # "a100-[0-1]"; "" until nodes are allocated
    restarts: int | None  # None: not reported by `source`
    source: str  # "squeue" or "sacct"
    cancelled_by: int | None = None  # uid; None: not cancelled, or only accounting knows


@dataclass(frozen=True)
class JobUsage:
    """Resources that a job requested, and its usage as Slurm counted it: of its newest start alone."""

    id: str
    elapsed_s: int
    cores: int
    busy_s: float  # of all cores together
    memory_gib: float | None  # requested, of each node; None: unknown
    largest_gib: float | None  # the most that one of its processes' tasks held; None: it still runs, or nobody counted


@dataclass(frozen=True)
class NodeKind:
    """Identical nodes of one partition."""

    nodes: int
    unavailable: int  # how many of them are down, drained or unknown
    # Of each node:
    cpus: int
    memory_mib: int
    features: tuple[str, ...]
    gres: dict[str, int]  # count by name, with the type if it has one: {"gpu:a100": 8}


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    state: str  # "up", "down", "drain" or "inact"
    time_limit_min: int | None  # None: unlimited
    preempt_mode: str  # what preemption does to a job: "OFF", "REQUEUE", "CANCEL", "SUSPEND", "GANG,SUSPEND"
    grace_s: int  # between the decision to preempt a job and the start of killing it
    kinds: tuple[NodeKind, ...]


@dataclass(frozen=True)
class Limit:
    """The most that Slurm lets one job have, or all jobs of a user or an account together."""

    of: str  # "QOS short" or "account vision"
    name: str  # as for sacctmgr: "MaxWall", "MaxTRESPerUser", ...
    resource: str  # which it limits: "gres/gpu", "cpu", "node"; "": time or jobs
    most: int  # minutes, jobs, or how much of the resource

    def __str__(self) -> str:
        value = f"{self.most // 60:02}:{self.most % 60:02}:00" if "Wall" in self.name else str(self.most)
        return f"{self.of} allows {self.name}={f'{self.resource}=' if self.resource else ''}{value}"


@dataclass(frozen=True)
class Rules:
    """Limits from accounting, of a user's accounts and of every QOS: rows by the names of their columns."""

    are_enforced: bool
    own: list[dict[str, str]]  # the user in each account
    shared: list[dict[str, str]]  # those accounts
    qos: dict[str, dict[str, str]]
    qos_of_partition: dict[str, str]

    def find_limits(self, *, account: str = "", qos: str = "", partition: str = "") -> list[Limit]:
        """Return the limits of a job; where several say the same, the first that Slurm looks at.

        Args:
            account, qos: "": the user's default.
        """
        if not self.are_enforced:
            return []
        own = [
            row
            for row in self.own
            if row["Account"] == (account or row["DefaultAccount"]) and row["Partition"] in ("", partition)
        ]
        allowed = own[0]["QOS"] if own and "," not in own[0]["QOS"] else ""
        name = qos or (own[0]["DefaultQOS"] if own else "") or allowed or "normal"
        of_job, of_partition = (self.qos.get(each, {}) for each in (name, self.qos_of_partition.get(partition, "")))
        first = [of_job, of_partition] if "OverPartQOS" in of_job.get("Flags", "") else [of_partition, of_job]
        shared = [row for row in self.shared if own and row["Account"] == own[0]["Account"]]
        limits: dict[tuple[str, str], Limit] = {}
        for row in (*first, *own[:1], *shared):
            for limit in _parse_limits(row):
                limits.setdefault((limit.name.replace("JobsPerUser", "Jobs"), limit.resource), limit)
        return list(limits.values())


@dataclass(frozen=True)
class Reservation:
    """Nodes that Slurm keeps free for somebody, or for maintenance. Times are seconds since the epoch."""

    name: str
    start: float
    end: float


def explain_absence() -> str | None:
    """Return None if Slurm answers here, else one sentence with the reason. Takes milliseconds if Slurm answers."""
    if shutil.which("sbatch") is None:
        return "There is no Slurm here: sbatch is not on PATH."
    try:
        answer = _run(["scontrol", "ping"], _TIMEOUT_S)
    except SlurmError as error:
        return _describe_failure(str(error))
    if " is UP" in answer.stdout:  # the exit code covers all controllers, but one is enough
        return None
    return _describe_failure(_extract_error("scontrol", answer))


def _describe_failure(message: str) -> str:
    if any(words in message for words in ("configuration source", "configuration file", "cannot stat file")):
        return f"Slurm is installed here but not configured (is SLURM_CONF right?). {message}"
    return f"The Slurm controller does not answer. {message}"


def query_jobs(ids: Iterable[str]) -> tuple[dict[str, SlurmJob], str]:
    """Query the current state of jobs.

    squeue comes first: after the loss of a node, sacct reports NODE_FAIL although Slurm has already requeued the job.
    sacct is queried only for jobs that squeue has forgotten, MinJobAge seconds after their end (300 by default) or, of
    a pending array element that was cancelled alone, immediately; and for who cancelled a job, which squeue never says.

    Args:
        ids: "12", or "12_3" for elements of arrays.

    Returns:
        the jobs found, by id; and why sacct could not find the others ("" if it answered or was not needed).

    Raises:
        SlurmError: squeue does not answer.
    """
    wanted = set(ids)
    jobs = {job.id: job for job in _query_squeue(wanted) if job.id in wanted} if wanted else {}
    forgotten = wanted - jobs.keys()
    asked = forgotten | {id for id, job in jobs.items() if job.state == "CANCELLED"}
    if not asked:
        return jobs, ""
    try:
        remembered = {job.id: job for job in _query_sacct(asked)}
    except SlurmError as error:
        return jobs, str(error) if forgotten else ""
    by = {id: replace(job, cancelled_by=remembered[id].cancelled_by) for id, job in jobs.items() if id in remembered}
    return {**jobs, **by, **{id: job for id, job in remembered.items() if id in forgotten}}, ""


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs and elements of arrays. Cancelling an ended job is not an error.

    Raises:
        SlurmError: Slurm refused, or does not answer.
    """
    if ids:
        _run_checked(["scancel", "--", *ids])  # ids come from run folders: none of them is an option


def cancel_scripts(folder: Path) -> None:
    """Cancel what waits or runs from batch scripts in a folder: for jobs of which no id is known.

    Raises:
        SlurmError: Slurm does not answer, or refused.
    """
    rows = _query_table(["squeue", f"--user={os.getuid()}", "--format=%A|%o"], columns=2)
    cancel([id for id, script in rows if script.startswith(f"{folder}/")])


def query_cluster_name() -> str:
    """Return the ClusterName of the Slurm that answers here.

    Raises:
        SlurmError: Slurm does not answer.
    """
    settings = query_settings()
    if "ClusterName" not in settings:
        raise SlurmError("scontrol: its answer to 'scontrol show config' has no ClusterName.")
    return settings["ClusterName"]


def query_settings() -> dict[str, str]:
    """Return the controller's configuration, as `scontrol show config` prints it.

    Raises:
        SlurmError: the controller does not answer.
    """
    lines = _run_checked(["scontrol", "show", "config"]).splitlines()
    pairs = (re.match(r"(\w+)\s*= ?(.*)", line) for line in lines)
    return {pair[1]: pair[2].strip() for pair in pairs if pair}


def query_partitions() -> dict[str, Partition]:
    """Return every partition that this user may see, by name.

    Raises:
        SlurmError: the controller does not answer.
    """
    kinds: dict[str, list[NodeKind]] = {}
    limits: dict[str, tuple[str, int | None]] = {}
    # --exact: one line for each partition and kind of node, so that no number is "16 or more".
    for row in _query_table(["sinfo", "--exact", "--format=%R|%a|%l|%F|%c|%m|%f|%G"], columns=8):
        name, state, limit, counts, cpus, memory, features, gres = row
        limits[name] = (state, _parse_time_limit_min(limit))
        kinds.setdefault(name, []).append(_parse_node_kind(counts, cpus, memory, features, gres))
    preemption = _query_preemption()
    return {
        name: Partition(name, *limits[name], *preemption[name], tuple(kind for kind in node_kinds if kind.nodes))
        for name, node_kinds in kinds.items()
        if name in preemption  # otherwise it was deleted between the two queries
    }


def query_accounts(user: str) -> dict[str, set[str]]:
    """Return the accounts that a user may charge, with the QOS allowed for each.

    Raises:
        SlurmError: there is no accounting, or its database does not answer.
    """
    where = ["show", "associations", "where", f"user={user}", "format=Account,QOS"]
    qos_by_account: dict[str, set[str]] = {}
    for account, qos in _query_table(["sacctmgr", "--parsable2", *where], columns=2, timeout_s=_DATABASE_TIMEOUT_S):
        qos_by_account.setdefault(account, set()).update(qos.split(",") if qos else ())
    return qos_by_account


def query_rules(user: str) -> Rules:
    """Return what accounting says about a user's accounts and about every QOS.

    Raises:
        SlurmError: there is no accounting, or its database does not answer.
    """
    own = _query_rules(["user", user, "withassoc"], ("DefaultAccount", "Partition", "QOS", "DefaultQOS", *_OF_ACCOUNT))
    names = ",".join(sorted({row["Account"] for row in own}))
    # Limits that an account's users share are not shown with each of them.
    shared = _query_rules(["associations", "where", f"account={names}", "user="], _OF_ACCOUNT) if own else []
    qos = {row["Name"]: row for row in _query_rules(["qos"], ("Name", "Flags", *_OF_QOS))}
    partitions = {name: words.get("QoS", "N/A") for name, words in _query_partition_words().items()}
    enforced = re.search("limits|safe", query_settings()["AccountingStorageEnforce"]) is not None
    return Rules(enforced, own, shared, qos, partitions)


def query_job_words(id: str) -> dict[str, str]:
    """Return a job's request, and its reason to wait, as `scontrol show job` names them.

    Raises:
        SlurmError: Slurm does not know the job, or does not answer.
    """
    return _split_words(_run_checked(["scontrol", "--oneliner", "show", "job", id]))


def query_reservations(partition: str) -> list[Reservation]:
    """Return the reservations of nodes of a partition, the earliest first.

    Raises:
        SlurmError: the controller does not answer.
    """
    lines = [
        _split_words(line) for line in _run_checked(["scontrol", "--oneliner", "show", "reservation"]).splitlines()
    ]
    nodes = set(_list_hosts(_query_partition_words().get(partition, {}).get("Nodes", "")))
    reservations = [
        Reservation(words["ReservationName"], *(_parse_local_time(words[name]) for name in ("StartTime", "EndTime")))
        for words in lines
        if "ReservationName" in words and nodes & set(_list_hosts(words["Nodes"]))
    ]
    return sorted(reservations, key=lambda each: each.start)


def count_queued(user: str, limit: Limit) -> int:
    """Return how many jobs that count for a limit a user has in the queue; each array element is a job.

    Raises:
        SlurmError: squeue does not answer.
    """
    kind, _, name = limit.of.partition(" ")
    command = ["squeue", "--array", f"--user={user}", f"--{kind.lower()}={name}", "--format=%i|%T"]
    return len(_query_table(command, columns=2))


# Jobs


def _query_squeue(ids: Iterable[str]) -> Iterator[SlurmJob]:
    """Yield the elements, one by one, of every array that one of `ids` belongs to."""
    whole = ",".join(sorted({id.partition("_")[0] for id in ids}))
    # The reason comes last: it is the only field that may contain the separator.
    fields = "JobArrayID:|,State:|,RestartCnt:|,NodeList:|,Reason:"
    try:
        rows = _query_table(["squeue", "--array", "--states=all", f"--jobs={whole}", f"--Format={fields}"], columns=5)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # reported only for a single id that squeue has forgotten
            return
        raise
    for id, state, restarts, nodes, reason in rows:
        yield SlurmJob(id, state, reason, nodes, int(restarts), "squeue")


def _query_sacct(ids: Iterable[str]) -> Iterator[SlurmJob]:
    command = ["sacct", "--allocations", "--parsable2", "--format=JobID,State,NodeList,Reason"]
    command.append(f"--jobs={','.join(sorted(ids))}")
    for id, state, nodes, reason in _query_table(command, columns=4, timeout_s=_DATABASE_TIMEOUT_S):
        nodes = "" if nodes == "None assigned" else nodes
        state, _, by = state.partition(" by ")  # "CANCELLED by 1000"
        yield SlurmJob(id, state.split()[0], reason, nodes, None, "sacct", int(by) if by.isdigit() else None)


def query_usage(ids: Iterable[str]) -> dict[str, JobUsage]:
    """Return what jobs used, by id; those that accounting does not know are left out.

    Raises:
        SlurmError: there is no accounting, or its database does not answer.
    """
    command = ["sacct", "--parsable2", "--noconvert", f"--jobs={','.join(sorted(ids))}"]
    command.append("--format=JobID,ElapsedRaw,AllocCPUS,TotalCPU,ReqMem,MaxRSS")
    steps: dict[str, list[list[str]]] = {}
    for id, *cells in _query_table(command, columns=6, timeout_s=_DATABASE_TIMEOUT_S):
        steps.setdefault(id.partition(".")[0], []).append(cells)
    usage = {}
    for id, ((elapsed, cores, busy, requested, _), *parts) in steps.items():
        held = [size for *_, text in parts if (size := _parse_gib(text))]
        largest = max(held, default=None)
        usage[id] = JobUsage(id, int(elapsed), int(cores), _parse_cpu_s(busy), _parse_gib(requested), largest)
    return usage


def _parse_cpu_s(text: str) -> float:
    """Parse "1-02:03:04", "02:03:04" or "03:04.056" as seconds."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds + 86400 * int(days or 0)


def _parse_gib(text: str) -> float | None:
    """Parse "64G", "1234K", "65536M" or bytes as GiB; None if it says nothing."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)[nc]?", text)
    return float(match[1]) * 1024.0 ** (" KMGT".index(match[2] or " ") - 3) if match and float(match[1]) else None


# Limits and reservations

_OF_ACCOUNT = ("Account", "MaxWall", "MaxTRESPerJob", "GrpTRES", "MaxJobs", "MaxSubmitJobs")
_OF_QOS = ("MaxWall", "MaxTRESPerJob", "MaxTRESPerUser", "GrpTRES", "MaxJobsPerUser", "MaxSubmitJobsPerUser")


def _query_rules(what: Sequence[str], columns: Sequence[str]) -> list[dict[str, str]]:
    command = ["sacctmgr", "--parsable2", "show", *what, f"format={','.join(columns)}"]
    rows = _query_table(command, columns=len(columns), timeout_s=_DATABASE_TIMEOUT_S)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _parse_limits(row: Mapping[str, str]) -> Iterator[Limit]:
    """Yield the limits of a row: MaxWall "1-12:00:00", MaxTRESPerUser "cpu=64,gres/gpu=2", MaxSubmitJobs "3"."""
    of = f"QOS {row['Name']}" if "Name" in row else f"account {row.get('Account')}"
    for name in (name for name in row if name in (*_OF_ACCOUNT[1:], *_OF_QOS)):
        if name == "MaxWall":
            minutes = _parse_time_limit_min(row[name])
            yield from [Limit(of, name, "", minutes)] if minutes is not None else []
            continue
        for part in row[name].split(","):
            resource, _, most = part.rpartition("=")
            yield from [Limit(of, name, resource, int(most))] if most.isdecimal() else []  # not memory: "mem=64G"


def _split_words(line: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in line.split())


def _query_partition_words() -> dict[str, dict[str, str]]:
    lines = map(_split_words, _run_checked(["scontrol", "--oneliner", "show", "partition"]).splitlines())
    return {words["PartitionName"]: words for words in lines if "PartitionName" in words}


def _list_hosts(names: str) -> list[str]:
    """Return the names of "a100-[0-1],p100-0", one by one."""
    if names in ("", "(null)"):
        return []
    return _run_checked(["scontrol", "show", "hostnames", names]).split()


def _parse_local_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# Partitions


def _query_preemption() -> dict[str, tuple[str, int]]:
    """Return PreemptMode and GraceTime by partition; sinfo does not print them."""
    modes = {}
    for name, words in _query_partition_words().items():
        if {"PreemptMode", "GraceTime"} <= words.keys():
            modes[name] = (words["PreemptMode"], int(words["GraceTime"]))
    return modes


def _parse_node_kind(counts: str, cpus: str, memory: str, features: str, gres: str) -> NodeKind:
    """Parse fields of sinfo: "1/0/1/2" (allocated, idle, other, total), "16", "64000", "a100,ib", "gpu:a100:8(S:0)"."""
    _, _, unavailable, total = (int(count) for count in counts.split("/"))
    names = () if features == "(null)" else tuple(features.split(","))
    # "gpu:a100:8(S:0-1)", "gpu:8": the sockets after the count may contain commas.
    counted = re.findall(r"(?:^|,)([\w.-]+(?::[\w.-]+)?):(\d+)(?=[(,]|$)", gres)
    return NodeKind(total, unavailable, int(cpus), int(memory), names, {name: int(count) for name, count in counted})


def _parse_time_limit_min(text: str) -> int | None:
    """Parse "2-00:00:00", "8:00:00" or "30:00" as minutes; "infinite" is None."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes


# Commands


def _query_table(command: Sequence[str], *, columns: int, timeout_s: float = _TIMEOUT_S) -> list[list[str]]:
    """Return the rows of a table, without its header. "|" separates the columns; only the last may contain one.

    The header, which every table begins with, shows that Slurm has answered, even if it knows of nothing. Lines with
    fewer columns are a site's own, such as a welcome.

    Raises:
        SlurmError: the command failed, or its output contains no table.
    """
    lines = _run_checked(command, timeout_s=timeout_s).splitlines()
    table = [
        [cell.strip() for cell in line.split("|", columns - 1)] for line in lines if line.count("|") >= columns - 1
    ]
    if not table:
        first = next((line.strip() for line in lines if line.strip()), "nothing")
        raise SlurmError(f"{command[0]}: expected a table of {columns} columns, found: {first[:100]}")
    return table[1:]


def _run_checked(command: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a Slurm command and return its output; raise if it fails."""
    answer = _run(command, timeout_s)
    if answer.returncode:
        raise SlurmError(_extract_error(command[0], answer))
    return answer.stdout


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=select_for_slurm(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: is not on PATH.") from None
    except subprocess.TimeoutExpired as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        so_far = f" It said: {lines[0]}" if lines else ""
        raise SlurmError(f"{command[0]}: no answer within {timeout_s:g} s.{so_far}") from None


def _extract_error(command: str, answer: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a command's output that names the error, prefixed once with the command's name."""
    lines = [line.strip(" *") for line in (answer.stderr.strip() or answer.stdout.strip()).splitlines()]
    if not lines:
        return f"{command}: exited with code {answer.returncode} and no message."
    line = lines[-1] if answer.stderr.strip() else lines[0]  # stderr ends with the cause, stdout begins with it
    return f"{command}: {re.sub(rf'^{command}: (error: |fatal: )?', '', line).rstrip('.')}."
