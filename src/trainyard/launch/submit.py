"""Turns a resource request into a Slurm job: the plan a person sees, the batch script, the submission.

submitit writes the script, pickles `rank_task.RankTask` and calls sbatch; a copy of attempt.sh, sourced by the
script, decides how an attempt ended. Loads no torch: submitting takes a fraction of a second.
"""

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.cluster import query as slurm
from trainyard.cluster.description import Cluster, format_minutes
from trainyard.cluster.variables import describe_passed, drop_launchers, replace_environment, select_for_ranks
from trainyard.environment import name_chosen_gpus
from trainyard.errors import UserError
from trainyard.files import (
    DISK_THREADS,
    AppendedFile,
    copy_folder,
    make_folder_inside,
    name_partial,
    rename,
    restrict_umask,
    write_atomically,
    write_json,
)
from trainyard.hardware import get_gpu
from trainyard.launch.batch_script import (
    NO_DEPENDENCY,
    JobDependency,
    build_parameters,
    build_python_command,
    build_rank_command,
    name_array_list,
    name_container_image,
)
from trainyard.launch.upstream_run import UpstreamRun
from trainyard.masking import find_secrets
from trainyard.node.rank_task import RankTask
from trainyard.plan.resources import Code, Plan
from trainyard.runs.events import drop_torn_tail
from trainyard.runs.folder import SUBMISSION, read_env, write_env
from trainyard.runs.history import ATTEMPTS
from trainyard.runs.lock import release
from trainyard.runs.state import render_exit_codes
from trainyard.runs.status import Status
from trainyard.text import count_nouns, join_names, quote_path

_PACKAGE = Path(__file__).resolve().parents[1]
_CODE_LIMIT_MIB = 64


def describe(plan: Plan, run: Path | None, *, environ: Mapping[str, str], **notes: str) -> str:
    """Format the plan for one screen; `environ` may contain options of sbatch, which are not used.

    Args:
        notes: more rows, by their names.
    """
    card = get_gpu(plan.kind.card)
    devices = f"{plan.gpus} x {card.name if card else 'CPU rank'}"
    partition = plan.options["partition"]
    location = f"{plan.nodes} node{'s' * (plan.nodes > 1)} of partition {partition} on {plan.cluster.name}"
    restarts = ", ".join(
        f"{getattr(plan.cluster.attempts, name)} x after {cause}"
        for name, cause in (
            ("preempted", "preemption"),
            ("time_limit", "the time limit"),
            ("node_failure", "node failure"),
            ("crash", "a crash"),
            ("hung", "a hang"),
        )
    )
    policy = plan.precision
    switches = [policy.dtype, *(["TF32"] * policy.tf32), "channels_last" if policy.channels_last else "NCHW"]
    split = plan.split
    micro_batches = count_nouns(split.accumulation_steps, "micro-batch")
    batch = f"{split.global_batch} = {split.micro_batch} x {micro_batches} x {count_nouns(split.ranks, 'rank')}"
    unused = sorted(name for name in environ if name.startswith("SBATCH_"))
    cores, memory = plan.kind.cores_per_gpu, plan.options.get("mem", "Slurm's default memory").replace("GB", " GiB")
    stated = ", ".join(f"{name} {value}" for name, value in plan.stated.items())
    rows = {
        "job": f"{plan.job}",
        "hardware": f"{devices}, {location}  ({plan.why_hw})",
        "batch": batch if split.is_even else f"{batch}, the last ones smaller",
        "micro-batch": f"{split.micro_batch}  ({plan.why_micro_batch})",
        "precision": f"{', '.join(switches)}  ({policy.reasons['dtype']})",
        "per node": f"{count_nouns(plan.ranks_per_node, 'rank')}, {count_nouns(cores, 'core')} each, {memory}",
        "time": f"{format_minutes(plan.time_min)}, warned {plan.signal_s} s before the end  ({plan.why_time})",
        "restarts": restarts,
        **({"options": f"{stated}  (requested)"} if stated else {}),
        "runs in": name_container_image(plan) or plan.cluster.python or sys.executable,
        **notes,
        **({"folder": str(run)} if run is not None else {}),
        **({"not used": f"{', '.join(unused)}: the cluster file and this command decide"} if unused else {}),
    }
    return "\n".join(f"{name:<11} {value}" for name, value in rows.items())


