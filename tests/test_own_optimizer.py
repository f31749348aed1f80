"""A family's own optimizer and schedule: exact after kills, on ranks and in plans, and checked before step 1."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_family_returns import TINY
from tests.training import (
    find_differences,
    load_state,
    new_run,
    read_run_metrics,
    start,
    wait_for_lines,
)
from trainyard import cli
from trainyard.cli.extension import plan_extension
from trainyard.config.compose import compose, load_config
from trainyard.config.settings import OptimizerSettings, ScheduleSettings, TrainConfig
from trainyard.data.loader import MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.errors import UserError
from trainyard.hardware import choose_precision
from trainyard.plan.memory import StepConfig
from trainyard.plan.predict import Predictor
from trainyard.runs.folder import read_env
from trainyard.runs.manifest import list_checkpoints
from trainyard.train.memory_probe import _put_back
from trainyard.train.module import TrainModule
from trainyard.train.precision import make_autocast
from trainyard.train.run_state import build_state, encode_state, restore_state
from trainyard.train.schedule import build_schedule
from trainyard.train.step import train_step

MODULE = '''
import time

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    kept = self.state[weight]
                    mean = kept.setdefault("mean", torch.zeros_like(weight))
                    kept["steps"] = kept.get("steps", torch.tensor(0)) + 1
                    update = mean.lerp(weight.grad, 1 - first).sign()
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                    mean.lerp_(weight.grad, 1 - second)


class Own(Tiny):
    def __init__(self, config):
        super().__init__()
        self.kind, self.sleep_s = config.kind, config.sleep_s
        self.layer = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        time.sleep(self.sleep_s)
        return super().forward(batch)

    def parameter_groups(self, weight_decay):
        bottom, top = self.layer[0].parameters(), self.layer[2].parameters()
        decay = {"weight_decay": weight_decay}
        return [{"params": bottom, "lr_scale": 0.5, **decay}, {"params": top, **decay}]

    def build_optimizer(self, groups, config):
        lr, beta1 = config.optimizer.lr, config.optimizer.beta1
        if self.kind == "lion":
            return Lion(groups, lr=lr, betas=(beta1, config.optimizer.beta2))
        return torch.optim.SGD(groups, lr=lr, momentum=beta1, nesterov=True, fused=self.kind == "fused")

    def build_schedule(self, config, *, total_steps, steps_per_epoch):
        decay = total_steps / 4
        return lambda step: min((step + 1) / 3, 1.0, (total_steps - step) / decay)


def build(config, data):
    return Own(config)
'''

CONFIG = TINY["config.py"].replace("    pass", '    kind: str = "lion"\n    sleep_s: float = 0.0')
KINDS = ("lion", "sgd", "fused")
OPTIONS = (
    *("max_duration=12st", "checkpoint.every=2st", "eval_every=2st", "log_every=1st", "optimizer.lr=0.01"),
    *("optimizer.weight_decay=0.1", "optimizer.beta1=0.8", "ema_decay=0.9", "swa=true", "clip_grad_norm=0.5"),
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "own_families"
    (folder / "tiny").mkdir(parents=True)
    for name, text in {**TINY, "config.py": CONFIG, "module.py": TINY["module.py"] + MODULE}.items():
        (folder / "tiny" / name).write_text(text.lstrip())
    return folder


def create(root: Path, jobs: Path, *options: str) -> Path:
    return new_run(root, *OPTIONS, *options, job="tiny", jobs=jobs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lion", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sgd", "fused"))])
def test_a_kill_changes_no_bit_of_a_run_with_its_own_optimizer_and_schedule(kind, jobs, tmp_path):
    whole, killed = (create(tmp_path, jobs, f"kind={kind}", f"sleep_s={seconds}") for seconds in (0, 0.05))
    ended = start(whole, jobs=jobs)
    process = start(killed, jobs=jobs)
    wait_for_lines(killed, 8, process)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    for one in (process, ended):
        one.join()
    assert 0 < max(entry.step for entry in list_checkpoints(killed / "checkpoints")) < 12
    process = start(killed, jobs=jobs)
    process.join()
    assert (ended.exitcode, process.exitcode) == (0, 0)
    saved = load_state(whole)
    assert find_differences(saved, load_state(killed)) == []
    assert read_run_metrics(whole) == read_run_metrics(killed)
    rates = [line["lr"] for line in read_run_metrics(whole) if "lr" in line]
    expected = [min((step + 1) / 3, 1, (12 - step) / 3) for step in range(12)]
    assert rates == pytest.approx([0.01 * 0.5 * factor for factor in expected])
    if kind == "lion":
        assert saved["optimizer/state/0/steps"].dtype == torch.int64 and saved["optimizer/state/0/steps"] == 12
    name = "Lion" if kind == "lion" else "SGD"
    assert read_env(whole)["choices"]["optimizer"] == {"value": name, "reason": "Own.build_optimizer"}
    assert read_env(whole)["choices"]["schedule"]["reason"] == "Own.build_schedule"
    old = replace(load_config(whole / "config.yaml", jobs), schedule=ScheduleSettings(name="constant"))
    with pytest.raises(UserError, match=r"Own\.build_schedule may end where the run ends.*--inexact"):
        plan_extension(whole, old, replace(old, max_duration="14st"), jobs, allow_inexact=False)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(jobs, tmp_path):
    options = ("kind=sgd", "swa=false", "max_duration=6st", "optimizer.beta1=0.9")
    one, two = (create(tmp_path, jobs, *options) for _ in range(2))
    ranks = [start(one, jobs=jobs), *(start(two, rank=r, world_size=2, rendezvous="own", jobs=jobs) for r in (0, 1))]
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    a, b = load_state(one), load_state(two)
    tensors = [name for name in a if isinstance(a[name], Tensor)]
    assert any(name.endswith("momentum_buffer") for name in tensors)
    worst = max(float((a[name] - b[name]).abs().max()) for name in tensors)
    assert worst < 1e-6, "float32 sums in another order, over six steps"


# In this process


class Net(TrainModule):
    """A linear layer, whose optimizer and schedule a test gives."""

    def __init__(self, make: Callable[..., Any] | None = None, schedule: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.make, self.schedule = make, schedule

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.layer(batch["x"]).square().mean()}


class OwnNet(Net):
    """The same, as a family that brings both."""

    def build_optimizer(self, groups, config):
        return self.make(groups, config)

    def build_schedule(self, config, *, total_steps, steps_per_epoch):
        return self.schedule(config, total_steps)


HERE = r"test_own_optimizer\.py:\d+: OwnNet\.build_"


def make_config(**optimizer: Any) -> TrainConfig:
    return TrainConfig(optimizer=OptimizerSettings(**optimizer))


def build(module: TrainModule, config: TrainConfig | None = None, *, scaling: bool = False):
    return build_state(module, config or TrainConfig(), scaler=torch.amp.GradScaler("cpu", enabled=scaling))


def take_step(state, x: Tensor, *, lr: float = 0.1):
    batch = MicroBatch({"x": x}, 1.0, True, 0.0)
    autocast = make_autocast(choose_precision(None), torch.device("cpu"))
    return train_step(state, [batch], lr=lr, world_size=1, seed=0, clip_grad_norm=1.0, autocast=autocast)


def make_sgd(groups, config, **options):
    return torch.optim.SGD(groups, lr=config.optimizer.lr, **options)


class Nested(torch.optim.SGD):
    """Keeps what no checkpoint can."""

    def step(self, closure=None):
        super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["seen"] = {"a set"}


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (lambda groups, config: None, {}, r"returned nothing \(is a `return` forgotten"),
        (lambda groups, config: 0.1, {}, r"returned float 0\.1; expected a torch\.optim\.Optimizer"),
        (lambda groups, config: make_sgd(groups[:1], config), {}, r"leaves out layer\.bias.*all of `groups`"),
        (lambda groups, config: torch.optim.SGD(groups, lr=0.5), {}, r"lr=0\.5, but each step sets optimizer\.lr"),
        (lambda groups, config: torch.optim.LBFGS(groups[0]["params"]), {}, r"LBFGS\.step .*'closure'"),
        (make_sgd, {"beta1": 0.8}, r"does not use optimizer\.beta1=0\.8\. Leave it out .*config\.optimizer\.beta1"),
        (make_sgd, {"name": "sgd", "beta2": 0.5}, r"does not use optimizer\.name=sgd, optimizer\.beta2=0\.5\."),
        (lambda g, c: torch.optim.Rprop(g, lr=c.optimizer.lr), {"weight_decay": 0.1}, r"optimizer\.weight_decay=0\.1"),
    ],
)  # fmt: skip
def test_a_mistake_in_build_optimizer_is_one_sentence_with_its_line(make, settings, said):
    with pytest.raises(UserError, match=f"{HERE}optimizer.*{said}"):
        build(OwnNet(make), make_config(**settings))


def test_options_that_build_optimizer_reads_or_the_groups_state_are_accepted():
    config = make_config(lr=0.2, beta1=0.8, weight_decay=0.1)
    optimizer = build(OwnNet(lambda g, c: make_sgd(g, c, momentum=c.optimizer.beta1)), config).optimizer
    assert optimizer.defaults["momentum"] == 0.8
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_an_lr_scale_that_the_optimizer_does_not_get_is_refused():
    class Scaled(OwnNet):
        def parameter_groups(self, weight_decay):
            return [{"params": self.layer.parameters(), "lr_scale": 0.1}]

    build(Scaled(make_sgd))
    with pytest.raises(UserError, match=r"layer\.weight has lr_scale=0\.1 in its group, but lr_scale=1\.0"):
        build(Scaled(lambda groups, config: make_sgd(groups[0]["params"], config)))


def test_state_that_no_checkpoint_can_keep_is_refused_after_the_first_step():
    state = build(OwnNet(lambda groups, config: Nested(groups, lr=config.optimizer.lr)))
    with pytest.raises(UserError, match=f"{HERE}optimizer: 'seen' in the state of Nested is set; expected a tensor"):
        take_step(state, torch.ones(2, 3))


class Counting(torch.optim.SGD):
    """Counts where no checkpoint looks."""

    def __init__(self, groups, lr, count):
        super().__init__(groups, lr=lr)
        self.count, self.constant = count, torch.ones(2)

    def step(self, closure=None):
        super().step(closure)
        self.count += 1


@pytest.mark.parametrize("count", [0, 0.5, torch.zeros(())])
def test_what_a_step_changes_outside_of_the_state_is_refused_after_the_first_step(count):
    state = build(OwnNet(lambda groups, config: Counting(groups, config.optimizer.lr, count)))
    with pytest.raises(UserError, match=rf"{HERE}optimizer: a step of Counting changes self\.count, which"):
        take_step(state, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (lambda config, total: None, {}, "returned nothing"),
        (lambda config, total: 0.5, {}, r"returned float 0\.5; expected a function of the step"),
        (lambda config, total: lambda step: None, {}, r"gives nothing \(is a `return` forgotten\?\) for step 0"),
        (lambda config, total: lambda step: 1 - step / 4, {}, r"gives float -1\.25 for step 9"),
        (lambda config, total: lambda step: float("nan"), {}, "gives float nan for step 0"),
        (lambda config, total: float, {"warmup": "5st", "name": "constant"}, r"not use schedule\.name=constant"),
    ],
)  # fmt: skip
def test_a_mistake_in_build_schedule_is_one_sentence_with_its_line(schedule, options, said):
    config = TrainConfig(schedule=ScheduleSettings(**options), max_duration="10st")
    with pytest.raises(UserError, match=f"{HERE}schedule.*{said}"):
        build_schedule(OwnNet(None, schedule), config, steps_per_epoch=5)


def test_a_schedule_stays_at_its_last_value_after_the_end_where_tools_measure_longer_than_a_run():
    module = OwnNet(None, lambda config, total: lambda step: (total - step) / total)
    schedule = build_schedule(module, TrainConfig(max_duration="10st"), steps_per_epoch=5)
    assert [schedule(step) for step in (8, 9, 10, 500)] == pytest.approx([0.2e-3, 0.1e-3, 0.1e-3, 0.1e-3])


def test_a_schedule_that_is_wrong_in_the_middle_is_refused_there():
    wrong = OwnNet(None, lambda config, total: lambda step: -1.0 if step == 4 else 1.0)
    schedule = build_schedule(wrong, TrainConfig(max_duration="10st"), steps_per_epoch=5)
    assert schedule(3) == 1e-3
    with pytest.raises(UserError, match=r"gives float -1\.0 for step 4"):
        schedule(4)


def test_a_run_of_some_minutes_states_a_constant_schedule_that_the_own_one_replaces():
    module = OwnNet(None, lambda config, total: lambda step: 0.5 if total is None else 0.0)
    config = TrainConfig(schedule=ScheduleSettings(name="constant"), max_duration="5min")
    assert build_schedule(module, config, steps_per_epoch=5)(7) == 0.5e-3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_an_own_optimizer_changes_nothing_in_a_step_that_is_skipped_and_then_does_as_torch_does(fused, dampening):
    module = OwnNet(lambda groups, config: make_sgd(groups, config, momentum=0.9, dampening=dampening, fused=fused))
    state, plain = build(module, scaling=True), Net()
    if fused and not dampening:  # torch would take uninitialised memory, and a skipped step would leave it
        assert [value["momentum_buffer"].count_nonzero() for value in state.optimizer.state.values()] == [0, 0]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(2):
        assert take_step(state, torch.full((2, 3), torch.inf)).skipped == 1
    assert find_differences(before, module.state_dict()) == []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
    for number in range(3):
        x = torch.full((2, 3), 1.0 + number)
        take_step(state, x)
        optimizer.zero_grad()
        plain({"x": x})["loss"].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6), "scaled and unscaled by a power of two, and rounded"


def test_statistics_of_any_shape_and_type_are_restored_as_they_were():
    class Factored(torch.optim.SGD):
        """Keeps a row of numbers for each matrix, counts, and statistics in double precision."""

        def step(self, closure=None):
            for group in self.param_groups:
                for weight in group["params"]:
                    kept = self.state[weight]
                    kept["row"] = kept.get("row", 0) + weight.grad.reshape(len(weight), -1).sum(1)
                    kept["count"] = kept.get("count", torch.tensor(2**40)) + 1
                    kept["mean"] = kept.get("mean", 0) + weight.grad.double() / 3
            super().step(closure)

    module = OwnNet(lambda groups, config: Factored(groups, lr=config.optimizer.lr))
    state = build(module)
    take_step(state, torch.rand(4, 3))
    saved = encode_state(state, fingerprint="f", metrics_position=0, artifacts={})
    restored = build(OwnNet(module.make))
    restore_state(restored, saved, fingerprint="f", path=Path("x.ckpt"))
    assert find_differences(*(s.optimizer.state_dict() for s in (state, restored))) == []
    assert restored.optimizer.state_dict()["state"][0]["count"] == 2**40 + 1


def test_a_memory_probe_leaves_an_own_optimizer_as_it_was():
    module = OwnNet(lambda groups, config: make_sgd(groups, config, momentum=0.9, nesterov=True))
    state = build(module)
    take_step(state, torch.ones(2, 3))
    before = {name: value.clone() for name, value in state.optimizer.state[module.layer.weight].items()}
    with _put_back(state, torch.device("cpu")):
        take_step(state, torch.full((2, 3), 5.0))
        assert find_differences(before, state.optimizer.state[module.layer.weight])
    assert find_differences(before, state.optimizer.state[module.layer.weight]) == []


def test_a_plan_predicts_the_memory_of_the_optimizer_that_is_built(jobs, tmp_path):
    setting = StepConfig("cuda", "fp16", False, False, 4, False)
    found = {}
    for kind in KINDS:
        config = prepare_data(compose("tiny", [f"data.cache={tmp_path}", f"kind={kind}"], jobs), jobs)
        found[kind] = Predictor(config, jobs).predict(setting)
    parameters = 4 * 512  # four tensors in blocks of a GPU
    assert {kind: step.refused for kind, step in found.items()} == dict.fromkeys(KINDS, "")
    assert found["sgd"].optimizer == found["fused"].optimizer == found["sgd"].parameters == parameters
    assert found["lion"].optimizer == parameters + 4 * 512, "and a count for each of the four"


def test_the_command_says_a_mistake_before_the_first_step(jobs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["run", "tiny", "--synthetic", "--name", "r", "--jobs", str(jobs), f"data.cache={tmp_path}"]
    assert cli.main([*command, "optimizer.name=sgd"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"module\.py:\d+: Own\.build_optimizer does not use optimizer\.name=sgd\. Leave it out", said)
    assert cli.main([*command, "schedule.warmup=2st"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"module\.py:\d+: Own\.build_schedule does not use schedule\.warmup=2st\.", said)
    assert not (tmp_path / "runs/tiny/r").exists()
