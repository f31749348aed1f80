"""Cuts a text into windows of characters, and fits the list of characters on the training part."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from trainyard.data.raw import list_named
from trainyard.data.shards import Loaded, Sample
from trainyard.errors import UserError

from .config import Config

TAKES_FILE = True
WORDS = "the a small old green train engine wagon waits leaves carries pulls coal mail people and at from yard station"


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return the characters of the training part, sorted, as JSON; token 0 is any other character."""
    windows = list(_cut(raw, config))
    seen = {character for window in windows[: _count_training(windows, config)] for character in window}
    return {"characters": json.dumps(sorted(seen))}


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield each window of the text. Record: `tokens` (context + 1,) int64. Column: `set` (text)."""
    windows = list(_cut(raw, config))
    training = _count_training(windows, config)
    for i, window in enumerate(windows):
        yield Sample(f"{i:08d}", partial(load, window), {"set": "train" if i < training else "val"})


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield each window of another text."""
    for i, window in enumerate(_cut(raw, config)):
        yield Sample(f"{i:08d}", partial(load, window, artifacts))


def load(window: str, artifacts: Mapping[str, str]) -> Loaded:
    """Turn characters into tokens."""
    tokens = {character: i for i, character in enumerate(json.loads(artifacts["characters"]), start=1)}
    return {"tokens": np.array([tokens.get(character, 0) for character in window], dtype=np.int64)}


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Write a text of random sentences, 100 characters for each sample."""
    rng, words, text = np.random.default_rng(seed), WORDS.split(), ""
    while len(text) < 100 * count:
        text += " ".join(rng.choice(words, rng.integers(4, 10))).capitalize() + ".\n"
    raw.mkdir(exist_ok=True)
    (raw / "text.txt").write_text(text)


def _cut(raw: Path, config: Config) -> Iterator[str]:
    """Yield windows of context + 1 characters: each predicts the next, so a window begins with the last one's end."""
    text = "".join(path.read_text() for _, path in list_named(raw, {".txt"}))
    context = config.packing.context
    if len(text) <= 2 * context:
        raise UserError(f"{raw}: {len(text)} characters of .txt files; expected more than 2 packing.context={context}.")
    for begin in range(0, len(text) - context, context):
        yield text[begin : begin + context + 1]


def _count_training(windows: list[str], config: Config) -> int:
    return len(windows) - max(1, round(config.packing.val_share * len(windows)))
