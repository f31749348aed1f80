"""Turns a resource request into a Slurm job: the plan a person sees, the batch script, the submission.

submitit writes the script, pickles `rank_task.RankTask` and calls sbatch; a copy of attempt.sh judges, from
within the script, how an attempt ended. Loads no torch: submitting takes a fraction of a second.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard.cluster import query as slurm
from trainyard.cluster.description import Cluster, GpuNodes, format_minutes, parse_minutes
from trainyard.errors import UserError
from trainyard.files import write_atomically, write_json
from trainyard.hardware import Precision, gpu_of_key, image_target, precision_for
from trainyard.launch.rank_task import RankTask
from trainyard.runs.folder import SUBMISSION
from trainyard.runs.state import render_exit_codes
from trainyard.settings import TrainConfig
from trainyard.text import nearest_hint

_PACKAGE = Path(__file__).resolve().parents[1]
_CODE_LIMIT_MIB = 64


@dataclass(frozen=True)
class ResourceRequest:
    """What a person asked for; empty and 0 are ours to choose."""

    gpus: int = 1  # of the whole job; card "cpu": ranks
    hw: str = ""  # key of the cluster's `gpus`
    nodes: int = 0
    time: str = ""  # for cluster.minutes()


@dataclass(frozen=True)
class Plan:
    """All that Slurm is asked for, and what it means for training."""

    job: str
    cluster: Cluster
    hw: str
    kind: GpuNodes
    gpus: int
    nodes: int
    time_min: int
    signal_s: int  # from the warning to the end
    global_batch: int
    micro_batch: int  # samples a rank takes at once
    accumulation: int  # micro-batches per step
    precision: Precision
    why_hw: str
    why_time: str

    @property
    def ranks_per_node(self) -> int:
        """Return the tasks of a node: one per GPU."""
        return self.gpus // self.nodes

    @property
    def target(self) -> str:
        """Return the image target for this card."""
        card = gpu_of_key(self.kind.card)
        return image_target(None if card is None else card.sm)


@dataclass(frozen=True)
class Code:
    """A copy of the code that a submission runs, whatever happens to the checkout while the job waits."""

    folder: Path  # what goes on PYTHONPATH
    jobs: Path  # the folder of job families inside it


def plan(config: TrainConfig, cluster: Cluster, wish: ResourceRequest) -> Plan:
    """Choose partition, nodes, time and micro-batch. Asks nobody: a function of its arguments.

    Raises:
        UserError: the cluster has no such GPU type, too few of them, or no such long time.
    """
    hw, why_hw = _choose_hw(cluster, wish)
    kind = cluster.gpus[hw]
    nodes = _choose_nodes(hw, kind, wish)
    time_min, why_time = _choose_time(hw, kind, cluster, wish)
    card = gpu_of_key(kind.card)
    share = -(-config.global_batch_size // wish.gpus)
    micro = min(config.micro_batch_size or share, share)
    return Plan(
        job=config.job,
        cluster=cluster,
        hw=hw,
        kind=kind,
        gpus=wish.gpus,
        nodes=nodes,
        time_min=time_min,
        signal_s=min(cluster.signal_delay_s, time_min * 60 // 4),
        global_batch=config.global_batch_size,
        micro_batch=micro,
        accumulation=-(-share // micro),
        precision=precision_for(
            None if card is None else card.sm,
            precision=config.precision,
            channels_last=config.channels_last,
            compile=config.compile,
        ),
        why_hw=why_hw,
        why_time=why_time,
    )


def describe(plan: Plan, run: Path | None) -> str:
    """Return the plan as one screen."""
    card = gpu_of_key(plan.kind.card)
    what = f"{plan.gpus} x {card.name if card else 'CPU rank'}"
    where = f"{plan.nodes} node{'s' * (plan.nodes > 1)} of partition {plan.kind.partition} on {plan.cluster.name}"
    again = ", ".join(
        f"{getattr(plan.cluster.attempts, name)} x after {words}"
        for name, words in (
            ("preempted", "preemption"),
            ("time_limit", "the time limit"),
            ("node_failure", "node failure"),
            ("crash", "a crash"),
        )
    )
    policy = plan.precision
    switches = [policy.dtype, *(["TF32"] * policy.tf32), "channels_last" if policy.channels_last else "NCHW"]
    rows = {
        "job": f"{plan.job}",
        "hardware": f"{what}, {where}  ({plan.why_hw})",
        "batch": f"{plan.global_batch} = {plan.micro_batch} at once x {plan.accumulation} x {plan.gpus} ranks"
        + ("" if plan.micro_batch * plan.accumulation * plan.gpus == plan.global_batch else ", the last ones smaller"),
        "precision": f"{', '.join(switches)}  ({policy.reasons['dtype']})",
        "a node": f"{plan.ranks_per_node} ranks, {plan.kind.cores_per_gpu} cores each, {_memory_gib(plan)} GiB",
        "time": f"{format_minutes(plan.time_min)}, warned {plan.signal_s} s before the end  ({plan.why_time})",
        "again": again,
        "runs in": _image(plan) or plan.cluster.python or sys.executable,
        **({"folder": str(run)} if run is not None else {}),
    }
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def snapshot_code(jobs_dir: Path, into: Path) -> Code:
    """Copy Trainyard's own code and the families to a new folder `into`.

    Raises:
        UserError: the families' folder holds data: more than 64 MiB.
    """
    sizes = {path: path.stat().st_size for path in jobs_dir.rglob("*") if path.is_file()}
    if sum(sizes.values()) > _CODE_LIMIT_MIB << 20:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UserError(
            f"{jobs_dir}: {sum(sizes.values()) >> 20} MiB, but what is submitted gets a copy of this folder, so it "
            f"should hold code: at most {_CODE_LIMIT_MIB} MiB. Largest: {largest}. Move data out of it."
        )
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    shutil.copytree(_PACKAGE, into / _PACKAGE.name, ignore=unwanted)
    shutil.copytree(jobs_dir, into / jobs_dir.resolve().name, ignore=unwanted)
    return Code(into, into / jobs_dir.resolve().name)


def attempt_script() -> str:
    """Return attempt.sh as a batch script sources it: behind a line that sets the exit codes."""
    return render_exit_codes() + (_PACKAGE / "launch" / "attempt.sh").read_text()


def can_start(code: Code) -> bool:
    """Tell whether a snapshot of code holds what `submit` pickles by name: one of an earlier version may not."""
    return (code.folder / _PACKAGE.name / "launch" / "rank_task.py").is_file()


def sbatch_text(plan: Plan, runs: Sequence[Path], *, folder: Path, code: Code, parallel: int = 0) -> str:
    """Return the batch script that `submit` would hand in."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{_python(plan)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    parameters = _parameters(plan, runs, folder=folder, code=code, parallel=parallel)
    return _make_sbatch_string(command, folder, map_count=len(runs) if len(runs) > 1 else None, **parameters)


