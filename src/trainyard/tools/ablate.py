"""Measures the gain of each optimisation on this machine: alone, in a loop without any, and with all the others.

Each round measures every loop once, in random order: other work on the machine slows all loops alike. A gain is the
geometric mean of the rounds' ratios, with Student's 95 % interval of their logarithms. The control, a loop that is
measured twice, shows how precise the gains are.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from loguru import logger

from trainyard.config.duration import Duration
from trainyard.data.index import ARRAY, IMAGE, VARYING_AXES
from trainyard.errors import ALLOCATION_ERRORS, UserError, is_out_of_memory
from trainyard.hardware import count_cores, explain_missing_compiler
from trainyard.measure import Ratio
from trainyard.report.figures import BLUE, SERIES, draw_figure
from trainyard.text import align_columns, find_nearest, format_duration, format_size
from trainyard.tools.naive_loop import Loop, LoopRunner, Turn
from trainyard.train.own_optimizer import is_own
from trainyard.train.precision import read_capability
from trainyard.train.run_context import TRAIN, VALIDATION

STEP, VALIDATION_SET, EPOCH = "training", "validation", "training and validation"
"""The part of an epoch whose time a gain compares."""
CONTROL = "nothing (control)"

_PARITY_STEPS = 6
_LEAST_ROUNDS = 4
_ROUNDS, _LONGEST_TURN_S = 10, 0.25  # short, because other machines of a host come and go within seconds
_MOST_WORKERS = 4  # the guides' number


@dataclass(frozen=True)
class Switch:
    """One optimisation: its change in a loop, and the loop in which it can be changed alone."""

    name: str
    on: Mapping[str, Any]  # fields of `Loop`
    needs: Mapping[str, Any] = field(default_factory=dict)  # without which it does nothing: part of both loops
    of: str = STEP
    same_work: bool = True  # else losses are not compared: other batches, another model
    missing: str = ""  # why it cannot be measured here
    job: str = ""  # of which the loop is: one of `Ablation.runners`


@dataclass(frozen=True)
class Subject:
    """One loop to measure: of which job, and whether it trains or evaluates."""

    job: str
    kind: str  # STEP or VALIDATION_SET
    loop: Loop
    copy: int = 0  # 1: measured once more, as the control


Pair = tuple[tuple[Subject, ...], tuple[Subject, ...]]
"""Without and with a switch; of several subjects the seconds add up."""


@dataclass
class Row:
    """Measurements of one switch."""

    switch: str
    of: str
    alone: Ratio | None = None
    joint: Ratio | None = None  # with all the others; None: no part of the full set can be changed so
    alone_s: tuple[list[float], list[float]] | None = None  # seconds of an epoch without and with it, by round
    loss_difference: float | None = None  # largest relative difference of the first steps' losses
    memory_bytes: tuple[int, int] | None = None  # without and with it
    warm_up_s: float = 0.0  # of its first step, longer than without it
    break_even_steps: float | None = None  # after which a longer first step has paid
    note: str = ""


@dataclass
class Result:
    """All rows, the largest gain first, and what all switches give together."""

    rows: list[Row]
    control: Ratio
    control_s: tuple[list[float], list[float]] | None
    naive: float  # samples per second
    full: float
    together: Ratio  # full against naive
    single_product: float  # of the single gains of training
    own: Ratio  # Trainyard's own step, as the job is configured, against the full loop
    rounds: int
    seconds: float


def list_switches(runner: LoopRunner, naive: Loop, full: Loop, environ: Mapping[str, str]) -> list[Switch]:
    """Return the guides' switches for a job on this machine."""
    context, module = runner.context, runner.module
    on_cpu = context.device.type == "cpu"
    no_gpu = "needs a GPU" if on_cpu else ""
    no_halves = "" if context.precision.dtype != "fp32" else "this card or the job's precision= allows fp32 alone"
    images = "" if IMAGE in context.data.records else "the job has no images"
    encoded = any(records.kind not in (ARRAY, *VARYING_AXES) for records in context.data.records.values())
    compiler = explain_missing_compiler(read_capability(context.device), environ) or ""
    layers = "" if list(module.repeated_layers()) else "the model names no repeated layers"
    split = naive.micro_batch < full.micro_batch
    indivisible = "" if split else f"a micro-batch of {full.micro_batch} cannot be divided"
    unset = "" if len(runner.eval_ids) else "the job has no validation set"
    own = "the family brings its own optimizer" if is_own(module, "build_optimizer") else ""
    workers = {"workers": full.workers}
    return [
        Switch("worker processes", workers),
        Switch("persistent workers", {"persistent": True}, workers),
        Switch("4 batches prefetched", {"prefetch": 4}, workers),
        Switch("pinned memory", {"pinned": True}, missing=no_gpu),
        Switch("non-blocking copies", {"non_blocking": True}, {"pinned": True}, missing=no_gpu),
        Switch("shards", {"files": False}),
        Switch("threads instead of workers", {"loader": "cpu"}, {"files": False}),
        Switch(
            "DALI",
            {"loader": "dali"},
            {"files": False, "loader": "cpu"},
            missing="" if full.loader == "dali" and encoded else "nothing that DALI decodes, or no DALI",
        ),
        Switch(
            "the job's order",
            {"is_ordered": True},
            same_work=False,
            missing="batches of identities are the job's work" if naive.is_ordered else "",
        ),
        Switch("AMP", {"amp": True}, missing=no_gpu or no_halves),
        Switch("TF32", {"tf32": True}, missing=no_gpu or ("" if context.precision.tf32 else "not on this card")),
        Switch("channels_last", {"channels_last": True}, missing=images),
        Switch("cudnn.benchmark", {"benchmark": True}, missing=no_gpu),
        Switch("torch.compile", {"compile": True}, missing=compiler),
        Switch("larger batch", {"micro_batch": full.micro_batch}, same_work=False, missing=indivisible),
        Switch(
            "accumulation",
            {"micro_batch": naive.micro_batch, "accumulate": full.micro_batch // naive.micro_batch * full.accumulate},
            same_work=False,
            missing=indivisible,
        ),
        Switch("activation checkpointing", {"recompute": True}, missing=layers),
        Switch("fused optimizer", {"fused": True}, missing=own),
        Switch("zero_grad(set_to_none)", {"set_to_none": True}),
        Switch(
            f"loss read every {full.log_every} steps",
            {"log_every": full.log_every},
            missing="" if full.log_every > 1 else "the job logs every step",
        ),
        Switch("inference_mode", {"inference_mode": True}, of=VALIDATION_SET, missing=unset),
        Switch("larger validation batch", {"eval_batch": full.eval_batch}, of=VALIDATION_SET, missing=unset),
        Switch("validation every 2nd epoch", {}, of=EPOCH, same_work=False, missing=unset),
    ]


def build_loops(runner: LoopRunner, *, compile: bool, recompute: bool) -> tuple[Loop, Loop]:
    """Return the loop without any optimisation, and with all that the job has.

    Args:
        compile, recompute: whether the job compiles, and recomputes activations.
    """
    context = runner.context
    config, policy, on_gpu = context.config, context.precision, context.device.type == "cuda"
    micro = context.micro_batch_size or config.global_batch_size
    groups = config.data.order == "pxk"  # of which a batch consists: they are the job's work
    unit = config.data.samples_per_identity if groups else 1
    divisor = next((d for d in (4, 3, 2) if micro % (d * unit) == 0), 1)
    every = Duration.parse(config.log_every)
    naive = Loop(micro_batch=micro // divisor, eval_batch=micro // divisor, is_ordered=groups)
    full = Loop(
        micro_batch=micro,
        accumulate=max(1, config.global_batch_size // micro),
        eval_batch=context.eval_batch_size,
        log_every=20 if every.unit == "min" else max(1, every.to_steps(len(context.orders(0)))),
        files=False,
        loader=context.decode,
        is_ordered=True,
        workers=min(_MOST_WORKERS, count_cores()),
        persistent=True,
        prefetch=4,
        pinned=on_gpu,
        non_blocking=on_gpu,
        amp=policy.dtype != "fp32",
        tf32=policy.tf32,
        channels_last=policy.channels_last,
        benchmark=on_gpu,
        compile=compile,
        recompute=recompute,
        fused=True,
        set_to_none=True,
        inference_mode=True,
    )
    return naive, full


class Ablation:
    """Measures switches of a job, and of variants of it that are switches too."""

    def __init__(self, runners: Mapping[str, LoopRunner], naive: Loop, full: Loop, switches: Sequence[Switch]) -> None:
        """Pair the loops.

        Args:
            runners: "" the job; others by the name of the switch that they are.
        """
        self.runners, self.naive, self.full, self.switches = runners, naive, full, switches
        self._turns: dict[Subject, list[Turn]] = {}
        self._turn_s = _LONGEST_TURN_S
        self._failed: dict[Subject, str] = {}
        own = replace(full, own_step=True, deterministic=runners[""].context.config.deterministic)
        naive_step, full_step = Subject("", STEP, naive), Subject("", STEP, full)
        self._control: Pair = ((naive_step,), (replace(naive_step, copy=1),))
        self._together: Pair = ((naive_step,), (full_step,))
        self._own: Pair = ((full_step,), (Subject("", STEP, replace(own, benchmark=not own.deterministic)),))
        self._alone = {switch.name: self._pair_alone(switch) for switch in switches}
        self._joint = {switch.name: self._pair_joint(switch) for switch in switches}

    def _pair_alone(self, switch: Switch) -> Pair:
        before = replace(self.naive, **switch.needs)
        return self._pair(switch, before, replace(before, **switch.on))

    def _pair_joint(self, switch: Switch) -> Pair | None:
        """Take a switch out of the full loop, or put it in if it is none of the full loop's."""
        if switch.job or switch.of == EPOCH:
            return self._pair(switch, self.full, self.full)
        if "loader" in switch.on:  # without threads, a DataLoader with all that the guides give it
            without = {"cpu": "torch", "dali": "cpu"}[switch.on["loader"]]
            return self._pair(switch, replace(self.full, loader=without), self.full)
        if {"workers", "persistent", "prefetch", "pinned", "non_blocking"} & switch.on.keys():
            return None  # Trainyard's loader has none of these
        if any(getattr(self.full, name) != value for name, value in switch.on.items()):
            return self._pair(switch, self.full, replace(self.full, **switch.on))
        off = {name: getattr(self.naive, name) for name in switch.on}
        return self._pair(switch, replace(self.full, **off), self.full)

    def _pair(self, switch: Switch, slow: Loop, fast: Loop) -> Pair:
        if switch.of == EPOCH:
            step, scoring = Subject("", STEP, slow), Subject("", VALIDATION_SET, slow)
            return (step, step, scoring, scoring), (step, step, scoring)
        return (Subject("", switch.of, slow),), (Subject(switch.job, switch.of, fast),)

    def list_subjects(self) -> list[Subject]:
        """Return all that is measured in a round, each once."""
        pairs = [self._control, self._together, self._own, *self._alone.values(), *self._joint.values()]
        return list(dict.fromkeys(s for pair in pairs if pair is not None for side in pair for s in side))

    def measure(self, minutes: float, *, progress: Callable[[float], object] = lambda share: None) -> Result:
        """Measure rounds until the time is up, at least four; the first is not counted: it compiles, and fills caches.

        Args:
            progress: called with the share of the time that is over.
        """
        begin, subjects, order = time.monotonic(), self.list_subjects(), random.Random(0)
        self._turn_s = min(_LONGEST_TURN_S, 60 * minutes / (_ROUNDS * len(subjects)))
        for subject in subjects:
            self._take_turn(subject)
            progress((time.monotonic() - begin) / (60 * minutes))
        warm_ups = {subject: turns[0].warm_up_s for subject, turns in self._turns.items()}
        checks = {switch.name: self._check(switch) for switch in self.switches}
        self._turns.clear()
        rounds, last_s = 0, 0.0
        while rounds < _LEAST_ROUNDS or time.monotonic() - begin + last_s < 60 * minutes:
            round_begin = time.monotonic()
            for subject in order.sample(subjects, len(subjects)):
                self._take_turn(subject)
                progress((time.monotonic() - begin) / (60 * minutes))
            rounds, last_s = rounds + 1, time.monotonic() - round_begin
            if rounds == 1 and (least_s := _LEAST_ROUNDS * last_s) > 60 * minutes:
                logger.warning(
                    f"a round takes {format_duration(last_s)}: {_LEAST_ROUNDS} rounds, the least, take "
                    f"{format_duration(least_s)}, more than --minutes {minutes:g}. --only SWITCH measures less"
                )
        return self._summarise(warm_ups, checks, rounds, time.monotonic() - begin)

    def _take_turn(self, subject: Subject) -> None:
        if subject in self._failed:
            return
        runner = self.runners[subject.job]
        work = runner.train if subject.kind == STEP else runner.evaluate
        try:
            turn = work(subject.loop, seconds=self._turn_s)
        except ALLOCATION_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            self._failed[subject] = "out of memory"
            return
        self._turns.setdefault(subject, []).append(turn)

    def _check(self, switch: Switch) -> tuple[float | None, tuple[int, int] | None]:
        """Return how far the losses with and without a switch differ, and the memory of both."""
        (slow, *_), (fast, *_) = self._alone[switch.name]
        if switch.of != STEP or slow in self._failed or fast in self._failed:
            return None, None
        losses, used = [], []
        for subject in (slow, fast):
            runner = self.runners[subject.job]
            if switch.same_work and not switch.job:
                losses.append(np.array(runner.list_losses(subject.loop, steps=_PARITY_STEPS)))
            used.append(runner.measure_memory(subject.loop))
        difference = float(np.max(np.abs(losses[1] / losses[0] - 1))) if losses else None
        return difference, None if None in used else (used[0] or 0, used[1] or 0)

    def _compute_ratio(self, pair: Pair) -> Ratio | None:
        slow, fast = pair
        if any(subject not in self._turns for subject in (*slow, *fast)):
            return None
        return Ratio.from_values(self._list_seconds(slow).tolist(), self._list_seconds(fast).tolist())

    def _list_rounds(self, pair: Pair) -> tuple[list[float], list[float]] | None:
        """Return the seconds of both sides by round, to six digits."""
        if self._compute_ratio(pair) is None:
            return None
        slow, fast = ([float(f"{s:.6g}") for s in self._list_seconds(side).tolist()] for side in pair)
        return slow, fast

    def _list_seconds(self, subjects: Iterable[Subject]) -> np.ndarray:
        """Return the seconds of an epoch, of the subjects together, in each round."""
        total: Any = 0.0
        for subject in subjects:
            splits = self.runners[subject.job].context.splits
            samples = len(splits[TRAIN if subject.kind == STEP else VALIDATION])
            total += np.array([turn.epoch_start_s + samples * turn.sample_s for turn in self._turns[subject]])
        return np.asarray(total)

    def _summarise(
        self,
        warm_ups: Mapping[Subject, float],
        checks: Mapping[str, tuple[float | None, tuple[int, int] | None]],
        rounds: int,
        seconds: float,
    ) -> Result:
        rows = []
        for switch in self.switches:
            alone, joint = self._alone[switch.name], self._joint[switch.name]
            row = Row(switch.name, switch.of, self._compute_ratio(alone), joint and self._compute_ratio(joint))
            row.alone_s, (row.loss_difference, row.memory_bytes) = self._list_rounds(alone), checks[switch.name]
            row.note = "; ".join({self._failed[s] for s in (*alone[0], *alone[1]) if s in self._failed})
            if switch.of == STEP and row.alone is not None:
                slow, fast = alone[0][0], alone[1][0]
                row.warm_up_s = warm_ups[fast] - warm_ups[slow]
                saved_s = np.median([turn.sample_s for turn in self._turns[slow]])
                saved_s = float(saved_s - np.median([turn.sample_s for turn in self._turns[fast]]))
                if saved_s > 0 and row.warm_up_s > 1:
                    row.break_even_steps = row.warm_up_s / (saved_s * fast.loop.micro_batch * fast.loop.accumulate)
            rows.append(row)
        rows.sort(key=lambda row: -(row.alone.mean if row.alone else 0.0))
        ratios = [self._compute_ratio(pair) for pair in (self._control, self._together, self._own)]
        control, together, own = (ratio or Ratio(math.nan, math.nan, math.nan) for ratio in ratios)
        in_full = {switch.name for switch in self.switches if self._is_in_full(switch)}
        gains = [row.alone.mean for row in rows if row.switch in in_full and row.of == STEP and row.alone]
        naive_s, full_s = (
            float(np.median([turn.sample_s for turn in self._turns.get(side[0], [Turn(math.nan)])]))
            for side in self._together
        )
        control_s, product = self._list_rounds(self._control), math.prod(gains)
        return Result(rows, control, control_s, 1 / naive_s, 1 / full_s, together, product, own, rounds, seconds)

    def _is_in_full(self, switch: Switch) -> bool:
        return not switch.job and all(getattr(self.full, name) == value for name, value in switch.on.items())


def choose_switches(switches: Sequence[Switch], only: Sequence[str]) -> list[Switch]:
    """Return the switches of some names, all without any.

    Raises:
        UserError: there is none of that name, or it cannot be measured here.
    """
    names = [switch.name for switch in switches]
    for name in only:
        if name not in names:
            near = find_nearest(name, names, similarity=0.0)[0]
            raise UserError(f"--only '{name}': no such switch. Nearest: '{near}'. All of them: {', '.join(names)}.")
    chosen = [switch for switch in switches if not only or switch.name in only]
    for switch in chosen:
        if only and switch.missing:
            raise UserError(f"--only '{switch.name}': cannot be measured here: {switch.missing}.")
    return chosen


def format_result(job: str, result: Result, missing: Sequence[Switch]) -> list[str]:
    """Return the screen: a table, the control, and what all switches give together."""
    table = [["switch", "of", "alone", "with the others", "memory", "losses differ by"]]
    for row in result.rows:
        memory, loss = "", "" if row.loss_difference is None else f"{row.loss_difference:.1g}"
        if row.memory_bytes:
            before, after = row.memory_bytes
            memory = f"{format_size(after)} ({after / before - 1:+.0%})"
        ratios = [ratio.format() if ratio else "" for ratio in (row.alone, row.joint)]
        table.append([row.switch, row.of, row.note or ratios[0], ratios[1], memory, loss])
    lines = align_columns(table)
    for row in result.rows:
        if row.break_even_steps is not None:
            paid = f"paid back after {row.break_even_steps:,.0f} steps"
            lines.append(f"{row.switch}: its first step takes {row.warm_up_s:.0f} s more, {paid}")
    if missing:
        lines.append("not measured here: " + "; ".join(f"{switch.name} ({switch.missing})" for switch in missing))
    doubtful = (
        "" if result.control.covers(1.0) and result.control.half_width <= 0.03 else ": do not quote these numbers"
    )
    lines.append(f"{CONTROL}: {result.control.format()} in {result.rounds} rounds{doubtful}")
    lines.append(
        f"{job}: {result.naive:,.1f} samples/s with none, {result.full:,.1f} with all that the job has: "
        f"{result.together.format()}. The single gains multiply to x{result.single_product:.2f}."
    )
    lines.append(f"Trainyard's own step against the loop with all: {result.own.format()}")
    return [*lines, f"measured in {format_duration(result.seconds)}; gains are times as fast, with 95 % intervals"]


def encode_result(result: Result, missing: Sequence[Switch]) -> list[dict[str, Any]]:
    """Return the lines of a result file: one for all, one for each switch."""
    values = asdict(result)
    rows = values.pop("rows")
    absent = {switch.name: switch.missing for switch in missing}
    return [{"kind": "ablation", **values, "missing": absent}, *({"kind": "switch", **row} for row in rows)]


def draw_result(job: str, result: Result) -> bytes:
    """Draw the gains with their intervals, as PNG: alone, and with the others."""

    def draw(axes: Any) -> None:
        shown = [row for row in result.rows if row.alone][::-1]
        for shift, colour, label in ((0.15, BLUE, "alone"), (-0.15, SERIES[1], "with the others")):
            ratios = [(i, row.alone if label == "alone" else row.joint) for i, row in enumerate(shown)]
            there = [(i + shift, ratio) for i, ratio in ratios if ratio is not None]
            means = [ratio.mean for _, ratio in there]
            errors = [[ratio.mean - ratio.low for _, ratio in there], [ratio.high - ratio.mean for _, ratio in there]]
            axes.errorbar(means, [y for y, _ in there], xerr=errors, fmt="o", ms=3, color=colour, label=label)
        axes.axvspan(result.control.low, result.control.high, color="#e5e7eb", label=CONTROL)
        axes.set_yticks(range(len(shown)), [row.switch for row in shown], fontsize=6)
        axes.legend(fontsize=6)

    return draw_figure(f"{job}: gain of each switch", draw, x_label="times as fast")
