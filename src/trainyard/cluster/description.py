"""Reads the description of a cluster: slurm/<name>.yaml.

The file is read strictly: an unknown key or an invalid value is an error that names its line. Loads no torch, and
neither OmegaConf nor Hydra, which would treat "${SLURM_TMPDIR}" as their own interpolation.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from trainyard.cluster.variables import select_for_slurm
from trainyard.config.yaml_text import MOST_BYTES, compose_yaml
from trainyard.errors import UserError
from trainyard.hardware import GPU_TYPES, get_gpu, make_gpu_key
from trainyard.text import cut, suggest_nearest

CARDS = ("cpu", *(gpu.key for gpu in GPU_TYPES))
"""Values of `card`, besides {sm: ..., memory_gib: ...} for any other."""

SYNTHETIC = "synthetic"
"""Value of a data root: samples that the job synthesizes."""

_T = TypeVar("_T")


class ClusterError(UserError):
    """A cluster file is missing or invalid. One line."""


@dataclass(frozen=True, kw_only=True)
class OtherCard:
    """A card that no table needs to contain."""

    sm: int  # compute capability, major * 10 + minor
    memory_gib: int


@dataclass(frozen=True, kw_only=True)
class GpuNodes:
    """Nodes with one kind of GPU."""

    card: str  # key of a GPU type for hardware.get_gpu, or "cpu"
    partition: str  # or several, separated by commas
    per_node: int  # GPUs per node; card "cpu": tasks per node
    nodes: int
    gres: str = ""  # without a count: "gpu:a100"; card "cpu": ""
    constraint: str = ""
    cores_per_gpu: int
    memory_gib_per_gpu: int = 0  # 0: none is requested
    time_max: str = ""  # for parse_minutes(); "": unlimited
    gpu_option: str = "gres"  # which option of sbatch requests GPUs: "gres" or "gpus-per-node"
    account: str = ""  # "": the cluster's
    qos: str = ""  # "": the cluster's


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container in which the code runs on the nodes; kind "": no container."""

    kind: str = ""  # "", "apptainer" or "pyxis"
    image: str = ""  # a path or, for pyxis, the argument of --container-image; may contain "{target}"
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """Budgets of restarts, by the cause of an attempt's end."""

    preempted: int = 1000
    time_limit: int = 100
    node_failure: int = 10
    crash: int = 2
    hung: int = 5
    disk_full: int = 30
    disk_error: int = 10


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster file. slurm/examples/gres-apptainer.yaml explains each key to users."""

    name: str  # the file name without .yaml
    path: Path  # absolute
    slurm_name: str = ""
    shared: list[str]  # absolute; at least one
    gpus: dict[str, GpuNodes]  # by the name that users type as HW=, in file order; at least one
    time_default: str = "8h"  # for parse_minutes()
    signal_delay_s: int = 120
    requeue_wait_s: int = 900  # how long an attempt asks a Slurm that does not answer to requeue it
    account: str = ""
    qos: str = ""
    wckey: str = ""
    exclude: str = ""
    srun_args: list[str] = field(default_factory=list)
    sbatch: dict[str, str | bool] = field(default_factory=dict)  # True: an option without a value
    variables: list[str] = field(default_factory=list)  # names; of the shell that submits, besides variables.py's
    setup: list[str] = field(default_factory=list)
    node_setup: list[str] = field(default_factory=list)
    on_end: str = ""
    python: str = ""
    container: Container = field(default_factory=Container)
    scratch: str = ""
    group: str = ""  # whose members may read run folders, and add files; "": their owners, and readers by umask
    attempts: Attempts = field(default_factory=Attempts)
    data: dict[str, str] = field(default_factory=dict)  # by job or family: an absolute path, or SYNTHETIC


@dataclass(frozen=True, kw_only=True)
class UserFile:
    """A user's settings for all clusters: trainyard.yaml in the user's configuration folder."""

    data: dict[str, str] = field(default_factory=dict)  # as in a cluster file


def load_cluster(path: Path) -> Cluster:
    """Read and validate one cluster file. Whether the cluster matches it is up to cluster/check.py.

    Raises:
        ClusterError: no such file, not YAML, an unknown or missing key, a value of the wrong type or out of range.
    """
    cluster = _build_dataclass(Cluster, _parse_yaml(path), "", name=path.stem, path=path.resolve())
    for hw, nodes in cluster.gpus.items():
        if (nodes.card == "cpu") == bool(nodes.gres):
            expected = "no value, as card is cpu" if nodes.gres else f"gpu, gpu:{hw} or the like, as the card has GPUs"
            raise ClusterError(f"{path}: gpus.{hw}.gres: expected {expected}, found '{nodes.gres}'.")
        if nodes.gpu_option != "gres" and nodes.gres.partition(":")[0] != "gpu":
            raise ClusterError(
                f"{path}: gpus.{hw}.gpu_option: {nodes.gpu_option} requests GPUs only, but gres is '{nodes.gres}'. "
                "Write gpu_option: gres"
            )
    if bool(cluster.container.kind) != bool(cluster.container.image):
        given, missing = ("kind", "image") if cluster.container.kind else ("image", "kind")
        raise ClusterError(f"{path}: container.{missing}: is empty, but container.{given} is given. Give both or none.")
    return cluster


def load_user_file(path: Path) -> UserFile:
    """Read a user's own file, as strictly as a cluster file; an empty one says nothing.

    Raises:
        ClusterError: as for `load_cluster`.
    """
    root = _compose_yaml(path)
    return UserFile() if root is None else _build_dataclass(UserFile, root, "")


def find_cluster(wanted: str, folder: Path, slurm_name: str | None) -> Cluster:
    """Return the cluster that the user named.

    Args:
        wanted: path of a file, name of a file in `folder`, or "" for the one that describes the Slurm here.
        folder: folder of the cluster files.
        slurm_name: ClusterName of the Slurm that answers here; None if none does.

    Raises:
        ClusterError: there is no such file, or none or several describe this Slurm; the message lists the files.
    """
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        return load_cluster(Path(wanted))
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if wanted:
        if wanted not in files:
            raise ClusterError(
                f"There is no cluster '{wanted}'.{suggest_nearest(wanted, files)} {_list_clusters(files, folder)}"
            )
        return load_cluster(files[wanted])
    if slurm_name is None:
        raise ClusterError(f"No Slurm answers here, so the cluster must be named. {_list_clusters(files, folder)}")
    matching = [path for path in files.values() if _read_slurm_name(path) == slurm_name]
    if len(matching) == 1:
        return load_cluster(matching[0])
    if matching:
        names = ", ".join(path.stem for path in matching)
        raise ClusterError(f"Several files describe the Slurm '{slurm_name}': {names}. Name one: --cluster NAME.")
    raise ClusterError(
        f"The Slurm here is named '{slurm_name}', and no file has this slurm_name. {_list_clusters(files, folder)}"
    )


def parse_minutes(text: str) -> int:
    """Parse a time as minutes: "2d", "8h", "8h30m", "30m" or "90" (minutes), or as Slurm writes it.

    Slurm's spellings: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Seconds are rounded up to a minute.

    Raises:
        UserError: `text` is none of these, or zero.
    """
    ours = re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?", text)
    with_days = re.fullmatch(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    without = re.fullmatch(r"()(?:(\d{1,9}):(?=\d+:))?(\d{1,9})(?::(\d{1,9}))?", text)
    match = ours or with_days or without
    days, hours, minutes, seconds = (int(part or 0) for part in (*match.groups(), 0)[:4]) if match else (0, 0, 0, 0)
    total = days * 1440 + hours * 60 + minutes + -(-seconds // 60)
    if not total:
        raise UserError(
            f"'{text}' is not a time. Write days, hours, minutes: 2d, 8h, 8h30m, 30m; 90 for minutes; or as for "
            "Slurm: 8:00:00, 1-12, 1-12:30."
        )
    return total


def format_minutes(total_min: int) -> str:
    """Format minutes so that `parse_minutes` can read them: "2d", "8h30m"."""
    parts = (total_min // 1440, "d"), (total_min % 1440 // 60, "h"), (total_min % 60, "m")
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0m"


def _read_slurm_name(path: Path) -> str:
    """Read only `slurm_name`, so that a mistake in another cluster's file does not matter."""
    return next((child.value for name, child in _read_mapping(_parse_yaml(path), "") if name == "slurm_name"), "")


