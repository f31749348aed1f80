"""The tokenizer: a Unigram model trained on the training texts, or one from a file. Never downloaded."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from trainyard.errors import UserError
from trainyard.files import load_json, read_file

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
"""Ids 0 to 4. A tokenizer from a file must have the first three by these names, with [PAD] at 0."""

PAD, CLS, SEP, UNK = range(4)

_SENTENCEPIECE = "spm.model"
_MOST_BYTES = 64 * 2**20  # of a spm.model; DeBERTa-v3's has 2.4 MB
_MAX_PIECE = 12  # characters
_SEED_FACTOR = 4  # candidates per requested piece
_KEEP = 0.7  # share of the candidates that survives a round of pruning
_MAX_WORDS = 40_000  # distinct words to train on; the rest are too rare to earn a piece


def train_unigram(texts: Iterable[str], *, size: int) -> Tokenizer:
    """Train a Unigram tokenizer (Kudo 2018, arXiv:1804.10959, section 3.2) of at most `size` pieces.

    The trainer of the `tokenizers` package is not deterministic (its hash maps are seeded at random), but a packed
    data set must be a function of its input. This simpler trainer is deterministic: candidates are frequent substrings
    of words, expectation-maximisation estimates their probabilities, and each round prunes those with the lowest
    expected count. Single characters stay. A small corpus may yield fewer pieces than requested.

    Costs 8 s of one core for 4,000 texts of 150 words and 8,000 pieces, 0.2 s for 3,000 texts of 25 words: the number
    of distinct words decides.
    """
    empty = _build_tokenizer([(piece, 0.0) for piece in SPECIAL])
    words = _count_words(texts, empty)
    pieces = _select_candidates(words, size * _SEED_FACTOR)
    goal = size - len(SPECIAL)
    while True:
        for _ in range(2):
            expected = _count_expected(words, pieces)
            pieces = _update_log_probabilities(expected, pieces)
        if len(pieces) <= goal:
            break
        characters = {piece for piece in pieces if len(piece) == 1}
        ranked = sorted(set(pieces) - characters, key=lambda piece: (-expected.get(piece, 0.0), piece))
        keep = max(goal - len(characters), min(len(ranked) - 1, int(len(ranked) * _KEEP)))
        pieces = {piece: pieces[piece] for piece in sorted(characters) + ranked[: max(0, keep)]}
        if len(characters) >= goal:
            break
    ranked = sorted(pieces, key=lambda piece: (-round(pieces[piece], 6), piece))
    return _build_tokenizer(
        [(piece, 0.0) for piece in SPECIAL] + [(piece, round(pieces[piece], 6)) for piece in ranked]
    )


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json or a spm.model, given by its path or by the folder that has one of them.

    Raises:
        UserError: the file is missing, cannot be read, or lacks the special tokens.
    """
    candidates = [path / name for name in ("tokenizer.json", _SENTENCEPIECE)] if path.is_dir() else [path]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(
            f"packing.tokenizer={path}: no such file, or a folder without tokenizer.json and {_SENTENCEPIECE}. "
            "Copy one of them from the encoder's checkpoint, or leave it empty to train one."
        )
    tokenizer = _read_sentencepiece(file) if file.suffix == ".model" else _read_json(file)
    ids = [tokenizer.token_to_id(piece) for piece in SPECIAL[:3]]
    if None in ids or ids[0] != PAD:
        raise UserError(
            f"packing.tokenizer={path}: [PAD], [CLS], [SEP] have the ids {ids}; expected all three, with [PAD] at 0."
        )
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"packing.tokenizer={file}: not a file of the tokenizers package ({error}).") from None


