"""Renders a submission for submitit: the options of sbatch, the commands around srun, and the command that srun starts.

Every value reaches the shell quoted, except the lines of shell code that a cluster file contains for that purpose.
"""

import hashlib
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.cluster.description import Cluster
from trainyard.plan.resources import Code, Plan


@dataclass(frozen=True)
class JobDependency:
    """A Slurm job's role, and the jobs that come before it."""

    only_packs: bool = False  # it packs the data of its run, which another job trains on
    after_done: tuple[str, ...] = ()  # Slurm jobs that must end well before it starts
    after_end: str = ""  # Slurm job that must end before it starts, well or not

    @property
    def option(self) -> str:
        """The value of sbatch's option."""
        done = [f"afterok:{':'.join(self.after_done)}"] if self.after_done else []
        return ",".join([*done, *([f"afterany:{self.after_end}"] if self.after_end else [])])

    @property
    def end_if_impossible(self) -> dict[str, str]:
        """The option that makes Slurm cancel a job that can never start; without it, the job would stay queued."""
        return {"kill-on-invalid-dep": "yes"} if self.after_done else {}


NO_DEPENDENCY = JobDependency()
"""Trains, and waits for no other Slurm job."""

START_RANK = "trainyard.node.start_rank"
"""The module that srun starts."""


def build_parameters(
    plan: Plan,
    runs: Sequence[Path],
    *,
    folder: Path,
    code: Code,
    parallel: int = 0,
    dependency: JobDependency = NO_DEPENDENCY,
) -> dict[str, Any]:
    """Return the parameters of submitit's SlurmExecutor; the other arguments are those of `submit.submit`."""
    cluster = plan.cluster
    source = f"source {shlex.quote(str(folder / 'attempt.sh'))}"
    limits = " ".join(f"{cause}={count}" for cause, count in vars(cluster.attempts).items())
    return {
        **_build_request(plan, dependency),
        "array_parallelism": parallel or len(runs),
        "setup": [
            f"export TRAINYARD_RUN={_render_run_folder(runs, folder)}",
            f"export TRAINYARD_LIMITS={shlex.quote(limits)} TRAINYARD_SIGNAL_S={plan.signal_s}",
            f"export TRAINYARD_REQUEUE_S={cluster.requeue_wait_s}",
            *(["export TRAINYARD_TASK=packing"] if dependency.only_packs else []),
            *([f"TRAINYARD_ON_END={shlex.quote(cluster.on_end)}"] if cluster.on_end else []),
            f"{source} begin",
            "(  # the site's lines and the ranks: whatever shell options, traps or exit they contain, `end` is reached",
            *_render_setup(plan, code),
            *_render_node_setup(plan),
            ': >|"$TRAINYARD_RUN/slurm/started-$TRAINYARD_ATTEMPT"',
        ],
        "teardown": [")", f"{source} end $?"],
    }


def _build_request(plan: Plan, dependency: JobDependency) -> dict[str, Any]:
    """Return the options of sbatch and srun."""
    cluster, kind, options = plan.cluster, plan.kind, plan.options
    stated = {name: value for name, value in options.items() if name in ("reservation", "comment")}
    return {
        "job_name": f"{plan.job}-packing" if dependency.only_packs else plan.job,
        "time": plan.time_min,
        "nodes": plan.nodes,
        "ntasks_per_node": plan.ranks_per_node,
        "cpus_per_task": kind.cores_per_gpu,
        **request_gpus(plan),
        **{name: value for name, value in options.items() if name != "reservation"},  # submitit does not know it
        "wckey": cluster.wckey or None,
        **({"dependency": dependency.option} if dependency.option else {}),
        "additional_parameters": {
            "requeue": True,
            "propagate": "NONE",  # else the limits of the shell that submits (ulimit -t, -v) would end ranks
            "signal": f"USR2@{plan.signal_s}",  # whatever a profile tells submitit: `StopFlag` knows this one
            **cluster.sbatch,
            **stated,
            **dependency.end_if_impossible,
        },
        # The ranks need this script's exports, also where the site or the cluster file has sbatch export nothing.
        "srun_args": ["--export=ALL", "--kill-on-bad-exit=1", *build_pyxis_args(plan), *cluster.srun_args],
    }


