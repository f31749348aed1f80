"""Reads spm.model, the file of a SentencePiece tokenizer that DeBERTa-v3 comes with, without the sentencepiece package.

The file is one protobuf message (google/sentencepiece, src/sentencepiece_model.proto): pieces with their log
probabilities, and how text is normalised before it is split.
"""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from trainyard.errors import UserError
from trainyard.files import parse_json, read_file

NAME = "spm.model"

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNIGRAM = 3, 1
_CHARSMAP = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MOST_BYTES = 64 * 2**20  # DeBERTa-v3's has 2.4 MB


def read_tokenizer(file: Path) -> Tokenizer:
    """Build the tokenizer of a spm.model, as transformers does for DeBERTa-v2 and -v3.

    Text is stripped, normalised by the map in the file, and runs of spaces become one; each word begins with the space
    mark. `do_lower_case` and `split_by_punct` come from a tokenizer_config.json next to the file.

    Raises:
        UserError: the file is damaged, or of another kind of tokenizer.
    """
    try:
        pieces, charsmap = _read_model(read_file(file, most_bytes=_MOST_BYTES))
        config = _read_config(file.with_name("tokenizer_config.json"))
        normalizer = [normalizers.Precompiled(charsmap)] if charsmap else []
        return _build(pieces, normalizer, **config)
    except Exception as error:  # tokenizers raises bare Exception for a map that it cannot use
        raise UserError(f"{file}: not a SentencePiece model of DeBERTa-v2 or -v3: {error}.") from None


def _read_model(data: bytes) -> tuple[list[tuple[str, float, int]], bytes]:
    """Return the pieces, each with its score and its type, and the map that normalises characters."""
    message = _read_message(data)
    trainer = _read_message(b"".join(message[_TRAINER]))
    kind = trainer[_MODEL_TYPE][-1] if trainer[_MODEL_TYPE] else _UNIGRAM
    if kind != _UNIGRAM:
        raise ValueError(f"its model_type is {kind}, expected {_UNIGRAM} (unigram)")
    pieces = []
    for entry in message[_PIECES]:
        fields = _read_message(entry)
        (score,) = struct.unpack("<f", fields[2][-1]) if fields[2] else (0.0,)
        pieces.append((fields[1][-1].decode(), score, fields[3][-1] if fields[3] else _NORMAL))
    if not any(kind == _UNKNOWN for _, _, kind in pieces):
        raise ValueError(f"it has {len(pieces)} pieces, and none for what is unknown")
    maps = _read_message(b"".join(message[_NORMALIZER]))[_CHARSMAP]
    return pieces, maps[-1] if maps else b""


def _build(
    pieces: list[tuple[str, float, int]], normalizer: list[Any], *, do_lower_case: bool, split_by_punct: bool
) -> Tokenizer:
    unknown = next(number for number, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN)
    tokenizer = Tokenizer(models.Unigram([(piece, score) for piece, score, _ in pieces], unknown, byte_fallback=False))
    added = [
        AddedToken(piece, normalized=False, special=kind == _CONTROL)
        for piece, _, kind in pieces
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([*added, AddedToken("[MASK]", normalized=False, special=True)])
    lower = [normalizers.Lowercase()] if do_lower_case else []
    tokenizer.normalizer = normalizers.Sequence(
        [*lower, normalizers.Strip(), *normalizer, normalizers.Replace(Regex(" {2,}"), " ")]
    )
    split = [pre_tokenizers.Punctuation(behavior="isolated")] if split_by_punct else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.Metaspace(prepend_scheme="always")])
    ends = [(piece, tokenizer.token_to_id(piece)) for piece in ("[CLS]", "[SEP]")]
    if any(number is None for _, number in ends):
        raise ValueError("it has no pieces [CLS] and [SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def _read_config(file: Path) -> dict[str, bool]:
    config = parse_json(read_file(file, most_bytes=2**20)) if file.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{file.name} is {json.dumps(config)[:40]}, not a JSON object")
    return {name: bool(config.get(name, False)) for name in ("do_lower_case", "split_by_punct")}


def _read_message(data: bytes) -> "defaultdict[int, list[Any]]":
    """Return the values of each field of a protobuf message by its number: whole numbers, or bytes."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    for number, value in _iterate_fields(data):
        fields[number].append(value)
    return fields


def _iterate_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field has the wire type {kind}, which no such file has")
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            size, position = _read_varint(data, position)
        if position + size > len(data):
            raise ValueError("it is cut off")
        yield number, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
    raise ValueError("a number in it does not end")
