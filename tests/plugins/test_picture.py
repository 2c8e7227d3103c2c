"""The README's picture is drawn by code, from the planner's own formula."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parent.parent.parent / "plugins"


@pytest.fixture(scope="module")
def picture() -> str:
    return runpy.run_path(str(PLUGINS / "draw_tiles.py"))["draw"]()


def test_the_picture_is_the_one_the_code_draws(picture: str) -> None:
    assert (PLUGINS / "tiles.svg").read_text(encoding="utf-8") == picture


def test_every_row_of_every_tile_is_drawn(picture: str) -> None:
    counts = re.findall(r"D = (\d+): (\d+) of (\d+) rows work", picture)
    assert [tuple(map(int, row)) for row in counts] == [
        (0, 4, 128), (31, 128, 128), (32, 132, 256),
        (0, 7, 128), (17, 126, 128), (18, 133, 256),
        (0, 8, 128), (15, 128, 128), (16, 136, 256),
    ]  # fmt: skip
    paths = re.findall(r'<path fill="(#\w+)" d="([^"]+)"', picture)
    drawn = sum(path.count("M") for _, path in paths) - 3  # three of them in the legend
    assert drawn == sum(int(total) for _, _, total in counts)
    wasted = sum(path.count("M") for colour, path in paths if colour == "#e5e7eb") - 1
    assert wasted == sum(int(total) - int(used) for _, used, total in counts)
