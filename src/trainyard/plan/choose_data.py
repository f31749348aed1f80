"""Chooses the data of a job when none was typed, with the reason, and counts the samples before anything starts.

In this order, and the first that is given decides:

1. the command line: `data.path=FOLDER`, `data.synthetic=N`, `--synthetic`;
2. a root of the job, in the user's trainyard.yaml, then in the cluster file;
3. the preset itself;
4. a root of the job's family, in the same two files.

A root is an entry of `data:` there: a folder of raw files or of shards, or the word `synthetic`. Loads no torch.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.cluster.description import SYNTHETIC, Cluster, load_user_file
from trainyard.config.compose import compose
from trainyard.config.families import find_jobs
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import count_samples, describe_synthetic, explain_no_sample, suggest_first_try
from trainyard.errors import UserError
from trainyard.runs.trust import require_own_file
from trainyard.text import find_nearest, join_names, shorten_path

USER_FILE = "trainyard.yaml"


@dataclass(frozen=True)
class DataChoice:
    """The data of a job, before packing: packing on the node, or in a separate job, begins from this."""

    config: TrainConfig  # with `data.path` and `data.synthetic` as chosen
    value: str  # for people: the folder, or how many samples are synthesized; "": there is none
    reason: str  # why this; of no data: where a root was looked for
    sets_synthetic: bool = False  # whether `data.synthetic` is part of the choice

    @property
    def overrides(self) -> list[str]:
        """Return the options that make another run of this job train on the same data, as typed."""
        data = self.config.data
        synthetic = [f"data.synthetic={data.synthetic}"] if self.sets_synthetic else []
        return [f"data.path={data.path}", f"data.cache={data.cache}", *synthetic]


@dataclass(frozen=True)
class _Roots:
    """The data roots of one file."""

    file: str  # as the user knows it
    by_name: Mapping[str, str]
    exists: bool = True

    def describe(self) -> str:
        """Name the jobs that have a root here."""
        if not self.exists:
            return f"{self.file} does not exist"
        return (
            f"{self.file} has roots of: {join_names(list(self.by_name))}" if self.by_name else f"{self.file} has none"
        )


def choose_data(
    config: TrainConfig,
    *,
    overrides: Sequence[str],
    wants_synthetic: bool,
    cluster: Cluster | None,
    jobs_dir: Path,
    environ: Mapping[str, str],
) -> DataChoice:
    """Return the data of a job that was composed with these overrides; its value is "" if nothing names any.

    Args:
        wants_synthetic: whether --synthetic was typed.
        cluster: None: the job runs on this machine.
        environ: says where the user's own file is.

    Raises:
        UserError: options contradict each other, a file of roots is invalid or not the user's own, or nothing gives
            the number of samples that this family synthesizes.
    """
    typed = {override.partition("=")[0] for override in overrides}
    if wants_synthetic:
        if "data.path" in typed and config.data.path:
            raise UserError(
                f"--synthetic (make: SYNTHETIC=1) and data.path={config.data.path} were both typed. Leave one out."
            )
        return _choose_synthetic(config, jobs_dir, "requested")
    if "data.path" in typed and config.data.path:
        return DataChoice(config, config.data.path, "typed")
    if "data.synthetic" in typed and config.data.synthetic and not config.data.path:
        return DataChoice(config, describe_synthetic(config.data.synthetic), "typed")
    files = _read_roots(cluster, environ)
    _check_root_names(files, config, jobs_dir)
    for name in (config.job, config.family):
        for roots in files:
            if name in roots.by_name:
                reason = f"{roots.file}, data.{name}"
                if roots.by_name[name] == SYNTHETIC:
                    return _choose_synthetic(config, jobs_dir, reason)
                data = replace(config.data, path=roots.by_name[name])
                return DataChoice(replace(config, data=data), data.path, reason)
        if name == config.job and (config.data.path or config.data.synthetic):
            return DataChoice(
                config, config.data.path or describe_synthetic(config.data.synthetic), f"stated by preset {config.job}"
            )
    return DataChoice(config, "", "; ".join(roots.describe() for roots in files))


def require_data(choice: DataChoice, *, jobs_dir: Path, typed: Sequence[str]) -> int:
    """Return the number of samples that a job would train on; of raw files, they are listed but not opened.

    Args:
        typed: the words of the command, for suggestions.

    Raises:
        UserError: there is no data, the folder is missing or has no sample, or is packed for another family.
    """
    config = choice.config
    require_chosen_data(choice, jobs_dir=jobs_dir, typed=typed)
    if not config.data.path:
        return config.data.synthetic
    folder = Path(config.data.path)
    if not folder.exists():
        raise UserError(
            f"{folder}: no such folder ({choice.reason}). Name a folder of raw files or of shards: DATA=FOLDER"
        )
    try:
        count = count_samples(config, jobs_dir)
    except UserError as error:
        raise UserError(f"{error} (Data: {choice.reason}. Nothing was submitted.)") from None
    if not count:
        raise UserError(
            f"{folder} ({choice.reason}): {explain_no_sample(folder, config, jobs_dir)} Nothing was submitted. "
            f"Type: {_format_command(typed, 'data.path=FOLDER')}"
        )
    return count


def require_chosen_data(choice: DataChoice, *, jobs_dir: Path, typed: Sequence[str]) -> None:
    """Raise a UserError if there is no data; its last two lines are commands to type."""
    config = choice.config
    if not choice.value:
        raise UserError(
            f"{config.job} needs data: data.path=FOLDER (make: DATA=FOLDER), or --synthetic (make: SYNTHETIC=1) for a "
            "few synthetic samples, enough for a smoke test. Neither was typed, and no file names a "
            f"root of {config.job} or {config.family} under data: ({choice.reason}). The folder's layout: "
            f"{jobs_dir / config.family}/README.md.{suggest_first_try(config, jobs_dir)} Type one of these:\n"
            f"  {_format_command(typed, 'data.path=FOLDER')}\n  {_format_command(typed, '--synthetic')}"
        )


def find_user_file(environ: Mapping[str, str]) -> Path:
    """Return where the user's own file would be: in XDG_CONFIG_HOME (if absolute, as its specification says)."""
    stated = Path(environ.get("XDG_CONFIG_HOME", ""))
    return (stated if stated.is_absolute() else Path.home() / ".config") / USER_FILE