def submit(plan: Plan, runs: Sequence[Path], *, folder: Path, code: Code, parallel: int = 0) -> list[str]:
    """Submit runs, several as one array, and return their job ids, in order.

    Args:
        folder: of submitit's files; it and the runs must lie where all nodes see them.
        parallel: elements of an array that may run at once; 0: all.

    Raises:
        UserError: a path that Slurm cannot take, or Slurm's refusal, in its words. Nothing is left behind.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    check_paths(plan.cluster, [*runs, folder, code.folder])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempt.sh").write_text(attempt_script())
    if len(runs) > 1:
        write_atomically(_array_list(folder, runs), "".join(f"{run}\n" for run in runs))
    before = set(folder.iterdir())
    executor = SlurmExecutor(folder, python=_python(plan))
    executor.update_parameters(**_parameters(plan, runs, folder=folder, code=code, parallel=parallel))
    try:
        jobs = executor.submit_array([RankTask(run, code.jobs) for run in runs])
    except (FailedJobError, FailedSubmissionError) as error:
        for leftover in set(folder.iterdir()) - before:
            leftover.unlink()
        raise UserError(
            f"Slurm refused the job: {_refusal(error)}\nHold the file against it: {_checks(plan)}"
        ) from None
    for run, job in zip(runs, jobs, strict=True):
        _note(run, job.job_id, "slurm", plan, folder=folder, code=code)
    return [job.job_id for job in jobs]


def submit_here(run: Path, *, ranks: int, gpus: int, time_min: int, code: Code) -> str:
    """Start a run in the background on this machine with submitit's local executor; return its process id."""
    from submitit.local.local import LocalExecutor

    folder = run / "slurm"
    executor = LocalExecutor(folder, python=f"env {shlex.quote(f'PYTHONPATH={code.folder}')} {_interpreter()}")
    executor.update_parameters(tasks_per_node=ranks, gpus_per_node=gpus, timeout_min=time_min, signal_delay_s=60)
    with _without_terminal():
        job = executor.submit(RankTask(run, code.jobs, since=time.time()))
    note = {"scheduler": "local", "job": job.job_id, "gpus": ranks, "nodes": 1, "time_min": time_min}
    _write_note(run, {**note, "folder": str(folder), "code": str(code.folder), "jobs": str(code.jobs)})
    return str(job.job_id)


