"""The folder of synthetic samples says what made it: another generator makes another folder."""

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.training import FAMILIES
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.data.generator import hash_generator, hash_packing
from trainyard.data.index import read_index
from trainyard.data.prepare import prepare_data
from trainyard.errors import UserError

JOBS = Path(__file__).parents[1] / "jobs"
SOURCES = {
    "antispoof": ("synthesis.py", "vocoders.py", "filters.py"),
    "fingerprint": tuple(f"synthesis/{name}.py" for name in ("__init__", "impressions", "masters", "scanners")),
    "pricing": ("synthesis.py",),
    "tinydet": ("synthesis.py",),
    "twins": ("synthesis.py",),
}


def test_the_digest_of_every_generator_depends_on_its_source_alone(tmp_path):
    assert sorted(SOURCES) == sorted(path.parent.name for path in JOBS.glob("*/pack.py"))
    for family, sources in SOURCES.items():
        copy = Path(shutil.copytree(JOBS / family, tmp_path / family))
        digest = hash_generator(copy)
        assert digest == hash_generator(JOBS / family)
        for name in ("pack.py", "module.py", "config.py"):
            (copy / name).write_text((copy / name).read_text() + "# changed\n")
        assert hash_generator(copy) == digest
        for name in sources:
            (copy / name).write_text((copy / name).read_text() + "# changed\n")
            assert hash_generator(copy) != digest, name
            digest = hash_generator(copy)


@pytest.mark.slow
def test_another_generator_makes_another_folder_says_why_and_keeps_the_first(tmp_path, log):
    config = compose("stripes", [f"data.cache={tmp_path}", "data.synthetic=20"], FAMILIES)
    own = f"stripes-synthetic-20-seed0-{hash_generator(FAMILIES / 'stripes')}"
    others = ["stripes-synthetic-20-seed0", "stripes-synthetic-20-seed0-0123abcd", "stripes-synthetic-20-seed01-00"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f"{own}.partial").mkdir()
    prepare_data(config, FAMILIES)
    assert f"into {tmp_path / own}: finishing an interrupted call" in "".join(log)
    assert len(list((tmp_path / own).iterdir())) == 20
    shutil.rmtree(tmp_path / own)
    prepare_data(config, FAMILIES)
    why = f"the generator has changed since it made {others[0]}, {others[1]} (kept)"
    assert f"into {tmp_path / own}: {why}" in "".join(log)
    assert sorted(path.name for path in tmp_path.glob("stripes-synthetic-*")) == sorted([*others, own])
    prepare_data(config, FAMILIES)
    assert sum("synthesizing" in line for line in log) == 2


@pytest.mark.slow
def test_files_that_were_all_drawn_when_power_was_cut_and_not_recorded_are_drawn_again(tmp_path):
    for family, job, jobs in (("stripes", "stripes", FAMILIES), ("pricing", "pricing_smoke", JOBS)):
        config = compose(job, [f"data.cache={tmp_path}", "data.synthetic=120"], jobs)
        drawn = tmp_path / f"{family}-synthetic-120-seed0-{hash_generator(jobs / family)}"
        load_family(jobs, family, "pack").synthesize(drawn.with_name(f"{drawn.name}.partial"), count=120, seed=0)
        assert read_index(Path(prepare_data(config, jobs).data.path)).count > 0
        assert drawn.is_dir() and not drawn.with_name(f"{drawn.name}.partial").exists()


@pytest.mark.slow
def test_what_was_drawn_just_before_a_power_cut_is_drawn_again_and_what_is_older_is_kept(tmp_path):
    config = compose("fingerprint_smoke", [f"data.cache={tmp_path}"], JOBS)
    count, synthesize = config.data.synthetic, load_family(JOBS, "fingerprint", "pack").synthesize
    name = f"fingerprint-synthetic-{count}-seed0-{hash_generator(JOBS / 'fingerprint')}"
    left = tmp_path / f"{name}.partial"
    synthesize(left, count=count, seed=0)
    first, *_, last = sorted(left.iterdir())
    for path in left.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    drawn = last.read_bytes()
    last.write_bytes(bytes(len(drawn)))
    prepare_data(config, JOBS)
    assert (tmp_path / name / last.name).read_bytes() == drawn
    assert (tmp_path / name / first.name).stat().st_mtime < time.time() - 3000, "it was drawn again"


@pytest.mark.parametrize("damage", ["empty", "gone", "swapped", "unrecorded"])
def test_drawn_files_that_are_not_those_that_were_drawn_are_drawn_again_with_the_same_digest(tmp_path, log, damage):
    config = compose("stripes", [f"data.cache={tmp_path}", "data.synthetic=8"], FAMILIES)
    drawn = tmp_path / f"stripes-synthetic-8-seed0-{hash_generator(FAMILIES / 'stripes')}"
    before = read_index(Path(prepare_data(config, FAMILIES).data.path))
    first, second, *_ = sorted(drawn.iterdir())
    if damage == "empty":
        first.write_bytes(b"")
    elif damage == "gone":
        first.unlink()
    elif damage == "swapped":
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    else:
        (tmp_path / f".{drawn.name}.drawn").unlink()
    again = prepare_data(config, FAMILIES)
    assert read_index(Path(again.data.path)).content == before.content
    assert f"moved to {drawn}.damaged, and drawn again" in "".join(log)
    assert prepare_data(config, FAMILIES) == again and sum("drawn again" in line for line in log) == 1


def test_the_digest_of_packing_changes_with_its_code_and_not_with_docstrings_options_or_the_generator(tmp_path):
    files = {
        "pack.py": "from .names import read\nfrom .draw import synthesize\n\n\n"
        'def load():\n    """Load."""\n    return read()\n',
        "names.py": "from .config import Config\n\n\ndef read():\n    return 1\n",
        "draw.py": "def synthesize():\n    pass\n",
        "config.py": "class Config:\n    pass\n",
        "network.py": "",
    }

    def hash_with(**changed: str) -> str:
        for name, text in {**files, **{f"{name}.py": text for name, text in changed.items()}}.items():
            (tmp_path / name).write_text(text)
        return hash_packing(tmp_path)

    plain = hash_with()
    for name in ("draw", "config", "network"):
        assert hash_with(**{name: files[f"{name}.py"] + "x = 1\n"}) == plain
    assert hash_with(pack=files["pack.py"].replace("Load.", "Load it\n\n    from a file.")) == plain
    assert hash_with(pack=files["pack.py"].replace("read()", "1 + read()")) != plain
    assert hash_with(names=files["names.py"].replace("return 1", "return 2")) != plain


def test_a_cache_that_cannot_be_written_is_one_sentence_with_the_option_to_type():
    config = compose("stripes", ["data.cache=/proc/packed", "data.synthetic=8"], FAMILIES)
    with pytest.raises(UserError, match=r"data\.cache=/proc/packed: nothing can be .* to: data\.cache=FOLDER$"):
        prepare_data(config, FAMILIES)
