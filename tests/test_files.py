"""Files and folders appear whole, and what a killed process left is in nobody's way."""

import errno
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from trainyard.config.families import load_family
from trainyard.errors import DiskError, DiskFull, UserError
from trainyard.files import (
    copy_folder,
    create_folder,
    fsync_path,
    make_folder_inside,
    name_failed_file,
    name_full_disk,
    read_file,
    remove_partial_folders,
    report_full_disk,
    write_atomically,
)
from trainyard.runs.tensor_file import create_tensor_file

JOBS = Path(__file__).parents[1] / "jobs"
FEWEST = {"antispoof": 51, "fingerprint": 8, "pricing": 8, "tinydet": 10, "twins": 2}


@pytest.mark.slow
def test_what_a_killed_process_of_the_same_process_id_left_is_in_nobodys_way(tmp_path):
    """In a container every process has the same id; all families write their synthetic data in one way."""
    families = sorted(path.parent.name for path in JOBS.glob("*/synthesis*") if path.suffix in ("", ".py"))
    assert families == sorted(FEWEST)
    for family in families:
        raw = tmp_path / f"{family}-synthetic"
        leftover = tmp_path / f".{raw.name}.0123abcd.partial"
        (leftover / "images").mkdir(parents=True)
        (leftover / "half").write_text("hal")
        load_family(JOBS, family, "pack").synthesize(raw, count=FEWEST[family], seed=0)
        assert any(raw.iterdir()) and not list(raw.rglob("half"))
        remove_partial_folders(raw)
        assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_folder_appears_when_it_is_complete_and_not_at_all_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), create_folder(tmp_path / "a"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with create_folder(tmp_path / "a") as folder:
        (folder / "file").touch()
        assert not (tmp_path / "a").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]
    (tmp_path / ".a.b.12.partial").mkdir()  # of a folder that is called a.b
    remove_partial_folders(tmp_path / "a")
    assert (tmp_path / ".a.b.12.partial").exists()


def test_a_flush_that_fails_names_the_file():
    with pytest.raises(OSError, match="'/dev/null'"):
        fsync_path(Path("/dev/null"))  # which cannot be flushed


def test_a_write_that_finds_no_room_names_file_size_and_room(tmp_path):
    """/dev/full refuses every write as a full disk does, for any user."""
    with pytest.raises(DiskFull) as caught, report_full_disk(Path("/")), Path("/dev/full").open("ab", 0) as full:
        with name_failed_file(tmp_path / "log", size_bytes=3000):
            full.write(b"x" * 3000)
    message = str(caught.value)
    assert f"{tmp_path}/log: not written: No space left on device. It needs 3 KiB. " in message
    assert f"GiB are free on the disk of {tmp_path} " in message and "\n" not in message


def test_a_write_of_a_family_that_finds_no_room_names_the_folder_that_it_wrote_to(tmp_path):
    with pytest.raises(DiskFull) as caught, report_full_disk(Path("/")), name_full_disk(tmp_path / "data"):
        with Path("/dev/full").open("wb", 0) as full:
            full.write(b"x")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/data: not written: ") and f"on the disk of {tmp_path} " in message


