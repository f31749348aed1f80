"""The board shows every run on one page, and pages are readable on a phone and a screen, in light and dark."""

import itertools
import json
import re
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, NEEDS_CHROMIUM, WIDTHS, look
from tests.run_folders import RunFolder, format_time
from tests.test_report import ENV, MONITOR, Page, make_finished_run, new_run, open_recorder
from trainyard.cli import main
from trainyard.errors import UserError
from trainyard.report.board import update_board, write_board
from trainyard.report.run_page import write_report
from trainyard.runs.events import read_metrics, read_sampled_metrics
from trainyard.runs.folder import record_error, write_env
from trainyard.runs.lock import RunLock


def write_run(root: Path, number: int, *, ending: str = "done", steps: int = 40) -> Path:
    """Write the folder of a run that trained half of its time, or failed."""
    run = root / "demo" / f"20260801-1015{number:02d}-1a2b3c4"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("job: demo\n")
    begin = 1_790_000_000 + 1000 * number
    write_env(run, {"created": format_time(begin)})
    attempt = f"local-{begin}"
    if ending == "failed":
        record_error(run, ValueError("shape (3, 8)"), attempt=attempt, rank=0)
    events = [
        {
            "event": "start",
            "attempt": attempt,
            "step": 0,
            "monitor": MONITOR,
            "total_steps": 40,
            "time": format_time(begin),
            "spent": {"preparing": 0.001},
        },
        {
            "event": ending,
            "step": steps,
            "reason": "none",
            "spent": {"preparing": 30.0, "training": 50.0, "evaluating": 20.0},
            "time": format_time(begin + 100),
        },
    ]
    lines = [
        {
            "kind": "train",
            "step": step,
            "loss": number / 50 + 4 / step,
            "step_losses": [4 / step],
            "elapsed_s": 2.0 * step,
        }
        for step in range(1, steps + 1)
    ]
    if ending == "done":
        result = {"eer": 0.01 + number / 200, "eer_low": 0.005 + number / 200, "eer_high": 0.02 + number / 200}
        lines += [
            {"kind": "eval", "step": steps, "split": split, **result, "elapsed_s": 90.0} for split in ("val", "test")
        ]
    (run / "events.jsonl").write_text("".join(json.dumps({"kind": "event", **event}) + "\n" for event in events))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder of 50 runs: each fifth failed."""
    for number in range(50):
        write_run(tmp_path / "runs", number, ending="failed" if number % 5 == 4 else "done", steps=12 + number % 29)
    return tmp_path / "runs"


def test_the_board_shows_each_run_with_state_metric_loss_goodput_and_a_link(runs, capsys):
    (runs / "demo" / "20260801-101500-1a2b3c4" / "report.html").write_text("here")
    assert main(["board", "--runs", str(runs)]) == 0
    assert f"next: open {runs}/index.html" in capsys.readouterr().out
    page = Page(runs / "index.html")
    assert "50 runs" in page.text and "40 done, 10 failed" in page.text
    assert "eer 0.01000 [0.005000, 0.02000] on test" in page.text and page.text.count("50 %") == 50
    assert sum(tag == "polyline" for tag, _ in page.tags) == 50
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links[-1] == "demo/20260801-101500-1a2b3c4/report.html" and links[0] == "demo/20260801-101549-1a2b3c4/"
    assert "trainyard why" in page.text and "http-equiv" not in (runs / "index.html").read_text(), "nothing is active"
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_the_board_loads_itself_again_while_a_run_is_active(tmp_path):
    folder = RunFolder(tmp_path, job=None)
    folder.begin(datetime.now().timestamp())
    page, active = write_board(tmp_path / "runs")
    text = page.read_text()
    assert (active > 0) == ('<meta http-equiv="refresh" content="60">' in text)


def test_a_damaged_run_is_on_the_board_with_what_is_wrong_and_cannot_write_markup(runs):
    run = runs / "demo" / "20260801-101500-1a2b3c4"
    (run / "metrics.jsonl").write_text("<script>alert(1)</script>\n")
    page = Page(write_board(runs)[0])
    assert "metrics.jsonl:1: expected a JSON object" in page.text and "50 runs" in page.text
    assert "script" not in {tag for tag, _ in page.tags}


def test_a_folder_without_runs_has_no_board(tmp_path):
    with pytest.raises(UserError, match=r"no runs yet\. Start one: trainyard run JOB"):
        write_board(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: no such folder\. Of another one: trainyard board --runs FOLDER"):
        write_board(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_of_a_long_run_samples_are_read_and_its_newest_evaluations(tmp_path):
    run = write_run(tmp_path, 1, steps=9000)
    lines, sampled = read_metrics(run), read_sampled_metrics(run, most=60)
    assert (run / "metrics.jsonl").stat().st_size > 5 * 2**17, "a file of which all is read proves nothing"
    assert sampled[-2:] == lines[-2:] and [line["split"] for line in sampled[-2:]] == ["val", "test"]
    steps = [line["step"] for line in sampled if line["kind"] == "train"]
    assert steps == sorted(steps) and steps[0] < 200 and steps[-1] == 9000 and len(steps) <= 60
    assert max(b - a for a, b in itertools.pairwise(steps)) < 1000, "the tail is 64 KiB"
    (run / "metrics.jsonl").unlink()
    assert read_sampled_metrics(run, most=60) == []


def test_of_a_short_run_evenly_spaced_training_lines_and_all_evaluations_are_read(tmp_path):
    run = write_run(tmp_path, 1, steps=200)
    sampled = read_sampled_metrics(run, most=5)
    assert [line["step"] for line in sampled if line["kind"] == "train"] == [1, 50, 100, 150, 200]
    assert sampled[-2:] == read_metrics(run)[-2:]


def read_rows(root: Path) -> dict[str, str]:
    """Return the rows of a board by the name of the run."""
    rows = re.findall(r"<tr><td.*?</tr>", (root / "index.html").read_text(), re.DOTALL)
    return {re.search(r">(demo/[^<]*)</a>", row.replace("<wbr>", ""))[1]: row for row in rows}


def test_a_second_board_shows_what_has_changed_since(tmp_path):
    failed = write_run(tmp_path / "runs", 4, ending="failed")
    with RunLock(failed):
        write_board(tmp_path / "runs")
        assert ">running<" in read_rows(tmp_path / "runs")["demo/20260801-101504-1a2b3c4"]
    write_board(tmp_path / "runs")
    assert ">failed<" in read_rows(tmp_path / "runs")["demo/20260801-101504-1a2b3c4"]


def test_a_run_that_ends_writes_the_board_again_and_never_fails_of_it(runs, capsys):
    run = runs / "demo" / "20260801-101500-1a2b3c4"
    update_board(run)
    assert not (runs / "index.html").exists(), "nobody asked for a board"
    write_board(runs)
    (run / "report.html").write_text("here")
    update_board(run)
    assert f"{run.name}/report.html" in (runs / "index.html").read_text()
    (runs / "index.html").write_text("old")
    (runs / ".board.lock").unlink()
    (runs / ".board.lock").mkdir()
    update_board(run)
    assert (runs / "index.html").read_text() == "old"


# In a browser


def make_pages(folder: Path) -> dict[str, Path]:
    """Write the pages of a normal run, of a short one, of one that failed at once, and a board of 50 runs."""
    short = new_run(folder / "short")
    with closing(open_recorder(short)) as log:
        log.log("event", 0, {"event": "start", "monitor": {**MONITOR, "baseline": ["chance", 0.5]}, "total_steps": 10})
        log.log("train", 1, {"loss": 2.0, "step_losses": [2.0], "samples_per_s": 10.0, "compute_ms": 90.0})
        losses = [2 - step / 10 for step in range(1, 10)]
        log.log("train", 10, {"loss": 1.1, "step_losses": losses, "samples_per_s": 99.0, "compute_ms": 9.0})
        log.log("eval", 10, {"split": "val", "eer": 0.4, "eer_low": 0.2, "eer_high": 0.55, "trials": 12.0})
        log.log("event", 10, {"event": "done", "reason": "none"})
    failed = new_run(folder / "failed")
    with closing(open_recorder(failed)) as log:
        log.log("event", 0, {"event": "start", "monitor": MONITOR, "total_steps": 10})
        log.log("event", 0, {"event": "failed", "reason": f"{folder}/data/train-00003.h5: 3000 bytes, expected 81920"})
    for number in range(50):
        write_run(folder / "runs", number, ending="failed" if number % 5 == 4 else "done", steps=12 + number % 29)
    normal = make_finished_run(folder / "normal", env=ENV)
    pages = {name: write_report(run) for name, run in {"normal": normal, "short": short, "failed": failed}.items()}
    return pages | {"board": write_board(folder / "runs")[0]}


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason=NEEDS_CHROMIUM)
def test_pages_fit_a_phone_and_a_screen_in_light_and_dark_with_the_headline_in_view(tmp_path):
    looks = 0
    for name, page in make_pages(tmp_path).items():
        papers = set()
        for width in WIDTHS.values():
            for dark in (False, True):
                seen = look(page, width=width, dark=dark)
                assert (seen.width, seen.content, seen.wide) == (width, width, []), f"{name} scrolls sideways"
                assert seen.top >= 0 and seen.bottom <= 844 and seen.headline, f"{name}: the headline is below the fold"
                assert is_light(seen.paper) != dark and is_light(seen.ink) == dark, f"{name}: {seen}"
                papers.add(seen.paper)
                looks += 1
        assert len(papers) == 2
    assert looks == 16


def is_light(rgb: str) -> bool:
    return sum(map(int, rgb.removeprefix("rgb(").rstrip(")").split(","))) > 3 * 128
