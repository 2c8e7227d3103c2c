"""Uniforms are functions of (seed, stream, position) and nothing else."""

import numpy as np
import pytest
from scipy import stats

from trtspec.verify.randomness import PositionRandom, Stream


def test_the_same_key_gives_the_same_number_in_any_order():
    forward = [PositionRandom(7).uniform(Stream.TARGET, t) for t in range(20)]
    random = PositionRandom(7)
    assert [random.uniform(Stream.TARGET, t) for t in reversed(range(20))] == forward[::-1]


def test_numbers_are_the_published_ones():
    # A change here changes the text of every stored seed.
    got = [PositionRandom(1).uniform(Stream.TARGET, t) for t in range(3)]
    assert got == [0.3035680343067586, 0.35811448402596147, 0.9456775220595027]


def test_any_integer_is_a_seed():
    values = {PositionRandom(seed).uniform(Stream.TARGET, 0) for seed in (0, -1, 2**63, 2**64 - 2)}
    assert len(values) == 4
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize("vary", ["seed", "stream and index", "position"])
def test_numbers_are_uniform_and_uncorrelated_along_every_key(vary):
    if vary == "seed":
        sample = [PositionRandom(seed).uniform(Stream.TARGET, 3) for seed in range(4000)]
    elif vary == "position":
        sample = [PositionRandom(3).uniform(Stream.ACCEPT, t) for t in range(4000)]
    else:
        sample = [PositionRandom(3).uniform(s, 5, i) for i in range(1000) for s in Stream]
    assert stats.kstest(sample, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.05
