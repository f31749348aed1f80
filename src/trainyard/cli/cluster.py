"""The commands that concern a cluster: submit and sweep, and what became of it."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trainyard import config as configs
from trainyard.cli.verb import Verbs, add_verb, beside_checkout
from trainyard.cluster import description as clusters
from trainyard.cluster import query as slurm
from trainyard.cluster.check import check_cluster, render_findings
from trainyard.errors import UserError
from trainyard.launch import cancel, submit
from trainyard.launch import sweep as sweeps
from trainyard.runs import folder as runs
from trainyard.runs import lock, logs, status, sweep_file
from trainyard.runs.state import ACTIVE
from trainyard.runs.why import explain_run
from trainyard.settings import TrainConfig
from trainyard.text import nearest_hint


def add_commands(verbs: Verbs) -> None:
    """Add all of them."""
    for add in (
        _add_submit,
        _add_sweep,
        _add_results,
        _add_status,
        _add_runs,
        _add_logs,
        _add_why,
        _add_cancel,
        _add_cluster_check,
        _add_multirun,
    ):
        add(verbs)


# submit


def _add_submit(verbs: Verbs) -> None:
    verb = add_verb(verbs, "submit", _submit, "train a job on a cluster: plan, submit, return")
    verb.add_argument("job", help="preset, such as fingerprint_1m: trainyard jobs")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="trainyard options JOB lists them")
    verb.add_argument("--name", help="name of the run's folder")
    verb.add_argument("--dry", action="store_true", help="print the plan and the batch script, and stop")
    verb.add_argument("--local", action="store_true", help="no Slurm: run it here in the background")
    add_resource_args(verb, gpus=1)


def add_resource_args(verb: argparse.ArgumentParser, *, gpus: int) -> None:
    """Add what one may wish for on a cluster."""
    verb.add_argument("--gpus", type=int, default=gpus, metavar="N", help="of the whole job")
    verb.add_argument("--hw", default="", metavar="TYPE", help="GPU type of the cluster, such as a100")
    verb.add_argument("--nodes", type=int, default=0, metavar="N", help="nodes; default: as few as hold the GPUs")
    verb.add_argument("--time", default="", metavar="LENGTH", help="limit of one attempt, such as 8h30m")
    verb.add_argument("--cluster", default="", metavar="NAME", help="slurm/NAME.yaml, or a path")


def _submit(args: argparse.Namespace) -> int:
    config = _everywhere(configs.compose(args.job, args.overrides, args.jobs))
    if args.local:
        return _submit_here(config, args)
    cluster = _cluster(args.cluster, job=args.job, dry=args.dry)
    plan = submit.plan(config, cluster, _wish(args))
    if args.dry:
        return _show(plan, config, args)
    _has_data(config, args.jobs)
    _fits_slurm(plan)
    run = runs.create_run(args.runs.absolute(), config, name=args.name, environ=os.environ)
    try:
        code = submit.snapshot_code(args.jobs, run / "code")
        (job,) = submit.submit(plan, [run], folder=run / "slurm", code=code)
    except BaseException:
        shutil.rmtree(run)
        raise
    print(submit.describe(plan, run))
    _tell_submitted(f"job {job}", [run])
    return 0


def _show(plan: submit.Plan, config: TrainConfig, args: argparse.Namespace) -> int:
    run = args.runs.absolute() / config.job / (args.name or "NEW")
    code = submit.Code(run / "code", run / "code" / args.jobs.resolve().name)
    print(submit.describe(plan, run))
    print(f"\n{submit.sbatch_text(plan, [run], folder=run / 'slurm', code=code)}")
    if not config.data.path and not config.data.synthetic:
        print("Nothing was submitted, and nothing could be yet: this job needs DATA=folder.", file=sys.stderr)
    return 0


def _submit_here(config: TrainConfig, args: argparse.Namespace) -> int:
    _has_data(config, args.jobs)
    if args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: a job needs at least one rank. Leave it out for one.")
    gpus = args.gpus if shutil.which("nvidia-smi") else 0
    time_min = clusters.parse_minutes(args.time or "30d")
    run = runs.create_run(args.runs.absolute(), config, name=args.name, environ=os.environ)
    try:
        code = submit.snapshot_code(args.jobs, run / "code")
        job = submit.submit_here(run, ranks=args.gpus, gpus=gpus, time_min=time_min, code=code)
    except BaseException:
        shutil.rmtree(run)
        raise
    _tell_submitted(f"process {job} on this machine, {args.gpus} rank{'s' * (args.gpus > 1)}", [run])
    return 0


def _tell_submitted(what: str, made: Sequence[Path]) -> None:
    name = runs.format_run_name(made[0])
    print(f"\nsubmitted  {what}\nnext       trainyard logs -f {name}")
    print(f"           trainyard status    trainyard why {name}    trainyard cancel {name}")


def resubmit(run: Path, args: argparse.Namespace) -> int:
    """Submit a run again, which goes on from its newest checkpoint; what is not asked for anew stays as it was."""
    before = submit.read_note(run)
    if before["scheduler"] == "local":
        raise UserError(f"{run}: ran on this machine. Go on with it here: trainyard resume {run} --here")
    config = configs.thaw(run / runs.CONFIG, args.jobs)
    cluster = _cluster(args.cluster or before["cluster_file"], job=config.job)
    same = not args.hw or args.hw == before["hw"]
    wish = submit.ResourceRequest(
        gpus=args.gpus or before["gpus"],
        hw=args.hw or before["hw"],
        nodes=args.nodes or (before["nodes"] if same and not args.gpus else 0),
        time=args.time or (f"{before['time_min']}m" if same else ""),
    )
    plan = submit.plan(config, cluster, wish)
    _fits_slurm(plan)
    code = submit.Code(Path(before["code"]), Path(before["jobs"]))
    if args.update_code:
        code = submit.snapshot_code(args.jobs, runs.find_free_name(run / "code"))
    elif not submit.can_start(code):
        raise UserError(
            f"{run}: was submitted with an older version of Trainyard, whose copy in {code.folder} this one cannot "
            f"start. Resume it with today's code: trainyard resume {run} --update-code"
        )
    (job,) = submit.submit(plan, [run], folder=run / "slurm", code=code)
    print(submit.describe(plan, run))
    _tell_submitted(f"job {job}", [run])
    return 0


def _cluster(wanted: str, *, job: str, dry: bool = False) -> clusters.Cluster:
    """Return the cluster that is meant.

    Raises:
        UserError: there is no Slurm here to submit to; says how to run without one.
    """
    absent = slurm.explain_absence()
    if absent and not dry:
        raise UserError(
            f"{absent} Run it on this machine instead: trainyard submit {job} --local (in the background), or "
            f"trainyard run {job}. See the batch script only: --dry --cluster NAME."
        )
    return clusters.find_cluster(wanted, beside_checkout("slurm"), None if absent else slurm.query_cluster_name())


def _wish(args: argparse.Namespace) -> submit.ResourceRequest:
    return submit.ResourceRequest(gpus=args.gpus, hw=args.hw, nodes=args.nodes, time=args.time)


def _everywhere(config: TrainConfig) -> TrainConfig:
    """Make paths absolute: a node's working folder is not this one."""
    path = str(Path(config.data.path).absolute()) if config.data.path else ""
    return replace(config, data=replace(config.data, path=path, cache=str(Path(config.data.cache).absolute())))


