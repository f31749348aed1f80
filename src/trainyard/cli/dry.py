"""`--dry`: prints a command's plan. Starts and writes nothing, and loads no torch."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.choice import Choice
from trainyard.cli.choices import describe_choices, describe_rows
from trainyard.config import compose as configs
from trainyard.config.duration import Duration
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import check_packed, find_raw, is_packed
from trainyard.data.splits import find_splits
from trainyard.launch import submit, sweep
from trainyard.launch.batch_script import JobDependency
from trainyard.launch.upstream_run import UpstreamRun
from trainyard.plan.choose_data import DataChoice
from trainyard.plan.make_plan import make_plan
from trainyard.plan.packing import PackingChoice, choose_shared_packing
from trainyard.plan.resources import Code, Plan, RunRequest
from trainyard.runs.folder import check_name
from trainyard.runs.manifest import list_checkpoints
from trainyard.runs.sweep_file import FOLDER
from trainyard.terminal import say
from trainyard.text import count_nouns

if TYPE_CHECKING:
    import numpy as np

    from trainyard.data.index import Index

NEW = "NEW"
"""Stands for the name of a run that would get its time as a name."""

PACKING, FIRST = "PACKING", "FIRST"
"""Stand for the Slurm job ids of the job that packs, and of the run that --then follows."""


def print_run(run: Path, config: TrainConfig, jobs_dir: Path, *, ranks: int, memory: Choice[str] | None = None) -> int:
    """Print the data, duration and first step of a run on this machine.

    Args:
        memory: of a step, with the reason, where it is checked before the run starts.

    Raises:
        UserError: the run would be refused for its data.
    """
    preset = configs.compose(config.job, [], jobs_dir)
    options = [f"{d.name}={d.new}" for d in configs.find_differences(preset, config)]
    data, steps_per_epoch = _describe_data(config, jobs_dir)
    saved = next((entry for entry in list_checkpoints(run / "checkpoints") if entry.problem is None), None)
    rows = {
        "job": config.job,
        "options": " ".join(options) or "as in the preset",
        "data": data,
        "length": _describe_length(config.max_duration, steps_per_epoch),
        "batch": f"{config.global_batch_size} samples a step, over {count_nouns(ranks, 'rank')} of this machine",
        **describe_rows(memory=memory),
        "begins": f"at step {saved.step}, from {saved.path.name}" if saved else "at step 0",
        "folder": str(run),
    }
    say("\n".join(f"{name:<10} {value}" for name, value in rows.items()))
    say("Nothing was started.", file=sys.stderr)
    return 0


def print_submit(
    plan: Plan,
    data: DataChoice,
    packing: PackingChoice,
    request: RunRequest,
    *,
    after: UpstreamRun | None = None,
    memory: Choice[str] | None = None,
) -> None:
    """Print what `submit` would submit for one run."""
    run = request.runs_dir.absolute() / plan.job / (request.name or NEW)
    code = name_code(request.jobs_dir, run / "code")
    place = run / "slurm"
    print_submission(plan, {run: ""}, folder=place, code=code, data=data, packing=packing, after=after, memory=memory)
    if not data.value:
        say("To submit, this job needs DATA=folder, or SYNTHETIC=1.", file=sys.stderr)


def print_sweep(
    plan: Plan, data: DataChoice, request: RunRequest, *, fixed: Sequence[str], varied: Sequence[str], parallel: int
) -> int:
    """Print the array that `sweep` would submit, and the options of each of its runs.

    Args:
        fixed, varied: options that all runs share, and those that differ, each with its values.
        parallel: runs that train at once; 0: all.

    Raises:
        UserError: the sweep would be refused for its name, or one of its runs for its options or on these GPUs.
    """
    check_name(request.name, of="sweep")
    name, root = request.name or NEW, request.runs_dir.absolute()
    runs: dict[Path, str] = {}
    combinations = sweep.combine(request.job, varied, fixed, request.jobs_dir)[1]
    for index, (own, config) in enumerate(sweep.show_progress(combinations, "planning", total=len(combinations))):
        make_plan(config, plan.cluster, request.resources)
        runs[root / request.job / sweep.name_run(name, index)] = " ".join(own)
    folder = root / FOLDER / name
    return print_submission(
        plan,
        runs,
        folder=folder / "slurm",
        code=name_code(request.jobs_dir, folder / "code"),
        parallel=parallel,
        data=data,
        packing=choose_shared_packing(plan, [config for _, config in combinations], request.jobs_dir),
        packing_run=sweep.name_packing_run(folder, request.job),
    )


def print_submission(
    plan: Plan,
    runs: Mapping[Path, str],
    *,
    folder: Path,
    code: Code,
    parallel: int = 0,
    data: DataChoice | None = None,
    packing: PackingChoice | None = None,
    packing_run: Path | None = None,
    after: UpstreamRun | None = None,
    memory: Choice[str] | None = None,
) -> int:
    """Print the plan and the batch scripts of a submission.

    Args:
        runs: each with the options that are its own; several are one array.
        folder, code, parallel, packing_run, after: as for `submit.submit`.
        data: as chosen for new runs; existing ones keep theirs.
        memory: as `check_memory` returns it.
    """
    if data:
        notes = describe_choices(data, packing=packing, after=after, memory=memory)
    else:
        notes = describe_rows(packing=packing.where if packing else None, memory=memory)
    say(submit.describe(plan, folder.parent, environ=os.environ, **notes))
    if len(runs) > 1:
        say("\n".join(f"{'run':<11} {run.name}  {own}" for run, own in runs.items()))
    first = [packing.plan] if packing is not None and packing.plan is not None else []
    packed = [packing_run] if packing_run is not None else list(runs)
    wanted = tuple(job for job in (*(PACKING for job in first), after.job if after is not None else "") if job)
    jobs = [(job, packed, JobDependency(only_packs=True)) for job in first]
    for job, trained, dependency in [*jobs, (plan, list(runs), JobDependency(after_done=wanted))]:
        script = submit.render_batch_script(
            job, trained, folder=folder, code=code, parallel=parallel, dependency=dependency
        )
        say(f"\n{script}")
    say("Nothing was submitted.", file=sys.stderr)
    return 0


def name_code(jobs_dir: Path, into: Path) -> Code:
    """Return what `submit.snapshot_code` would, without copying."""
    return Code(into, into / jobs_dir.resolve().name)


def count_steps_per_epoch(config: TrainConfig, jobs_dir: Path) -> int | None:
    """Return the steps of an epoch; None before the data is packed."""
    return _count_steps(config, *_read_splits(config, jobs_dir)) if is_packed(config) else None


def _describe_data(config: TrainConfig, jobs_dir: Path) -> tuple[str, int | None]:
    """Return which data a run reads, and the steps of an epoch; None before the data is packed."""
    if not is_packed(config):
        raw = find_raw(config, jobs_dir)
        source = f"{raw}: raw files" if raw else f"{config.data.synthetic} samples to synthesize"
        return f"{source}, packed into {config.data.cache} unless that was done before", None
    index, splits = _read_splits(config, jobs_dir)
    sizes = ", ".join(f"{name} {len(ids)}" for name, ids in splits.items())
    return f"{config.data.path}: {index.count} samples ({sizes})", _count_steps(config, index, splits)


def _read_splits(config: TrainConfig, jobs_dir: Path) -> "tuple[Index, Mapping[str, np.ndarray]]":
    from trainyard.data.index import read_index

    index = read_index(Path(config.data.path))
    check_packed(index, config)
    pack = load_family(jobs_dir, config.family, "pack")
    return index, find_splits(pack, index, config)


def _count_steps(config: TrainConfig, index: "Index", splits: "Mapping[str, np.ndarray]") -> int:
    from trainyard.data.order import order_epoch

    return len(order_epoch(splits["train"], index.columns, config, epoch=0, texts=index.vocabulary))


def _describe_length(text: str, steps_per_epoch: int | None) -> str:
    length = Duration.parse(text)
    if length.unit == "min":
        return text
    if steps_per_epoch is None:
        return f"{text}; packing counts the steps of an epoch" if length.unit == "ep" else text
    return f"{text}: {length.to_steps(steps_per_epoch)} steps, {steps_per_epoch} in an epoch"
