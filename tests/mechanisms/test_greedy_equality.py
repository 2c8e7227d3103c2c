"""Greedy output with every mechanism, as chains and as trees, is plain greedy output, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mechanisms.conftest import BuildOf, tiny_requests
from tests.mechanisms.lossless import FLOAT32, Row, build_engine, compare, missing, prompts
from tests.mechanisms.table import CASES, MECHANISMS, Form, decode, without_an_entry
from trtspec.values import Completion, GenerationRequest

Plain = tuple[list[GenerationRequest], list[Completion]]


def test_every_mechanism_that_runs_here_is_in_the_table() -> None:
    assert not without_an_entry(), "add one entry each to MECHANISMS in tests/mechanisms/table.py"


def assert_lossless(row: Row) -> None:
    assert row.different == 0
    assert row.drafted > row.accepted > row.tokens / 50, "drafts were hardly ever accepted, or never rejected"


# -- on a tiny model, in every test run


@pytest.fixture(scope="module")
def tiny_plain(tiny_build: BuildOf) -> Plain:
    requests = tiny_requests(6)
    return requests, decode(tiny_build("none") / "engine", requests, None)


@pytest.mark.model
@pytest.mark.parametrize(("method", "form"), CASES)
def test_a_tiny_model_writes_the_same(
    tiny_build: BuildOf, tiny_plain: Plain, method: str, form: Form
) -> None:
    requests, plain = tiny_plain
    engine = tiny_build(method) / "engine"
    if MECHANISMS[method].own_target:
        plain = decode(engine, requests, None)
    row = compare(method, form, engine, requests, plain)
    assert row.tokens > 1000
    assert_lossless(row)


# -- on the real model in float32: minutes for each case


@pytest.fixture(scope="module")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> BuildOf:
    made: dict[str, Path] = {}

    def make(method: str) -> Path:
        if why := missing(method):
            pytest.skip(why)
        if method not in made:
            made[method] = build_engine(method, tmp_path_factory.mktemp(method), *FLOAT32)
        return made[method]

    return make


@pytest.fixture(scope="module")
def real_plain(real_engine: BuildOf) -> Plain:
    """Plain decoding once for all builds that hold the same target."""
    engine = real_engine(next(iter(MECHANISMS)))
    requests = prompts(engine, 10_000)
    return requests, decode(engine, requests, None)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize(("method", "form"), CASES)
def test_ten_thousand_tokens_of_the_real_model_are_the_same(
    real_engine: BuildOf, real_plain: Plain, method: str, form: Form
) -> None:
    engine, (requests, plain) = real_engine(method), real_plain
    if MECHANISMS[method].own_target:
        plain = decode(engine, requests, None)
    row = compare(method, form, engine, requests, plain)
    assert row.tokens >= 10_000
    assert_lossless(row)