def _has_data(config: TrainConfig, jobs_dir: Path) -> None:
    if not config.data.path and not config.data.synthetic:
        raise UserError(
            f"{config.job} needs data: data.path=FOLDER, or make submit JOB={config.job} DATA=FOLDER. "
            f"What the folder should hold: {jobs_dir / config.family}/README.md"
        )
    if config.data.path and not Path(config.data.path).is_dir():
        raise UserError(f"{config.data.path}: no such folder. Give the folder of raw files or of shards: DATA=FOLDER")


def _fits_slurm(plan: submit.Plan) -> None:
    """Hold a plan against the Slurm that is there, which knows better than its file.

    Raises:
        UserError: it is another Slurm, or it has no such partition, or a limit shorter than the time asked for.
    """
    described, here = plan.cluster.slurm_name, slurm.query_cluster_name()
    if described and described != here:
        raise UserError(
            f"{plan.cluster.path}: describes the Slurm '{described}', but '{here}' answers here. Name the file of this "
            f"one (--cluster NAME), or log in where the other is."
        )
    partitions = slurm.query_partitions()
    found = partitions.get(plan.kind.partition)
    check = f"See what else differs: trainyard cluster-check {plan.cluster.name}"
    if found is None:
        near = nearest_hint(plan.kind.partition, partitions)
        raise UserError(
            f"{plan.cluster.path}: gpus.{plan.hw}.partition is '{plan.kind.partition}', which this Slurm does not "
            f"have.{near} It has: {', '.join(partitions)}. {check}"
        )
    if found.time_limit_min is not None and plan.time_min > found.time_limit_min:
        raise UserError(
            f"TIME={plan.time_min}m: partition {plan.kind.partition} allows at most {found.time_limit_min} minutes. "
            f"Ask for less: a job that reaches its limit saves, starts again and goes on. {check}"
        )


