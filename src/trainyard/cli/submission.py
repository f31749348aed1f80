"""The command submit: one run, or two that follow each other, on a cluster or on this machine; and runs once more."""

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.choice import Choice
from trainyard.cli import dry
from trainyard.cli.choices import (
    add_synthetic_option,
    compose_job,
    describe_choices,
    describe_rows,
    list_sections,
    record_rows,
)
from trainyard.cli.plan import Target, check_memory, check_target
from trainyard.cli.request import add_plan_option, add_resource_args, check_against_slurm, find_cluster, read_request
from trainyard.cli.verb import Verbs, add_verb
from trainyard.cluster import description as clusters
from trainyard.cluster.options import merge_options, read_options
from trainyard.config import compose as configs
from trainyard.config.families import choose_root
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import packs_the_same
from trainyard.data.raw import list_once
from trainyard.environment import LocalGpu, count_visible_gpus, list_gpus
from trainyard.errors import UserError
from trainyard.hardware import choose_sync_batchnorm, find_gpu_by_name
from trainyard.launch import submit
from trainyard.launch.upstream_run import UpstreamRun, find_upstream_run
from trainyard.plan.choose_data import DataChoice, require_data
from trainyard.plan.make_plan import make_plan
from trainyard.plan.packing import PackingChoice, choose_packing
from trainyard.plan.resources import Code, Plan, ResourceRequest, RunRequest
from trainyard.plan.screen import HOST
from trainyard.runs import folder as runs
from trainyard.runs.create import Origin, create_run
from trainyard.runs.history import read_run
from trainyard.runs.submission import read_submission
from trainyard.terminal import say
from trainyard.text import count_nouns, quote_path
from trainyard.train.trackers import require_trackers


@dataclass(frozen=True)
class _Chosen:
    """A requested run, with everything that is chosen before anything is submitted."""

    request: RunRequest
    data: DataChoice
    plan: Plan
    packing: PackingChoice
    count: int | None  # of samples; None: not counted
    memory: Choice[str] | None  # of a step; None: ranks on the CPU


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "submit", _submit, "train a job on a cluster: plan, submit, return")
    verb.add_argument("job", help="preset, such as fingerprint_1m: trainyard jobs")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="trainyard options JOB lists them")
    verb.add_argument("--name", help="name of the run's folder")
    verb.add_argument("--local", action="store_true", help="without Slurm: run on this machine, in the background")
    verb.add_argument("--after", default="", metavar="RUN", help="start when this run is done")
    verb.add_argument(
        "--then",
        default="",
        metavar="JOB",
        help="submit a second job that starts when this one is done: same nodes, options of sbatch and data.*",
    )
    verb.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="--local: processes that share the cores")
    add_synthetic_option(verb)
    add_resource_args(verb, gpus=1)
    add_plan_option(verb)


@list_once()
def _submit(args: argparse.Namespace) -> int:
    runs.check_name(args.name, of="run")
    request = read_request(args)
    if args.local:
        if args.after or args.then:
            raise UserError(
                "--after and --then (make: AFTER=, THEN=) need Slurm, which --local does without. Leave one out."
            )
        return _submit_locally(request, cpu_ranks=args.cpu_ranks)
    if args.cpu_ranks:
        raise UserError(f"--cpu-ranks {args.cpu_ranks}: is for --local; the nodes of a cluster train on GPUs: --gpus N")
    cluster = find_cluster(request.cluster, job=request.job, dry=request.is_dry)
    after = find_upstream_run(runs.resolve_run(args.after, args.runs)) if args.after else None
    first = _choose(request, cluster)
    second = None
    if args.then:
        second = _choose(_request_second(request, args.then, has_families=args.typed_jobs), cluster, before=request.job)
        if first.packing.plan and packs_the_same(first.data.config, second.data.config):
            second = replace(
                second, packing=PackingChoice(None, Choice("none", f"{args.job} before it packs the same data"))
            )
    if request.is_dry:
        dry.print_submit(first.plan, first.data, first.packing, request, after=after, memory=first.memory)
        if second is not None:
            say()
            before = UpstreamRun(request.runs_dir.absolute() / request.job / (request.name or dry.NEW), dry.FIRST)
            dry.print_submit(
                second.plan, second.data, second.packing, second.request, after=before, memory=second.memory
            )
        return 0
    run, job = _submit_run(first, after)
    if second is not None:
        try:
            _submit_run(second, UpstreamRun(run, job))
        except UserError as error:
            raise UserError(
                f"{error}\n{args.job} was submitted as Slurm job {job}, but not {args.then}. Without this mistake, "
                f"type: trainyard submit {args.then} --after {quote_path(run)}"
            ) from None
    return 0


