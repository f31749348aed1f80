"""The command `bandwidth`: a Slurm job that measures how fast the ranks of several nodes exchange gradients."""

import argparse
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path

from trainyard.cli import cluster
from trainyard.cli.dry import NEW, name_code
from trainyard.cli.verb import Verbs, add_verb
from trainyard.cluster.description import format_minutes
from trainyard.errors import UserError
from trainyard.files import create_common_folder, limit_writers, require_writable
from trainyard.launch import submit
from trainyard.launch.batch_script import name_container_image
from trainyard.launch.resources import Plan
from trainyard.measure import make_header
from trainyard.runs.folder import find_free_name
from trainyard.settings import TrainConfig
from trainyard.tools.bandwidth import SUITE, BandwidthTask, parse_sizes


def add_commands(verbs: Verbs) -> None:
    """Add the command."""
    doc = "measure all-reduce between the nodes of a cluster, in a Slurm job"
    verb = add_verb(verbs, "bandwidth", _measure_bandwidth, doc)
    verb.add_argument("--sizes", default="1,4,16,64,256", metavar="MIB,...", help="of what is summed (%(default)s)")
    verb.add_argument("--rounds", type=int, default=5, metavar="N", help="of each size (%(default)s)")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), metavar="DIR", help="folder of result files")
    cluster.add_resource_args(verb, gpus=2)
    verb.set_defaults(nodes=2, time="10m")  # a short job waits less


def _measure_bandwidth(args: argparse.Namespace) -> int:
    if args.gpus < 2:
        raise UserError(f"--gpus {args.gpus}: an all-reduce needs at least two ranks. Leave it out for two.")
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: expected a number above 0, such as --rounds 5")
    sizes, results = parse_sizes(args.sizes), args.results.absolute()
    found = cluster.find_cluster(args.cluster, dry=args.dry)
    config = TrainConfig(job=SUITE, global_batch_size=args.gpus)  # what a plan is made from; nothing trains
    plan = submit.make_plan(config, found, cluster.read_request(args))
    root = args.runs.absolute() / SUITE
    if args.dry:
        folder = root / NEW
        print(_describe(plan, folder, results))
        code = name_code(args.jobs, folder / "code")
        print(f"\n{submit.render_task_script(plan, folder=folder / 'slurm', code=code)}")
        print("Nothing was submitted.", file=sys.stderr)
        return 0
    submit.check_paths(found, [root, results])
    require_writable(results, flag="--results")
    cluster.check_against_slurm(plan)
    header = make_header(SUITE, {"sizes": args.sizes, "rounds": args.rounds, "gpus": plan.gpus, "nodes": plan.nodes})
    create_common_folder(root.parent, group=found.group)
    create_common_folder(root, group=found.group)
    with limit_writers():
        folder = find_free_name(root / f"{datetime.now():%Y%m%d-%H%M%S}")
        folder.mkdir()
    try:
        code = submit.snapshot_code(args.jobs, folder / "code")
        task = BandwidthTask(folder, results, plan.hw, sizes, args.rounds, header)
        job = submit.submit_task(plan, task, folder=folder / "slurm", code=code)
    except BaseException:
        shutil.rmtree(folder)
        raise
    print(_describe(plan, folder, results))
    log = shlex.quote(str(folder / "slurm" / f"{job}_0_log.out"))
    print(f"\nsubmitted  Slurm job {job}\nnext       tail -n +1 -F {log}")
    print(f"           when it starts: squeue --start --job {job}    stop it: scancel {job}")
    return 0


def _describe(plan: Plan, folder: Path, results: Path) -> str:
    where = f"{plan.nodes} node{'s' * (plan.nodes > 1)} of partition {plan.options['partition']} on {plan.cluster.name}"
    rows = {
        "measures": f"all-reduce over {plan.gpus} ranks, {plan.ranks_per_node} per node",
        "hardware": f"{plan.gpus} x {plan.hw}, {where}  ({plan.why_hw})",
        "time": f"{format_minutes(plan.time_min)}  ({plan.why_time})",
        "runs in": name_container_image(plan) or plan.cluster.python or sys.executable,
        "folder": str(folder),
        "results": str(results),
    }
    return "\n".join(f"{name:<11}{value}" for name, value in rows.items())
