"""Fixtures that many tests share: raw and packed images."""

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from loguru import logger

from tests.images import pack_folder, write_folder
from trainyard.data.shards import ShardSet

# The same examples in every run, however loaded the machine is, so that no failure is a matter of chance.
hypothesis.settings.register_profile("trainyard", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("trainyard")


@pytest.fixture(scope="session")
def raw_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 26 gray images of 7 identities."""
    return write_folder(tmp_path_factory.mktemp("data") / "raw", 26)


@pytest.fixture(scope="session")
def packed_images(raw_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return these images packed into several shards."""
    out = tmp_path_factory.mktemp("data") / "packed"
    pack_folder(raw_images, out).close()
    return out


@pytest.fixture
def images(packed_images: Path) -> ShardSet:
    """Return the packed images, opened."""
    return ShardSet(packed_images)


@pytest.fixture
def packed_copy(packed_images: Path, tmp_path: Path) -> Path:
    """Return a copy of the packed images that a test may damage."""
    return Path(shutil.copytree(packed_images, tmp_path / "packed_copy"))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of tests/format_1 as the current folder: packed data, a finished run that read it, and a sweep."""
    folder = Path(shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "stored"))
    for path in folder.rglob("*.h5.gz"):  # most of their bytes are zeros
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the messages that are logged while the test runs."""
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    yield lines
    logger.remove(sink)
