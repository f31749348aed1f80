"""Synthetic prints."""

import io
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases.fingerprint import make_module, make_rows
from tests.images import is_running, list_descendants, make_import_environ
from tests.waiting import wait_until
from trainyard.data.prepare import StopRequested

from .pack import synthesize
from .synthesis import (
    Master,
    draw_contact_sheet,
    draw_impression,
    find_minutiae,
    generate_impressions,
    grow_master,
    map_minutiae,
)
from .synthesis.impressions import sample
from .synthesis.masters import CELL_PX, COLUMNS, ROWS, draw_orientation_field, draw_singular_points
from .synthesis.minutiae import count_crossings, find_crossings, thin

JOBS = Path(__file__).parents[1]
OLD_NS = 1_700_000_000 * 10**9


@cache
def grow(finger: int) -> Master:
    return grow_master(0, finger)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 65 prints, nine fingers, which two processes wrote in one go."""
    folder = tmp_path_factory.mktemp("whole") / "raw"
    synthesize(folder, count=65, seed=0)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_one_process_and_several_generate_the_same_prints(whole: Path, tmp_path: Path) -> None:
    synthesize(tmp_path / "raw", count=19, seed=0)
    few, many = read_files(tmp_path / "raw"), read_files(whole)
    assert sorted(few) == [f"{f:05d}_{i}.png" for f in (1, 2) for i in range(1, 9)] + [
        f"00003_{i}.png" for i in (1, 2, 3)
    ]
    assert few.items() <= many.items() and len(many) == 65
    with Image.open(whole / "00009_1.png") as image:
        assert np.array_equal(np.asarray(image), next(generate_impressions(0, 8)))


@pytest.mark.slow
def test_prints_that_were_killed_halfway_are_finished_by_two_at_once_without_drawing_any_again(
    whole: Path, tmp_path: Path
) -> None:
    work = (
        "from pathlib import Path; from trainyard.config.compose import compose; "
        "from trainyard.data.prepare import prepare_data; "
        f"options = ['data.synthetic=65', 'data.cache={tmp_path}']; "
        f"prepare_data(compose('fingerprint_smoke', options, Path({str(JOBS)!r})), Path({str(JOBS)!r}))"
    )

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", work]
        return subprocess.Popen(command, env=make_import_environ(), stderr=subprocess.PIPE, text=True)

    def list_prints() -> list[Path]:
        return list(tmp_path.glob("fingerprint-synthetic-65-*.partial/*.png"))

    def list_complete() -> list[str]:
        return [finger for finger, prints in Counter(path.name[:5] for path in list_prints()).items() if prints == 8]

    killed = start()
    wait_until(lambda: len(list_complete()) >= 2 and len(list_prints()) > 16, "two fingers and a print", process=killed)
    workers = list_descendants(killed.pid)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not any(map(is_running, workers)), "the end of the workers")
    (unfinished,) = tmp_path.glob("fingerprint-synthetic-*")
    assert unfinished.suffix == ".partial" and len(list_prints()) < 65
    (unfinished / ".00009_1.png.7.partial").touch()
    first, second, *_ = list_complete()
    kept = {path.name for path in unfinished.glob(f"{first}_*.png")}
    (unfinished / f"{second}_3.png").write_bytes(b"")  # as a power cut leaves it
    newest = next(path for path in list_prints() if path.name[:5] not in (first, second))
    for path in set(list_prints()) - {newest}:
        os.utime(path, ns=(OLD_NS, OLD_NS))  # what was drawn in the last two minutes is drawn again
    for process in [start(), start()]:
        said = process.communicate()[1]
        assert process.returncode == 0, said
    (raw,) = tmp_path.glob("fingerprint-synthetic-*")
    assert raw.suffix == "" and read_files(raw) == read_files(whole)
    assert len(kept) == 8 and kept <= {path.name for path in raw.iterdir() if path.stat().st_mtime_ns == OLD_NS}


def test_an_interruption_stops_after_a_finger_and_is_finished_by_the_next_call(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        synthesize(tmp_path / "raw", count=9, seed=0, hook=interrupt)
    assert len(read_files(tmp_path / "raw")) == 8
    synthesize(tmp_path / "raw", count=9, seed=0)
    assert len(read_files(tmp_path / "raw")) == 9


def test_an_impression_does_not_depend_on_those_drawn_before() -> None:
    alone = draw_impression(grow(0), 0, 0, 3)
    assert np.array_equal(alone.image, list(islice(generate_impressions(0, 0), 3))[2])
    assert not np.array_equal(alone.image, draw_impression(grow(0), 0, 0, 2).image)
    with Image.open(io.BytesIO(draw_contact_sheet(0, [1, 0], [2, 3]))) as sheet:
        assert sheet.size == (2 * 320, 2 * 352)
        assert np.array_equal(np.asarray(sheet)[352:, 320:], alone.image)


@pytest.mark.slow
def test_synthetic_prints_have_a_realistic_ridge_period() -> None:
    period_px = []
    for number in range(6):
        image = next(generate_impressions(0, number))[112:240, 96:224].astype(float)
        spectrum = np.abs(np.fft.fft2((image - image.mean()) * np.outer(np.hanning(128), np.hanning(128))))
        frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(128), np.fft.fftfreq(128)))
        spectrum[frequency < 1 / 20] = 0
        period_px.append(1 / frequency.flat[spectrum.argmax()])
    assert 7.0 < np.median(period_px) < 11.5  # 9.1 +- 0.9 px at 500 dpi in real prints


@pytest.mark.slow
def test_impressions_of_one_finger_are_more_alike_than_those_of_two() -> None:
    prints, finger = [], []
    for number in range(12):
        for image in islice(generate_impressions(0, number), 3):
            prints.append(compute_orientation_map(image))
            finger.append(number)
    metrics = make_module().score(make_rows(np.stack(prints), np.array(finger)))
    assert metrics["eer_all_pairs"] < 0.35


def compute_orientation_map(image: np.ndarray) -> np.ndarray:
    """Return the doubled-angle orientation of 11 x 10 cells, as one vector."""
    dy, dx = np.gradient(image.astype(float))
    cells = [v.reshape(11, 32, 10, 32).mean(axis=(1, 3)) for v in (dx * dx - dy * dy, 2 * dx * dy)]
    return np.concatenate([v.ravel() for v in cells])


def test_an_impression_shows_its_master_where_its_displacement_says() -> None:
    for number in range(1, 7):
        impression = draw_impression(grow(0), 0, 0, number)
        inside = impression.contact
        assert 0.2 < inside.mean() < 0.95
        image = impression.image[inside].astype(float)
        right, wrong = (
            -np.corrcoef(sample(grow(0).ridges, impression.source_y + off, impression.source_x)[inside], image)[0, 1]
            for off in (0, 4)
        )
        assert right > 0.45 and right > wrong + 0.4, "4 px off is on the valley next to the ridge, where it lies flat"


@pytest.mark.parametrize("kind, loops, deltas", [("left", 1, 1), ("right", 1, 1), ("tented", 1, 1), ("whorl", 2, 2)])
def test_ridges_turn_once_around_loops_and_back_around_deltas(kind: str, loops: int, deltas: int) -> None:
    rng = np.random.default_rng(2)
    points = draw_singular_points(rng, kind)
    assert (len(points[0]), len(points[1])) == (loops, deltas)
    if loops == 1 and kind != "tented":
        assert (points[1][0][0] > points[0][0][0]) == (kind == "left"), "a left loop has its delta on the right"
    angle = draw_orientation_field(rng, kind, *points)
    around = np.linspace(0, 2 * np.pi, 41)
    for turns, singular in zip((1, -1), points, strict=True):
        for x, y in singular:
            column = ((x + 8 * np.cos(around)) / CELL_PX + COLUMNS / 2 - 0.5).round().astype(int)
            row = (ROWS / 2 - 0.5 - (y + 8 * np.sin(around)) / CELL_PX).round().astype(int)
            doubled = np.unwrap(2 * angle[row, column])
            assert round((doubled[-1] - doubled[0]) / (2 * np.pi)) == turns


def test_masters_have_as_many_minutiae_as_fingers_and_each_is_where_a_ridge_ends_or_forks() -> None:
    counts = []
    for finger in range(4):
        minutiae = find_minutiae(grow(finger))
        counts.append(len(minutiae))
        row, column = minutiae.y.astype(int), minutiae.x.astype(int)
        crossings = count_crossings(thin(grow(finger).ridges > 0))[row, column]
        assert np.array_equal(crossings, np.where(minutiae.is_bifurcation, 3, 1))
        assert np.abs(np.sin(minutiae.direction - grow(finger).angle[row // 2, column // 2])).max() < 1e-3
    assert min(counts) >= 20 and max(counts) <= 80, f"minutiae of four fingers: {counts}"


def test_minutiae_of_a_drawn_ridge_have_the_direction_of_iso_19794_2() -> None:
    ridges = -np.ones((448, 384), dtype=np.float32)
    ridges[200:205, :150] = 1  # comes from the left and ends
    ridges[300:305, :190] = 1
    for i in range(60):  # forks to the right
        ridges[300 - i // 2 : 305 - i // 2, 190 + i :] = -1
        ridges[300 - i // 2 : 305 - i // 2, 190 + i] = ridges[300 + i // 2 : 305 + i // 2, 190 + i] = 1
    flat = np.zeros((ROWS, COLUMNS), dtype=np.float32)
    minutiae = find_minutiae(Master("left", [], [], flat, flat, ridges, ridges))
    found = {
        (bool(fork), round(float(np.cos(direction))))
        for fork, direction in zip(minutiae.is_bifurcation, minutiae.direction, strict=True)
    }
    assert (False, -1) in found, "an ending points back along its ridge"
    assert (True, 1) in found, "a bifurcation points between its branches"


def test_minutiae_are_mapped_to_where_impressions_show_them() -> None:
    minutiae = find_minutiae(grow(1))
    turns = []
    for number in (1, 2, 3):
        impression = draw_impression(grow(1), 0, 1, number)
        shown, is_shown = map_minutiae(minutiae, impression)
        assert len(shown) == len(is_shown) == len(minutiae) and 8 <= is_shown.sum() <= len(minutiae)
        source_y, source_x = impression.look_up_source(shown.y[is_shown], shown.x[is_shown])
        error = np.hypot(source_y - minutiae.y[is_shown], source_x - minutiae.x[is_shown])
        assert np.quantile(error, 0.9) < 0.1, "of a sweep, a strip may hide the exact place"
        turn = np.angle(np.exp(1j * (shown.direction - minutiae.direction)))[is_shown]
        assert turn.std() < np.radians(15), "all turn with the finger, but for what bends"
        turns.append(turn.mean())
    assert np.ptp(turns) > np.radians(1)


def test_thinning_keeps_a_ring_a_ring_and_a_bar_a_line() -> None:
    y, x = np.mgrid[:100, :100] - 50
    ring = np.abs(np.hypot(y, x) - 30) < 4
    skeleton = thin(ring)
    assert (count_crossings(skeleton)[skeleton] == 2).all() and 150 < skeleton.sum() < 200
    bar = np.zeros((100, 100), dtype=bool)
    bar[48:53, 20:80] = True
    row, column, is_bifurcation = find_crossings(thin(bar), np.ones_like(bar))
    assert len(row) == 2 and not is_bifurcation.any() and np.ptp(column) > 50
