"""Which folder of families a run was started with, so that nobody has to name it again."""

from pathlib import Path
from typing import NamedTuple

from loguru import logger

from trainyard.choice import Choice
from trainyard.config.families import Root, find_own_families, list_roots
from trainyard.config.frozen import read_frozen
from trainyard.errors import UserError
from trainyard.runs.folder import CONFIG, read_env

OWN = "Trainyard's own"
"""Stands for their path, which differs between a checkout and a wheel, and between machines."""
_CHOICE = "families"


class RecalledFamilies(NamedTuple):
    """The folder of families for a run that exists."""

    folder: Path
    is_named: bool  # by the run alone: one would not use it without its env.json


def describe_families(root: Root) -> dict[str, Choice[str]]:
    """Return the folder of families that a new run is started with, for its record, with the reason."""
    own = find_own_families()
    is_own = own.is_dir() and own.samefile(root.folder)
    return {_CHOICE: Choice(OWN if is_own else str(root.folder.resolve()), root.reason)}


def find_families(run: Path) -> RecalledFamilies:
    """Return the folder of families that a run was started with; the first that has its family if it recorded none.

    Raises:
        UserError: the folder or the family in it is gone, and no folder that one uses without naming it has the family.
    """
    frozen = read_frozen(run / CONFIG)
    family = str(frozen.get("family", "")) if isinstance(frozen, dict) else ""  # "": reading it in full reports that
    usual = [root for root in list_roots() if (root / family / "config.py").is_file()]
    stated = read_env(run).get("choices", {}).get(_CHOICE, {}).get("value", "")
    if not isinstance(stated, str) or not stated:
        return RecalledFamilies((usual or list_roots())[0], is_named=False)
    folder = find_own_families() if stated == OWN else Path(stated)
    if (folder / family / "config.py").is_file():
        is_usual = stated == OWN or any(root.samefile(folder) for root in usual)
        return RecalledFamilies(folder, is_named=not is_usual)
    if not usual:
        raise UserError(
            f"{run}: was started with the families in {folder}, where there is no '{family}' now. Name the folder that "
            "has it: --jobs DIR"
        )
    logger.info("families: {} has no {} any more, so that in {} is used", folder, family, usual[0])
    return RecalledFamilies(usual[0], is_named=False)
