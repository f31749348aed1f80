"""A cluster as its file describes it (slurm/<name>.yaml), held against the Slurm that answers here.

The file is data, read strictly: a key nobody knows, or a value nobody can use, is an error that names its line. Loads
no torch, and neither OmegaConf nor Hydra, which would read "${SLURM_TMPDIR}" as an interpolation of their own.
"""

import difflib
import os
import pwd
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from trainyard.errors import UserError
from trainyard.hardware import GPUS, gpu_of_key, image_target
from trainyard.launch import slurm
from trainyard.launch.slurm import NodeKind, Partition, SlurmError

CARDS = ("cpu", *(gpu.key for gpu in GPUS))
"""What `card` may say."""

_T = TypeVar("_T")


class ClusterError(UserError):
    """A cluster file is not what we can use, or there is none. One line."""


@dataclass(frozen=True, kw_only=True)
class GpuNodes:
    """Nodes with one kind of GPU."""

    card: str  # key of hardware.GPUS, or "cpu"
    partition: str
    per_node: int  # GPUs of a node; card "cpu": tasks
    nodes: int
    gres: str = ""  # without a count: "gpu:a100"; card "cpu": ""
    constraint: str = ""
    cores_per_gpu: int
    memory_gib_per_gpu: int
    time_max: str = ""  # for minutes(); "": unlimited


@dataclass(frozen=True, kw_only=True)
class Container:
    """In what the code runs on the nodes; kind "" is the bare interpreter."""

    kind: str = ""  # "", "apptainer" or "pyxis"
    image: str = ""  # a path or, for pyxis, what --container-image takes; may hold "{target}"
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """How often a job is started again, by what ended it."""

    preempted: int = 1000
    time_limit: int = 100
    node_failure: int = 10
    crash: int = 2


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster file. slurm/examples/gres-apptainer.yaml explains each key to the person who fills it in."""

    name: str  # the file's name without .yaml
    path: Path  # absolute
    slurm_name: str = ""
    shared: list[str]  # absolute; at least one
    gpus: dict[str, GpuNodes]  # what people type as HW=, in the order of the file; at least one
    time_default: str = "8h"  # for minutes()
    signal_delay_s: int = 120
    account: str = ""
    qos: str = ""
    wckey: str = ""
    exclude: str = ""
    srun_args: list[str] = field(default_factory=list)
    sbatch: dict[str, str | bool] = field(default_factory=dict)  # True: an option without a value
    setup: list[str] = field(default_factory=list)
    python: str = ""
    container: Container = field(default_factory=Container)
    scratch: str = ""
    attempts: Attempts = field(default_factory=Attempts)


@dataclass(frozen=True)
class Finding:
    """One line of what became of a check."""

    ok: Literal["ok", "note", "wrong"]
    what: str  # a key of the file, or one of Slurm's settings
    found: str
    advice: str = ""


def load_cluster(path: Path) -> Cluster:
    """Read and check one cluster file; says nothing about whether the cluster is like that (`check_cluster` does).

    Raises:
        ClusterError: no such file, no YAML, an unknown or missing key, a value of the wrong type or out of range.
    """
    cluster = _object(Cluster, _root(path), "", name=path.stem, path=path.resolve())
    for hw, nodes in cluster.gpus.items():
        if (nodes.card == "cpu") == bool(nodes.gres):
            expected = "empty, as the card is cpu" if nodes.gres else f"such as gpu or gpu:{hw}, as the card has GPUs"
            raise ClusterError(f"{path}: gpus.{hw}.gres: expected it {expected}, found '{nodes.gres}'.")
    if bool(cluster.container.kind) != bool(cluster.container.image):
        given, lacking = ("kind", "image") if cluster.container.kind else ("image", "kind")
        raise ClusterError(f"{path}: container.{lacking}: is empty, but container.{given} is given. Give both or none.")
    return cluster


def find_cluster(wanted: str, folder: Path, slurm_name: str | None) -> Cluster:
    """Return the cluster a person means.

    Args:
        wanted: a path to a file, the name of one in `folder`, or "" for the one that describes the Slurm here.
        folder: where cluster files lie.
        slurm_name: ClusterName of the Slurm that answers here; None if none does.

    Raises:
        ClusterError: there is no such file, or none or several describe this Slurm; lists what there is.
    """
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        return load_cluster(Path(wanted))
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if wanted:
        if wanted not in files:
            raise ClusterError(
                f"There is no cluster '{wanted}'.{nearest(wanted, files)} {_what_there_is(files, folder)}"
            )
        return load_cluster(files[wanted])
    if slurm_name is None:
        raise ClusterError(f"No Slurm answers here, so it must be said which cluster. {_what_there_is(files, folder)}")
    matching = [path for path in files.values() if _slurm_name(path) == slurm_name]
    if len(matching) == 1:
        return load_cluster(matching[0])
    if matching:
        names = ", ".join(path.stem for path in matching)
        raise ClusterError(f"Several files describe the Slurm '{slurm_name}': {names}. Say which: --cluster NAME.")
    raise ClusterError(
        f"The Slurm here is named '{slurm_name}', and no file has this slurm_name. {_what_there_is(files, folder)}"
    )


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Hold a cluster file against this machine and the Slurm that answers here. Submits nothing; takes under a second.

    Raises:
        SlurmError: the controller stopped answering meanwhile.
    """
    findings = [*_check_folders(cluster), *_check_python(cluster), *_check_container(cluster)]
    if why_not := slurm.absent():
        return [*findings, Finding("wrong", "Slurm", why_not, "Check on a login node of the cluster.")]
    settings, partitions = slurm.settings(), slurm.partitions()
    findings += _check_name(cluster, settings["ClusterName"])
    for hw, asked in cluster.gpus.items():
        findings += _check_gpus(f"gpus.{hw}", asked, partitions)
    findings += _check_other_partitions(cluster, partitions)
    findings += _check_times(cluster, settings)
    findings += _check_preemption(cluster, settings, partitions)
    findings += _check_restarts(settings)
    findings += _check_accounting(cluster, settings)
    return findings


