"""Selects the environment variables that reach Slurm's commands and a run's ranks: those listed here, and no other.

All others belong to the shell. RANK would make each rank another one, SQUEUE_STATES would make Slurm
forget jobs, PYTHONPATH or LD_PRELOAD would bring other code along.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

_ASKING = (
    *("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"),  # they find the Slurm that is meant
)
_TRAINING = (
    *_ASKING,
    *("BASH_FUNC_module%%", "BASH_FUNC_ml%%", "BASH_FUNC__module_raw%%", "BASH_FUNC__moduleraw%%"),  # for `setup`, ...
    *("MODULEPATH", "MODULESHOME", "MODULES_CMD", "LMOD_*"),  # ... but not which modules this shell has loaded
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TORCH_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5CCNAME"),
    *("APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR", "ENROOT_CONFIG_PATH", "ENROOT_CACHE_PATH"),
)
_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_*", "SLURM_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SUBMITIT_*", "PMI_*", "PMIX_*", "OMPI_*"),
    *("TRAINYARD_ATTEMPT", "TRAINYARD_MEETING", "TRAINYARD_TASK"),
)
_MAY_BE_SECRET = ("SLURM_JWT", "*_proxy", "*_PROXY")


def select_for_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Slurm's commands: none that filters or formats their output."""
    return _select(environ, _ASKING)


def select_for_ranks(environ: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return the variables of the shell that submits which reach a Slurm job and its ranks.

    Args:
        named: more of them, which the cluster file names in `variables`.
    """
    return _select(environ, (*_TRAINING, *named))


def drop_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return all variables but those by which another launcher says who a process is: for ranks of this machine."""
    return {name: value for name, value in environ.items() if _matches(name, _ASKING) or not _matches(name, _LAUNCHERS)}


def describe_passed(passed: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return the variables for a run's record: what may be a password or a key is only said to be set."""
    hidden = (*_MAY_BE_SECRET, *named)
    return {name: "(set)" if _matches(name, hidden) else value for name, value in sorted(passed.items())}


@contextlib.contextmanager
def replace_environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Let the block, and the processes that it starts, see this environment only."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _select(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if _matches(name, patterns)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