def _list_clusters(files: dict[str, Path], folder: Path) -> str:
    if not files:
        return (
            f"{folder} holds no cluster file. Copy one of slurm/examples/ to {folder}/NAME.yaml and fill it in, "
            "then: --cluster NAME."
        )
    names = ", ".join(f"{name} ({_read_slurm_name(path) or 'no slurm_name'})" for name, path in files.items())
    return f"{folder} has: {names}. Name one: --cluster NAME."


# From YAML to dataclasses. We walk the YAML nodes because they know their line, and because a plain 0123, no or 1:30
# is still the typed text there, not the 83, false and 90 of YAML 1.1.


def _parse_yaml(path: Path) -> yaml.Node:
    if not path.is_file():
        raise ClusterError(f"{path}: no such cluster file. Start from one of slurm/examples/.")
    root = _compose_yaml(path)
    if root is None:
        raise ClusterError(f"{path}: is empty. Start from one of slurm/examples/.")
    return root


def _compose_yaml(path: Path) -> yaml.Node | None:
    with path.open("rb") as file:
        return compose_yaml(file.read(MOST_BYTES + 1), path, error=ClusterError)


def _build_dataclass(kind: type[_T], node: yaml.Node, key: str, **given: Any) -> _T:
    """Build a dataclass from a mapping; `given` sets the fields that have no key in the file."""
    known = {f.name: f for f in fields(kind) if f.name not in given}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, child in _read_mapping(node, key):
        if name not in known:
            group = f" in {key}" if key else ""
            raise _make_error(
                child, "", f"there is no key '{name}'{group}.{suggest_nearest(name, known)} Keys: {', '.join(known)}."
            )
        if child.tag == "tag:yaml.org,2002:null":
            continue  # "account:" with nothing after it is the default
        values[name] = _convert_value(hints[name], child, _join_key(key, name))
        if name in _CHECKS and (problem := _CHECKS[name](values[name])):
            raise _make_error(child, _join_key(key, name), problem)
    for name, declared in known.items():
        if name not in values and declared.default is MISSING and declared.default_factory is MISSING:
            raise _make_error(node, _join_key(key, name), "must be given. See slurm/examples/gres-apptainer.yaml.")
    return kind(**given, **values)


