"""Maps HW=a100 to a stage of the Dockerfile. Standard library only, because `make image` needs no setup."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine import Mistake

HERE = Path(__file__).resolve().parent
TABLE = HERE / "targets.yaml"


@dataclass(frozen=True)
class Target:
    """A container image, named after its stage in the Dockerfile."""

    name: str
    sm: tuple[int, ...]  # compute capabilities with kernels, major * 10 + minor
    min_driver: str  # "": any
    max_driver: str  # newest branch; "": any
    build_gib: int  # free disk space that a build needs

    @property
    def lock(self) -> Path:
        """Return its requirements file."""
        return HERE / f"{self.name}.lock"


def find_target(word: str) -> Target:
    """Return the target that a word names: a target, a card, or the first part of a card's name ("a100").

    Raises:
        Mistake: no card and no target has that name.
    """
    table = read_table(TABLE)
    names = table["sm"]
    if word in names:
        return _target(word, table)
    meant = {name for card, name in table["cards"].items() if card == word or card.startswith(f"{word}-")}
    if word and len(meant) == 1:
        return _target(meant.pop(), table)
    known = sorted({card.split("-")[0] for card in table["cards"]} | set(names))
    near = difflib.get_close_matches(word, [*known, *table["cards"]], n=1)
    nearest = f" Nearest: {near[0]}." if near else ""
    raise Mistake(
        f"HW={word}: no such card or target.{nearest} There are: {', '.join(known)}. "
        "Another NVIDIA card: cuda13 from compute capability 8.0 on, cuda12 for 7.5, cuda12-pascal for older ones."
    )


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """Read sections of `  name: value`; a line that is neither is a mistake in the file."""
    table: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if heading := re.fullmatch(r"([a-z_]+):", line):
            section = table.setdefault(heading[1], {})
        elif entry := re.fullmatch(r"  ([a-z0-9-]+): ([\w. -]+)", line):
            section[entry[1]] = entry[2]
        else:
            raise Mistake(f"{path}:{number}: expected `section:` or `  name: value`, found: {line}")
    return table


def read_entries(lock: str) -> list[tuple[str, str]]:
    """Return the entries of a lock's text: the name, and all lines about it."""
    entries = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.MULTILINE)[1:]
    return [(entry.partition("==")[0], entry) for entry in entries]


def _target(name: str, table: Mapping[str, Mapping[str, str]]) -> Target:
    values = {
        section: "" if table[section][name] == "none" else table[section][name]
        for section in table
        if section != "cards"
    }
    return Target(
        name=name,
        sm=tuple(int(word) for word in values["sm"].split()),
        min_driver=values["min_driver"],
        max_driver=values["max_driver"],
        build_gib=int(values["build_gib"]),
    )
