"""The headline of a run: the metric that decides, its interval and baseline, and whether that is good."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.report.html import escape
from trainyard.report.metric_values import format_metric, format_score
from trainyard.report.run_story import RunStory
from trainyard.runs.events import Line, has_interval, list_metric_names, name_interval_ends
from trainyard.text import format_duration

_MOST_OTHERS = 3


@dataclass(frozen=True)
class Baseline:
    """The deciding metric of a method that learned nothing."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} ({format_score(self.value)})"


@dataclass(frozen=True)
class Headline:
    """The result of a run in one number, where it was measured, and what follows from it."""

    metric: str  # "" if nothing was evaluated, or no deciding metric is recorded
    value: str  # with its interval
    place: str  # such as "on test, weights of step 400; lower is better; chance 0.5000"
    verdict: str  # one sentence
    others: tuple[str, ...]  # at most three further metrics of the same evaluation, each "name value"


def find_headline(story: RunStory) -> Headline:
    """Choose the final evaluation of the first test set, or else the best one of validation, and judge it."""
    monitor = story.find_start_field("monitor") or {}
    metric, mode = str(monitor.get("metric", "")), str(monitor.get("mode", ""))
    best = story.find_best_evaluation()
    if not story.evals:
        return Headline("", "", "", "No evaluation yet.", ())
    if mode not in _WORDS:
        others = _list_others(story.evals[-1], ())
        return Headline("", "", "", "The deciding metric is not recorded.", others)
    tests = [
        story.find_last_evaluation(split) for split in story.splits if split not in ("train", monitor.get("split"))
    ]
    line = next((line for line in tests if metric in line), None)
    # Only final weights get intervals, or lose the draws for them.
    final = (line for line in reversed(story.evals) if has_interval(line, metric) or _has_lost_draws(line))
    line = line or next(final, None) or (best[1] if best else story.evals[-1])
    untrained = _find_untrained(story, metric, line)
    rival, place = _find_rival(story, metric, mode, line)
    baseline = rival or _find_baseline(monitor, line) or untrained
    chose = explain_choice(story, str(line["split"]))
    parts = [
        f"on {line['split']}, {_name_weights(story, line)}",
        *([chose] if chose else []),
        f"{_WORDS[mode]} is better",
    ]
    shown = [method for method in dict.fromkeys([baseline, _find_baseline(monitor, line), untrained]) if method]
    parts += [place if method is rival else f"{method.name} {format_score(method.value)}" for method in shown]
    return Headline(
        metric,
        format_metric(line, metric),
        "; ".join(parts),
        judge_metric(line, metric, mode=mode, baseline=baseline),
        _list_others(line, [metric, *(str(tie[0]) for tie in monitor.get("ties", ()))]),
    )


def explain_choice(story: RunStory, split: str) -> str:
    """Return a note that this set chose the checkpoint, so its scores look better; "" if it did not."""
    monitor = story.find_start_field("monitor") or {}
    metric = str(monitor.get("metric", ""))
    steps = {line["step"] for line in story.evals if line["split"] == split and metric in line}
    if split != monitor.get("split") or len(steps) < 2:
        return ""
    return f"{split} also chose among {len(steps)} checkpoints, so new data may score worse"


def render_headline(headline: Headline) -> str:
    """Return the headline as HTML: the number large, the verdict below."""
    value, _, interval = headline.value.partition(" [")
    metric = (
        f'<p class="soft">{escape(headline.metric)} {escape(headline.place)}</p>'
        f'<p class="score">{escape(value)}'
        + (
            f' <span class="interval">95 % interval {escape(interval.rstrip("]").replace(", ", " to "))}</span>'
            if interval
            else ""
        )
        + "</p>"
        if headline.metric
        else ""
    )
    others = f'<p class="soft">{escape("; ".join(headline.others))}</p>' if headline.others else ""
    return f'<div class="headline">{metric}<p class="verdict">{escape(headline.verdict)}</p>{others}</div>'