def _convert_value(kind: Any, node: yaml.Node, key: str) -> Any:
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _build_dataclass(kind, node, key)
    if key.endswith(".card") and isinstance(node, yaml.MappingNode):
        card = _build_dataclass(OtherCard, node, key)
        return make_gpu_key(card.sm, card.memory_gib)
    if get_origin(kind) is list:
        return [_read_text(item, key) for item in _read_list(node, key)]
    if get_origin(kind) is dict:
        return {
            name: _convert_value(get_args(kind)[1], child, _join_key(key, name))
            for name, child in _read_mapping(node, key)
        }
    text = _read_text(node, key)
    if kind is int:
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise _make_error(node, key, f"expected a whole number, found '{cut(text, 40)}'.")
        return int(text)
    return True if kind == str | bool and text == "true" else text


def _read_mapping(node: yaml.Node, key: str) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise _make_error(node, key, f"expected keys with values, found {_describe_node(node)}.")
    names = set()
    for name_node, child in node.value:
        name = _read_text(name_node, key)
        if name in names:
            raise _make_error(name_node, _join_key(key, name), "is there twice. Remove one of them.")
        names.add(name)
        yield name, child


def _read_list(node: yaml.Node, key: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise _make_error(node, key, f"expected a list such as [a, b], found {_describe_node(node)}.")
    entries: list[yaml.Node] = node.value
    return entries


def _read_text(node: yaml.Node, key: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _make_error(node, key, f"expected text, found {_describe_node(node)}.")
    text: str = node.value
    # A line break would end the line of the batch script that contains the text.
    if not text.isprintable():
        raise _make_error(node, key, "expected one line of text, found a line break or another control character.")
    return text


def _describe_node(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"'{node.value}'"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"


def _join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _make_error(node: yaml.Node, key: str, words: str) -> ClusterError:
    where = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
    return ClusterError(f"{where}: {key}: {words}" if key else f"{where}: {words}")


# Checks of values: each returns an error as a sentence, or ""


def _check_card(card: str) -> str:
    if re.fullmatch(r"(amd|instinct|radeon|rx ?\d|mi\d|gfx\d).*", card.lower()):
        return (
            f"'{card}' is an AMD card, and Trainyard computes on NVIDIA cards only (CUDA). Describe other nodes, or "
            "use the CPUs of these: card: cpu, without gres."
        )
    if card == "cpu" or get_gpu(card) is not None:
        return ""
    return (
        f"{_require_one_of(*CARDS)(card)} For any other NVIDIA card write its compute capability and memory: "
        "card: {sm: 89, memory_gib: 48}"
    )


def _check_gres(gres: str) -> str:
    if re.fullmatch(r"([\w.-]+(:[\w.-]+)?)?", gres):
        return ""
    return f"expected a name and a type such as gpu:a100, without a count (that is per_node), found '{gres}'."


def _check_time(text: str) -> str:
    try:
        parse_minutes(text)
    except UserError as error:
        return str(error)
    return ""


def _check_gpus(gpus: dict[str, GpuNodes]) -> str:
    if not gpus:
        return "names no GPUs, so nothing can run. Describe one kind of node, with card: cpu if it has none."
    invalid = [hw for hw in gpus if not re.fullmatch(r"\w[\w.-]*", hw)]
    return f"expected names of letters, digits, '-', '.' and '_', found '{invalid[0]}'." if invalid else ""


def _require_at_least(low: int) -> Callable[[int], str]:
    return lambda value: "" if value >= low else f"expected {low} or more, found {value}."


def _require_one_of(*words: str) -> Callable[[str], str]:
    expected = ", ".join(word or '""' for word in words)
    return lambda word: (
        "" if word in words else f"expected one of {expected}, found '{word}'.{suggest_nearest(word, words)}"
    )


def _require_not_empty(value: str) -> str:
    return "" if value else "must not be empty."


def _check_folders(folders: list[str]) -> str:
    if not folders:
        return "expected at least one folder that every node sees, such as [/home], found none."
    relative = [folder for folder in folders if not folder.startswith("/")]
    return f"expected absolute paths such as /home, found '{relative[0]}'." if relative else ""


def _check_roots(roots: dict[str, str]) -> str:
    for name, root in roots.items():
        if root != SYNTHETIC and not root.startswith("/"):
            return f"expected an absolute path such as /data/prints, or {SYNTHETIC}, for {name}, found '{root}'."
    return ""


def _check_scratch(folder: str) -> str:
    """Check a path that the batch script puts in double quotes, so that variables of the node are expanded."""
    variable = r"\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
    if re.fullmatch(rf"((/|{variable})([^$`\"'\\]|{variable})*)?", folder, re.ASCII):
        return ""
    return (
        "expected an absolute path, which may hold variables of the node such as /scratch/$USER or "
        f"${{SLURM_TMPDIR}}/data but no other shell syntax, found '{folder}'."
    )


def _check_image(image: str) -> str:
    invalid = re.sub(r"\{target\}", "", image)
    return f"may contain {{target}} but no other braces, found '{image}'." if re.search(r"[{}]", invalid) else ""


_SET_BY = {
    "'partition' of the GPUs": "partition",
    "'gres' and 'gpu_option' of the GPUs": "gres gpus gpus-per-node gpus-per-task",
    "'constraint' of the GPUs": "constraint",
    "'cores_per_gpu'": "cpus-per-task",
    "'memory_gib_per_gpu'": "mem mem-per-cpu mem-per-gpu",
    "'time_default'": "time",
    "'signal_delay_s'": "signal",
    **{f"'{key}'": key for key in ("account", "qos", "wckey", "exclude")},
    "the launcher": "array chdir error job-name nodes no-requeue ntasks ntasks-per-node open-mode output requeue wrap",
}
"""Options of sbatch that a cluster file may not set, by what sets them."""


def _check_sbatch(options: dict[str, str | bool]) -> str:
    for option in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            return f"expected long options of sbatch without leading dashes, such as mail-type, found '{option}'."
        if by := next((by for by, ours in _SET_BY.items() if option in ours.split()), ""):
            return f"'{option}' is set by {by}. Remove it here."
    return ""


def _check_variables(names: list[str]) -> str:
    wrong = next((name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)), None)
    return "" if wrong is None else f"expected names of environment variables, such as HF_TOKEN, found '{wrong}'."


def _check_shell(lines: list[str]) -> str:
    """Have bash read the lines, without running them: an open bracket or quote would take in what follows them."""
    answer = subprocess.run(
        ["bash", "--noprofile", "--norc", "-n"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env=select_for_slurm(os.environ),
    )
    error = answer.stderr.strip().replace("\n", " ")
    return f"expected lines that bash can read, but it says: {error}" if answer.returncode else ""


_CHECKS: dict[str, Callable[[Any], str]] = {
    "shared": _check_folders,
    "gpus": _check_gpus,
    "card": _check_card,
    "sm": _require_at_least(50),
    "memory_gib": _require_at_least(1),
    "partition": _require_not_empty,
    "per_node": _require_at_least(1),
    "nodes": _require_at_least(1),
    "gres": _check_gres,
    "cores_per_gpu": _require_at_least(1),
    "memory_gib_per_gpu": _require_at_least(0),
    "gpu_option": _require_one_of("gres", "gpus-per-node"),
    "time_max": lambda text: _check_time(text) if text else "",
    "time_default": _check_time,
    "signal_delay_s": _require_at_least(1),
    "requeue_wait_s": _require_at_least(0),
    "sbatch": _check_sbatch,
    "variables": _check_variables,
    **dict.fromkeys(("setup", "node_setup"), _check_shell),
    "kind": _require_one_of("", "apptainer", "pyxis"),
    "image": _check_image,
    "data": _check_roots,
    "scratch": _check_scratch,
    **dict.fromkeys(
        ("preempted", "time_limit", "node_failure", "crash", "hung", "disk_full", "disk_error"), _require_at_least(0)
    ),
}
"""The check of a value that has the right type, by the last part of its key."""
