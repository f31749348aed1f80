"""Synthetic faces."""

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainyard.errors import UserError

from .pack import synthesize
from .synthesis import IMAGES_PER_FAMILY, PAIRS, draw_face, draw_images


@pytest.mark.slow
def test_synthetic_faces_are_reproducible(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=2 * IMAGES_PER_FAMILY + 6, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.jp*g"))
    assert len(files) == 2 * IMAGES_PER_FAMILY + 6
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    assert json.loads((tmp_path / "once" / PAIRS).read_text()) == [
        ["00010", "00011"],
        ["00020", "00021"],
        ["00030", "00031"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(OSError, match="not empty"):
        synthesize(tmp_path / "once", count=48, seed=3)
    with pytest.raises(UserError, match="expected an even number"):
        synthesize(tmp_path / "odd", count=47, seed=3)


def test_twins_share_a_genome_and_differ_in_marks_except_at_difficulty_one() -> None:
    one, other = (draw_face(0, 5, twin, 0.3) for twin in (0, 1))
    stranger = draw_face(0, 6, 0, 0.3)
    assert np.array_equal(one.texture, other.texture) and one.moles[:2] == other.moles[:2]
    assert one.moles[2:] != other.moles[2:]
    distance = [sum(abs(one.traits[n] - face.traits[n]) for n in one.traits) for face in (other, stranger)]
    assert 0 < distance[0] < 0.5 * distance[1]
    same, again = (draw_face(0, 5, twin, 1.0) for twin in (0, 1))
    assert same.traits == again.traits and not any(mole.darkness for mole in same.moles[2:])


@pytest.mark.slow
def test_images_of_strangers_differ_more_than_those_of_twins() -> None:
    def average_face(family: int, twin: int) -> np.ndarray:
        images = itertools.islice(draw_images(0, family, twin), 12)
        faces = [np.asarray(Image.open(io.BytesIO(image)).convert("L"), float)[24:76, 24:72] for image in images]
        average: np.ndarray = np.stack(faces).mean(axis=0)
        return average

    found = {(f, t): average_face(f, t) for f in range(6) for t in range(2)}

    def distance(a: tuple[int, int], b: tuple[int, int]) -> float:
        x, y = (found[k] - found[k].mean() for k in (a, b))
        return float(1 - (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))

    twins = np.mean([distance((f, 0), (f, 1)) for f in range(6)])
    strangers = np.mean([distance((f, 0), (g, 0)) for f in range(6) for g in range(f)])
    assert twins < 0.5 * strangers
