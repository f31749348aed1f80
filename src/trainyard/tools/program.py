"""Turns a trained network and its preprocessing into a program of torch.export or ONNX, and runs such programs."""

import json
import re
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainyard.config.settings import ImageSettings
from trainyard.data.device import prepare_model_input
from trainyard.data.index import AUDIO, IMAGE, PCM
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.hardware import count_cores
from trainyard.tools.trained_model import TrainedModel
from trainyard.train.evaluate import predict_batches
from trainyard.train.module import Rows, Signature, TrainModule

Compute: TypeAlias = Callable[[dict[str, Tensor]], dict[str, np.ndarray]]

SAMPLE_ID = "sample_id"
EXTRA_FILE = "trainyard.json"
"""Name of the file in a torch.export archive that holds the texts."""

_BATCH_ENDS = (1, 8, 16, 24)  # batches of 1, 7 and 8: a program must take any size
_MOST_ONNX_BYTES = 2**31  # of a protobuf message


@dataclass(frozen=True)
class CheckedBatch:
    """Inputs of a program, and the rows that the run's network returns for them."""

    inputs: dict[str, Tensor]  # images (B, H, W, C) uint8, audio (B, N) int16, everything else as in a batch
    rows: Rows


@dataclass(frozen=True)
class Traced:
    """A traced network."""

    exported: ExportedProgram
    inputs: dict[str, Tensor]  # an example
    axes: dict[str, dict[int, str]]  # input -> axis -> its name, if its length varies
    outputs: tuple[str, ...]
    family: str


def read_batches(model: TrainedModel, data: ShardSet, ids: np.ndarray, names: Iterable[str]) -> Iterator[CheckedBatch]:
    """Yield samples in small batches of several sizes, as programs take them, with the rows of the run's network."""
    levels = replace(model.config.image, mean=0.0, std=1 / 255)  # pixels as gray levels, up to rounding
    config = replace(model.config, sound=replace(model.config.sound, segments="first"))  # a program takes one segment
    seen, stored = (
        Loader(config, data, device=model.device, decode="cpu", threads=count_cores())
        for config in (config, replace(config, image=levels))
    )
    for part in np.split(ids, _BATCH_ENDS):
        if len(part):
            (micro_batch,) = stored.evaluate(part, batch_size=len(part))
            (rows,) = predict_batches(
                model.module, seen, part, batch_size=len(part), autocast=nullcontext, progress=lambda count: None
            )
            batch = micro_batch.batch
            yield CheckedBatch({name: _restore(name, batch[name], data) for name in names}, rows)


def _restore(name: str, value: Tensor, data: ShardSet) -> Tensor:
    """Return the decoded values from which the loader made an entry of a batch."""
    if name == IMAGE:
        return value.permute(0, 2, 3, 1).round().to(torch.uint8).contiguous()
    if name in _list_audio(data):
        return (value * 32768).to(torch.int16)
    return value.clone()


def _list_audio(data: ShardSet) -> set[str]:
    return {name for name, records in data.records.items() if records.kind in (AUDIO, PCM)}


class PredictGraph(nn.Module):
    """The exported graph: preprocessing and `predict`.

    Args:
        module: in evaluation mode.
        inputs, outputs: names, in their order.
        audio: which inputs are audio.
        image: how images are normalised.
    """

    def __init__(
        self,
        module: TrainModule,
        inputs: Iterable[str],
        outputs: Iterable[str],
        *,
        audio: Container[str],
        image: ImageSettings,
    ) -> None:
        super().__init__()
        self.module, self.inputs, self.outputs = module, tuple(inputs), tuple(outputs)
        self.audio, self.image = audio, image

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the rows that are outputs."""
        batch = dict(zip(self.inputs, inputs, strict=True))
        count = inputs[0].shape[0]
        if IMAGE in batch:
            batch[IMAGE] = prepare_model_input(
                batch[IMAGE],
                {},
                fill=self.image.fill,
                mean=self.image.mean,
                std=self.image.std,
                channels_last=False,
            )
        batch = {name: v * (1 / 32768) if name in self.audio else v for name, v in batch.items()}
        rows = self.module.predict({**batch, SAMPLE_ID: torch.arange(count)})
        chosen = {name: rows[name] for name in self.outputs}
        return {name: v.float() if v.is_floating_point() else v for name, v in chosen.items()}


_AXES = ("length", "width")  # of padded arrays, in names of exported programs


def trace(model: TrainedModel, data: ShardSet, inputs: dict[str, Tensor], signature: Signature) -> Traced:
    """Trace the network for any number of samples, and for any length of padded arrays.

    Args:
        inputs: an example of two samples or more.

    Raises:
        UserError: `predict` does something that torch.export cannot trace.
    """
    axes = {name: {0: "batch"} for name in inputs}
    for name in inputs:
        varying = data.records[name].varying_axes if name in data.records else 0
        axes[name] |= {axis: f"{name}_{_AXES[axis - 1]}" for axis in range(1, varying + 1)}
    shapes = tuple(dict.fromkeys(axes[name], Dim.DYNAMIC) for name in inputs)
    graph = PredictGraph(
        model.module, inputs, signature.outputs, audio=_list_audio(data), image=model.config.image
    ).eval()
    try:
        with torch.no_grad():
            exported = torch.export.export(
                graph, tuple(inputs.values()), dynamic_shapes={"inputs": shapes}, strict=False
            )
    except RuntimeError as error:  # torch has many kinds, all of this type
        raise UserError(
            f"{model.run}: not exported: torch.export cannot trace predict of {model.config.family}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return Traced(exported, inputs, axes, tuple(signature.outputs), model.config.family)


def describe(traced: Traced, signature: Signature) -> dict[str, Any]:
    """Describe a program's inputs and outputs, as JSON values."""
    inputs = {
        name: {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [traced.axes[name].get(number, size) for number, size in enumerate(value.shape)],
            "doc": signature.inputs[name],
        }
        for name, value in traced.inputs.items()
    }
    return {"inputs": inputs, "outputs": dict(signature.outputs), "settings": dict(signature.settings)}


