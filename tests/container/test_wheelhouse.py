"""Wheels for a machine without network: what goes into them, and that the pieces install there."""

import multiprocessing
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    """Return what calls functions in a process of its own: they import pip (see `own_folders`)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def pack(root: Path, *, python: str) -> Path:
    """Pack one wheel in pieces of 1 KiB; return the script that installs it."""
    from wheelhouse import pack_wheels

    make_wheel(root / "wheels")
    (root / "out").mkdir()
    return pack_wheels(root / "wheels", root / "out", python=python, piece_bytes=1024)


def make_wheel(folder: Path, *, needs: Sequence[str] = ()) -> None:
    """Write a wheel of one module that holds half a kilobyte."""
    about, name = "tiny-1.0.dist-info", "tiny-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", "Name: tiny", "Version: 1.0"]
    files = {
        "tiny.py": f"value = {'7' * 500!r}\n",
        f"{about}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {one}" for one in needs), ""]),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def install(script: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(["sh", script, "--quiet", "--target", site], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["cpu", "cuda12-pascal", "cuda12", "cuda13"])
def test_beside_torch_a_machine_needs_dali_and_nvjpeg_and_nothing_that_only_torch_needs(name):
    from targets import find_target, read_entries
    from wheelhouse import drop_packages

    lock = find_target(name).lock.read_text()
    kept, whole = read_entries(drop_packages(lock, ("torch", "torchvision"))), read_entries(lock)
    names = {entry[0] for entry in kept}
    assert all(entry in whole for entry in kept), "an entry has lost a hash"
    assert any(one.startswith("nvidia-dali") for one in names) and any(one.startswith("nvidia-nvjpeg") for one in names)
    assert {"numpy", "h5py", "filelock", "antlr4-python3-runtime"} <= names  # torch needs filelock, others do too
    gone = {entry[0] for entry in whole} - names
    assert {"torch", "torchvision", "triton", "sympy", "mpmath"} <= gone  # mpmath: what sympy needs
    assert not any(one.startswith(("nvidia-cudnn", "nvidia-nccl", "nvidia-cublas")) for one in names)


@pytest.mark.parametrize("name", ["cpu", "cuda12-pascal", "cuda12", "cuda13"])
def test_a_newer_python_gets_what_packages_need_only_there(name, apart):
    from targets import HERE, find_target
    from wheelhouse import add_packages_for

    lock, every_python = find_target(name).lock.read_text(), (HERE / "dev.lock").read_text()
    for python, added in (("3.11", ""), ("3.12", ""), ("3.13", "pyyaml-ft==8.0.0")):
        more = apart.submit(add_packages_for, python, lock, every_python).result().removeprefix(lock)
        assert more.partition(" ")[0] == added, python
        assert " ; " not in more and more.count("--hash=sha256:") >= (3 if added else 0)


def test_a_wheel_that_needs_what_is_missing_is_refused_by_name(tmp_path, apart):
    from engine import Mistake
    from wheelhouse import refuse_incomplete

    needs = ["torch", "colorama; sys_platform == 'win32'", "other[fast]>=2", "extra-only; extra == 'fast'"]
    make_wheel(tmp_path / "wheels", needs=[*needs, "new_one>=8; python_version >= '3.13'"])
    with pytest.raises(Mistake, match=r"^On Python 3.11, tiny needs other>=2, which the lock does not have.*make lock"):
        apart.submit(refuse_incomplete, tmp_path / "wheels", python="3.11", present=["torch"]).result()
    with pytest.raises(Mistake, match="tiny needs new_one>=8, which"):
        apart.submit(refuse_incomplete, tmp_path / "wheels", python="3.13", present=["torch", "other"]).result()
    apart.submit(refuse_incomplete, tmp_path / "wheels", python="3.12", present=["torch", "other"]).result()


@pytest.mark.slow
def test_pieces_are_joined_and_installed_without_an_index(tmp_path):
    pieces = pack(tmp_path, python=OWN)
    found = sorted(pieces.parent.glob("wheels.tar.*"))
    assert len(found) > 3 and max(piece.stat().st_size for piece in found) == 1024
    done = install(pieces, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "tiny.py").read_text() == f"value = {'7' * 500!r}\n"


@pytest.mark.slow
def test_a_damaged_piece_is_named_and_nothing_is_installed(tmp_path):
    pieces = pack(tmp_path, python=OWN)
    piece = pieces.with_name("wheels.tar.001")
    piece.write_bytes(bytes(1024))
    done = install(pieces, tmp_path / "site")
    assert done.returncode != 0 and "wheels.tar.001: FAILED" in done.stdout
    assert not (tmp_path / "site").exists()


def test_pieces_for_another_python_say_which_to_use(tmp_path):
    done = install(pack(tmp_path, python="3.99"), tmp_path / "site")
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "wheels: for Python 3.99, and this is 3." in done.stderr and "PYTHON=python3.99 sh install.sh" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pieces", "-3"], "--pieces -3: expected a whole number of MiB, 1 or more, such as --pieces 60"),
        (["--pieces", "0"], "--pieces 0: expected a whole number of MiB"),
        (["--pieces", "sixty"], "--pieces sixty: expected a whole number of MiB"),
        (["--pieces", "6.5"], "--pieces 6.5: expected a whole number of MiB"),
        (["--python", "3"], "--python 3: expected a version of Python, such as --python 3.12"),
    ],
)
def test_a_wrong_number_is_one_sentence_before_anything_is_downloaded(words, expected, tmp_path, capfd):
    import image

    assert image.main(["wheelhouse", "cpu", str(tmp_path / "wheels"), *words], {"PATH": "/nowhere"}) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith(expected) and said.err.count("\n") == 1
    assert not (tmp_path / "wheels").exists()
