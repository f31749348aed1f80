"""Python interface for notebooks and scripts: `trainyard.run(job, **options)`, `trainyard.Run(path)`, `load_model`.

Each call but the last runs the command of that name in a separate process: the kernel loads no torch and holds no GPU.
Importing this loads nothing that takes time. Documentation: docs/notebooks.md
"""

import base64
import html
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainyard.errors import UserError
from trainyard.runs.folder import CONFIG, check_name, find_free_name, format_run_name, resolve_run
from trainyard.runs.state import ExitCode
from trainyard.text import cut, shorten_path, suggest_nearest

if TYPE_CHECKING:
    import numpy as np

    from trainyard.train.module import TrainModule

_POLL_S = 0.1
_WIDTH = 110  # of the line that shows the progress
_STOPPED = (ExitCode.PREEMPTED, ExitCode.MAX_RUNTIME, ExitCode.INTERRUPTED)


def run(
    job: str,
    *,
    name: str = "",
    gpus: int = 0,
    cpu_ranks: int = 0,
    synthetic: bool = False,
    jobs: str | Path | None = None,
    runs: str | Path = "runs",
    **options: Any,
) -> "Run":
    """Train a job here until it is done or stops, and return its run: `trainyard run`.

    An interrupted cell saves, as Ctrl-C in a terminal does; the run then resumes with `Run(...).resume()`.

    Args:
        job: preset, such as "fingerprint_demo".
        name: of the run's folder; the same name again resumes that run. "": the time.
        gpus: processes, one per GPU; 0: one process, on a GPU if there is one.
        cpu_ranks: processes that share the cores, without a GPU.
        synthetic: train on a few generated samples.
        jobs: folder of families; None: ./jobs and Trainyard's own.
        runs: folder of runs.
        options: of the job. A dict sets the options of a group, as in optimizer={"lr": 1e-4}; a text or a path as
            `data` is the folder of data.

    Raises:
        UserError: it is impossible, or failed; the message has the reason and the remedy.
    """
    check_name(name or None, of="run")
    folder = Path(runs) / job
    path = folder / name if name else find_free_name(folder / f"{datetime.now():%Y%m%d-%H%M%S}")
    flags = [*(["--synthetic"] if synthetic else []), *(["--jobs", str(jobs)] if jobs is not None else [])]
    words = ["run", job, *_format_options(options), "--name", path.name, "--runs", str(runs), *flags]
    _call([*words, *_format_ranks(gpus, cpu_ranks)], about=path)
    return Run(path)


def load_model(run: "str | Path | Run", *, jobs: str | Path | None = None, runs: str | Path = "runs") -> "TrainModule":
    """Return the module of a run with its final weights, in evaluation mode, on a GPU if there is one.

    In this process: it loads torch and the family's code. The module knows no data set, so it
    predicts (`module.predict(batch)`), and scores nothing.

    Args:
        run: its folder; a job, for that job's newest run; or the beginning of a run's name.
        jobs: folder of families; None: the one that the run was started with.
        runs: folder of runs.

    Raises:
        UserError: there is no such run, it has no checkpoint, the code at hand builds another model, or others can
            change its family.
    """
    from trainyard.runs.families import find_families
    from trainyard.runs.trust import require_trust
    from trainyard.tools import trained_model

    path = run.path if isinstance(run, Run) else resolve_run(str(run), Path(runs), trained=True).absolute()
    folder, is_named = (Path(jobs), False) if jobs is not None else find_families(path)
    require_trust(
        [path],
        named=[folder] if is_named else [],
        uses=[],
        jobs_dir=folder,
        is_chosen=lambda file: False,
        trusted=False,
        command=f"trainyard.load_model({str(run)!r}, jobs={str(folder)!r})",
    )
    return trained_model.load_model(path, folder, lists="").module


