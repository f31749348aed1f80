"""Notices that a run's own files are not as the run wrote them: its options, its environment record, its metrics.

config.yaml and env.json carry a digest of their content, so that a change is noticed at any time. Each checkpoint
records what both said, so that another run's file is noticed too, and both can be restored; and a digest of the metrics
up to it. An accepted change is an event.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.config.frozen import LOCATION, build_tree, hash_options, read_options, write_frozen
from trainyard.errors import ConfigError, FormatError, UserError
from trainyard.files import open_untrusted, raise_failed_disk
from trainyard.runs.events import ENDS, EVENTS_FILE, METRICS_FILE, STARTS, Line, append_event, read_lines
from trainyard.runs.folder import CONFIG, ENV_FILE, EnvChanged, read_env, select_fixed_env, write_env
from trainyard.runs.manifest import hash_fields, list_checkpoints
from trainyard.text import quote_path

FILES = "files"
"""Key of the record of the run's files in a checkpoint's `meta`."""
ACCEPTED = "accepted"
"""The event of accepting changed files, with a digest of each."""

_APPENDED = (METRICS_FILE, EVENTS_FILE, "log")
_MOST_NAMED = 3


def describe_files(
    options: tuple[Mapping[str, Any], Mapping[str, Any]], env: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a checkpoint's record of its run's files.

    Args:
        options: those that the run keeps, and those that may change: the values in use, not those in the file.
        env: what `select_fixed_env` returns.
        metrics: their `bytes` and `sha256` at this checkpoint.
    """
    return {"kept": dict(options[0]), "mutable": dict(options[1]), "env": dict(env), "metrics": dict(metrics)}


class Change(NamedTuple):
    """A file of a run that is not as the run wrote it."""

    path: Path
    problem: str
    advice: str  # the command to type
    can_resume: bool = False  # as it is: only lines for readers are missing

    def __str__(self) -> str:
        return f"{self.path}: {self.problem} {self.advice}"


def check_unchanged(run: Path) -> None:
    """Raise if a file of the run is not as the run wrote it. Reads the metrics once.

    Raises:
        UserError: names the difference, and the commands that restore or accept it.
    """
    if faults := [change for change in find_changes(run) if not change.can_resume]:
        raise UserError("\n".join(map(str, faults)))


def find_changes(run: Path) -> list[Change]:
    """Return the files that are not as the run wrote them. Reads the metrics once.

    Raises:
        UserError: the events are damaged.
    """
    if links := [run / name for name in _APPENDED if (run / name).is_symlink()]:
        problem = "it is a link, and writing to it would change a file elsewhere."
        return [Change(link, problem, f"Delete it: rm {quote_path(link)}") for link in links]
    events = read_lines(run / EVENTS_FILE)
    record = _find_record(run, events)
    accepted = {str(event.get(name)) for event in events if event.get("event") == ACCEPTED for name in _CHECKS}
    results = (check(run, record, accepted) for check in _CHECKS.values())
    return [change for change in results if change is not None]


def accept_changes(run: Path) -> None:
    """Declare the files of a run right as they are: later checks compare with them. For the run's owner only.

    Raises:
        UserError: one cannot be read, so it cannot be accepted.
    """
    record = _find_record(run, read_lines(run / EVENTS_FILE))
    options, _ = read_options(run / CONFIG)
    env = read_env(run, checked=False)
    digests = {CONFIG: _hash_kept(options, record), ENV_FILE: hash_fields(select_fixed_env(env))}
    if record:
        digests[METRICS_FILE] = _hash_metrics(run, record["metrics"]["bytes"])[0]
    append_event(run, {"event": ACCEPTED, **digests})
    write_frozen(build_tree(options), run / CONFIG)
    write_env(run, env)


def accept_options(run: Path, options: Mapping[str, Any]) -> None:
    """Declare options right that the run is about to get, all by dotted name. For the run's owner only."""
    record = _find_record(run, read_lines(run / EVENTS_FILE))
    append_event(run, {"event": ACCEPTED, CONFIG: _hash_kept(options, record)})


def restore_files(run: Path) -> None:
    """Write config.yaml and env.json again as the newest checkpoint recorded them. For the run's owner only.

    Raises:
        UserError: no checkpoint recorded them.
    """
    record = _find_record(run, read_lines(run / EVENTS_FILE))
    if not record:
        raise UserError(f"{run}: no checkpoint recorded its files. Restore them from a copy, or start a new run.")
    if _check_config(run, record, set()) is not None:
        write_frozen(build_tree({**record["kept"], **record["mutable"]}), run / CONFIG)
    if _check_env(run, record, set()) is not None:
        write_env(run, record["env"])


