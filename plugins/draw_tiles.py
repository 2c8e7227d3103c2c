"""Draws tiles.svg: the rows of one 128-row tile, filled and wasted, for three models. `python plugins/draw_tiles.py`"""

from __future__ import annotations

from pathlib import Path

from trtspec.plan.tiles import mma_tiles, tile_draft_length

ROWS = 128
MODELS = (("Llama-3.1-8B", 32, 8), ("Qwen2.5-7B", 28, 4), ("Llama-3.1-70B", 64, 8))  # query heads, KV heads

_CELL, _ACROSS = 9, 16
_WIDTH, _HEIGHT = 960, 570
_TOKEN, _DRAFTS, _WASTED = "#d97706", ("#2563eb", "#7aa7f7"), "#e5e7eb"


def draw() -> str:
    """The picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(
            20,
            30,
            "One tile of the matrix unit: 128 rows, each one query head of one token",
            17,
            weight="bold",
        ),
    ]
    legend = (
        (_TOKEN, "the last token"),
        (_DRAFTS[0], "draft tokens, in turns of two shades"),
        (_WASTED, "wasted"),
    )
    for x, (colour, meaning) in zip((20, 150, 420), legend):
        parts += [_squares(colour, (x, 46)), _text(x + 14, 55, meaning, 12)]
    for index, (name, heads, kv_heads) in enumerate(MODELS):
        parts += _model(100 + 155 * index, name, heads, kv_heads)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _model(top: int, name: str, heads: int, kv_heads: int) -> list[str]:
    group = heads // kv_heads
    full = tile_draft_length(group, ROWS)
    cases = (
        (0, "no drafts: plain decoding"),
        (full, f"D = 128/{group} − 1{', rounded down' if ROWS % group else ': exactly one tile'}"),
        (full + 1, "one draft more: a second tile"),
    )
    parts = [
        _text(20, top + 20, name, 15, weight="bold"),
        _text(20, top + 40, f"{heads} query heads", 12),
        _text(20, top + 56, f"{kv_heads} KV heads", 12),
        _text(20, top + 76, f"G = {heads}/{kv_heads} = {group} rows a token", 12),
    ]
    for x, (length, title) in zip((190, 390, 650), cases):
        tiles = mma_tiles(group, length, ROWS)
        used = group * (length + 1)
        parts.append(_text(x, top + 8, title, 12, weight="bold"))
        for tile in range(tiles):
            parts += _tile(x + tile * (_CELL * _ACROSS + 8), top + 18, group, used, tile)
        count = f"D = {length}: {used} of {tiles * ROWS} rows work"
        parts.append(_text(x, top + 18 + _CELL * (ROWS // _ACROSS) + 16, count, 12))
    return parts


def _tile(left: int, top: int, group: int, used: int, tile: int) -> list[str]:
    """One tile as 8 lines of 16 rows; row m = t·G + g is coloured by its token t."""
    places: dict[str, list[tuple[int, int]]] = {}
    for place in range(ROWS):
        row = tile * ROWS + place
        token = row // group
        colour = _WASTED if row >= used else _TOKEN if token == 0 else _DRAFTS[token % 2]
        at = (left + place % _ACROSS * _CELL, top + place // _ACROSS * _CELL)
        places.setdefault(colour, []).append(at)
    return [_squares(colour, *squares) for colour, squares in places.items()]


def _squares(colour: str, *places: tuple[int, int]) -> str:
    """One path of a square at each (x, y)."""
    side = _CELL - 1
    return f'<path fill="{colour}" d="{"".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in places)}"/>'


def _text(x: int, y: int, text: str, size: int, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#111827">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("tiles.svg").write_text(draw(), encoding="utf-8")