def _read_sentencepiece(file: Path) -> Tokenizer:
    """Return the tokenizer of a spm.model as transformers builds it for DeBERTa-v2 and -v3.

    `do_lower_case` and `split_by_punct` come from a tokenizer_config.json next to the file.
    """
    from transformers.convert_slow_tokenizer import DebertaV2Converter

    convert: Any = DebertaV2Converter
    try:
        read_file(file, most_bytes=_MOST_BYTES)
        settings = file.with_name("tokenizer_config.json")
        config = load_json(settings, most_bytes=2**20) if settings.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError(f"{settings.name} is not a JSON object")
        options = SimpleNamespace(vocab_file=str(file), add_prefix_space=True, legacy=True)
        options.do_lower_case = bool(config.get("do_lower_case"))
        options.split_by_punct = bool(config.get("split_by_punct"))
        converter = convert(options)
        if (kind := converter.proto.trainer_spec.model_type) != 1:
            raise ValueError(f"its model_type is {kind}, expected 1 (unigram)")
        options.convert_tokens_to_ids = {entry.piece: i for i, entry in enumerate(converter.proto.pieces)}.get
        tokenizer: Tokenizer = converter.converted()
    except Exception as error:  # protobuf and tokenizers raise any exception
        raise UserError(f"{file}: not a SentencePiece model of DeBERTa-v2 or -v3: {error}.") from None
    tokenizer.add_tokens([AddedToken("[MASK]", normalized=False, special=True)])
    return tokenizer


@lru_cache(maxsize=4)
def parse(text: str) -> Tokenizer:
    """Return the tokenizer from its JSON text; cached, because parsing takes tens of milliseconds."""
    return Tokenizer.from_str(text)


def encode(tokenizer_json: str, document: str, *, max_tokens: int) -> np.ndarray:
    """Return (L,) int32 ids, L <= `max_tokens`, from [CLS] to [SEP]."""
    ids = parse(tokenizer_json).encode(document).ids
    return np.array(ids if len(ids) <= max_tokens else ids[: max_tokens - 1] + ids[-1:], dtype=np.int32)


def _build_tokenizer(vocabulary: list[tuple[str, float]]) -> Tokenizer:
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


def _count_words(texts: Iterable[str], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    count: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        count.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return sorted(count.items(), key=lambda entry: (-entry[1], entry[0]))[:_MAX_WORDS]


def _select_candidates(words: list[tuple[str, int]], limit: int) -> dict[str, float]:
    """Return the initial log probabilities of every character and of the substrings that cover most text."""
    characters: Counter[str] = Counter()
    longer: Counter[str] = Counter()
    for word, count in words:
        for i, j in itertools.combinations(range(len(word) + 1), 2):
            if j - i == 1:
                characters[word[i:j]] += count
            elif j - i <= _MAX_PIECE or j - i == len(word):
                longer[word[i:j]] += count
    ranked = sorted(
        (piece for piece, count in longer.items() if count > 1), key=lambda piece: (-longer[piece] * len(piece), piece)
    )
    coverage = {
        **{c: float(characters[c]) for c in sorted(characters)},
        **{p: longer[p] * len(p) for p in ranked[:limit]},
    }
    total = sum(coverage.values())
    return {piece: math.log(score / total) for piece, score in coverage.items()}


def _count_expected(words: list[tuple[str, int]], pieces: dict[str, float]) -> dict[str, float]:
    """Return the expected count of each piece over all segmentations of all words (forward-backward algorithm)."""
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
        if forward[n] <= 0.0:  # a very long word of rare characters underflows
            continue
        scale = count / forward[n]
        for i, j, p in arcs:
            share = forward[i] * p * backward[j] * scale
            if share > 0.0:
                piece = word[i:j]
                expected[piece] = expected.get(piece, 0.0) + share
    return expected


def _update_log_probabilities(expected: dict[str, float], pieces: dict[str, float]) -> dict[str, float]:
    """Return log probabilities from expected counts; drop pieces below 0.5, but keep characters at 0.5."""
    counts = {
        piece: max(expected.get(piece, 0.0), 0.5)
        for piece in pieces
        if len(piece) == 1 or expected.get(piece, 0.0) >= 0.5
    }
    total = sum(counts.values())
    return {piece: math.log(count / total) for piece, count in counts.items()}