@restrict_umask()
def snapshot_code(jobs_dir: Path, into: Path) -> Code:
    """Copy Trainyard's own code, the families, and what these import from next to their folder to a new folder `into`.

    Raises:
        UserError: that holds data, which is more than 64 MiB, or a file or a line of the families that is a secret.
    """
    imported = find_imported_packages(jobs_dir)
    files = (path for place in (jobs_dir, *imported) for path in (place.rglob("*") if place.is_dir() else [place]))
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    if sum(sizes.values()) > _CODE_LIMIT_MIB << 20:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UserError(
            f"{join_names([str(place) for place in (jobs_dir, *imported)])}: {sum(sizes.values()) >> 20} MiB, but each "
            f"submission copies this, so it should hold only code: at most {_CODE_LIMIT_MIB} MiB. Largest: {largest}. "
            "Move data out of it."
        )
    if secret := next((text for place in (jobs_dir, *imported) for text in find_secrets(place)), None):
        raise UserError(
            f"{secret.place.removesuffix(':0')}: is or contains {secret.kind}, and each submission copies {jobs_dir} "
            "into its run folder. Keep secrets elsewhere, in a file that only you can read, and have `setup` in the "
            "cluster file export them: setup: [source ~/.secrets]. The code then reads os.environ."
        )
    partial = name_partial(into)
    partial.mkdir()
    # With its bytecode, which Python compares with the sources: each rank of a first start would compile them again.
    # Without the families that a wheel has in it: those in use follow.
    copy_folder(_PACKAGE, partial / _PACKAGE.name, leave_out=lambda name: name.startswith(".") or name == "jobs")
    for place in (jobs_dir.resolve(), *imported):
        if place.is_dir():
            copy_folder(place, partial / place.name, leave_out=_is_left_out)
        else:
            shutil.copy2(place, partial / place.name)
    rename(partial, into)
    if imported:
        logger.info("copied with the families, which import it: {}", join_names([place.name for place in imported]))
    return Code(into, into / jobs_dir.resolve().name)


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name.endswith(("__pycache__", ".pyc"))


