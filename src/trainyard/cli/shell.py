"""The command shell: an interactive shell where a run would be, or is."""

import argparse
import os
import shlex
from dataclasses import replace

from trainyard.cli.request import add_resource_args, check_against_slurm, find_cluster, read_request, require_trust
from trainyard.cli.verb import Verbs, add_trust_option, add_verb
from trainyard.cluster.variables import select_for_ranks
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.launch.batch_script import build_container_command, build_pyxis_args, request_gpus
from trainyard.plan.make_plan import make_plan
from trainyard.plan.resources import Plan, ResourceRequest
from trainyard.runs import folder as runs
from trainyard.runs.history import read_run
from trainyard.runs.submission import read_submission
from trainyard.terminal import say
from trainyard.text import quote_path


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "shell", _open_shell, "open a shell on a node, as a run has it, or next to a run")
    verb.add_argument("run", nargs="?", default="", help="a run in Slurm; default: a new Slurm job of an hour")
    add_resource_args(verb, gpus=1)
    add_trust_option(verb)
    verb.set_defaults(overrides=[])


def _open_shell(args: argparse.Namespace) -> int:
    request, job = read_request(args).resources, ""
    cluster_file = args.cluster
    if args.run:
        run = runs.resolve_run(args.run, args.runs)
        require_trust([run], args)
        job = read_run(run).slurm_job_id
        if not job:
            raise UserError(f"{run}: is not in Slurm. A shell on this machine: bash")
        submission = read_submission(run)
        cluster_file = cluster_file or submission["cluster_file"]
        request = ResourceRequest(gpus=submission["gpus"], hw=submission["hw"], nodes=submission["nodes"])
    cluster = find_cluster(cluster_file, dry=args.dry)
    config = replace(TrainConfig(), job="shell", global_batch_size=request.gpus)
    plan = make_plan(config, cluster, request if job or request.time else replace(request, time="1h"))
    command = _build_command(plan, job=job)
    if args.dry:
        say(shlex.join(command))
        return 0
    if not job:
        check_against_slurm(plan)
    say(f"{plan.hw}: {f'next to {quote_path(run)}' if job else 'waiting for a node'} ... leave it with: exit")
    environ = {**select_for_ranks(os.environ, cluster.variables), "TERM": os.environ.get("TERM", "dumb")}
    os.execvpe(command[0], command, environ)


def _build_command(plan: Plan, *, job: str = "") -> list[str]:
    """Return the srun command of an interactive shell on one node.

    It has the options of sbatch that a run of this plan has, and what `setup` of the cluster file exports.

    Args:
        job: the Slurm job that has the node already; "": a new one is requested.
    """
    cluster, ranks = plan.cluster, plan.ranks_per_node
    requested = {
        "job-name": "trainyard-shell",
        "time": str(plan.time_min),
        "cpus-per-task": str(plan.kind.cores_per_gpu * ranks),
        **{name.replace("_", "-"): value for name, value in request_gpus(plan).items()},
        **plan.options,
        **({"wckey": cluster.wckey} if cluster.wckey else {}),
    }
    where = {"jobid": job} if job else requested
    words = [f"--{name}={value}" for name, value in {**where, "nodes": "1", "ntasks": "1", "export": "ALL"}.items()]
    inside = shlex.join([*build_container_command(plan), "bash"])
    lines = [*([] if build_pyxis_args(plan) else cluster.setup), f"exec {inside}"]
    overlap = ["--overlap"] if job else []
    return [
        *("srun", *words, *overlap, *build_pyxis_args(plan), *cluster.srun_args, "--pty"),
        *("bash", "-c", "\n".join(lines)),
    ]
