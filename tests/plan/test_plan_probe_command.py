"""`trtspec plan --probe BUILD`: this machine is timed, and the plan stands on those times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trtspec.cli import main

QUICKSTART = str(ROOT / "build_configs" / "quickstart.yaml")


@pytest.mark.model
def test_the_probe_s_times_are_the_plan_s_and_can_be_used_again(
    quickstart_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "probe.json"
    arguments = ["plan", QUICKSTART, "--json"]
    assert main([*arguments, "--probe", str(quickstart_build), "--save-probe", str(saved)]) == 0
    probed = json.loads(capsys.readouterr().out)["result"]
    assert main([*arguments, "--measured", str(saved)]) == 0
    again = json.loads(capsys.readouterr().out)["result"]
    assert probed["verify_step_ms"] == again["verify_step_ms"]
    assert probed["step_time_source"] != "roofline model"
    assert probed["verify_step_ms"] == sorted(probed["verify_step_ms"])


def test_a_probe_needs_a_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", QUICKSTART, "--save-probe", str(tmp_path / "probe.json")]) == 2
    assert "--probe BUILD" in capsys.readouterr().err
    assert main(["plan", QUICKSTART, "--probe", str(tmp_path)]) == 3
    assert "not an engine folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
