"""Packing a catalogue."""

import csv
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from loguru import logger
from PIL import Image

from tests.cases.pricing import VALID_ROWS, make_batch, make_config, make_module, pack_catalogue, write_catalogue
from trainyard.data.order import bucket_by_length, shuffle
from trainyard.data.pack import PackError, read_listing
from trainyard.data.shards import Ragged, ShardSet

from . import baseline, catalog, metrics, pack, parsing
from .config import Config
from .pack import fit_artifacts, samples, synthesize
from .synthesis import FILE, FLOOR

BAD_ROWS = [
    (["zero", "x", "0"], "line 42: price is '0', expected a number above 0"),
    (["negative", "x", "-3"], "line 43: price is '-3', expected a number above 0"),
    (["word", "x", "cheap"], "line 44: price is 'cheap', expected a number above 0"),
    (["missing", "x", ""], "line 45: price is '', expected a number above 0"),
    (["nan", "x", "nan"], "line 46: price is 'nan', expected a number above 0"),
    (["empty", " \n", "3"], "line 43: catalog_content is empty"),
    (["", "x", "3"], "line 44: no sample_id"),
]
BadPacks = dict[str, tuple[str, ShardSet, int]]


@pytest.fixture(scope="module")
def bad_packs(tmp_path_factory: pytest.TempPathFactory) -> BadPacks:
    """By id of a bad row: the error on packing its catalogue, the data without bad rows, and how many were bad."""
    packs: BadPacks = {}
    for rows in ([row for row, _ in BAD_ROWS[:5]], [row for row, _ in BAD_ROWS[5:]]):  # an error names five rows
        folder = tmp_path_factory.mktemp("bad")
        path = write_catalogue(folder, [*VALID_ROWS, *rows])
        with pytest.raises(PackError) as caught:
            pack_catalogue(path, make_config(), folder / "out")
        skipped = pack_catalogue(path, make_config(), folder / "out", skip_bad=True)
        packs |= {row[0]: (str(caught.value), skipped, len(rows)) for row in rows}
    return packs


@pytest.mark.slow
@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_rows_that_cannot_train_stop_packing_or_are_skipped(row: list[str], message: str, bad_packs: BadPacks) -> None:
    error, skipped, bad_count = bad_packs[row[0]]
    assert f"{row[0] or 'line 44'}: some.csv, {message}" in error and "data.on_error=skip" in error
    assert skipped.count == len(VALID_ROWS) and skipped.skipped == bad_count


def read_log(raw: Path, config: Config) -> list[str]:
    """Return the lines that packing logs about a catalogue."""
    logged: list[str] = []
    sink = logger.add(lambda message: logged.append(message.rstrip("\n")), format="{message}")
    pack.log_reading(raw, config)
    logger.remove(sink)
    return logged


def test_packing_says_which_rows_cannot_train_why_and_where_they_are(tmp_path: Path) -> None:
    rows = [*VALID_ROWS[:3], ["a", "x", "0"], *VALID_ROWS[3:6], ["b", "x", "0.00"], *VALID_ROWS[6:8]]
    path = write_catalogue(tmp_path, [*rows, ["c", "x", "cheap"]])
    config = make_config()
    config.data.on_error = "skip"
    assert read_log(path, config)[-1] == "3 rows left out: 2 price 0 (lines 5, 9), 1 price unreadable (line 12)"
    config.data.on_error = "fail"
    assert read_log(path, config)[-1] == "3 rows cannot train: 2 price 0 (lines 5, 9), 1 price unreadable (line 12)"
    write_catalogue(tmp_path, [*VALID_ROWS, *(row for row, _ in BAD_ROWS)])
    assert read_log(path, config)[-1] == (
        "7 rows cannot train: 2 price unreadable (lines 44, 46), 1 price 0 (line 42), 1 price below 0 (line 43), "
        "1 no price (line 45), 1 no text (line 48), 1 no id (line 49)"
    )
    write_catalogue(tmp_path, [*VALID_ROWS[:2], *([str(i), "x", "0"] for i in range(100, 120))])
    assert read_log(path, config)[-1] == (
        "20 rows cannot train: 20 price 0 (lines 4, 5, 6, 7, 8, 9, 10, 11 and 12 more)"
    )
    assert not any("cannot train:" in line for line in read_log(write_catalogue(tmp_path, VALID_ROWS), config))