def write_torch_export(traced: Traced, path: Path, texts: Mapping[str, str]) -> None:
    """Write what `torch.export.load` reads, with the texts as JSON in `EXTRA_FILE`."""
    with _hide_warnings():
        # Without autocast, which torch 2.13 writes and cannot read again.
        program = traced.exported.run_decompositions({})
        torch.export.save(program, path, extra_files={EXTRA_FILE: json.dumps(dict(texts))})


@contextmanager
def _hide_warnings() -> Iterator[None]:
    """Hide what torch 2.13 says about its own code, and about weights without an element."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="No complete tensor found")
        yield


def open_torch_export(path: Path) -> tuple[str, Compute]:
    """Return the runtime's name, and a function that runs the program."""
    module = torch.export.load(path).module()

    def compute(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return {name: value.numpy() for name, value in module(*inputs.values()).items()}

    return f"torch {torch.__version__}", compute


def write_onnx(traced: Traced, path: Path, texts: Mapping[str, str]) -> None:
    """Write an ONNX model, with the texts in its metadata.

    Raises:
        UserError: ONNX lacks an operator of the network, or the file would be too large.
    """
    size = sum(v.numel() * v.element_size() for v in traced.exported.state_dict.values())
    if size >= _MOST_ONNX_BYTES:
        raise UserError(
            f"--format onnx: an ONNX file holds less than 2 GiB, and the weights of this run take {size / 2**30:.1f}. "
            "Use --format torch-export."
        )
    try:
        with _hide_warnings():
            program = torch.onnx.export(
                traced.exported,
                (),
                input_names=list(traced.inputs),
                output_names=list(traced.outputs),
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise UserError(
            f"--format onnx: ONNX has no operator for {_find_operator(error)}, which {traced.family} uses here. Use "
            "--format torch-export."
        ) from error
    assert program is not None
    program.model.metadata_props.update(texts)
    program.save(path, external_data=False)


def _find_operator(error: BaseException) -> str:
    """Return the operator that an exporter's error, or the first of its causes, is about; else its first line."""
    match = re.search(r"OpOverload\(op='([\w.:]+)'", "".join(traceback.format_exception(error)))
    return match[1] if match else str(error).partition("\n")[0]


def open_onnx(path: Path) -> tuple[str, Compute]:
    """Return the runtime's name, and a function that runs the program."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def compute(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
        taken = {entry.name for entry in session.get_inputs()}
        feed = {name: value.numpy() for name, value in inputs.items() if name in taken}
        return dict(zip(names, session.run(names, feed), strict=True))

    return f"onnxruntime {onnxruntime.__version__}", compute


def compare(compute: Compute, batches: Sequence[CheckedBatch]) -> dict[str, float]:
    """Return the largest difference of each result: absolute up to 1, relative above; NaN if one is not finite."""
    largest: dict[str, float] = {}
    for batch in batches:
        for name, computed in compute(batch.inputs).items():
            expected = batch.rows[name].astype(np.float64)
            assert computed.shape == expected.shape, (name, computed.shape, expected.shape)
            difference = float((np.abs(computed - expected) / np.maximum(1, np.abs(expected))).max())
            largest[name] = float(np.maximum(largest.get(name, 0.0), difference))
    return largest
