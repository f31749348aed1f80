"""Time is what the device took, not what launching took: the training loop on an imitated asynchronous device."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from tests.training import FAMILIES, load_state, new_run
from trainyard.config import compose as configs
from trainyard.config.families import load_family
from trainyard.config.settings import ScheduleSettings
from trainyard.data.loader import MicroBatch
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.hardware import choose_precision
from trainyard.report.run_story import RunStory
from trainyard.runs.events import read_events, read_metrics
from trainyard.runs.lock import RunLock
from trainyard.train.heartbeat import Heartbeat
from trainyard.train.meters import StepMeter
from trainyard.train.module import DataInfo
from trainyard.train.recorder import Recorder
from trainyard.train.run_context import RunContext
from trainyard.train.run_state import prepare_state
from trainyard.train.schedule import build_schedule
from trainyard.train.stop import RuntimeLimit, Stop, StopFlag
from trainyard.train.trainer import Trainer
from trainyard.train.world import World

LAUNCH_S = 0.3
"""What launching a micro-batch costs the host."""
COMPUTE_S = 1.0
"""What computing it costs the device."""


class ImitatedDevice:
    """Executes what is queued after the host has moved on, as a GPU does. Its clock is the host's, and imitated too."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.free_at_s = 0.0  # when all that is queued is done
        self.most_queued_s = 0.0

    def launch(self, *, host_s: float, device_s: float) -> None:
        """Queue work of `device_s`, the first of which can begin at once; launching the rest takes `host_s`."""
        self.free_at_s = max(self.free_at_s, self.now_s) + device_s
        self.most_queued_s = max(self.most_queued_s, self.free_at_s - self.now_s)
        self.now_s += host_s

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.free_at_s)

    def make_event(self) -> "ImitatedEvent":
        return ImitatedEvent(self)


