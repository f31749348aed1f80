"""The commands that train a job with many settings: sweep, results and multirun."""

import argparse
import getpass
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trainyard.cli import dry
from trainyard.cli.choices import (
    add_synthetic_option,
    compose_job,
    describe_choices,
    find_start,
    list_sections,
    record_rows,
)
from trainyard.cli.plan import check_memory
from trainyard.cli.request import (
    add_plan_option,
    add_resource_args,
    check_against_slurm,
    find_cluster,
    read_request,
    recall_families,
    require_trust,
    wait_while_ending,
)
from trainyard.cli.verb import Verbs, add_dry_option, add_trust_option, add_verb
from trainyard.cluster.description import Cluster
from trainyard.cluster.options import merge_options, read_options
from trainyard.config import compose as configs
from trainyard.data.raw import list_once
from trainyard.errors import UserError
from trainyard.launch import submit
from trainyard.launch import sweep as sweeps
from trainyard.plan.choose_data import DataChoice, require_data
from trainyard.plan.make_plan import make_plan
from trainyard.plan.packing import PackingChoice, choose_shared_packing
from trainyard.plan.resources import Code, Plan, ResourceRequest, RunRequest
from trainyard.runs import folder as runs
from trainyard.runs import status, sweep_file
from trainyard.runs.create import Origin, create_run
from trainyard.runs.history import read_run
from trainyard.runs.state import State
from trainyard.runs.submission import read_submission
from trainyard.terminal import say
from trainyard.text import count_nouns


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "sweep", _run_sweep, "run a job with many settings, as one Slurm array")
    verb.add_argument("job", nargs="?", help="preset")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that all runs share")
    verb.add_argument("--sweep", action="append", default=[], metavar="OPTION=A,B,...", help="what varies; repeatable")
    verb.add_argument("--max-parallel", type=int, default=0, metavar="N", help="runs that train at once; default: all")
    verb.add_argument("--name", help="name of the sweep")
    verb.add_argument("--continue", dest="again", default="", metavar="SWEEP", help="submit the unfinished runs again")
    add_synthetic_option(verb)
    add_trust_option(verb)
    add_resource_args(verb, gpus=1)
    add_plan_option(verb)
    verb = add_verb(verbs, "results", _print_results, "the results of a sweep: table, CSV, HTML and plot")
    verb.add_argument("sweep")
    verb.add_argument("--metric", default="", help="default: the one that selects the best checkpoint")
    verb = add_verb(verbs, "multirun", _run_multirun, "Hydra's own multirun, with its launchers and sweepers")
    verb.add_argument("job", help="preset")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="as for Hydra, such as seed=0,1,2")
    add_dry_option(verb)


@list_once()
def _run_sweep(args: argparse.Namespace) -> int:
    if args.again:
        return _continue_sweep(args)
    if not args.job or not args.sweep:
        raise UserError('Name a job and what varies: trainyard sweep JOB --sweep "optimizer.lr=1e-4,3e-4 seed=0,1,2"')
    runs.check_name(args.name, of="sweep")
    cluster = find_cluster(args.cluster, job=args.job, dry=args.dry)
    request = read_request(args)
    data = compose_job(request, cluster)
    plan = make_plan(data.config, cluster, request.resources)
    fixed = [*args.overrides, *data.overrides]
    if args.dry:
        return dry.print_sweep(plan, data, request, fixed=fixed, varied=args.sweep, parallel=args.max_parallel)
    count = require_data(data, jobs_dir=args.jobs, typed=args.typed)
    check_against_slurm(plan)
    axes, combinations = sweeps.combine(args.job, args.sweep, fixed, args.jobs)
    most = _choose_array_size(plan, len(combinations))
    planned = _plan_runs(combinations, plan, data, request, varies_micro_batch="micro_batch_size" in axes)
    packing = choose_shared_packing(plan, [run.config for run in planned], args.jobs)
    if packing.plan is not None:
        _choose_array_size(plan, len(planned), packs=True)
    sweep = sweeps.create(
        args.job,
        axes,
        fixed,
        planned,
        root=args.runs.absolute(),
        name=args.name,
        environ=os.environ,
        request={name: getattr(plan, name) for name in ("gpus", "hw", "nodes", "time_min")} | {"options": plan.stated},
        group=cluster.group,
    )
    try:
        code = submit.snapshot_code(args.jobs, sweep.folder / "code")
        jobs = _submit_elements(sweep, sweep.elements, plan, packing, code, args.max_parallel, most)
    except BaseException:
        sweeps.discard(sweep)
        raise
    say(submit.describe(plan, sweep.folder, environ=os.environ, **describe_choices(data, count, packing)))
    _print_sweep(sweep, sweep.elements, jobs)
    return 0