def test_packing_shows_how_five_rows_are_read(tmp_path: Path) -> None:
    rows = [
        ["1", "Item Name: Tea\nValue: 500\nUnit: Grams(gm)", "Rs. 1,299"],
        ["2", "Item Name: Bar, 1\u00bd oz", "Rs 499.50"],
        ["3", "Item Name: " + "Very " * 20 + "long", "\u20b91,29,999"],
        ["4", "Item Name: Oats\nValue: 3\nUnit: Bushel", "12"],
    ]
    assert read_log(write_catalogue(tmp_path, rows), make_config()) == [
        "rows 4, 4 can train. For example:",
        "  id  price      read as  title                                     amount   unit",
        "  1   Rs. 1,299  1299     Tea                                       500      g",
        "  2   Rs 499.50  499.5    Bar, 1 1/2 oz                             42.5242  g",
        "  3   \u20b91,29,999  129999   Very Very Very Very Very Very Very Ver..  -        -",
        "  4   12         12       Oats                                      3        bushel",
    ]
    many = read_log(write_catalogue(tmp_path, VALID_ROWS), make_config())
    assert [line.split()[0] for line in many[2:]] == ["0", "9", "19", "29", "39"]


def test_the_text_may_come_from_several_columns(tmp_path: Path) -> None:
    header = "sample_id,title,details,more,price"
    rows = [[key, text.removeprefix("Item Name: "), "<p>Rich</p>\nUnit: Fl Oz", f"{i} bags", price]
            for i, (key, text, price) in enumerate(VALID_ROWS)]  # fmt: skip
    path = write_catalogue(tmp_path, rows, header=header)
    config = make_config(text_column="title", further_text_columns=["details", "more"])
    data = pack_catalogue(path, config, tmp_path / "out")
    assert data.count == len(rows) and 0 < data.columns["title_length"].max() < data.columns["length"].min()
    item = parsing.parse(*rows[7][1:4])
    assert (item.title, item.description, item.kind) == ("hhh a, 7 oz", "Rich 7 bags", "g")
    joined = pack.read_table(path, config).texts[7]
    assert joined == "hhh a, 7 oz\n<p>Rich</p>\nUnit: Fl Oz\n7 bags"
    rows[3][1:4] = ["", " ", "\n"]
    faults = [entry.fault for entry in catalog.read(write_catalogue(tmp_path, rows, header=header),
                                                    pack.select_columns(config.packing))]  # fmt: skip
    assert [fault for fault in faults if fault] == ["some.csv, line 9: title and details and more is empty"]


def test_the_encoder_reads_the_category(catalogue_folder: Path) -> None:
    artifacts = dict(fit_artifacts(catalogue_folder, make_config()))
    texts = ["Item Name: Olive Oil\nCategory: Organic Gift", "Item Name: Olive Oil"]
    entries = [catalog.Entry("1", (text,), 5.0, (), "") for text in texts]

    def load(entry: catalog.Entry) -> tuple[list[int], bytes]:
        loaded = pack.load(entry, artifacts, max_tokens=48, inner_fold=None, images=None)
        return cast(Ragged, loaded["tokens"]).values.tolist(), cast(np.ndarray, loaded["numbers"]).tobytes()

    (with_category, numbers), (without, same_numbers) = map(load, entries)
    assert len(with_category) > len(without) and numbers == same_numbers  # the network's inputs keep their shapes


def test_artifacts_depend_on_the_training_rows_alone(catalogue_folder: Path, tmp_path: Path) -> None:
    config = make_config()
    before = pack.read_table(catalogue_folder, config)
    rows = [[str(i), text, str(price)] for i, (text, price) in enumerate(zip(before.texts, before.prices, strict=True))]
    first = write_catalogue(tmp_path, rows)
    artifacts, parts = fit_artifacts(first, config), pack.read_table(first, config).parts
    altered = [[key, f"{text}Bullet Point 9: zzz yyy 77 kg", price] for key, text, price in rows]
    changed = [altered[i] if part == "test" else row for i, (row, part) in enumerate(zip(rows, parts, strict=True))]
    (tmp_path / "b").mkdir()
    assert fit_artifacts(write_catalogue(tmp_path / "b", changed), config) == artifacts
    changed = [altered[i] if part == "train" else row for i, (row, part) in enumerate(zip(rows, parts, strict=True))]
    assert fit_artifacts(write_catalogue(tmp_path / "b", changed), config)["tokenizer"] != artifacts["tokenizer"]


def test_tokens_from_shards_are_bit_identical_to_tokenising_again(catalogue_folder: Path, data: ShardSet) -> None:
    config = make_config()
    for i, sample in enumerate(samples(catalogue_folder, config)):
        loaded = sample.load(fit_artifacts(catalogue_folder, config))
        tokens, numbers = cast(Ragged, loaded["tokens"]).values, cast(np.ndarray, loaded["numbers"])
        assert np.array_equal(data.read_arrays("tokens", np.array([i]))[0], tokens)
        assert data.read_arrays("numbers", np.array([i]))[0].tobytes() == numbers.tobytes()
        assert data.columns["length"][i] == len(tokens) <= 48