@dataclass
class ImitatedEvent:
    """What torch.cuda.Event is to a GPU."""

    device: ImitatedDevice
    at_s: float = -1.0

    def record(self) -> None:
        self.at_s = max(self.device.free_at_s, self.device.now_s)

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, end_event: "ImitatedEvent") -> float:
        assert max(self.at_s, end_event.at_s) <= self.device.now_s, "CUDA raises: the device has not reached it"
        return 1000 * (end_event.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ImitatedDevice:
    imitated = ImitatedDevice()
    monkeypatch.setattr("time.monotonic", lambda: imitated.now_s)
    return imitated


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has not begun; its data is packed, in processes that need a real clock."""
    rarely = ("eval_every=1000ep", "checkpoint.every=1000st", "log_every=10st", "ema_decay=0", "data.decode=cpu")
    return new_run(tmp_path_factory.mktemp("meters"), *rarely)


@pytest.fixture
def run(new: Path, tmp_path: Path) -> Path:
    return shutil.copytree(new, tmp_path / "run")


def train(
    run: Path,
    device: ImitatedDevice,
    *,
    compute_s: float = COMPUTE_S,
    data_s: float = 0.0,
    prepare_s: float = 0.0,
    first_wait_s: float = 0.0,
    predict_s: float = 0.0,
    stop_at: int | None = None,
    limit: RuntimeLimit | None = None,
    **options: Any,
) -> Stop:
    """Train with the real loop; the model's work is also queued on the imitated device.

    Args:
        compute_s: work of a micro-batch.
        data_s: how long the loader takes for each.
        prepare_s: work that the loader queues when a micro-batch has arrived.
        first_wait_s: how long the host waited for the first micro-batch.
        predict_s: work of a batch of the evaluation.
        stop_at: a signal arrives in this step.
        options: of the run.
    """
    config = replace(configs.load_config(run / "config.yaml", FAMILIES), **options)
    data = ShardSet(Path(config.data.path))
    splits = load_family(FAMILIES, config.family, "pack").splits(data.columns, data.vocabulary, config)
    module = load_family(FAMILIES, config.family, "module").build(config, DataInfo.from_shards(data, splits["train"]))
    context = RunContext(
        config=config,
        module=module,
        data=data,
        splits=splits,
        world=World(),
        device=torch.device("cpu"),
        precision=choose_precision(None),
        decode="cpu",
        threads=1,
        run=run,
        heartbeat=Heartbeat(run, "imitated"),
        check_owner=lambda: None,
        micro_batch_size=config.micro_batch_size,
        eval_batch_size=config.eval_batch_size,
    )
    state, metrics_position = prepare_state(context)
    stop = StopFlag()

    compute, predict = state.model, module.predict

    def compute_on_device(batch: Any) -> Any:
        device.launch(host_s=LAUNCH_S, device_s=compute_s)
        if state.progress.step + 1 == stop_at:
            stop.reason = Stop.PREEMPTED
        return compute(batch)

    def predict_on_device(batch: Any) -> Any:
        device.launch(host_s=0.0, device_s=predict_s)
        device.wait()  # its rows are copied to the host
        return predict(batch)

    state.model = compute_on_device
    module.predict = predict_on_device  # type: ignore[method-assign]
    Recorder.rewind(run, metrics_position or 0, step=state.progress.step)
    resume_at = None if metrics_position is None else state.progress.step
    with closing(Recorder(run, trackers=(), config={}, resume_at=resume_at)) as recorder:
        unlimited = RuntimeLimit(None, started=0)
        schedule = build_schedule(module, config, steps_per_epoch=len(context.orders(0)))
        trainer = Trainer(context, state, schedule, recorder, stop, limit or unlimited, device.make_event)
        read = trainer.loader.train

        def read_late(*args: Any, **options: Any) -> Iterator[MicroBatch]:
            stream = read(*args, **options)
            yield replace(next(stream), wait_s=first_wait_s)
            for micro_batch in stream:
                yield replace(micro_batch, wait_s=0.0)

        wait_on_current_stream, prepare = trainer.loader._wait_on_current_stream, trainer.loader._make_model_input

        def wait_late(item: Any) -> None:
            device.now_s += data_s
            wait_on_current_stream(item)

        def prepare_on_device(*args: Any, **options: Any) -> Any:
            device.launch(host_s=0.0, device_s=prepare_s)
            return prepare(*args, **options)

        trainer.loader.train = read_late  # type: ignore[assignment,method-assign]
        trainer.loader._wait_on_current_stream = wait_late  # type: ignore[method-assign]
        trainer.loader._make_model_input = prepare_on_device  # type: ignore[method-assign]
        return trainer.run()


@pytest.mark.slow
def test_the_time_of_training_is_the_devices_time_over_all_attempts(run, device):
    begin = device.now_s
    assert train(run, device, max_duration="20st", stop_at=8) == Stop.PREEMPTED
    between = load_state(run)["progress/train_s"]
    assert between == pytest.approx(device.now_s - begin)
    device.now_s += 5000  # in the queue
    assert train(run, device, max_duration="20st") == Stop.NONE
    assert load_state(run)["progress/train_s"] == pytest.approx(20 * COMPUTE_S), "20 s of work; launching it took 6 s"
    assert device.most_queued_s == pytest.approx(2 * COMPUTE_S), "the host is one step ahead at most"


@pytest.mark.slow
def test_evaluation_is_no_time_of_training_and_no_idle_time(run, device):
    begin = device.now_s
    assert train(run, device, predict_s=7.0, max_duration="20st", eval_every="4st", eval_batch_size=20) == Stop.NONE
    assert load_state(run)["progress/train_s"] == pytest.approx(20 * COMPUTE_S)
    assert device.now_s - begin > 20 * COMPUTE_S
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 10, 20]
    assert [line["idle_ms"] for line in lines] == pytest.approx([0, 0, 0])
    assert [line["step_ms"] for line in lines] == pytest.approx([1000 * COMPUTE_S] * 3)


def test_a_run_whose_length_is_a_time_trains_that_long(run, device):
    begin = device.now_s
    assert (
        train(run, device, compute_s=2.0, max_duration="1min", schedule=ScheduleSettings(name="constant")) == Stop.NONE
    )
    assert 60 <= device.now_s - begin < 60 + 4 * 2.0, "the clock is one step late, and ranks act a step later"


def test_max_runtime_leaves_time_for_the_steps_that_the_device_has_not_finished(run, device):
    begin = device.now_s
    limit = RuntimeLimit(1, started=begin, now=lambda: device.now_s)
    assert train(run, device, compute_s=6.0, limit=limit, max_duration="1000st") == Stop.MAX_RUNTIME
    assert 60 - 4 * 6.0 < device.now_s - begin <= 60
    assert load_state(run)["progress/train_s"] == pytest.approx(device.now_s - begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "data_s", "idle_s"),
    [
        (1, 0.4, 0.4),  # once, after a log line, for which the host has waited for the device
        (2, 2.0, 2.0 + 19 * (2.0 + LAUNCH_S - COMPUTE_S)),
    ],
    ids=["data in time", "data late, two micro-batches"],
)
def test_idle_is_when_the_device_has_nothing_to_do_and_not_when_the_host_waits(parts, data_s, idle_s, run, device):
    train(run, device, data_s=data_s, max_duration="20st", micro_batch_size=12 // parts)
    line = [line for line in read_metrics(run) if line["kind"] == "train"][-1]
    assert line["compute_ms"] == pytest.approx(1000 * COMPUTE_S * parts)
    assert line["idle_ms"] == pytest.approx(1000 * idle_s / 10)
    assert line["step_ms"] == pytest.approx(line["compute_ms"] + line["idle_ms"])
    assert line["samples_per_s"] == pytest.approx(12_000 / line["step_ms"])


@pytest.mark.parametrize("parts", [1, 2])
def test_preparing_a_micro_batch_is_work_of_the_device(parts, run, device):
    train(run, device, prepare_s=0.5, max_duration="20st", micro_batch_size=12 // parts)
    line = [line for line in read_metrics(run) if line["kind"] == "train"][-1]
    assert line["idle_ms"] == pytest.approx(0)
    assert line["compute_ms"] == line["step_ms"] == pytest.approx(1000 * (COMPUTE_S + 0.5) * parts)


def test_waiting_for_the_micro_batch_that_is_tried_before_training_is_no_part_of_a_step(run, device):
    train(run, device, first_wait_s=60.0, max_duration="10st")
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [(line["step"], line["data_wait_ms"]) for line in lines] == [(1, 0), (10, 0)]


def test_the_loss_of_every_step_is_listed_once_and_the_first_and_the_last_step_have_a_line(new, run, device, tmp_path):
    whole = shutil.copytree(new, tmp_path / "whole")
    torch.manual_seed(0)  # the first weights of both
    assert train(whole, device, max_duration="13st") == Stop.NONE
    torch.manual_seed(0)
    assert train(run, device, max_duration="13st", stop_at=7) == Stop.PREEMPTED  # between two lines
    assert train(run, device, max_duration="13st") == Stop.NONE
    lines, resumed = ([line for line in read_metrics(one) if line["kind"] == "train"] for one in (whole, run))
    assert [(line["step"], len(line["step_losses"])) for line in lines] == [(1, 1), (10, 9), (13, 3)]
    assert [line["step_losses"] for line in resumed] == [line["step_losses"] for line in lines]
    for line in lines:
        assert line["step_losses"][-1] == pytest.approx(line["loss"], rel=1e-5), "six digits are listed"
    assert load_state(run)["progress/step"] == 13 and len(RunStory.read(run).list_step_losses()[1]) == 13


def test_on_the_cpu_idle_is_waiting_for_data(device):
    meter = StepMeter(None)
    total_s = 0.0
    for _ in range(4):
        device.now_s += 0.5
        for _ in meter.watch([12]):
            device.now_s += 1.5
        total_s += meter.end_step(12, wait_s=0.5)
    assert total_s + meter.synchronize() == pytest.approx(8.0)
    assert meter.longest_step_s == pytest.approx(2.0)
    timings = meter.pop_timings()
    assert timings == pytest.approx(
        {"samples_per_s": 6.0, "step_ms": 2000, "data_wait_ms": 500, "idle_ms": 500, "compute_ms": 1500}
    )


def test_what_a_writer_that_was_replaced_still_writes_is_not_read(tmp_path: Path):
    run = new_run(tmp_path)
    with closing(Recorder(run, trackers=(), config={}, resume_at=None)) as old:
        old.log("train", 4, {"loss": 1.0})
        old.log("event", 4, {"event": "start", "attempt": "local-1"})
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "tra')  # what a killed writer left
        with closing(Recorder(run, trackers=(), config={}, resume_at=4)) as new:
            new.log("train", 5, {"loss": 0.5})
            old.log("train", 5, {"loss": 9.0})  # the file system did not answer until now
            old.log("event", 5, {"event": "failed", "reason": "woke up"})
            new.log("train", 6, {"loss": 0.4})
            written = new.describe_metrics()
    assert [line["loss"] for line in read_metrics(run)] == [1.0, 0.5, 0.4]
    assert [event["event"] for event in read_events(run)] == ["start"]
    content = (run / "metrics.jsonl").read_bytes()
    assert written == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_heartbeat_of_a_run_that_was_taken_over_is_not_written(tmp_path: Path):
    heartbeat, lock = Heartbeat(tmp_path, "local-1"), RunLock(tmp_path, attempt="local-1")
    with lock:
        heartbeat.check_owner = lock.check
        heartbeat.beat("training", now=True)
        (tmp_path / "lock").unlink()
        before = (tmp_path / "heartbeat.json").read_text()
        with pytest.raises(UserError, match="no longer owns the run"):
            heartbeat.beat("training", step=9, now=True)
    assert (tmp_path / "heartbeat.json").read_text() == before


def test_a_heartbeat_that_cannot_be_written_is_warned_of_once_and_ends_nothing(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    heartbeat, said = Heartbeat(run, "first"), []
    heartbeat.beat("training", now=True)
    shutil.rmtree(run)  # as a network file system does for a moment
    sink = logger.add(said.append, format="{message}", level="WARNING")
    for _ in range(3):
        heartbeat.beat("training", now=True)
    logger.remove(sink)
    assert heartbeat.failed_writes == 3 and len(said) == 1 and "heartbeat.json: not written" in said[0]
    run.mkdir()
    heartbeat.beat("training", step=7, now=True)
    assert '"step": 7' in (run / "heartbeat.json").read_text()
