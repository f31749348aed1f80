"""The report of a run: one HTML page with its plots, and a summary that fits a screen."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from loguru import logger

from trainyard.files import forgive_failed_write, restrict_umask, write_atomically
from trainyard.report.evaluation_table import render_evaluations
from trainyard.report.figures import Plot
from trainyard.report.headline import explain_choice, find_headline, render_headline
from trainyard.report.html import escape, render_gallery, render_page, render_section, render_table
from trainyard.report.metric_values import ABSENT, format_alike, format_metric, format_value
from trainyard.report.run_plots import draw_plots, read_figures
from trainyard.report.run_story import RunStory, describe_ending, list_all_metric_names
from trainyard.runs.evaluations import SAMPLES, Evaluation, read_evaluations
from trainyard.runs.events import ENDS, EVENTS_FILE, STARTS, flatten
from trainyard.runs.goodput import compute_shares, describe_goodput
from trainyard.runs.observations import read_usage
from trainyard.scoring import explain_missing_intervals
from trainyard.text import format_duration, format_size, quote_path


def format_summary(run: Path, *, next_commands: Sequence[str] = ()) -> str:
    """Summarise a run on one screen of plain text.

    Args:
        next_commands: suggestions, one line each.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = RunStory.read(run)
    facts = dict(_collect_facts(story))
    page = run / "report.html"
    headline = find_headline(story)
    rows: list[tuple[str, Sequence[str]]] = [
        *([(headline.metric, [headline.value, headline.place])] if headline.metric else []),
        ("verdict", [headline.verdict]),
        *([("further", headline.others)] if headline.others else []),
        ("trained", [_count(facts[name], name) for name in ("Steps", "Epochs", "Samples")]),
        (
            "took",
            [
                facts["Running time"],
                *(f"{name} {share:.0f} %" for name, _, share in _list_shares(story) if share >= 0.5),
            ],
        ),
        ("speed", [f"{facts['Median rate']} (median)"]),
    ]
    best = story.find_best_evaluation()
    if best and headline.metric and f"on {best[1]['split']}," not in headline.place:
        name, line = best
        score = f"{name} {format_metric(line, name)} on {line['split']} at step {line['step']:,}"
        chose = explain_choice(story, str(line["split"]))
        rows.append(("best", [score, *([chose] if chose else [])]))
    for i, (name, predicted, observed) in enumerate(_list_usage(story)):
        rows.append(("" if i else "plan", [name, f"predicted {predicted}", f"observed {observed}"]))
    rows.append(("report", [str(page) if page.exists() else "not written"]))
    rows += [("" if i else "changed", [change]) for i, change in enumerate(story.changes)]
    rows += [("" if i else "next:", [command]) for i, command in enumerate(next_commands)]
    return "\n".join([f"{story.job}  {story.status}", *_format_columns(rows)])


def _count(amount: str, name: str) -> str:
    """Return the amount with its unit, such as "1 epoch" or "54 of 54 steps"."""
    return f"{amount} {name.lower().removesuffix('s') if amount == '1' else name.lower()}"


def _format_columns(rows: Sequence[tuple[str, Sequence[str]]], *, width: int = 110) -> Iterator[str]:
    """Yield lines with the names in one column and the items next to it, wrapped only between items."""
    left = max(len(name) for name, _ in rows)
    for name, items in rows:
        line = f"{name:<{left}}"
        for item in items:
            if line.strip() not in ("", name) and len(line) + 2 + len(item) > width:
                yield line
                line = " " * left
            line += f"  {item}"
        yield line


def _collect_facts(story: RunStory) -> list[tuple[str, str]]:
    total, seen = story.find_start_field("total_steps"), story.find_progress()
    attempts = sum(e.get("event") in STARTS for e in story.events)
    memory = max((line["memory_gib"] for line in story.train if "memory_gib" in line), default=None)
    rate = story.samples_per_s
    return [
        ("Steps", f"{story.step:,}" + (f" of {total:,}" if total else "")),
        ("Epochs", format_value(seen.get("epoch"))),
        ("Samples", format_value(seen.get("samples_seen"))),
        ("Running time", format_duration(story.elapsed_s)),
        ("Median rate", f"{format_value(rate)} samples/s" if rate else ABSENT),
        ("Peak memory", f"{memory:.1f} GiB" if memory else ABSENT),
        ("Attempts", str(attempts) if attempts else ABSENT),
    ]


def _list_usage(story: RunStory) -> list[tuple[str, str, str]]:
    """Return name, predicted and observed value of each quantity of the stored plan; nothing without a plan."""
    if (usages := read_usage(story.env)) is None:
        return []
    memory = [ABSENT if usage.memory_gib is None else f"{usage.memory_gib:.2f} GiB" for usage in usages]
    disk = [format_size(usage.disk_bytes) for usage in usages]
    return [("GPU memory, peak", memory[0], memory[1]), ("disk, checkpoints", disk[0], disk[1])]


_MAX_EVENTS = 200
_USAGE_COLUMNS = ("", "predicted by the stored plan", "observed")


