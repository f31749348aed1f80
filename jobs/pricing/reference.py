"""The seed project's data loading, as a baseline: tokenises each item on every access and pads to one length."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.settings import DataSettings, TrainConfig

from . import catalog


class PerItemDataset(Dataset[dict[str, Any]]):
    """A torch data set that tokenises an item on every access."""

    def __init__(
        self, texts: Sequence[str], numbers: np.ndarray, prices: np.ndarray, *, tokenizer_json: str, max_tokens: int
    ) -> None:
        self.texts, self.numbers, self.prices, self.max_tokens = texts, numbers, prices, max_tokens
        self.tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer.from_str(tokenizer_json), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Tokenise and return one row."""
        encoded = self.tokenizer(
            self.texts[index], max_length=self.max_tokens, padding="max_length", truncation=True, return_tensors="pt"
        )
        return {
            "input_ids": encoded["input_ids"][0],
            "attention_mask": encoded["attention_mask"][0],
            "numbers": torch.from_numpy(self.numbers[index]),
            "price": torch.tensor(self.prices[index]),
        }


def build_loader(data: ShardSet, settings: DataSettings) -> Loader:
    """Build our loader on the CPU, with one thread."""
    return Loader.from_config(TrainConfig(data=settings), data, device=torch.device("cpu"), decode="cpu")


def copy_head(path: Path, out: Path, columns: catalog.Columns, *, rows: int) -> Path:
    """Copy the header and the first `rows` rows of a catalogue, separated by commas."""
    head = [row for _, row in itertools.islice(catalog.read_rows(path, columns), rows)]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(head[0]) if head else [])
        writer.writeheader()
        writer.writerows(head)
    return out
