"""`trainyard new` writes families that meet the contract, and `check-family` finds families that do not."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from trainyard import scoring
from trainyard.cli import main
from trainyard.config.compose import compose
from trainyard.config.settings import HoldOutSettings, TrainConfig
from trainyard.data.index import read_index
from trainyard.data.labelled import assign_sets, list_labelled_files
from trainyard.data.prepare import count_samples, find_packed, prepare_data
from trainyard.errors import UserError
from trainyard.tools import check_family
from trainyard.tools.new_family import create_family, list_templates

KINDS = [*list_templates()]


def write_family(jobs: Path, name: str, kind: str, **changes: tuple[str, str]) -> check_family.Family:
    """Write a family, with a text in some of its files replaced: file without .py -> (text, other text)."""
    folder = create_family(jobs, name, kind)
    for file, (old, new) in changes.items():
        text = (folder / f"{file}.py").read_text()
        assert old in text
        (folder / f"{file}.py").write_text(text.replace(old, new))
    return check_family.Family(jobs, name, jobs.parent / f"{name}-scratch")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_family_meets_the_contract_without_the_runs(kind, tmp_path):
    family = write_family(tmp_path / f"new_{kind}", f"my_{kind}", kind)
    for check in check_family.CHECKS.values():
        if check is not check_family.check_resume:
            check(family)


def type_line(folder: Path, *words: object) -> str:
    """Run one command in a folder, as a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_raw(raw: Path, kind: str) -> list[str]:
    """Write a user's files, other than those of `synthesize`; return the options that say what they mean."""
    rng = np.random.default_rng(3)
    raw.mkdir()
    if kind == "table":
        lines = [
            f"{a:.2f};{b:.3f}".replace(";", ",") + f",{'dear' if a > b else 'cheap'}" for a, b in rng.random((90, 2))
        ]
        (raw / "goods.csv").write_text("\n".join(["width,height,label", *lines]))
        return ["packing.target=label", "packing.task=classify", "max_duration=30ep"]
    if kind == "detection":
        boxes = [(int(x), int(y)) for x, y in rng.integers(4, 60, (48, 2))]
        for i, (x, y) in enumerate(boxes):
            pixels = np.full((96, 128, 3), 60, np.uint8)
            pixels[y : y + 30, x : x + 40] = 200
            (raw / "images").mkdir(exist_ok=True)
            Image.fromarray(pixels).save(raw / "images" / f"{i}.png")
        content = {
            "images": [{"id": i, "file_name": f"{i}.png", "width": 128, "height": 96} for i in range(48)],
            "annotations": [
                {"id": i, "image_id": i, "category_id": 7, "bbox": [x, y, 40, 30]} for i, (x, y) in enumerate(boxes)
            ],
            "categories": [{"id": 7, "name": "plate"}],
        }
        (raw / "objects.json").write_text(json.dumps(content))
        return ["image.height_px=96", "image.width_px=128", "max_duration=2ep", "eval_every=1ep"]
    if kind == "minimal":
        for i, x in enumerate(rng.normal(size=(60, 2, 2))):
            np.savez(raw / f"{i}.npz", x=x, y=x.sum())
        return ["max_duration=60ep", "eval_every=60ep"]
    for i in range(48):
        name = ("left", "right")[i % 2]
        (raw / name).mkdir(exist_ok=True)
        if kind == "images":
            pixels = rng.normal(80, 10, (50, 60, 3))
            pixels[:, :30] += 90 * (name == "left")
            pixels[:, 30:] += 90 * (name == "right")
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(raw / name / f"{i}.jpg")
        else:
            wave = 0.4 * np.sin(np.arange(24000) * (0.05 if name == "left" else 0.4)) + rng.normal(0, 0.01, 24000)
            soundfile.write(raw / name / f"{i}.wav", wave, 24000)
    small = ["image.height_px=32", "image.width_px=32", "augment.flip=0", "augment.crop_area_min=1"]
    return [*(small if kind == "images" else ["sound.frames=8000"]), "model.name=small", "max_duration=12ep"]


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "text"])  # that one is tested in test_example.py
def test_a_new_family_is_checked_and_learns_from_a_folder_as_typed(kind, tmp_path):
    lines = type_line(tmp_path, "new", "mine", "--like", kind).splitlines()
    assert lines[1:3] == ["next: trainyard check-family mine", "      trainyard run mine data.path=FOLDER"]
    assert lines[3].endswith("templates/INTERFACE.md")
    checked = type_line(tmp_path, "check-family", "mine").splitlines()
    assert checked[:-2] == [f"ok      {name}" for name in check_family.CHECKS]
    options = write_raw(tmp_path / "raw", kind)
    shown = type_line(tmp_path, "run", "mine", "data.path=raw", "--name", "first", *options)
    is_detection = kind == "detection"
    if kind == "minimal":
        assert float(re.search(r"loss +(\S+)", shown)[1]) < 0.2, "the variance is above 1"
        return  # it has nothing for new files
    if is_detection:
        assert "ap50" in shown
    else:
        assert float(re.search(r"accuracy ([\d.]+)", shown)[1]) > 0.8, shown
    assert ("most frequent class" in type_line(tmp_path, "evaluate", "mine", "raw")) != is_detection
    type_line(tmp_path, "predict", "mine", "raw", "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    if is_detection:
        assert {line["category"] for line in found} == {"plate"}
        assert all(-1 <= float(line["x0"]) < float(line["x1"]) <= 129 for line in found)
    else:
        assert len(found) == (90 if kind == "table" else 48) and set(found[0]) >= {"class", "probability"}


def test_a_table_may_be_a_file_with_semicolons_and_decimal_commas_which_are_asked_about(tmp_path):
    create_family(tmp_path / "jobs", "my_semicolons", "table")
    file = tmp_path / "a.csv"
    file.write_text("size;kind;code;target\n" + "".join(f"{i},5;a,{i};{i},b;{2 * i}\n" for i in range(30)))

    def configure(*options: str) -> TrainConfig:
        typed = [
            f"data.path={file}",
            f"data.cache={tmp_path / 'cache'}",
            "packing.target=target",
            "packing.task=regress",
        ]
        return compose("my_semicolons", [*typed, *options], tmp_path / "jobs")

    asked = r"a\.csv, line 2: '0,5' has a decimal comma. State it: packing.decimal_mark=comma"
    with pytest.raises(UserError, match=asked):
        prepare_data(configure(), tmp_path / "jobs")
    config = configure("packing.decimal_mark=comma")
    folder = Path(prepare_data(config, tmp_path / "jobs").data.path)
    scaling = json.loads(read_index(folder).artifacts["scaling"])
    assert list(scaling["numbers"]) == ["size"] and list(scaling["categories"]) == ["kind", "code"]
    assert 5 < scaling["numbers"]["size"][0] < 25 and 10 < scaling["target"][0] < 50
    assert find_packed(config, tmp_path / "jobs") == folder
    assert count_samples(config, tmp_path / "jobs") == 30
    numbers = "".join(f"{1 + i % 9}.{100 + i},{i}\n" for i in range(30))
    file.write_text("size,target\n" + numbers)  # thousands, if commas did not separate the columns
    read = read_index(Path(prepare_data(configure(), tmp_path / "jobs").data.path)).artifacts
    assert 1 < json.loads(read["scaling"])["numbers"]["size"][0] < 9
    file.write_text("size;target\n" + numbers.replace(",", ";"))
    with pytest.raises(UserError, match=r"'1\.100' could be 1\.1 or 1100, and no other number tells"):
        prepare_data(configure(), tmp_path / "jobs")


SCORE, LIST = 'compute_class_metrics(rows["logits"]', "files = list_labelled_files(raw, IMAGES)"
BROKEN = {
    "packed data read back equal": {"pack": ("for file in files:\n", "for file in [*files, *files][3:-3]:\n")},
    "sets share no sample": {
        "pack": ("find_sets(columns, vocabulary)", "find_sets(columns, vocabulary) | {'test': np.arange(9)}")
    },
    "forward and predict return what training reads": {
        "module": ('return {"logits": self.network(batch["image"]).float(), ', 'return {"logits": batch["image"][1:], ')
    },
    "the loss falls on one batch": {"module": ('return {"loss": loss,', 'return {"loss": 0 * loss + 1,')},
    "every parameter gets a gradient": {
        "module": ("self.network, self.classes", "self.spare = nn.Linear(2, 2)\n        self.network, self.classes")
    },
    "a perfect prediction gets perfect metrics": {"module": (SCORE, SCORE.replace("rows", "-rows"))},
    "labelled and unlabelled files are listed": {"pack": (f"{LIST}\n    return", f"{LIST}[1:]\n    return")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_family_that_breaks_the_contract_is_found_and_the_place_named(name, tmp_path):
    family = write_family(tmp_path / "broken", "bad", "images", **BROKEN[name])
    try:
        check_family.CHECKS[name](family)
    except (check_family.CheckFailed, UserError) as error:
        assert str(error).endswith(".") or "Type" in str(error)
        return
    raise AssertionError("not found")


def test_what_a_family_raises_is_told_with_its_line_and_later_checks_are_left_out(tmp_path):
    write_family(tmp_path / "raises", "bad", "images", pack=("for file in files:\n", "for file in [1 / 0]:\n"))
    (tmp_path / "raises/bad/README.md").unlink()
    first, files, presets = check_family.check_family(tmp_path / "raises", "bad", tmp_path)
    assert "ZeroDivisionError" in first.failure and "bad/pack.py:" in first.failure
    assert "lacks README.md" in files.failure and presets.passed


def test_a_missing_file_is_named(tmp_path, capsys):
    write_family(tmp_path / "lacks", "bad", "images")
    (tmp_path / "lacks" / "bad" / "README.md").unlink()
    assert main(["check-family", str(tmp_path / "lacks" / "bad")]) == 1
    assert "lacks README.md." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My-Birds", "'My-Birds' cannot be the name of a family"),
        ("class", "'class' cannot be"),
        ("../x", "cannot be"),
        ("taken", "exists already. Choose another name"),
        ("taken_smoke", "a preset named 'taken_smoke' exists already"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_left(name, said, tmp_path, capsys):
    create_family(tmp_path / "jobs", "taken", "table")
    before = sorted(tmp_path.rglob("*"))
    assert main(["new", name, "--jobs", str(tmp_path / "jobs")]) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def draw(path: Path, count: int) -> None:
    path.mkdir(parents=True)
    for i in range(count):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(path / f"{i}.png")


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        ({"": 2}, "0.png: in no class. Expected a sub-folder for each class"),
        ({"cat": 2}, "1 class with files ending in .png"),
        ({}, "no classes with files ending in .png"),
        ({"train/cat": 2, "train/dog": 2, "vall/cat": 1}, "is none of train, val, test. Rename it to val"),
        ({"val/cat": 2, "val/dog": 2}, "Add it: a model needs samples to train on"),
        ({"train": 2}, "in no class"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_say_its_classes_is_refused(folders, said, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, count in folders.items():
        if name:
            draw(raw / name, count)
        else:
            draw(raw / "x", count)
            for path in (raw / "x").iterdir():
                shutil.move(path, raw)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        list_labelled_files(raw, {".png"})


def test_sets_are_shares_of_each_class_and_do_not_depend_on_other_classes():
    labels = {f"{name}/{i}": name for name, count in (("a", 40), ("b", 10), ("c", 2)) for i in range(count)}
    sets = assign_sets(labels, HoldOutSettings(val_share=0.2, test_share=0.1))
    found = {(labels[key], name): 0 for key, name in sets.items()}
    for key, name in sets.items():
        found[labels[key], name] += 1
    assert found == {
        ("a", "train"): 28, ("a", "val"): 8, ("a", "test"): 4,
        ("b", "train"): 7, ("b", "val"): 2, ("b", "test"): 1, ("c", "train"): 2,
    }  # fmt: skip
    alone = {key: name for key, name in labels.items() if name == "b"}
    assert assign_sets(alone, HoldOutSettings(val_share=0.2, test_share=0.1)) == {key: sets[key] for key in alone}
    assert assign_sets(alone, HoldOutSettings(val_share=0.2, test_share=0.1, seed=1)) != {
        key: sets[key] for key in alone
    }


def test_stated_sets_stay_and_a_missing_validation_set_is_drawn_from_training():
    labels = dict.fromkeys("abcdefghij", "x")
    stated = {key: "test" if key in "ab" else "train" for key in labels}
    sets = assign_sets(labels, HoldOutSettings(val_share=0.25, test_share=0.5), stated=stated)
    assert [key for key in labels if sets[key] == "test"] == ["a", "b"]
    assert sum(name == "val" for name in sets.values()) == 2


def test_class_metrics_are_those_counted_by_hand():
    logits, labels = np.array([[2.0, 0], [2, 0], [0, 2], [2, 0]]), np.array([0, 0, 1, 1])
    metrics = scoring.compute_class_metrics(logits, labels)
    assert metrics["accuracy"] == 0.75 and metrics["balanced_accuracy"] == 0.75
    assert metrics["accuracy_constant"] == 0.5
    right, wrong = np.log(1 + np.exp(-2)), np.log(1 + np.exp(2))
    assert metrics["cross_entropy"] == pytest.approx((3 * right + wrong) / 4)
    found = scoring.bootstrap_class_metrics(np.tile(logits, (25, 1)), np.tile(labels, 25), draws=400)
    low, high = found.ends["accuracy"]
    assert low == pytest.approx(0.66, abs=0.03) and high == pytest.approx(0.83, abs=0.03)
    with pytest.raises(UserError, match="1 of 4 samples have scores that are not finite"):
        scoring.compute_class_metrics(np.where(logits == logits[2], np.nan, logits), labels)


def test_error_metrics_are_those_counted_by_hand():
    metrics = scoring.compute_error_metrics([1.0, 2, 3, 4], [1.0, 2, 3, 8])
    assert metrics == {"rmse": 2.0, "mae": 1.0, "r2": pytest.approx(1 - 16 / 29), "rmse_constant": 7.25**0.5}
