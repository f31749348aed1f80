"""Asking Slurm: which jobs, which partitions, which settings. What Slurm does not answer is a sentence, in time.

Each call is one short-lived command of Slurm's own, found on PATH, with the environment of this process: SLURM_CONF is
Slurm's business.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainyard.errors import UserError

_TIMEOUT_S = 10.0
_DATABASE_TIMEOUT_S = 5.0  # a database that is down makes sacct wait for minutes; nobody reads a listing that late


class SlurmError(UserError):
    """Slurm did not do what we asked. One line, with what it said."""


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm says of one job, or of one element of an array."""

    id: str  # "12", or "12_3" for an element
    state: str  # Slurm's word: PENDING, RUNNING, COMPLETED, NODE_FAIL, ...
    reason: str  # why it waits, or why it ended; "None" if Slurm gives no reason
    nodes: str  # "a100-[0-1]"; "" before it has any
    restarts: int | None  # None: whom we asked does not say
    source: str  # "squeue" or "sacct"


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition that Slurm describes alike."""

    nodes: int
    out: int  # of these, how many are down, drained or unknown
    cpus: int  # of each node, as the following
    memory_mib: int
    features: tuple[str, ...]
    gres: dict[str, int]  # by name, and type if it has one: {"gpu:a100": 8}


@dataclass(frozen=True)
class Partition:
    """What a partition offers."""

    name: str
    state: str  # "up", "down", "drain" or "inact"
    time_limit_min: int | None  # None: unlimited
    preempt_mode: str  # what preemption does to a job here: "OFF", "REQUEUE", "CANCEL", "SUSPEND", "GANG,SUSPEND"
    grace_s: int  # between the decision to preempt a job and the start of killing it
    kinds: tuple[NodeKind, ...]


def absent() -> str | None:
    """Return None if a Slurm answers here, else one sentence that says why not. Takes milliseconds if it answers."""
    if shutil.which("sbatch") is None:
        return "There is no Slurm here: sbatch is not on PATH."
    try:
        answer = _run(["scontrol", "ping"], _TIMEOUT_S)
    except SlurmError as error:
        return _why_not(str(error))
    if " is UP" in answer.stdout:  # the exit code is about all controllers, and one is enough
        return None
    return _why_not(_complaint("scontrol", answer))


def _why_not(said: str) -> str:
    if any(words in said for words in ("configuration source", "configuration file", "cannot stat file")):
        return f"Slurm is installed here but not configured (is SLURM_CONF right?). {said}"
    return f"The Slurm controller does not answer. {said}"


def jobs(ids: Iterable[str]) -> tuple[dict[str, SlurmJob], str]:
    """Ask what became of some jobs.

    squeue is believed first: after a node is lost sacct says NODE_FAIL although Slurm has already put the job back into
    its queue. sacct is asked only for what squeue has forgotten: MinJobAge seconds after the end (300 by default), or
    at once if a waiting element of an array was cancelled alone.

    Args:
        ids: "12", and "12_3" for elements of arrays.

    Returns:
        what is known, by id; and why the rest may be known to nobody ("" if sacct answered or was not needed).

    Raises:
        SlurmError: squeue does not answer.
    """
    wanted = set(ids)
    found = {job.id: job for job in _from_squeue(wanted) if job.id in wanted} if wanted else {}
    forgotten = wanted - found.keys()
    if not forgotten:
        return found, ""
    try:
        remembered = {job.id: job for job in _from_sacct(forgotten) if job.id in forgotten}
    except SlurmError as error:
        return found, str(error)
    return found | remembered, ""


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs and elements of arrays. What has already ended is no error.

    Raises:
        SlurmError: Slurm refused, or does not answer.
    """
    if ids:
        _ask(["scancel", *ids])


def cluster_name() -> str:
    """Return the ClusterName of the Slurm that answers here.

    Raises:
        SlurmError: none does.
    """
    return settings()["ClusterName"]


def settings() -> dict[str, str]:
    """Return the controller's configuration, as `scontrol show config` prints it.

    Raises:
        SlurmError: the controller does not answer.
    """
    lines = _ask(["scontrol", "show", "config"]).splitlines()
    pairs = (re.match(r"(\w+)\s*= ?(.*)", line) for line in lines)
    return {pair[1]: pair[2].strip() for pair in pairs if pair}