def render(findings: Sequence[Finding]) -> str:
    """Return findings for the screen, one a line, and what to do next."""
    lines = [f"{finding.ok:<5}  {finding.what}: {finding.found} {finding.advice}".rstrip() for finding in findings]
    wrong, notes = (sum(finding.ok == word for finding in findings) for word in ("wrong", "note"))
    if wrong:
        return "\n".join([*lines, f"{wrong} wrong, {notes} to know. Correct the file, then check again."])
    return "\n".join([*lines, f"Nothing is wrong, {notes} to know. Next: trainyard submit JOB"])


def minutes(text: str) -> int:
    """Read "2d", "8h", "8h30m", "30m" or "90" (minutes) as minutes.

    Raises:
        UserError: `text` is none of these, or zero.
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?|(\d+)", text)
    days, hours, rest, bare = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = days * 1440 + hours * 60 + rest + bare
    if not total:
        raise UserError(f"'{text}' is not a time. Write days, hours, minutes: 2d, 8h, 8h30m, 30m; or 90 for minutes.")
    return total


def nearest(wrong: str, names: Iterable[str]) -> str:
    """Return " Nearest: x.", to stand behind a sentence about a wrong name; "" if nothing is near."""
    near = difflib.get_close_matches(wrong, [name for name in names if name], n=1)
    return f" Nearest: {near[0]}." if near else ""


def _slurm_name(path: Path) -> str:
    """Read `slurm_name` alone, so that a mistake in another cluster's file stops nobody."""
    return next((child.value for name, child in _items(_root(path), "") if name == "slurm_name"), "")


def _what_there_is(files: dict[str, Path], folder: Path) -> str:
    if not files:
        return (
            f"{folder} holds no cluster file. Copy one of slurm/examples/ to {folder}/NAME.yaml and fill it in, "
            "then: --cluster NAME."
        )
    names = ", ".join(f"{name} ({_slurm_name(path) or 'no slurm_name'})" for name, path in files.items())
    return f"{folder} has: {names}. Say which: --cluster NAME."