# Roots


def _read_roots(cluster: Cluster | None, environ: Mapping[str, str]) -> list[_Roots]:
    path = find_user_file(environ)
    exists = os.path.lexists(path)
    if exists:
        if not path.is_file():
            raise UserError(f"{path}: is no regular file. Expected YAML with data roots, or nothing. Remove it.")
        require_own_file(path, purpose="which data jobs train on")
    roots = [_Roots(str(path), load_user_file(path).data if exists else {}, exists)]
    return roots if cluster is None else [*roots, _Roots(str(shorten_path(cluster.path)), cluster.data)]


def _check_root_names(files: Sequence[_Roots], config: TrainConfig, jobs_dir: Path) -> None:
    """Refuse the name of a root that is no job, but nearly this one's: its root would be passed over in silence.

    Other names may be jobs of another folder of jobs: one user, and one cluster, may have several.
    """
    known = find_jobs(jobs_dir)
    names = {*known, *(path.parent.name for path in known.values())}
    for roots in files:
        for name in roots.by_name:
            near = [] if name in names else find_nearest(name, [config.job, config.family])
            if near:
                raise UserError(
                    f"{roots.file}: data.{name}: there is no job or family '{name}'. Nearest: {near[0]}. Correct it; "
                    "all jobs: trainyard jobs"
                )


# Synthetic data


def _choose_synthetic(config: TrainConfig, jobs_dir: Path, reason: str) -> DataChoice:
    count, why = (config.data.synthetic, "") if config.data.synthetic else _choose_synthetic_count(config, jobs_dir)
    chosen = replace(config, data=replace(config.data, path="", synthetic=count))
    return DataChoice(chosen, describe_synthetic(chosen.data.synthetic), f"{reason}{why}", sets_synthetic=True)


def _choose_synthetic_count(config: TrainConfig, jobs_dir: Path) -> tuple[int, str]:
    """Return how many samples to synthesize for a preset that does not say: few, because they teach little."""
    presets = find_jobs(jobs_dir)
    for preset in (f"{config.family}_demo", f"{config.family}_smoke"):
        if preset in presets and (count := compose(preset, [], jobs_dir).data.synthetic):
            return count, f"; as many as {preset}, data.synthetic=N makes another number"
    raise UserError(
        f"{config.job}: the number of samples to synthesize is unknown: no preset {config.family}_demo or "
        f"{config.family}_smoke states data.synthetic. Type the number: data.synthetic=N"
    )


# Messages


def _format_command(typed: Sequence[str], word: str) -> str:
    """Return the command that was typed, with other data."""
    kept = [part for part in typed if part != "--synthetic" and not part.startswith(("data.path=", "data.synthetic="))]
    return shlex.join(["trainyard", *kept, word])
