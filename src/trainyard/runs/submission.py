"""Reads the record of a run's last submission: the file decides the code and the place of a resume."""

import re
from pathlib import Path
from typing import Any

from trainyard.cluster.options import OPTIONS, find_problem
from trainyard.errors import UserError
from trainyard.files import load_json
from trainyard.runs.folder import SUBMISSION
from trainyard.text import quote_path

_TEXTS = ("scheduler", "job", "cluster_file", "hw", "code", "jobs", "submitted")
_COUNTS = ("gpus", "nodes", "time_min")
_PATHS = ("cluster_file", "code", "jobs")
_NOT_LOCAL = ("cluster_file", "hw")


def read_submission(run: Path) -> dict[str, Any]:
    """Return the record of a run's last submission.

    Raises:
        UserError: the file is missing or damaged, or has a value that no submission writes.
    """
    path = run / SUBMISSION
    try:
        submission = load_json(path)
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    else:
        problem = _find_problem(submission) if isinstance(submission, dict) else "is not a JSON object"
    if problem:
        raise UserError(
            f"{path}: {problem}, so how this run was submitted is not known. Restore the file from a copy, or resume "
            f"the run on this machine, with the code of this checkout: trainyard resume {quote_path(run)} --here"
        )
    checked: dict[str, Any] = submission
    return checked


def _find_problem(submission: dict[str, Any]) -> str:
    """Return an error, or ""."""
    is_local = submission.get("scheduler") == "local"
    for key in (*_TEXTS, *_COUNTS):
        value = submission.get(key)
        if is_local and key in _NOT_LOCAL:
            continue
        if key in _TEXTS and not isinstance(value, str):
            return f"'{key}' should be text, found {value!r}"
        if key in _COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return f"'{key}' should be a whole number from 1, found {value!r}"
        if key in _PATHS and not str(value).startswith("/"):
            return f"'{key}' should be an absolute path, found {value!r}"
    if not is_local and submission["scheduler"] != "slurm":
        return f"'scheduler' should be slurm or local, found {submission['scheduler']!r}"
    options = submission.get("options", {})
    if not isinstance(options, dict) or any(
        not isinstance(value, str) or name not in OPTIONS or find_problem(name, value)
        for name, value in options.items()
    ):
        return f"'options' should be options of sbatch with their values, found {options!r}"
    if not re.fullmatch(r"\d+(_\d+)?", submission["job"]):
        return f"'job' should be the number of a Slurm job or a process, found {submission['job']!r}"
    if not re.fullmatch(r"\d*", str(submission.get("packing", ""))):
        return f"'packing' should be the number of a Slurm job, found {submission['packing']!r}"
    return ""
