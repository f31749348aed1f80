"""Writes the transcripts of docs/quick-start.md again: python -m tests.quick_start DATA

DATA has the folders of that page, `prints`, `twins`, `speech`, `objects` and `catalogue`, with small sets of one's own
choice. Each family trains as the page says, in a folder that is deleted afterwards. The sentence before a transcript
names its set: read them.
"""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.checkout import ROOT

PAGE = ROOT / "docs" / "quick-start.md"
FOLDERS = {
    "fingerprint_few": "prints",
    "twins_few": "twins",
    "antispoof_few": "speech",
    "tinydet_few": "objects",
    "pricing_few": "catalogue",
}
WIDTH = 108  # of a line of a transcript
_LEFT_OUT = ("further", "trained", "speed", "best", "next:")


def shorten(screen: str) -> str:
    """Return the last screen of a run as the page shows it: without five of its rows, folded, indented."""
    lines, is_left_out = [], False
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    for line in screen.splitlines():
        if not line.startswith(" "):
            is_left_out = line.split()[0] in _LEFT_OUT
        if not is_left_out:
            column = re.match(r" +|\S+ +", line)
            wrapper.subsequent_indent = " " * len(column[0]) if column else ""
            lines += wrapper.wrap(line)
    return textwrap.indent("\n".join(lines) + "\n", "    ")


def find_transcript(page: str, job: str) -> re.Match[str]:
    """Find the transcript of a job."""
    [found] = re.finditer(rf"^    {job}  done\n(?:    .*\n)+", page, re.MULTILINE)
    return found


def main(data: Path) -> None:
    """Train each family, and write the page."""
    for job, folder in FOLDERS.items():
        with tempfile.TemporaryDirectory() as here:
            words = [sys.executable, "-m", "trainyard", "run", job, f"data.path={data.absolute() / folder}"]
            done = subprocess.run(
                [*words, "--jobs", str(ROOT / "jobs")], cwd=here, check=True, stdout=subprocess.PIPE, text=True
            )
        page = PAGE.read_text()
        place = find_transcript(page, job)
        PAGE.write_text(page[: place.start()] + shorten(done.stdout) + page[place.end() :])
        print(f"{job}: written", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