class Run:
    """A run: its state, metrics and weights. In a notebook it shows itself."""

    def __init__(self, path: str | Path, *, runs: str | Path = "runs") -> None:
        """Open a run.

        Args:
            path: its folder; a job, for that job's newest run; or the beginning of a run's name.
            runs: folder of runs.

        Raises:
            UserError: there is no such run.
        """
        self.path = resolve_run(str(path), Path(runs)).absolute()

    @property
    def status(self) -> "RunStatus":
        """Its state and progress, from the run's folder, and from Slurm if it runs there."""
        from trainyard.runs.status import format_headline, read_statuses, suggest_command

        (status,), _ = read_statuses([shorten_path(self.path)])
        text, following = format_headline(status), suggest_command(status)
        return RunStatus(str(status.state), status.step, status.total_steps, text, following)

    @property
    def metrics(self) -> "dict[str, dict[str, np.ndarray]]":
        """Series by split and name, such as metrics["val"]["eer"] and ["train"]["loss"]; "step" is among the names.

        (N,) float64 each, NaN where a line of the log has no such number; "step" is int64.
        """
        import numpy as np

        from trainyard.runs.events import read_metrics

        lines: dict[str, list[dict[str, Any]]] = {}
        for line in read_metrics(self.path):
            lines.setdefault(str(line.get("split", "train")), []).append(line)
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for split, of_split in lines.items():
            kinds = {k: type(v) for line in of_split for k, v in line.items()}
            names = [name for name, kind in kinds.items() if kind in (int, float)]
            arrays[split] = {name: np.array([line.get(name, math.nan) for line in of_split], float) for name in names}
            arrays[split]["step"] = arrays[split]["step"].astype(np.int64)
        return arrays

    @property
    def figures(self) -> "Figures":
        """The plots of its report and the figures of its family, as PNG by name; a notebook shows them."""
        self.report()
        folders = [self.path / name for name in ("plots", "figures", "samples")]
        paths = [path for folder in folders for path in sorted(folder.glob("*.png"))]
        return Figures({path.stem: path.read_bytes() for path in paths})

    @property
    def log(self) -> str:
        """The text of its log."""
        path = self.path / "log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def why(self) -> str:
        """Return why it waits, stopped or failed, and the next command: `trainyard why`."""
        from trainyard.runs.why import explain_run

        return explain_run(self.path)

    def resume(self, *, gpus: int = 0, cpu_ranks: int = 0, inexact: bool = False, **options: Any) -> "Run":
        """Train on from the newest checkpoint, until it is done or stops: `trainyard resume`.

        Args:
            gpus: of a run that was submitted to a cluster, which submits it again; here: as `trainyard resume`.
            cpu_ranks: processes that share the cores, without a GPU.
            inexact: extend it even if it then differs from a run that was planned so.
            options: that do not change the mathematics, and a larger max_duration, which extends the run.

        Raises:
            UserError: it is impossible, or failed.
        """
        words = ["resume", str(self.path), *_format_options(options), *(["--inexact"] if inexact else [])]
        _call([*words, *_format_ranks(gpus, cpu_ranks)], about=self.path)
        return self

    def evaluate(self, folder: str | Path, *, split: str = "", baselines: bool = True) -> dict[str, dict[str, float]]:
        """Score its weights on a labelled folder; return metrics by name, of "run" and each baseline.

        Args:
            split: only this split of packed data, or set of raw files.
            baselines: also those of simple methods on the same samples, which may take longer than the run.

        Raises:
            UserError: the folder has no labelled samples of the job.
        """
        from trainyard.runs.evaluations import read_evaluations
        from trainyard.runs.events import select_metrics

        words = ["evaluate", str(self.path), str(Path(folder).absolute()), *(["--split", split] if split else [])]
        _call([*words, *([] if baselines else ["--no-baseline"])])
        return {str(line["system"]): select_metrics(line) for line in read_evaluations(self.path)[-1].lines}

    def predict(
        self, raw: str | Path, out: str | Path | None = None, *, pairs: str | Path | None = None
    ) -> "dict[str, np.ndarray]":
        """Return the predictions for new raw files, as columns by name: numbers as float64, else texts.

        Args:
            out: file to write as well: .csv, .json or .parquet.
            pairs: score these pairs, of a model that compares: a table with columns one,other. None: all.

        Raises:
            UserError: the folder has no samples of the job, or the job makes no predictions.
        """
        from trainyard.tables import read_rows

        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "out.csv" if out is None else Path(out)
            _call(["predict", str(self.path), str(raw), str(table), *(["--pairs", str(pairs)] if pairs else [])])
            rows = read_rows(table)
        return {name: _make_column([row[name] for row in rows]) for name in (rows[0] if rows else ())}

    def embed(self, raw: str | Path) -> "Embeddings":
        """Return the embeddings of new raw files, of a model that compares samples: `trainyard embed`.

        Raises:
            UserError: the folder has no samples of the job, or the job has no embeddings.
        """
        import numpy as np

        from trainyard.tables import read_table

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.npz"
            _call(["embed", str(self.path), str(raw), str(out)])
            with np.load(out) as arrays:
                vectors = arrays["embedding"]
            return Embeddings([row["key"] for row in read_table(out.with_suffix(".csv"))], vectors)

    def report(self) -> Path:
        """Write its report, one HTML page, and return the file: `trainyard report`."""
        _call(["report", str(self.path)])
        return self.path / "report.html"

    def __repr__(self) -> str:
        return f"Run({str(shorten_path(self.path))!r})"

    def _repr_html_(self) -> str:
        status = self.status
        headline = f"<b>{html.escape(format_run_name(self.path))}</b>: {html.escape(status.describe())}"
        return f"<p>{headline}</p>{self.figures._repr_html_()}"


