"""What is stored: today's code reads the kept example, writes the same fields, and docs/formats.md names each of them.

If a test says that fields differ, what is stored has changed: raise the number in `files.FORMATS`, unless readers do
without what was added; correct the page, and write the example again: `python -m tests.write_format`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import h5py
import pytest
import torch

from tests.images import edit_index
from tests.training import FAMILIES, train
from trainyard.cli import main
from trainyard.cluster.description import Cluster
from trainyard.config.compose import load_config
from trainyard.data.hdf5 import open_hdf5
from trainyard.data.shards import ShardSet, verify
from trainyard.errors import FormatError
from trainyard.files import FORMATS
from trainyard.runs import submission, sweep_file
from trainyard.runs.changes import check_unchanged, find_changes
from trainyard.runs.evaluations import read_evaluations
from trainyard.runs.events import read_events, read_metrics
from trainyard.runs.folder import ENV_DIGEST, read_env
from trainyard.runs.manifest import hash_fields, list_checkpoints

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
RUN, PACKED = Path("runs/stripes/done"), Path("data/stripes")
SOMETIMES = {"waited_for_previous_s", "passed", "previous", "request", "shown"}
"""Fields that one run has and an equal one may lack."""


def read_page() -> dict[str, set[str]]:
    """Return the fields that each section of the page lists; those of events are by event, "Events start"."""
    found: dict[str, set[str]] = {}
    section = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.match("##+ (.*)", line):
            section = heading[1]
        elif of := re.match(r"\| field of (?:a )?`?(\w+)", line):
            section = of[1]
        elif row := re.match(r"\| `([^`]+)` \| ([^|]*) \|", line):
            name, kinds = row[1], re.findall("`([^`]+)`", row[2])
            if section == "Events":
                found[f"Events {name}"] = set(kinds)
            else:
                found.setdefault(section, set()).add(name)
    return found


def list_hdf5(path: Path) -> set[str]:
    """Return the attributes and datasets of a file; names that data decide are NAME."""
    found: set[str] = set()

    def add(name: str, node: h5py.HLObject) -> None:
        named = re.sub(r"^(columns|records|vocabulary|artifacts)/[^/]+", r"\1/NAME", name)
        found.update(f"{named}.{attribute}" for attribute in node.attrs)
        if isinstance(node, h5py.Dataset):
            found.add(named)

    with h5py.File(path) as file:
        found.update(f".{attribute}" for attribute in file.attrs)
        file.visititems(add)
    return found


def list_json(value: Mapping[str, Any], *groups: str) -> set[str]:
    """Return the fields of an object; those of `groups`, such as "meta.files", by dotted name."""
    found: set[str] = set()
    for name, inner in value.items():
        if name in {group.partition(".")[0] for group in groups} and isinstance(inner, Mapping):
            rest = [group.partition(".")[2] for group in groups if group.startswith(f"{name}.")]
            found |= {f"{name}.{field}" for field in list_json(inner, *filter(None, rest))}
        else:
            found.add(name)
    return found


def list_stored(folder: Path) -> dict[str, set[str]]:
    """Return the fields of everything stored in a folder, by the sections of the page."""
    run = folder / RUN
    journal = json.loads((folder / PACKED / "packing.json").read_text())
    journal["shards"] = {"NAME": next(iter(journal["shards"].values()))}
    state = torch.load(next((run / "checkpoints").glob("*2.ckpt")), weights_only=True)
    manifest = json.loads(next((run / "checkpoints").glob("*2.json")).read_text())
    sweep = json.loads((folder / "runs/sweeps/rates/sweep.json").read_text())
    found = {
        "Shard": list_hdf5(folder / PACKED / "shard-00000.h5"),
        "Index": list_hdf5(folder / PACKED / "index.h5"),
        "List of shards": list_json(journal, "shards.NAME"),
        "State": list_json(state, "progress", "best", "plateau"),
        "Manifest": list_json(manifest, "meta.files"),
        "Environment": set(json.loads((run / "env.json").read_text())),
        "Heartbeat": set(json.loads((run / "heartbeat.json").read_text())),
        "sweep": list_json(sweep | {"elements": sweep["elements"][0]}, "elements") - SOMETIMES,
    }
    for line in read_metrics(run):
        found.setdefault(line["kind"], set()).update("METRIC" if name == "accuracy" else name for name in line)
    for event in read_events(run):
        own = event.keys() - {"kind", "event", "step", "elapsed_s", "time"} - SOMETIMES
        found.setdefault(f"Events {event['event']}", set()).update(own)
    return found


def list_keys(kind: type) -> Iterator[str]:
    """Yield the dotted keys of a cluster file."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        inner = next((one for one in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(one)), None)
        if inner is not None:
            group = f"{field.name}.HW" if field.name == "gpus" else field.name
            yield from (f"{group}.{key}" for key in list_keys(inner))
        elif field.name not in ("name", "path"):  # not written in the file
            yield field.name


