"""Attributes each second of a run to an activity, from the records of its attempts. Loads no torch.

Each attempt counts its seconds by phase, in one clock that never jumps (train/heartbeat.py), and records the sums with
its start, its checkpoints and its end; the sums of a killed attempt are in its heartbeat, which the next one
records. Seconds between attempts are those of the wall clock.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.runs.events import ENDS, STARTS, Line
from trainyard.runs.folder import read_creation_time
from trainyard.runs.history import parse_time, read_object
from trainyard.text import format_duration

USEFUL, START_UP, LOST, STOPPED = "useful steps", "start-up", "lost", "queued or stopped"
LABELS = {
    "training": USEFUL,
    "input": "input wait",
    "evaluating": "evaluation",
    "saving": "saving",
    "compiling": "compilation",
    "packing": "packing",
}
"""By phase of an attempt; every other phase, and the first step of an attempt, is start-up: it loads kernels.

All-reduce is part of a step, so of the useful steps: a GPU does both at once.
"""

_Spent = Mapping[str, float]


def label_seconds(run: Path, events: Sequence[Line]) -> dict[str, float]:
    """Return the seconds of a run by activity, largest first; empty if they were not recorded.

    Args:
        events: of all attempts, oldest first.
    """
    try:
        created = read_creation_time(run)
    except UserError:
        return {}
    return sum_up(created, events, read_object(run / "heartbeat.json"))


def sum_up(created: str, events: Sequence[Line], heartbeat: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a run by activity, largest first; empty if its attempts did not record them.

    They add up to the time from its creation to its end, or to the last sign of life. Where a wall clock went back
    between two attempts, the time between them counts as none. Lost is an attempt's time after the checkpoint that
    the next one resumed from. Of a killed attempt the seconds after its last heartbeat count as stopped.

    Args:
        created: when the run was created, ISO 8601.
        events: of all attempts, oldest first.
        heartbeat: the newest.
    """
    starts = [i for i, event in enumerate(events) if event.get("event") in STARTS]
    if not starts or not all(_read_spent(events[i]) for i in starts):
        return {}
    seconds: defaultdict[str, float] = defaultdict(float)
    process: _Spent = {}  # counted by the attempt's process before this start
    try:
        known_until, attempt = parse_time(created), None
        times = {i: parse_time(events[i]["time"]) for i in starts}
    except ValueError:  # a file that was edited
        return {}
    for begin, end in pairwise([*starts, len(events)]):
        first, own = events[begin], events[begin:end]
        following = events[end] if end < len(events) else None
        if first.get("attempt") != attempt:  # else it started again in the same process, without memory on a GPU
            process, attempt = {}, first.get("attempt")
            started = times[begin] - sum(_read_spent(first).values())
            seconds[STOPPED] += max(0.0, started - known_until)
            known_until = started
        last = _find_last(own, following, heartbeat)
        kept = _find_kept(own, following, last)
        for phase in kept:
            seconds[LABELS.get(phase, START_UP)] += max(0.0, kept[phase] - process.get(phase, 0.0))
        seconds[LOST] += max(0.0, sum(last.values()) - sum(kept.values()))
        known_until += max(0.0, sum(last.values()) - sum(process.values()))
        process = last
    return {label: seconds[label] for label in sorted(seconds, key=lambda label: -seconds[label]) if seconds[label] > 0}


def compute_goodput(seconds: Mapping[str, float]) -> float | None:
    """Return the share of useful steps; None where it was not recorded."""
    return seconds.get(USEFUL, 0.0) / sum(seconds.values()) if seconds else None


def compute_shares(runs: Iterable[Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """Return (label, seconds, percent) over runs, largest first."""
    total: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for label, seconds in run.items():
            total[label] += seconds
    whole = sum(total.values())
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return [(label, seconds, 100 * seconds / whole) for label, seconds in ordered]


def describe_goodput(shares: Sequence[tuple[str, float, float]]) -> str:
    """Return one sentence: which share was steps that count, and what most of the rest went to."""
    goodput = compute_goodput({label: seconds for label, seconds, _ in shares})
    whole = format_duration(sum(seconds for _, seconds, _ in shares))
    rest = next((f"; most of the rest: {label}, {share:.0f} %" for label, _, share in shares if label != USEFUL), "")
    return f"Goodput: {100 * (goodput or 0.0):.0f} % of {whole} were steps whose result counts{rest}."


def _find_last(own: Sequence[Line], following: Line | None, heartbeat: Mapping[str, Any]) -> _Spent:
    """Return an attempt's sums at its end, or at its last sign of life."""
    attempt = own[0].get("attempt")
    records: list[Mapping[str, Any]] = [e for e in own if e.get("event") in (*STARTS, *ENDS, "checkpoint")]
    if following is not None and following.get("attempt") == attempt:
        records.append(following)
    candidates = [(following or {}).get("previous"), heartbeat]
    records += [c for c in candidates if isinstance(c, Mapping) and c.get("attempt") == attempt]
    return max((_read_spent(record) for record in records), key=lambda spent: sum(spent.values()))


def _find_kept(own: Sequence[Line], following: Line | None, last: _Spent) -> _Spent:
    """Return an attempt's sums at the checkpoint that the following one resumed from."""
    if following is None:
        return last
    if own[-1].get("event") in ENDS and own[-1].get("step") == following.get("step"):
        return last
    saved = [e for e in own if e.get("event") == "checkpoint" and e.get("step") == following.get("step")]
    return _read_spent(saved[-1]) if saved else _read_spent(own[0])


def _read_spent(record: Mapping[str, Any]) -> _Spent:
    """Return the seconds by phase; empty if they were not recorded, or are none that an attempt writes."""
    spent = record.get("spent")
    if not isinstance(spent, Mapping) or not all(
        type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in spent.values()
    ):
        return {}
    return spent
