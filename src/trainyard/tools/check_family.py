"""Checks the contract of a family: what training, evaluation and prediction take for granted of its parts."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trainyard.config import compose as configs
from trainyard.config.families import find_jobs, load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.decode_cpu import decode_image
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import shuffle
from trainyard.data.prepare import prepare_data
from trainyard.data.shards import Audio, Mask, Ragged, ShardSet
from trainyard.data.splits import find_splits
from trainyard.errors import INTERFACE, SEE_INTERFACE, UserError, find_place
from trainyard.text import join_names, quote_path
from trainyard.tools.exact_runs import RunsDiffer, compare_runs
from trainyard.train.contract import build_module, check_scores, compute_first_losses, try_predict
from trainyard.train.module import DataInfo, TrainModule
from trainyard.train.own_optimizer import is_own
from trainyard.train.step import TrainState, build_optimizer, train_step

STEPS = 12  # on one batch, in which the loss falls by a tenth


class CheckFailed(Exception):
    """A check failed; the message has the finding."""


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    name: str
    failure: str  # the finding; "": none

    @property
    def passed(self) -> bool:
        return not self.failure


class Family:
    """A family with its smoke preset, whose data are packed and whose model is built when a check needs them."""

    def __init__(self, jobs_dir: Path, family: str, scratch: Path) -> None:
        self.jobs_dir, self.family, self.folder, self.scratch = jobs_dir, family, jobs_dir / family, scratch

    def import_part(self, part: str) -> ModuleType:
        return load_family(self.jobs_dir, self.family, part)

    def import_tests(self) -> ModuleType:
        """Import the family's own tests, which define a perfect prediction."""
        return importlib.import_module(f".test_{self.family}", self.import_part("config").__package__)

    @cached_property
    def config(self) -> TrainConfig:
        """The smoke preset, with its data packed."""
        config = configs.compose(f"{self.family}_smoke", [f"data.cache={self.scratch / 'data'}"], self.jobs_dir)
        return prepare_data(config, self.jobs_dir)

    @cached_property
    def data(self) -> ShardSet:
        """The packed data."""
        return ShardSet(Path(self.config.data.path))

    @cached_property
    def raw(self) -> Path:
        """The raw files that were generated."""
        self.data  # noqa: B018  packs them
        return next((self.scratch / "data").glob(f"{self.family}-synthetic-*"))

    @cached_property
    def splits(self) -> Mapping[str, np.ndarray]:
        """The sample ids of each set."""
        return find_splits(self.import_part("pack"), self.data, self.config)

    def build(self, config: TrainConfig | None = None) -> TrainModule:
        """Build the model, with the preset's seed."""
        torch.manual_seed(self.config.seed)
        info = DataInfo.from_shards(self.data, self.splits["train"])
        return build_module(self.jobs_dir, config or self.config, info)

    def read_micro_batch(self) -> MicroBatch:
        loader = Loader(self.config, self.data, device=torch.device("cpu"), decode="cpu")
        stream = loader.train(
            lambda epoch: shuffle(self.splits["train"], seed=0, epoch=epoch, global_batch_size=16),
            epoch=0, start=0, micro_batch_size=0,
        )  # fmt: skip
        micro = next(stream)
        stream.close()
        return micro


def check_family(jobs_dir: Path, family: str, scratch: Path) -> Iterator[Result]:
    """Yield the result of each check, as soon as it is known.

    Args:
        scratch: an empty folder for generated data and runs.

    Raises:
        UserError: there is no such family.
    """
    if not (jobs_dir / family).is_dir():
        command = f"trainyard new {quote_path(family)} --jobs {quote_path(jobs_dir)}"
        raise UserError(f"{jobs_dir / family}: no such family. Write one: {command}")
    subject = Family(jobs_dir.resolve(), family, scratch)
    has_data, reported = True, set[str]()
    for name, check in CHECKS.items():
        failure = ""
        if not has_data and check not in _FORM:
            continue
        try:
            check(subject)
        except (CheckFailed, UserError) as error:
            failure = str(error).removesuffix(SEE_INTERFACE)  # once, at the end
        except Exception as error:  # the family's code, which is being tried, may raise anything
            failure = f"{type(error).__name__}: {error} ({find_place(error)})"
        yield Result(name, "as said above" if failure in reported else failure)
        reported |= {failure} - {""}
        if failure and check in _NEEDED:
            has_data = False


def _expect(holds: object, message: str) -> None:
    if not holds:
        raise CheckFailed(message)


