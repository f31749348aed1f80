"""A family shows texts and histograms of its scores; its `on_metrics` sees each line, changes nothing, and may fail."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.test_family_returns import TINY
from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train, wait_for_lines
from trainyard.errors import UserError
from trainyard.report.run_page import write_report
from trainyard.runs.events import read_events, read_metrics

HOOK = """

class Watched(Tiny):
    @staticmethod
    def on_metrics(kind, step, values):
        import torch
        from pathlib import Path

        with Path("FILE").open("a") as file:
            file.write(f"{kind} {step} {values.get('split', '')} {values['loss']}\\n")
        torch.rand(3), random.random(), np.random.rand()
        values["loss"] = 0.0
        values.get("step_losses", []).clear()
        FAIL


def build(config, data):
    return Watched()
"""


def write_jobs(folder: Path, seen: Path, fail: str = "") -> Path:
    (folder / "tiny").mkdir(parents=True)
    hook = HOOK.replace("FILE", str(seen)).replace("FAIL", fail) if seen.name else ""
    for name, text in {**TINY, "module.py": TINY["module.py"] + hook}.items():
        (folder / "tiny" / name).write_text(text.lstrip())
    return folder


OPTIONS = ("max_duration=6st", "log_every=2st", "eval_every=3st")


@pytest.mark.slow
def test_the_hook_sees_each_line_of_metrics_and_changes_none(tmp_path):
    seen = tmp_path / "seen"
    watched, plain = write_jobs(tmp_path / "watched", seen), write_jobs(tmp_path / "plain", Path())
    runs = [new_run(tmp_path / jobs.name, *OPTIONS, job="tiny", jobs=jobs) for jobs in (watched, plain)]
    ranks = [
        start(run, rank=r, world_size=2, rendezvous="hook", jobs=jobs)
        for run, jobs in zip(runs, (watched, plain), strict=True)
        for r in range(2)
    ]
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0] * 4
    one, other = map(read_run_metrics, runs)
    assert one == other
    assert find_differences(*map(load_state, runs)) == []
    lines = [f"{line['kind']} {line['step']} {line.get('split', '')} {line['loss']}" for line in one]
    assert seen.read_text().splitlines() == lines, "once each: rank 0 alone calls it"
    assert {line.split()[0] for line in lines} == {"train", "eval"} and len(lines) > 4


@pytest.mark.slow
def test_an_exception_of_the_hook_ends_the_run_as_one_of_the_family(tmp_path):
    jobs = write_jobs(tmp_path / "jobs", tmp_path / "seen", "raise ValueError('no server')")
    run = new_run(tmp_path, *OPTIONS, job="tiny", jobs=jobs)
    with pytest.raises(ValueError, match="no server") as raised:
        train(run, jobs=jobs)
    assert raised.traceback[-1].path == jobs / "tiny" / "module.py"
    failed = read_events(run)[-1]
    assert (failed["event"], failed["step"], failed["reason"]) == ("failed", 1, "no server")


SHOWN = """

class Showing(Tiny):
    def score(self, rows):
        from trainyard.train.module import Histogram

        values = np.array([[0.0, 1.0], [1.0, 4.0], [np.nan, np.inf]])
        return {**super().score(rows), "best": "<b>to be, or</b>\\nnot", "nats": Histogram(values)}


def build(config, data):
    return Showing()
"""


def test_texts_and_histograms_of_a_score_reach_the_report_and_tensorboard(tmp_path):
    jobs = write_jobs(tmp_path / "jobs", Path())
    with (jobs / "tiny" / "module.py").open("a") as file:
        file.write(SHOWN)
    run = new_run(tmp_path, *OPTIONS, "trackers=[tensorboard]", job="tiny", jobs=jobs)
    assert train(run, jobs=jobs) == 0
    lines = [line for line in read_metrics(run) if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        histogram = line["shown"]["nats"]
        assert line["shown"]["best"] == "<b>to be, or</b>\nnot"
        assert (histogram["edges"][0], histogram["edges"][-1]) == (0.0, 4.0)
        assert [n for n in histogram["counts"] if n] == [1, 2, 1], "values that are not finite are not drawn"
    write_report(run)
    page = (run / "report.html").read_text()
    assert "&lt;b&gt;to be, or&lt;/b&gt;\nnot" in page and 'alt="nats"' in page
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"histograms": 0})
    board.Reload()
    assert [event.step for event in board.Histograms("eval/val/nats")] == [3, 6]
    drawn = board.Histograms("eval/val/nats")[0].histogram_value
    assert (drawn.min, drawn.max, drawn.num) == (0, 4, 4)
    assert board.Tensors("eval/val/best/text_summary")[0].tensor_proto.string_val == [b"<b>to be, or</b>\nnot"]


@pytest.mark.parametrize(
    "shown",
    ["7", '{"a": 1}', '{"a": {"edges": [0.0], "counts": []}}', '{"a": {"edges": [0.0, "x"], "counts": [1]}}']
    + ['{"a": {"edges": [0.0, 1.0], "counts": [-1]}}', '{"a": {"edges": [0.0, 1.0], "counts": [1], "b": 2}}'],
)
def test_a_histogram_that_no_recorder_wrote_is_refused(shown, tmp_path):
    (tmp_path / "config.yaml").write_text("job: x\n")
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "eval", "step": 1, "split": "val", "shown": {shown}}}\n')
    with pytest.raises(UserError, match="edges and counts of a histogram"):
        read_metrics(tmp_path)


PLAIN = """

class Plain(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch):
        error = self.layer(batch["x"]).squeeze(1) - batch["y"]
        epoch = batch.get("epoch", torch.zeros((), dtype=torch.int64))
        return {"loss": error.square().mean(), "of_epoch": epoch.float()}


def build(config, data):
    return Plain()
"""


def test_the_validation_loss_is_that_of_forward_and_a_batch_knows_its_epoch_also_after_a_stop(tmp_path):
    jobs = write_jobs(tmp_path / "jobs", Path())
    with (jobs / "tiny" / "module.py").open("a") as file:
        file.write("import torch\n" + PLAIN)
    stopped = new_run(tmp_path, "max_duration=3ep", "log_every=1st", "checkpoint.every=1st", job="tiny", jobs=jobs)
    assert train(stopped, jobs=jobs) == 0
    lines = read_metrics(stopped)
    assert [line["of_epoch"] for line in lines if line["kind"] == "train"] == [0, 0, 1, 1, 2, 2]
    weights = load_state(stopped)
    keys = np.array([[n] * 3 for n in range(8, 12)], np.float32), np.array([n % 2 for n in range(8, 12)])
    found = keys[0] @ weights["model/layer.weight"].numpy()[0] + weights["model/layer.bias"].item()
    assert lines[-1]["split"] == "val"
    assert lines[-1]["loss"] == pytest.approx(np.square(found - keys[1]).mean(), rel=1e-5)
    resumed = new_run(tmp_path, "max_duration=3ep", "log_every=1st", "checkpoint.every=1st", job="tiny", jobs=jobs)
    process = start(resumed, jobs=jobs)
    wait_for_lines(resumed, 3, process)
    process.kill()
    process.join()
    assert train(resumed, jobs=jobs) == 0
    assert read_run_metrics(resumed) == read_run_metrics(stopped)
