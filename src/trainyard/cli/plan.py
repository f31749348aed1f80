"""The command that says, before anything is queued, how a job's global batch fits on each card. Loads no torch."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainyard.choice import Choice
from trainyard.cli.choices import add_synthetic_option, compose_job
from trainyard.cli.dry import count_steps_per_epoch
from trainyard.cli.plan_table import tabulate_presets
from trainyard.cli.request import read_request
from trainyard.cli.verb import Verbs, add_verb, find_project_folder
from trainyard.cluster import description as clusters
from trainyard.config import compose as configs
from trainyard.config.duration import Duration
from trainyard.config.families import format_families, list_roots
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.hardware import GpuType, get_gpu
from trainyard.plan.memory import (
    FITS,
    MISFIT,
    CannotPredict,
    CardFit,
    NotPredicted,
    PredictionCache,
    check_fit,
    choose_fit,
    complete_cache,
    open_cache,
)
from trainyard.plan.resources import Plan, RunRequest
from trainyard.plan.screen import CPU, PlanInputs, describe_plan, format_submit_command, list_changes
from trainyard.terminal import say
from trainyard.text import suggest_nearest

USUAL_CARDS = ("p100-16-pcie", "2080ti", "a5000", "a100-40-sxm", "a100-80-sxm", "h200")
"""The cards of a plan without --hw and without a cluster file."""


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "plan", _plan, "how a job's global batch fits on each card, before anything is queued")
    verb.add_argument("job", nargs="?", default="", help="preset, such as fingerprint_1m: trainyard jobs")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="trainyard options JOB lists them")
    verb.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of the whole job")
    verb.add_argument(
        "--hw",
        default="",
        metavar="TYPE,...",
        help="cards, such as h200, or p100 for each of them, or GPU types of --cluster; default: usual ones",
    )
    verb.add_argument("--cluster", default="", metavar="NAME", help="slurm/NAME.yaml, or a path: its GPU types")
    verb.add_argument("--all", action="store_true", help="all presets instead of one, as a table; takes minutes")
    verb.add_argument("--stored", action="store_true", help="with --all: read stored predictions, and predict nothing")
    add_synthetic_option(verb)


def _plan(args: argparse.Namespace) -> int:
    if args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: a job needs at least one GPU.")
    cluster = clusters.find_cluster(args.cluster, find_project_folder("slurm"), None) if args.cluster else None
    cards = _choose_cards(args.hw, cluster)
    if args.all:
        say("\n".join(_tabulate(args, cluster, cards)))
        return 0
    if not args.job or args.stored:
        wrong = "--stored: expected with --all" if args.stored else "plan: expected a job"
        raise UserError(f"{wrong}. One: trainyard plan JOB. All of them, as a table: trainyard plan --all.")
    request = read_request(args)
    config = compose_job(request, cluster).config
    predictions = complete_cache(
        config,
        args.jobs,
        [card for card in cards.values() if card is not CPU],
        gpus=args.gpus,
        environ=os.environ,
        announce=lambda: say(f"{config.job}: predicting its memory on these cards, once ...", file=sys.stderr),
    )
    say("\n".join(describe_plan(config, cards, predictions, _collect_inputs(config, request), gpus=args.gpus)))
    return 0


def _collect_inputs(config: TrainConfig, request: RunRequest) -> PlanInputs:
    from trainyard.data.index import read_index

    words = [request.job, *request.overrides, *(["--synthetic"] if request.wants_synthetic else [])]
    words += ["--cluster", request.cluster] if request.cluster else []
    steps_per_epoch, length = count_steps_per_epoch(config, request.jobs_dir), Duration.parse(config.max_duration)
    if steps_per_epoch is None:
        return PlanInputs(words, steps=int(length.value) if length.unit == "st" else None)
    data_bytes = sum(shard.size_bytes for shard in read_index(Path(config.data.path)).shards)
    return PlanInputs(words, data_bytes, None if length.unit == "min" else length.to_steps(steps_per_epoch))


def _tabulate(args: argparse.Namespace, cluster: clusters.Cluster | None, cards: dict[str, GpuType]) -> Iterator[str]:
    if "=" in args.job:  # with --all there is no job: the first word is an option
        args.overrides.insert(0, args.job)
    elif args.job:
        raise UserError(f"--all: expected options alone, found {args.job}. One job: trainyard plan {args.job}.")
    roots = [args.jobs] if args.typed_jobs else list_roots()
    return tabulate_presets(read_request(args), cluster, cards, roots=roots, predicts=not args.stored)


def _choose_cards(wanted: str, cluster: clusters.Cluster | None) -> dict[str, GpuType]:
    """Return the cards of a plan by the name that --hw takes; a name such as p100 means each of its variants."""
    keys = list(clusters.CARDS) if cluster is None else [kind.card for kind in cluster.gpus.values()]
    names = keys if cluster is None else list(cluster.gpus)
    known = {name: card for name, key in zip(names, keys, strict=True) if (card := _get_card(key)) is not None}
    chosen: dict[str, GpuType] = {}
    for name in wanted.split(",") if wanted else USUAL_CARDS if cluster is None else known:
        exact = known.get(name) or (_get_card(name) if cluster is None else None)
        cards = {key: card for key, card in known.items() if card.is_called(name)} if exact is None else {name: exact}
        if not cards:
            raise UserError(f"--hw {name}: no such card.{suggest_nearest(name, names)} Cards: {', '.join(names)}.")
        chosen |= cards
    return chosen


def _get_card(key: str) -> GpuType | None:
    return CPU if key == CPU.key else get_gpu(key)


# Checks for submit


@dataclass(frozen=True)
class Target:
    """GPUs on which a job would train."""

    card: GpuType
    gpus: int
    hw: str  # what --hw takes for this card
    cluster: Path | None  # its file; None: this machine


def check_memory(plan: Plan, request: RunRequest, *, allow_smaller_batch: bool = True) -> Choice[str] | None:
    """Check a step's memory on the card of a plan, as `check_target`; None for ranks on the CPU."""
    card = get_gpu(plan.kind.card)
    if card is None:
        return None
    target = Target(card, plan.gpus, plan.hw, plan.cluster.path)
    return check_target(target, plan.config, request, allow_smaller_batch=allow_smaller_batch)


