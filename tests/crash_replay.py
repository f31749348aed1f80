"""Proves crash consistency by replay: records file operations, rebuilds what a power cut may leave, and starts again.

`python -m tests.crash_replay [--seconds N] [--seed N] [--results benchmarks]` records, with the library that
crash_replay.c becomes, what `trainyard run`, `pack` and `report` do to the files of a small job. Then it rebuilds the
states that a cut at each operation may leave, types the same command in each, and compares the end with that of a run
without a cut. Two models of a file system say which states are legal:

- journal: names, folders and sizes change in order; what was written to a file since its last flush is there, lost, or
  zeros. As ext4 and XFS.
- strict: as POSIX promises. What a flush of the file, or of the folder that has its name, does not order is lost or
  kept, each operation by itself, and the last write of a file may be torn. As some network file systems.

And it lets one operation, or all from one on, fail with EIO, ENOSPC or EDQUOT. `--forget PATTERN` drops the flushes of
matching paths from the recording, as if the code had none: the table must then show faults.
"""

import argparse
import ctypes
import errno
import gc
import hashlib
import importlib
import itertools
import json
import mmap
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tests.fill_disk import NO_MOUNT, enter_mount_namespace
from tests.training import FAMILIES, load_state, read_run_metrics
from trainyard.cli import main as run_command
from trainyard.measure import make_header, write_new
from trainyard.text import align_columns
from trainyard.tools.exact_runs import VARYING

SOURCE = Path(__file__).with_suffix(".c")
PRELOADED = (
    "trainyard.node.rank_task",
    "trainyard.train.trainer",
    "trainyard.data.pack",
    "trainyard.report.run_page",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "hydra.compose",
    "hydra_plugins.hydra_submitit_launcher.config",
    "PIL.PngImagePlugin",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "trainyard.cli.train",
    "trainyard.cli.use",
    "trainyard.cli.submission",
    "trainyard.cluster.check",
    "torch.utils.serialization.config",
)
"""Loaded once, in the process that forks one for each command."""
OPTIONS = ("data.synthetic=20", "data.decode=cpu", "max_duration=7st", "eval_every=3st", "checkpoint.every=2st")
MODELS = ("journal", "strict")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
ROWS = (*MODELS, *(f"{errno.errorcode[error]}{more}" for error in ERRORS for more in ("", " from then on")))
OUTCOMES = ("equal", "refused", "lost", "silent", "unclear", "traceback")
"""Equal to a run without a cut; refused with a sentence; equal, but a finished save was lost; different; a traceback.

Of a command during which operations failed, `refused` means that it named the file and the cause in a sentence, and
that the same command then ended equal; `lost`, that it did not; `unclear`, that no sentence names both.
"""


class Entry(NamedTuple):
    """What has a name in a tree."""

    content: bytes | None  # None: a folder
    time_ns: int  # when it was last changed: packing looks at it


Tree = dict[str, Entry]
"""What is below a folder, by its path."""


# ---- recording


