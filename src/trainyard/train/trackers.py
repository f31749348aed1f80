"""The trackers that the recorder writes to: TensorBoard, W&B and MLflow. Loads none of them, nor numpy, on its own."""

import importlib.util
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from trainyard.errors import UserError
from trainyard.files import make_folder_inside
from trainyard.runs.events import TIMING_KEYS, flatten

PACKAGES = {"wandb": ("wandb", "wandb>=0.21"), "mlflow": ("mlflow", "mlflow-skinny>=3.17")}
"""Trackers that need a package: its module, and its requirement."""


class Tracker(Protocol):
    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None: ...
    def log_image(self, tag: str, step: int, png: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    """Event files in `<run>/tensorboard`. Each attempt purges the step it starts from and all later ones.

    The options are its hyperparameters, next to the deciding metric, so that its HPARAMS page compares runs.
    """

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None, monitor: str) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(make_folder_inside(run / "tensorboard")), purge_step=resume_at or 0)
        if not resume_at:
            text = json.dumps(config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", global_step=0)
            options = {name: value if type(value) in (int, float) else str(value) for name, value in flatten(config)}
            for summary in hparams(options, {f"eval/{monitor}": 0.0} if monitor else {}):  # type: ignore[no-untyped-call]
                self._writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _select_scalars(kind, values):
            self._writer.add_scalar(tag, value, step)
        shown: Mapping[str, Any] = values.get("shown", {})  # type: ignore[assignment]
        for name, value in shown.items():
            tag = f"eval/{values['split']}/{name}"
            if isinstance(value, str):
                self._writer.add_text(tag, value, step)
            else:
                self._add_histogram(tag, step, **value)

    def _add_histogram(self, tag: str, step: int, edges: Sequence[float], counts: Sequence[int]) -> None:
        """Add a histogram; each value counts as the middle of its bin."""
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        moments = [sum(count * x**power for count, x in zip(counts, middles, strict=True)) for power in (1, 2)]
        self._writer.add_histogram_raw(
            tag,
            edges[0],
            edges[-1],
            sum(counts),
            *moments,
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def log_image(self, tag: str, step: int, png: bytes) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            self._writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Offline runs in `<run>/wandb`, one per attempt, because W&B cannot undo steps. `wandb sync` uploads them."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None, monitor: str) -> None:
        import wandb

        project, tags = _read_project(config)
        self._run: Any = wandb.init(
            mode="offline",
            dir=make_folder_inside(run / "wandb").parent,
            project=project,
            tags=tags,
            group=run.name,
            name=_format_attempt_name(run, resume_at),
            config=dict(config),
            # Without this, it would store its own patch of uncommitted changes, passwords included, and the git remote.
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        if scalars := dict(_select_scalars(kind, values)):
            self._run.log(scalars, step=step)

    def log_image(self, tag: str, step: int, png: bytes) -> None:
        """Do nothing: synced data leave this machine, and the figures of some families show people."""

    def flush(self) -> None:
        """Do nothing: W&B's own process writes the data."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A local file store in `<run>/mlflow`, with one MLflow run per attempt."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None, monitor: str) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        # MLflow now prefers SQLite, whose locks fail on network file systems; plain files need this switch.
        MLFLOW_ALLOW_FILE_STORE.set(True)
        self._client: Any = MlflowClient(make_folder_inside(run / "mlflow").absolute().as_uri())
        project, tags = _read_project(config)
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        name, marks = _format_attempt_name(run, resume_at), dict.fromkeys(map(_clean_mlflow_name, tags), "true")
        self._id = self._client.create_run(experiment_id, run_name=name, tags=marks).info.run_id
        for key, value in flatten(config):
            self._client.log_param(self._id, _clean_mlflow_name(key), str(value))

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _select_scalars(kind, values):
            self._client.log_metric(self._id, _clean_mlflow_name(tag), value, step=step)

    def log_image(self, tag: str, step: int, png: bytes) -> None:
        """Do nothing: a store of MLflow is shared, and the figures of some families show people."""

    def flush(self) -> None:
        """Do nothing: every call writes its file."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


_KINDS: dict[str, Callable[[Path, Mapping[str, object], int | None, str], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}


def require_trackers(names: Sequence[str]) -> None:
    """Check that the packages of these trackers are here.

    Raises:
        UserError: one is not; has the command that installs it.
    """
    for name in names:
        module, requirement = PACKAGES.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            rest = ",".join(tracker for tracker in names if tracker != name)
            raise UserError(
                f"trackers={name}: {module} is not installed here. Type: {shlex.quote(sys.executable)} -m pip install "
                f"'{requirement}', or leave it out: trackers=[{rest}]"
            )


def open_tracker(
    name: str, run: Path, config: Mapping[str, object], resume_at: int | None, *, monitor: str = ""
) -> Tracker:
    """Open one of the trackers that the option names.

    Args:
        monitor: the metric that decides, with its split, such as val/eer.

    Raises:
        UserError: its package is not installed.
    """
    require_trackers([name])
    return _KINDS[name](run, config, resume_at, monitor)


def _read_project(config: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the project and the tags that a run's options name; the job, if they name no project."""
    tracking = config.get("tracking")
    stated: Mapping[str, Any] = tracking if isinstance(tracking, Mapping) else {}
    return str(stated.get("project") or config.get("job") or "trainyard"), list(stated.get("tags") or ())


def _select_scalars(kind: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line with the tags that trackers show; events have none."""
    if kind == "event":
        return
    prefix = f"eval/{values['split']}" if kind == "eval" else "train"
    for key, value in values.items():
        if isinstance(value, Real) and key not in ("step", "elapsed_s"):
            yield f"{'timing' if kind == 'train' and key in TIMING_KEYS else prefix}/{key}", float(value)


def _format_attempt_name(run: Path, resume_at: int | None) -> str:
    return run.name if resume_at is None else f"{run.name} from step {resume_at}"


def _clean_mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
