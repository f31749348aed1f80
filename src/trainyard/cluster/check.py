"""Checks a cluster file against this machine and the Slurm that answers here."""

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainyard.cluster import query as slurm
from trainyard.cluster.description import CARDS, SYNTHETIC, Cluster, GpuNodes, format_minutes, parse_minutes
from trainyard.cluster.limits import count_demand, describe_exceeded, find_exceeded
from trainyard.cluster.query import Limit, NodeKind, Partition, SlurmError
from trainyard.cluster.variables import select_for_ranks
from trainyard.hardware import choose_image_target, get_gpu
from trainyard.text import cut, suggest_nearest


@dataclass(frozen=True)
class Finding:
    """One line of the result of a check."""

    level: Literal["ok", "note", "wrong"]
    what: str  # a key of the file, or one of Slurm's settings
    found: str
    advice: str = ""


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Check a cluster file against this machine and its Slurm. Submits nothing; takes less than a second.

    Raises:
        SlurmError: the controller stopped answering in between.
    """
    findings = [*_check_folders(cluster), *_check_data(cluster), *_check_python(cluster), *_check_container(cluster)]
    if reason := slurm.explain_absence():
        return [*findings, Finding("wrong", "Slurm", reason, "Check on a login node of the cluster.")]
    settings, partitions = slurm.query_settings(), slurm.query_partitions()
    findings += _check_name(cluster, settings["ClusterName"])
    for hw, spec in cluster.gpus.items():
        for name in spec.partition.split(","):
            findings += _check_gpus(f"gpus.{hw}", replace(spec, partition=name), partitions)
    findings += _check_other_partitions(cluster, partitions)
    findings += _check_times(cluster)
    findings += _check_signals(cluster, settings)
    findings += _check_preemption(cluster, settings, partitions)
    findings += _check_restarts(settings)
    findings += _check_accounting(cluster, settings)
    return findings


def render_findings(findings: Sequence[Finding]) -> str:
    """Render findings, one per line, and the next command."""
    lines = [f"{finding.level:<5}  {finding.what}: {finding.found} {finding.advice}".rstrip() for finding in findings]
    wrong, notes = (sum(finding.level == word for finding in findings) for word in ("wrong", "note"))
    if wrong:
        return "\n".join([*lines, f"{wrong} wrong (notes: {notes}). Correct the file, then check again."])
    return "\n".join([*lines, f"Nothing is wrong (notes: {notes}). Next: trainyard submit JOB"])


# The file against this machine


def _check_folders(cluster: Cluster) -> Iterator[Finding]:
    for folder in cluster.shared:
        if Path(folder).is_dir():
            yield Finding("ok", "shared", f"{folder} is here.")
        else:
            yield Finding("wrong", "shared", f"{folder} is not a folder here.", "Correct the path, or remove it.")


def _check_data(cluster: Cluster) -> Iterator[Finding]:
    for name, root in cluster.data.items():
        if root != SYNTHETIC and Path(root).is_dir():
            yield Finding("ok", f"data.{name}", f"{root} is here.")
        elif root != SYNTHETIC:
            yield Finding("wrong", f"data.{name}", f"{root} is not a folder here.", "Correct the path, or remove it.")


def _check_python(cluster: Cluster) -> Iterator[Finding]:
    if cluster.container.kind:
        return  # the interpreter is in the container image
    python = shutil.which(cluster.python or sys.executable)
    if python is None:
        yield Finding("wrong", "python", f"there is no {cluster.python} here.", "Name one that the nodes also have.")
    elif any(Path(python).is_relative_to(folder) for folder in cluster.shared):
        yield Finding("ok", "python", f"{python} is below a shared folder.")
    else:
        advice = "The nodes need the same one, with the same packages, at this path."
        yield Finding("note", "python", f"{python} is not below a shared folder.", advice)


def _check_container(cluster: Cluster) -> Iterator[Finding]:
    if cluster.container.kind == "apptainer" and shutil.which("apptainer") is None:
        advice = "The nodes need it: on their PATH, or from a line in `setup`."
        yield Finding("note", "container.kind", "apptainer is not on PATH here.", advice)
    for image, spec in sorted({_find_image(cluster, spec): spec for spec in cluster.gpus.values()}.items()):
        if missing := explain_missing_image(cluster, spec):
            what, text = missing.split(": ", 1)
            yield Finding("wrong", what, text)
        elif image.startswith("/") and Path(image).exists():
            yield Finding("ok", "container.image", f"{image} is here.")
        elif image.startswith("/"):
            yield Finding("note", "container.image", f"{image} is not here.", "The nodes need it at this path.")
        # else in a registry that perhaps only the nodes can reach; "": no container
    if missing := explain_missing_module(cluster):
        what, text = missing.split(": ", 1)
        yield Finding("wrong", what, text)


def explain_missing_image(cluster: Cluster, spec: GpuNodes) -> str:
    """Return an error if the container image for a kind of nodes is not below a folder shared with them; "" else."""
    image = _find_image(cluster, spec)
    if Path(image).exists() or not any(Path(image).is_relative_to(folder) for folder in cluster.shared):
        return ""
    hw = spec.card if spec.card in CARDS else _choose_target(spec)
    build = f"Build it: make sif HW={hw}. Or c" if cluster.container.kind == "apptainer" else "C"
    return f"container.image: there is no {image}. {build}orrect the path."


def explain_missing_module(cluster: Cluster) -> str:
    """Name the line of `setup` that loads a missing module; "" if none does, or this machine has no `module`."""
    lines = [line for line in cluster.setup if re.match(r"(module|ml)\s|(source|\.)\s.*(module|lmod)", line)]
    if not lines:
        return ""
    tests = [
        f"{{ {line}\n}} >/dev/null\ncase $? in 0 | 127) ;; *) echo {shlex.quote(line)}; exit ;; esac" for line in lines
    ]
    environ = select_for_ranks(os.environ, cluster.variables)
    command = ["bash", "--noprofile", "--norc", "-c", "\n".join(tests)]
    try:
        answer = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired:
        return ""  # a slow file system says nothing about the module
    if not (line := answer.stdout.strip()).startswith(("module", "ml")):
        return ""
    error = cut(" ".join(answer.stderr.split()), 200)
    return f"setup: '{line}' fails here: {error}. Correct it; if only the nodes have that module, append: || true"


def _find_image(cluster: Cluster, spec: GpuNodes) -> str:
    return cluster.container.image.replace("{target}", _choose_target(spec))


def _choose_target(spec: GpuNodes) -> str:
    card = get_gpu(spec.card)
    return choose_image_target(card.sm if card else None)


# The file against Slurm's partitions


def _check_name(cluster: Cluster, actual: str) -> Iterator[Finding]:
    if cluster.slurm_name == actual:
        yield Finding("ok", "slurm_name", f"{actual}.")
    elif cluster.slurm_name:
        text = f"the file is for '{cluster.slurm_name}', but the Slurm here is '{actual}'."
        yield Finding("wrong", "slurm_name", text, "Check on the right cluster, or take its file.")
    else:
        advice = f"Write slurm_name: {actual}: then this file is chosen automatically here."
        yield Finding("note", "slurm_name", "the file does not name its Slurm.", advice)


def _check_gpus(what: str, spec: GpuNodes, partitions: dict[str, Partition]) -> Iterator[Finding]:
    partition = partitions.get(spec.partition)
    if partition is None:
        text = f"there is no partition '{spec.partition}'.{suggest_nearest(spec.partition, partitions)}"
        yield Finding("wrong", f"{what}.partition", text, f"There are: {', '.join(partitions)}.")
        return
    if partition.state != "up":
        text = f"partition {partition.name} is {partition.state}: jobs wait."
        yield Finding("note", f"{what}.partition", text, "Ask the administrator.")
    findings = [*_check_time_max(what, spec, partition), *_check_nodes(what, spec, partition)]
    yield from findings
    if all(finding.level != "wrong" for finding in findings):
        per_node = f"{spec.per_node} x {spec.gres or 'cpu'}"
        text = f"partition {partition.name} has {spec.nodes} nodes with {per_node}, and cores and memory for them."
        yield Finding("ok", what, text)


def _check_time_max(what: str, spec: GpuNodes, partition: Partition) -> Iterator[Finding]:
    limit = partition.time_limit_min
    if limit is not None and (not spec.time_max or parse_minutes(spec.time_max) > limit):
        text = (
            f"{spec.time_max or 'unlimited'}, but partition {partition.name} ends jobs after {format_minutes(limit)}."
        )
        yield Finding("wrong", f"{what}.time_max", text, f"Write time_max: {format_minutes(limit)}")


def _check_nodes(what: str, spec: GpuNodes, partition: Partition) -> Iterator[Finding]:
    with_gres = [kind for kind in partition.kinds if _count_gres(kind, spec.gres)]
    if not with_gres:
        types = sorted({name for kind in partition.kinds for name in kind.gres})
        text = f"no node of partition {partition.name} has '{spec.gres}'.{suggest_nearest(spec.gres, types)}"
        yield Finding("wrong", f"{what}.gres", text, f"There are: {', '.join(types) or 'none'}.")
        return
    fitting = [kind for kind in with_gres if _satisfies(kind, spec.constraint)]
    if not fitting:
        features = sorted({name for kind in with_gres for name in kind.features})
        text = f"no such node meets '{spec.constraint}'.{suggest_nearest(spec.constraint, features)}"
        yield Finding("wrong", f"{what}.constraint", text, f"Their features: {', '.join(features) or 'none'}.")
        return
    most = max(_count_gres(kind, spec.gres) for kind in fitting)
    if spec.gres and most < spec.per_node:
        text = f"{spec.per_node}, but the nodes have at most {most} x {spec.gres}."
        yield Finding("wrong", f"{what}.per_node", text, f"Write per_node: {most}")
        return
    yield from _check_size(
        what, spec, [k for k in fitting if not spec.gres or _count_gres(k, spec.gres) >= spec.per_node]
    )


def _check_size(what: str, spec: GpuNodes, kinds: Sequence[NodeKind]) -> Iterator[Finding]:
    nodes, unavailable = sum(kind.nodes for kind in kinds), sum(kind.unavailable for kind in kinds)
    cpus, memory_gib = min(kind.cpus for kind in kinds), min(kind.memory_mib for kind in kinds) // 1024
    if spec.nodes > nodes:
        text = f"{spec.nodes}, but there are {nodes} such nodes."
        yield Finding("wrong", f"{what}.nodes", text, f"Write nodes: {nodes}")
    for key, each, has, unit in (
        ("cores_per_gpu", spec.cores_per_gpu, cpus, "cores of a node"),
        ("memory_gib_per_gpu", spec.memory_gib_per_gpu, memory_gib, "GiB that Slurm may allocate on a node"),
    ):
        if spec.per_node * each > has:
            most = has // spec.per_node
            advice = f"Write {key}: {most}" if most else "Lower per_node, or check whether Slurm's number is right."
            text = f"{each} x {spec.per_node} is more than the {has} {unit}."
            yield Finding("wrong", f"{what}.{key}", text, advice)
    if unavailable:
        yield Finding("note", what, f"{unavailable} of {nodes} nodes are down or drained now.")


def _count_gres(kind: NodeKind, gres: str) -> int:
    """Count a generic resource of a node. A name without a type matches all types, "" matches the node itself."""
    if not gres:
        return 1
    return sum(count for name, count in kind.gres.items() if gres in (name, name.partition(":")[0]))


def _satisfies(kind: NodeKind, constraint: str) -> bool:
    """Return whether a node has the features of a constraint like "a100", "a100&ib" or "a100|h100"."""
    alternatives = (re.findall(r"[\w.:-]+", part) for part in constraint.split("|"))
    return any(set(features) <= set(kind.features) for features in alternatives)


def _list_partitions(cluster: Cluster) -> list[str]:
    """Return all partitions that the file names, in order."""
    return list(dict.fromkeys(name for spec in cluster.gpus.values() for name in spec.partition.split(",")))


def _check_other_partitions(cluster: Cluster, partitions: dict[str, Partition]) -> Iterator[Finding]:
    named = _list_partitions(cluster)
    if others := [name for name in partitions if name not in named]:
        yield Finding("note", "gpus", f"Slurm has partitions that the file does not name: {', '.join(others)}.")


# The file against Slurm's settings


def _check_times(cluster: Cluster) -> Iterator[Finding]:
    default, delay = parse_minutes(cluster.time_default), cluster.signal_delay_s
    short = [hw for hw, spec in cluster.gpus.items() if spec.time_max and parse_minutes(spec.time_max) < default]
    if short:
        text = f"{cluster.time_default} is more than time_max of {', '.join(short)}."
        yield Finding("note", "time_default", text, "Jobs there get time_max.")
    least = min([default, *(parse_minutes(spec.time_max) for spec in cluster.gpus.values() if spec.time_max)])
    if delay > least * 60 // 4:
        text = f"{delay} s is more than a quarter of {format_minutes(least)}, the usual time of a job."
        yield Finding("note", "signal_delay_s", text, "Such a job is warned when a quarter of its time is left.")
    elif delay < 60:
        text = (
            f"{delay} s, but Slurm may warn up to 60 s earlier than requested: a delay below 60 s guarantees no time."
        )
        yield Finding("note", "signal_delay_s", text)


def _check_signals(cluster: Cluster, settings: dict[str, str]) -> Iterator[Finding]:
    """Without cgroups, Slurm signals all descendants, which kills the Apptainer process that serves the SIF."""
    if cluster.container.kind == "apptainer" and settings.get("ProctrackType") == "proctrack/linuxproc":
        advice = "Unpack the SIF (apptainer build --sandbox FOLDER SIF) and set container.image to the folder."
        yield Finding("note", "ProctrackType", "proctrack/linuxproc: a warned job would lose its SIF.", advice)


def _check_preemption(
    cluster: Cluster, settings: dict[str, str], partitions: dict[str, Partition]
) -> Iterator[Finding]:
    if settings["PreemptType"] == "preempt/none":
        yield Finding("ok", "PreemptType", "no job is preempted.")
        return
    is_warned = "send_user_signal" in settings["SlurmctldParameters"] + settings.get("PreemptParameters", "")
    kill_wait_s = int(settings["KillWait"].split()[0])
    groups: dict[tuple[str, int], list[str]] = {}
    for name in (name for name in _list_partitions(cluster) if name in partitions):
        groups.setdefault((partitions[name].preempt_mode, partitions[name].grace_s), []).append(name)
    for (mode, grace_s), names in groups.items():
        yield _describe_preemption(
            f"partition{'s' * (len(names) > 1)} {', '.join(names)}", mode, grace_s + kill_wait_s, is_warned
        )


def _describe_preemption(where: str, mode: str, left_s: int, is_warned: bool) -> Finding:
    if "CANCEL" in mode:
        text = f"{where}: a preempted job is cancelled, not requeued."
        return Finding("note", "PreemptMode", text, "Resume it: trainyard resume RUN")
    if "REQUEUE" not in mode:
        return Finding("ok", "PreemptMode", f"{where}: {mode}: no job is ended by preemption.")
    signal = "a warning (SIGUSR2) and " if is_warned else "SIGTERM and "
    text = f"{where}: a preempted job has {left_s} s between {signal}its end."
    if left_s >= 60:
        return Finding("ok", "PreemptMode", text)
    advice = "Steps since the last save are trained again: save often, or ask the administrator for a GraceTime."
    return Finding("note", "PreemptMode", text, advice)


def _check_restarts(settings: dict[str, str]) -> Iterator[Finding]:
    if settings["JobRequeue"] == "0":
        yield Finding("note", "JobRequeue", "off by default here.", "Each of our jobs requests it (sbatch --requeue).")
    expire = re.search(r"cred_expire=(\d+)", settings["AuthInfo"])
    wait_s = int(expire[1]) if expire else 120
    text = f"a job that is started again waits {wait_s + 1} s first (cred_expire in AuthInfo)."
    yield Finding("note" if wait_s > 60 else "ok", "AuthInfo", text)
    most = int(settings["MaxArraySize"]) - 1
    if most < 1:
        yield Finding("wrong", "MaxArraySize", "0: this Slurm takes no arrays, so no sweeps.", "Ask the administrator.")
    else:
        yield Finding("ok", "MaxArraySize", f"a sweep has at most {most} runs.")


def _check_accounting(cluster: Cluster, settings: dict[str, str]) -> Iterator[Finding]:
    if not settings["AccountingStorageType"].endswith("slurmdbd"):
        text = f"off: Slurm forgets a job {settings['MinJobAge']} after its end, and takes any account and QOS."
        yield Finding("note", "AccountingStorageType", text, "status and why also read the run folder.")
        return
    user = pwd.getpwuid(os.getuid()).pw_name
    try:
        allowed, rules = slurm.query_accounts(user), slurm.query_rules(user)
    except SlurmError as error:
        yield Finding("note", "account", f"not checked. {error}")
        return
    enforced = "associations" in settings["AccountingStorageEnforce"]
    level: Literal["note", "wrong"] = "wrong" if enforced else "note"
    accounts = ", ".join(allowed) or "none"
    of_kinds = [(f"gpus.{hw}.", spec) for hw, spec in cluster.gpus.items() if spec.account or spec.qos]
    for where, account, wanted in [
        ("", cluster.account, cluster.qos),
        *((where, spec.account or cluster.account, spec.qos or cluster.qos) for where, spec in of_kinds),
    ]:
        qos = {name for each, names in allowed.items() if account in ("", each) for name in names}
        if account and account not in allowed:
            text = f"user {user} may not charge '{account}'.{suggest_nearest(account, allowed)}"
            yield Finding(level, f"{where}account", text, f"Allowed: {accounts}.")
        elif not allowed:
            yield Finding(level, f"{where}account", f"user {user} has no account.", "Ask the administrator.")
        else:
            yield Finding("ok", f"{where}account", f"user {user} may charge {account or accounts}.")
        if wanted and wanted not in rules.qos:
            text = f"there is no QOS '{wanted}'.{suggest_nearest(wanted, rules.qos)}"
            yield Finding("wrong", f"{where}qos", text, f"There are: {', '.join(rules.qos)}.")
        elif wanted and wanted not in qos:
            text = f"user {user} may not use QOS '{wanted}'.{suggest_nearest(wanted, sorted(qos))}"
            yield Finding(level, f"{where}qos", text, f"Allowed: {', '.join(sorted(qos)) or 'none'}.")
    for hw, spec in cluster.gpus.items():
        limits = rules.find_limits(
            account=spec.account or cluster.account, qos=spec.qos or cluster.qos, partition=spec.partition
        )
        yield from _check_limits(f"gpus.{hw}", spec, limits, parse_minutes(cluster.time_default))


def _check_limits(what: str, spec: GpuNodes, limits: Sequence[Limit], default_min: int) -> Iterator[Finding]:
    """Compare the default request with the limits, and list the allowed numbers of GPUs and jobs."""
    time_min = min(default_min, parse_minutes(spec.time_max)) if spec.time_max else default_min
    demand = count_demand(spec, gpus=spec.per_node * spec.nodes, nodes=spec.nodes, time_min=time_min)
    for limit in limits:
        if limit.name.startswith("MaxSubmit") and limit.most < 2:
            text = f"{limit} of your jobs in the queue, but one submit may need two: one packs the data, one trains."
            yield Finding("note", what, text, "Pack first: trainyard pack JOB RAW OUT")
        elif find_exceeded([limit], demand):
            wait = describe_exceeded(limit, demand)
            if limit.name == "MaxWall":
                advice = f"Write time_max: {wait.options.removeprefix('--time ')}"
                yield Finding("wrong", f"{what}.time_max", f"{wait.text}.", advice)
            else:
                fits = f"At most: {wait.options}" if wait.options else "Name another account or QOS."
                yield Finding(
                    "note" if wait.options else "wrong",
                    what,
                    f"{limit}, of {demand.resources[limit.resource]} here.",
                    fits,
                )
