"""A cluster as its file describes it: slurm/<name>.yaml.

The file is data, read strictly: a key nobody knows, or a value nobody can use, is an error that names its line. Loads
no torch, and neither OmegaConf nor Hydra, which would read "${SLURM_TMPDIR}" as an interpolation of their own.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from trainyard.errors import UserError
from trainyard.hardware import GPUS
from trainyard.text import nearest_hint

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


def load_cluster(path: Path) -> Cluster:
    """Read and check one cluster file; says nothing about whether the cluster is like that (cluster_check.py does).

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
                f"There is no cluster '{wanted}'.{nearest_hint(wanted, files)} {_what_there_is(files, folder)}"
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


def clock(total_min: int) -> str:
    """Write minutes as `minutes` reads them: "2d", "8h30m"."""
    parts = (total_min // 1440, "d"), (total_min % 1440 // 60, "h"), (total_min % 60, "m")
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0m"


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
            raise _fault(
                child, "", f"there is no key '{name}'{group}.{nearest_hint(name, known)} Keys: {', '.join(known)}."
            )
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
    return lambda word: (
        "" if word in words else f"expected one of {expected}, found '{word}'.{nearest_hint(word, words)}"
    )


def _not_empty(value: str) -> str:
    return "" if value else "must not be empty."


def _folders_fault(folders: list[str]) -> str:
    if not folders:
        return "expected at least one folder that every node sees, such as [/home], found none."
    relative = [folder for folder in folders if not folder.startswith("/")]
    return f"expected absolute paths such as /home, found '{relative[0]}'." if relative else ""


def _scratch_fault(folder: str) -> str:
    """A batch script takes it in double quotes, for the sake of variables that only the node knows."""
    variable = r"\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
    if re.fullmatch(rf"((/|{variable})([^$`\"'\\]|{variable})*)?", folder, re.ASCII):
        return ""
    return (
        "expected an absolute path, which may hold variables of the node such as /scratch/$USER or "
        f"${{SLURM_TMPDIR}}/data and nothing else that a shell reads, found '{folder}'."
    )


def _image_fault(image: str) -> str:
    strange = re.sub(r"\{target\}", "", image)
    return f"may hold {{target}} and no other braces, found '{image}'." if re.search(r"[{}]", strange) else ""


_SET_BY = {
    "'partition' of the GPUs": "partition",
    "'gres' of the GPUs": "gres gpus gpus-per-node gpus-per-task",
    "'constraint' of the GPUs": "constraint",
    "'cores_per_gpu'": "cpus-per-task",
    "'memory_gib_per_gpu'": "mem mem-per-cpu mem-per-gpu",
    "'time_default'": "time",
    "'signal_delay_s'": "signal",
    **{f"'{key}'": key for key in ("account", "qos", "wckey", "exclude")},
    "the launcher": "array chdir error job-name nodes no-requeue ntasks ntasks-per-node open-mode output requeue wrap",
}
"""Options of sbatch that are ours, by what sets them."""


def _sbatch_fault(options: dict[str, str | bool]) -> str:
    for option in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            return f"expected long options of sbatch without dashes in front, such as mail-type, found '{option}'."
        if by := next((by for by, ours in _SET_BY.items() if option in ours.split()), ""):
            return f"'{option}' is set by {by}. Remove it here."
    return ""


_FAULTS: dict[str, Callable[[Any], str]] = {
    "shared": _folders_fault,
    "gpus": _gpus_fault,
    "card": _one_of(*CARDS),
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
    "scratch": _scratch_fault,
    **dict.fromkeys(("preempted", "time_limit", "node_failure", "crash"), _at_least(0)),
}
"""What is wrong with a value of the right type, by the key's last name: a sentence, or "" if nothing is."""