def check_files(family: Family) -> None:
    usual = ["config.py", "pack.py", "module.py", "README.md", f"test_{family.family}.py", f"{family.family}.yaml"]
    missing = [name for name in [*usual, f"{family.family}_smoke.yaml"] if not (family.folder / name).is_file()]
    _expect(not missing, f"{family.folder}: lacks {', '.join(missing)}. Expected files: {INTERFACE}")


def check_presets(family: Family) -> None:
    """Check that every preset composes and has a first line about its purpose, and every option a text."""
    presets = {name: path for name, path in find_jobs(family.jobs_dir).items() if path.parent.name == family.family}
    composed = [configs.compose(name, [], family.jobs_dir) for name in presets]
    plain = [path.name for path in presets.values() if not path.read_text().startswith("# ")]
    silent = {option.name for config in composed for option in configs.list_options(config) if not option.doc}
    lacks = [f"{family.folder}: {join_names(plain)}: expected a first line '# purpose of the preset'."] * bool(plain)
    file, named = family.folder / "config.py", join_names(sorted(silent))
    lacks += [f"{file}: options have no words about their effect: {named}."] * bool(silent)
    _expect(not lacks, " ".join(lacks))


def check_packing(family: Family) -> None:
    """Check that packed data read back equal to the samples that `samples` yields."""
    pack, data = family.import_part("pack"), family.data
    samples = list(pack.samples(family.raw, family.config))
    artifacts = (pack.fit_artifacts(family.raw, family.config),) if hasattr(pack, "fit_artifacts") else ()
    _expect(data.artifacts == dict(*artifacts), "fit_artifacts returns something else in a second call.")
    _expect(len(samples) == data.count > 10, f"{data.count} samples packed of {len(samples)}: expected more than 10.")
    _expect(
        data.read_keys(np.arange(data.count)) == [sample.key for sample in samples],
        "samples() yields other keys, or in another order, in a second call.",
    )
    for i, sample in enumerate(samples):
        for name, value in {**sample.columns, **sample.load(*artifacts)}.items():
            _expect(_reads_back(data, i, name, value), f"{name} of '{sample.key}' reads back as something else.")


def _reads_back(data: ShardSet, i: int, name: str, value: Any) -> bool:
    if isinstance(value, Ragged | Audio):
        stored, values = data.read_arrays(name, np.array([i]))[0], getattr(value, "values", None)
        expected = value.data if isinstance(value, Audio) else values
        return stored.tobytes() == (expected if isinstance(expected, bytes) else np.asarray(expected).tobytes())
    if isinstance(value, Mask):
        (png,) = data.read_bytes(name, np.array([i]))
        return bool(np.array_equal(decode_image(png, 1)[:, :, 0].numpy(), value.values))
    if isinstance(value, bytes):
        return data.read_bytes(name, np.array([i]))[0].tobytes() == value
    if isinstance(value, np.ndarray):
        read = np.empty((1, *value.shape), dtype=value.dtype)
        data.read_into(name, np.array([i]), read)
        return bool(np.array_equal(read[0], value))
    if isinstance(value, str):
        return bool(data.vocabulary[name][data.columns[name][i]] == value)
    return bool(data.columns[name][i] == value)


def check_splits(family: Family) -> None:
    """Check that there are training and validation samples, and that sets meet a run's rules."""
    missing = [name for name in ("train", "val") if not len(family.splits.get(name, ()))]
    _expect(not missing, f"splits() has no samples in {' and '.join(missing)}.")


def check_loss(family: Family) -> None:
    """Check that the loss falls on one batch, at a learning rate of 0.003, or that of the family's own optimizer."""
    micro = family.read_micro_batch()
    module = family.build()
    optimizer = build_optimizer(module, family.config)
    state = TrainState(module, module, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, 0.0)
    lr = family.config.optimizer.lr if is_own(module, "build_optimizer") else 3e-3
    losses = []
    for _ in range(STEPS):
        result = train_step(state, [micro], lr=lr, world_size=1, seed=0, clip_grad_norm=1.0, autocast=nullcontext)
        losses.append(float(result.losses["loss"]))
        state.progress.step = 1  # messages about a first step appear once
    _expect(
        min(losses[-3:]) < 0.9 * losses[0],
        f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {STEPS} steps on one batch: expected a tenth less.",
    )


def check_returns(family: Family) -> None:
    """Check what `forward` and `predict` return for a batch, as a run does before its first step."""
    module, batch = family.build(), family.read_micro_batch().batch
    try_predict(module, batch, nullcontext)
    compute_first_losses(module, module, batch)