def _render_setup(plan: Plan, code: Code) -> list[str]:
    """Return the shell lines that every task needs before its ranks start."""
    wait_for_ranks = "trap : TERM"  # they also get it; set twice, because the site's lines may set traps
    return [
        wait_for_ranks,
        *plan.cluster.setup,
        wait_for_ranks,
        *([f'export TRAINYARD_SCRATCH="{plan.cluster.scratch}"'] if plan.cluster.scratch else []),  # expands here
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",  # since 22.05 srun ignores the other
        *(["export CUDA_VISIBLE_DEVICES="] if plan.kind.card == "cpu" else []),
        _export_code_path(plan, code),
    ]


def request_gpus(plan: Plan) -> dict[str, str]:
    """Return the option of sbatch, with an underscore, that requests the GPUs of each node."""
    gres, count = plan.kind.gres, plan.ranks_per_node
    if not gres:
        return {}
    if plan.kind.gpu_option == "gres":
        return {"gres": f"{gres}:{count}"}
    kind = gres.partition(":")[2]
    return {"gpus_per_node": f"{kind}:{count}" if kind else str(count)}


def _render_node_setup(plan: Plan) -> list[str]:
    """Return the shell line that runs `node_setup` once on every node, as a separate step before the ranks'."""
    if not plan.cluster.node_setup:
        return []
    step = f"srun --export=ALL --nodes={plan.nodes} --ntasks={plan.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1"
    lines = "\n".join(["set -e", *plan.cluster.node_setup])
    return [f"{step} bash -c {shlex.quote(lines)} || exit"]


def _export_code_path(plan: Plan, code: Code) -> str:
    """Return the shell line that puts the snapshot on PYTHONPATH; Apptainer passes only prefixed variables on."""
    names = ["APPTAINERENV_PYTHONPATH", "SINGULARITYENV_PYTHONPATH"]
    names = names if plan.cluster.container.kind == "apptainer" else ["PYTHONPATH"]
    return "export " + " ".join(f"{name}={shlex.quote(str(code.folder))}" for name in names)


def _render_run_folder(runs: Sequence[Path], folder: Path) -> str:
    """Return the run's folder as shell code; an array element reads its line of a list."""
    if len(runs) == 1:
        return shlex.quote(str(runs[0]))
    list_file = shlex.quote(str(name_array_list(folder, runs)))
    return f'"$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {list_file})"'


def name_array_list(folder: Path, runs: Sequence[Path]) -> Path:
    """Return the path of an array's list of runs; `sweep --continue` must not overwrite that of a pending array."""
    return folder / f"runs-{hashlib.sha256(os.fsencode(chr(10).join(map(str, runs)))).hexdigest()[:12]}.txt"


def build_rank_command(python: str, folder: Path) -> str:
    """Return what starts each rank; `python` is a quoted command."""
    return f"{python} -P -u -m {START_RANK} {shlex.quote(str(folder))}"  # -P: nothing of the folder one submits from


def build_python_command(plan: Plan) -> str:
    """Return the command that runs Python on a node, quoted."""
    container = build_container_command(plan)
    return shlex.join([*container, plan.cluster.python or ("python" if container else sys.executable)])


def build_container_command(plan: Plan) -> list[str]:
    """Return the words before a command that run it in the container; none without one, or where srun does that."""
    cluster = plan.cluster
    if cluster.container.kind != "apptainer":
        return []
    nvidia = ["--nv"] if plan.kind.gres else []
    binds = [word for folder in _list_mounts(cluster) for word in ("--bind", folder)]
    return ["apptainer", "exec", *nvidia, *binds, *cluster.container.options, name_container_image(plan)]


def build_pyxis_args(plan: Plan) -> list[str]:
    """Return the arguments with which srun's plugin starts the container."""
    container = plan.cluster.container
    if container.kind != "pyxis":
        return []
    mounts = ",".join(f"{folder}:{folder}" for folder in _list_mounts(plan.cluster))
    return [f"--container-image={name_container_image(plan)}", f"--container-mounts={mounts}", *container.options]


def _list_mounts(cluster: Cluster) -> list[str]:
    """Return the folders mounted into the container under their own names: shared ones and scratch."""
    fixed_parts = itertools.takewhile(lambda part: "$" not in part, Path(cluster.scratch).parts)
    folders = [*cluster.shared, *([str(Path(*fixed_parts))] if cluster.scratch.startswith("/") else [])]
    return [folder for folder in folders if folder != "/"]


def name_container_image(plan: Plan) -> str:
    """Return the container image for the plan's card; "" without a container."""
    return plan.cluster.container.image.replace("{target}", plan.target)