def read_note(run: Path) -> dict[str, Any]:
    """Return what the last submission of a run was."""
    note: dict[str, Any] = json.loads((run / SUBMISSION).read_text(encoding="utf-8"))
    return note


def check_paths(cluster: Cluster, paths: Sequence[Path]) -> None:
    """Hold the folders of a submission against what the cluster shares and what a batch script can hold.

    Raises:
        UserError: names the folder.
    """
    for path in paths:
        if any(character in str(path) for character in "\n\r%\\"):
            raise UserError(
                f"{str(path)!r}: Slurm gives %, backslash and line ends a meaning of their own, so a run cannot lie "
                "there. Choose another folder: --runs DIR"
            )
        if not any(path.is_relative_to(place) for place in cluster.shared):
            raise UserError(
                f"{path}: is not below a folder that the nodes of {cluster.name} share with this machine "
                f"({', '.join(cluster.shared)}). Choose one there: --runs DIR. If it is shared, add it to `shared` in "
                f"{cluster.path}."
            )


# Choosing


def _choose_hw(cluster: Cluster, wish: ResourceRequest) -> tuple[str, str]:
    if wish.gpus < 1:
        raise UserError(f"GPUS={wish.gpus}: a job needs at least one.")
    if wish.hw:
        if wish.hw not in cluster.gpus:
            raise UserError(_no_such_hw(cluster, wish.hw))
        return wish.hw, "asked for"
    for hw, kind in cluster.gpus.items():
        if kind.per_node * kind.nodes >= wish.gpus:
            return hw, f"the first of {', '.join(cluster.gpus)} in {cluster.path.name} with {wish.gpus}"
    raise UserError(f"{wish.gpus} GPUs asked for, but {cluster.name} has no type with so many: {_inventory(cluster)}.")


def _no_such_hw(cluster: Cluster, wanted: str) -> str:
    hint = nearest_hint(wanted.lower(), cluster.gpus)
    return f"HW={wanted}: {cluster.name} has no such GPU type.{hint} It has: {_inventory(cluster)} ({cluster.path})."


def _inventory(cluster: Cluster) -> str:
    return ", ".join(f"{hw} ({kind.nodes} x {kind.per_node})" for hw, kind in cluster.gpus.items())


