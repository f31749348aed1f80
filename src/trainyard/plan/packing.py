"""Chooses where data are packed: in a separate Slurm job on CPU nodes, before GPUs are requested, or in the run.

The CPU nodes are the first entry of the cluster file with `card: cpu`. Loads no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from trainyard.choice import Choice
from trainyard.cluster.description import format_minutes
from trainyard.cluster.options import choose_options, merge_options
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import Seen, find_packed, is_packed, measure_raw, packs_the_same
from trainyard.plan.make_plan import choose_time
from trainyard.plan.resources import Code, Plan, ResourceRequest
from trainyard.text import format_size

PACKS = "packs data"
"""Reason for the nodes in the plan of a job that packs."""

LEAST_CORES, LEAST_MIN = 4, 30
"""Least request for packing: less starts no sooner, and reading a slow file system also takes time."""

RESERVE = 3
"""Factor from a family's measured packing time to the requested one. If that is too little, packing is requeued
at its time limit, and resumes."""

_IN_THE_RUN = "in the run, on its first node"


@dataclass(frozen=True)
class PackingChoice:
    """Where the data of a run are packed, and why there."""

    plan: Plan | None  # of the Slurm job that packs and verifies them before the run starts; None: there is none
    where: Choice[str]


def choose_packing(plan: Plan, jobs_dir: Path, *, code: Code | None = None) -> PackingChoice:
    """Choose where the data of a planned run are packed; lists raw files if a Slurm job could pack them.

    Args:
        code: that the run executes; None: today's.

    Raises:
        UserError: the raw files cannot be listed.
    """
    cluster, config = plan.cluster, plan.config
    if not (config.data.path or config.data.synthetic):
        return PackingChoice(None, Choice("none", "there are no data"))
    if is_packed(config):
        return PackingChoice(None, Choice("none", "the data are packed"))
    if plan.kind.card == "cpu":
        return PackingChoice(None, Choice(_IN_THE_RUN, "it requests no GPU that would wait"))
    hw = next((name for name, kind in cluster.gpus.items() if kind.card == "cpu"), "")
    if not hw:
        return PackingChoice(
            None, Choice(_IN_THE_RUN, f"{cluster.path.name} describes no nodes with card: cpu under gpus")
        )
    if not any(Path(config.data.cache).is_relative_to(folder) for folder in cluster.shared):
        return PackingChoice(
            None, Choice(_IN_THE_RUN, f"data.cache={config.data.cache} is not below a folder that the nodes share")
        )
    if code is not None and not code.folder.joinpath(*__name__.split(".")).with_suffix(".py").is_file():
        return PackingChoice(None, Choice(_IN_THE_RUN, f"{code.folder} is older code, which cannot pack alone"))
    seen = Seen(set())
    if packed := find_packed(config, jobs_dir, seen):
        return PackingChoice(None, Choice("none", f"the same data are packed: {packed}"))
    job = _make_plan(plan, hw, jobs_dir, seen)
    return PackingChoice(
        job,
        Choice(
            f"Slurm job on {job.options['partition']}: {job.kind.cores_per_gpu} cores, {format_minutes(job.time_min)}",
            f"packs and verifies before the GPUs are requested; {job.why_time}",
        ),
    )


def choose_shared_packing(
    plan: Plan, configs: Sequence[TrainConfig], jobs_dir: Path, *, code: Code | None = None
) -> PackingChoice:
    """Choose where the data of a planned sweep are packed; `configs` are those of its runs, the rest as for a run."""
    first, *others = [config for config in configs if not is_packed(config)] or configs[:1]
    choice = choose_packing(replace(plan, config=first), jobs_dir, code=code)
    has_data = first.data.path or first.data.synthetic
    if has_data and not all(packs_the_same(first, config) for config in others):
        return PackingChoice(
            None, Choice(_IN_THE_RUN, "the runs of this sweep do not all train on the same packed data")
        )
    return choice


def _make_plan(plan: Plan, hw: str, jobs_dir: Path, seen: Seen) -> Plan:
    """Return the plan of a job that packs on one node, in the container image that the run uses."""
    cluster, node = plan.cluster, plan.cluster.gpus[hw]
    node_cores, node_gib = node.cores_per_gpu * node.per_node, node.memory_gib_per_gpu * node.per_node
    cores, time = _choose_size(
        _estimate_work(plan.config, jobs_dir, seen), node_cores, choose_time(hw, node, cluster, ResourceRequest())
    )
    kind = replace(
        node,
        card=plan.kind.card,  # decides the container image
        per_node=1,
        cores_per_gpu=cores,
        memory_gib_per_gpu=-(-node_gib * cores // node_cores),
    )
    stated = merge_options(plan.stated, same_nodes=False, stated={})
    return replace(
        plan,
        hw=hw,
        kind=kind,
        gpus=1,
        nodes=1,
        time_min=time.value,
        signal_s=min(cluster.signal_delay_s, time.value * 60 // 4),
        options=choose_options(cluster, kind, stated, ranks_per_node=1),
        stated=stated,
        why_hw=PACKS,
        why_time=time.reason,
    )


def _estimate_work(config: TrainConfig, jobs_dir: Path, seen: Seen) -> Choice[float] | None:
    """Return the core-seconds that packing takes, drawing included, and of what; None if the raw files are not there.

    Raises:
        UserError: the raw files cannot be listed.
    """
    pace = config.packing_pace
    if not config.data.path:
        return Choice(config.data.synthetic * (pace.draw_s + pace.pack_s), f"{config.data.synthetic:,} drawn samples")
    if not Path(config.data.path).exists():
        return None
    samples, size_bytes = measure_raw(config, jobs_dir, seen)
    work_s = max(samples, size_bytes / (1e3 * pace.raw_kb)) * pace.pack_s
    return Choice(work_s, f"{samples:,} samples" + (f" of {format_size(size_bytes)}" if size_bytes else ""))


def _choose_size(work: Choice[float] | None, node_cores: int, longest: Choice[int]) -> tuple[int, Choice[int]]:
    """Choose cores and minutes: more cores while the work would take longer than the least time, then more time."""
    if work is None:
        return node_cores, Choice(
            longest.value, f"a whole node for the {longest.reason}: the samples are not counted yet"
        )
    core_min = RESERVE * work.value / 60
    cores = min(node_cores, max(LEAST_CORES, ceil(core_min / LEAST_MIN)))
    wanted_min = max(LEAST_MIN, ceil(core_min / cores))
    limit = f", at most the {longest.reason}" if wanted_min > longest.value else ""
    reason = (
        f"{work.reason} take {work.value / 60:,.0f} core-minutes at the measured rate; {RESERVE} times that, at least "
        f"{min(LEAST_CORES, node_cores)} cores and {format_minutes(LEAST_MIN)}{limit}"
    )
    return cores, Choice(min(wanted_min, longest.value), reason)
