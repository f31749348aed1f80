"""Runs side by side: best first, a winner only where intervals allow it, and only options that differ."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, NEEDS_CHROMIUM, WIDTHS, look
from tests.test_report import Page, open_recorder
from trainyard.cli import main
from trainyard.errors import UserError
from trainyard.report.compare_page import write_comparison
from trainyard.report.run_story import RunStory

MONITOR = {"split": "val", "metric": "eer", "mode": "min"}


def make_run(root: Path, name: str, *, lr: float, eer: float, width: float = 0.01, **kind: str) -> Path:
    """Make a finished run that was scored on a validation and a test set."""
    run = root / "demo" / name
    run.mkdir(parents=True)
    metric = kind.get("metric", "eer")
    (run / "config.yaml").write_text(f"job: demo\nfamily: prints\nseed: 0\noptimizer:\n  lr: {lr}\n")
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": {**MONITOR, "metric": metric}, "total_steps": 10})
        for step in range(1, 11):
            log.log("train", step, {"loss": 1 / step, "step_losses": [1 / step], "samples_per_s": 99.0})
        log.log("eval", 10, {"split": "val", metric: 1 - eer})  # the other way round, to see which one counts
        interval = {f"{metric}_low": eer - width, f"{metric}_high": eer + width} if width else {}
        log.log("eval", 10, {"split": "test", metric: eer, **interval})
        log.log("event", 10, {"event": "done", "reason": "none"})
    return run


def test_runs_are_best_first_with_what_differs_and_a_winner_if_no_interval_overlaps(tmp_path, capsys):
    make_run(tmp_path, "slow", lr=0.1, eer=0.3)
    make_run(tmp_path, "fast", lr=0.2, eer=0.1)
    make_run(tmp_path, "fair", lr=0.4, eer=0.2)
    assert main(["report", "slow", "fast", "fair", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    page = Page(tmp_path / "comparison.html")
    assert "fast is best: its 95 % interval of eer overlaps no other." in printed and "fast is best" in page.text
    assert printed.endswith(f"next: open {tmp_path}/comparison.html\n")
    places = [page.text.index(text) for text in ("1  fast", "2  fair", "3  slow")]
    assert places == sorted(places) and "0.1000 [0.09000, 0.1100]" in page.text and "eer on test" in page.text
    assert "optimizer.lr" in page.text and "seed" not in page.text, "only what differs"
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["demo/fast/report.html", "demo/fair/report.html", "demo/slow/report.html"]
    assert sum(tag == "img" for tag, _ in page.tags) == 2 and not {"script", "link"} & {tag for tag, _ in page.tags}


def test_a_score_before_training_counts_for_no_run_and_begins_its_curve(tmp_path):
    """Of a run that goes on, only that of its test set is there: the others would lose against an untrained model."""
    runs = [make_run(tmp_path, "a", lr=0.1, eer=0.3), tmp_path / "demo" / "b"]
    runs[1].mkdir()
    (runs[1] / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    with closing(open_recorder(runs[1])) as log:
        log.log("event", 0, {"event": "start", "monitor": MONITOR, "total_steps": 10})
        for split in ("val", "test"):
            log.log("eval", 0, {"split": split, "eer": 0.01})
        log.log("eval", 5, {"split": "val", "eer": 0.6})
    said = write_comparison(runs, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "eer on val" in page.text and "0.6000" in page.text and "0.01000" not in page.text, said
    story = RunStory.read(runs[1])
    assert [line["step"] for line in story.list_evaluations("val")] == [0, 5]
    assert story.splits == ["val"], "the test set has no result"


def test_no_winner_is_named_where_intervals_overlap_or_are_missing(tmp_path):
    runs = [make_run(tmp_path, name, lr=0.1, eer=eer) for name, eer in (("a", 0.1), ("b", 0.11), ("c", 0.5))]
    assert "the 95 % interval of a overlaps that of b." in write_comparison(runs, tmp_path / "page.html")
    bare = make_run(tmp_path, "bare", lr=0.1, eer=0.01, width=0)
    assert "No winner can be named: bare without a 95 %" in write_comparison([*runs, bare], tmp_path / "page.html")


def test_runs_with_other_metrics_or_without_a_beginning_are_refused_in_one_error(tmp_path):
    runs = [make_run(tmp_path, "a", lr=0.1, eer=0.1), make_run(tmp_path, "b", lr=0.1, eer=0.1, metric="ap")]
    with pytest.raises(UserError, match=r"one deciding metric(.|\n)*eer \(min\) on val: .*/a\n.*ap \(min\).*/b"):
        write_comparison(runs, tmp_path / "page.html")
    new = tmp_path / "demo" / "new"
    new.mkdir()
    (new / "config.yaml").write_text("job: demo\n")
    with pytest.raises(UserError, match="has not begun to train"):
        write_comparison([runs[0], new], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_page_goes_where_it_is_told_and_one_run_needs_no_place(tmp_path, capsys):
    for name in "ab":
        make_run(tmp_path / "runs", name, lr=0.1, eer=0.1)
    out = tmp_path / "new" / "page.html"
    assert main(["report", "a", "b", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0 and out.is_file()
    assert "../runs/demo/a/report.html" in out.read_text()
    assert main(["report", "a", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 2
    assert "is for the page of several runs" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason=NEEDS_CHROMIUM)
def test_the_page_fits_a_phone_and_a_screen(tmp_path):
    runs = [
        make_run(tmp_path, name, lr=0.1, eer=0.1) for name in ("a", "b", "20260801-101500-1a2b3c4-with-a-long-name")
    ]
    write_comparison(runs, tmp_path / "page.html")
    for width in WIDTHS.values():
        seen = look(tmp_path / "page.html", width=width)
        assert (seen.width, seen.content, seen.wide) == (width, width, []), "it scrolls sideways"
