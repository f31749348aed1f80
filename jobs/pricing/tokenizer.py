"""The tokenizer: a Unigram model learned from the training texts, or one from a file. Never from the network."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from trainyard.errors import UserError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
"""Ids 0 to 4. A tokenizer from a file needs the first three under these names, and [PAD] at 0."""

PAD, CLS, SEP, UNK = range(4)

_PIECE_MAX = 12  # characters
_SEED_FACTOR = 4  # candidates over pieces asked for
_KEEP = 0.7  # of the candidates, per round of pruning
_WORDS_MAX = 40_000  # distinct words that teach; the rest are too rare to earn a piece


def learn(texts: Iterable[str], *, size: int) -> Tokenizer:
    """Learn a Unigram tokenizer (Kudo 2018, arXiv:1804.10959, section 3.2) of at most `size` pieces.

    The trainer of the `tokenizers` package gives another model each time (its hash maps are seeded at random), and a
    packed data set must be a function of its input; so this is one of our own, and simpler: candidates are frequent
    substrings of words, probabilities come from expectation-maximisation, and of the candidates those with the least
    expected count go, a share at a time. Characters stay. A small corpus may yield fewer pieces than asked for.

    Costs 8 s of one core for 4,000 texts of 150 words and 8,000 pieces, 0.2 s for 3,000 of 25 words: what counts is
    the number of distinct words.
    """
    blank = _assembled([(piece, 0.0) for piece in SPECIAL])
    words = _words(texts, blank)
    pieces = _candidates(words, size * _SEED_FACTOR)
    goal = size - len(SPECIAL)
    while True:
        for _ in range(2):
            expected = _expected(words, pieces)
            pieces = _probabilities(expected, pieces)
        if len(pieces) <= goal:
            break
        characters = {piece for piece in pieces if len(piece) == 1}
        ranked = sorted(set(pieces) - characters, key=lambda piece: (-expected.get(piece, 0.0), piece))
        keep = max(goal - len(characters), min(len(ranked) - 1, int(len(ranked) * _KEEP)))
        pieces = {piece: pieces[piece] for piece in sorted(characters) + ranked[: max(0, keep)]}
        if len(characters) >= goal:
            break
    ranked = sorted(pieces, key=lambda piece: (-round(pieces[piece], 6), piece))
    return _assembled([(piece, 0.0) for piece in SPECIAL] + [(piece, round(pieces[piece], 6)) for piece in ranked])


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or that of a folder.

    Raises:
        UserError: there is none, it cannot be read, or it lacks what the encoder needs.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"packing.tokenizer={path}: no {file.name} there. Where only spm.model is, convert it once: python -c "
            f"\"from transformers import DebertaV2TokenizerFast as T; T.from_pretrained('{path}').save_pretrained("
            f"'{path}')\""
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"packing.tokenizer={path}: not a tokenizer of the tokenizers package ({error}).") from None
    found = [tokenizer.token_to_id(piece) for piece in SPECIAL[:3]]
    if None in found or found[0] != PAD:
        raise UserError(
            f"packing.tokenizer={path}: [PAD], [CLS], [SEP] have the ids {found}; expected all three, [PAD] at 0."
        )
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4)
def from_text(text: str) -> Tokenizer:
    """Return the tokenizer of its JSON text; kept, for reading it takes tens of milliseconds."""
    return Tokenizer.from_str(text)


def encode(tokenizer_text: str, document: str, *, max_tokens: int) -> np.ndarray:
    """Return (L,) int32 ids, [CLS] first and [SEP] last, L at most `max_tokens`."""
    ids = from_text(tokenizer_text).encode(document).ids
    return np.array(shortened(ids, max_tokens), dtype=np.int32)


def shortened(ids: list[int], max_tokens: int) -> list[int]:
    """Cut ids that end with [SEP] down to `max_tokens`, keeping that end."""
    return ids if len(ids) <= max_tokens else ids[: max_tokens - 1] + ids[-1:]


def _assembled(vocabulary: list[tuple[str, float]]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=UNK, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(),
            pre_tokenizers.Metaspace(),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _words(texts: Iterable[str], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    count: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        count.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return sorted(count.items(), key=lambda entry: (-entry[1], entry[0]))[:_WORDS_MAX]


def _candidates(words: list[tuple[str, int]], limit: int) -> dict[str, float]:
    """Return the log probabilities to start from: of every character, and of the substrings that cover the most."""
    characters: Counter[str] = Counter()
    longer: Counter[str] = Counter()
    for word, count in words:
        for i, j in itertools.combinations(range(len(word) + 1), 2):
            if j - i == 1:
                characters[word[i:j]] += count
            elif j - i <= _PIECE_MAX or j - i == len(word):
                longer[word[i:j]] += count
    covering = sorted(
        (piece for piece, count in longer.items() if count > 1), key=lambda piece: (-longer[piece] * len(piece), piece)
    )
    chosen = {
        **{c: float(characters[c]) for c in sorted(characters)},
        **{p: longer[p] * len(p) for p in covering[:limit]},
    }
    total = sum(chosen.values())
    return {piece: math.log(score / total) for piece, score in chosen.items()}


def _expected(words: list[tuple[str, int]], pieces: dict[str, float]) -> dict[str, float]:
    """Return how often each piece is expected, over all segmentations of all words: the forward-backward algorithm."""
    probability = {piece: math.exp(score) for piece, score in pieces.items()}
    longest = max(map(len, pieces))
    expected: dict[str, float] = {}
    for word, count in words:
        n = len(word)
        arcs = [
            (i, j, p)
            for i in range(n)
            for j in range(i + 1, min(n, i + longest) + 1)
            if (p := probability.get(word[i:j])) is not None
        ]
        forward, backward = [0.0] * (n + 1), [0.0] * (n + 1)
        forward[0] = backward[n] = 1.0
        for i, j, p in arcs:
            forward[j] += forward[i] * p
        for i, j, p in reversed(arcs):
            backward[i] += backward[j] * p
        if forward[n] <= 0.0:  # a very long word of rare characters: too small for a float
            continue
        scale = count / forward[n]
        for i, j, p in arcs:
            share = forward[i] * p * backward[j] * scale
            if share > 0.0:
                piece = word[i:j]
                expected[piece] = expected.get(piece, 0.0) + share
    return expected


def _probabilities(expected: dict[str, float], pieces: dict[str, float]) -> dict[str, float]:
    """Return log probabilities by expected count; characters stay at half a count, others below that go."""
    counts = {
        piece: max(expected.get(piece, 0.0), 0.5)
        for piece in pieces
        if len(piece) == 1 or expected.get(piece, 0.0) >= 0.5
    }
    total = sum(counts.values())
    return {piece: math.log(count / total) for piece, count in counts.items()}
