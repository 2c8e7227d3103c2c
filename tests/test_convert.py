"""`trtspec convert`: a head for another runtime, bit for bit, with the numbering of its layers said in both ways."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_heads import REDUCED, tiny_head
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.checkpoints.head_layouts.head import read_tensors
from trtspec.cli import main


def converted(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    main(["convert", *map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_head_goes_round_every_layout_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tiny_head("eagle3", d2t=REDUCED, captured=(0, 2), bfloat16=True)
    eagle.write_head(head, tmp_path / "0", "specforge")
    layouts = ("speculators", "modelopt", "eagle", "specforge")
    for index, layout in enumerate(layouts):
        answer = converted(capsys, tmp_path / str(index), "--to", layout, "--out", tmp_path / str(index + 1))
        assert answer["ok"], answer
        assert answer["result"]["captured_layers"] == [0, 2]
        assert answer["result"]["captured_after_blocks"] == [1, 3]
    first, last = (read_tensors(tmp_path / str(i)) for i in (0, len(layouts)))
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)
    assert (tmp_path / "0" / "config.json").read_bytes() == (tmp_path / "4" / "config.json").read_bytes()


def test_what_cannot_be_converted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model
) -> None:
    mtp.write_head(tiny_head("mtp"), tmp_path / "mtp")
    answer = converted(capsys, tmp_path / "mtp", "--to", "modelopt", "--out", tmp_path / "a")
    assert "a head for mtp, which has one layout" in answer["error"]["message"]
    eagle.write_head(tiny_head("eagle3"), tmp_path / "head")
    answer = converted(capsys, tmp_path / "head", "--to", "modelopt", "--out", tmp_path / "head")
    assert "not empty" in answer["error"]["message"]
    eagle.write_head(tiny_head("eagle3", num_target_layers=9), tmp_path / "other")
    answer = converted(
        capsys,
        tmp_path / "other",
        "--to",
        "modelopt",
        "--out",
        tmp_path / "b",
        "--target",
        tiny_model("llama"),
    )
    assert "made for a target of 9 layers" in answer["error"]["message"]
