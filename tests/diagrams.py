"""Draws the diagrams of docs/how-it-works.md: `python -m tests.diagrams` writes docs/*.svg.

Exit codes and budgets are read from the code; the rest is a table here, and a change of the code changes it by hand.
"""

from html import escape
from typing import NamedTuple

from tests.checkout import ROOT
from trainyard.cluster.description import Attempts
from trainyard.runs.state import ExitCode

WIDTH, LINE, PAD = 460, 17, 9  # px; a phone shows the whole width in letters that can be read
STYLE = """<style>
svg { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --fill: #eef4fb; --edge: #7c95b0; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --fill: #18263a; --edge: #5f7d9e; }
}
.paper { fill: var(--paper); } text { fill: var(--ink); font: 12.5px sans-serif; white-space: pre; }
.title { font-weight: bold; } .mono { font: 11.5px monospace; } .note { fill: var(--soft); }
rect.box { fill: var(--fill); stroke: var(--edge); } path { fill: none; stroke: var(--soft); stroke-width: 1.4; }
marker path { fill: var(--soft); stroke: none; }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker></defs>"""


class Box(NamedTuple):
    """A rectangle with lines of text: the first is its title; lines that begin with `|` are monospaced."""

    x: int
    y: int
    width: int
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def bottom(self) -> int:
        return self.y + LINE * len(self.lines) + PAD