def test_the_page_names_each_field_of_the_kept_example_and_no_other(stored, packed_images):
    page, kept = read_page(), list_stored(stored)
    kept["Shard"] |= list_hdf5(packed_images / "shard-00000.h5")  # columns of numbers, arrays
    for section, found in kept.items():
        assert page[section] - SOMETIMES == found, section
    assert page["Cluster file"] == set(list_keys(Cluster))
    assert {*submission._TEXTS, *submission._COUNTS, "options"} <= page["Submission"]
    assert len(kept) == 13 and len(page) > 20


@pytest.mark.slow
def test_todays_code_writes_the_fields_of_the_kept_example(stored, tmp_path):
    from tests.write_format import write_stored

    write_stored(tmp_path / "new")
    assert list_stored(tmp_path / "new") == list_stored(stored), "see the first lines of this file"


def test_todays_code_reads_the_kept_example(stored, capsys):
    assert list(verify(PACKED)) == [] and ShardSet(PACKED).fingerprint == read_env(RUN)["data"]["fingerprint"]
    assert main(["ckpt", "verify", str(RUN)]) == 0
    assert find_changes(RUN) == [] and load_config(RUN / "config.yaml", FAMILIES).job == "stripes"
    assert sweep_file.load("rates", Path("runs")).elements[0].run == RUN
    size = sum(path.stat().st_size for path in (Path(__file__).parent / "format_1").rglob("*") if path.is_file())
    assert size < 200_000


@pytest.mark.slow
def test_the_kept_run_resumes_from_its_first_checkpoint(stored):
    for path in (RUN / "checkpoints").glob("step-000000004*"):
        path.unlink()
    assert train(RUN) == 0
    assert [(event["event"], event["step"]) for event in read_events(RUN)][-1] == ("done", 4)
    assert ("resume", 2) in [(event["event"], event["step"]) for event in read_events(RUN)]


# Another number


def write_number(path: Path, number: object, *, digest: str = "") -> None:
    """Write another format number into a JSON file, with a digest that matches."""
    content = {**json.loads(path.read_text()), "format": number}
    content.pop(digest, None)
    path.write_text(json.dumps({**content, **({digest: hash_fields(content)} if digest else {})}))


def plant_index() -> Path:
    with edit_index(PACKED) as file:
        file.attrs["format"] = 2
    return PACKED / "index.h5"


def plant_shard() -> Path:
    shard = PACKED / "shard-00000.h5"
    with h5py.File(shard, "r+") as file:
        file.attrs["format"] = 2
    return shard


def plant_checkpoint() -> Path:
    path = RUN / "checkpoints" / "step-000000002.json"
    write_number(path, 2, digest="self_sha256")
    return path.with_suffix(".ckpt")


def plant_run() -> Path:
    write_number(RUN / "env.json", 2, digest=ENV_DIGEST)
    return RUN / "env.json"


def plant_sweep() -> Path:
    write_number(Path("runs/sweeps/rates/sweep.json"), 2)
    return Path("runs/sweeps/rates/sweep.json")


def plant_evaluation() -> Path:
    path = RUN / "evaluations" / "new" / "evaluation.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 2}')
    return path


@pytest.mark.parametrize(
    ("plant", "read", "kind"),
    [
        (plant_index, lambda path: ShardSet(PACKED), "packed data"),
        (plant_shard, open_hdf5, "packed data"),
        (plant_checkpoint, lambda path: list_checkpoints(path.parent), "checkpoint"),
        (plant_run, lambda path: check_unchanged(RUN), "run folder"),
        (plant_sweep, lambda path: sweep_file.load("rates", Path("runs")), "sweep"),
        (plant_evaluation, lambda path: read_evaluations(RUN), "evaluation"),
    ],
)
def test_another_number_is_one_error_with_both_numbers_and_what_to_type(stored, plant, read, kind):
    path = plant()
    with pytest.raises(FormatError) as caught:
        read(path)
    assert str(caught.value).startswith(
        f"{path}: the format of this {kind} is 2, expected 1, which this version of Trainyard reads. "
        "Use the version that wrote it, or "
    )
    assert "trainyard " in str(caught.value) and "\n" not in str(caught.value) and kind in FORMATS


@pytest.mark.parametrize("words", [("resume", RUN), ("report", RUN), ("export", RUN, "weights.safetensors")])
def test_commands_refuse_a_run_of_another_format(stored, capsys, words):
    plant = plant_checkpoint if words[0] == "export" else plant_run
    path = plant()
    assert main([*map(str, words), "--jobs", str(FAMILIES)] if words[0] != "report" else [*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("FormatError") == 1 and f"{path}: the format of this" in said