def update_report(run: Path) -> Path | None:
    """Write the report of a run that is done and return its file; None, with a warning, if that fails.

    Raises:
        OSError: the disk is full or read-only.
        UserError: as for `write_report`.
    """
    failed: list[OSError] = []
    with forgive_failed_write(failed.append):
        return write_report(run)
    again = f"trainyard report {quote_path(run)}"
    logger.warning("{}: the report is not written: {}. The run is done. Write it again: {}", run, failed[0], again)
    return None


@restrict_umask()
def write_report(run: Path) -> Path:
    """Write `<run>/plots/*.png` and `<run>/report.html`, and return the page's path.

    The page needs no network and no other file. For a run that has not finished, or has just begun, it lists the
    missing parts.

    Raises:
        UserError: `run` is not a run folder, or its files are damaged.
    """
    story = RunStory.read(run)
    evaluations = read_evaluations(run)
    plots = draw_plots(story)
    for plot in plots:
        write_atomically(run / "plots" / f"{plot.name}.png", plot.png, inside=True)
    first = [*plots.losses[:1], *plots.metrics[:1]]
    figures = [*plots.histograms, *read_figures(run / "figures")]
    further = [*plots.metrics[1:], *plots.losses[1:], *plots.optimizer]
    page = render_page(
        f"{story.job} - {run.name}",
        _render_header(story),
        render_headline(find_headline(story)),
        render_section("Curves", render_gallery(first) or _NO_CURVE, _render_further(further)),
        render_section("Figures", render_gallery(figures), *_render_texts(story), optional=True),
        render_section("Samples", *_render_samples(run, evaluations), optional=True),
        render_section("Results", _render_results(story), _render_constants(story), _render_evaluations(story)),
        render_section("Labelled folders", render_evaluations(evaluations), optional=True),
        render_section("Time", _render_facts(story), render_gallery(plots.speed), render_goodput(_list_shares(story))),
        render_section("Predicted and observed", render_table(_USAGE_COLUMNS, _list_usage(story)), optional=True),
        render_section("Next steps", f"<pre>{escape(chr(10).join(_list_next_commands(story)))}</pre>"),
        render_section("Attempts and events", _render_attempts(story), _render_events(story)),
        render_section("Automatic choices", _render_choices(story)),
        render_section("Environment", _render_environment(story)),
        render_section("Configuration", f"<pre>{escape(story.config)}</pre>" if story.config else ""),
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html"


_NO_CURVE = '<p class="soft">Nothing was recorded at two steps yet, so there is no curve.</p>'


def _render_samples(run: Path, evaluations: Sequence[Evaluation]) -> list[str]:
    """Render the images of samples of the run and of its evaluations, and how to get a page without them."""
    folders = [run / SAMPLES, *(item.path / SAMPLES for item in evaluations)]
    galleries = {folder: gallery for folder in folders if (gallery := render_gallery(read_figures(folder)))}
    if not galleries:
        return []
    commands = [["rm", "-r", *map(str, galleries)], ["trainyard", "report", str(run)]]
    typed = " && ".join(shlex.join(command) for command in commands)
    note = f"Everyone with this page sees them. To make a page without: <code>{escape(typed)}</code>"
    titles = ("" if folder.parent == run else f"<h3>{escape(folder.parent.name)}</h3>" for folder in galleries)
    shown = (title + gallery for title, gallery in zip(titles, galleries.values(), strict=True))
    return [f'<p class="soft">{note}</p>', *shown]


def _render_texts(story: RunStory) -> list[str]:
    """Render the texts of the last evaluation of each split."""
    return [
        f"<h3>{escape(f'{split}: {name}')}</h3><pre>{escape(text)}</pre>"
        for split in story.splits
        for name, text in story.find_last_evaluation(split).get("shown", {}).items()
        if isinstance(text, str)
    ]


def _render_further(plots: Sequence[Plot]) -> str:
    """Return plots that are closed until somebody opens them, so that figures come soon after the first two curves."""
    count = f"{len(plots)} further curve{'s' * (len(plots) > 1)}"
    return f"<details><summary>{count}</summary>{render_gallery(plots)}</details>" if plots else ""


def _render_header(story: RunStory) -> str:
    state, _, reason = story.status.partition(" (")
    shade = state if state in ("done", "failed") else ""
    started = next((e.get("time") for e in story.events if e.get("event") == "start"), None)
    missing = "".join(f"<p>{escape(text)}</p>" for text in story.list_missing())
    return (
        f"<header><h1>{escape(story.job)}</h1>"
        f'<p class="soft">Run {escape(story.run.absolute().name)}, started {_format_time(started)}</p>'
        f'<span class="pill {shade}">{escape(state)}</span>'
        + (f'<div class="note">{escape(reason.removesuffix(")"))}</div>' if reason else "")
        + (f'<div class="note">{missing}</div>' if missing else "")
        + "</header>"
    )


def _list_next_commands(story: RunStory) -> list[str]:
    run = shlex.quote(str(story.run))
    if story.status.startswith("done"):
        return [
            f"trainyard export {run} {story.run.absolute().parent.name}.safetensors",
            f"trainyard evaluate {run} FOLDER",
        ]
    return [f"trainyard why {run}", f"trainyard resume {run}"]


def _render_facts(story: RunStory) -> str:
    cells = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _collect_facts(story)]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _render_results(story: RunStory) -> str:
    if not story.evals:
        return ""
    last = {split: story.find_last_evaluation(split) for split in story.splits}
    columns = [(f"{split}, step {line['step']:,}", line) for split, line in last.items()]
    note = "Which evaluation is best is not recorded."
    if best := story.find_best_evaluation():
        name, line = best
        columns.append((f"best {line['split']}, step {line['step']:,}", line))
        note = f"Best by {name} on {line['split']}."
    names = story.list_metrics(constant=False)
    rows = [[name, *(format_metric(line, name).replace(" [", "\n[") for _, line in columns)] for name in names]
    metrics = render_table(["metric", *(title for title, _ in columns)], rows)
    missing = explain_missing_intervals(list_all_metric_names(story.evals))
    caption = " ".join(["Last evaluation of each split; 95 % intervals in brackets.", missing, note])
    return f'{metrics}<p class="soft">{escape(caption)}</p>'


