"""Packed data that several of the family's tests share; no test may modify it."""

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import pytest

from tests.cases.tinydet import TiledData, make_config, make_entry, pack_folder, write_coco, write_rectangles
from trainyard.data.shards import ShardSet
from trainyard.train.module import DataInfo

from .config import Config
from .pack import samples


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ShardSet, Config]]:
    """12 images with a red and a green rectangle each."""
    folder = tmp_path_factory.mktemp("painted")
    raw = write_rectangles(folder / "raw")
    config = Config()
    config.image.channels, config.image.fit, config.image.fill = 3, "letterbox", 0
    config.image.height_px, config.image.width_px = 96, 128
    data = pack_folder(raw, folder / "packed", config)
    yield data, config
    data.close()


@pytest.fixture(scope="session")
def packed_tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TiledData]:
    """Three images, cut into overlapping tiles that share objects."""
    folder = tmp_path_factory.mktemp("tiles")
    raw = write_coco(
        folder / "raw",
        annotations=[
            make_entry(16, 5, 10, 8),
            make_entry(40, 20, 6, 6, id=2),
            make_entry(2, 2, 5, 5, id=3, image_id=15),
        ],
    )
    config = make_config()
    config.packing.tile_px, config.packing.tile_overlap, config.packing.tile_visible = 32, 0.5, 0.1
    data = pack_folder(raw, folder / "packed", config)
    yield DataInfo.from_shards(data, np.arange(data.count)), config, list(samples(raw, config))
    data.close()


@pytest.fixture
def tiled_data(packed_tiles: TiledData) -> TiledData:
    """The shared tiles, with a config that the test may change."""
    data, config, listed = packed_tiles
    return data, deepcopy(config), listed
