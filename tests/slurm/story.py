"""Collects what a test types and what is printed, for a page of docs/ that the test itself writes."""

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tests.slurm.conftest import Lab

PAGE = "TRAINYARD_STORY"
"""Environment variable with the page to write; without it, the commands are typed and nothing is written."""

_COLUMNS = 120


class Story:
    """Commands with their output, and the sentences between them."""

    def __init__(self, lab: Lab, names: Mapping[str, str]) -> None:
        """Take what stands for folders of this machine on the page, by their paths; a longer path comes first."""
        self._lab, self._names, self._parts = lab, names, list[str]()

    def tell(self, text: str) -> None:
        """Add a sentence or a heading."""
        self._parts.append(text if text.startswith("#") else textwrap.fill(text, _COLUMNS, break_on_hyphens=False))

    def trainyard(self, *words: str) -> None:
        """Type a `trainyard` command."""
        self.show(" ".join(["trainyard", *words]), self._lab.run(sys.executable, "-m", "trainyard", *words))

    def show(self, typed: str, printed: str) -> None:
        """Add a command and what it printed."""
        text = self.hide_folders(f"$ {typed}\n{printed}".rstrip())
        self._parts.append(f"```text\n{re.sub(r' +$', '', text, flags=re.MULTILINE)}\n```")

    def hide_folders(self, text: str) -> str:
        """Return text without folders of this machine."""
        for path, name in self._names.items():
            text = text.replace(path, name)
        return text

    def write(self) -> None:
        """Write the page, if one is wanted."""
        if page := os.environ.get(PAGE):
            Path(page).write_text("\n\n".join(self._parts) + "\n")