@pytest.mark.slow
def test_packing_again_is_bit_identical_and_a_changed_row_changes_the_data(
    catalogue_folder: Path, data: ShardSet, tmp_path: Path
) -> None:
    again = pack_catalogue(catalogue_folder, make_config(), tmp_path / "again")
    assert again.fingerprint == data.fingerprint
    rows = list(samples(catalogue_folder, make_config()))
    tested = next(row.key for row in rows if row.columns["set"] == "test")  # the artifacts do not depend on it
    with (catalogue_folder / "catalogue.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    other = [[key, text + "Bullet Point 9: new\n" if key == tested else text, price] for key, text, price in lines]
    copy = write_catalogue(tmp_path, other, header=",".join(header))
    assert fit_artifacts(copy, make_config()) == data.artifacts
    changed = [a.key for a, b in zip(rows, samples(copy, make_config()), strict=True) if a.columns != b.columns]
    assert changed == [tested]
    assert read_listing(samples(copy, make_config()), {}) != read_listing(rows, {})


def compute_padding(lengths: list[np.ndarray]) -> float:
    """Return the share of padding in batches whose texts have these lengths, each padded to its longest."""
    computed = sum(len(batch) * int(batch.max()) for batch in lengths)
    return 1 - sum(int(batch.sum()) for batch in lengths) / computed


def test_buckets_reduce_padding_and_read_every_row_once() -> None:
    length = np.random.default_rng(0).integers(10, 300, 2000)
    ids = np.arange(2000)
    order = bucket_by_length(ids, length, seed=0, epoch=0, global_batch_size=32)
    shuffled = shuffle(ids, seed=0, epoch=0, global_batch_size=32)
    waste = [compute_padding([length[o.batch(i)] for i in range(len(o))]) for o in (shuffled, order)]
    assert np.array_equal(np.sort(order.ids), ids)
    assert waste[0] > 0.4 and waste[1] < 0.1


@pytest.mark.slow
def test_the_synthetic_catalogue_is_reproducible_and_its_prices_follow_from_the_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        synthesize(tmp_path / name, count=50, seed=1)
    first = (tmp_path / "a" / FILE).read_bytes()
    assert first == (tmp_path / "b" / FILE).read_bytes()
    assert b"<p>" in first and "\u00e9".encode() in first and first.count(b"\r\n") == 51 < first.count(b"\n")
    with pytest.raises(OSError, match="not empty"):
        synthesize(tmp_path / "a", count=50, seed=1)
    synthesize(tmp_path / "c", count=1500, seed=2)
    config = make_config()
    whole = pack.read_table(tmp_path / "c", config)
    train, test = whole.parts != "test", whole.parts == "test"
    ridge = baseline.TfidfRidge(0.3).fit(whole.texts[train], whole.prices[train], whole.numbers[train])
    score = metrics.smape(ridge.predict(whole.texts[test], whole.numbers[test]), whole.prices[test])
    median_score = metrics.smape(np.full(test.sum(), np.median(whole.prices[train])), whole.prices[test])
    assert FLOOR < score < 40 < 60 < median_score


@pytest.mark.slow
def test_images_are_found_by_the_end_of_their_url_and_may_be_missing_only_if_configured(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "images" / "a.jpg")
    Image.new("LA", (20, 10)).save(tmp_path / "images" / "b.png")
    rows = [[*row, f"https://host/x/{'ab'[i % 2]}.{('jpg', 'png')[i % 2]}"] for i, row in enumerate(VALID_ROWS)]
    rows[5][3] = "https://host/x/none.jpg"
    path = write_catalogue(tmp_path, rows, header="sample_id,catalog_content,price,image_link")
    config = make_config(images=str(tmp_path / "images"))
    with pytest.raises(PackError, match=r"no image 'none.jpg' in .*images \(packing.missing_image=gray"):
        pack_catalogue(path, config, tmp_path / "out")
    config.packing.missing_image = "gray"
    data = pack_catalogue(path, config, tmp_path / "out")
    assert data.columns["has_image"].tolist() == [int(i != 5) for i in range(40)]
    assert data.read_arrays("image", np.array([0]))[0].tobytes() == (tmp_path / "images" / "a.jpg").read_bytes()
    config.model.image_dims, config.image.channels = 16, 3
    config.image.height_px = config.image.width_px = 32
    module = make_module(data, config).eval()
    batch = {**make_batch(data, [4, 5]), "image": torch.rand(2, 3, 32, 32)}
    with torch.no_grad():
        predicted, with_other_image = (
            module.predict({**batch, "image": image})["predicted"]
            for image in (batch["image"], torch.rand(2, 3, 32, 32))
        )
    assert predicted[0] != with_other_image[0] and predicted[1] == with_other_image[1]