def _choose(request: RunRequest, cluster: clusters.Cluster, *, before: str = "") -> _Chosen:
    """Choose data, nodes and the place of packing, and check them against the Slurm that answers, unless it is dry."""
    data = compose_job(request, cluster)
    plan = make_plan(data.config, cluster, request.resources)
    count = None if request.is_dry else require_data(data, jobs_dir=request.jobs_dir, typed=request.typed)
    packing = choose_packing(plan, request.jobs_dir)
    if not request.is_dry:
        check_against_slurm(plan, packing.plan)
    own = replace(request, typed=_list_own_words(request, before)) if before else request
    return _Chosen(request, data, plan, packing, count, check_memory(plan, own))


def _request_second(request: RunRequest, job: str, *, has_families: bool) -> RunRequest:
    """Return the request for the job of --then: where the first runs, and on the same data."""
    return replace(
        request,
        job=job,
        name=None,
        families=request.families if has_families else choose_root(job),
        overrides=tuple(word for word in request.overrides if word.startswith("data.")),
    )


def _list_own_words(request: RunRequest, before: str) -> tuple[str, ...]:
    """Return a command that submits the job of --then by itself, after the newest run of the job before it."""
    resources = request.resources
    stated = {
        "jobs": request.jobs_dir,
        "runs": request.runs_dir,
        **{name: getattr(resources, name) for name in ("gpus", "hw", "nodes", "time")},
        "cluster": request.cluster,
        **resources.options,
    }
    flags = ["--synthetic"] if request.wants_synthetic else []
    words = [f"--{name}={value}" for name, value in stated.items() if value]
    return ("submit", request.job, *request.overrides, *flags, *words, "--after", before)


def _submit_run(chosen: _Chosen, after: UpstreamRun | None) -> tuple[Path, str]:
    """Create and submit a run; return its folder and the Slurm job that trains it."""
    request, plan, packing = chosen.request, chosen.plan, chosen.packing
    root, group = request.runs_dir.absolute(), plan.cluster.group
    sections = list_sections(chosen.data, request.families, plan, packing, chosen.memory)
    origin = Origin.collect(os.environ)
    run = create_run(root, plan.config, name=request.name, origin=origin, chosen=sections, group=group)
    try:
        code = submit.snapshot_code(request.jobs_dir, run / "code")
        (job,) = submit.submit(plan, [run], folder=run / "slurm", code=code, packing=packing.plan, after=after)
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    notes = describe_choices(chosen.data, chosen.count, packing, after, chosen.memory)
    say(submit.describe(plan, run, environ=os.environ, **notes))
    _print_submitted_jobs(run)
    return run, job


def _submit_locally(request: RunRequest, *, cpu_ranks: int) -> int:
    data = compose_job(request, None)
    ranks, gpus = _choose_local_ranks(request.resources.gpus, cpu_ranks=cpu_ranks)
    choose_sync_batchnorm(data.config.sync_batchnorm, device_type="cuda" if gpus else "cpu", world_size=ranks)
    require_trackers(data.config.trackers)
    if not request.is_dry:
        require_data(data, jobs_dir=request.jobs_dir, typed=request.typed)
    memory = _check_local_memory(data.config, request, ranks=ranks, gpus=gpus)
    root = request.runs_dir.absolute()
    if request.is_dry:
        run = root / request.job / (request.name or dry.NEW)
        return dry.print_run(run, data.config, request.jobs_dir, ranks=ranks, memory=memory)
    time_min = clusters.parse_minutes(request.resources.time or "30d")
    sections = list_sections(data, request.families, memory=memory)
    run = create_run(root, data.config, name=request.name, origin=Origin.collect(os.environ), chosen=sections)
    try:
        code = submit.snapshot_code(request.jobs_dir, run / "code")
        job = submit.submit_locally(run, ranks=ranks, gpus=min(ranks, len(gpus)), time_min=time_min, code=code)
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    say("\n".join(f"{name:<11} {value}" for name, value in describe_rows(memory=memory).items()))
    _print_submitted(f"process {job} on this machine, {count_nouns(ranks, 'rank')}", run)
    return 0


