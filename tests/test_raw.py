"""Raw folders with links, pipes and names that no text can hold: one sentence each, before anything is packed."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import fail_after
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.data.pack import read_listing
from trainyard.data.raw import check_sources, describe_unread, list_files
from trainyard.data.shards import Sample
from trainyard.errors import UserError

JOBS = Path(__file__).parents[1] / "jobs"
LATIN1 = os.fsdecode(b"caf\xe9")


def write_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def test_files_are_listed_sorted_through_links_and_without_hidden_ones(tmp_path):
    write_files(tmp_path / "raw", "b.png", "a/2.PNG", "a/1.png", "a/deep/3.png", ".hidden/4.png", "._5.png", "a/x.txt")
    write_files(tmp_path / "elsewhere", "6.png")
    raw = tmp_path / "raw"
    (raw / "z").symlink_to(tmp_path / "elsewhere")
    (raw / "7.png").symlink_to(tmp_path / "elsewhere" / "6.png")
    names = ["7.png", "a/1.png", "a/2.PNG", "a/deep/3.png", "b.png", "z/6.png"]
    assert [str(path.relative_to(raw)) for path in list_files(raw, {".png"})] == names
    names.remove("a/deep/3.png")
    assert [str(path.relative_to(raw)) for path in list_files(raw, {".png"}, depth=1)] == names
    assert [path.name for path in list_files(raw, {".png"}, depth=0)] == ["7.png", "b.png"]
    assert list_files(raw / "none", {".png"}) == []


FAMILIES = {
    "antispoof": [f"{label}/spk{i}/{i}.wav" for label in ("bonafide", "spoof/tts") for i in range(20)],
    "fingerprint": [f"{finger}_{i}.png" for finger in range(8) for i in range(2)],
    "twins": [f"person{i}/1.png" for i in range(24)],
}
"""The files of a raw folder that each family accepts."""


def list_family(family: str, raw: Path) -> int:
    """Return the number of samples that packing would begin with; reads no file contents."""
    options = ["packing.singles=keep"] if family == "twins" else []
    config = compose(family, [f"data.path={raw}", *options], JOBS)
    return read_listing(load_family(JOBS, family, "pack").samples(raw, config), {})[0]


def make_loop(raw: Path, one: Path) -> None:
    (raw / "loop").symlink_to(raw)


def make_second_name(raw: Path, one: Path) -> None:
    folder = one.parent if one.parent != raw else write_files(raw / "a", "9_1.png")
    folder.with_name("zz").symlink_to(folder)


def make_pipe(raw: Path, one: Path) -> None:
    one.unlink()
    os.mkfifo(one)


def make_dangling(raw: Path, one: Path) -> None:
    one.unlink()
    one.symlink_to("gone.wav")


def make_latin1(raw: Path, one: Path) -> None:
    one.rename(one.with_name(LATIN1 + "_1" + one.suffix))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (make_loop, ("the folder that it is in", "reached twice, because a link leads to", "count twice")),
        (make_second_name, ("reached twice, because a link leads to", "count twice")),
        (make_pipe, ("is a named pipe, a device or another special file",)),
        (make_dangling, ("a link to gone.wav, which does not exist",)),
        (make_latin1, ("caf\\xe9_1",)),
    ],
)
def test_each_family_refuses_it_in_one_sentence(
    family: str, change: Callable[[Path, Path], None], said: tuple[str, ...], tmp_path: Path
):
    raw = write_files(tmp_path / "raw", *FAMILIES[family])
    if family == "twins":
        pairs = ", ".join(f'["person{i}", "person{i + 1}"]' for i in range(0, 24, 2))
        (raw / "twin_pairs_infor.json").write_text(f"[{pairs}]")
    assert list_family(family, raw) == len(FAMILIES[family])
    change(raw, raw / FAMILIES[family][3])
    try:
        count = list_family(family, raw)
    except UserError as error:
        assert any(part in str(error) for part in said) and str(error).isprintable(), error
    else:  # log_reading of this family names files that it leaves out
        assert family == "fingerprint" and change in (make_pipe, make_dangling) and count == len(FAMILIES[family]) - 1


@pytest.mark.parametrize(("change", "said"), [(make_pipe, "is a named pipe"), (make_dangling, "which does not exist")])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("pricing", "train.csv"),
        ("tinydet", "annotations/instances_train.json"),
        ("twins", "dataset_infor.json"),
        ("twins", "twin_pairs_infor.json"),
    ],
)
def test_a_listing_that_cannot_be_read_does_not_hang(
    family: str, name: str, change: Callable[[Path, Path], None], said: str, tmp_path: Path
):
    raw = write_files(tmp_path / "raw", *FAMILIES["twins"], name)
    change(raw, raw / name)
    with fail_after(10), pytest.raises(UserError, match=f"{name}: .*{said}"):
        list_family(family, raw)


def test_the_lines_to_type_mend_a_loop_a_pipe_a_dangling_link_and_a_name(tmp_path):
    raw = write_files(tmp_path / "raw it", "a/1.png")
    (raw / "a/loop").symlink_to(raw)
    os.mkfifo(raw / "2.png")
    (raw / "3.png").symlink_to("gone.png")
    write_files(raw / LATIN1, "it's.png")
    for _ in range(4):
        with pytest.raises(UserError) as error:
            list_files(raw, {".png"})
        _, line = str(error.value).rsplit(": ", 1)
        assert line.startswith(("rm ", "mv ")), error.value
        subprocess.run(["bash", "-c", line.replace("NEW_NAME", f"'{raw}/cafe'")], check=True)
    assert [str(path.relative_to(raw)) for path in list_files(raw, {".png"})] == ["a/1.png", "cafe/it's.png"]


def test_shared_files_hard_links_and_other_names_are_taken_as_meant(tmp_path):
    raw = write_files(tmp_path / "raw", "a/1.png")
    (raw / "b").mkdir()
    (raw / "b" / "2.png").symlink_to(raw / "a/1.png")

    def make_samples() -> Iterator[Sample]:
        for i, name in enumerate(("a/1.png", "a/1.png", "b/2.png")):
            yield Sample(str(i), dict, source=raw / name)

    assert len(list(check_sources(make_samples()))) == 3
    (raw / "b" / "1.png").hardlink_to(raw / "a/1.png")
    assert len(list(check_sources([Sample("a", dict, source=raw / f"{x}/1.png") for x in "ab"]))) == 2
    (raw / "b" / "1.png").unlink()
    (raw / "b" / "1.png").symlink_to(raw / "a/1.png")
    with pytest.raises(UserError, match=r"b/1.png: reached twice"):
        list(check_sources([Sample("a", dict, source=raw / f"{x}/1.png") for x in "ab"]))


def test_what_is_not_read_is_counted_by_ending(tmp_path):
    raw = write_files(tmp_path / "raw", "a/1.png", "a/2.m4a", "b/3.M4A", "notes.txt", "deep/er/4.zip", ".hidden/5.png")
    (raw / "deep" / "up").symlink_to(raw)
    used = raw / "a" / "1.png"
    assert describe_unread(raw, lambda path: path == used) == (
        f"2 .m4a (a{os.sep}2.m4a, b{os.sep}3.M4A), 1 .zip (deep{os.sep}er{os.sep}4.zip)",
        "1 .txt (notes.txt)",
    )


def test_a_link_to_itself_is_named_and_ends_in_no_traceback(tmp_path):
    raw = write_files(tmp_path / "raw", "1.png")
    (raw / "2.png").symlink_to("2.png")
    with pytest.raises(UserError, match=r"2.png: cannot be read \(Too many levels of symbolic links\)"):
        list_files(raw, {".png"})
    assert [path.name for path in list_files(raw, {".jpg"})] == []
