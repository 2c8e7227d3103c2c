from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quantize.tiny_llama import write_model
from trtspec.quantize import QuantizeReport, QuantizeRequest, corpora, quantize
from trtspec.quantize.corpora import heldout_ids


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied random Llama most tests share; never written to."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[QuantizeReport, Path]]:
    """run(model, format, …) → (report, export folder), with little text and no perplexity limit."""
    monkeypatch.setattr(corpora, "heldout_ids", lambda tokenizer: heldout_ids(tokenizer)[:3])

    def quantized(model: Path, name: str, **options: object) -> tuple[QuantizeReport, Path]:
        into = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
        settings = {"calibration_samples": 4, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
        return quantize(QuantizeRequest(model, name, **settings | options), into), into

    return quantized