def _find_record(run: Path, events: list[Line]) -> dict[str, Any]:
    """Return the record in the newest checkpoint; empty if there is none.

    A run that resumed from an older checkpoint, because newer ones are damaged, has rewritten its metrics since.
    """
    steps = [event["step"] for event in events if event.get("event") in ("checkpoint", *STARTS)]
    entries = [entry for entry in list_checkpoints(run / "checkpoints") if entry.problem is None]
    newest = next((entry for entry in entries if not steps or entry.step <= steps[-1]), None)
    if newest is None:
        return {}
    record: dict[str, Any] = newest.meta.get(FILES, {})
    if not _is_record(record):
        raise UserError(f"{newest.path}: its manifest does not describe files as Trainyard does.")
    deciding = (e for e in reversed(events) if e.get("event") in STARTS or (e.get("event") in ENDS and "metrics" in e))
    last = next(deciding, {"step": -1})
    # Test scores follow the last checkpoint; a resume may have found fewer lines than it recorded.
    final = last.get("metrics") if last["step"] >= newest.step else None
    return {**record, "metrics": final} if _is_record({**record, "metrics": final}) else record


def _is_record(record: Any) -> bool:
    metrics = record.get("metrics") if isinstance(record, dict) else None
    has_metrics = isinstance(metrics, dict) and type(metrics.get("bytes")) is int and metrics["bytes"] >= 0
    return has_metrics and all(isinstance(record.get(name), dict) for name in ("kept", "mutable", "env"))


def _check_config(run: Path, record: Mapping[str, Any], accepted: set[str]) -> Change | None:
    path = run / CONFIG
    if not record and not path.exists():
        return None  # reading it raises
    try:
        options, stated = read_options(path)
    except ConfigError as error:
        raise_failed_disk(error, path)
        return Change(path, str(error).removeprefix(str(path)).lstrip(":, "), _advise(run, record, can_accept=False))
    kept, mutable = record.get("kept", {}), record.get("mutable", {})
    is_intact = stated == hash_options(options)
    expected = kept if is_intact else {**kept, **mutable}
    differing = [name for name in expected if name in options.keys() - {LOCATION} and options[name] != expected[name]]
    if differing and not (is_intact and _hash_kept(options, record) in accepted):
        shown = [f"{name} is {options[name]}, not {expected[name]}" for name in differing[:_MOST_NAMED]]
        more = f", and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        problem = f"was changed since the newest checkpoint: {'; '.join(shown)}{more}."
        return Change(path, problem, _advise(run, record))
    if not is_intact:
        return Change(path, "was changed: its options do not match the digest above them.", _advise(run, record))
    return None


def _check_env(run: Path, record: Mapping[str, Any], accepted: set[str]) -> Change | None:
    path = run / ENV_FILE
    if not record and not path.exists():
        return None
    try:
        fixed = select_fixed_env(read_env(run))
    except FormatError:
        raise
    except UserError as error:
        raise_failed_disk(error, path)
        can_accept = isinstance(error, EnvChanged)
        return Change(path, str(error).removeprefix(f"{path}: "), _advise(run, record, can_accept=can_accept))
    if not record or fixed == record["env"] or hash_fields(fixed) in accepted:
        return None
    names = [name for name in record["env"] | fixed if fixed.get(name) != record["env"].get(name)]
    problem = f"was changed since the newest checkpoint: {', '.join(names)} differ."
    return Change(path, problem, _advise(run, record))


def _check_metrics(run: Path, record: Mapping[str, Any], accepted: set[str]) -> Change | None:
    if not record:
        return None
    expected = record["metrics"]
    try:
        digest, size = _hash_metrics(run, expected["bytes"])
    except OSError as error:
        raise_failed_disk(error, run / METRICS_FILE)
        problem = f"cannot be read: {error.strerror}."
        moved = f"mv {quote_path(run / METRICS_FILE)} {quote_path(f'{run / METRICS_FILE}.old')}"
        return Change(run / METRICS_FILE, problem, f"Restore it from a copy, or resume without it: {moved}")
    if digest == expected["sha256"] or digest in accepted:
        return None
    if size < expected["bytes"]:
        problem = f"is cut short or gone: {size} bytes of {expected['bytes']} are there."
        advice = f"Restore it from a copy; or resume without the lines: trainyard resume {quote_path(run)}"
        return Change(run / METRICS_FILE, problem, advice, can_resume=True)
    problem = (
        f"was changed: its first {expected['bytes']} bytes had SHA-256 {str(expected['sha256'])[:12]}.. when the run "
        f"last recorded it, now it has SHA-256 {digest[:12]}.."
    )
    return Change(run / METRICS_FILE, problem, _advise(run, {}))


_CHECKS = {CONFIG: _check_config, ENV_FILE: _check_env, METRICS_FILE: _check_metrics}


def _hash_kept(options: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return hash_options({name: options.get(name) for name in record["kept"]}) if record else ""


def _hash_metrics(run: Path, count: int) -> tuple[str, int]:
    """Return the SHA-256 of the first `count` bytes of the metrics, and how many there are."""
    digest, size = hashlib.sha256(), 0
    if not (run / METRICS_FILE).exists():
        return digest.hexdigest(), 0
    with open_untrusted(run / METRICS_FILE) as file:
        while chunk := file.read(min(2**20, count - size)):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _advise(run: Path, record: Mapping[str, Any], *, can_accept: bool = True) -> str:
    command = f"trainyard resume {quote_path(run)} --changed-files"
    restore = f"Restore it from the newest checkpoint: {command} restore" if record else "Restore it from a copy"
    return f"{restore}; or resume with it as it is: {command} accept" if can_accept else restore