def test_a_copy_that_finds_no_room_names_the_copy_and_not_what_is_copied(tmp_path):
    """A file is copied to where /dev/full is, which refuses every write as a full disk does."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "full").write_bytes(b"x")
    with pytest.raises(OSError) as caught:
        copy_folder(tmp_path / "source", tmp_path / "copy", leave_out=lambda name: link(tmp_path / "copy" / name))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "copy" / "full"))


def link(path: Path) -> bool:
    path.symlink_to("/dev/full")
    return False


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_error_that_comes_from_a_full_or_read_only_disk_becomes_one(number, wrapped, tmp_path):
    with pytest.raises(DiskFull) as caught, report_full_disk(tmp_path):
        try:
            raise OSError(number, os.strerror(number))
        except OSError:
            if wrapped:
                raise UserError("not saved, for this reason") from None
            raise
    assert ("not saved, for this reason" if wrapped else os.strerror(number)) in str(caught.value)
    assert ("mounted for writing" in str(caught.value)) == (number == errno.EROFS and not wrapped)


def test_other_errors_stay_what_they_are(tmp_path):
    for error in (PermissionError(errno.EACCES, "no"), UserError("wrong"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, report_full_disk(tmp_path):
            raise error
        assert caught.value is error


def test_an_atomic_write_that_fails_says_what_it_was_for(tmp_path):
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "gone" / "file", "text")
    assert caught.value.filename == str(tmp_path / "gone" / "file") and caught.value.__notes__ == ["It needs 1 KiB."]


@pytest.mark.timeout(20)
def test_errors_that_name_each_other_as_their_context_are_passed_on(tmp_path):
    first, second = KeyError("first"), KeyError("second")
    second.__context__ = first
    first.__context__ = second
    with pytest.raises(KeyError) as caught, report_full_disk(tmp_path):
        raise second from None
    assert caught.value is second


def test_nothing_is_written_through_links_that_somebody_planted(tmp_path):
    run, private = tmp_path / "run", tmp_path / "private"
    run.mkdir()
    private.write_text("mine")
    for planted in (f".report.html.{os.getpid()}.partial", "report.html"):  # the first was the name of a partial file
        (run / planted).symlink_to(private)
    write_atomically(run / "report.html", "a page")
    with create_tensor_file(run / "weights.safetensors", {"a": (1,)}, metadata={}) as arrays:
        arrays["a"][:] = 1
    assert private.read_text() == "mine" and not (run / "report.html").is_symlink()
    (tmp_path / "home").mkdir()
    (run / "plots").symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match=r"plots: is a link, .* Remove it: rm /.*plots"):
        make_folder_inside(run / "plots")
    assert make_folder_inside(run / "ranks") == make_folder_inside(run / "ranks") == run / "ranks"


def test_a_new_folder_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with create_folder(tmp_path / "drawn") as folder:
        (folder / "bona").mkdir()
        for name in ("bona/1.wav", "list.csv"):
            (folder / name).write_text(name)
    made = [path.relative_to(folder) for path in flushed[:-1]]
    assert sorted(map(str, made)) == [".", "bona", "bona/1.wav", "list.csv"] and made[-1] == Path()
    assert flushed[-1] == tmp_path


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_rename_that_nfs_repeats_has_succeeded_and_one_of_nothing_has_not(tmp_path, monkeypatch, is_folder):
    def replace_twice(*names: Path | str, **folders: int | None) -> None:
        replace(*names, **folders)
        replace(*names, **folders)  # finds nothing to rename

    replace = os.replace
    monkeypatch.setattr(os, "replace", replace_twice)
    if is_folder:
        with create_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("content")
        assert (tmp_path / "new/file").read_text() == "content"
    else:
        for content in ("first", "second"):
            write_atomically(tmp_path / "new", content)
            assert (tmp_path / "new").read_text() == content
    monkeypatch.setattr(os, "replace", lambda source, target, **folders: replace(f"{source}.gone", target, **folders))
    for target in ("new", "other"):
        with pytest.raises(FileNotFoundError):
            write_atomically(tmp_path / target / "x" if is_folder else tmp_path / target, "third")
    assert is_folder or (tmp_path / "new").read_text() == "second"


def test_reading_a_small_file_takes_little_memory_however_large_it_may_be(tmp_path):
    path = tmp_path / "heartbeat.json"
    path.write_bytes(b"x" * 160)
    tracemalloc.start()
    assert read_file(path, most_bytes=2**30) == b"x" * 160
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    path.write_bytes(b"x" * (2**21 + 1))
    assert len(read_file(path, most_bytes=2**21 + 1)) == 2**21 + 1
    with pytest.raises(OSError, match="larger than 2097152 bytes"):
        read_file(path, most_bytes=2**21)


def test_an_error_of_the_disk_is_one_sentence_with_the_file_and_no_size(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(DiskError) as raised, report_full_disk(tmp_path), name_failed_file(file, size_bytes=99):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert str(raised.value).startswith(f"{file}: Input/output error (EIO): the disk, or the network to it, failed")
    assert "needs" not in str(raised.value)
    with pytest.raises(OSError, match="Input/output"), report_full_disk(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # of a terminal


def test_no_folder_for_temporary_files_is_one_sentence_with_what_to_type():
    code = (
        "import resource, tempfile; from pathlib import Path; from trainyard.errors import UserError\n"
        "from trainyard.files import report_full_disk\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no folder keeps a byte\n"
        "try:\n"
        "    with report_full_disk(Path('/')): tempfile.TemporaryDirectory()\n"
        "except UserError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("No folder for temporary files can be written to: ['")
    assert "export TMPDIR=FOLDER" in done.stdout