# From YAML to dataclasses. We walk YAML's own nodes: they know their line, and a plain 0123, no or 1:30 is still the
# text that was typed, not the 83, false and 90 of YAML 1.1.


def _root(path: Path) -> yaml.Node:
    if not path.is_file():
        raise ClusterError(f"{path}: no such cluster file. Start from one of slurm/examples/.")
    with path.open(encoding="utf-8") as file:
        try:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ClusterError(_not_yaml(path, error)) from None
    if root is None:
        raise ClusterError(f"{path}: is empty. Start from one of slurm/examples/.")
    return root


def _not_yaml(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}" if mark else str(path)
    return f"{where}: not YAML: {getattr(error, 'problem', None) or str(error).partition(chr(10))[0]}."


def _object(kind: type[_T], node: yaml.Node, key: str, **given: Any) -> _T:
    """Build a dataclass from a mapping; `given` are fields that the file has no key for."""
    known = {f.name: f for f in fields(kind) if f.name not in given}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, child in _items(node, key):
        if name not in known:
            group = f" in {key}" if key else ""
            raise _fault(child, "", f"there is no key '{name}'{group}.{nearest(name, known)} Keys: {', '.join(known)}.")
        if child.tag == "tag:yaml.org,2002:null":
            continue  # "account:" with nothing after it is the default
        values[name] = _value(hints[name], child, _below(key, name))
        if name in _FAULTS and (fault := _FAULTS[name](values[name])):
            raise _fault(child, _below(key, name), fault)
    for name, declared in known.items():
        if name not in values and declared.default is MISSING and declared.default_factory is MISSING:
            raise _fault(node, _below(key, name), "must be given. See slurm/examples/gres-apptainer.yaml.")
    return kind(**given, **values)


def _value(kind: Any, node: yaml.Node, key: str) -> Any:
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _object(kind, node, key)
    if get_origin(kind) is list:
        return [_text(item, key) for item in _entries(node, key)]
    if get_origin(kind) is dict:
        return {name: _value(get_args(kind)[1], child, _below(key, name)) for name, child in _items(node, key)}
    text = _text(node, key)
    if kind is int:
        if not re.fullmatch(r"-?\d+", text):
            raise _fault(node, key, f"expected a whole number, found '{text}'.")
        return int(text)
    return True if kind == str | bool and text == "true" else text


def _items(node: yaml.Node, key: str) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise _fault(node, key, f"expected keys with values, found {_kind(node)}.")
    seen = set()
    for name_node, child in node.value:
        name = _text(name_node, key)
        if name in seen:
            raise _fault(name_node, _below(key, name), "is there twice. Remove one of them.")
        seen.add(name)
        yield name, child


