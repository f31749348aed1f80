"""`trainyard export`: programs that compute what the run does, examples that use them, and what is refused."""

import json
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.test_contract import FAMILIES as CONTRACT_FAMILIES
from tests.test_contract import JOBS
from tests.training import FAMILIES, new_run, train
from trainyard.cli import main
from trainyard.config.families import load_family
from trainyard.errors import UserError
from trainyard.runs.manifest import list_checkpoints
from trainyard.tools import export, program
from trainyard.tools.trained_model import load_model

ROOT = Path(__file__).resolve().parents[1]
ONNX = ("onnx", "onnxscript", "onnxruntime")
missing = ", ".join(name for name in ONNX if find_spec(name) is None)
needs_onnx = pytest.mark.skipif(missing != "", reason=f"{missing}: not installed. Type: pip install '.[onnx]'")
FORMATS = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    made = new_run(tmp_path_factory.mktemp("stripes"), "max_duration=1ep")
    assert train(made) == 0
    return made


def type_export(run: Path, out: Path, *words: str, jobs: Path = FAMILIES) -> int:
    return main(["export", str(run), str(out), *words, "--jobs", str(jobs)])


def run_example(number: int, *words: object, folder: Path = ROOT / "jobs" / "fingerprint") -> str:
    """Run an example of docs/export.md in a process that cannot import Trainyard; return what it prints."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)[number]
    assert code.count("\n") <= 20
    start = (
        "import sys; from importlib.util import find_spec\n"
        f"sys.path += [{sysconfig.get_paths()['purelib']!r}, {str(folder)!r}]\n"
        "assert find_spec('trainyard') is None and find_spec('jobs') is None\n"
    )
    # -S: .pth files, which make an editable installation importable, are not read.
    command = [sys.executable, "-I", "-S", "-c", start + code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_images(run: Path, jobs: Path, folder: Path) -> tuple[list[Path], program.CheckedBatch]:
    """Write the images of a batch as the network takes them; return the files, and the rows of the run for them."""
    model = load_model(run, jobs, on_cpu=True)
    with export.open_samples(model, None) as (data, ids, _):
        batch = list(program.read_batches(model, data, ids, ["image"]))[1]
    files = [folder / f"{i}.png" for i in range(len(batch.inputs["image"]))]
    for file, pixels in zip(files, batch.inputs["image"].numpy(), strict=True):
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file)
    return files, batch


@pytest.mark.slow
@needs_onnx
def test_an_onnx_file_computes_what_the_run_does_without_trainyard(run, tmp_path, capsys):
    assert type_export(run, tmp_path / "m.onnx", "--format", "onnx") == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "computes the same as the run on 32 samples of the run's data" in shown and "0.0001 is allowed" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    files, batch = read_images(run, FAMILIES, tmp_path)
    printed = run_example(0, tmp_path / "m.onnx", *files)
    assert printed == f"chosen {batch.rows['chosen'].tolist()}\n"


@pytest.mark.slow
def test_a_program_that_computes_something_else_is_not_written(run, tmp_path, monkeypatch, capsys):
    kind = load_family(FAMILIES, "stripes", "module").StripesModule
    predict = kind.predict

    def predict_other(module, batch):
        rows = predict(module, batch)
        return {**rows, "chosen": rows["chosen"] + 9} if torch.compiler.is_exporting() else rows

    monkeypatch.setattr(kind, "predict", predict_other)
    assert type_export(run, tmp_path / "m.pt2", "--format", "torch-export") == 2
    assert "chosen by 9 differ from the run's; 0.0001 is allowed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused(run, tmp_path, monkeypatch, capsys):
    assert type_export(run, tmp_path / "m.onnx", "--format", "torch-export") == 2
    assert "expected a name that ends in .pt2 for --format torch-export: m.pt2" in capsys.readouterr().err
    (tmp_path / "m.pt2").write_text("precious")
    assert type_export(run, tmp_path / "m.pt2", "--format", "torch-export") == 2
    assert "exists already and is not overwritten" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert type_export(run, tmp_path / "m.onnx", "--format", "onnx") == 2
    said = capsys.readouterr().err
    assert re.search("onnxruntime cannot be imported here. Type: pip install .*onnxruntime; or use", said)
    assert type_export(run, tmp_path / "n.pt2", "--format", "torch-export", "--samples", str(tmp_path / "no")) == 2
    assert "no such file or folder" in capsys.readouterr().err
    kind = load_family(FAMILIES, "stripes", "module").StripesModule
    monkeypatch.delattr(kind, "describe_predict")
    assert type_export(run, tmp_path / "n.pt2", "--format", "torch-export") == 2
    command = re.search("Its weights: trainyard (.*)", capsys.readouterr().err)
    assert command is not None and [path.name for path in tmp_path.iterdir()] == ["m.pt2"]
    monkeypatch.chdir(tmp_path)
    assert main([*command[1].split(), "--jobs", str(FAMILIES)]) == 0 and Path("stripes.safetensors").is_file()


@torch.library.custom_op("tests_export::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _describe(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.slow
@needs_onnx
def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x)

    x = torch.ones(2, 3)
    traced = program.Traced(torch.export.export(Doubled(), (x,)), {"x": x}, {"x": {}}, ("y",), "mine")
    with pytest.raises(UserError, match=r"ONNX has no operator for tests_export\.double[\w.]*, which mine uses here"):
        program.write_onnx(traced, tmp_path / "m.onnx", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@needs_onnx
@pytest.mark.parametrize("family", CONTRACT_FAMILIES)
def test_every_family_is_exported_in_every_format(family, tmp_path, capsys):
    made = new_run(tmp_path, "max_duration=1st", job=f"{family}_smoke", jobs=JOBS)
    assert train(made, jobs=JOBS) == 0
    entry = list_checkpoints(made / "checkpoints")[0]
    files = {name: tmp_path / f"m{suffix}" for name, suffix in FORMATS.items()}
    export.export_weights(made, entry, files["safetensors"], JOBS)
    for name in ("torch-export", "onnx"):
        check = export.export_program(made, entry, files[name], JOBS, onnx=name == "onnx")
        assert check.samples == 32 and max(check.differences.values()) <= check.tolerance
    with safe_open(files["safetensors"], "pt") as file:
        texts = file.metadata()
        model = json.loads(texts["model"])
        assert "data" not in model["options"] and texts["checkpoint_sha256"] == entry.sha256
    extra = {program.EXTRA_FILE: ""}
    torch.export.load(files["torch-export"], extra_files=extra)
    written = json.loads(extra[program.EXTRA_FILE])
    described = json.loads(written.pop("model"))
    assert written == {name: texts[name] for name in written} and {"inputs", "outputs"} <= described.keys()
    assert all(entry["shape"][0] == "batch" and entry["doc"] for entry in described["inputs"].values())
    assert {name: described[name] for name in model} == model
    if family == "fingerprint":
        check_examples(made, files, tmp_path)


def check_examples(run: Path, files: dict[str, Path], folder: Path) -> None:
    """Check that the examples compute the run's embeddings of prints."""
    images, batch = read_images(run, JOBS, folder)
    embeddings = batch.rows["embedding"]
    printed = run_example(0, files["onnx"], *images)
    assert np.allclose(json.loads(printed.removeprefix("embedding ")), embeddings, atol=1e-4)
    score, verdict = run_example(1, files["torch-export"], *images[:2]).split(maxsplit=1)
    assert float(score) == pytest.approx(float(embeddings[0] @ embeddings[1]), abs=1e-4)
    assert verdict in ("match\n", "no match\n")
    printed = run_example(2, files["safetensors"], images[0])
    assert np.allclose(json.loads(printed), embeddings[0], atol=1e-4)