def _plan_runs(
    combinations: Sequence[sweeps.Combination],
    plan: Plan,
    data: DataChoice,
    request: RunRequest,
    *,
    varies_micro_batch: bool,
) -> list[sweeps.NewRun]:
    """Plan each run, whose values may be impossible on this GPU type."""
    resources, planned = replace(request.resources, hw=plan.hw), []
    for own, config in sweeps.show_progress(combinations, "planning", total=len(combinations)):
        each = make_plan(find_start(config, request.runs_dir), plan.cluster, resources)
        each = replace(each, why_hw=plan.why_hw)
        memory = check_memory(each, request, allow_smaller_batch=not varies_micro_batch)
        planned.append(sweeps.NewRun(own, each.config, list_sections(data, request.families, each, memory=memory)))
    return planned


def _continue_sweep(args: argparse.Namespace) -> int:
    sweep = sweep_file.load(args.again, args.runs.absolute())
    missing = sweep_file.list_missing(sweep)
    present = [element.run for element in sweep.elements if element not in missing]
    if not present:
        raise UserError(
            f"{sweep.folder}: none of its runs was created. Remove it, and type the command that made it again."
        )
    require_trust([sweep.folder, *present], args)
    known = wait_while_ending(present)
    states = _list_states(sweep, known)
    unfinished = sweep_file.list_unfinished(sweep, states)
    if not unfinished:
        say(f"Nothing is missing: {_count_states(states.values())}.\nnext  trainyard results {sweep.name}")
        return 0
    submitted = next((run for run in present if (run / runs.SUBMISSION).is_file()), None)
    if submitted is None and not sweep.request:  # an older version had not stored the request
        raise UserError(f"{sweep.folder}: was never submitted. Remove it and its runs, and type the sweep again.")
    submission = read_submission(submitted) if submitted else {"cluster_file": "", **sweep.request}
    cluster = find_cluster(args.cluster or submission["cluster_file"], job=sweep.job, dry=args.dry)
    same_hw = not args.hw or args.hw == submission["hw"]
    resources = ResourceRequest(
        gpus=submission["gpus"],
        hw=args.hw or submission["hw"],
        nodes=args.nodes,
        time=args.time or f"{submission['time_min']}m",
        options=merge_options(submission.get("options", {}), same_nodes=same_hw, stated=read_options(vars(args))),
        keeps_micro_batch=True,
    )
    recall_families(present[0], args)
    if missing and not args.dry:
        _create_missing(sweep, missing, cluster, resources, args)
    there = [e.run for e in unfinished if (e.run / runs.CONFIG).is_file()] or present[:1]
    planned = [configs.load_config(run / runs.CONFIG, args.jobs) for run in there]
    plan = make_plan(planned[0], cluster, resources)
    folder = sweep.folder / "code"
    code = Code(Path(submission["code"]), Path(submission["jobs"])) if submitted else dry.name_code(args.jobs, folder)
    if not code.folder.exists() and not args.dry:
        code = submit.snapshot_code(args.jobs, folder)
    packing = choose_shared_packing(plan, planned, args.jobs, code=code)
    if args.dry:
        return dry.print_submission(
            plan,
            {element.run: " ".join(element.overrides) for element in unfinished},
            folder=sweep.folder / "slurm",
            code=code,
            parallel=args.max_parallel,
            packing=packing,
            packing_run=sweeps.name_packing_run(sweep.folder, sweep.job),
        )
    check_against_slurm(plan)
    most = _choose_array_size(plan, len(unfinished), packs=packing.plan is not None)
    again = [element.run for element in unfinished]
    for ended in known:
        if ended.run in again:
            submit.settle_end(ended)
    jobs = _submit_elements(sweep, unfinished, plan, packing, code, args.max_parallel, most)
    counts = _count_states(states.values())
    say(f"{len(unfinished)} of {len(sweep.elements)} runs were submitted again. Before: {counts}.")
    _print_sweep(sweep, unfinished, jobs)
    return 0


