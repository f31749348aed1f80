"""`trainyard ablate`: its loop reads what the job's loader reads, and a gain is what was measured."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import FAMILIES
from trainyard import cli
from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.measure import Ratio
from trainyard.tools import ablate
from trainyard.tools.naive_loop import Loop, LoopRunner, Turn, collate
from trainyard.tools.trial import open_trial


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[LoopRunner]:
    """Return what runs the loops of the stripes job."""
    config = prepare_data(
        configs.compose("stripes", [f"data.cache={tmp_path}", "model.dropout=0.5"], FAMILIES), FAMILIES
    )
    (tmp_path / "files").mkdir()
    with open_trial(replace(config, deterministic=False), FAMILIES, os.environ) as trial:
        yield LoopRunner(trial, tmp_path / "files")


def test_a_ratio_is_the_geometric_mean_with_students_interval():
    ratio = Ratio.from_values([2.0, 4.5, 4.0], [1.0, 1.5, 2.0])
    assert ratio.mean == pytest.approx(12 ** (1 / 3))
    # logarithms 0.693, 1.099, 0.693: standard deviation 0.2341, t of two degrees of freedom 4.303
    assert ratio.high / ratio.mean == pytest.approx(2.718281828 ** (4.302653 * 0.234101 / 3**0.5), rel=1e-4)
    assert ratio.low * ratio.high == pytest.approx(ratio.mean**2)
    assert ratio.format() == "x2.29 [1.28, 4.10]" and ratio.covers(2.3) and not ratio.covers(1.0)


def test_samples_of_varying_length_are_joined_as_the_loader_joins_them():
    short, long = {"a": torch.ones(1, 2, 3)}, {"a": torch.ones(1, 4, 3)}
    joined = collate([short, long])["a"]
    assert joined.shape == (2, 4, 3) and joined[0].sum() == 6 and joined[1].sum() == 12


def test_every_way_to_read_gives_the_same_losses(runner):
    naive, full = ablate.build_loops(runner, compile=False, recompute=False)
    losses = runner.list_losses(naive, steps=4)
    assert len(set(losses)) == 4
    ways = [{"workers": 1}, {"files": False}, {"loader": "cpu"}, {"files": False, "loader": full.loader}]
    for way in ways:
        assert runner.list_losses(replace(naive, **way), steps=4) == losses
    assert runner.list_losses(replace(naive, fused=True), steps=4) == pytest.approx(losses, rel=1e-4)
    assert runner.list_losses(replace(naive, recompute=True), steps=4) == losses
    assert runner.list_losses(replace(naive, accumulate=4), steps=4) != losses


def test_a_loop_leaves_the_layers_as_they_were(runner):
    naive, _ = ablate.build_loops(runner, compile=False, recompute=False)
    losses = runner.list_losses(naive, steps=2)
    runner.train(replace(naive, recompute=True), seconds=0.01)
    assert not any("forward" in layer.__dict__ for layer in runner.module.repeated_layers())
    assert runner.list_losses(naive, steps=2) == losses


def test_each_turn_of_a_loop_does_the_same_work(runner):
    naive, _ = ablate.build_loops(runner, compile=False, recompute=False)
    for work in (runner.train, runner.evaluate):
        work(naive, seconds=0.01)
        before = dict(runner._counts)
        work(naive, seconds=3600)
        assert runner._counts == before


def test_recomputed_activations_take_less_memory(runner):
    naive, full = ablate.build_loops(runner, compile=False, recompute=False)
    whole, recomputed = (runner.measure_memory(replace(full, recompute=on)) for on in (False, True))
    assert whole is not None and recomputed is not None and recomputed < whole
    assert runner.measure_memory(naive) < whole
    assert runner.measure_memory(replace(naive, compile=True)) is None


def test_all_switches_together_are_the_jobs_own_loop(runner):
    naive, full = ablate.build_loops(runner, compile=False, recompute=False)
    assert full.micro_batch == runner.context.config.global_batch_size == 4 * naive.micro_batch
    assert full.loader == runner.context.decode and full.fused and not full.amp
    runner.module.dropout.p = 0.0  # the two draw from other seeds
    losses = runner.list_losses(full, steps=3)
    assert runner.list_losses(replace(full, own_step=True), steps=3) == pytest.approx(losses, rel=1e-5)


class Recorded(LoopRunner):
    """A runner that has measured already: seconds for a sample, by whether a loop is slow."""

    def __init__(self, runner: LoopRunner, seconds: dict[str, list[float]]) -> None:
        self.context, self.module, self.eval_ids = runner.context, runner.module, runner.eval_ids
        self._seconds = {name: [values[0], *values] for name, values in seconds.items()}  # the first is not counted

    def train(self, loop: Loop, *, seconds: float) -> Turn:
        name = "fused" if loop.fused else "recompute" if loop.recompute else "naive"
        times = self._seconds[name]
        times.append(times.pop(0))
        return Turn(times[-1], warm_up_s=9.0 if loop.fused else 1.0)

    def list_losses(self, loop: Loop, *, steps: int) -> list[float]:
        return [1.0, 1.01 if loop.fused else 1.0]

    def measure_memory(self, loop: Loop) -> int:
        return 50 if loop.recompute else 100


def test_switches_are_ranked_by_what_they_give_alone_and_the_control_says_how_far_to_trust_them(runner):
    naive, full = ablate.build_loops(runner, compile=False, recompute=False)
    recorded = Recorded(runner, {"naive": [2e-3] * 50, "fused": [1e-3] * 50, "recompute": [3e-3] * 50})
    switches = ablate.list_switches(recorded, naive, full, os.environ)
    chosen = ablate.choose_switches(switches, ["activation checkpointing", "fused optimizer"])
    result = ablate.Ablation({"": recorded}, naive, full, chosen).measure(1e-9)
    assert [row.switch for row in result.rows] == ["fused optimizer", "activation checkpointing"]
    fused, recompute = result.rows
    assert fused.alone.mean == pytest.approx(2) and recompute.alone.mean == pytest.approx(2 / 3)
    assert fused.loss_difference == pytest.approx(0.01) and recompute.memory_bytes == (100, 50)
    steps = 8.0 / (1e-3 * naive.micro_batch)
    assert fused.warm_up_s == 8.0 and fused.break_even_steps == pytest.approx(steps)
    assert result.single_product == pytest.approx(2)  # the job does not recompute
    assert fused.alone_s is not None and [len(side) for side in fused.alone_s] == [4, 4]
    assert fused.alone.mean == pytest.approx(Ratio.from_values(*fused.alone_s).mean) and result.control_s is not None
    assert result.control.covers(1.0) and result.rounds == 4 and result.full == pytest.approx(1000)
    lines = ablate.format_result("stripes", result, [switch for switch in switches if switch.name == "AMP"])
    assert lines[0].split() == ["switch", "of", "alone", "with", "the", "others", "memory", "losses", "differ", "by"]
    assert "AMP (needs a GPU)" in "".join(lines) and "do not quote" not in "".join(lines)
    lines = ablate.format_result("stripes", replace(result, control=Ratio(1.2, 1.1, 1.3)), [])
    assert f"{ablate.CONTROL}: x1.20 [1.10, 1.30] in 4 rounds: do not quote these numbers" in lines
    assert [line["kind"] for line in ablate.encode_result(result, [])] == ["ablation", "switch", "switch"]
    assert ablate.draw_result("stripes", result).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "fused"], "--only 'fused': no such switch. Nearest: 'fused optimizer'."),
        (["--only", "AMP"], "--only 'AMP': cannot be measured here: needs a GPU."),
        (["--switch", "slow"], "--switch 'slow': expected a name and options"),
        (["--switch", "slow: model.sleep=1"], "model.sleep"),
        (["--minutes", "0"], "--minutes 0: expected more than 0."),
        (["--results", "/proc/nothing"], "--results"),
    ],
)
def test_a_typed_mistake_is_one_sentence(words, expected, tmp_path, capsys):
    assert cli.main(["ablate", "stripes", "--jobs", str(FAMILIES), f"data.cache={tmp_path}", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error


@pytest.mark.slow
def test_a_planted_slow_switch_is_ranked_last(tmp_path, capsys):
    words = ["ablate", "stripes", "--jobs", str(FAMILIES), f"data.cache={tmp_path}", "--minutes", "0.01"]
    words += ["--only", "larger batch", "--only", "slow", "--switch", "slow: model.sleep_ms=300"]
    assert cli.main([*words, "--results", str(tmp_path / "results")]) == 0
    [result] = (tmp_path / "results").glob("ablate-*.jsonl")
    header, whole, *rows = map(json.loads, result.read_text().splitlines())
    assert header["suite"] == "ablate" and whole["rounds"] >= 4 and whole["naive"] > 0
    assert rows[-1]["switch"] == "slow" and rows[-1]["alone"]["high"] < 1
    assert result.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "slow" in capsys.readouterr().out
