"""Options of sbatch that a person may state for one submission; they override the cluster file's.

They are recorded with the submission, so that a resumed run keeps them. Loads no torch.
"""

import re
from collections.abc import Mapping

from trainyard.cluster.description import Cluster, GpuNodes
from trainyard.errors import UserError

OPTIONS = {
    "account": "who pays",
    "qos": "quality of service",
    "partition": "partition, or several: a,b",
    "constraint": "features that the nodes must have, such as a100&ib",
    "reservation": "nodes that are reserved under this name",
    "exclude": "nodes to avoid: a100-[3,7]",
    "mem": "host memory per node, such as 64G; none: whatever Slurm gives",
    "comment": "a note that Slurm keeps with the job",
}
"""Meaning of each option, by its name on the command line and for sbatch."""

_OF_ANY_NODES = ("account", "comment")
"""Options that also make sense on other GPUs."""


def read_options(stated: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options that were stated; an empty one means the cluster file's.

    Raises:
        UserError: a value that sbatch could not take, or that would end its line of the batch script.
    """
    options = {name: value for name in OPTIONS if (value := stated.get(name)) is not None}
    for name, value in options.items():
        if problem := find_problem(name, value):
            raise UserError(f"--{name} {value!r}: {problem}")
    return options


def find_problem(name: str, value: str) -> str:
    """Return an error about the value of an option as a sentence, or ""."""
    if not value.isprintable():
        return "expected one line of text, found a line break or another control character."
    if "\\" in value:
        return "expected no backslash: sbatch drops it."
    if name == "mem" and not re.fullmatch(r"(\d+[KMGT]?B?|none)?", value):
        return "expected a number with a unit, such as 64G, or none."
    if name in ("comment", "constraint") or re.fullmatch(r"[^\s'\"]*", value):
        return ""
    return "expected a name, or several separated by commas, without spaces and quotes."


def merge_options(previous: Mapping[str, str], *, same_nodes: bool, stated: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a submission that resumes a run: the previous ones, changed by those stated now."""
    kept = {name: value for name, value in previous.items() if same_nodes or name in _OF_ANY_NODES}
    return {name: value for name, value in {**kept, **stated}.items() if value}


def choose_options(
    cluster: Cluster, kind: GpuNodes, stated: Mapping[str, str], *, ranks_per_node: int
) -> dict[str, str]:
    """Return the options for sbatch, without those that are not sent."""
    memory_gib = kind.memory_gib_per_gpu * ranks_per_node
    described = {
        "account": kind.account or cluster.account,
        "qos": kind.qos or cluster.qos,
        "partition": kind.partition,
        "constraint": kind.constraint,
        "exclude": cluster.exclude,
        "mem": f"{memory_gib}GB" if memory_gib else "",
    }
    chosen = described | {name: value for name, value in stated.items() if value}
    return {name: value for name, value in chosen.items() if value and (name, value) != ("mem", "none")}
