"""Explains why a job cannot start as requested: a limit that it exceeds by itself, or a reservation before its end.

Suggests options that fit. `submit` calls this before, `why` afterwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from trainyard.cluster import query as slurm
from trainyard.cluster.description import GpuNodes, format_minutes, parse_minutes
from trainyard.cluster.query import Limit
from trainyard.text import format_duration


@dataclass(frozen=True)
class Demand:
    """The resources that a job requests."""

    time_min: int
    nodes: int
    gpus: int  # of all nodes; 0: none
    resources: Mapping[str, int]  # of all nodes, as Slurm names them: {"cpu": 8, "node": 1, "gres/gpu": 4}


@dataclass(frozen=True)
class Wait:
    """The reason why a pending job waits."""

    text: str = ""  # "": the state says it all
    options: str = ""  # with which it could start; "": none are known


NO_WAIT = Wait()


def count_demand(kind: GpuNodes, *, gpus: int, nodes: int, time_min: int) -> Demand:
    """Return a job's request on nodes of a kind, as Slurm counts it."""
    gres = {"gres/gpu": gpus, f"gres/{kind.gres}": gpus} if kind.gres else {}
    return Demand(time_min, nodes, gpus, {"cpu": gpus * kind.cores_per_gpu, "node": nodes, **gres})


def find_exceeded(limits: Iterable[Limit], demand: Demand) -> Limit | None:
    """Return the first limit that a job exceeds by itself, so that it would never start."""
    asked = {**demand.resources, "": demand.time_min}
    of_one_job = (each for each in limits if each.resource or each.name == "MaxWall")
    return next((each for each in of_one_job if asked.get(each.resource, 0) > each.most), None)


def describe_exceeded(limit: Limit, demand: Demand) -> Wait:
    """Return the part of a job's request that exceeds a limit, and options with which it fits."""
    if not limit.resource:
        options = f"--time {format_minutes(limit.most)}" if limit.most else ""
        return Wait(f"{limit}, but the job requests {format_minutes(demand.time_min)}", options)
    asked = demand.resources[limit.resource]
    fitting, per_node = demand.gpus * limit.most // asked, demand.gpus // demand.nodes
    fitting -= fitting % per_node if fitting > per_node else 0
    return Wait(f"{limit}, but the job requests {asked}", f"--gpus {fitting}" if fitting else "")


def explain_wait(slurm_job_id: str, *, now: float) -> Wait:
    """Return why a pending job waits, if that is for a limit or for a reservation.

    Args:
        now: seconds since the epoch.

    Raises:
        UserError: Slurm does not know the job, does not answer, or not in a way that is understood.
    """
    words = slurm.query_job_words(slurm_job_id)
    reason, partition = words.get("Reason", ""), words.get("Partition", "")
    if "eserved" in reason:
        return _explain_reservation(parse_minutes(words["TimeLimit"]), partition, words.get("Reservation", ""), now)
    if not reason.startswith(("QOS", "Assoc")):
        return NO_WAIT
    user = words["UserId"].partition("(")[0]
    limits = slurm.query_rules(user).find_limits(account=words["Account"], qos=words["QOS"], partition=partition)
    meant = [limit for limit in limits if _is_meant(limit, reason)]
    counts = (part.partition("=") for part in words.get("ReqTRES", words.get("TRES", "")).split(","))
    resources = {name: int(count) for name, _, count in counts if count.isdecimal()}
    gpus = resources.get("gres/gpu", 0)
    demand = Demand(parse_minutes(words["TimeLimit"]), resources.get("node", 1), gpus, resources)
    if exceeded := find_exceeded(meant, demand):
        return describe_exceeded(exceeded, demand)
    return Wait("; ".join(f"{limit}, which other jobs use" for limit in meant))


def _explain_reservation(time_min: int, partition: str, own: str, now: float) -> Wait:
    for each in slurm.query_reservations(partition):
        if each.name == own or each.end <= now or each.start >= now + 60 * time_min:
            continue
        if each.start <= now:
            return Wait(f"reservation {each.name} has its nodes until {_format_time(each.end)}")
        left_min = int(each.start - now) // 60 - 1  # a minute to cancel and submit
        begins = f"reservation {each.name} begins {_format_time(each.start)}, in {format_duration(each.start - now)}"
        if left_min < 1:
            return Wait(f"{begins}, and ends {_format_time(each.end)}")
        text = f"{begins}, before the job could end ({format_minutes(time_min)}); {format_minutes(left_min)} still fit"
        return Wait(text, f"--time {format_minutes(left_min)}")
    return NO_WAIT


def _is_meant(limit: Limit, reason: str) -> bool:
    """Return whether Slurm's reason means this limit: QOSMaxGRESPerUser, AssocGrpCpuLimit, QOSMaxWallDuration..."""
    names = {"gres/gpu": "GRES", "cpu": "Cpu", "node": "Node"}
    word = names.get(limit.resource.split(":")[0], limit.name[3:7])
    scope = limit.name.removeprefix("MaxTRES") if limit.name.startswith("MaxTRES") else limit.name[:3]
    return limit.of.startswith("QOS") == reason.startswith("QOS") and word in reason and scope in reason


def _format_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
