"""Numbers of speed, size and accuracy on our pages are those of their sources: tests/printed_numbers.py."""

import re
import subprocess
import tomllib

import pytest

from tests.checkout import ROOT, list_files
from tests.printed_numbers import check_page, find_numbers, read_blocks, read_lines, read_message

SOURCES = tomllib.loads((ROOT / "docs" / "numbers.toml").read_text(encoding="utf-8"))
UNFILED = 24
"""Pieces of pages with numbers whose results are in no file. Write a result file with a command, and lower this."""

KEPT = "prints-2026-11-24 > keep_png > samples_per_core_s"
PAGES = [
    *list_files("README.md", "docs", ending=".md"),
    *list_files("jobs", ending="README.md"),
    *list_files("benchmarks", ending=".md"),
]
PAGES = [page for page in PAGES if page.name != "commands.md"]  # its numbers are defaults, which the program prints


def test_every_number_of_a_page_is_that_of_its_source():
    pages = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert len(pages) >= 14 and set(SOURCES) <= set(pages), sorted(pages)
    assert sum(len(find_numbers(block)) for text in pages.values() for block in read_blocks(text)) > 700
    wrong = {name: check_page(text, SOURCES.get(name, {}), ROOT) for name, text in pages.items()}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_numbers_whose_results_are_in_no_file_get_fewer():
    given = [sources for page in SOURCES.values() for sources in page.values()]
    assert sum(str(sources).startswith("unfiled: ") for sources in given) <= UNFILED


def test_predicted_over_observed_memory_is_the_ratio_of_its_columns():
    text = (ROOT / "benchmarks" / "plan.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    low, *_, high = sorted((ratio for *_, ratio in rows), key=float)
    assert len(rows) == 15 and f"All lie between {low} and {high}." in text
    for predicted, observed, ratio in (map(float, row) for row in rows):  # both are rounded to 0.1
        assert predicted / observed == pytest.approx(ratio, abs=0.12 / observed)


def test_the_table_of_planted_faults_is_that_of_its_results():
    text, rows = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8"), {}
    trials = read_lines(ROOT / "benchmarks" / "doctor-faults-2026-11-27.jsonl")
    for trial in trials[2:]:
        rows.setdefault(trial["fault"], ([], []))[trial["expected"] == "healthy"].append(trial["strength"])
    table = [f"| {fault} | {'; '.join(named)} | {'; '.join(below)} |" for fault, (named, below) in rows.items()]
    assert len(rows) == 8 and re.findall(r"^\| .*; .* \| .* \|$", text, re.MULTILINE) == table
    assert [trial["fault"] for trial in trials[:2]] == ["healthy", "healthy"], "Each of them, and two healthy jobs"
    again = read_lines(ROOT / "benchmarks" / "doctor-faults-2026-11-27-2.jsonl")
    assert [trial["strength"] for trial in again] == [s for part in rows["slow disk"] for s in part]
    assert {(trial["right"], trial["of"]) for trial in trials + again} == {(10, 10)}
    assert f"{10 * len(trials)} trials, none wrong" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "source", "said"),
    [
        ("It reads 841 a second.", KEPT, ""),
        ("It reads 842 a second.", KEPT, "842, but"),
        ("It reads 841 a second, and 1.57 x more.", KEPT, "no source: "),
        ("It reads 841 a second.", "prints-1999 > keep_png", "FileNotFoundError"),
        ("It reads 841 a second.", "prints-2026-11-24 > kept_png", "0 values"),
        ("It reads 841 a second.", "README.md > 123456 a second", "does not occur"),
        ("It reads 841 a second. It reads 841 a minute.", "why: a setting", "0 numbers"),
    ],
)
def test_a_planted_fault_is_found(text, source, said):
    wrong = check_page(text, {text[:12]: source}, ROOT)
    assert said in "\n".join(wrong) and bool(wrong) == bool(said), wrong


def test_a_commit_is_looked_up_where_git_reads_the_history_and_nowhere_else(tmp_path):
    text, source = "It reads 841 a second.", {"It reads 841": "commit 0000000 > 841"}
    assert check_page(text, source, tmp_path) == []  # no history here
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "It reads 841 a second."]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True)
    read_message.cache_clear()
    assert "no commit 0000000" in str(check_page(text, source, tmp_path))
    assert check_page(text, {"It reads 841": "commit HEAD > 841"}, tmp_path) == []


def test_a_changed_digit_on_a_page_is_found():
    text, sources = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), SOURCES["benchmarks/README.md"]
    for number, planted in (("84,872 un", "84,873 un"), ("| 1.54 x", "| 1.55 x"), ("346,000", "348,000")):
        assert text.count(number) == 1 and check_page(text.replace(number, planted), sources, ROOT)


def test_numbers_with_a_unit_or_a_metric_are_found():
    for text in (
        "1.57 x",
        "4x",
        "2-3 x",
        "84,872 per core",
        "6.8 GB",
        "EER 2.5 %",
        "0.95 AP",
        "AUC of 1",
        "2 min 57 s",
    ):
        assert find_numbers(f"It has {text} here."), text
    assert not find_numbers("In 2026, `4.5 GB`, [a page](b-1.5x.md), arXiv:1904.01099 and 224 x 224 pixels.")