def check_gradients(family: Family) -> None:
    """Check that every parameter gets a gradient, also in the shallowest network that the options allow."""
    model = getattr(family.config, "model", None)
    layers = [f for f in vars(type(model)).get("__dataclass_fields__", {}).values() if f.name.endswith("layers")]
    shallowest = [f"model.{f.name}={f.metadata['low']}" for f in layers if isinstance(f.metadata.get("low"), int)]
    for options in [[], shallowest] if shallowest else [[]]:
        config = configs.apply_overrides(family.config, options) if options else family.config
        module = family.build(config)
        compute_first_losses(module, module, family.read_micro_batch().batch)["loss"].backward()  # type: ignore[no-untyped-call]
        without = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        typed = f" with {' '.join(options)}" if options else ""
        _expect(not without, f"{without[:3]} get no gradient{typed}: ranks would wait for them forever.")


def check_perfect_rows(family: Family) -> None:
    """Check that a perfect prediction gets perfect metrics, the deciding one among them."""
    module = family.build()
    rows, expected = family.import_tests().perfect_rows(family.data.columns, family.splits["val"])
    metrics, _ = check_scores(module.score, module.score(rows))
    wrong = [name for name, value in expected.items() if not np.isclose(metrics.get(name, np.nan), value, atol=1e-9)]
    _expect(not wrong, f"perfect_rows expects {_show(expected, wrong)}, and score returns {_show(metrics, wrong)}.")
    _expect(module.monitor[0] in metrics, f"monitor is {module.monitor[0]}, and score returns {', '.join(metrics)}.")
    for draw in (module.report_figures, module.sample_figures):
        for title, png in draw(rows).items():
            _expect(title and png.startswith(b"\x89PNG"), f"{draw.__name__}: '{title}' is no PNG.")


def _show(metrics: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {metrics.get(name, 'nothing')}" for name in names)


def check_listings(family: Family) -> None:
    """Check that `evaluate` lists labelled files as packing does, and that `predict` lists files."""
    pack, data = family.import_part("pack"), family.data
    if hasattr(pack, "list_labelled"):
        listed, artifacts = pack.list_labelled(family.raw, family.config, data.artifacts)
        samples = list(listed)
        samples[0].load()  # unlike those of samples(), these know the artifacts
        keys = [sample.key for sample in samples]
        _expect(keys == data.read_keys(np.arange(data.count)), "list_labelled yields other samples than samples().")
        _expect(artifacts == data.artifacts, "list_labelled returns other artifacts than the run's.")
    if hasattr(pack, "unlabelled"):
        files = list(pack.unlabelled(family.raw, family.config, data.artifacts))
        files[0].load()
        _expect(len(files) > 10, f"unlabelled yields {len(files)} samples of the {data.count} that were generated.")


def check_resume(family: Family) -> None:
    """Check that a run that is stopped and resumed ends as one that is not, bit by bit."""
    family.data  # noqa: B018  packs it once
    context = get_context("spawn")  # not a fork: this process has computed
    answer: SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=_compare_runs, args=(family.jobs_dir, family.scratch, family.family, answer))
    process.start()
    process.join()
    _expect(process.exitcode == 0, f"the check ended with exit code {process.exitcode}.")
    failure = answer.get()
    _expect(not failure, failure)


def _compare_runs(jobs_dir: Path, scratch: Path, family: str, answer: "SimpleQueue[str]") -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # for what three runs log
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    try:
        compare_runs(f"{family}_smoke", [f"data.cache={scratch / 'data'}"], jobs_dir, scratch / "runs")
    except (RunsDiffer, UserError) as error:
        answer.put(str(error))
    else:
        answer.put("")


CHECKS: Mapping[str, Callable[[Family], None]] = {
    "packed data read back equal": check_packing,
    "sets share no sample": check_splits,
    "forward and predict return what training reads": check_returns,
    "the loss falls on one batch": check_loss,
    "every parameter gets a gradient": check_gradients,
    "a perfect prediction gets perfect metrics": check_perfect_rows,
    "labelled and unlabelled files are listed": check_listings,
    "a stopped run resumes bitwise equal": check_resume,
    "the usual files are there": check_files,
    "every preset composes, and every option is explained": check_presets,
}
"""Checks that training relies on, and then of a family's form."""

_FORM = (check_files, check_presets)
_NEEDED = (check_packing, check_splits)
"""Without these, those after them fail for the same reason, but for `_FORM`."""
