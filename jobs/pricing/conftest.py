"""Data that several tests of this family read; none may change it."""

from pathlib import Path

import pytest

from tests.cases.pricing import make_config, pack_catalogue
from trainyard.data.shards import ShardSet

from .pack import synthesize


@pytest.fixture(scope="session")
def catalogue_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a synthetic catalogue of 400 rows."""
    folder = tmp_path_factory.mktemp("catalogue") / "raw"
    synthesize(folder, count=400, seed=3)
    return folder


@pytest.fixture(scope="session")
def data(catalogue_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """The same catalogue, packed."""
    return pack_catalogue(catalogue_folder, make_config(), tmp_path_factory.mktemp("packed") / "out")
