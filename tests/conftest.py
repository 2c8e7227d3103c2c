"""Fixtures every part's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published configs, prompts and field cases beside the checkout, where there is one."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of `tiny_models.VARIANTS` to a model folder, made once a session."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = write_tiny_model(variant, tmp_path_factory.mktemp(variant))
        return made[variant]

    return make
