"""What an error says to type is read as it is meant, whatever the names of columns and folders in it."""

import csv
import json
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.fingerprint.config import Config as FingerprintConfig
from jobs.fingerprint.listing import list_prints
from jobs.pricing import catalog
from jobs.pricing.config import Config as PricingConfig
from jobs.pricing.network import build_encoder
from jobs.pricing.pack import select_columns
from tests.cases.pricing import COLUMNS, VALID_ROWS, write_catalogue
from trainyard.cli import build_whole_parser, main
from trainyard.config.compose import apply_overrides
from trainyard.config.settings import TrainConfig
from trainyard.data.index import find_index
from trainyard.data.prepare import pack_raw
from trainyard.errors import UserError
from trainyard.runs.create import create_run
from trainyard.tables import read_table
from trainyard.templates.table.config import Config as TableConfig
from trainyard.templates.table.pack import fit_artifacts
from trainyard.text import format_override
from trainyard.tools.check_family import check_family
from trainyard.train.checkpoint import choose_of_run

JOBS = Path("jobs").resolve()

NAMES = [
    "Gr\u00f6\u00dfe (cm)",
    "a, b",
    "it's [x]",
    "[x",
    'say "x"',
    '"x"',
    "'x'",
    "a=b",
    "-x --y",
    " x ",
    "1e3",
    "007",
    "null",
    "${seed}",
    "\\${seed}",
    "x\\",
    "$HOME `x` & {y}*",
]
"""Names that a shell, our command line, Hydra or OmegaConf reads otherwise unless they are quoted."""


def type_options(caught: pytest.ExceptionInfo[UserError], config: Any, *, after: str, before: str = "") -> Any:
    """Type the options that an error names between these words, and return the configuration of them."""
    text = str(caught.value).rpartition(after)[2]
    return apply_overrides(config, shlex.split(text.rpartition(before)[0] if before else text))


def type_command(message: str) -> Namespace:
    """Parse the command that a message ends with, as the command line does."""
    words = shlex.split(message.rpartition("trainyard ")[2])
    arguments, rest = build_whole_parser()[0].parse_known_args(words)
    arguments.overrides = getattr(arguments, "overrides", []) + rest
    return arguments


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_read_as_it_was_written(name: str):
    words = [format_override("data.path", name), format_override("tracking.tags", ["y", name, name])]
    config = apply_overrides(TrainConfig(), shlex.split(" ".join(words)))
    assert (config.data.path, config.tracking.tags) == (name, ["y", name, name])


def test_two_lists_with_a_bracket_in_a_text_stay_two_words_on_the_command_line(tmp_path: Path, capsys):
    lists = [format_override("tracking.tags", ["[x"]), format_override("start_from_partial", ["y]"])]
    words = ["run", "pricing_smoke", "--dry", f"--runs={tmp_path}", *shlex.split(" ".join(lists))]
    assert main([*words, "start_from=x"]) == 2
    assert "start_from=x: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_the_columns_that_pricing_proposes_are_read(name: str, tmp_path: Path):
    columns = [f"{name} {kind}" for kind in ("number", "title", "cost", "words", "height", "depth")]
    path = tmp_path / "some.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, ["7", "red", "2", "blue", "3", "4"]])
    key, title, price, words, *numbers = [f"{column}s" for column in columns]
    with pytest.raises(UserError, match=r"Name the right columns: ") as caught:
        catalog.read(path, replace(COLUMNS, key=key, texts=(title, words), price=price, numbers=tuple(numbers)))
    config = type_options(caught, PricingConfig(), after="columns: ")
    (entry,) = catalog.read(path, select_columns(config.packing))
    assert (entry.key, entry.texts, entry.price, entry.numbers) == ("7", ("red", "blue"), 2.0, (3.0, 4.0))


@pytest.mark.parametrize("name", NAMES)
def test_the_column_of_names_that_a_table_proposes_is_taken(name: str, tmp_path: Path):
    name = name.strip()
    with (tmp_path / "some.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [[row or "x", row, row % 3] for row in range(40)]
        csv.writer(file).writerows([[name, "other", "wanted"], *rows])
    config = TableConfig()
    config.packing.id_column, config.packing.target, config.packing.task = "", "wanted", "regress"
    config.packing.categories = ["other"]
    with pytest.raises(UserError, match="these are names: ") as caught:
        fit_artifacts(tmp_path, config)
    config = type_options(caught, config, after="names: ")
    assert config.packing.categories == ["other", name]
    fit_artifacts(tmp_path, config)


@pytest.mark.parametrize("name", NAMES)
def test_the_resolution_of_a_set_that_fingerprint_proposes_is_taken(name: str, tmp_path: Path):
    for folder, dpi in ((name, 1000), ("other", 500)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"0000{dpi}_roll_{dpi}_01.png").touch()
    with pytest.raises(UserError, match="To state that alone, type ") as caught:
        list_prints(tmp_path, FingerprintConfig().packing)
    config = type_options(caught, FingerprintConfig(), after="alone, type ", before=". If the plain")
    assert {one.set: one.dpi for one in list_prints(tmp_path, config.packing).prints} == {name: 1000, "other": 0}


@pytest.mark.parametrize("name", NAMES)
def test_the_folders_that_packing_and_pricing_propose_are_taken(name: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path(name)
    folder.mkdir()
    (folder / "file").touch()
    (folder / "config.json").write_text(json.dumps({"model_type": "deberta-v2", "vocab_size": 8}))
    with pytest.raises(UserError) as caught:
        build_encoder(folder, vocabulary=9, dropout=0.0)
    assert type_options(caught, PricingConfig(), after="tokenizer: ").packing.tokenizer == name
    with pytest.raises(UserError) as caught:
        pack_raw(FingerprintConfig(family="fingerprint"), folder / "file", None, JOBS)
    assert type_options(caught, FingerprintConfig(), after="it is in: ", before=", or make run").data.path == name


@pytest.mark.parametrize("name", ["-" + "".join(NAMES), '"x"'])  # two, because packing takes seconds
def test_the_folder_that_packing_has_written_is_trained_on(name: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_catalogue(tmp_path, VALID_ROWS)
    options = ["--workers=1", f"--jobs={JOBS}", "packing.folds=2", "packing.vocabulary=64"]
    assert main(["pack", "pricing_smoke", ".", f"./{name}", *options]) == 0
    typed = type_command(capsys.readouterr().out.strip().splitlines()[-1])
    config = apply_overrides(PricingConfig(), typed.overrides)
    assert (typed.job, config.data.path) == ("pricing_smoke", name)
    assert find_index(Path(config.data.path)).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_that_an_error_proposes_name_the_same_path(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path(name)

    def read_command(work, *args, **options) -> Namespace:
        with pytest.raises(UserError) as caught:
            work(*args, **options)
        return type_command(str(caught.value))

    assert read_command(find_index, folder).out == folder
    assert Path(read_command(lambda: next(read_table(folder))).out) == folder
    assert read_command(lambda: list(check_family(folder, "birds", tmp_path))).jobs == folder
    run = create_run(folder, PricingConfig(job="pricing", family="pricing"), name="first")
    again = read_command(create_run, folder, PricingConfig(job="pricing", family="pricing"), name="first")
    assert (again.verb, Path(again.run)) == ("resume", run)
    assert Path(read_command(choose_of_run, run).run) == run
