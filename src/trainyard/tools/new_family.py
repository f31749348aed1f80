"""Writes a new family of jobs: a copy of one of the templates under a new name."""

import keyword
import re
from pathlib import Path

from trainyard.config.families import find_jobs
from trainyard.errors import UserError
from trainyard.files import create_folder

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
_NAME = "FAMILY"  # stands for the family's name, in the names of files and in text that is not Python


def list_templates() -> dict[str, str]:
    """Return the kinds of family, each with the sentence that its README begins with."""
    readmes = sorted(TEMPLATES.glob("*/README.md"))
    return {path.parent.name: path.read_text().split("\n\n")[1].replace("\n", " ") for path in readmes}


def create_family(jobs_dir: Path, family: str, kind: str) -> Path:
    """Write `jobs_dir/family/` and return it; it is there as a whole or not at all.

    Raises:
        UserError: the name is not one of a Python package, or a family or a preset has it already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family) or keyword.iskeyword(family):
        raise UserError(
            f"'{family}' cannot be the name of a family. Expected small letters, digits and _, as in birds."
        )
    folder = jobs_dir / family
    if folder.exists():
        raise UserError(f"{folder} exists already. Choose another name, or move it away.")
    taken = find_jobs(jobs_dir) if jobs_dir.is_dir() else {}
    for preset in (family, f"{family}_smoke"):
        if preset in taken:
            raise UserError(f"{taken[preset]}: a preset named '{preset}' exists already. Choose another name.")
    jobs_dir.mkdir(parents=True, exist_ok=True)
    (jobs_dir / "__init__.py").touch()
    with create_folder(folder) as partial:
        for source in sorted((TEMPLATES / kind).iterdir()):
            if source.is_file():
                text = source.read_text()
                target = partial / source.name.replace(_NAME, family)
                target.write_text(text if source.suffix == ".py" else text.replace(_NAME, family))
    return folder