def draw(title: str, boxes: list[Box], arrows: list[str], notes: list[tuple[int, int, str]]) -> str:
    """Return an SVG.

    Args:
        arrows: each the `d` of a path, in px.
        notes: left end and base line in px, and lines of text.
    """
    height = max(box.bottom for box in boxes) + PAD
    parts = [f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>']
    for box in boxes:
        size = f'width="{box.width}" height="{box.bottom - box.y}"'
        parts.append(f'<rect class="box" x="{box.x}" y="{box.y}" {size} rx="5"/>')
        parts += _write_lines(box.x + PAD, box.y + LINE, box.lines, "title")
    parts += [f'<path d="{arrow}" marker-end="url(#tip)"/>' for arrow in arrows]
    for x, y, text in notes:
        parts += _write_lines(x, y, text.splitlines(), "note")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>"]) + "\n"


def _write_lines(x: int, y: int, lines: list[str], first: str) -> list[str]:
    kinds = [
        "mono" if line.startswith("|") else first if i == 0 or first == "note" else "" for i, line in enumerate(lines)
    ]
    texts = [escape(line.removeprefix("|")) for line in lines]
    rows = zip(kinds, texts, strict=True)
    return [f'<text class="{kind}" x="{x}" y="{y + LINE * i}">{text}</text>' for i, (kind, text) in enumerate(rows)]


def stack(steps: list[tuple[str, str]], width: int) -> tuple[list[Box], list[str], list[tuple[int, int, str]]]:
    """Lay boxes out from top to bottom, each with the note at the arrow that leaves it, or the files next to it.

    Args:
        width: of a box; notes are under it if it fills the diagram, else at its right.
    """
    boxes: list[Box] = []
    arrows, notes, y = [], [], PAD
    for text, note in steps:
        box = Box(PAD, y, width, text)
        is_last = len(boxes) == len(steps) - 1
        below = width > WIDTH // 2
        gap = 0 if is_last else LINE * len(note.splitlines()) + 14 if below else 20
        notes.append((PAD + 36, box.bottom + 18, note) if below else (width + 2 * PAD + 4, y + LINE, note))
        end = box.bottom + gap if below else max(box.bottom, y + LINE * len(note.splitlines()) + PAD) + gap
        if not is_last:
            arrows.append(f"M{PAD + 20} {box.bottom}V{end - 1}")
        boxes.append(box)
        y = end
    return boxes, arrows, notes


IMAGE = [
    ("raw file\nread only; Trainyard never changes it", "the page cache of the operating system"),
    (
        "Sample\na key, columns, and `load`, which runs in a packing process",
        "the packing process, which holds one shard in memory",
    ),
    (
        "shard and index\nCRC-32C for each record, SHA-256 for each shard",
        "the disk; each rank keeps the index in memory",
    ),
    (
        "ids\norder(seed, epoch) gives global batches; a rank takes its share",
        "(b,) int64: the order of the epoch; shares are views of it",
    ),
    (
        "reader, thread `loader`\ncopies records of one micro-batch, checks their checksums",
        "uint8 bytes: new memory for each micro-batch",
    ),
    (
        "decoder, CPU threads of Pillow and torch, or DALI\ncrops to the sample's region, resizes and mirrors",
        "(B, H, W, C) uint8: a buffer of the loader",
    ),
    (
        "pinned buffer\none of prefetch + readers + 2, used again and again",
        "the loader's until the event of its copy has happened",
    ),
    (
        "copy stream\nstarts the copy one micro-batch ahead",
        "new memory on the device; torch's allocator keeps it until\nthe compute stream has used it (record_stream)",
    ),
    (
        "compute stream\nwaits for that event; casts, resamples, normalises",
        "(B, C, H, W) float32: new memory",
    ),
    ("batch\nbelongs to the model; may be kept", ""),
]
"""Each place of an image, and who owns the memory on the arrow that leaves it."""

COMMAND = [
    (
        "trainyard submit\non the login node, without torch\n"
        "chooses card, nodes and time,\nsplits the batch, copies the code",
        "|config.yaml  env.json\n|code/\n|slurm/attempt.sh\n"
        "|slurm/ID_submission.sh\n|slurm/ID_submitted.pkl\n|slurm/submission.json",
    ),
    (
        "sbatch -> attempt.sh begin\non the first node, no container:\n"
        "why did the last attempt end,\nis its budget used up?",
        "|slurm/attempts.jsonl\na line `start`; before it the\n`end` that a kill left out",
    ),
    ("site's lines\nsetup, then node_setup\non each node", "|slurm/started-ATTEMPT"),
    (
        "srun -> a rank for each GPU\nrank 0 takes the lock; all load\nthe newest valid checkpoint",
        "|lock  heartbeat.json  log\n|metrics.jsonl  events.jsonl\n|checkpoints/  ranks/\n"
        "|report.html\n|errors/ATTEMPT-rankN.json\n|slurm/signal-ATTEMPT",
    ),
    ("exit code\nagreed by all ranks", "|slurm/left-ATTEMPT"),
    (
        "attempt.sh end CODE\nfinds the cause and decides",
        "|slurm/attempts.jsonl\na line `end`: cause and action",
    ),
    (
        "requeue, where that helps\nscontrol requeue; where the site\nforbids it, a successor (sbatch)",
        "|slurm/requeue-ATTEMPT\nwhile Slurm does not answer\n|slurm/attempts.jsonl\na line `successor` or `exclude`",
    ),
    ("else stop\nruns on_end of the cluster file", ""),
]
"""Each step of a submitted run, and what it writes into the run's folder."""


def draw_command() -> str:
    """Return the diagram of a submitted command: a requeued job begins again at attempt.sh."""
    boxes, arrows, notes = stack(COMMAND, 222)
    begin, requeue = boxes[1], boxes[-2]
    arrows.append(f"M{PAD} {requeue.y + 20}H3V{begin.y + 20}H{PAD - 1}")
    return draw("From a command to a Slurm job", boxes, arrows, notes)


def draw_states() -> str:
    """Return the diagram of a run's states."""
    budget = vars(Attempts())
    rows = [
        ("preempted", ExitCode.PREEMPTED, budget["preempted"]),
        ("time limit", ExitCode.PREEMPTED, budget["time_limit"]),
        ("node lost", "-", budget["node_failure"]),
        ("crash", "other", f"{budget['crash']} since a checkpoint"),
        ("hung", ExitCode.HUNG, f"{budget['hung']} since a checkpoint"),
        ("disk full, read-only", ExitCode.DISK_FULL, budget["disk_full"]),
        ("disk error", ExitCode.DISK_ERROR, budget["disk_error"]),
        ("GPU out of memory", ExitCode.DEVICE_OOM, "halves the micro-batch"),
    ]
    table = [f"|{cause:<20} {code:>5}  {count}" for cause, code, count in rows]
    interrupted, limit, signal = ExitCode.INTERRUPTED, ExitCode.MAX_RUNTIME, ExitCode.PREEMPTED
    boxes = [
        new := Box(PAD, PAD, 206, "new\ncreated, never started"),
        waiting := Box(PAD, 84, 206, "waiting\nin the queue, or starts again"),
        running := Box(PAD, 160, 206, "running\nan attempt has processes"),
        silent := Box(236, 160, 211, "silent\nnothing written for 10 minutes"),
        again := Box(62, 240, 385, "\n".join(["starts again", "|cause                 exit  budget", *table])),
        done := Box(PAD, again.bottom + 60, 98, f"done\n|{ExitCode.DONE}\nevent `done`"),
        stopped := Box(
            PAD + 112,
            done.y,
            150,
            f"stopped\n|{interrupted} Ctrl-C\n|{limit} max_runtime\n|{signal} outside Slurm\n|   scancel",
        ),
        failed := Box(
            PAD + 276,
            done.y,
            158,
            f"failed\n|{ExitCode.USER_ERROR} user error, NaN\n|  no progress, twice\n|  and all others",
        ),
        lost := Box(PAD, stopped.bottom + 10, 98, "lost\nend unknown"),
    ]
    middle, branch, rail = running.y + 20, done.y - 16, WIDTH - 5
    arrows = [
        f"M100 {new.bottom}V{waiting.y - 1}",
        f"M100 {waiting.bottom}V{running.y - 1}",
        f"M215 {middle - 7}H{silent.x - 1}",
        f"M{silent.x} {middle + 7}H216",
        f"M130 {running.bottom}V{again.y - 1}",
        f"M447 {again.y + 20}H{rail}V{waiting.y + 20}H216",
        f"M32 {running.bottom}V{done.y - 1}",
        *[f"M32 {branch}H{box.x + 20}V{done.y - 1}" for box in (stopped, failed)],
        *[f"M{box.x + 110} {again.bottom}V{done.y - 1}" for box in (stopped, failed)],
        f"M32 {branch}H4V{lost.y + 20}H{PAD - 1}",
    ]
    notes = [
        (108, new.bottom + 20, "submit or run"),
        (108, waiting.bottom + 21, "Slurm starts it"),
        (340, waiting.y + 15, "within the budget"),
        (138, running.bottom + 24, "the attempt ends"),
        (40, again.bottom + 24, "it ends for good"),
        (240, again.bottom + 24, "budget used up"),
        (
            stopped.x,
            lost.y + LINE,
            "`trainyard resume RUN` takes a run that is\nstopped, failed or lost back to waiting",
        ),
    ]
    return draw("The states of a run", boxes, arrows, notes)


def draw_all() -> dict[str, str]:
    """Return each diagram by the name of its file in docs/."""
    return {
        "image.svg": draw("From a file to a batch", *stack(IMAGE, WIDTH - 2 * PAD)),
        "command.svg": draw_command(),
        "states.svg": draw_states(),
    }


if __name__ == "__main__":
    for name, svg in draw_all().items():
        (ROOT / "docs" / name).write_text(svg)
