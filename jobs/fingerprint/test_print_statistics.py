"""Statistics of sets of prints, and their command."""

import argparse
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainyard.errors import UserError

from .commands import add
from .print_statistics import COLUMNS, find_foreground, measure_print
from .synthesis import synthesize


def run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    args = parser.parse_args(["fingerprint-statistics", *words])
    assert args.command(args) == 0


def draw_stripes(period: float) -> np.ndarray:
    """Return (352, 320) with vertical stripes in its middle, white around."""
    y, x = np.mgrid[:352, :320]
    stripes = 128 + 100 * np.sin(2 * np.pi * x / period)
    inside = (np.abs(y - 170) < 120) & (np.abs(x - 150) < 100)
    return np.where(inside, stripes, 255).astype(np.uint8)


def test_period_area_centre_and_background_of_stripes_are_measured() -> None:
    figures = measure_print(draw_stripes(9))
    assert figures.period == pytest.approx(9, abs=0.35)  # frequencies are 1/128 cycles per px apart
    assert 240 * 200 < figures.area < 270 * 250, "contrast is smooth over 12 px, so the foreground reaches further"
    assert figures.centroid == pytest.approx((170, 150), abs=2)
    assert figures.background == 255 and figures.coherence > 0.9 and figures.minutiae < 5
    assert not find_foreground(np.full((100, 90), 200, np.uint8)).any()


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthesize(tmp_path / "made", count=9, seed=5)
    for number in range(3, 9):
        (tmp_path / "made" / f"00001_{number}.png").unlink()
    run(str(tmp_path / "made"), "--synthetic", "9", "--seed", "5", "--sheet", str(tmp_path / "sheet.png"))
    first, header, made, generated = capsys.readouterr().out.splitlines()
    assert first == f"written: {tmp_path / 'sheet.png'}"
    assert header.split() == " ".join(COLUMNS).split()
    assert made.split()[:3] == ["made", "3", "2"] and len(made.split()) == len(COLUMNS)
    assert generated.split()[:5] == ["synthetic,", "seed", "5", "9", "2"]
    assert 7 < float(generated.split()[5]) < 11.5 and 40 < int(generated.split()[8]) < 110
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (6 * 320, 6 * 352)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "Type --synthetic 240|type --synthetic 240"),
        (["--synthetic", "8"], "Type --synthetic 16"),
        (["--synthetic", "-1"], "Type --synthetic 240"),
        (["{folder}/missing"], "no such folder. Name a folder"),
        (["{folder}"], "found 1 prints of 1 fingers. Name a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_type(words: list[str], message: str, tmp_path: Path) -> None:
    Image.fromarray(draw_stripes(9)).save(tmp_path / "101_1.png")
    with pytest.raises(UserError, match=message):
        run(*(word.format(folder=tmp_path) for word in words))