def refuse_if_busy(found: Sequence[Path]) -> None:
    """Raise a UserError if Slurm still holds one of these runs."""
    for known in status.read_statuses(found)[0]:
        if known.state in ACTIVE:
            raise UserError(
                f"{known.run}: is {known.state} as job {known.slurm_job_id}. Look: trainyard status {known.run}"
            )


# sweep, results


def _add_sweep(verbs: Verbs) -> None:
    verb = add_verb(verbs, "sweep", _sweep, "run a job with many settings, as one Slurm array")
    verb.add_argument("job", nargs="?", help="preset")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that all runs share")
    verb.add_argument("--sweep", action="append", default=[], metavar="OPTION=A,B,...", help="what varies; repeatable")
    verb.add_argument("--max-parallel", type=int, default=0, metavar="N", help="runs at once; default: all")
    verb.add_argument("--name", help="name of the sweep")
    verb.add_argument("--continue", dest="again", default="", metavar="SWEEP", help="submit what is not done again")
    add_resource_args(verb, gpus=1)


def _sweep(args: argparse.Namespace) -> int:
    if args.again:
        return _continue_sweep(args)
    if not args.job or not args.sweep:
        raise UserError('Name a job and what varies: trainyard sweep JOB --sweep "optimizer.lr=1e-4,3e-4 seed=0,1,2"')
    cluster = _cluster(args.cluster, job=args.job)
    config = _everywhere(configs.compose(args.job, args.overrides, args.jobs))
    plan = submit.plan(config, cluster, _wish(args))
    _has_data(config, args.jobs)
    _fits_slurm(plan)
    fixed = [*args.overrides, f"data.path={config.data.path}", f"data.cache={config.data.cache}"]
    sweep = sweeps.create(
        args.job, args.sweep, fixed, jobs_dir=args.jobs, root=args.runs.absolute(), name=args.name, environ=os.environ
    )
    try:
        for element in sweep.elements:  # what varies may be what this card cannot do
            submit.plan(configs.thaw(element.run / runs.CONFIG, args.jobs), cluster, _wish(args))
        code = submit.snapshot_code(args.jobs, sweep.folder / "code")
        jobs = _submit_elements(sweep, sweep.elements, plan, code, args.max_parallel)
    except BaseException:
        sweeps.discard(sweep)
        raise
    print(submit.describe(plan, sweep.folder))
    _tell_sweep(sweep, jobs)
    return 0


def _continue_sweep(args: argparse.Namespace) -> int:
    sweep = sweep_file.load(args.again, args.runs.absolute())
    states = {known.run: known.state for known in status.read_statuses([e.run for e in sweep.elements])[0]}
    missing = sweep_file.list_unfinished(sweep, states)
    if not missing:
        print(f"Nothing is missing: {_counted(states.values())}.\nnext  trainyard results {sweep.name}")
        return 0
    note = submit.read_note(missing[0].run)
    cluster = _cluster(args.cluster or note["cluster_file"], job=sweep.job)
    wish = submit.ResourceRequest(note["gpus"], args.hw or note["hw"], args.nodes, args.time or f"{note['time_min']}m")
    plan = submit.plan(configs.thaw(missing[0].run / runs.CONFIG, args.jobs), cluster, wish)
    _fits_slurm(plan)
    for element in missing:
        lock.release(element.run)
    code = submit.Code(Path(note["code"]), Path(note["jobs"]))
    jobs = _submit_elements(sweep, missing, plan, code, args.max_parallel)
    print(f"{len(missing)} of {len(sweep.elements)} runs go on, the others are: {_counted(states.values())}.")
    _tell_sweep(sweep, jobs)
    return 0


def _submit_elements(
    sweep: sweep_file.Sweep, elements: Sequence[sweep_file.Element], plan: submit.Plan, code: submit.Code, parallel: int
) -> list[str]:
    folder = sweep.folder / "slurm"
    return submit.submit(plan, [e.run for e in elements], folder=folder, code=code, parallel=parallel)


def _tell_sweep(sweep: sweep_file.Sweep, jobs: Sequence[str]) -> None:
    first = jobs[0].partition("_")[0]
    print(f"\nsubmitted  {len(jobs)} runs as job {first}\nnext       trainyard status {sweep.name}")
    print(f"           trainyard results {sweep.name}    trainyard sweep --continue {sweep.name}")


def _counted(states: Iterable[str]) -> str:
    names = list(states)
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _add_results(verbs: Verbs) -> None:
    verb = add_verb(verbs, "results", _results, "what came out of a sweep: table, CSV, HTML and plot")
    verb.add_argument("sweep")
    verb.add_argument("--metric", default="", help="default: what the model is chosen by")


