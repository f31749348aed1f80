"""The tokenizer, trained or from a file."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.cases.pricing import VALID_ROWS, make_config
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError

from . import parsing, tokenizer
from .pack import fit_artifacts


def test_the_tokenizer_has_the_special_ids_and_is_the_same_in_every_process(tmp_path: Path) -> None:
    texts = [parsing.build_document(parsing.parse(row[1])) for row in VALID_ROWS] + ["caf\u00e9 \u2603 100 g"]
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/src']; from jobs.pricing import tokenizer;"
        "print(tokenizer.train_unigram(eval(sys.stdin.read()), size=120).to_str())"
    )
    root = str(Path(__file__).resolve().parents[2])
    found = {
        subprocess.run(
            [sys.executable, "-c", code, root], input=repr(texts), capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
    trained = Tokenizer.from_str(found.pop())
    assert [trained.id_to_token(i) for i in range(5)] == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    ids = trained.encode("aaa b ; 10 oz").ids
    assert (ids[0], ids[-1]) == (tokenizer.CLS, tokenizer.SEP) and tokenizer.UNK not in ids
    assert tokenizer.UNK in trained.encode("\u4e2d").ids


def test_a_trained_tokenizer_gives_frequent_words_their_own_piece_and_respects_its_size() -> None:
    texts = ["organic chocolate bar"] * 50 + [f"rare{i} thing" for i in range(300)]
    trained = tokenizer.train_unigram(texts, size=80)
    assert trained.get_vocab_size() <= 80
    assert trained.encode("organic chocolate").tokens == ["[CLS]", "\u2581organic", "\u2581chocolate", "[SEP]"]


def test_a_truncated_text_still_ends_with_its_separator(data: ShardSet) -> None:
    ids = tokenizer.encode(data.artifacts["tokenizer"], "olive oil " * 100, max_tokens=20)
    assert len(ids) == 20 and ids[0] == tokenizer.CLS and ids[-1] == tokenizer.SEP and ids.dtype == np.int32


def test_a_tokenizer_from_a_file_is_used_and_an_unsuitable_one_is_refused(
    data: ShardSet, catalogue_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(data.artifacts["tokenizer"])
    assert (
        fit_artifacts(catalogue_folder, make_config(tokenizer=str(tmp_path)))["tokenizer"]
        == data.artifacts["tokenizer"]
    )
    with pytest.raises(UserError, match=r"nowhere: no such file, or a folder without tokenizer.json and spm.model"):
        fit_artifacts(catalogue_folder, make_config(tokenizer=str(tmp_path / "nowhere")))
    (tmp_path / "odd.json").write_text(Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)).to_str())
    with pytest.raises(UserError, match=r"have the ids \[None, None, None\]; expected all three"):
        fit_artifacts(catalogue_folder, make_config(tokenizer=str(tmp_path / "odd.json")))
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(UserError, match="not a file of the tokenizers package"):
        fit_artifacts(catalogue_folder, make_config(tokenizer=str(tmp_path / "no.json")))