class Control(ctypes.Structure):
    """`struct control` of crash_replay.c."""

    _fields_ = (
        ("recording", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("root", ctypes.c_char * 4096),
    )


class Record(ctypes.Structure):
    """`struct record` of crash_replay.c."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("inode", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("path", ctypes.c_uint32),
        ("target", ctypes.c_uint32),
        ("data", ctypes.c_uint32),
    )


class Recorder:
    """Steers the library in this process and in those that it starts."""

    def __init__(self, folder: Path, root: Path) -> None:
        path = folder / "control"
        path.write_bytes(bytes(ctypes.sizeof(Control)))
        self.log = folder / "control.log"
        with path.open("r+b") as file:
            self.control = Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self.control.root = os.fsencode(root)
        os.environ["CRASH_REPLAY"] = str(path)
        ctypes.CDLL(None).crash_replay_load()

    def start(self, *, error: int = 0, first: int = 0, last: int = 0) -> None:
        """Record from now on, and let operations fail: those from `first` to `last`."""
        self.log.unlink(missing_ok=True)
        control = self.control
        control.count, control.first, control.last, control.error, control.recording = 0, first, last, error, 1

    def stop(self) -> list[tuple[Record, str, str, bytes]]:
        """Stop recording; return each operation, its paths and what was written."""
        self.control.recording = self.control.error = 0
        data = self.log.read_bytes() if self.log.exists() else b""
        found, at = [], 0
        while at < len(data):
            record = Record.from_buffer_copy(data, at)
            at += ctypes.sizeof(Record)
            parts = []
            for length in (record.path, record.target, record.data):
                parts.append(data[at : at + length])
                at += length
            found.append((record, os.fsdecode(parts[0]), os.fsdecode(parts[1]), parts[2]))
        return found


# ---- disk


class Step(NamedTuple):
    """One operation that changed or flushed something, in terms of nodes of a disk."""

    kind: str
    path: str  # below the root, the new one of a rename
    number: int  # operations before it, also those that changed nothing
    names: tuple[tuple[int, str, int | None], ...] = ()  # folder, name, what has that name now
    node: int = -1  # file that was written or cut, or what was flushed
    offset: int = 0  # or length
    data: bytes | None = None


class Disk:
    """Folders and files by number; 0 is the root. A folder maps names to numbers."""

    def __init__(self, tree: Tree) -> None:
        self.nodes: dict[int, dict[str, int] | bytearray] = {0: {}}
        self.times_ns = dict[int, int]()
        for path, (content, time_ns) in sorted(tree.items()):
            number = self.add({} if content is None else bytearray(content))
            self.folder_of(path)[Path(path).name], self.times_ns[number] = number, time_ns

    def add(self, node: dict[str, int] | bytearray) -> int:
        number = len(self.nodes)
        self.nodes[number] = node
        return number

    def find(self, path: str) -> int:
        number = 0
        for name in Path(path).parts:
            folder = self.nodes[number]
            assert isinstance(folder, dict), path
            number = folder[name]
        return number

    def folder_of(self, path: str) -> dict[str, int]:
        folder = self.nodes[self.find(str(Path(path).parent))]
        assert isinstance(folder, dict), path
        return folder

    def apply(self, step: Step, change: str = "") -> None:
        """Do a step; `change`: "lost", "zeros" or "torn" for what a cut leaves of it."""
        if change == "lost":
            return
        for folder, name, node in step.names:
            entries = self.nodes[folder]
            assert isinstance(entries, dict)
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node
        if step.kind == "s" or step.node < 0:
            return
        content = self.nodes[step.node]
        assert isinstance(content, bytearray)
        if step.data is None:
            del content[step.offset :]
            content.extend(bytes(step.offset - len(content)))
            return
        data = {"zeros": bytes(len(step.data)), "torn": step.data[: len(step.data) // 2]}.get(change, step.data)
        content.extend(bytes(max(0, step.offset - len(content))))
        content[step.offset : step.offset + len(data)] = data

    def read_tree(self) -> Tree:
        """Return what can be reached from the root."""
        tree: Tree = {}
        waiting = [("", 0)]
        while waiting:
            prefix, number = waiting.pop()
            node = self.nodes[number]
            assert isinstance(node, dict)
            for name, child in node.items():
                found = self.nodes[child]
                content = bytes(found) if isinstance(found, bytearray) else None
                tree[prefix + name] = Entry(content, self.times_ns.get(child, 0))
                if isinstance(found, dict):
                    waiting.append((f"{prefix}{name}/", child))
        return tree


def read_tree(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): Entry(None if path.is_dir() else path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder hold a tree, and nothing else."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, entry in sorted(tree.items()):
        (root / name).mkdir() if entry.content is None else (root / name).write_bytes(entry.content)
    for name, entry in sorted(tree.items(), reverse=True):
        os.utime(root / name, ns=(entry.time_ns, entry.time_ns))


def hash_tree(tree: Tree) -> str:
    digest = hashlib.sha256()
    for name, (content, _) in sorted(tree.items()):
        digest.update(f"{name}\0{'folder' if content is None else len(content)}\0".encode() + (content or b""))
    return digest.hexdigest()


def resolve(
    records: Sequence[tuple[Record, str, str, bytes]], before: Tree, inodes: Mapping[int, str], root: Path
) -> tuple[Disk, list[Step]]:
    """Turn recorded operations into steps on a disk.

    Args:
        inodes: the number of each file and folder in `before`, and its path.

    Returns:
        the disk before the first step, with a node for all that is created later, and the steps.
    """
    disk, steps = Disk(before), list[Step]()
    start, numbers = Disk(before), {inode: Disk(before).find(path) for inode, path in inodes.items()}
    for record, path, target, data in records:
        kind = chr(record.kind)
        names: list[tuple[int, str, int | None]] = []
        path, target = (os.path.relpath(one, root) if one else "" for one in (path, target))
        parent, name = disk.find(str(Path(path).parent)) if path != "." and kind not in "wstmo" else 0, Path(path).name
        step = Step(kind, path, record.number)
        if kind in "cd":
            created: dict[str, int] | bytearray = {} if kind == "d" else bytearray()
            numbers[record.inode] = disk.add(created)
            start.add(type(created)())
            step = step._replace(names=((parent, name, numbers[record.inode]),))
        elif kind in "rl":
            moved = disk.find(path)
            names = [(disk.find(str(Path(target).parent)), Path(target).name, moved)]
            names += [(parent, name, None)] if kind == "r" else []
            step = step._replace(names=tuple(names[::-1]), path=target)
        elif kind == "u":
            step = step._replace(names=((parent, name, None),))
        elif kind in "wts" and record.inode in numbers:  # else of a file that never had a name
            step = step._replace(node=numbers[record.inode], offset=record.offset, data=data if kind == "w" else None)
        else:
            assert kind != "m", f"{path}: mapped for writing, which is not recorded"
            continue
        disk.apply(step)
        before_it = steps[-1] if steps else None
        if step.data and before_it and before_it.data and _follows(step, before_it):
            steps[-1] = before_it._replace(data=before_it.data + step.data)
        else:
            steps.append(step)
    for path in [root, *root.rglob("*")]:
        found = path.stat()
        start.times_ns[numbers[found.st_ino]] = found.st_mtime_ns
    return start, steps


def _follows(step: Step, before: Step) -> bool:
    """Return whether both writes could have been one: a torn one stands for a cut between them."""
    return step.node == before.node and step.offset == before.offset + len(before.data or b"")


def generalize(path: str) -> str:
    """Replace what differs in each recording, and among the files of a kind."""
    return re.sub(r"\d+", "N", re.sub(r"\.[0-9a-f]{16}|[0-9a-f]{8,}", "X", path))


@dataclass(frozen=True)
class Recording:
    """What one command did to a tree."""

    name: str
    words: Sequence[str]
    before: Tree
    disk: Disk  # as it was, with a node for all that is created later
    steps: Sequence[Step]
    promised: Sequence[int]  # for each cut the step of training whose save had finished: nothing may lose it

    def build(self, state: "State") -> Tree:
        """Return what a cut leaves."""
        disk = Disk({})
        disk.times_ns = self.disk.times_ns
        disk.nodes = {number: node.copy() for number, node in self.disk.nodes.items()}
        changes = state.find_changes(self.steps)
        for index, step in enumerate(self.steps[: state.cut]):
            disk.apply(step, changes.get(index, ""))
        return disk.read_tree()

    def name_phase(self, index: int) -> str:
        """Say in which part of the command a step is."""
        if self.name != "run":
            return self.name
        saves = [i for i, step in enumerate(self.steps) if "/checkpoints/" in step.path]
        return "start" if index < saves[0] else "save" if index <= saves[-1] else "end"


def find_promised(steps: Sequence[Step]) -> Iterator[int]:
    """Yield, for each cut, the step of the newest checkpoint whose name had been flushed."""
    renamed, finished = dict[int, int](), 0
    yield finished
    for step in steps:
        if step.kind == "r" and (found := re.search(r"step-(\d+)[^/]*\.ckpt$", step.path)):
            renamed[step.names[0][0]] = int(found[1])
        elif step.kind == "s":
            finished = renamed.pop(step.node, finished)
        yield finished


# ---- states


class State(NamedTuple):
    """What is left if power is cut before step `cut`."""

    model: str
    variant: str
    cut: int
    about: int = -1  # a step

    def find_changes(self, steps: Sequence[Step]) -> dict[int, str]:
        """Return what becomes of the steps before the cut that nothing flushed."""
        names, data = find_unflushed(steps, self.cut)
        if self.variant in ("lost", "zeros") and self.model == "journal":
            return {index: self.variant for index in data if steps[index].data is not None}
        pending = [*names, *data]
        if self.variant == "any":
            rng = random.Random(self.cut)
            return {index: "lost" for index in pending if rng.random() < 0.5}
        return {
            "kept": {},
            "none": dict.fromkeys(pending, "lost"),
            "lost": {self.about: "lost"},
            "alone": {index: "lost" for index in pending if index != self.about},
            "torn": {self.about: "torn"},
        }[self.variant]


def find_unflushed(steps: Sequence[Step], cut: int) -> tuple[list[int], list[int]]:
    """Return which steps before a cut changed names, and which changed contents, that nothing flushed since."""
    names, data = list[int](), list[int]()
    for index, step in enumerate(steps[:cut]):
        if step.kind == "s":
            names = [i for i in names if not {folder for folder, _, _ in steps[i].names} <= {step.node}]
            data = [i for i in data if steps[i].node != step.node]
        elif step.names:
            names.append(index)
        elif step.node >= 0:
            data.append(index)
    return names, data


def list_states(steps: Sequence[Step]) -> Iterator[State]:
    """Yield the legal states of all cuts, of which many are the same."""
    for cut in range(len(steps) + 1):
        yield from (State("journal", variant, cut, cut - 1) for variant in ("kept", "lost", "zeros"))
        names, data = find_unflushed(steps, cut)
        yield State("strict", "none", cut, cut - 1)
        yield State("strict", "any", cut, cut - 1)
        for index in (*names, *data):
            yield from (State("strict", variant, cut, index) for variant in ("lost", "alone"))
        last = {steps[index].node: index for index in data if steps[index].data}
        yield from (State("strict", "torn", cut, index) for index in last.values())


def take_turns(groups: Mapping[Any, Sequence[Any]], rng: random.Random) -> Iterator[Any]:
    """Yield one of each group, in random order, then a second one of each, and so on."""
    shuffled = [rng.sample(group, len(group)) for group in groups.values()]
    rng.shuffle(shuffled)
    for turn in itertools.zip_longest(*shuffled):
        yield from (one for one in turn if one is not None)


# ---- commands


class End(NamedTuple):
    """How a command ended."""

    code: int
    said: str
    digest: str = ""  # of what it is for, if the code is 0
    resumed: int = 0  # step

    def judge(self, wanted: str) -> str:
        if "Traceback" in self.said or self.code < 0:
            return "traceback"
        return "refused" if self.code else "equal" if self.digest == wanted else "silent"


def call(words: Sequence[str], digest: Callable[[], str], folder: Path, *, timeout_s: float = 60) -> End:
    """Run a command in a process of its own, and read in it what it left."""
    output, result = folder / "output", folder / "result"
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        code = 70
        try:
            code = run_command(list(words))
            sys.stdout.flush()
            if not code:
                result.write_text(digest())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    pidfd = os.pidfd_open(child)
    ended = select.select([pidfd], [], [], timeout_s)[0]
    if not ended:
        os.killpg(child, signal.SIGKILL)
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = output.read_text(errors="replace")
    resumed = re.findall(r"resuming from step-(\d+)", said)
    said += "" if ended else f"\nTraceback: no end within {timeout_s} s"
    return End(code, said, result.read_text() if result.exists() else "", int(resumed[-1]) if resumed else 0)


def digest_run(run: Path) -> str:
    """Return a digest of the weights, optimizer and metrics that a run ended with."""
    digest = hashlib.sha256()
    for name, value in sorted(load_state(run).items()):
        if name in VARYING:
            continue
        digest.update(name.encode())
        digest.update(value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
    digest.update(json.dumps(read_run_metrics(run)).encode())
    page = run / "report.html"
    assert not page.exists() or page.read_text().rstrip().endswith("</html>"), "the report is not whole"
    return digest.hexdigest() + ("" if page.exists() else _NO_REPORT)


_CAUSE = r"(not written|not saved|no space left|the disk, or the network to it, failed)"
_NO_REPORT = " without a report"


class Laboratory:
    """Records commands on files below one folder, and tries what cuts and errors leave of them."""

    def __init__(self, folder: Path, *, forget: str = "") -> None:
        self.folder, self.root, self.forget = folder, folder / "root", forget
        self.root.mkdir(exist_ok=True)
        self.run = self.root / "runs" / "stripes" / "it"
        options = ["--jobs", str(FAMILIES)]
        train = ["run", "stripes", *options, "--name", "it", "--runs", str(self.root / "runs")]
        self.train = [*train, f"data.cache={self.root / 'cache'}", *OPTIONS]
        self.pack = ["pack", "stripes", str(self.root / "raw"), str(self.root / "out"), *options]
        self.report = ["report", str(self.run), *options]
        self.wanted: dict[str, str] = {}

    def digest(self, name: str) -> str:
        if name != "pack":
            return digest_run(self.run)
        tree = read_tree(self.root / "out")
        return hash_tree({path: entry for path, entry in tree.items() if not path.startswith(".")})

    def call(self, recording: Recording | str, words: Sequence[str]) -> End:
        name = recording if isinstance(recording, str) else recording.name
        return call(words, lambda: self.digest(name), self.folder)

    def record_all(self, *, only: str = "") -> list[Recording]:
        """Record the commands, each on what `run` left, but for those of which nothing will be tried."""
        self.recorder = Recorder(self.folder, self.root)
        run = self.record("run", self.train, {})
        done = read_tree(self.root)
        cut = max(i for i, step in enumerate(run.steps) if step.kind == "c" and ".ckpt" in step.path)
        drawn = [path for path in done if re.search(r"synthetic.*/.*\.png$", path)]
        raw = {"raw": done["cache"], **{f"raw/{Path(path).name}": done[path] for path in drawn}}
        others: dict[str, tuple[Sequence[str], Tree]] = {
            "resume": (self.train, run.build(State("journal", "kept", cut))),
            "pack": (self.pack, raw),
            "report": (self.report, done),
        }
        is_tried = {name: any(re.search(only, f"{row} {name}") for row in ROWS) for name in others}
        found = [run, *(self.record(name, *others[name]) for name in others if is_tried[name])]
        assert {self.wanted["run"]} == {d for name, d in self.wanted.items() if name != "pack"}, "a resume differs"
        return found

    def record(self, name: str, words: Sequence[str], before: Tree) -> Recording:
        """Record a command, and check that its steps lead to what it left."""
        write_tree(self.root, before)
        inodes = {(self.root / path).stat().st_ino: path for path in before} | {self.root.stat().st_ino: "."}
        self.recorder.start()
        end = self.call(name, words)
        records = self.recorder.stop()
        assert end.code == 0 and end.digest, end.said
        self.wanted[name] = end.digest
        disk, steps = resolve(records, before, inodes, self.root)
        recording = Recording(name, words, before, disk, steps, list(find_promised(steps)))
        replayed, left = recording.build(State("journal", "kept", len(steps))), read_tree(self.root)
        assert replayed == left, {path for path in {*replayed, *left} if replayed.get(path) != left.get(path)}
        if not self.forget:
            return recording
        forgotten = [step.kind == "s" and re.search(self.forget, step.path) for step in steps]
        kept = [step._replace(kind="-", node=-1) if drop else step for step, drop in zip(steps, forgotten, strict=True)]
        return replace(recording, steps=kept)

    def try_state(self, recording: Recording, tree: Tree, state: State) -> tuple[str, End]:
        """Rebuild a state, type the command, and judge its end."""
        write_tree(self.root, tree)
        end = self.call(recording, recording.words)
        outcome = end.judge(self.wanted[recording.name])
        return "lost" if outcome == "equal" and end.resumed < recording.promised[state.cut] else outcome, end

    def try_error(self, recording: Recording, number: int, error: int, *, forever: bool) -> tuple[str, End]:
        """Let an operation of a command fail, and type the command again if it says so."""
        write_tree(self.root, recording.before)
        self.recorder.start(error=error, first=number, last=sys.maxsize if forever else number)
        end = self.call(recording, recording.words)
        self.recorder.stop()
        if "the report is not written" in end.said:  # then the run is done without it
            end = end._replace(digest=end.digest.removesuffix(_NO_REPORT))
        outcome = end.judge(self.wanted[recording.name])
        if outcome == "refused" and not re.search(
            rf"^Disk(Full|Error): {self.root}/.*{_CAUSE}", end.said, re.MULTILINE
        ):
            return "unclear", end
        if outcome == "refused":
            again = self.call(recording, recording.words)
            found = again.judge(self.wanted[recording.name])
            if found != "equal":
                return "lost" if found == "refused" else found, End(again.code, f"{end.said}\nagain:\n{again.said}")
        return outcome, end


# ---- table


class Trial(NamedTuple):
    """One state or error that was tried, or stays untried."""

    row: str
    phase: str
    recording: int
    state: State | None = None
    number: int = 0
    error: int = 0
    forever: bool = False


def list_trials(recordings: Sequence[Recording], rng: random.Random) -> dict[tuple[str, str], list[Trial]]:
    """Return what can be tried for each row and phase, in an order whose beginning has something of everything."""
    groups: dict[tuple[str, str], dict[Any, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for at, recording in enumerate(recordings):
        steps = recording.steps
        for state in list_states(steps):
            phase, about = recording.name_phase(max(state.cut - 1, 0)), steps[max(state.about, 0)]
            kind = state.variant, about.kind, generalize(about.path)
            groups[state.model, phase][kind].append(Trial(state.model, phase, at, state))
        for index, step in enumerate(steps):
            for error in ERRORS:
                for forever in (False, True):
                    row, phase = (
                        f"{errno.errorcode[error]}{' from then on' if forever else ''}",
                        recording.name_phase(index),
                    )
                    trial = Trial(row, phase, at, number=step.number, error=error, forever=forever)
                    groups[row, phase][step.kind, generalize(step.path)].append(trial)
    return {key: list(take_turns(group, rng)) for key, group in groups.items()}


def try_all(
    laboratory: Laboratory,
    recordings: Sequence[Recording],
    trials: Mapping[tuple[str, str], Sequence[Trial]],
    *,
    deadline: float,
    most: int,
    tell: Callable[[dict[str, Any]], object],
) -> None:
    """Try what time allows, by turns of all rows and phases; a state that was tried is not tried again."""
    seen, tried = set[tuple[int, str]](), 0
    for trial in itertools.chain.from_iterable(itertools.zip_longest(*trials.values())):
        if tried >= most or time.monotonic() > deadline:
            return
        if trial is None:
            continue
        recording = recordings[trial.recording]
        if trial.state is None:
            outcome, end = laboratory.try_error(recording, trial.number, trial.error, forever=trial.forever)
            what = str(next(s for s in recording.steps if s.number == trial.number)[:2])
        else:
            tree = recording.build(trial.state)
            key = trial.recording, hash_tree(tree)
            if key in seen:
                continue
            seen.add(key)
            outcome, end = laboratory.try_state(recording, tree, trial.state)
            what = f"{trial.state} {recording.steps[trial.state.about][:2]}"
        tried += 1
        said = "" if outcome == "equal" else end.said[-3000:]
        tell({"row": trial.row, "phase": trial.phase, "outcome": outcome, "what": what, "code": end.code, "said": said})


def compile_library(folder: Path) -> Path | None:
    """Compile crash_replay.c; return None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "crash_replay.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


def run_workers(
    laboratory: Laboratory, recordings: Sequence[Recording], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Share what is to be tried among processes that see disks of their own under the same name; return the results."""
    rng = random.Random(args.seed)
    trials = list_trials(recordings, rng)
    trials = {key: found for key, found in trials.items() if re.search(args.only, " ".join(key))}
    listed = {key: len(found) for key, found in trials.items()}
    deadline = time.monotonic() + args.seconds
    results, children = [laboratory.folder / f"results-{own}" for own in range(args.workers)], []
    for own, path in enumerate(results):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            if args.workers > 1 and not mount_own(laboratory.root):
                os._exit(NO_MOUNT)
            folder = laboratory.folder / f"worker-{own}"
            folder.mkdir()
            laboratory.folder, laboratory.recorder = folder, Recorder(folder, laboratory.root)
            share = {key: found[own :: args.workers] for key, found in trials.items()}
            with path.open("w", buffering=1) as file:
                tell = partial(print_result, file)
                try_all(laboratory, recordings, share, deadline=deadline, most=args.most, tell=tell)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if NO_MOUNT in codes:
        raise SystemExit(NO_MOUNT)
    if any(codes):
        raise RuntimeError(f"a worker failed: {codes}")
    lines = [json.loads(line) for path in results for line in path.read_text().splitlines()]
    return summarize(listed, lines)


def mount_own(folder: Path) -> bool:
    """Mount an empty disk over a folder, for this process and its children; return whether that is allowed."""
    try:
        enter_mount_namespace()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"neither root nor a user namespace may mount a tmpfs here: {error}", flush=True)
        return False
    return True


def print_result(file: TextIO, result: Mapping[str, Any]) -> None:
    """Write a result, and show it if it is a fault."""
    file.write(json.dumps(result) + "\n")
    if result["outcome"] != "equal":
        print("{outcome}: {phase}, {row}: {what}: exit code {code}\n{said}".format(**result), flush=True)


def summarize(listed: Mapping[tuple[str, str], int], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count the outcomes of each phase and row."""
    counts = {key: Counter(r["outcome"] for r in results if (r["row"], r["phase"]) == key) for key in listed}
    return [
        {"phase": phase, "row": row, "listed": listed[row, phase], "tried": count.total()}
        | {outcome: count[outcome] for outcome in OUTCOMES}
        for (row, phase), count in sorted(counts.items(), key=lambda item: item[0][::-1])
    ]


def main() -> int:
    """Record, try, and print the table; return 1 if it shows a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="of trying, after the recording")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="tries of each worker")
    parser.add_argument("--seed", type=int, default=0, help="chooses what is tried where not everything can be")
    parser.add_argument("--workers", type=int, default=2, help="processes; several need the right to mount")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of a row and a phase, such as 'strict save'")
    parser.add_argument("--forget", default="", metavar="PATTERN", help="of paths whose flushes are left out")
    parser.add_argument("--results", type=Path, help="folder for a result file")
    args = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # flushes cost nothing there
    with tempfile.TemporaryDirectory(prefix="crash-replay-", dir=memory) as folder:
        if not hasattr(ctypes.CDLL(None), "crash_replay_load"):
            library = compile_library(Path(folder))
            if library is None:
                print("no C compiler is here (cc, gcc or clang)")
                return NO_COMPILER
            environ = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
            return subprocess.run([sys.executable, "-m", "tests.crash_replay", *sys.argv[1:]], env=environ).returncode
        for module in PRELOADED:
            importlib.import_module(module)
        gc.freeze()  # a collection in a child would write to every object, and so copy the memory that it shares
        laboratory = Laboratory(Path(folder), forget=args.forget)
        recordings = laboratory.record_all(only=args.only)
        print(*(f"{one.name}: {len(one.steps)} operations" for one in recordings), sep=", ", flush=True)
        lines = run_workers(laboratory, recordings, args)
    table = [["phase", "of", "listed", "tried", *OUTCOMES], *([str(cell) for cell in line.values()] for line in lines)]
    print("\n".join(align_columns(table)))
    if args.results:
        print(f"written: {write_new(args.results, 'crash-replay', [make_header('crash-replay', vars(args)), *lines])}")
    return int(any(has_fault(line) for line in lines))


def has_fault(line: Mapping[str, Any]) -> bool:
    """Tell whether a line of the table shows a fault: after a power cut also a refusal is one."""
    return bool(line["lost"] or line["silent"] or line["traceback"] or (line["row"] in MODELS and line["refused"]))


NO_COMPILER = 78

if __name__ == "__main__":
    raise SystemExit(main())
