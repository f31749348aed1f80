"""The training run: steps, evaluation, checkpoints and stopping, from wherever the run folder says it stands."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from loguru import logger

from trainyard.data.loader import MicroBatch
from trainyard.errors import NotFinite, UserError
from trainyard.settings import Duration
from trainyard.train import checkpoint, distributed, precision
from trainyard.train.console import ProgressBar, format_line
from trainyard.train.distributed import Agreement
from trainyard.train.evaluate import evaluate
from trainyard.train.meters import DeferredScalar, Interval, StepMeter, peak_memory_gib, skipped_in_a_row
from trainyard.train.module import TrainModule
from trainyard.train.recorder import Recorder, write_report_figures
from trainyard.train.run_context import TRAIN, VALIDATION, RunContext, epoch_order, make_loader, total_steps
from trainyard.train.run_state import encode_state, prepare_state
from trainyard.train.schedule import lr_factor
from trainyard.train.step import (
    StepResult,
    TrainState,
    train_step,
)
from trainyard.train.stop import RuntimeLimit, Stop, StopFlag

MAX_SKIPPED = 20
"""Steps in a row that loss scaling may skip while it looks for a scale; from 2**16 it needs 16 to get down to 1."""


def fit(job: RunContext, *, stop: StopFlag, limit: RuntimeLimit) -> Stop:
    """Train, or go on training, until the end or a reason to stop; return the reason.

    Raises:
        UserError: the run folder holds the state of other data, gradients are not finite, or saving fails.
    """
    state, position = prepare_state(job)
    recorder = _recorder(job, state, position) if job.world.is_main else None
    try:
        return Trainer(job, state, recorder, stop, limit).run()
    except Exception as error:
        if recorder is not None:
            recorder.log("event", state.progress.step, {"event": "failed", "reason": str(error)})
        raise
    finally:
        if recorder is not None:
            recorder.close()


class Trainer:
    """One start of a run, on one rank. Methods stand in the order in which they are called."""

    def __init__(
        self, job: RunContext, state: TrainState, recorder: Recorder | None, stop: StopFlag, limit: RuntimeLimit
    ) -> None:
        self.job, self.config, self.state, self.recorder = job, job.config, state, recorder
        self.stop, self.limit = stop, limit
        self.autocast = precision.autocast(job.precision, job.device)
        self.loader = make_loader(job)
        self.order = epoch_order(job, state.progress.epoch)
        self.total_steps = total_steps(job.config, len(self.order))
        self.log_every, self.eval_every, self.save_every, self.keep_every = (
            Interval(text, len(self.order))
            for text in (
                self.config.log_every,
                self.config.eval_every,
                self.config.checkpoint.every or "0min",  # due after the first step, whose save measures the cost
                self.config.checkpoint.keep_every,
            )
        )
        self.minutes = _minutes(self.config.max_duration)
        self.agreement = Agreement(4)
        self.meter = StepMeter()
        self.unread: DeferredScalar | None = None
        self.skipped_in_a_row = 0
        self.save_s = self.longest_step_s = 0.0

    def run(self) -> Stop:
        """Take the steps that are left; when there are none, score the test sets with the best weights."""
        reason = Stop.NONE if self._at_end() else self._steps()
        if reason is Stop.NONE:
            self._test()
        self._event("done" if reason is Stop.NONE else "stop", reason=reason.name.lower().replace("_", " "))
        distributed.barrier()  # nobody leaves while another still needs it
        return reason

    def _steps(self) -> Stop:
        progress = self.state.progress
        stream = self.loader.train(
            lambda epoch: epoch_order(self.job, epoch),
            epoch=progress.epoch,
            start=progress.batches_done,
            micro_batch_size=self.config.micro_batch_size,
        )
        bar = ProgressBar(self.total_steps, step=progress.step, show=self.job.world.is_main)
        watch = self._watch()
        try:
            while True:
                with watch:
                    result = self._step(stream)
                watch = nullcontext()
                bar.update(progress.step)
                self._beat("training")
                self._check_finite(result)
                if self.log_every.due_at(progress.step):
                    self._log(result)
                reason, minutes_up, evaluate_now, save_now = self._agree()
                end = self._at_end() or bool(minutes_up)
                leaving = end or reason != Stop.NONE
                with self.meter.paused():
                    if evaluate_now or end or self.eval_every.due_at(progress.step):
                        save_now |= self._evaluate()
                    if save_now or leaving or self.save_every.due_at(progress.step):
                        self._save()
                if leaving:
                    return Stop.NONE if end else Stop(reason)
        finally:
            stream.close()
            bar.close()
            self.agreement.settle()

    def _watch(self) -> AbstractContextManager[None]:
        """Return the context of the first step: it records operators without a deterministic kernel."""
        if not self.config.deterministic:
            return nullcontext()
        return precision.nondeterministic_operators(
            lambda names: self._event("nondeterministic", operators=names) if names else None
        )

    def _step(self, stream: Iterable[MicroBatch]) -> StepResult:
        progress = self.state.progress
        begin = time.monotonic()
        result = train_step(
            self.state,
            _one_step(stream, progress.samples_seen, self.job.device),
            lr=self._lr(),
            world_size=self.job.world.world_size,
            seed=self.config.seed * 1_000_003 + self.job.world.rank,
            clip_grad_norm=self.config.clip_grad_norm,
            autocast=self.autocast,
        )
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - begin)
        progress.train_s += time.monotonic() - begin
        samples = len(self.order.batch(progress.batches_done))
        self.meter.add(samples, result.wait_s)
        progress.step += 1
        progress.samples_seen += samples
        progress.batches_done += 1
        if progress.batches_done == len(self.order):
            progress.epoch, progress.batches_done = progress.epoch + 1, 0
            self.order = epoch_order(self.job, progress.epoch)
        return result

    def _lr(self) -> float:
        factor = lr_factor(
            self.state.progress.step,
            self.config.schedule,
            total_steps=self.total_steps,
            steps_per_epoch=len(self.order),
        )
        return self.config.optimizer.lr * factor

    def _check_finite(self, result: StepResult) -> None:
        """Look at the step before this one, so that the host never waits for the device."""
        before, self.unread = self.unread, DeferredScalar(self.state.progress.step, result.skipped)
        self._check_previous_step(before)

    def _check_previous_step(self, read: "DeferredScalar | None") -> None:
        self.skipped_in_a_row = skipped_in_a_row(self.skipped_in_a_row, None if read is None else read.value())
        if read is None or not read.value():
            return
        if not self.job.precision.loss_scaling:
            raise NotFinite(
                f"Step {read.step}: the gradient is not finite, so the step was not taken and nothing after it is "
                "saved. Usual causes: a learning rate too high (optimizer.lr, schedule.warmup), a broken sample, a "
                f"division by zero in the loss. Go on from the last checkpoint: trainyard resume {self.job.run}"
            )
        self._event("skipped_step", at=read.step, reason="overflow in fp16; loss scale halved")
        if self.skipped_in_a_row > MAX_SKIPPED:
            raise NotFinite(
                f"Step {read.step}: {self.skipped_in_a_row} steps in a row overflowed in fp16, so it is not the loss "
                "scale. Try precision=fp32, or a lower optimizer.lr."
            )

    def _log(self, result: StepResult) -> None:
        """Write the losses of this step's whole global batch, and the timings since the last line."""
        names = list(result.losses)
        values = distributed.sum_over_ranks(torch.stack([result.losses[name] for name in names])).tolist()
        if self.recorder is None:
            return
        progress = self.state.progress
        line = {
            "epoch": progress.epoch,
            "samples_seen": progress.samples_seen,
            **dict(zip(names, values, strict=True)),
            "lr": self.state.optimizer.param_groups[0]["lr"],
            "grad_norm": float(result.grad_norm),
            **self.meter.timings(),
            "memory_gib": peak_memory_gib(self.job.device),
        }
        self.recorder.log("train", progress.step, line)
        self.job.heartbeat.samples_per_s = line["samples_per_s"]
        total = {} if self.total_steps is None else {"total_steps": self.total_steps}
        logger.info(format_line({"step": progress.step, **total, **line}))

    def _agree(self) -> list[int]:
        """Offer what this rank sees, and learn what the ranks saw a step ago; rank 0's clock counts for all."""
        reason, clock = self.stop.reason, self.job.world.is_main
        if self.limit.reached(reserve_s=2 * (self.longest_step_s + self.save_s) + 1):
            reason = max(reason, Stop.TIME_LIMIT)
        minutes_up = clock and self.minutes is not None and self.state.progress.train_s / 60 >= self.minutes
        return self.agreement.exchange(
            [
                int(reason),
                int(minutes_up),
                int(clock and self.eval_every.elapsed()),
                int(clock and self.save_every.elapsed()),
            ]
        )

    def _at_end(self) -> bool:
        return self.total_steps is not None and self.state.progress.step >= self.total_steps

    def _beat(self, phase: str, *, now: bool = False) -> None:
        if self.recorder is not None:
            self.job.heartbeat.beat(phase, step=self.state.progress.step, total_steps=self.total_steps, now=now)

    def _evaluate(self) -> bool:
        """Score the validation set; tell whether it is the best score yet."""
        self.eval_every.restart()
        if VALIDATION not in self.job.splits:
            return False
        metrics = self._score(VALIDATION, self._evaluated())
        name, mode = self.job.module.monitor
        if name not in metrics:
            raise UserError(f"score() gives {', '.join(metrics)}, but the model's monitor is '{name}'.")
        value, best = metrics[name], self.state.best
        sign = 1 if mode == "max" else -1
        if best is not None and sign * value <= sign * best["value"]:
            return False
        self.state.best = {"step": self.state.progress.step, "metric": name, "value": value}
        if self.state.swa is not None:
            self.state.swa.add(self._evaluated())
        return True

    def _evaluated(self) -> TrainModule:
        return self.state.module if self.state.ema is None else self.state.ema

    def _score(self, split: str, module: TrainModule, *, last: bool = False) -> dict[str, float]:
        """Score one set and log it; the last time with plots and images for the report."""
        self._beat("evaluating", now=True)
        begin = time.monotonic()
        metrics = evaluate(
            module,
            self.loader,
            self.job.splits[split],
            batch_size=self.config.eval_batch_size,
            autocast=self.autocast,
            show=partial(write_report_figures, self.job.run, split) if last else None,
        )
        progress = self.state.progress
        if self.recorder is not None:
            line = {"epoch": progress.epoch, "split": split, **metrics, "seconds": time.monotonic() - begin}
            self.recorder.log("eval", progress.step, line)
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if not k.endswith(("_low", "_high")))
            logger.info("{} at step {}: {}", split, progress.step, shown)
        return metrics

    def _save(self) -> None:
        """Write a checkpoint, drop old ones, and set the next interval by what it cost."""
        self._check_previous_step(self.unread)
        self.unread = None
        if self.recorder is not None:
            self._beat("saving", now=True)
            saved = self._write_checkpoint(self.recorder)
            self.save_s = saved.seconds
            self._event("checkpoint", seconds=saved.seconds, bytes=saved.bytes, file=saved.path.name)
        self.save_s = distributed.broadcast_from_rank0(self.save_s)
        settings = self.config.checkpoint
        if not settings.every:
            self.save_every.seconds = checkpoint.interval_s(
                max(self.save_s, 1e-3), mtbf_hours=settings.mtbf_hours, max_minutes=settings.max_minutes
            )
        self.save_every.restart()

    def _write_checkpoint(self, recorder: Recorder) -> checkpoint.Saved:
        state, folder = self.state, self.job.run / "checkpoints"
        data = self.job.data
        content = encode_state(
            state, fingerprint=data.fingerprint, metrics_position=recorder.position(), artifacts=data.artifacts
        )
        meta = {"epoch": state.progress.epoch, "world_size": self.job.world.world_size, "best": state.best}
        meta["swa"] = state.swa.count if state.swa is not None and state.swa.refreshed else 0
        saved = checkpoint.save(folder, content, step=state.progress.step, meta=meta)
        best = state.best["step"] if state.best else None
        checkpoint.prune(
            folder,
            keep_last=self.config.checkpoint.keep_last,
            protect=lambda step: step == best or self.keep_every.due_at(step),
        )
        return saved

    def _test(self) -> None:
        """Score the test sets, or validation where there are none, once, with the weights that are to be kept."""
        tests = [name for name in self.job.splits if name not in (TRAIN, VALIDATION)]
        shown = type(self.job.module).report_figures is not TrainModule.report_figures
        for name in tests or ([VALIDATION] if shown and VALIDATION in self.job.splits else []):
            self._score(name, self._final(), last=True)

    def _final(self) -> TrainModule:
        """Return the module with the averaged weights of the best, or with the best on validation."""
        if self.state.swa is not None and self.state.swa.count:
            if not self.state.swa.refreshed:
                self.state.swa.refresh(
                    self.loader,
                    self.job.splits[TRAIN],
                    batch_size=self.config.eval_batch_size,
                    autocast=self.autocast,
                )
                self._save()
            return self.state.swa.module
        module, best = self._evaluated(), self.state.best
        if best is not None and best["step"] != self.state.progress.step:
            saved = self._load_best(best["step"])
            module.load_state_dict(saved["ema"] or saved["model"])
        return module

    def _load_best(self, step: int) -> dict[str, Any]:
        for entry in checkpoint.entries(self.job.run / "checkpoints"):
            if entry.step == step:
                return checkpoint.load(entry.path)
        raise UserError(f"{self.job.run}/checkpoints: the best checkpoint, of step {step}, is gone.")

    def _event(self, name: str, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.log("event", self.state.progress.step, {"event": name, **fields})


def _minutes(text: str) -> float | None:
    length = Duration.parse(text)
    return length.value if length.unit == "min" else None


def _recorder(job: RunContext, state: TrainState, position: int | None) -> Recorder:
    Recorder.rewind(job.run, position or 0)  # killed before its first checkpoint, a run starts over
    recorder = Recorder(
        job.run,
        trackers=job.config.trackers,
        config=asdict(job.config),
        resume_at=None if position is None else state.progress.step,
        check_owner=job.check_owner,
    )
    metric, mode = job.module.monitor
    fields = {
        "event": "start" if position is None else "resume",
        "attempt": job.heartbeat.attempt,
        "total_steps": total_steps(job.config, len(epoch_order(job, 0))),
        "world_size": job.world.world_size,
        "device": job.device.type,
        "host": socket.gethostname(),
        "monitor": {"split": VALIDATION, "metric": metric, "mode": mode},
    }
    recorder.log("event", state.progress.step, fields)
    return recorder


def _one_step(stream: Iterable[MicroBatch], samples_seen: int, device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one optimizer step, each told how many samples the run had seen before it."""
    seen = torch.tensor(samples_seen).to(device, non_blocking=True)
    for micro in stream:
        micro.batch["samples_seen"] = seen
        yield micro
        if micro.last:
            return
