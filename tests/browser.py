"""Opens pages in headless Chromium: how wide they are, which colours they have, and how they look.

python -m tests.browser runs/fingerprint_demo/first/report.html docs/page.png    # the image in README
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
NEEDS_CHROMIUM = "needs Chromium: apt-get install chromium"
WIDTHS = {"phone": 390, "screen": 1280}

_MEASURE = """<script>
addEventListener("load", () => {
  const inside = document.getElementById("page").contentDocument, root = inside.documentElement;
  const wide = [...inside.querySelectorAll("body *")].filter(
    (e) => !e.closest(".scroll, pre, svg") && e.getBoundingClientRect().right > root.clientWidth + 1);
  const headline = inside.querySelector(".score") ?? inside.querySelector(".verdict") ?? inside.querySelector("h1");
  const place = headline.getBoundingClientRect();
  document.body.dataset.measured = JSON.stringify({
    width: root.clientWidth, content: root.scrollWidth, wide: wide.map((e) => e.outerHTML.slice(0, 120)),
    headline: headline.textContent, top: place.top, bottom: place.bottom,
    paper: inside.defaultView.getComputedStyle(inside.body).backgroundColor,
    ink: inside.defaultView.getComputedStyle(inside.body).color,
  });
});
</script>"""


@dataclass(frozen=True)
class Seen:
    """What a person with this window sees of a page. Lengths are in CSS pixels."""

    width: int
    content: int  # how wide the page is; more than `width`: it scrolls sideways
    wide: list[str]  # elements that reach beyond the window
    headline: str
    top: float  # of the headline
    bottom: float
    paper: str  # the background, as rgb()
    ink: str


def look(page: Path, *, width: int, height: int = 844, dark: bool = False, screenshot: Path | None = None) -> Seen:
    """Open a page in a frame of this width, because Chromium's own window cannot be as narrow as a phone's.

    Args:
        screenshot: where to put a PNG of the upper 3,000 pixels of the page.
    """
    content = page.read_text().replace("&", "&amp;").replace('"', "&quot;")
    framed = page.with_name(f"framed-{page.name}")
    frame = f'<iframe id="page" style="border:0;width:{width}px;height:{3000 if screenshot else height}px" srcdoc="'
    framed.write_text(f'<!DOCTYPE html><body style="margin:0">{frame}{content}"></iframe>{_MEASURE}</body>')
    common = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=3000",
    ]
    common += [
        f"--user-data-dir={framed.with_suffix('.profile')}",
        f"--blink-settings=preferredColorScheme={int(not dark)}",
    ]
    ran = subprocess.run(
        [*common, "--dump-dom", framed.as_uri()], capture_output=True, text=True, check=True, timeout=60
    )
    found = re.search(r'data-measured="([^"]*)"', ran.stdout)
    assert found, ran.stderr[-500:]
    if screenshot:
        size = f"--window-size={max(width, 500)},3000"
        subprocess.run([*common, size, f"--screenshot={screenshot}", framed.as_uri()], capture_output=True, check=True)
    return Seen(
        **json.loads(found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    )


if __name__ == "__main__":
    look(Path(sys.argv[1]).resolve(), width=WIDTHS["screen"], screenshot=Path(sys.argv[2]))
    from PIL import Image

    with Image.open(sys.argv[2]) as whole:
        whole.crop((0, 0, WIDTHS["screen"], 1100)).convert("P", palette=Image.Palette.ADAPTIVE).save(sys.argv[2])
