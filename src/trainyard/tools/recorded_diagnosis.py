"""Breaks down a run's time from its record, without measuring, and estimates the gain of saving some of it."""

from pathlib import Path

from trainyard.measure import WORTH
from trainyard.report.run_story import RunStory
from trainyard.runs.goodput import LOST, START_UP, STOPPED, USEFUL

_ADVICE = {
    "input wait": (
        "input",
        "trainyard doctor JOB names the stage of the loader; data.threads, data.stage, packing.store",
    ),
    "evaluation": ("long validation", "a larger eval_every or eval_batch_size"),
    "saving": ("slow saves", "a larger checkpoint.every, or runs on a faster disk"),
    "compilation": ("compilation", "compile=off, or more steps for each start"),
    "packing": ("packing", "pack once for all runs: trainyard pack JOB"),
    START_UP: ("start-up", "more steps for each start"),
    LOST: ("lost work", "a smaller checkpoint.every or checkpoint.max_minutes"),
    STOPPED: ("time without a process", "a shorter queue (--time, --hw), or nobody resumed it: trainyard why RUN"),
}
"""By label of `runs.goodput`: the fault's name and the remedy."""

_CHOICES = ("device", "threads", "compute_threads", "decode", "reader")
_LEAST_S = 60.0  # of a whole run: the times of a shorter one are listed, but are no verdict


def describe_record(run: Path) -> list[str]:
    """Return the screen: time by activity, choices, and the verdict with its gain.

    Shares are of the time of the host: an activity that others hide (a save in the background, say)
    has no share.
    """
    story = RunStory.read(run)
    spent = story.seconds
    whole = sum(spent.values())
    if not story.train or not spent:
        return [f"verdict: {run.name}: time by activity is not recorded"]
    rate = story.samples_per_s
    lines = [f"{'recorded':<16}{story.step} steps, {whole:,.1f} s" + (f", {rate:,.1f} samples/s" if rate else "")]
    lines += [f"{name:<16}{seconds:,.1f} s ({seconds / whole:.0%})" for name, seconds in spent.items()]
    choices = story.env.get("choices", {})
    lines += [
        f"{name:<16}{choices[name]['value']}  ({choices[name]['reason']})" for name in _CHOICES if name in choices
    ]
    gains = {name: whole / max(whole - spent[name], 1e-9) for name in _ADVICE if name in spent}
    worth = sorted((name for name in gains if gains[name] >= WORTH), key=lambda name: -gains[name])
    for name in worth:
        fault, advice = _ADVICE[name]
        lines.append(
            f"found: {fault}: {spent[name] / whole:.0%} of the time. At most x{gains[name]:.2f}. Try: {advice}."
        )
    if worth and whole >= _LEAST_S:
        verdict = f"{_ADVICE[worth[0]][0]}; without it the run would have been x{gains[worth[0]]:.2f} as fast"
    else:
        short = f", in less than {_LEAST_S:.0f} s" if worth else ""
        verdict = f"healthy: {spent.get(USEFUL, 0.0) / whole:.0%} of the time was steps{short}"
    return [*lines, f"verdict: {run.name}: {verdict}"]
