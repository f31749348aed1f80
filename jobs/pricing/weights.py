"""Adapts the weights of a DeBERTa-v3 encoder, or of a run on other data, to the names of our model."""

import json
from collections.abc import Mapping

from torch import Tensor

from trainyard.errors import UserError
from trainyard.train.module import AdaptedWeights

from .features import Features
from .pack import FEATURES, TOKENIZER

PREFIX, OURS = "deberta.", "network.encoder."
HINT = "Expected a DeBERTa-v3 checkpoint with the names of transformers, and the sizes of its config.json."

ARTIFACTS_BUFFER = "artefact"  # the name in checkpoints
TEXT_HEAD = "network.token_"  # begins names that only a run of objective=text has


def adapt_encoder(tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return the weights of an encoder by our names; the heads it was trained with are left out."""
    heads = tuple(OURS + name for name in tensors if not name.startswith(PREFIX))
    if len(heads) == len(tensors):
        heads = ()  # of the encoder alone: no name has the prefix
    named = {OURS + name.removeprefix(PREFIX): value for name, value in tensors.items()}
    return AdaptedWeights(
        named, "transformers' DeBERTa-v3", unused=(*heads, f"{OURS}embeddings.position_ids"), hint=HINT
    )


def adapt_run(tensors: Mapping[str, Tensor], artifacts: Mapping[str, str]) -> AdaptedWeights:
    """Return the weights of a run of this family, without those that mean something else with these artifacts.

    Word embeddings belong to a tokenizer, and the number branch to the names of the numbers. Statistics of prices and
    numbers may differ: they are this run's own.

    Raises:
        UserError: the file does not describe its tokenizer and its numbers.
    """
    named, hint = dict(tensors), ""
    try:
        theirs = read_artifacts(tensors)
        numbers, tokenizer = Features.from_json(theirs[FEATURES]).names, theirs[TOKENIZER]
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"These weights lack the tokenizer of their run, or it is damaged ({error}).") from None
    if tokenizer != artifacts[TOKENIZER]:
        named.pop(f"{OURS}embeddings.word_embeddings.weight", None)
        hint += "Its tokenizer is another one, so its word embeddings are of other pieces: pack with the same one. "
    if numbers != Features.from_json(artifacts[FEATURES]).names:
        named = {name: value for name, value in named.items() if not name.startswith("network.number_branch.")}
        hint += "Its numbers are others (packing.numeric_columns), so its number branch does not fit. "
    kept = (ARTIFACTS_BUFFER,)
    return AdaptedWeights(named, new=kept, unused=kept, hint=hint.strip())


def read_artifacts(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the artifacts in the state of a trained module: with the config, all that `build` needs."""
    artifacts: dict[str, str] = json.loads(state[ARTIFACTS_BUFFER].cpu().numpy().tobytes())
    return artifacts
