"""Value types of a submission: the request, the plan made from it, and the code that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.cluster.description import Cluster, GpuNodes
from trainyard.config.families import Root
from trainyard.config.settings import TrainConfig
from trainyard.hardware import Precision, choose_image_target, get_gpu
from trainyard.split import BatchSplit


@dataclass(frozen=True)
class ResourceRequest:
    """A resource request; `make_plan` chooses where a field is "" or 0."""

    gpus: int = 1  # of the whole job; card "cpu": ranks
    hw: str = ""  # key of the cluster's `gpus`
    nodes: int = 0
    time: str = ""  # as `parse_minutes` reads it
    options: Mapping[str, str] = field(default_factory=dict)  # of sbatch, as `read_options` returns them
    keeps_micro_batch: bool = False  # for a run that exists


@dataclass(frozen=True)
class RunRequest:
    """A run as a person requests it: a job, its options, where it trains, and the checks before that."""

    job: str  # preset; "": a run that exists
    overrides: tuple[str, ...]  # as typed: option=value
    families: Root
    runs_dir: Path
    typed: tuple[str, ...]  # the words of the command, for suggestions
    resources: ResourceRequest
    cluster: str = ""  # a name or a path; "": the one whose Slurm answers
    name: str | None = None  # of the run's folder; None: the time
    wants_synthetic: bool = False
    is_dry: bool = False
    predicts_memory: bool = True

    @property
    def jobs_dir(self) -> Path:
        """Return the folder of families."""
        return self.families.folder


@dataclass(frozen=True)
class Plan:
    """The whole request to Slurm, and the training settings that follow from it."""

    config: TrainConfig  # with the micro-batch that was chosen
    cluster: Cluster
    hw: str
    kind: GpuNodes
    gpus: int
    nodes: int
    time_min: int
    signal_s: int  # from the warning signal to the time limit
    options: dict[str, str]  # of sbatch, by name
    stated: dict[str, str]  # those of them that are not the cluster file's
    split: BatchSplit  # of a step
    precision: Precision
    why_hw: str
    why_time: str
    why_micro_batch: str

    @property
    def job(self) -> str:
        """Return the preset."""
        return self.config.job

    @property
    def ranks_per_node(self) -> int:
        """Return the tasks per node: one per GPU."""
        return self.gpus // self.nodes

    @property
    def target(self) -> str:
        """Return the container image target for this card."""
        card = get_gpu(self.kind.card)
        return choose_image_target(None if card is None else card.sm)


@dataclass(frozen=True)
class Code:
    """A copy of the code that a submission runs, whatever happens to the checkout while the Slurm job is pending."""

    folder: Path  # what goes on PYTHONPATH
    jobs: Path  # the folder of job families inside it
