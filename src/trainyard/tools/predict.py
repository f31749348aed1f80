"""`trainyard predict`: run the best weights of a run on new raw files, and write a table."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger
from tqdm import tqdm

from trainyard.config import load_family, thaw
from trainyard.errors import UserError
from trainyard.hardware import choose_precision, count_cores
from trainyard.runs.folder import CONFIG
from trainyard.runs.manifest import list_checkpoints
from trainyard.settings import TrainConfig
from trainyard.tables import write_table

if TYPE_CHECKING:
    from trainyard.data.shards import ShardSet
    from trainyard.train.module import TrainModule


def predict(run: Path, raw: Path, out: Path, jobs_dir: Path) -> int:
    """Write one line per sample of `raw` to the CSV file `out`, as `tables` does; return the number of samples.

    Raises:
        UserError: the family has no predictions, the run has no checkpoint, `raw` cannot be read, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists already and is not overwritten. Choose another file, or delete it.")
    if not raw.exists():
        raise UserError(f"{raw}: no such file or folder. Expected unlabelled raw files, as for {run.parent.name}.")
    config = thaw(run / CONFIG, jobs_dir)
    pack = load_family(jobs_dir, config.family, "pack")
    if not hasattr(pack, "unlabelled"):
        raise UserError(f"{config.family} has no predictions for a table: its pack.py has no 'unlabelled'.")
    saved = _load_checkpoint(run)
    module = _build_module(config, jobs_dir, saved)
    with _pack_temporarily(pack.unlabelled(raw, config, saved["learned"]), config, out.parent) as data:
        rows = _predict_rows(module, data, config)
        _write_csv(out, list(module.prediction_rows(rows, data.read_keys(np.arange(data.count)))))
        return data.count


def _load_checkpoint(run: Path) -> dict[str, Any]:
    from trainyard.train import checkpoint

    folder = run / "checkpoints"
    if not list_checkpoints(folder):
        raise UserError(f"{run}: no checkpoints yet to predict with. Train first: trainyard resume {run}")
    entry, problem = checkpoint.choose_undamaged(folder)
    if problem:
        logger.warning("{}: {}.", run, problem)
    saved = checkpoint.load(entry.path)
    if not isinstance(saved.get("learned"), dict):
        raise UserError(f"{entry.path}: has no artifacts of packing, which training always saves. Use another run.")
    return saved


def _build_module(config: TrainConfig, jobs_dir: Path, saved: dict[str, Any]) -> "TrainModule":
    from trainyard.train.checkpoint import select_weights
    from trainyard.train.module import DataInfo

    no_ids = np.empty(0, dtype=np.int64)
    info = DataInfo({}, {}, no_ids, saved["learned"])
    module: TrainModule = load_family(jobs_dir, config.family, "module").build(config, info)
    try:
        module.load_state_dict(select_weights(saved))
    except (RuntimeError, LookupError, AttributeError, TypeError) as error:  # weights with another shape or name
        raise UserError(
            "The weights of this run do not fit the model that the code at hand builds. Use the code it was trained "
            f"with (`code` in the run's env.json), or train from scratch. {' '.join(str(error).split())[:300]}"
        ) from None
    return module


@contextmanager
def _pack_temporarily(samples: Any, config: TrainConfig, parent: Path) -> Iterator["ShardSet"]:
    """Pack samples into a temporary folder next to the output, which has the space; delete it at the end."""
    from trainyard.data.pack import pack

    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".predict-") as folder:
        data = pack(samples, Path(folder) / "packed", meta={"family": config.family}, workers=count_cores())
        try:
            yield data
        finally:
            data.close()


def _predict_rows(module: "TrainModule", data: "ShardSet", config: TrainConfig) -> dict[str, np.ndarray]:
    import torch

    from trainyard.data.loader import Loader
    from trainyard.train import evaluate, precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    major, minor = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
    policy = choose_precision(10 * major + minor or None, precision=config.precision)
    loader = Loader.from_config(config, data, device=device, decode="cpu", threads=count_cores())
    with tqdm(total=data.count, unit="sample", desc="predicting", disable=None, leave=False) as bar:
        return evaluate.predict(
            module.to(device),
            loader,
            np.arange(data.count),
            batch_size=config.eval_batch_size,
            autocast=precision.make_autocast(policy, device),
            progress=bar.update,
        )


def _write_csv(out: Path, lines: list[dict[str, object]]) -> None:
    """Write the table to a temporary file and rename it, so that no incomplete table is ever visible."""
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            write_table(file, list(lines[0]), lines)
        partial.replace(out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