def judge_metric(line: Line, metric: str, *, mode: str, baseline: Baseline | None) -> str:
    """Return one sentence: whether a metric is better than its baseline, as far as its interval shows.

    Args:
        line: an evaluation with the metric, perhaps with the ends of its 95 % interval.
        mode: "max" if higher is better, "min" if lower is.
    """
    value = line.get(metric, math.nan)
    if not math.isfinite(value):
        return f"{metric} is not a finite number."
    if baseline is None:
        return f"{NO_BASELINE}: eval_on_start=true records one."
    sign = 1 if mode == "max" else -1
    ahead = sign * (value - baseline.value)
    if not has_interval(line, metric):
        if ahead <= 0:
            return f"No better than {baseline}."
        if _has_lost_draws(line):
            return f"Too few trials to tell whether this is better than {baseline}: no 95 % interval can be drawn."
        return f"Better than {baseline}; without a 95 % interval, so it may be chance."
    ends = [sign * (line[end] - baseline.value) for end in name_interval_ends(metric)]
    if max(ends) < 0:
        return f"Worse than {baseline}: so is its whole 95 % interval."
    if ahead <= 0:
        return f"No better than {baseline}."
    if min(ends) <= 0:
        return f"Too few trials to tell whether this is better than {baseline}: the 95 % interval includes it."
    if ends[0] == ends[1]:
        return f"Better than {baseline}; its 95 % interval has no width, as with too few trials."
    return f"Better than {baseline}: so is its whole 95 % interval."


NO_BASELINE = "No baseline is recorded"
_WORDS = {"min": "lower", "max": "higher"}


def _name_weights(story: RunStory, line: Line) -> str:
    """Name the weights that an evaluation scored: the last ones of a run are those that it chose."""
    chosen = (story.env.get("choices") or {}).get("final_weights")
    is_final = line is story.find_last_evaluation(str(line["split"])) and isinstance(chosen, Mapping)
    return f"weights of {chosen.get('value')}" if is_final and chosen else f"step {line['step']:,}"


def _has_lost_draws(line: Line) -> bool:
    return any(name.startswith("draws_lost") for name in line)


def _find_baseline(monitor: Mapping[str, Any], line: Line) -> Baseline | None:
    name, value = monitor.get("baseline") or ("", None)
    value = line.get(value) if isinstance(value, str) else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Baseline(str(name), float(value))


def _find_rival(story: RunStory, metric: str, mode: str, line: Line) -> tuple[Baseline | None, str]:
    """Return the best method without a network on the same set, and a note about it; None if none was scored."""
    events = [event for event in story.list_current_events() if event.get("event") == "baselines"]
    event = next((event for event in reversed(events) if event.get("split") == line["split"]), {})
    scores = {
        str(name): values
        for name, values in (event.get("scores") or {}).items()
        if isinstance(values, Mapping) and isinstance(values.get(metric), float)
    }
    if not scores:
        return None, ""
    name = (min if mode == "min" else max)(scores, key=lambda name: scores[name][metric])
    seconds = format_duration(float(event.get("seconds", 0.0)))
    return Baseline(name, scores[name][metric]), f"{name} {format_metric(dict(scores[name]), metric)}, in {seconds}"


def _find_untrained(story: RunStory, metric: str, line: Line) -> Baseline | None:
    """Return the evaluation of the same set before the first step, if there is one (eval_on_start)."""
    untrained: Line = next((each for each in story.untrained if each["split"] == line["split"]), {})
    value = untrained.get(metric)
    return Baseline("the model before training", value) if isinstance(value, float) and math.isfinite(value) else None


def _list_others(line: Line, order: Sequence[str]) -> tuple[str, ...]:
    """Return at most three further metrics: those that break ties, then those with intervals; no counts.

    Args:
        order: the metric that decides, then those that break ties.
    """
    names = [name for name in list_metric_names(line) if name not in order[:1] and not _is_count(line[name])]
    names.sort(key=lambda name: (name not in order, not has_interval(line, name)))
    return tuple(f"{name} {format_metric(line, name)}" for name in names[:_MOST_OTHERS])


def _is_count(value: float) -> bool:
    return math.isfinite(value) and value > 1 and float(value).is_integer()