def _render_constants(story: RunStory) -> str:
    names = story.list_metrics(constant=True)
    lines = [story.find_last_evaluation(split) for split in story.splits]
    rows = [[name, *format_alike(lines, name)] for name in names]
    table = render_table(["constant", *story.splits], rows)
    return f"<h3>The same in every evaluation</h3>{table}" if names else ""


def _render_evaluations(story: RunStory) -> str:
    """Render all evaluations, if there are others than the last of each split."""
    if len(story.untrained) + len(story.evals) == len(story.splits):
        return ""
    names = story.list_metrics(constant=False)
    rows = [
        [
            str(line["split"]),
            f"{line['step']:,}",
            format_value(line.get("epoch")),
            *(format_metric(line, n) for n in names),
        ]
        for line in [*story.untrained, *story.evals]
    ]
    table = render_table(["split", "step", "epoch", *names], rows)
    return f"<details><summary>All {len(rows):,} evaluations</summary>{table}</details>"


def _list_shares(story: RunStory) -> list[tuple[str, float, float]]:
    return compute_shares([story.seconds])


def render_goodput(shares: Sequence[tuple[str, float, float]]) -> str:
    """Render the time of one or more runs by activity: a sentence and a table; empty without any."""
    rows = [[label, f"{seconds:,.1f}", f"{share:.1f}"] for label, seconds, share in shares]
    sentence = f"<p>{escape(describe_goodput(shares))}</p>" if shares else ""
    return sentence + render_table(["goodput", "seconds", "share (%)"], rows)


def _render_attempts(story: RunStory) -> str:
    starts = [i for i, event in enumerate(story.events) if event.get("event") in STARTS]
    rows = []
    for number, (begin, end) in enumerate(itertools.pairwise([*starts, len(story.events)]), start=1):
        first, last = story.events[begin], story.events[end - 1]
        ending = next((event for event in story.events[begin:end] if event.get("event") in ENDS), None)
        rows.append(
            [
                str(number),
                _format_time(first.get("time")),
                str(first.get("host", ABSENT)),
                str(first.get("device", ABSENT)),
                format_value(first.get("world_size")),
                f"{first['step']:,}",
                f"{last['step']:,}",
                describe_ending(ending) if ending else ABSENT,
            ]
        )
    return render_table(
        ["attempt", "started", "host", "device", "ranks", "from step", "to step", "ended"],
        rows,
        numbers=False,
    )


def _render_events(story: RunStory) -> str:
    other_columns = {"kind", "step", "event", "time", "elapsed_s"}  # and the seconds, which the table of goodput has
    rows = [
        [
            _format_time(event.get("time")),
            f"{event['step']:,}",
            str(event.get("event", ABSENT)),
            ", ".join(
                f"{k} {format_value(v)}" for k, v in flatten(event) if k not in other_columns and "spent." not in k
            ),
        ]
        for event in story.events[-_MAX_EVENTS:]
    ]
    omitted = len(story.events) - len(rows)
    note = f'<p class="soft">{omitted} earlier events are in {EVENTS_FILE}.</p>' if omitted else ""
    return render_table(["time", "step", "event", "details"], rows, numbers=False) + note


def _render_choices(story: RunStory) -> str:
    rows = []
    for name, choice in dict(story.env.get("choices") or {}).items():
        fields = choice if isinstance(choice, Mapping) else {"value": choice}
        rows.append([str(name), str(fields.get("value", ABSENT)), str(fields.get("reason", ABSENT))])
    return render_table(["choice", "value", "reason"], rows, numbers=False)


def _render_environment(story: RunStory) -> str:
    parts = []
    for title, content in story.env.items():
        if title != "choices":
            fields = flatten(content) if isinstance(content, Mapping) else [("", content)]
            rows = [[name, format_value(value)] for name, value in fields]
            parts.append(f"<h3>{escape(str(title))}</h3>{render_table(['name', 'value'], rows, numbers=False)}")
    return "".join(parts)


def _format_time(text: object) -> str:
    return escape(str(text).replace("T", " ").replace("+00:00", " UTC")) if text else ABSENT
