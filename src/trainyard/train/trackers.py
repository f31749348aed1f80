"""The trackers that the recorder writes to: TensorBoard, W&B and MLflow."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainyard.errors import UserError
from trainyard.runs.events import TIMING_KEYS, flatten


class Tracker(Protocol):
    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    """Event files in `<run>/tensorboard`. Each attempt purges the step it starts from and all later ones."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=resume_at or 0)
        if not resume_at:
            text = json.dumps(config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", global_step=0)

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _select_scalars(kind, values):
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Offline runs in `<run>/wandb`, one per attempt, because W&B cannot undo steps. `wandb sync` uploads them."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            mode="offline",
            dir=run,
            project=str(config.get("job") or "trainyard"),
            group=run.name,
            name=_format_attempt_name(run, resume_at),
            config=dict(config),
            # Without this, it would store its own patch of uncommitted changes, passwords included, and the git remote.
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        if scalars := dict(_select_scalars(kind, values)):
            self._run.log(scalars, step=step)

    def flush(self) -> None:
        """Do nothing: W&B's own process writes the data."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A local file store in `<run>/mlflow`, with one MLflow run per attempt."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        # MLflow now prefers SQLite, whose locks fail on network file systems; plain files need this switch.
        MLFLOW_ALLOW_FILE_STORE.set(True)
        self._client: Any = MlflowClient((run / "mlflow").absolute().as_uri())
        name = str(config.get("job") or "trainyard")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment_id, run_name=_format_attempt_name(run, resume_at)).info.run_id
        for key, value in flatten(config):
            self._client.log_param(self._id, _clean_mlflow_name(key), str(value))

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _select_scalars(kind, values):
            self._client.log_metric(self._id, _clean_mlflow_name(tag), value, step=step)

    def flush(self) -> None:
        """Do nothing: every call writes its file."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_tracker(name: str, run: Path, config: Mapping[str, object], resume_at: int | None) -> Tracker:
    kinds: dict[str, Callable[[Path, Mapping[str, object], int | None], Tracker]] = {
        "tensorboard": _TensorBoard,
        "wandb": _WandB,
        "mlflow": _MLflow,
    }
    if name not in kinds:
        raise UserError(f"trackers={name}: expected any of {', '.join(kinds)}.")
    try:
        return kinds[name](run, config, resume_at)
    except ModuleNotFoundError as error:
        if name == "tensorboard":  # a required dependency: without it the installation is broken
            raise
        raise UserError(
            f"trackers={name}: {error.name} is not installed here. "
            f"Run: pip install 'trainyard[{name}]', or leave {name} out of trackers."
        ) from error


def _select_scalars(kind: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line with the tags that trackers show; events have none."""
    if kind == "event":
        return
    prefix = f"eval/{values['split']}" if kind == "eval" else "train"
    for key, value in values.items():
        if isinstance(value, int | float | np.number) and key not in ("step", "elapsed_s"):
            yield f"{'timing' if kind == 'train' and key in TIMING_KEYS else prefix}/{key}", float(value)


def _format_attempt_name(run: Path, resume_at: int | None) -> str:
    return run.name if resume_at is None else f"{run.name} from step {resume_at}"


def _clean_mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
