"""The training loop: steps, evaluation, checkpoints and stopping, from wherever the run folder says the run is."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from trainyard.choice import Choice
from trainyard.data.loader import MicroBatch
from trainyard.errors import NotFinite, OutOfDeviceMemory, UserError
from trainyard.runs.events import list_metric_names, read_metrics
from trainyard.runs.folder import record_choices
from trainyard.runs.manifest import CheckpointError, parse_name
from trainyard.runs.observations import OUT_OF_MEMORY, record_limit
from trainyard.scoring import explain_missing_intervals
from trainyard.text import quote_path
from trainyard.train import checkpoint, distributed, precision
from trainyard.train.best import explain_equals, is_better, require_metrics
from trainyard.train.console import ProgressBar, format_line
from trainyard.train.contract import try_predict
from trainyard.train.data_parallel import check_buffers_agree, hash_constant_buffers
from trainyard.train.determinism import (
    choose_determinism,
    describe_determinism,
    describe_sampling,
    explain_nondeterministic_operator,
)
from trainyard.train.distributed import Agreement, Decision
from trainyard.train.evaluate import evaluate, list_final_sets, open_source, store_pair_scores
from trainyard.train.memory_probe import probe_memory
from trainyard.train.meters import (
    DeferredScalar,
    DeviceEvent,
    Interval,
    StepMeter,
    choose_event_type,
    count_skipped_in_a_row,
    read_peak_memory_gib,
)
from trainyard.train.module import DataInfo, Rows, TrainModule
from trainyard.train.out_of_memory import BATCH_STATISTICS, EVALUATION, explain_out_of_memory, name_phase
from trainyard.train.own_optimizer import describe_own
from trainyard.train.recorder import Recorder, open_recorder, write_report_figures
from trainyard.train.run_context import (
    TRAIN,
    VALIDATION,
    RunContext,
    choose_monitor,
    compute_total_minutes,
    compute_total_steps,
    make_loader,
)
from trainyard.train.run_state import explain_misfit, prepare_state, wrap_model
from trainyard.train.saver import Saver
from trainyard.train.schedule import build_schedule
from trainyard.train.step import StepResult, TrainState, read_one_step, train_step
from trainyard.train.stop import RuntimeLimit, Stop, StopFlag
from trainyard.train.world import World

MOST_TRIED = 4
"""Micro-batches of each rank that are tried to find parameters which only some use."""

MAX_SKIPPED = 20
"""Steps in a row that loss scaling may skip while it searches for a scale; from 2**16 it needs 16 to get down to 1."""


def fit(context: RunContext, *, stop: StopFlag, limit: RuntimeLimit) -> Stop:
    """Start or resume training; return why it stopped.

    Raises:
        UserError: the checkpoint belongs to other data, gradients are not finite, or saving fails.
    """
    state, metrics_position = prepare_state(context)
    schedule = build_schedule(state.module, context.config, steps_per_epoch=len(context.orders(state.progress.epoch)))
    recorder = open_recorder(context, state.progress, metrics_position) if context.world.is_main else None
    try:
        return Trainer(context, state, schedule, recorder, stop, limit, choose_event_type(context.device)).run()
    except Exception as error:
        is_handled = isinstance(error, OutOfDeviceMemory) and error.next_micro_batch_size
        if recorder is not None and not is_handled:
            # If the disk is full, the error itself is more than a second one about this line.
            with suppress(OSError):
                fields = {"event": "failed", "reason": str(error), "spent": context.heartbeat.read_spent()}
                recorder.log("event", state.progress.step, fields)
        raise
    finally:
        if recorder is not None:
            recorder.close()


class Trainer:
    """One attempt of a run, on one rank. Methods are in the order in which they are called."""

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        schedule: Callable[[int], float],
        recorder: Recorder | None,
        stop: StopFlag,
        limit: RuntimeLimit,
        make_event: Callable[[], DeviceEvent] | None,
    ) -> None:
        self.context, self.config, self.state, self.recorder = context, context.config, state, recorder
        self.stop, self.limit = stop, limit
        self.autocast = precision.make_autocast(context.precision, context.device)
        self.loader = make_loader(context)
        self.micro_batch_size, self.eval_batch_size = context.micro_batch_size, context.eval_batch_size
        self.order, self.schedule = context.orders(state.progress.epoch), schedule
        if state.progress.batches_done >= len(self.order):
            raise CheckpointError(
                f"{context.run}/checkpoints: the newest is in batch {state.progress.batches_done} of an epoch of "
                f"{len(self.order)}. Trainyard never writes such a file: find out who did."
            )
        self.total_steps = compute_total_steps(context.config, len(self.order))
        self.log_every, self.eval_every = (
            Interval(text, len(self.order)) for text in (self.config.log_every, self.config.eval_every)
        )
        self.minutes = compute_total_minutes(context.config)
        self.monitor = choose_monitor(context)
        self.agreement = Agreement()
        self.make_event = make_event
        self.meter = StepMeter(make_event)
        self.previous_skipped: DeferredScalar | None = None
        self.skipped_in_a_row = 0
        self.saver = Saver(context, recorder, steps_per_epoch=len(self.order), log_event=self._log_event)

    def run(self) -> Stop:
        """Take the remaining steps; at the end of training, score the test sets with the final weights."""
        self._probe_memory()
        try:
            with explain_out_of_memory(self.context, self.micro_batch_size):
                self._score_before_training()
                reason = Stop.NONE if self._is_at_end() else self._train()
                if reason is Stop.NONE:
                    self._score_test_sets()
        finally:
            self.saver.close()
        name, why = "done" if reason is Stop.NONE else "stop", reason.name.lower()
        if self.recorder is not None:
            seen = {"epoch": self.state.progress.epoch, "samples_seen": self.state.progress.samples_seen}
            spent = self.context.heartbeat.read_spent()
            self._log_event(name, reason=why, metrics=self.recorder.describe_metrics(), spent=spent, **seen)
        distributed.barrier()  # no rank leaves while another still needs it
        return reason

    def _probe_memory(self) -> None:
        """Find out which batch sizes fit before training, and record it."""
        with self.meter.pause():
            probe = probe_memory(self.context, self.state, self.loader, self.order, autocast=self.autocast)
        self._lower("micro_batch_size", probe.micro_batch_size, "the memory probe found no room for more")
        self._lower("eval_batch_size", probe.eval_batch_size, "the memory probe found no room for more")
        self._record_choice("memory_probe", Choice(probe.finding, probe.reason))

    @precision.allow_nondeterministic_operators()
    def _score_before_training(self) -> None:
        """Score every set with the weights that training starts from, which are never the best ones."""
        if self.config.eval_on_start and self.state.progress.step == 0:
            with self.meter.pause():
                for split in self.context.splits:
                    if split != TRAIN:
                        self._score(split, self._select_eval_module())
            self._beat("preparing")

    def _train(self) -> Stop:
        progress = self.state.progress
        stream = self.loader.train(
            self.context.orders,
            epoch=progress.epoch,
            start=progress.batches_done,
            micro_batch_size=self.micro_batch_size,
            on_arrival=self.meter.note_arrival,
        )
        bar = ProgressBar(self.total_steps, step=progress.step, show=self.context.world.is_main)
        try:
            with self.meter.pause():
                micro_batches = self._try_first_batch(stream)
            if self.context.precision.compile:
                self._beat("compiling", now=True)  # in the first step
            while True:
                with explain_nondeterministic_operator(self.context.run):
                    result = self._take_step(micro_batches)
                bar.update(progress.step)
                self._beat("training")
                self._check_finite(result)
                agreed = self._agree()
                if agreed.written and self.saver.is_writing:
                    self.saver.finish(wait=False)
                finished = self._is_at_end() or agreed.time_is_up
                if finished or progress.step == 1 or self.log_every.is_due_at(progress.step):
                    self._log_step(result)
                leaving = finished or agreed.stop != Stop.NONE
                has_to_evaluate = agreed.evaluate or finished or self.eval_every.is_due_at(progress.step)
                has_to_save = agreed.save or leaving or self.saver.every.is_due_at(progress.step)
                if has_to_evaluate or has_to_save:
                    self._synchronize()
                    with self.meter.pause():
                        is_best = has_to_evaluate and self._evaluate()
                    finished = finished or self._is_out_of_patience()
                    if finished and len(self.state.step_losses):
                        self._log_step(result)
                    with self.meter.pause():
                        if has_to_save or is_best or finished:
                            self._save(wait=leaving or finished)
                    self._beat("training")
                if leaving or finished:
                    return Stop.NONE if finished else agreed.stop
        except BaseException:
            self.agreement.abandon()
            raise
        finally:
            stream.close()
            bar.close()
            self.agreement.wait()

    def _try_first_batch(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Check and wrap the module, and choose and record how deterministic this run is; return all micro-batches."""
        context = self.context
        peeked: list[MicroBatch] = []

        def peek(most: int = 1) -> list[MicroBatch]:
            step = read_one_step(stream, self.state.progress, context.device)
            while len(peeked) < most and not (peeked and peeked[-1].last):
                peeked.append(replace(next(step), wait_s=0.0))  # waited for already, while the meter is paused
            return peeked

        if self.state.progress.step == 0 and len(context.splits) > 1:
            with name_phase(EVALUATION):
                try_predict(self.state.module, peek()[0].batch, self.autocast)
        ddp = wrap_model(context, self.state, partial(peek, MOST_TRIED), autocast=self.autocast)
        findings = None
        if self.config.deterministic:
            findings = choose_determinism(
                self.state.module,
                lambda: peek()[0],
                run=context.run,
                device=context.device,
                is_main=context.world.is_main,
                autocast=self.autocast,
            )
            if findings.operators:
                self._log_event("nondeterministic", operators=findings.operators)
        sampling = {"sampling": describe_sampling(context.device)} if self.state.module.samples_maps else {}
        own = describe_own(self.state.module, self.state.optimizer)
        for name, choice in (ddp | describe_determinism(findings) | sampling | own).items():
            self._record_choice(name, choice)
            logger.info("{:<16} {}  ({})", name, *choice)
        return itertools.chain(peeked, stream)

    def _take_step(self, stream: Iterable[MicroBatch]) -> StepResult:
        progress, is_first = self.state.progress, not self.meter.longest_step_s
        buffers = hash_constant_buffers(self.state.module) if is_first else {}
        result = train_step(
            self.state,
            self.meter.watch(self._touch_heartbeat(read_one_step(stream, progress, self.context.device))),
            lr=self.schedule(self.state.progress.step),
            world_size=self.context.world.world_size,
            seed=self.config.seed * 1_000_003 + self.context.world.rank,
            clip_grad_norm=self.config.clip_grad_norm,
            autocast=self.autocast,
        )
        if is_first:
            check_buffers_agree(self.state.module, buffers)
        self.state.step_losses.add(result.losses["loss"])
        samples = len(self.order.batch(progress.batches_done))
        progress.train_s += self.meter.end_step(samples, result.wait_s)
        if is_first:
            self._synchronize()  # the first step: the runtime limit needs to know how long one takes
        progress.step += 1
        progress.samples_seen += samples
        progress.batches_done += 1
        if progress.batches_done == len(self.order):
            progress.epoch, progress.batches_done = progress.epoch + 1, 0
            self.order = self.context.orders(progress.epoch)
        return result

    def _touch_heartbeat(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            self.context.heartbeat.touch()
            yield micro_batch

    def _synchronize(self) -> None:
        """Wait for the device, so that the time of every step so far is known."""
        self.state.progress.train_s += self.meter.synchronize()

    def _check_finite(self, result: StepResult) -> None:
        """Check the previous step, so that the host never waits for the device."""
        previous = self.previous_skipped
        self.previous_skipped = DeferredScalar(self.state.progress.step, result.skipped, self.make_event)
        self._check_previous_step(previous)

    def _check_previous_step(self, skipped: DeferredScalar | None) -> None:
        self.skipped_in_a_row = count_skipped_in_a_row(
            self.skipped_in_a_row, None if skipped is None else skipped.read()
        )
        if skipped is None or not skipped.read():
            return
        if not self.context.precision.loss_scaling:
            raise NotFinite(
                f"Step {skipped.step}: the gradient is not finite, so the step was skipped and nothing after it is "
                "saved. Usual causes: a learning rate that is too high (optimizer.lr, schedule.warmup), a broken "
                "sample, a division by zero in the loss. A resume takes the same steps again; the remedy: "
                f"trainyard why {quote_path(self.context.run)}"
            )
        self._log_event("skipped_step", at=skipped.step, reason="overflow in fp16; loss scale halved")
        if self.skipped_in_a_row > MAX_SKIPPED:
            raise NotFinite(
                f"Step {skipped.step}: {self.skipped_in_a_row} steps in a row overflowed in fp16, so the loss scale is "
                "not the cause. Try precision=fp32, or a lower optimizer.lr."
            )

    def _log_step(self, result: StepResult) -> None:
        """Write the losses of this step's whole global batch, and the timings since the last line."""
        values, listed = self.state.step_losses.sum_over_ranks(result.losses), self.state.step_losses.pop()
        if self.recorder is None:
            return
        self._synchronize()
        progress = self.state.progress
        line = {
            "epoch": progress.epoch,
            "samples_seen": progress.samples_seen,
            **values,
            "lr": self.state.optimizer.param_groups[0]["lr"],
            "grad_norm": float(result.grad_norm),
            **self.meter.pop_timings(),
            "memory_gib": read_peak_memory_gib(self.context.device),
        }
        self.recorder.log("train", progress.step, {**line, "step_losses": listed})
        self.context.heartbeat.samples_per_s = line["samples_per_s"]
        total = {} if self.total_steps is None else {"total_steps": self.total_steps}
        logger.info(format_line({"step": progress.step, **total, **line}))

    def _agree(self) -> Decision:
        """Propose this rank's decision; return the one agreed on a step ago. Rank 0's clock counts for all."""
        reason, has_clock = self.stop.reason, self.context.world.is_main
        steps = self.meter.unfinished_steps + 2  # ranks act on a decision a step later, and the next is a step away
        if self.limit.is_reached(reserve_s=steps * self.meter.longest_step_s + self.saver.reserve_s + 1):
            reason = max(reason, Stop.MAX_RUNTIME)
        time_is_up = has_clock and self.minutes is not None and self.state.progress.train_s / 60 >= self.minutes
        return self.agreement.exchange(
            Decision(
                stop=reason,
                time_is_up=time_is_up,
                evaluate=has_clock and self.eval_every.has_elapsed(),
                save=has_clock and self.saver.has_elapsed(),
                written=self.saver.has_written(),
            )
        )

    def _is_at_end(self) -> bool:
        has_all_steps = self.total_steps is not None and self.state.progress.step >= self.total_steps
        return has_all_steps or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.state.plateau.evaluations

    def _beat(self, phase: str, *, now: bool = False) -> None:
        self.context.heartbeat.input_wait_s = self.meter.input_wait_s
        self.context.heartbeat.beat(phase, step=self.state.progress.step, total_steps=self.total_steps, now=now)

    @precision.allow_nondeterministic_operators()  # scoring has no backward pass, and changes no weights
    def _evaluate(self) -> bool:
        """Score the validation set; return whether it is the best score so far."""
        self.eval_every.restart()
        if VALIDATION not in self.context.splits:
            return False
        metrics = self._score(VALIDATION, self._select_eval_module())
        require_metrics(metrics, self.monitor)
        (name, mode), *ties = self.monitor
        self.state.plateau.add(metrics[name], mode, self.config.min_delta)
        if self._is_out_of_patience():
            self._log_event("out_of_patience", evaluations=self.state.plateau.evaluations, metric=name)
            logger.info("complete: {} evaluations without a better {}", self.state.plateau.evaluations, name)
        if not is_better(metrics, self.state.best, self.monitor):
            return False
        values = {"value": metrics[name], "ties": [metrics[tie] for tie, _ in ties]}
        self.state.best = {"step": self.state.progress.step, "metric": name, **values}
        if self.state.swa is not None:
            self.state.swa.add(self._select_eval_module())
        return True

    def _select_eval_module(self) -> TrainModule:
        return self.state.module if self.state.ema is None else self.state.ema

    def _score(
        self, split: str, module: TrainModule, *, last: bool = False, compares: bool = False
    ) -> dict[str, float]:
        """Score one split and log it; the last time, also save plots and images for the report.

        Args:
            compares: also score the family's methods without a network.
        """
        self._beat("evaluating", now=True)
        begin, step = time.monotonic(), self.state.progress.step
        metrics, shown = evaluate(
            module,
            self.loader,
            self.context.splits[split],
            batch_size=self.eval_batch_size,
            autocast=self.autocast,
            save_figures=partial(write_report_figures, self.context.run, self.recorder, split, step) if last else None,
            with_samples=self.config.report.samples == "on",
            progress=self.context.heartbeat.touch,
            keep_smaller=partial(self._lower, "eval_batch_size", reason="an evaluation found no room for more"),
            compare=partial(self._compare, split, module) if compares and module.rivals else None,
        )
        if self.recorder is not None:
            line = {"epoch": self.state.progress.epoch, "split": split, **metrics, "seconds": time.monotonic() - begin}
            self.recorder.log("eval", step, line | ({"shown": shown} if shown else {}))
            values = "  ".join(f"{name} {metrics[name]:.4g}" for name in list_metric_names(metrics))
            logger.info("{} at step {}: {}", split, step, values)
            if missing := explain_missing_intervals(metrics):
                logger.info(missing)
        return metrics

    def _compare(self, split: str, module: TrainModule, rows: Rows) -> None:
        """Score the family's methods without a network on the same samples, and log it. On rank 0 alone."""
        context, begin = self.context, time.monotonic()
        loader = make_loader(replace(context, world=World()))
        data = DataInfo.from_shards(context.data, context.splits[TRAIN])
        evaluated, training = (
            open_source(loader, data, np.sort(context.splits[name]), batch_size=self.eval_batch_size)
            for name in (split, TRAIN)
        )
        try:
            baselines = module.score_baselines(rows, evaluated, lambda: training)
        except UserError as error:
            logger.warning("{}: no method without a network could be scored: {}", split, error)
            return
        metrics = {name: baselines[name].metrics for name in module.rivals if name in baselines}
        finite = {
            method: {name: float(value) for name, value in values.items() if math.isfinite(value)}
            for method, values in metrics.items()
        }
        self._log_event("baselines", split=split, scores=finite, seconds=round(time.monotonic() - begin, 3))

    def _save(self, *, wait: bool) -> None:
        """Save a checkpoint; with `wait`, return only when it is complete."""
        self._check_previous_step(self.previous_skipped)
        self.previous_skipped = None
        self._beat("saving", now=True)
        self.state.step_losses.sum_over_ranks()
        self.saver.save(self.state, wait=wait)

    @precision.allow_nondeterministic_operators()
    def _score_test_sets(self) -> None:
        """Score the test sets with the final weights, and keep the scores of validation pairs for thresholds."""
        names, has_pairs = list_final_sets(self.context)
        if not names and not has_pairs:
            return
        self._beat("evaluating", now=True)  # loading the final weights may also take long
        module, step = self._load_final_weights()
        for name in names:
            self._score(name, module, last=True, compares=self.config.score_baselines and name == names[0])
        if has_pairs:
            self._beat("evaluating", now=True)
            store_pair_scores(self.context, module, self.loader, step=step, autocast=self.autocast)

    def _load_final_weights(self) -> tuple[TrainModule, int]:
        """Return the module with the final weights, and their step: the SWA average if there is one, else the best."""
        if self.state.swa is not None and self.state.swa.count:
            if not self.state.swa.refreshed:
                with name_phase(BATCH_STATISTICS):
                    self.state.swa.refresh(
                        self.loader,
                        self.context.splits[TRAIN],
                        batch_size=self.config.eval_batch_size,
                        autocast=self.autocast,
                    )
                self._save(wait=True)
            self._record_choice("final_weights", Choice(f"the mean of {self.state.swa.count}", "swa=true"))
            return self.state.swa.module, self.state.progress.step
        module, best = self._select_eval_module(), self.state.best
        why = f"best on validation: {best['metric']} {best['value']:.4g}" if best else "there is no validation"
        if best is not None and self.context.world.is_main:
            scored = (line for line in read_metrics(self.context.run) if line.get("split") == VALIDATION)
            if equals := explain_equals(scored, best, self.monitor):
                logger.warning(equals)
        if best is None or best["step"] == self.state.progress.step:
            self._record_choice("final_weights", Choice(f"step {self.state.progress.step}", why))
            return module, self.state.progress.step
        chosen: tuple[Path, str] | None = None
        if self.context.world.is_main:  # so that all load the same
            entry, problem = checkpoint.choose_undamaged(self.context.run / "checkpoints", step=best["step"])
            chosen = entry.path, problem
        path, problem = distributed.broadcast_from_rank0(chosen)
        saved = checkpoint.read_verified(path)
        with explain_misfit(path):
            module.load_state_dict(saved["ema"] or saved["model"])
        self._record_choice("final_weights", Choice(f"step {parse_name(path)[0]}", problem or why))
        if problem:
            run = self.context.run
            logger.warning("{}: {}, and score the test sets again: trainyard resume {}", run, problem, run)
            self._log_event("best_unusable", used=path.name, reason=problem)
        return module, parse_name(path)[0]

    def _lower(self, name: str, size: int, reason: str) -> None:
        """Use a smaller `micro_batch_size` or `eval_batch_size`, and record it for later attempts."""
        if size < (before := getattr(self, name)):
            setattr(self, name, size)
            limit = Choice(size, f"halved from {before}: {reason}")
            self._record_choice(name, limit)
            self._log_event(OUT_OF_MEMORY, reason=limit.reason, **{name: size})
            if self.recorder is not None:
                record_limit(self.context.run, name, limit)

    def _record_choice(self, name: str, choice: Choice[Any]) -> None:
        if self.recorder is not None:
            record_choices(self.context.run, {name: choice})

    def _log_event(self, name: str, *, step: int | None = None, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.log("event", self.state.progress.step if step is None else step, {"event": name, **fields})
