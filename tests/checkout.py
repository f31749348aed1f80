"""The files of this checkout, found without git: a container image and an unpacked archive have no repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src", "jobs", "containers", "slurm", "benchmarks", "docs", "tests", *("README.md", "CONTRIBUTING.md"))
_BUILT = {"__pycache__"}


def list_files(*places: str, ending: str = "") -> list[Path]:
    """Return the files below these places, sorted; those that Python and setuptools build are left out.

    Args:
        places: folders and files at the top of the checkout.
        ending: of the files' names; "": any.
    """
    found = []
    for place in map(ROOT.joinpath, places):
        assert place.exists(), f"{place}: has it moved?"
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            parts = path.relative_to(ROOT).parts
            is_built = any(part in _BUILT or part.endswith(".egg-info") or part.startswith(".") for part in parts)
            if path.is_file() and path.name.endswith(ending) and not is_built:
                found.append(path)
    return found
