"""One interpreter process for all kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from trtspec_plugins.interpreter import Interpreter


@pytest.fixture(scope="session")
def triton() -> None:
    """Skips where the kernels' compiler is not installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install triton==3.7.1")


@pytest.fixture(scope="session")
def interpreter(triton: None) -> Iterator[Interpreter]:
    """Runs kernels on the CPU, in a process of its own."""
    with Interpreter() as running:
        yield running