def check_target(
    target: Target, config: TrainConfig, request: RunRequest, *, allow_smaller_batch: bool = True
) -> Choice[str]:
    """Return the predicted memory of a step.

    Without a stored prediction, predicts now in a separate process; with --dry it does not.

    Args:
        allow_smaller_batch: whether a smaller micro-batch may be proposed.

    Raises:
        UserError: the step cannot fit; has the command to type.
    """
    if not request.predicts_memory:
        return Choice("not checked", "--no-plan")
    card, gpus = target.card, target.gpus
    predictions = open_cache(config, request.jobs_dir, os.environ)
    try:
        fit = check_fit(config, card, gpus=gpus, predict=predictions.read)
    except NotPredicted:
        if request.is_dry:
            line = _format_plan_command(target, config, request.jobs_dir)
            return Choice("not checked", f"never predicted; submit does it first, as does: {line}")
        try:
            predictions = complete_cache(
                config,
                request.jobs_dir,
                [card],
                gpus=gpus,
                environ=os.environ,
                announce=lambda: say(
                    f"{config.job}: predicting its memory on {target.hw} first, once; --no-plan goes without ...",
                    file=sys.stderr,
                ),
            )
        except CannotPredict as error:  # a login node may lack memory or libraries that the nodes have
            return Choice("not checked", str(error))
        fit = check_fit(config, card, gpus=gpus, predict=predictions.read)
    if fit.step.refused:
        return Choice("not predicted", fit.step.refused)
    if fit.verdict == MISFIT:
        fitting = _find_fitting(target, config, predictions) if allow_smaller_batch else None
        raise UserError(_explain_misfit(target, config, fit, fitting, request))
    return Choice(
        f"{fit.step.peak_gib:.2f} GiB",
        f"and {fit.step.reserve_gib:.1f} in reserve, of {fit.has_gib:.1f}: {fit.verdict}; estimated, never "
        "observed on this card",
    )


def _find_fitting(target: Target, config: TrainConfig, predictions: PredictionCache) -> CardFit | None:
    try:
        fit = choose_fit(config, target.card, gpus=target.gpus, predict=predictions.read)
    except NotPredicted:
        return None
    return fit if fit.verdict == FITS else None


def _explain_misfit(
    target: Target, config: TrainConfig, fit: CardFit, fitting: CardFit | None, request: RunRequest
) -> str:
    """Return the missing memory, and a command that computes the same in less, if there is one."""
    if fitting is not None:
        changes = list_changes(config, fitting)
        advice = f"This computes the same and fits: {format_submit_command(config.job, request.typed, changes)}"
    else:
        every_card = _format_plan_command(target, config, request.jobs_dir, every_card=True)
        advice = (
            f"To see what fits on which card: {every_card}. To try it all the same: "
            f"{format_submit_command(config.job, request.typed, ['--no-plan'])}"
        )
    name = f"HW={target.hw}" if target.cluster else target.card.name
    return (
        f"{name}: a step of {config.job} with micro-batches of {fit.split.micro_batch} takes "
        f"{fit.step.peak_gib:.1f} GiB for tensors alone (estimated, never observed on this card), but a process has "
        f"{fit.has_gib:.1f} GiB there. {advice}"
    )


def _format_plan_command(target: Target, config: TrainConfig, jobs_dir: Path, *, every_card: bool = False) -> str:
    """Return the command that predicts what submit would look up, or that for all of the cluster's cards."""
    preset = configs.compose(config.job, [], jobs_dir)
    own = [f"{d.name}={d.new}" for d in configs.find_differences(preset, config)]
    words = ["trainyard", "plan", config.job, *own, "--gpus", str(target.gpus)]
    words += ["--cluster", str(target.cluster)] if target.cluster else []
    words += [] if every_card else ["--hw", target.hw]
    words += shlex.split(format_families(config.job, jobs_dir))
    return shlex.join(words)