def _choose_local_ranks(wanted: int, *, cpu_ranks: int) -> tuple[int, list[LocalGpu]]:
    """Return how many ranks start on this machine, and its GPUs if they use some; without any, one rank on the CPU."""
    if cpu_ranks:
        return max(1, cpu_ranks), []
    if wanted < 1:
        raise UserError(f"--gpus {wanted}: a job needs at least one rank. Leave it out for one.")
    gpus = list_gpus()
    visible = count_visible_gpus(gpus, os.environ)
    if wanted > max(1, visible):
        use = f"Use --gpus {visible}." if visible else f"Leave --gpus out to train on the CPU, or --cpu-ranks {wanted}."
        raise UserError(f"{wanted} GPUs requested, but this machine has {visible}. {use}")
    return wanted, gpus if visible else []


def _check_local_memory(
    config: TrainConfig, request: RunRequest, *, ranks: int, gpus: Sequence[LocalGpu]
) -> Choice[str]:
    """Check a step's memory on the GPUs of this machine, as `check_target`, or name the later check."""
    if not gpus:
        return Choice(HOST, "ranks on the CPU; a run that needs more than this host's memory is refused")
    names = {f"{gpu.name}{', in MIG slices' * gpu.is_split}": gpu for gpu in gpus}
    gpu, *others = names.values()
    card = None if others or gpu.is_split else find_gpu_by_name(gpu.name, gpu.memory_gib)
    if card is None:  # of several types, torch chooses one by its own rules
        what = f"{' and '.join(names)}: {'several types' if others else 'no card that plans know'}"
        return Choice("not checked", f"{what}; when the run starts, it tries its largest step first")
    return check_target(Target(card, ranks, card.key, None), config, request)


def _print_submitted_jobs(run: Path) -> None:
    *packing, training = read_run(run).slurm_job_ids
    _print_submitted(
        "".join(f"packing as Slurm job {job}, then training as " for job in packing) + f"Slurm job {training}", run
    )


def _print_submitted(what: str, run: Path) -> None:
    name = quote_path(runs.format_run_name(run))
    say(f"\nsubmitted  {what}\nnext       trainyard logs -f {name}")
    say(f"           trainyard status    trainyard why {name}    trainyard cancel {name}")


@list_once()
def resubmit(run: Path, args: argparse.Namespace) -> int:
    """Submit a run again, to resume from its newest checkpoint; resources that are not given stay as they were."""
    previous = read_submission(run)
    if previous["scheduler"] == "local":
        raise UserError(f"{run}: ran on this machine. Resume it here: trainyard resume {quote_path(run)} --here")
    config = configs.load_config(run / runs.CONFIG, args.jobs)
    cluster = find_cluster(args.cluster or previous["cluster_file"], job=config.job, dry=args.dry)
    same_hw = not args.hw or args.hw == previous["hw"]
    request = ResourceRequest(
        gpus=args.gpus or previous["gpus"],
        hw=args.hw or previous["hw"],
        nodes=args.nodes or (previous["nodes"] if same_hw and not args.gpus else 0),
        time=args.time or (f"{previous['time_min']}m" if same_hw else ""),
        options=merge_options(previous.get("options", {}), same_nodes=same_hw, stated=read_options(vars(args))),
        keeps_micro_batch=True,
    )
    plan = make_plan(config, cluster, request)
    code = Code(Path(previous["code"]), Path(previous["jobs"]))
    if args.update_code:
        copy_code = dry.name_code if args.dry else submit.snapshot_code
        code = copy_code(args.jobs, runs.find_free_name(run / "code"))
    packing = choose_packing(plan, args.jobs, code=None if args.dry and args.update_code else code)
    if not args.dry:
        check_against_slurm(plan, packing.plan)
    is_elsewhere = (plan.hw, plan.gpus) != (previous["hw"], previous["gpus"])
    memory = check_memory(plan, read_request(args), allow_smaller_batch=False) if is_elsewhere else None
    if args.dry:
        return dry.print_submission(plan, {run: ""}, folder=run / "slurm", code=code, packing=packing, memory=memory)
    if packing.plan is not None:
        record_rows(run, packed_where=packing.where)
    if memory is not None:
        record_rows(run, predicted_memory=memory)
    submit.submit(plan, [run], folder=run / "slurm", code=code, packing=packing.plan)
    say(submit.describe(plan, run, environ=os.environ, **describe_rows(packing=packing.where, memory=memory)))
    _print_submitted_jobs(run)
    return 0