def _results(args: argparse.Namespace) -> int:
    from trainyard.report import sweep_page as results

    sweep = sweep_file.load(args.sweep, args.runs.absolute())
    states = {known.run: known.state for known in status.read_statuses([e.run for e in sweep.elements])[0]}
    found = results.collect(sweep, states, metric=args.metric)
    page = results.write(found)
    print(f"{results.format_results(found)}\n{page}")
    return 0


# status, runs, logs, why, cancel


def _add_status(verbs: Verbs) -> None:
    verb = add_verb(verbs, "status", _status, "what runs, waits or ended lately")
    verb.add_argument("run", nargs="*", help="runs, jobs or sweeps; default: the 20 newest runs")


def _status(args: argparse.Namespace) -> int:
    found = _named(args.run, args.runs) if args.run else runs.list_newest_runs(args.runs, 20)
    return _print_runs(found, args.runs, status.render_table if len(found) <= 20 else status.render_overview)


def _add_runs(verbs: Verbs) -> None:
    verb = add_verb(verbs, "runs", _runs, "list all runs")
    verb.add_argument("job", nargs="?", help="of this job only")


def _runs(args: argparse.Namespace) -> int:
    if args.job:
        runs.find_latest_run(args.runs, args.job)  # says which jobs have runs, if this one has none
    return _print_runs(runs.list_newest_runs(args.runs, None, job=args.job), args.runs, status.render_table)


def _print_runs(found: Sequence[Path], root: Path, screen: Callable[[Sequence[status.Status], float], str]) -> int:
    if not found:
        print(f"{root.absolute()}: no runs yet.\nnext: trainyard run JOB, or submit JOB (trainyard jobs lists them)")
        return 0
    known, note = status.read_statuses(found)
    print(screen(known, time.time()))
    if note:
        print(note, file=sys.stderr)
    return 0


def _add_logs(verbs: Verbs) -> None:
    verb = add_verb(verbs, "logs", _logs, "print a run's log")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")


def _logs(args: argparse.Namespace) -> int:
    speak = logs.follow if args.follow else logs.show
    speak(runs.resolve_run(args.run, args.runs), lambda line: print(line, flush=True))
    return 0


def _add_why(verbs: Verbs) -> None:
    verb = add_verb(verbs, "why", _why, "why a run waits, stopped or failed, and what to do")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")


def _why(args: argparse.Namespace) -> int:
    print(explain_run(runs.resolve_run(args.run, args.runs)))
    return 0


def _add_cancel(verbs: Verbs) -> None:
    verb = add_verb(verbs, "cancel", _cancel, "stop runs; they can be resumed")
    verb.add_argument("run", nargs="+", help="runs, jobs or sweeps")


def _cancel(args: argparse.Namespace) -> int:
    print("\n".join(cancel.cancel(_named(args.run, args.runs))))
    return 0


def _named(names: Sequence[str], root: Path) -> list[Path]:
    """Return the runs that are meant; the name of a sweep means all of its runs."""
    found: list[Path] = []
    for name in names:
        if sweep_file.exists(name, root.absolute()):
            found += [element.run for element in sweep_file.load(name, root.absolute()).elements]
        else:
            found.append(runs.resolve_run(name, root))
    return found


# cluster-check, multirun


def _add_cluster_check(verbs: Verbs) -> None:
    verb = add_verb(verbs, "cluster-check", _cluster_check, "hold a cluster file against the Slurm it describes")
    verb.add_argument("cluster", nargs="?", default="", help="slurm/NAME.yaml, or a path; default: by Slurm's own name")


def _cluster_check(args: argparse.Namespace) -> int:
    absent = slurm.explain_absence()
    if absent:
        raise UserError(f"{absent} Check the file on a machine from which you can submit.")
    cluster = clusters.find_cluster(args.cluster, beside_checkout("slurm"), slurm.query_cluster_name())
    findings = check_cluster(cluster)
    print(render_findings(findings))
    return 1 if any(finding.level == "wrong" for finding in findings) else 0


def _add_multirun(verbs: Verbs) -> None:
    verb = add_verb(verbs, "multirun", _multirun, "Hydra's own multirun, with its launchers and sweepers")
    verb.add_argument("job", help="preset")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="as for Hydra, such as seed=0,1,2")


def _multirun(args: argparse.Namespace) -> int:
    from trainyard.launch import multirun

    return multirun.multirun(args.job, args.overrides, jobs_dir=args.jobs, runs_dir=args.runs, environ=os.environ)