def _create_missing(
    sweep: sweep_file.Sweep,
    missing: Sequence[sweep_file.Element],
    cluster: Cluster,
    resources: ResourceRequest,
    args: argparse.Namespace,
) -> None:
    """Create the runs that are not there because creating the sweep was interrupted."""
    args.job, args.overrides = sweep.job, list(sweep.fixed)
    request = replace(read_request(args), resources=replace(resources, keeps_micro_batch=False))
    data = compose_job(request, cluster)
    plan = make_plan(data.config, cluster, request.resources)
    own = [element.overrides for element in missing]
    combinations = map(sweeps.Combination, own, configs.compose_each(sweep.job, sweep.fixed, own, args.jobs))
    planned = _plan_runs(list(combinations), plan, data, request, varies_micro_batch="micro_batch_size" in sweep.axes)
    sweeps.create_runs(missing, planned, environ=os.environ, group=cluster.group)
    say(f"{len(missing)} runs, which an interruption had left out, were created now.", file=sys.stderr)


def _choose_array_size(plan: Plan, count: int, *, packs: bool = False) -> int:
    account, qos = plan.options.get("account", ""), plan.options.get("qos", "")
    return sweeps.choose_array_size(count, packs=packs, user=getpass.getuser(), account=account, qos=qos)


def _submit_elements(
    sweep: sweep_file.Sweep,
    elements: Sequence[sweep_file.Element],
    plan: Plan,
    packing: PackingChoice,
    code: Code,
    parallel: int,
    most: int,
) -> list[str]:
    folders, packing_run, folder = [element.run for element in elements], None, sweep.folder / "slurm"
    if packing.plan is not None:
        check_against_slurm(packing.plan)
        place = sweeps.name_packing_run(sweep.folder, sweep.job)
        config, group = packing.plan.config, packing.plan.cluster.group
        origin = Origin.collect(os.environ)
        packing_run = create_run(sweep.folder, config, name=place.name, origin=origin, group=group)
    for run in folders:
        record_rows(run, packed_where=packing.where)
    try:
        return submit.submit(
            plan,
            folders,
            folder=folder,
            code=code,
            parallel=parallel,
            most=most,
            packing=packing.plan,
            packing_run=packing_run,
        )
    except BaseException:
        if packing_run is not None:
            shutil.rmtree(packing_run, ignore_errors=True)
        raise


def _print_sweep(sweep: sweep_file.Sweep, submitted: Sequence[sweep_file.Element], jobs: Sequence[str]) -> None:
    first = jobs[0].partition("_")[0]
    *packing, _ = read_run(submitted[0].run).slurm_job_ids
    before = "".join(f"packing as Slurm job {job}, then " for job in packing)
    say(f"\nsubmitted  {before}{count_nouns(len(jobs), 'run')} as Slurm job {first}")
    say(f"next       trainyard status {sweep.name}")
    say(f"           trainyard results {sweep.name}    trainyard sweep --continue {sweep.name}")


def _list_states(sweep: sweep_file.Sweep, known: Sequence[status.Status]) -> dict[Path, str]:
    """Return the state of each run; one that was not created is new."""
    return {e.run: str(State.NEW) for e in sweep.elements} | {s.run: s.state for s in known}


def _count_states(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def _print_results(args: argparse.Namespace) -> int:
    from trainyard.report import sweep_page as results

    sweep = sweep_file.load(args.sweep, args.runs.absolute())
    missing = sweep_file.list_missing(sweep)
    present = [element.run for element in sweep.elements if element not in missing]
    states = _list_states(sweep, status.read_statuses(present)[0])
    collected = results.collect(sweep, states, metric=args.metric)
    page = results.write(collected)
    say(f"{results.format_results(collected)}\n{page}")
    return 0


def _run_multirun(args: argparse.Namespace) -> int:
    from trainyard.launch import multirun

    return multirun.run_multirun(
        args.job, args.overrides, jobs_dir=args.jobs, runs_dir=args.runs, environ=os.environ, dry=args.dry
    )