def find_imported_packages(jobs_dir: Path) -> list[Path]:
    """Return the packages and modules next to the families' folder that the families import, or those do."""
    families = jobs_dir.resolve()
    folders: dict[Path, None] = {}
    waiting = [path for path in families.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    while waiting:
        for name in _list_imported(waiting.pop()) - {families.name, _PACKAGE.name}:
            folder, module = families.parent / name, families.parent / f"{name}.py"
            place = folder if folder.is_dir() else module if module.is_file() else None
            if place is not None and place not in folders:
                folders[place] = None
                waiting += place.rglob("*.py") if place.is_dir() else [place]
    return sorted(folders)


def _list_imported(path: Path) -> set[str]:
    """Return the first part of each absolute import of a file; of one that cannot be read, none: a rank says that."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in (*whole, *parts)}


def render_attempt_script() -> str:
    """Return attempt.sh as a batch script sources it: after a line that sets the exit codes."""
    return render_exit_codes() + (_PACKAGE / "launch" / "attempt.sh").read_text()


def render_batch_script(
    plan: Plan,
    runs: Sequence[Path],
    *,
    folder: Path,
    code: Code,
    parallel: int = 0,
    dependency: JobDependency = NO_DEPENDENCY,
) -> str:
    """Return the batch script that `submit` would submit."""
    from submitit.slurm import slurm as writer

    parameters = build_parameters(plan, runs, folder=folder, code=code, parallel=parallel, dependency=dependency)
    command = build_rank_command(build_python_command(plan), folder)
    return writer._make_sbatch_string(command, folder, map_count=len(runs) if len(runs) > 1 else None, **parameters)


@restrict_umask()
def submit(
    plan: Plan,
    runs: Sequence[Path],
    *,
    folder: Path,
    code: Code,
    parallel: int = 0,
    most: int = 0,
    packing: Plan | None = None,
    packing_run: Path | None = None,
    after: UpstreamRun | None = None,
) -> list[str]:
    """Submit runs, several as one array, and return their Slurm job ids, in order.

    Args:
        folder: for submitit's files; it and the runs must be on a file system that all nodes share.
        parallel: array elements that may run at once; 0: all.
        most: elements that Slurm takes in one array; 0: any number. More runs become several arrays; if `parallel` is
            given, each of them starts when the one before has ended.
        packing: of a Slurm job that packs the data of the runs, which start when that has ended well.
        packing_run: the folder of that job, which several runs share; None: the folder of the only run.
        after: a run that must be done before this one starts.

    Raises:
        UserError: Slurm cannot handle a path, or refused the job; with its own words. Nothing is left behind.
    """
    check_paths(plan.cluster, [*runs, folder, code.folder])
    if make_folder_inside(folder).stat().st_uid != os.geteuid():
        raise UserError(f"{folder}: belongs to somebody else, and would hold what runs as you. Submit a new run.")
    write_atomically(folder / "attempt.sh", render_attempt_script())
    jobs: list[str] = []
    packed_by = ""
    size = most or len(runs)
    try:
        if packing is not None:
            first = [packing_run] if packing_run is not None else runs
            (packed_by,) = _submit_array(
                packing, first, folder=folder, code=code, dependency=JobDependency(only_packs=True)
            )
        wanted = tuple(job for job in (packed_by, after.job if after is not None else "") if job)
        for wave in (runs[first : first + size] for first in range(0, len(runs), size)):
            previous = jobs[-1].partition("_")[0] if jobs and parallel else ""
            dependency = JobDependency(after_done=wanted, after_end=previous)
            jobs += _submit_array(plan, wave, folder=folder, code=code, parallel=parallel, dependency=dependency)
    except UserError:
        slurm.cancel([*([packed_by] if packed_by else []), *jobs])
        raise
    name = plan.cluster.slurm_name or slurm.query_cluster_name()
    follows = str(after.run) if after is not None and after.job else ""
    before = {"packing": packed_by, "packing_run": str(packing_run or ""), "after": follows}

    def record(run: Path, job: str) -> None:
        _record_submission(run, job, plan, name, folder=folder, code=code, before=before)

    with ThreadPoolExecutor(DISK_THREADS) as pool:
        for _ in pool.map(record, runs, jobs):
            pass
    return jobs


def _submit_array(
    plan: Plan, runs: Sequence[Path], *, folder: Path, code: Code, parallel: int = 0, dependency: JobDependency
) -> list[str]:
    parameters = build_parameters(plan, runs, folder=folder, code=code, parallel=parallel, dependency=dependency)
    if len(runs) > 1:
        write_atomically(name_array_list(folder, runs), "".join(f"{run}\n" for run in runs))
    tasks = [RankTask(run, code.jobs, only_packs=dependency.only_packs) for run in runs]
    return _call_sbatch(plan, tasks, folder=folder, parameters=parameters)


def _call_sbatch(
    plan: Plan, tasks: Sequence[Callable[[], None]], *, folder: Path, parameters: Mapping[str, Any]
) -> list[str]:
    """Submit tasks with submitit's parameters, several as one array; return their Slurm job ids, in order."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    before = set(folder.iterdir())

    class RankExecutor(SlurmExecutor):  # srun starts our own module instead of submitit's
        _submitit_command_str = build_rank_command(build_python_command(plan), folder)

        @staticmethod
        def _get_job_id_from_submission_command(string: str | bytes) -> str:  # submitit's takes the first "job N"
            text = string if isinstance(string, str) else string.decode(errors="replace")
            if not (ids := re.findall(r"^Submitted batch job (\d+)", text, re.MULTILINE)):
                slurm.cancel_scripts(folder)
                raise FailedSubmissionError(f"sbatch: its output has no id of a job: {text}")
            return str(ids[-1])

    executor = RankExecutor(folder)
    executor.update_parameters(**parameters)
    try:
        with replace_environment(select_for_ranks(os.environ, plan.cluster.variables)):
            jobs = executor.submit_array(list(tasks))
    except (FailedJobError, FailedSubmissionError) as error:
        for leftover in set(folder.iterdir()) - before:
            leftover.unlink()
        raise UserError(
            f"Slurm refused the job: {_extract_refusal(error)}\n"
            f"Check the cluster file: trainyard cluster-check {quote_path(plan.cluster.path)}"
        ) from None
    for script in folder.glob("*_submission.sh"):
        script.chmod(0o700)  # the cluster file's `setup` may contain a password
    return [str(job.job_id) for job in jobs]


@restrict_umask()
def submit_locally(run: Path, *, ranks: int, gpus: int, time_min: int, code: Code) -> str:
    """Start a run in the background on this machine, with submitit's local executor; return its process id."""
    from submitit.local.local import LocalExecutor

    folder = run / "slurm"
    python = shlex.join(["env", f"PYTHONPATH={code.folder}", *name_chosen_gpus(gpus, os.environ), sys.executable])

    class RankExecutor(LocalExecutor):  # the task starts with our own module instead of submitit's
        _submitit_command_str = build_rank_command(python, folder)

    executor = RankExecutor(folder)
    executor.update_parameters(tasks_per_node=1, gpus_per_node=gpus, timeout_min=time_min, signal_delay_s=60)
    with _detach_output(), replace_environment(drop_launchers(os.environ)):
        job = executor.submit(RankTask(run, code.jobs, since=time.time(), ranks_here=ranks))
    resources = {"gpus": ranks, "nodes": 1, "time_min": time_min}
    folders = {"folder": str(folder), "code": str(code.folder), "jobs": str(code.jobs)}
    _write_submission(run, {"scheduler": "local", "job": job.job_id, **resources, **folders})
    return str(job.job_id)


@restrict_umask()
def settle_end(ended: Status) -> None:
    """Release the lock of a run whose Slurm job has ended, and record an end that only Slurm and `status` tell so far.

    An attempt that Slurm ends records nothing, and the next submission of its run hides its known end.
    """
    release(ended.run)
    newest = ended.newest_attempt
    if newest is None or newest.action or not newest.slurm_job_id or not ended.cause:
        return
    job, _, number = newest.id.rpartition("-")
    end = {"event": "end", "job": job, "attempt": int(number), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    end |= {"code": -1, "cause": ended.cause, "action": "stop", "progress": "", "reason": ended.detail}
    path = ended.run / ATTEMPTS
    drop_torn_tail(path)
    with contextlib.closing(AppendedFile(path)) as file:
        file.write(json.dumps(end, separators=(",", ":")).encode() + b"\n")


def check_paths(cluster: Cluster, paths: Sequence[Path]) -> None:
    """Check that the nodes share the folders of a submission, and that a batch script can name them.

    Raises:
        UserError: a folder fails; names it.
    """
    for path in paths:
        if any(character in str(path) for character in "\n\r%\\"):
            raise UserError(
                f"{str(path)!r}: Slurm interprets %, backslash and line breaks in paths, so a run cannot be there. "
                "Choose another folder: --runs DIR"
            )
        if not any(path.is_relative_to(folder) for folder in cluster.shared):
            raise UserError(
                f"{path}: is not below a folder that the nodes of {cluster.name} share with this machine "
                f"({', '.join(cluster.shared)}). Choose one that is: --runs DIR. If it is shared, add it to `shared` "
                f"in {cluster.path}."
            )


# The submission file


def _record_submission(
    run: Path, job: str, plan: Plan, slurm_name: str, *, folder: Path, code: Code, before: Mapping[str, str]
) -> None:
    cluster = {
        "slurm_name": slurm_name,
        "cluster": plan.cluster.name,
        "cluster_file": str(plan.cluster.path),
        "hw": plan.hw,
    }
    card, partition = plan.kind.card, plan.options["partition"]
    resources = {"card": card, "gpus": plan.gpus, "nodes": plan.nodes, "partition": partition, "options": plan.stated}
    folders = {"code": str(code.folder), "jobs": str(code.jobs), "folder": str(folder)}
    named = plan.cluster.variables
    passed = describe_passed(select_for_ranks(os.environ, named), named)
    write_env(run, {**read_env(run), "passed": passed})
    _write_submission(
        run,
        {
            **{"scheduler": "slurm", "job": job, **cluster, **resources, "time_min": plan.time_min, **folders},
            **{name: value for name, value in before.items() if value},
        },
    )


def _write_submission(run: Path, submission: dict[str, Any]) -> None:
    (run / "slurm" / "cancelled").unlink(missing_ok=True)
    content = {**submission, "submitted": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(run / SUBMISSION, content, inside=True)


def _extract_refusal(error: Exception) -> str:
    """Return what sbatch said, without submitit's framing."""
    lines = [line for line in str(error).splitlines() if line.startswith("sbatch: ")]
    return "\n".join(lines) or str(error).strip()


@contextlib.contextmanager
def _detach_output() -> Iterator[None]:
    """Keep child processes from inheriting our stdout and stderr: a reader of our output would wait for them to end."""
    originals = [os.dup(descriptor) for descriptor in (1, 2)]
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
        yield
    finally:
        for descriptor, original in zip((1, 2), originals, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(null)