def partitions() -> dict[str, Partition]:
    """Return every partition this user may see, by name.

    Raises:
        SlurmError: the controller does not answer.
    """
    kinds: dict[str, list[NodeKind]] = {}
    limits: dict[str, tuple[str, int | None]] = {}
    # --exact: one line for each partition and kind of node, so that no number is "16 or more".
    for line in _ask(["sinfo", "--noheader", "--exact", "--format=%R|%a|%l|%F|%c|%m|%f|%G"]).splitlines():
        name, state, limit, counts, cpus, memory, features, gres = line.strip().split("|")
        limits[name] = (state, _limit_min(limit))
        kinds.setdefault(name, []).append(_node_kind(counts, cpus, memory, features, gres))
    preemption = _preemption()
    return {
        name: Partition(name, *limits[name], *preemption[name], tuple(kind for kind in of if kind.nodes))
        for name, of in kinds.items()
        if name in preemption  # else it was deleted between the two questions
    }


def accounts(user: str) -> dict[str, set[str]]:
    """Return the accounts that a user may charge, and the QOS allowed with each.

    Raises:
        SlurmError: there is no accounting, or its database does not answer.
    """
    where = ["show", "associations", "where", f"user={user}", "format=Account,QOS"]
    answer = _ask(["sacctmgr", "--noheader", "--parsable2", *where], timeout_s=_DATABASE_TIMEOUT_S)
    found: dict[str, set[str]] = {}
    for line in answer.splitlines():
        account, qos = line.split("|")
        found.setdefault(account, set()).update(qos.split(",") if qos else ())
    return found


# Jobs


def _from_squeue(ids: Iterable[str]) -> Iterator[SlurmJob]:
    """Yield the elements, one by one, of every array that one of `ids` belongs to."""
    whole = ",".join(sorted({id.partition("_")[0] for id in ids}))
    # The reason stands last: it is the one field that might hold the separator.
    fields = "JobArrayID:|,State:|,RestartCnt:|,NodeList:|,Reason:"
    try:
        answer = _ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={whole}", f"--Format={fields}"])
    except SlurmError as error:
        if "Invalid job id" in str(error):  # said only when a single id was asked for, and it is forgotten
            return
        raise
    for line in answer.splitlines():
        id, state, restarts, nodes, reason = (part.strip() for part in line.split("|", 4))
        yield SlurmJob(id, state, reason, nodes, int(restarts), "squeue")


def _from_sacct(ids: Iterable[str]) -> Iterator[SlurmJob]:
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State,NodeList,Reason"]
    answer = _ask([*command, f"--jobs={','.join(sorted(ids))}"], timeout_s=_DATABASE_TIMEOUT_S)
    for line in answer.splitlines():
        id, state, nodes, reason = line.split("|", 3)
        nodes = "" if nodes == "None assigned" else nodes
        yield SlurmJob(id, state.split()[0], reason, nodes, None, "sacct")  # "CANCELLED by 1000"


# Partitions


def _preemption() -> dict[str, tuple[str, int]]:
    """Return PreemptMode and GraceTime by partition: sinfo does not print them."""
    found = {}
    for line in _ask(["scontrol", "--oneliner", "show", "partition"]).splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        found[words["PartitionName"]] = (words["PreemptMode"], int(words["GraceTime"]))
    return found


def _node_kind(counts: str, cpus: str, memory: str, features: str, gres: str) -> NodeKind:
    """Read sinfo's words: "1/0/1/2" (allocated, idle, other, total), "16", "64000", "a100,ib", "gpu:a100:8(S:0)"."""
    _, _, out, total = (int(count) for count in counts.split("/"))
    names = () if features == "(null)" else tuple(features.split(","))
    # "gpu:a100:8(S:0-1)", "gpu:8": behind the count stand the sockets, which may hold commas.
    counted = re.findall(r"(?:^|,)([\w.-]+(?::[\w.-]+)?):(\d+)(?=[(,]|$)", gres)
    return NodeKind(total, out, int(cpus), int(memory), names, {name: int(count) for name, count in counted})


def _limit_min(text: str) -> int | None:
    """Read Slurm's "2-00:00:00", "8:00:00", "30:00" or "infinite"."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes


# Commands


def _ask(command: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> str:
    """Run one of Slurm's commands and return what it printed."""
    answer = _run(command, timeout_s)
    if answer.returncode:
        raise SlurmError(_complaint(command[0], answer))
    return answer.stdout


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: is not on PATH.") from None
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace").strip().splitlines()
        so_far = f" It said: {said[0]}" if said else ""
        raise SlurmError(f"{command[0]}: no answer within {timeout_s:g} s.{so_far}") from None


def _complaint(command: str, answer: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a command's words that names the outcome, with the command's name in front once."""
    lines = [line.strip(" *") for line in (answer.stderr.strip() or answer.stdout.strip()).splitlines()]
    if not lines:
        return f"{command}: ended with code {answer.returncode}, without a word."
    line = lines[-1] if answer.stderr.strip() else lines[0]  # errors build up to the last; what is printed begins so
    return f"{command}: {re.sub(rf'^{command}: (error: |fatal: )?', '', line).rstrip('.')}."
