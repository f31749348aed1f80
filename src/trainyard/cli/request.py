"""Shared by the commands that train, submit or use a run: read the request, find the cluster, require trust."""

import argparse
import getpass
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from loguru import logger

from trainyard.cli.verb import add_dry_option, find_project_folder
from trainyard.cluster import description as clusters
from trainyard.cluster import query as slurm
from trainyard.cluster.check import explain_missing_image, explain_missing_module
from trainyard.cluster.limits import count_demand, describe_exceeded, find_exceeded
from trainyard.cluster.options import OPTIONS, read_options
from trainyard.config.families import Root
from trainyard.errors import UserError
from trainyard.files import let_group_read
from trainyard.plan.packing import PACKS
from trainyard.plan.resources import Plan, ResourceRequest, RunRequest
from trainyard.runs import status, trust
from trainyard.runs.families import find_families
from trainyard.runs.state import ACTIVE
from trainyard.text import quote_path, suggest_nearest


def add_resource_args(verb: argparse.ArgumentParser, *, gpus: int) -> None:
    """Add the options of a resource request."""
    verb.add_argument("--gpus", type=int, default=gpus, metavar="N", help="GPUs of the whole job")
    verb.add_argument("--hw", default="", metavar="TYPE", help="GPU type of the cluster, such as a100")
    verb.add_argument("--nodes", type=int, default=0, metavar="N", help="default: as few nodes as have that many GPUs")
    verb.add_argument("--time", default="", metavar="LENGTH", help="time limit of one attempt, such as 8h30m")
    verb.add_argument("--cluster", default="", metavar="NAME", help="slurm/NAME.yaml, or a path")
    add_dry_option(verb)
    for name, meaning in OPTIONS.items():
        verb.add_argument(f"--{name}", metavar="TEXT", help=f"{meaning}; default: as in the cluster file")


def add_plan_option(verb: argparse.ArgumentParser) -> None:
    """Add the option that goes without a plan."""
    verb.add_argument("--no-plan", action="store_true", help="without comparing predicted memory with the GPU's")


def find_cluster(wanted: str, *, job: str = "", dry: bool = False) -> clusters.Cluster:
    """Return the requested cluster; if it has a group, its members may read files of this process.

    Args:
        job: which a person may run without Slurm; "": none.

    Raises:
        UserError: there is no Slurm here to submit to; has the command that runs without it.
    """
    absent = slurm.explain_absence()
    if absent and not dry:
        instead = (
            f"Run it on this machine instead: trainyard submit {job} --local (in the background), or "
            f"trainyard run {job}."
        )
        raise UserError(
            " ".join([absent, *([instead] if job else []), "To see only the batch script: --dry --cluster NAME."])
        )
    name = None if absent else slurm.query_cluster_name()
    cluster = clusters.find_cluster(wanted, find_project_folder("slurm"), name)
    if cluster.group:
        let_group_read()
    return cluster


def read_request(args: argparse.Namespace) -> RunRequest:
    """Return the typed request; a flag that the command does not have counts as left out."""
    stated = vars(args)
    return RunRequest(
        job=stated.get("job", ""),
        overrides=tuple(args.overrides),
        families=Root(args.jobs, args.why_jobs),
        runs_dir=args.runs,
        typed=tuple(args.typed),
        resources=ResourceRequest(
            gpus=args.gpus,
            hw=args.hw,
            nodes=stated.get("nodes", 0),
            time=stated.get("time", ""),
            options=read_options(stated),
        ),
        cluster=args.cluster,
        name=stated.get("name"),
        wants_synthetic=stated.get("synthetic", False),
        is_dry=stated.get("dry", False),
        predicts_memory=not stated.get("no_plan", False),
    )


def check_against_slurm(*plans: Plan | None) -> None:
    """Check plans for one cluster against the Slurm that answers here; the cluster file may be out of date.

    Raises:
        UserError: this is another Slurm, it has no such partition, its time limit is shorter than requested, a limit of
            an account or a QOS would never let a job start, or its nodes lack something that it needs.
    """
    here, partitions = slurm.query_cluster_name(), slurm.query_partitions()
    present = [plan for plan in plans if plan is not None]
    for plan in present:
        _check_plan(plan, here, partitions)
    if present:
        _check_limits(present)


def _check_plan(plan: Plan, here: str, partitions: Mapping[str, slurm.Partition]) -> None:
    described = plan.cluster.slurm_name
    if described and described != here:
        raise UserError(
            f"{plan.cluster.path}: describes the Slurm '{described}', but '{here}' answers here. Name this cluster's "
            f"file (--cluster NAME), or log in to '{described}'."
        )
    named = plan.options["partition"].split(",")
    check = f"See all differences: trainyard cluster-check {quote_path(plan.cluster.path)}"
    if missing := explain_missing_image(plan.cluster, plan.kind) or explain_missing_module(plan.cluster):
        raise UserError(f"{plan.cluster.path}: {missing}")
    if unknown := next((name for name in named if name not in partitions), ""):
        where = "--partition" if "partition" in plan.stated else f"{plan.cluster.path}: gpus.{plan.hw}.partition"
        raise UserError(
            f"{where} is '{unknown}', which this Slurm does not have.{suggest_nearest(unknown, partitions)} It has: "
            f"{', '.join(partitions)}. {check}"
        )
    limits = [partitions[name].time_limit_min for name in named]
    longest = None if None in limits else max(limit for limit in limits if limit is not None)
    if longest is not None and plan.time_min > longest:
        raise UserError(
            f"TIME={plan.time_min}m: partition {plan.options['partition']} allows at most {longest} minutes. "
            f"Request less: a job that reaches its limit saves, is requeued and resumes. {check}"
        )