def _choose_nodes(hw: str, kind: GpuNodes, wish: ResourceRequest) -> int:
    nodes = wish.nodes or -(-wish.gpus // kind.per_node)
    if wish.gpus > kind.per_node * kind.nodes or nodes > kind.nodes:
        raise UserError(
            f"{wish.gpus} GPUs on {nodes} nodes asked for, but {hw} has {kind.nodes} nodes of {kind.per_node}: at most "
            f"GPUS={kind.per_node * kind.nodes}."
        )
    if wish.gpus % nodes or wish.gpus // nodes > kind.per_node:
        fits = [n for n in range(1, kind.nodes + 1) if wish.gpus % n == 0 and wish.gpus // n <= kind.per_node]
        hint = f"NODES={' or '.join(map(str, fits))}" if fits else f"a multiple of {nodes} GPUs"
        raise UserError(
            f"{wish.gpus} GPUs do not spread evenly over {nodes} nodes of {kind.per_node} {hw}. Ask for {hint}."
        )
    return nodes


def _choose_time(hw: str, kind: GpuNodes, cluster: Cluster, wish: ResourceRequest) -> tuple[int, str]:
    longest = parse_minutes(kind.time_max) if kind.time_max else None
    if wish.time:
        asked = parse_minutes(wish.time)
        if longest is not None and asked > longest:
            raise UserError(
                f"TIME={wish.time}: partition {kind.partition} of {hw} allows at most {kind.time_max}. Ask for less: a "
                "job that reaches its limit saves, starts again and goes on."
            )
        return asked, "asked for"
    usual = parse_minutes(cluster.time_default)
    if longest is not None and usual > longest:
        return longest, f"longest of partition {kind.partition}"
    return usual, f"time_default of {cluster.path.name}"


# The batch script


def _parameters(plan: Plan, runs: Sequence[Path], *, folder: Path, code: Code, parallel: int) -> dict[str, Any]:
    cluster, kind = plan.cluster, plan.kind
    source = f"source {shlex.quote(str(folder / 'attempt.sh'))}"
    return {
        "job_name": plan.job,
        "partition": kind.partition,
        "time": plan.time_min,
        "nodes": plan.nodes,
        "ntasks_per_node": plan.ranks_per_node,
        "cpus_per_task": kind.cores_per_gpu,
        "mem": f"{_memory_gib(plan)}GB",
        "gres": f"{kind.gres}:{plan.ranks_per_node}" if kind.gres else None,
        "constraint": kind.constraint or None,
        "account": cluster.account or None,
        "qos": cluster.qos or None,
        "wckey": cluster.wckey or None,
        "exclude": cluster.exclude or None,
        "signal_delay_s": plan.signal_s,
        "array_parallelism": parallel or len(runs),
        "additional_parameters": {"requeue": True, **cluster.sbatch},
        "srun_args": ["--kill-on-bad-exit=1", *_pyxis(plan), *cluster.srun_args],
        "setup": [
            *cluster.setup,
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",  # srun has ignored the other since 22.05
            *(["export CUDA_VISIBLE_DEVICES="] if kind.card == "cpu" else []),
            _code_path(plan, code),
            f"export TRAINYARD_RUN={_run_of_this_job(runs, folder)}",
            *([f'export TRAINYARD_SCRATCH="{cluster.scratch}"'] if cluster.scratch else []),  # expands on the node
            f"export TRAINYARD_LIMITS={shlex.quote(_limits(cluster))} TRAINYARD_SIGNAL_S={plan.signal_s}",
            f"{source} begin",
        ],
        "teardown": [f"{source} end $?"],
    }


def _code_path(plan: Plan, code: Code) -> str:
    """Return the line that lets Python find the snapshot; an Apptainer image takes nothing of the host's but these."""
    names = ["APPTAINERENV_PYTHONPATH", "SINGULARITYENV_PYTHONPATH"]
    names = names if plan.cluster.container.kind == "apptainer" else ["PYTHONPATH"]
    return "export " + " ".join(f"{name}={shlex.quote(str(code.folder))}" for name in names)


def _run_of_this_job(runs: Sequence[Path], folder: Path) -> str:
    """Return, as shell, the folder of a run; an element of an array takes its line of a list."""
    if len(runs) == 1:
        return shlex.quote(str(runs[0]))
    listed = shlex.quote(str(_array_list(folder, runs)))
    return f'"$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {listed})"'


def _array_list(folder: Path, runs: Sequence[Path]) -> Path:
    """Name the list of an array's runs, a new one each time: a continued sweep must not change a waiting array's."""
    import hashlib

    return folder / f"runs-{hashlib.sha256(os.fsencode(chr(10).join(map(str, runs)))).hexdigest()[:12]}.txt"


def _limits(cluster: Cluster) -> str:
    return " ".join(f"{cause}={count}" for cause, count in vars(cluster.attempts).items())


def _memory_gib(plan: Plan) -> int:
    return plan.kind.memory_gib_per_gpu * plan.ranks_per_node


def _interpreter() -> str:
    return shlex.quote(sys.executable)


def _python(plan: Plan) -> str:
    """Return the command that stands for Python on a node, quoted."""
    cluster = plan.cluster
    python = shlex.quote(cluster.python) if cluster.python else _interpreter()
    if cluster.container.kind != "apptainer":
        return python
    nvidia = ["--nv"] if plan.kind.gres else []
    binds = [word for folder in _mounted(cluster) for word in ("--bind", folder)]
    python = cluster.python or "python"
    return shlex.join(["apptainer", "exec", *nvidia, *binds, *cluster.container.options, _image(plan), python])


def _pyxis(plan: Plan) -> list[str]:
    container = plan.cluster.container
    if container.kind != "pyxis":
        return []
    mounts = ",".join(f"{folder}:{folder}" for folder in _mounted(plan.cluster))
    return [f"--container-image={_image(plan)}", f"--container-mounts={mounts}", *container.options]


def _mounted(cluster: Cluster) -> list[str]:
    """Return the folders that an image sees under their own names: runs, code and data lie there, copies in scratch."""
    known = itertools.takewhile(lambda part: "$" not in part, Path(cluster.scratch).parts)
    folders = [*cluster.shared, *([str(Path(*known))] if cluster.scratch.startswith("/") else [])]
    return [folder for folder in folders if folder != "/"]


def _image(plan: Plan) -> str:
    return plan.cluster.container.image.replace("{target}", plan.target)


# Writing down


def _note(run: Path, job: str, scheduler: str, plan: Plan, *, folder: Path, code: Code) -> None:
    asked = {
        "slurm_name": slurm.query_cluster_name(),
        "cluster": plan.cluster.name,
        "cluster_file": str(plan.cluster.path),
        "hw": plan.hw,
    }
    got = {"card": plan.kind.card, "gpus": plan.gpus, "nodes": plan.nodes, "partition": plan.kind.partition}
    places = {"code": str(code.folder), "jobs": str(code.jobs), "folder": str(folder)}
    _write_note(run, {"scheduler": scheduler, "job": job, **asked, **got, "time_min": plan.time_min, **places})


def _write_note(run: Path, note: dict[str, Any]) -> None:
    (run / SUBMISSION).parent.mkdir(exist_ok=True)
    (run / "slurm" / "cancelled").unlink(missing_ok=True)
    note = {**note, "submitted": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(run / SUBMISSION, note)


def _refusal(error: Exception) -> str:
    """Return what sbatch said, without submitit's framing."""
    lines = [line for line in str(error).splitlines() if line.startswith("sbatch: ")]
    return "\n".join(lines) or str(error).strip()


def _checks(plan: Plan) -> str:
    return f"trainyard cluster-check {plan.cluster.name}"


@contextlib.contextmanager
def _without_terminal() -> Iterator[None]:
    """Keep a process that is started here from holding our output open: whoever reads it would wait for its end."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        yield
    finally:
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(nothing)