def _entries(node: yaml.Node, key: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise _fault(node, key, f"expected a list such as [a, b], found {_kind(node)}.")
    entries: list[yaml.Node] = node.value
    return entries


def _text(node: yaml.Node, key: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _fault(node, key, f"expected text, found {_kind(node)}.")
    text: str = node.value
    # A line break would end the line of the batch script that the text goes into.
    if not text.isprintable():
        raise _fault(node, key, "expected one line of text, found a line break or another control character.")
    return text


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"'{node.value}'"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _fault(node: yaml.Node, key: str, words: str) -> ClusterError:
    where = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
    return ClusterError(f"{where}: {key}: {words}" if key else f"{where}: {words}")


# What a value may be


def _card_fault(card: str) -> str:
    if card in CARDS:
        return ""
    return f"there is no card '{card}'.{nearest(card, CARDS)} Known: {', '.join(CARDS)}."


def _gres_fault(gres: str) -> str:
    if re.fullmatch(r"([\w.-]+(:[\w.-]+)?)?", gres):
        return ""
    return f"expected a name and a type such as gpu:a100, without a count (that is per_node), found '{gres}'."


def _time_fault(text: str) -> str:
    try:
        minutes(text)
    except UserError as error:
        return str(error)
    return ""


def _gpus_fault(gpus: dict[str, GpuNodes]) -> str:
    if not gpus:
        return "names no GPUs, so nothing can run. Describe one kind of node, with card: cpu if it has none."
    strange = [hw for hw in gpus if not re.fullmatch(r"\w[\w.-]*", hw)]
    return f"expected names of letters, digits, '-', '.' and '_', found '{strange[0]}'." if strange else ""


def _at_least(low: int) -> Callable[[int], str]:
    return lambda value: "" if value >= low else f"expected {low} or more, found {value}."


def _one_of(*words: str) -> Callable[[str], str]:
    expected = ", ".join(word or '""' for word in words)
    return lambda word: "" if word in words else f"expected one of {expected}, found '{word}'.{nearest(word, words)}"


def _not_empty(value: str) -> str:
    return "" if value else "must not be empty."


def _folders_fault(folders: list[str]) -> str:
    if not folders:
        return "expected at least one folder that every node sees, such as [/home], found none."
    relative = [folder for folder in folders if not folder.startswith("/")]
    return f"expected absolute paths such as /home, found '{relative[0]}'." if relative else ""


def _image_fault(image: str) -> str:
    strange = re.sub(r"\{target\}", "", image)
    return f"may hold {{target}} and no other braces, found '{image}'." if re.search(r"[{}]", strange) else ""


_SET_BY_US = {
    "partition": "'partition' of the GPUs",
    "gres": "'gres' of the GPUs",
    "gpus": "'gres' of the GPUs",
    "gpus-per-node": "'gres' of the GPUs",
    "gpus-per-task": "'gres' of the GPUs",
    "constraint": "'constraint' of the GPUs",
    "cpus-per-task": "'cores_per_gpu'",
    "mem": "'memory_gib_per_gpu'",
    "mem-per-cpu": "'memory_gib_per_gpu'",
    "mem-per-gpu": "'memory_gib_per_gpu'",
    "time": "'time_default'",
    "signal": "'signal_delay_s'",
    "account": "'account'",
    "qos": "'qos'",
    "wckey": "'wckey'",
    "exclude": "'exclude'",
    **dict.fromkeys(
        ("array", "chdir", "error", "job-name", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode",
         "output", "requeue", "wrap"), "the launcher",
    ),
}  # fmt: skip


def _sbatch_fault(options: dict[str, str | bool]) -> str:
    for option in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            return f"expected long options of sbatch without dashes in front, such as mail-type, found '{option}'."
        if option in _SET_BY_US:
            return f"'{option}' is set by {_SET_BY_US[option]}. Remove it here."
    return ""


_FAULTS: dict[str, Callable[[Any], str]] = {
    "shared": _folders_fault,
    "gpus": _gpus_fault,
    "card": _card_fault,
    "partition": _not_empty,
    "per_node": _at_least(1),
    "nodes": _at_least(1),
    "gres": _gres_fault,
    "cores_per_gpu": _at_least(1),
    "memory_gib_per_gpu": _at_least(1),
    "time_max": lambda text: _time_fault(text) if text else "",
    "time_default": _time_fault,
    "signal_delay_s": _at_least(1),
    "sbatch": _sbatch_fault,
    "kind": _one_of("", "apptainer", "pyxis"),
    "image": _image_fault,
    **dict.fromkeys(("preempted", "time_limit", "node_failure", "crash"), _at_least(0)),
}
"""What is wrong with a value of the right type, by the key's last name: a sentence, or "" if nothing is."""


# The file against this machine


def _check_folders(cluster: Cluster) -> Iterator[Finding]:
    for folder in cluster.shared:
        if Path(folder).is_dir():
            yield Finding("ok", "shared", f"{folder} is here.")
        else:
            yield Finding("wrong", "shared", f"{folder} is not a folder here.", "Correct the path, or remove it.")


def _check_python(cluster: Cluster) -> Iterator[Finding]:
    if cluster.container.kind:
        return  # the interpreter is the image's
    python = shutil.which(cluster.python or sys.executable)
    if python is None:
        yield Finding("wrong", "python", f"there is no {cluster.python} here.", "Name one that the nodes have, too.")
    elif any(Path(python).is_relative_to(folder) for folder in cluster.shared):
        yield Finding("ok", "python", f"{python} is below a shared folder.")
    else:
        advice = "The nodes need the same one, with the same packages, under this path."
        yield Finding("note", "python", f"{python} is below no shared folder.", advice)


def _check_container(cluster: Cluster) -> Iterator[Finding]:
    if cluster.container.kind == "apptainer" and shutil.which("apptainer") is None:
        advice = "The nodes need it: on their PATH, or by a line of `setup`."
        yield Finding("note", "container.kind", "apptainer is not on PATH here.", advice)
    for image in sorted({_image(cluster, asked) for asked in cluster.gpus.values()}):
        if not image.startswith("/"):
            continue  # of a registry, which only the nodes may reach; "" without a container
        if Path(image).exists():
            yield Finding("ok", "container.image", f"{image} is here.")
        else:
            advice = "Build it: make sif. Or correct the path."
            yield Finding("wrong", "container.image", f"there is no {image}.", advice)


def _image(cluster: Cluster, asked: GpuNodes) -> str:
    card = gpu_of_key(asked.card)
    return cluster.container.image.replace("{target}", image_target(card.sm if card else None))


# The file against Slurm's partitions


def _check_name(cluster: Cluster, actual: str) -> Iterator[Finding]:
    if cluster.slurm_name == actual:
        yield Finding("ok", "slurm_name", f"{actual}.")
    elif cluster.slurm_name:
        found = f"the file is for '{cluster.slurm_name}', but the Slurm here is '{actual}'."
        yield Finding("wrong", "slurm_name", found, "Check on the right cluster, or take its file.")
    else:
        advice = f"Write slurm_name: {actual}, and it need not be named when one submits here."
        yield Finding("note", "slurm_name", "the file does not say which Slurm it is for.", advice)


def _check_gpus(what: str, asked: GpuNodes, partitions: dict[str, Partition]) -> Iterator[Finding]:
    partition = partitions.get(asked.partition)
    if partition is None:
        found = f"there is no partition '{asked.partition}'.{nearest(asked.partition, partitions)}"
        yield Finding("wrong", f"{what}.partition", found, f"There are: {', '.join(partitions)}.")
        return
    if partition.state != "up":
        found = f"partition {partition.name} is {partition.state}: jobs wait."
        yield Finding("note", f"{what}.partition", found, "Ask the administrator.")
    findings = [*_check_time_max(what, asked, partition), *_check_nodes(what, asked, partition)]
    yield from findings
    if all(finding.ok != "wrong" for finding in findings):
        per_node = f"{asked.per_node} x {asked.gres or 'cpu'}"
        found = f"partition {partition.name} has {asked.nodes} nodes with {per_node}, and cores and memory for them."
        yield Finding("ok", what, found)


def _check_time_max(what: str, asked: GpuNodes, partition: Partition) -> Iterator[Finding]:
    limit = partition.time_limit_min
    if limit is not None and (not asked.time_max or minutes(asked.time_max) > limit):
        found = f"{asked.time_max or 'unlimited'}, but partition {partition.name} ends jobs after {_clock(limit)}."
        yield Finding("wrong", f"{what}.time_max", found, f"Write time_max: {_clock(limit)}")


def _check_nodes(what: str, asked: GpuNodes, partition: Partition) -> Iterator[Finding]:
    with_gres = [kind for kind in partition.kinds if _count(kind, asked.gres)]
    if not with_gres:
        types = sorted({name for kind in partition.kinds for name in kind.gres})
        found = f"no node of partition {partition.name} has '{asked.gres}'.{nearest(asked.gres, types)}"
        yield Finding("wrong", f"{what}.gres", found, f"There are: {', '.join(types) or 'none'}.")
        return
    fitting = [kind for kind in with_gres if _meets(kind, asked.constraint)]
    if not fitting:
        features = sorted({name for kind in with_gres for name in kind.features})
        found = f"no such node meets '{asked.constraint}'.{nearest(asked.constraint, features)}"
        yield Finding("wrong", f"{what}.constraint", found, f"Their features: {', '.join(features) or 'none'}.")
        return
    most = max(_count(kind, asked.gres) for kind in fitting)
    if asked.gres and most < asked.per_node:
        found = f"{asked.per_node}, but the nodes have at most {most} x {asked.gres}."
        yield Finding("wrong", f"{what}.per_node", found, f"Write per_node: {most}")
        return
    yield from _check_size(
        what, asked, [k for k in fitting if not asked.gres or _count(k, asked.gres) >= asked.per_node]
    )


def _check_size(what: str, asked: GpuNodes, kinds: Sequence[NodeKind]) -> Iterator[Finding]:
    nodes, out = sum(kind.nodes for kind in kinds), sum(kind.out for kind in kinds)
    cpus, memory_gib = min(kind.cpus for kind in kinds), min(kind.memory_mib for kind in kinds) // 1024
    if asked.nodes > nodes:
        found = f"{asked.nodes}, but there are {nodes} such nodes."
        yield Finding("wrong", f"{what}.nodes", found, f"Write nodes: {nodes}")
    if asked.per_node * asked.cores_per_gpu > cpus:
        found = f"{asked.cores_per_gpu} x {asked.per_node} is more than the {cpus} cores of a node."
        yield Finding("wrong", f"{what}.cores_per_gpu", found, _at_most("cores_per_gpu", cpus // asked.per_node))
    if asked.per_node * asked.memory_gib_per_gpu > memory_gib:
        found = (
            f"{asked.memory_gib_per_gpu} x {asked.per_node} is more than the {memory_gib} GiB Slurm gives of a node."
        )
        advice = _at_most("memory_gib_per_gpu", memory_gib // asked.per_node)
        yield Finding("wrong", f"{what}.memory_gib_per_gpu", found, advice)
    if out:
        yield Finding("note", what, f"{out} of {nodes} nodes are down or drained now.")


def _at_most(key: str, most: int) -> str:
    return (
        f"Write {key}: {most}" if most else "Lower per_node, or ask the administrator whether Slurm's number is right."
    )


def _count(kind: NodeKind, gres: str) -> int:
    """Count a generic resource of a node; a name without a type stands for all types, "" for the node itself."""
    if not gres:
        return 1
    return sum(count for name, count in kind.gres.items() if gres in (name, name.partition(":")[0]))


def _meets(kind: NodeKind, constraint: str) -> bool:
    """Whether a node has the features of a constraint such as "a100", "a100&ib" or "a100|h100"."""
    alternatives = (re.findall(r"[\w.:-]+", part) for part in constraint.split("|"))
    return any(set(features) <= set(kind.features) for features in alternatives)


def _check_other_partitions(cluster: Cluster, partitions: dict[str, Partition]) -> Iterator[Finding]:
    named = {asked.partition for asked in cluster.gpus.values()}
    if others := [name for name in partitions if name not in named]:
        yield Finding("note", "gpus", f"Slurm has partitions that the file does not name: {', '.join(others)}.")


# The file against Slurm's settings


def _check_times(cluster: Cluster, settings: dict[str, str]) -> Iterator[Finding]:
    default, delay = minutes(cluster.time_default), cluster.signal_delay_s
    short = [hw for hw, asked in cluster.gpus.items() if asked.time_max and minutes(asked.time_max) < default]
    if short:
        found = f"{cluster.time_default} is more than time_max of {', '.join(short)}."
        yield Finding("note", "time_default", found, "Jobs there get time_max.")
    least = min([default, *(minutes(asked.time_max) for asked in cluster.gpus.values() if asked.time_max)])
    if delay > least * 60 // 4:
        found = f"{delay} s is more than a quarter of {_clock(least)}, the usual time of a job."
        yield Finding("note", "signal_delay_s", found, "Such a job is warned when a quarter of its time is left.")
    elif delay < 60:
        found = (
            f"{delay} s, but Slurm may warn up to 60 s earlier than asked: a delay below 60 s gains no certain time."
        )
        yield Finding("note", "signal_delay_s", found)


def _check_preemption(
    cluster: Cluster, settings: dict[str, str], partitions: dict[str, Partition]
) -> Iterator[Finding]:
    if settings["PreemptType"] == "preempt/none":
        yield Finding("ok", "PreemptType", "no job is preempted.")
        return
    warned = "send_user_signal" in settings["SlurmctldParameters"] + settings.get("PreemptParameters", "")
    kill_wait_s = int(settings["KillWait"].split()[0])
    groups: dict[tuple[str, int], list[str]] = {}
    for name in dict.fromkeys(asked.partition for asked in cluster.gpus.values() if asked.partition in partitions):
        groups.setdefault((partitions[name].preempt_mode, partitions[name].grace_s), []).append(name)
    for (mode, grace_s), names in groups.items():
        yield _preemption(f"partition{'s' * (len(names) > 1)} {', '.join(names)}", mode, grace_s + kill_wait_s, warned)


def _preemption(where: str, mode: str, left_s: int, warned: bool) -> Finding:
    if "CANCEL" in mode:
        found = f"{where}: a preempted job is cancelled, not put back into the queue."
        return Finding("note", "PreemptMode", found, "Go on with: trainyard resume RUN")
    if "REQUEUE" not in mode:
        return Finding("ok", "PreemptMode", f"{where}: {mode}: no job is ended by preemption.")
    signal = "a warning (SIGUSR2) and " if warned else "SIGTERM and "
    found = f"{where}: a preempted job has {left_s} s between {signal}its end."
    if left_s >= 60:
        return Finding("ok", "PreemptMode", found)
    advice = "What it cannot save by then is trained again: save often, or ask the administrator for a GraceTime."
    return Finding("note", "PreemptMode", found, advice)


def _check_restarts(settings: dict[str, str]) -> Iterator[Finding]:
    if settings["JobRequeue"] == "0":
        yield Finding("note", "JobRequeue", "off by default here.", "Each of our jobs asks for it (sbatch --requeue).")
    expire = re.search(r"cred_expire=(\d+)", settings["AuthInfo"])
    wait_s = int(expire[1]) if expire else 120
    found = f"a job that is started again waits {wait_s + 1} s first (cred_expire in AuthInfo)."
    yield Finding("note" if wait_s > 60 else "ok", "AuthInfo", found)
    most = int(settings["MaxArraySize"]) - 1
    if most < 1:
        yield Finding("wrong", "MaxArraySize", "0: this Slurm takes no arrays, so no sweeps.", "Ask the administrator.")
    else:
        yield Finding("ok", "MaxArraySize", f"a sweep has at most {most} runs.")


def _check_accounting(cluster: Cluster, settings: dict[str, str]) -> Iterator[Finding]:
    if not settings["AccountingStorageType"].endswith("slurmdbd"):
        found = f"off: Slurm forgets a job {settings['MinJobAge']} after its end, and takes any account and QOS."
        yield Finding("note", "AccountingStorageType", found, "status and why read the run's own records as well.")
        return
    user = pwd.getpwuid(os.getuid()).pw_name
    try:
        allowed = slurm.accounts(user)
    except SlurmError as error:
        yield Finding("note", "account", f"not checked. {error}")
        return
    enforced = "associations" in settings["AccountingStorageEnforce"]
    verdict: Literal["note", "wrong"] = "wrong" if enforced else "note"
    names = ", ".join(allowed) or "none"
    qos = {name for account, of in allowed.items() if cluster.account in ("", account) for name in of}
    if cluster.account and cluster.account not in allowed:
        found = f"user {user} may not charge '{cluster.account}'.{nearest(cluster.account, allowed)}"
        yield Finding(verdict, "account", found, f"Allowed: {names}.")
    elif not allowed:
        yield Finding(verdict, "account", f"user {user} has no account.", "Ask the administrator.")
    elif cluster.qos and cluster.qos not in qos:
        found = f"user {user} may not use QOS '{cluster.qos}'.{nearest(cluster.qos, sorted(qos))}"
        yield Finding(verdict, "qos", found, f"Allowed: {', '.join(sorted(qos)) or 'none'}.")
    else:
        yield Finding("ok", "account", f"user {user} may charge {cluster.account or names}.")


def _clock(total_min: int) -> str:
    """Write minutes as `minutes` reads them: "2d", "8h30m"."""
    parts = (total_min // 1440, "d"), (total_min % 1440 // 60, "h"), (total_min % 60, "m")
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0m"
