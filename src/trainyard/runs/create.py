"""Creates the folder of a run, with its options and a record of what else its results depend on. Loads no torch."""

import errno
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.config.compose import save_config
from trainyard.config.settings import TrainConfig
from trainyard.environment import NO_VARIABLES, THIS_CODE, collect_environment, find_checkout
from trainyard.errors import UserError
from trainyard.files import create_common_folder, name_full_disk, rename, restrict_umask, share_folder
from trainyard.runs.folder import CONFIG, DIFF, check_name, write_env
from trainyard.text import join_names, quote_path


@dataclass(frozen=True)
class Origin:
    """Code and environment that the results of new runs depend on: the same for runs that are created together."""

    checkout: Mapping[str, Any]  # as `find_checkout` describes it
    diff: bytes  # of the checkout against its commit
    environment: Mapping[str, Any]  # as `collect_environment` returns it

    @classmethod
    def collect(cls, environ: Mapping[str, str] = NO_VARIABLES, code: Path = THIS_CODE) -> "Origin":
        """Ask git and the machine.

        Args:
            environ: environment variables; only a few known ones are recorded.
            code: any folder of the git checkout to record.
        """
        checkout, diff = find_checkout(code)
        return cls(checkout, diff, collect_environment(checkout, environ))


def create_run(
    root: Path,
    config: TrainConfig,
    *,
    name: str | None = None,
    origin: Origin | None = None,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
    group: str = "",
) -> Path:
    """Create the folder of a new run and return it. It is complete as soon as it is visible.

    The path is `<root>/<job>/<YYYYmmdd-HHMMSS>-<commit>` (local time; 7 digits of the commit, or "nogit"), with
    -2, -3, ... appended if it is taken. The folder contains config.yaml (every option), env.json
    (`environment_record`) and, if the checkout differs from its commit, code.diff.

    Args:
        root: folder of all runs; created if missing.
        name: name of the folder; default: time and commit.
        origin: None: it is collected, without environment variables.
        chosen: further sections of env.json: earlier choices, with their reasons.
        group: whose members may add files to the run and delete checkpoints; "": only its owner can change it.

    Raises:
        UserError: `name` is not a plain file name, a run already has it, or this user is not in `group`.
    """
    check_name(name, of="run")
    origin = origin or Origin.collect()
    for folder in (root, root / config.job):
        create_common_folder(folder, group=group)
    with restrict_umask():
        return write_run(root, config, name=name, origin=origin, chosen=chosen, group=group)


def write_run(
    root: Path,
    config: TrainConfig,
    *,
    name: str | None,
    origin: Origin,
    chosen: Mapping[str, Mapping[str, Any]] | None,
    group: str,
) -> Path:
    """Create the folder of a run as `create_run` does, in `<root>/<job>`, which exists.

    For several threads at once, most of whose time is waiting for the disk. The umask, which they share, is
    `restrict_umask`'.
    """
    temporary = root / config.job / f".new-{secrets.token_hex(8)}"
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    with name_full_disk(temporary.parent):
        temporary.mkdir()
        try:
            save_config(config, temporary / CONFIG)
            write_env(temporary, {**origin.environment, "created": created, **(chosen or {})}, durable=False)
            if origin.diff:
                _write_diff(temporary / DIFF, origin.diff, masked=origin.checkout.get("masked", []))
            if group:
                (temporary / "checkpoints").mkdir()
                share_folder(temporary / "checkpoints", group, sticky=False)
                share_folder(temporary, group)
            default = f"{datetime.now():%Y%m%d-%H%M%S}-{(origin.checkout['commit'] or 'nogit')[:7]}"
            return _move_into_place(temporary, name, default=default)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _write_diff(path: Path, diff: bytes, *, masked: Sequence[str]) -> None:
    """Write the diff for the run's owner alone: uncommitted code may not be meant for others."""
    note = "".join(f"# masked, because it looks like a secret: {place}\n" for place in masked)
    path.touch(mode=0o600)
    path.write_bytes(note.encode() + diff)
    if masked:
        logger.warning("{}: masked what looks like secrets: {}", path.name, join_names(list(masked)))


def _move_into_place(temporary: Path, name: str | None, *, default: str) -> Path:
    """Rename a finished folder to its final name. Renaming onto a non-empty folder fails, so no run is replaced."""
    number = 1
    while True:
        target = temporary.with_name(name or (default if number == 1 else f"{default}-{number}"))
        try:
            rename(temporary, target)
            return target
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if name:
            raise UserError(
                f"{target}: there is a run of this name. Choose another, or resume it: "
                f"trainyard resume {quote_path(target)}"
            )
        number += 1