@dataclass(frozen=True)
class RunStatus:
    """State and progress of a run."""

    state: str  # waiting, running, silent, done, stopped, failed, lost or new
    step: int | None
    total_steps: int | None  # None: unknown, or time ends it
    text: str  # one line
    next: str  # command that helps further

    def describe(self) -> str:
        """Return state and step in a few words."""
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        return self.state if self.step is None else f"{self.state}, step {self.step:,}{of}"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of N samples."""

    keys: list[str]
    vectors: "np.ndarray"  # (N, D) float32, of unit length


class Figures(dict[str, bytes]):
    """PNG images by name, which a notebook shows."""

    def select(self, *names: str) -> "Figures":
        """Return some of them, in this order.

        Raises:
            UserError: there is none of a name.
        """
        for name in names:
            if name not in self:
                raise UserError(
                    f"'{name}': there is no such figure.{suggest_nearest(name, self)} All: {', '.join(self)}"
                )
        return Figures({name: self[name] for name in names})

    def __repr__(self) -> str:
        return f"Figures({', '.join(self)})"

    def _repr_html_(self) -> str:
        images = (
            f'<img alt="{html.escape(name)}" style="width: 24rem; max-width: 100%; display: inline-block" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            for name, png in self.items()
        )
        return f"<div>{''.join(images)}</div>"


# Options


def _format_options(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return options as they are typed: {"optimizer": {"lr": 1e-4}} is optimizer.lr=0.0001."""
    words = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            words += _format_options(value, f"{prefix}{name}.")
        else:
            full = "data.path" if prefix + name == "data" else prefix + name
            words.append(f"{full}={_format_value(value)}")
    return words


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_ranks(gpus: int, cpu_ranks: int) -> list[str]:
    return [*(["--gpus", str(gpus)] if gpus else []), *(["--cpu-ranks", str(cpu_ranks)] if cpu_ranks else [])]


def _make_column(texts: list[str]) -> "np.ndarray":
    import numpy as np

    with suppress(ValueError):  # then it is no column of numbers
        return np.array([float(text) for text in texts])
    return np.array(texts)


# Calling a command


def _call(words: list[str], *, about: Path | None = None) -> None:
    """Run a command in a separate process, and show its newest line until it ends.

    It writes to files instead of pipes, so that a training outlives a kernel that is restarted.

    Args:
        about: the run that it trains.

    Raises:
        UserError: with the command's own words.
        KeyboardInterrupt: the cell was interrupted, and the command has saved and ended.
    """
    command = [sys.executable, "-P", "-m", "trainyard", *words]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, _Progress() as progress:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        is_interrupted = False
        while child.poll() is None:
            try:
                time.sleep(_POLL_S)
                if line := _find_last_line(_read(errors)):
                    progress.show(line)
            except KeyboardInterrupt:  # twice: without waiting until it has saved
                is_interrupted = True
                progress.show("interrupted: saving")
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGINT)
        errors_text, code = _read(errors), child.returncode
        if about is not None and (about / CONFIG).is_file():
            progress.show(f"{format_run_name(about)}: {Run(about).status.describe()}")
        else:
            progress.show("")
    if is_interrupted:
        raise KeyboardInterrupt
    if code not in (ExitCode.DONE, *_STOPPED):
        raise UserError(_explain(code, errors_text, about))


def _read(file: BinaryIO) -> str:
    """Return the end of the text that a process has written to a file shared with us."""
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    return os.pread(descriptor, _MOST_BYTES, max(0, size - _MOST_BYTES)).decode(errors="replace")


_MOST_BYTES = 2**16
_CLOCK = re.compile(r"\d\d:\d\d:\d\d ")
"""Start of a line of a run's log."""


def _find_last_line(text: str) -> str:
    lines = [line for line in text.rpartition("\n")[0].splitlines() if line.strip()]
    return _CLOCK.sub("", lines[-1], count=1) if lines else ""


def _explain(code: int, text: str, about: Path | None) -> str:
    """Return why a command failed: its message, or the run's record."""
    if code not in (ExitCode.USER_ERROR, ExitCode.DISK_FULL) and about is not None and (about / CONFIG).is_file():
        return Run(about).why()
    lines = text.strip().splitlines()
    first = max((i + 1 for i, line in enumerate(lines) if _CLOCK.match(line)), default=0)
    tail = lines[first:] or lines[-1:]
    named = next((i for i, line in enumerate(tail) if re.match(r"[A-Z]\w+: ", line)), 0)
    message = re.sub(r"^[A-Z]\w+: ", "", "\n".join(tail[named:]))
    return message or f"the command ended with code {code} and said nothing"


class _Progress:
    """One line that changes: below the cell in a notebook, else on a terminal; nowhere else."""

    def __enter__(self) -> "_Progress":
        self._last = ""
        self._handle: Any = None
        self._in_notebook = _is_notebook()
        self._on_terminal = not self._in_notebook and sys.stderr.isatty()
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_terminal and self._last:
            print(file=sys.stderr)

    def show(self, line: str) -> None:
        """Replace the line; "" clears it."""
        line = cut(line, _WIDTH)
        if line == self._last:
            return
        if self._handle is not None:
            self._handle.update({"text/plain": line}, raw=True)
        elif self._in_notebook:
            self._handle = _open_display(line)
        elif self._on_terminal:
            print(f"\r{line:<{len(self._last)}}", end="", file=sys.stderr, flush=True)
        self._last = line


def _is_notebook() -> bool:
    """Return whether this is the kernel of a notebook; loads no IPython."""
    module = sys.modules.get("IPython")
    return module is not None and hasattr(module.get_ipython(), "kernel")


def _open_display(line: str) -> Any:
    from IPython.display import display

    return display({"text/plain": line}, raw=True, display_id=True)
