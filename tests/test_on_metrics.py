"""A family's `on_metrics` sees what a run measures, changes nothing, and fails as the family's own code."""

from pathlib import Path

import pytest

from tests.test_family_returns import TINY
from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train
from trainyard.runs.events import read_events

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
