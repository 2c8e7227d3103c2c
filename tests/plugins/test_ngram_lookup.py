"""Prompt lookup on the device finds what the reference and the host's index find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trtspec_plugins.interpreter import Interpreter, launch_of
from trtspec_plugins.references.ngram_lookup import ngram_lookup

from trtspec.drafters.ngram import NgramIndex


def lookup(
    texts: list[list[int]],
    draft_length: int,
    shortest: int,
    longest: int,
    stop: int,
    interpreter: Interpreter,
) -> list[list[int]]:
    """Drafts of each text. What lies past a text is a token that would match everything."""
    width = max(map(len, texts)) + 3
    tokens = np.array([text + [text[-1]] * (width - len(text)) for text in texts])
    given = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "length": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "draft": torch.full((len(texts), draft_length), 77, dtype=torch.int32),
        "draft_len": torch.full((len(texts),), 77, dtype=torch.int32),
    }
    values = {"B": len(texts), "L": width, "D": draft_length, "STOP": stop}
    values |= {"MIN_NGRAM": shortest, "MAX_NGRAM": longest}
    launch = launch_of("ngram_lookup", values, given, {"BLOCK_L": 16, "BLOCK_D": 16})
    *_, draft, count = interpreter.run(launch).arguments
    found = [[int(token) for token in row[:n]] for row, n in zip(draft, count)]
    assert all(torch.all(row[n:] == -1) for row, n in zip(draft, count))
    return found


@pytest.mark.parametrize("stop", [-1, 0])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 8), (2, 4), (3, 3)])
def test_random_texts(shortest: int, longest: int, stop: int, interpreter: Interpreter) -> None:
    rng = np.random.default_rng(shortest * 10 + longest)
    lengths = (1, 2, 3, 17, 40, 60, 60)
    texts = [[int(token) for token in rng.integers(0, 4, length)] for length in lengths]
    found = lookup(texts, 9, shortest, longest, stop, interpreter)
    assert found == [ngram_lookup(text, 9, shortest, longest, stop) for text in texts]
    assert any(found)
    special = [] if stop < 0 else [stop]
    for text, draft in zip(texts, found):
        index = NgramIndex(shortest, longest, special)
        index.extend(text)
        match = index.match
        assert draft == ([] if match is None else index.continuation(match.following, 9))


def test_a_copy_that_reaches_the_end_goes_on_through_itself(interpreter: Interpreter) -> None:
    assert lookup([[9, 1, 2, 3, 1, 2, 3]], 8, 2, 3, -1, interpreter) == [[1, 2, 3, 1, 2, 3, 1, 2]]


def test_the_longest_match_wins_then_the_latest(interpreter: Interpreter) -> None:
    text = [5, 6, 7, 50, 6, 7, 51, 8, 6, 7, 52, 5, 6, 7]
    assert lookup([text], 1, 1, 3, -1, interpreter) == [[50]]
    assert lookup([text], 1, 1, 2, -1, interpreter) == [[52]]
