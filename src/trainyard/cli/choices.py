"""Choices made before a job is submitted: shown to the user, and recorded in the run with their reasons."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainyard.choice import Choice
from trainyard.cluster.description import Cluster
from trainyard.config import compose as configs
from trainyard.config.families import Root
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.files import restrict_umask
from trainyard.launch.upstream_run import UpstreamRun
from trainyard.plan.choose_data import DataChoice, choose_data
from trainyard.plan.memory import compute_key
from trainyard.plan.packing import PackingChoice
from trainyard.plan.resources import Plan, RunRequest
from trainyard.runs import folder as runs
from trainyard.runs.families import describe_families
from trainyard.runs.folder import resolve_run
from trainyard.runs.observations import describe_plan


def add_synthetic_option(verb: argparse.ArgumentParser) -> None:
    """Add the flag that asks for generated samples."""
    verb.add_argument("--synthetic", action="store_true", help="train on a few generated samples, to try it out")


def compose_job(request: RunRequest, cluster: Cluster | None) -> DataChoice:
    """Compose the requested job, choose its data, and make its paths absolute: a node works in another folder."""
    config = configs.compose(request.job, request.overrides, request.jobs_dir)
    return choose_data(
        make_paths_absolute(find_start(config, request.runs_dir)),
        overrides=request.overrides,
        wants_synthetic=request.wants_synthetic,
        cluster=cluster,
        jobs_dir=request.jobs_dir,
        environ=os.environ,
    )


def find_start(config: TrainConfig, runs_dir: Path, *, needed: bool = True) -> TrainConfig:
    """Return the config with the absolute path of the run or file that it starts from, if it names one.

    Args:
        needed: whether there must be one: a run that has begun needs it no more.

    Raises:
        UserError: there is neither a file nor a run of this name, or the file is not one of tensors.
    """
    if not config.start_from:
        return config
    from zipfile import is_zipfile  # here, because submit loads this file and must respond quickly

    path = Path(config.start_from)
    if not path.exists():
        try:
            path = resolve_run(config.start_from, runs_dir)
        except UserError as error:
            if needed:
                raise UserError(f"start_from={config.start_from}: no such file, and no such run: {error}") from None
    elif needed and path.is_file() and path.suffix not in (".safetensors", ".ckpt") and not is_zipfile(path):
        raise UserError(
            f"start_from={config.start_from}: not a file of tensors. Expected .safetensors, or the zip archive that "
            "torch.save writes since torch 1.6. Convert an older one with the code that wrote it: "
            f"safetensors.torch.save_file(weights, '{path.stem}.safetensors')"
        )
    return replace(config, start_from=str(path.absolute()))


def describe_choices(
    data: DataChoice,
    count: int | None = None,
    packing: PackingChoice | None = None,
    after: UpstreamRun | None = None,
    memory: Choice[str] | None = None,
) -> dict[str, str]:
    """Return the facts that a plan lacks, by the names of its rows.

    Args:
        count: samples, if they were counted.
        after: the run that must be done before.
        memory: of a step, as `check_memory` returns it.
    """
    counted = "" if count is None or not data.config.data.path else f", {count:,} samples"
    return {
        "data": f"{data.value}{counted}  ({data.reason})" if data.value else "none",
        **describe_rows(packing=packing.where if packing else None, memory=memory),
        **({"after": after.describe()} if after is not None else {}),
    }


def describe_rows(**choices: Choice[str] | None) -> dict[str, str]:
    """Return the rows of a plan that show these choices; None has none."""
    return {name: f"{choice.value}  ({choice.reason})" for name, choice in choices.items() if choice is not None}


def list_sections(
    data: DataChoice,
    families: Root,
    plan: Plan | None = None,
    packing: PackingChoice | None = None,
    memory: Choice[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the choices made before a run is created, as sections of its env.json; its attempts add to them."""
    choices: dict[str, Choice[str] | None] = {
        **describe_families(families),
        "data_root": Choice(data.value, data.reason),
        "predicted_memory": memory,
        "packed_where": packing.where if packing else None,
    }
    if plan is not None:
        choices["gpu_type"] = Choice(plan.hw, plan.why_hw)
        choices["planned_micro_batch_size"] = Choice(str(plan.split.micro_batch), plan.why_micro_batch)
    key = compute_key(make_paths_absolute((plan or data).config), families.folder)
    return {
        "choices": {name: choice._asdict() for name, choice in choices.items() if choice is not None},
        **describe_plan(key),
    }


def record_rows(run: Path, **choices: Choice[str] | None) -> None:
    """Record a command's choices in a run; None is left out."""
    with restrict_umask():
        runs.record_choices(run, {name: choice for name, choice in choices.items() if choice is not None})


def make_paths_absolute(config: TrainConfig) -> TrainConfig:
    """Return the config with the same folders by their absolute paths."""
    path = str(Path(config.data.path).absolute()) if config.data.path else ""
    return replace(config, data=replace(config.data, path=path, cache=str(Path(config.data.cache).absolute())))
