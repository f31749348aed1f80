"""Links between our pages lead somewhere: files, headings, and files that make and the pages name."""

import re
from pathlib import Path

import pytest

from tests.checkout import PLACES, ROOT, list_files
from tests.commands_page import build_options, build_page
from tests.diagrams import draw_all
from tests.quick_start import FOLDERS, WIDTH, find_transcript, shorten
from trainyard.report.headline import Baseline, judge_metric
from trainyard.runs.events import name_interval_ends
from trainyard.runs.state import State


def find_broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue  # another site's: no network in tests
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and heading not in list_anchors(file)):
            broken.append(target)
    return broken


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that hosting sites make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_page_leads_somewhere():
    pages = list_files(*PLACES, "CHANGELOG.md", ending=".md")
    assert len(pages) > 15, f"only {len(pages)} pages found"
    broken = {str(page.relative_to(ROOT)): find_broken_links(page) for page in pages}
    assert {name: links for name, links in broken.items() if links} == {}


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One heading\n[x](b.md) [y](#one-heading) [z](#none) [w](https://example.org)\n")
    assert find_broken_links(tmp_path / "a.md") == ["b.md", "#none"]


def test_what_the_first_page_shows_of_a_bad_day_is_what_a_test_saw():
    shown = re.search(r"^    \$ trainyard why .*?(?=^\S)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    lines = [line.removeprefix("    ") for line in shown[0].rstrip().splitlines()]
    assert "\n".join(lines) in (ROOT / "docs" / "bad-day.md").read_text(), "copy the last `why` of docs/bad-day.md"


def judge_transcripts(page: str) -> list[tuple[str, str]]:
    """Return the verdict of each transcript of a page, and the one that the program gives of its numbers."""
    score, more = r"    (\S+) +(\S+)(?: \[(\S+), (\S+)\])?\n", r"((?:     .*\n)+)    verdict +((?:.*\n)+?)    took "
    verdicts = []
    for metric, value, low, high, place, verdict in re.findall(f"^{score}{more}", page, re.MULTILINE):
        order, name, rival = re.findall(
            r"(lower|higher) is better; (.+?) ([\d.]+)(?=[ ;,]|$)", " ".join(place.split())
        )[0]
        ends = zip(name_interval_ends(metric), (float(low), float(high)), strict=True) if low else [("draws_lost", 1.0)]
        line, mode = {metric: float(value), **dict(ends)}, {"lower": "min", "higher": "max"}[order]
        judged = judge_metric(line, metric, mode=mode, baseline=Baseline(name, float(rival)))
        verdicts.append((" ".join(verdict.split()), judged))
    return verdicts


def test_the_verdicts_of_the_quick_start_follow_from_its_numbers():
    page = (ROOT / "docs" / "quick-start.md").read_text()
    verdicts = judge_transcripts(page)
    assert len(verdicts) == 5 and all(written == judged for written, judged in verdicts), verdicts
    planted = judge_transcripts(re.sub(r"^(    ap +\S+ \[)", r"\1-", page, flags=re.MULTILINE))
    assert [written == judged for written, judged in planted] == [True, True, True, False, True]


def test_a_transcript_is_the_last_screen_of_a_run_without_five_of_its_rows():
    screen = [
        "pricing_few  done",
        "smape  1.0",
        "       on test; " + "lower is better " * 7,
        "further  a 1",
        "         b 2",
        "took   1s",
        "next:  open report.html",
        "       trainyard options pricing_few",
    ]
    folded = ["    pricing_few  done", "    smape  1.0", f"           on test;{' lower is better' * 5} lower is"]
    assert shorten("\n".join(screen)).splitlines() == [*folded, "           better lower is better", "    took   1s"]
    page = (ROOT / "docs" / "quick-start.md").read_text()
    for job in FOLDERS:
        rows = find_transcript(page, job)[0].splitlines()
        names = [row.split()[0] for row in rows if row[4] != " "]
        assert names[0] == job and names[2:] == ["verdict", "took", "report"] and max(map(len, rows)) <= WIDTH + 4


@pytest.mark.parametrize(
    ("name", "build", "typed"), [("commands.md", build_page, ""), ("options.txt", build_options, "options ")]
)
def test_the_lists_of_commands_and_of_frozen_options_are_those_of_the_program(name, build, typed):
    written = (ROOT / "docs" / name).read_text()
    assert written == build(), f"type: python -m tests.commands_page {typed}> docs/{name}"


def test_the_diagrams_are_what_their_tables_and_the_code_say():
    page, diagrams = (ROOT / "docs" / "how-it-works.md").read_text(), draw_all()
    assert set(re.findall(r"\((\w+\.svg)\)", page)) == set(diagrams)
    written = {name: (ROOT / "docs" / name).read_text() for name in diagrams}
    assert written == diagrams, "type: python -m tests.diagrams"
    assert [state for state in State if f">{state}<" not in written["states.svg"]] == []
