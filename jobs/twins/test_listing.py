"""Reading people, twins and sets from a raw folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.twins import NAMES, TWINS, index_by_person, read_samples, write_raw_folder
from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.errors import UserError

from .config import Config, PackingSettings
from .listing import connect_families, read_people
from .synthesis import DATASET, PAIRS

JOBS = Path(__file__).resolve().parents[1]
RULE = PackingSettings(val_share=0.2, test_share=0.2)


def test_listing_files_and_person_folders_give_the_same_people(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 3), TWINS)
    listed = read_samples(raw)
    (raw / DATASET).unlink()
    assert [(s.key, s.columns) for s in read_samples(raw)] == [(s.key, s.columns) for s in listed]
    assert len(listed) == 60
    assert listed[0].key == "9004/0.png" and index_by_person(listed)["9005"][0] == "9004"


def test_paths_from_another_machine_are_matched_by_their_tail(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 2), TWINS)
    before = [s.key for s in read_samples(raw)]
    listing = json.loads((raw / DATASET).read_text())
    moved = {person: [f"/kaggle/input/nd-twin/{path}" for path in paths] for person, paths in listing.items()}
    (raw / DATASET).write_text(json.dumps(moved))
    assert [s.key for s in read_samples(raw)] == before


def test_no_family_is_in_two_sets_and_a_triplet_is_one_family(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9999"], 2), [*TWINS, ["9999", NAMES[1]]])
    people = read_people(raw, RULE)
    sets_by_family: dict[str, set[str]] = {}
    for person in people:
        sets_by_family.setdefault(person.family, set()).add(person.set)
    assert len(sets_by_family) == 10 and all(len(sets) == 1 for sets in sets_by_family.values())
    assert [len([1 for sets in sets_by_family.values() if name in sets]) for name in ("train", "val", "test")] == [
        6,
        2,
        2,
    ]
    assert {p.name for p in people if p.family == NAMES[0]} == {NAMES[0], NAMES[1], "9999"}
    assert connect_families("abcd", [("b", "c"), ("c", "d")]) == {"a": "a", "b": "b", "c": "b", "d": "b"}


def test_sets_named_in_the_files_are_kept(tmp_path: Path) -> None:
    raw = write_raw_folder(
        tmp_path / "raw", dict.fromkeys(NAMES, 2), {"train": TWINS[:6], "val": TWINS[6:8], "test": TWINS[8:]}
    )
    found = index_by_person(read_samples(raw))
    assert [found[pair[0]][1] for pair in TWINS] == ["train"] * 6 + ["val"] * 2 + ["test"] * 2
    (raw / PAIRS).write_text(json.dumps(TWINS))
    listing = json.loads((raw / DATASET).read_text())
    (raw / DATASET).unlink()
    (raw / f"train_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[:16]}))
    (raw / f"external_test_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[16:]}))
    found = index_by_person(read_samples(raw))
    assert {name for name, (_, set_name) in found.items() if set_name == "test"} == set(NAMES[16:])
    assert sum(set_name == "val" for _, set_name in found.values()) == 4


def test_people_are_paired_however_their_letters_are_composed(tmp_path: Path) -> None:
    names = [f"e\u0301{number}" for number in range(20)]  # as a Mac writes them; the pairs are composed
    pairs = [[f"\u00e9{number}", f"\u00e9{number + 1}"] for number in range(0, 20, 2)]
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(names, 2), pairs)
    (raw / DATASET).unlink()
    assert {person.family for person in read_people(raw, RULE)} == set(names[::2])


def test_people_may_be_in_folders_of_sets(tmp_path: Path) -> None:
    for name in (
        "train/n000002/0001.webp",
        "train/n000003/0001.jpg",
        "train/n000004/0001.jpg",
        "test/n000001/0001.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")  # a listing opens no image
    rule = replace(RULE, singles="keep", val_share=0)
    found = {(person.name, person.set, person.images[0].name) for person in read_people(tmp_path, rule)}
    assert found == {
        ("n000001", "test", "test/n000001/0001.jpg"),
        ("n000002", "train", "train/n000002/0001.webp"),
        ("n000003", "train", "train/n000003/0001.jpg"),
        ("n000004", "train", "train/n000004/0001.jpg"),
    }
    (tmp_path / "test/n000002").mkdir()
    (tmp_path / "test/n000002/2.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"train/n000002: also in test. Keep each person in one set"):
        read_people(tmp_path, rule)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([*TWINS, ["9004", "9004"]], "pair 11: '9004' is paired with itself"),
        ([*TWINS, ["9005", "9004"]], r"'9005' and '9004' are already listed, in .*pair 1\. Remove one"),
        ([*TWINS, ["9004", "9404x"]], "'9404x' is not in the data set. Nearest: "),
        (TWINS[1:], r"person '9004' has no twin .*\(2 of 20 people have none\).*packing.singles=keep"),
        (
            [*TWINS, ["9004"]],
            r"pairs_infor.json: \[10\]: expected array of length 2, found 1. Expected: \[\[\"ann",
        ),
        ({"tset": TWINS}, "unknown set 'tset'. Expected test"),
        ("9004", r"the content: expected object \| array, found str. Expected: \[\[\"ann"),
        ({"train": TWINS, "test": [["9004", "9015"]]}, "person '9004' is in set train and in set test"),
    ],
)
def test_bad_pairs_are_refused_with_their_place(tmp_path: Path, pairs: object, message: str) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), pairs)
    with pytest.raises(UserError, match=message):
        read_samples(raw)


def test_a_bad_listing_is_refused_with_its_place(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    for content, message in (
        ("{", "not JSON"),
        ("[]", "the content: expected object, found array. Expected: {person"),
        ('{"9004": []}', "person '9004': expected a list of one or more paths"),
    ):
        (raw / DATASET).write_text(content)
        with pytest.raises(UserError, match=message):
            read_samples(raw)
    (raw / DATASET).rename(raw / f"trian_{DATASET}")
    with pytest.raises(UserError, match=f"expected a name of {DATASET}, train_"):
        read_samples(raw)


def test_people_without_a_twin_are_kept_or_skipped_on_request(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9997", "9998"], 1), TWINS)
    config = Config()
    config.packing.singles = "skip"
    assert len(read_samples(raw, config)) == 20
    config.packing.singles = "keep"
    assert index_by_person(read_samples(raw, config))["9998"][0] == "9998"


def test_too_few_families_to_train_on_is_an_error(tmp_path: Path) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES[:10], 1), TWINS[:5])
    with pytest.raises(UserError, match="5 families, but only 1 left to train on"):
        read_samples(raw)


def test_images_in_no_folder_of_a_person_are_refused_by_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "1.png").write_bytes(b"")
    config = configs.compose("twins_smoke", [f"data.path={tmp_path / 'raw'}", f"data.cache={tmp_path}"], JOBS)
    with pytest.raises(
        UserError,
        match=r"raw: contains no sample that twins.* for each person.* Found: 1 .png \(1.png\)",
    ):
        prepare_data(config, JOBS)
