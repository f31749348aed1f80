"""DeBERTa-v3's tokenizer from spm.model."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import UserError

from . import tokenizer

TEXTS = ["organic dark  chocolate, 12 oz", " Caf\u00e9 \ufb01ne ", "organic oil\t5kg", "\u4e2d", "chocolate! bar 3.5"]


def build_model() -> Any:
    """Return a small unigram model, in the protobuf classes that transformers finds in this environment."""
    proto = import_module("transformers.convert_slow_tokenizer").import_protobuf().ModelProto()
    special = [("[PAD]", 3), ("[CLS]", 3), ("[SEP]", 3), ("[UNK]", 2)]
    words = ["organic", "dark", "chocolate", "oil", "oz", "bar", "kg", "fine", "caf"]
    letters = "abcdefghijklmnopqrstuvwxyzC0123456789,.!\u00e9"
    for piece, kind in special:
        proto.pieces.add(piece=piece, score=0.0, type=kind)
    for number, piece in enumerate(["\u2581", *(f"\u2581{word}" for word in words), *words, *letters]):
        proto.pieces.add(piece=piece, score=-2.5 - number / 10)
    proto.pieces.add(piece="3.5", score=0.0, type=4)
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.unk_id = 3
    return proto


@pytest.mark.parametrize("lower", [False, True])
def test_a_tokenizer_config_says_whether_text_becomes_lower_case(tmp_path: Path, lower: bool) -> None:
    proto = build_model()
    (tmp_path / "spm.model").write_bytes(proto.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text(f'{{"do_lower_case": {str(lower).lower()}, "vocab_type": "spm"}}')
    found = tokenizer.load(tmp_path)
    assert found.encode("organic  oil ").tokens == ["[CLS]", "\u2581organic", "\u2581oil", "[SEP]"]
    assert (found.encode("Organic").tokens == ["[CLS]", "\u2581organic", "[SEP]"]) == lower
    assert found.encode("bar 3.5").tokens == ["[CLS]", "\u2581bar", "3.5", "[SEP]"]
    assert [found.token_to_id(piece) for piece in tokenizer.SPECIAL[:4]] == [0, 1, 2, 3]
    assert found.token_to_id("[MASK]") == len(proto.pieces)
    assert tokenizer.load(tmp_path / "spm.model").encode(TEXTS[0]).ids == found.encode(TEXTS[0]).ids


@pytest.mark.slow
def test_a_container_image_without_sentencepiece_reads_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(build_model().SerializeToString())
    code = (
        "import sys; sys.modules['sentencepiece'] = None; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/src'];"
        "from pathlib import Path; from jobs.pricing import tokenizer;"
        "print(tokenizer.load(Path(sys.argv[2])).to_str())"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[2]), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tokenizer.load(tmp_path).to_str()


def test_the_pieces_are_those_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    words = ["organic", "dark", "chocolate", "caf\u00e9", "\ufb01ne", "12", "oz", "bars", "of", "5kg"]
    corpus = [" ".join(words[(i * step) % len(words)] for i in range(7)) for step in (1, 2, 3, 7) for _ in range(30)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_prefix=str(tmp_path / "spm"), vocab_size=60, pad_id=0, bos_id=1, eos_id=2,
        unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", hard_vocab_limit=False,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    found = tokenizer.load(tmp_path)
    for text in [*TEXTS[:3], *corpus[::30], "\ufb01ne   caf\u00e9"]:
        ids = found.encode(text).ids
        assert (ids[0], ids[-1]) == (tokenizer.CLS, tokenizer.SEP)
        assert ids[1:-1] == processor.encode(text.replace("\t", " ")), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "not a SentencePiece model"),
        (lambda data: b"\xff" * 40, "not a SentencePiece model"),
        (lambda data: b"{}", "not a SentencePiece model"),
        (lambda data: b"", "not a SentencePiece model.*vocabulary is empty"),
        (lambda data: data + b"\x12\x02\x18\x02", r"its model_type is 2, expected 1 \(unigram\)"),
        (lambda data: data.replace(b"[CLS]", b"[XXX]"), "not a SentencePiece model"),
        (lambda data: data + bytes(2**26), "it is larger than 67108864 bytes"),
        (lambda data: data + b"\x1a\x05\x12\x03abc", "not a SentencePiece model"),
    ],
    ids=["cut off", "noise", "JSON", "empty", "BPE", "no [CLS]", "large", "map"],
)
def test_a_file_that_is_no_such_model_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "spm.model").write_bytes(change(build_model().SerializeToString()))
    with pytest.raises(UserError, match=message):
        tokenizer.load(tmp_path)
