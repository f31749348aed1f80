"""A shell on a node: with the cards and in the container image that a run would get, or next to a run that is there."""

import shlex

from trainyard.launch.batch_script import build_container_command, build_pyxis_args, request_gpus
from trainyard.plan.resources import Plan


def build_command(plan: Plan, *, job: str = "") -> list[str]:
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
