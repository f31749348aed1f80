"""Warm start: a new run begins with the weights of another run or of a file, and reports which of them matched.

Done once, before the first step: checkpoints hold the loaded weights, so a resume needs neither the run nor the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from loguru import logger
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.runs.folder import CONFIG, read_env, update_env
from trainyard.text import find_nearest
from trainyard.train import checkpoint, distributed
from trainyard.train.module import AdaptedWeights
from trainyard.train.run_context import RunContext
from trainyard.train.weights_file import WeightsFile, read_weights

START_FROM, PARTIAL = "start_from", "start_from_partial"

PUBLISHED = ("model.safetensors", "pytorch_model.bin")
"""The weights in the folder of a checkpoint, as transformers saves it."""

_MOST_NAMED = 5
_COUNTER = "num_batches_tracked"
"""Of BatchNorm, which computes nothing from it unless it has no momentum; older files lack it."""


@dataclass(frozen=True)
class Match:
    """Matched and unmatched names of a module and a file, sorted."""

    loaded: list[str]  # the module's
    new: list[str]  # the module's: they keep their initial values
    not_used: list[str]  # the file's

    def describe(self, layout: str) -> str:
        """Describe the match in one sentence."""
        parts = [f"{len(self.loaded)} of {len(self.loaded) + len(self.new)} tensors loaded"]
        parts[0] += f" (names of {layout})" if layout else ""
        for names, what in ((self.new, "keep their initial values"), (self.not_used, "of the file are not used")):
            if names:
                parts.append(f"{len(names)} {what}: {_list_names(names)}")
        return "; ".join(parts)


def start_from_weights(context: RunContext) -> None:
    """Load the weights that the run begins with into its module, which is on the CPU; record and log what matched.

    Every rank loads the file that rank 0 chose. A run that was killed before its first checkpoint loads them again,
    and refuses other ones.

    Raises:
        UserError: the run or file does not exist, is damaged, does not fit, or changed since the run began.
    """
    config, module = context.config, context.module
    option, source = _choose_source(config.start_from, module.start_file)
    if not source:
        _warn_if_from_scratch(context)
        return
    weights = _read_chosen(context.run, source, option) if context.world.is_main else None
    path, sha256 = distributed.broadcast_from_rank0(None if weights is None else (weights.path, weights.sha256))
    if weights is None:
        weights = read_weights(path, option=option)
    if weights.sha256 != sha256:
        raise UserError(f"{option}: {path}: rank {context.world.rank} reads other contents than rank 0.")
    adapted = module.adapt_weights(weights.tensors)
    match = load_weights(module, adapted, source=f"{option}: {path}", partial=config.start_from_partial)
    if context.world.is_main:
        _record(context.run, option, weights, match, adapted.layout)


def load_weights(module: nn.Module, adapted: AdaptedWeights, *, source: str, partial: Sequence[str] = ()) -> Match:
    """Load weights into a module: all of them, or those that `partial` names.

    Args:
        source: where they come from, for errors.
        partial: patterns of the module's names, such as "network.backbone.*"; each must match some, and all that match
            must be there and fit. Empty: everything must, on both sides, but what `adapted` exempts.

    Raises:
        UserError: it does not fit; names the tensors, and the option to type.
    """
    expected = {name: value for name, value in module.state_dict().items() if _COUNTER not in name}
    tensors = {name: value for name, value in adapted.tensors.items() if _COUNTER not in name}
    _check_patterns(partial, expected)
    if partial:
        wanted = [name for name in expected if _matches(name, partial)]
    else:
        wanted = [name for name in expected if not _matches(name, adapted.new)]
    hint = f" {adapted.hint}" if adapted.hint else ""
    option = f"To load only a part: {PARTIAL}=[{_suggest_patterns(wanted, expected, tensors)}]"
    misfits = [name for name in wanted if name in tensors and tensors[name].shape != expected[name].shape]
    if misfits:
        shapes = "".join(
            f"\n  '{name}' is {tuple(tensors[name].shape)}, but the model expects {tuple(expected[name].shape)}"
            for name in misfits[:_MOST_NAMED]
        )
        raise UserError(f"{source}: {len(misfits)} tensors have other shapes:{shapes}\n{hint.strip()} {option}".strip())
    missing = [name for name in wanted if name not in tensors]
    if missing:
        near = ", ".join(find_nearest(missing[0], tensors, most=3, similarity=0.0)) or "nothing"
        raise UserError(
            f"{source}: it contains no '{missing[0]}'; nearest: {near}. {len(missing)} of {len(wanted)} tensors are "
            f"missing.{hint} {option}"
        )
    unknown = sorted(name for name in tensors if name not in expected and not _matches(name, adapted.unused))
    if unknown and not partial:
        raise UserError(
            f"{source}: {len(unknown)} of its tensors have no place in this model, so it is of another one: "
            f"{_list_names(unknown)}.{hint} {option}"
        )
    module.load_state_dict({name: tensors[name] for name in wanted}, strict=False)
    not_used = sorted(name for name in tensors if name not in wanted)
    return Match(sorted(wanted), sorted(name for name in expected if name not in wanted), not_used)


def _choose_source(start_from: str, start_file: tuple[str, str]) -> tuple[str, str]:
    """Return the option that names the weights, as typed, and the run or file; both "" if there is none."""
    if start_from and start_file[1]:
        raise UserError(
            f"{START_FROM}={start_from} and {start_file[0]} both name weights to start from. Leave one out."
        )
    return (f"{START_FROM}={start_from}", start_from) if start_from else start_file


def find_file(source: str, option: str) -> Path:
    """Return the file of weights: of a run its best checkpoint, of a folder `PUBLISHED`."""
    path = Path(source)
    if not path.is_dir():
        return path
    if (path / CONFIG).is_file():
        return checkpoint.choose_of_run(path).path
    file = next((path / name for name in PUBLISHED if (path / name).is_file()), None)
    if file is None:
        raise UserError(
            f"{option}: {path} is no run, and has no {' and no '.join(PUBLISHED)}. Give a run, a file of weights, or "
            "the folder of a checkpoint."
        )
    return file


def _read_chosen(run: Path, source: str, option: str) -> WeightsFile:
    """Read the weights; of a run that had an earlier attempt the same ones, unless they changed since then."""
    recorded = read_env(run).get("exactness", {}).get(START_FROM)
    weights = read_weights(Path(recorded["path"]) if recorded else find_file(source, option), option=option)
    if recorded and recorded["sha256"] != weights.sha256:
        raise UserError(
            f"{option}: {weights.path} changed since this run began: it had SHA-256 {recorded['sha256'][:12]}.., now "
            f"it has {weights.sha256[:12]}... Restore the file, or start a new run."
        )
    return weights


def _record(run: Path, option: str, weights: WeightsFile, match: Match, layout: str) -> None:
    summary = match.describe(layout)
    logger.info("{:<16} {}: {}", START_FROM, weights.path, summary)
    choice: dict[str, Any] = {"value": str(weights.path), "reason": f"{option}: {summary}", "sha256": weights.sha256}
    choice |= {"loaded": len(match.loaded), "new": match.new, "not_used": match.not_used}
    update_env(run, "choices", {START_FROM: choice})
    update_env(run, "exactness", {START_FROM: {"path": str(weights.path), "sha256": weights.sha256}})


def _warn_if_from_scratch(context: RunContext) -> None:
    config = context.config
    if config.expects_weights and context.world.is_main:
        logger.warning(
            "{} starts from random weights, but its learning rates are for {}. Start from weights, {}=FILE or a run; "
            "or choose learning rates for random ones, and leave this out: expects_weights=",
            config.job,
            config.expects_weights,
            START_FROM,
        )
        reason = f"no weights to start from, but the learning rates are for {config.expects_weights}"
        update_env(context.run, "choices", {START_FROM: {"value": "random weights", "reason": reason}})


def _check_patterns(patterns: Sequence[str], names: Mapping[str, Tensor]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(find_nearest(pattern.rstrip(".*"), names, most=3, similarity=0.0))
            raise UserError(f"{PARTIAL}: no tensor of this model is called '{pattern}'; nearest: {near}.")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _suggest_patterns(wanted: Sequence[str], expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Return patterns of the parts in which everything fits; a placeholder if there is none."""
    fits = {name for name in wanted if name in tensors and tensors[name].shape == expected[name].shape}
    parts = {_name_part(name) for name in fits} - {_name_part(name) for name in wanted if name not in fits}
    return ",".join(sorted(parts)) or "PATTERN"


def _name_part(name: str) -> str:
    """'network.blocks.0.norm1.bias' -> 'network.blocks.*'."""
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1], *(["*"] if len(rest) > 1 else [])])


def _list_names(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
