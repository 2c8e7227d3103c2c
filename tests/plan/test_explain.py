"""The explanation: everything a reader asks, in 100 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.plan import plan_bare
from trtspec.plan.explain import WIDTH, explain, plot_curve, summary
from trtspec.plan.plot import plot_plan


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("meta-llama--Meta-Llama-3.1-70B", {"device": "b200"}),
        ("deepseek-ai--DeepSeek-V3", {"method": "mtp"}),
        ("nvidia--Gemma-4-31B-IT-NVFP4", {"device": "gb300"}),
        ("nvidia--Nemotron-H-56B-Base-8K", {"method": "ngram"}),
        ("HuggingFaceTB--SmolLM2-135M", {"device": "cpu"}),
        ("Qwen--Qwen2.5-7B-Instruct", {"method": "none"}),
        ("openai--gpt-oss-120b", {"method": "ngram", "batch_sizes": (32,)}),
    ],
)
def test_it_fits_the_terminal_and_has_every_section(published, name, settings) -> None:
    plan = plan_bare(published(name), **settings)
    text = explain(plan)
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    for title in (
        "Decision",
        "Roofline",
        "Attention staircase",
        "Candidates",
        "Memory of one rank",
        "Sources",
    ):
        assert f"{title} ─" in text
    assert summary(plan) in " ".join(text.split())
    if plan.method != "none":
        assert "decided by" in text
        assert "What would change the decision" in text
        assert plan.curve.source.split(";")[0] in " ".join(text.split())


def test_the_curve_marks_the_choice_and_the_guesses(llama_8b) -> None:
    plan = plan_bare(llama_8b, method="eagle3")
    lines = plot_curve(plan.batches[0].points, plan.draft_length)
    drawing = "\n".join(lines)
    assert drawing.count("●") == 1
    assert "∘ past the acceptance data" in drawing
    rows = [line for line in lines if "┤" in line]
    values = [float(line.split("×")[0]) for line in rows]
    assert values == sorted(values, reverse=True)
    marked = next(value for value, line in zip(values, rows) if "●" in line)
    assert marked == pytest.approx(plan.chosen.speedup, abs=(values[0] - values[-1]) / 16 + 0.01)


def test_the_staircase_says_what_fits_where(llama_8b) -> None:
    text = explain(plan_bare(llama_8b, method="eagle3", backend="tensorrt"))
    assert "M = 128, tiles: 1 up to D = 31, 2 up to D = 63" in text
    assert "of 128 rows" in text


def test_a_plot_file(llama_8b, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = plot_plan(plan_bare(llama_8b, method="eagle3"), tmp_path / "plan.png")
    assert file.read_bytes().startswith(b"\x89PNG")