def _check_limits(plans: Sequence[Plan]) -> None:
    """Check plans that are submitted together against the limits of accounts and QOS, where Slurm enforces them."""
    if not re.search("limits|safe", slurm.query_settings()["AccountingStorageEnforce"]):
        return
    user = getpass.getuser()
    try:
        rules = slurm.query_rules(user)
    except slurm.SlurmError as error:  # sbatch may work all the same
        logger.warning("The limits of accounts and QOS were not checked. {}", error)
        return
    for plan in plans:
        options = {name: plan.options.get(name, "") for name in ("account", "qos", "partition")}
        limits = rules.find_limits(**options)
        demand = count_demand(plan.kind, gpus=plan.gpus, nodes=plan.nodes, time_min=plan.time_min)
        if exceeded := find_exceeded(limits, demand):
            wait = describe_exceeded(exceeded, demand)
            option, _, value = wait.options.partition(" ")
            fits = f"{wait.options} (make: {option[2:].upper()}={value})"
            if option == "--time" and plan.why_hw == PACKS:
                fits = f"in {plan.cluster.path}, time_max: {value} for gpus.{plan.hw}, where the data are packed"
            elif not option or plan.why_hw == PACKS:
                fits = "--qos NAME or --account NAME, whose limit is larger"
            raise UserError(f"{wait.text}, so it would never start. Request what fits: {fits}")
        for limit in (limit for limit in limits if limit.name.startswith("MaxSubmit")):
            _check_room(plan, len(plans), limit, slurm.count_queued(user, limit))


def _check_room(plan: Plan, count: int, limit: slurm.Limit, queued: int) -> None:
    if queued + count <= limit.most:
        return
    what = f"{count} jobs are submitted (one packs the data, one trains)" if count > 1 else "a job is submitted"
    data = plan.config.data
    if count > limit.most and data.path:
        advice = f"Pack first: trainyard pack {plan.job} {quote_path(data.path)} OUT, then submit with data.path=OUT"
    elif count > limit.most:
        advice = "Name an account or a QOS with another limit: --account NAME, --qos NAME"
    else:
        advice = "Submit again when one of them has ended: trainyard status"
    raise UserError(f"{limit} of your jobs in the queue, and {queued} are there, but {what}. {advice}")


def require_trust(
    folders: Sequence[Path], args: argparse.Namespace, *, here: bool = False, is_recalled: bool = False
) -> None:
    """Raise a UserError if others own or can change the executed files of these folders, unless `--trust` was typed.

    Args:
        is_recalled: the folder of families is one that a run names, and nobody typed.
    """
    cluster_files = find_project_folder("slurm").resolve()
    code = [] if here or getattr(args, "update_code", False) else ["code", "jobs"]
    trust.require_trust(
        folders,
        named=[args.jobs] if is_recalled else [],
        uses=[*code, *([] if here or args.cluster else ["cluster_file"])],
        jobs_dir=args.jobs,
        is_chosen=lambda file: file.resolve().parent == cluster_files,
        trusted=args.trust,
        command=shlex.join(["trainyard", *args.typed]),
    )


def recall_families(run: Path, args: argparse.Namespace) -> None:
    """Use the families that a run was started with, unless others were typed.

    Raises:
        UserError: they are gone, or they are named by the run, or in it, and others can change it or them.
    """
    is_named = False
    if not args.typed_jobs:
        args.jobs, is_named = find_families(run)
    if is_named or args.jobs.resolve().is_relative_to(run.resolve()):  # typed there, ./jobs is the run's
        require_trust([run], args, here=True, is_recalled=is_named)


def wait_while_ending(folders: Sequence[Path]) -> list[status.Status]:
    """Return the statuses of runs, once Slurm is not just ending the job of one, for instance after `cancel`."""
    deadline, told = time.monotonic() + _ENDING_S, ""
    while True:
        known, _ = status.read_statuses(folders)
        ending = next((run.slurm_job_id for run in known if run.is_ending), "")
        if not ending or time.monotonic() > deadline:
            return known
        if ending != told:
            logger.info("waiting for Slurm job {} to end", told := ending)
        time.sleep(1)


def require_idle(run: Path) -> status.Status:
    """Return the status of a run; raise a UserError if it is still waiting or running in Slurm."""
    (known,) = wait_while_ending([run])
    if known.state in ACTIVE:
        raise UserError(
            f"{known.run}: is {known.state} as Slurm job {known.slurm_job_id}. See: "
            f"trainyard status {quote_path(known.run)}"
        )
    return known


_ENDING_S = 150
"""Slurm kills processes KillWait (30 s) after it asked them to exit, and frees the node after the site's epilog."""
