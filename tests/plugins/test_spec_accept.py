"""Acceptance: the kernel does what the reference does, and the reference is distributed as the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from trtspec_plugins.interpreter import Interpreter, launch_of
from trtspec_plugins.references import spec_accept as reference

from trtspec.verify.randomness import Stream


@dataclass(frozen=True, slots=True)
class Batch:
    """p, q [B, T, V] fp32; tokens [B, T]; q_len, seeds, positions [B]."""

    p: np.ndarray
    q: np.ndarray | None
    tokens: np.ndarray
    q_len: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


def accept(batch: Batch, interpreter: Interpreter, slices: int = 1, block: int = 16) -> list[list[int]]:
    """Tokens each sequence emits, by the kernels. What they must not read is NaN."""
    rows, tokens, vocabulary = batch.p.shape
    p, q = batch.p.copy(), None if batch.q is None else batch.q.copy()
    for b, valid in enumerate(batch.q_len):
        p[b, valid:] = np.nan
        if q is not None:
            q[b, max(valid - 1, 0) :] = np.nan
    words = np.stack([batch.seeds & 0xFFFFFFFF, batch.seeds >> 32], 1).astype(np.uint32).view(np.int32)
    given = {
        "p": torch.tensor(p),
        "tokens": torch.tensor(batch.tokens, dtype=torch.int32),
        "q_len": torch.tensor(batch.q_len, dtype=torch.int32),
        "seed": torch.tensor(words),
        "position": torch.tensor(batch.positions, dtype=torch.int32),
        "score": torch.full((rows, tokens, slices), float("nan")),
        "winner": torch.full((rows, tokens, slices), -77, dtype=torch.int32),
    }
    if q is not None:
        given["q"] = torch.tensor(q)
    values = {"B": rows, "T": tokens, "V": vocabulary, "NSPLIT": slices}
    width = 1 << (tokens - 1).bit_length() if tokens > 1 else 2
    constants = {"HAS_Q": int(q is not None), "BLOCK_T": width, "BLOCK_V": block}
    *_, score, winner = interpreter.run(launch_of("spec_accept", values, given, constants)).arguments
    given |= {
        "score": score,
        "winner": winner,
        "emitted": torch.full((rows, tokens), -77, dtype=torch.int32),
        "accepted": torch.full((rows,), -77, dtype=torch.int32),
    }
    launch = launch_of("spec_accept_combine", values, given, {"BLOCK_T": width})
    *_, emitted, accepted = interpreter.run(launch).arguments
    result = [[int(token) for token in row if token >= 0] for row in emitted]
    for row, count, tokens_out in zip(emitted, accepted, result):
        assert int(count) == max(len(tokens_out) - 1, 0)
        assert torch.all(row[len(tokens_out) :] == -1)
    return result


def random_batch(rows: int, tokens: int, vocabulary: int, with_q: bool, seed: int) -> Batch:
    """Ragged; drafts come from a q that is near p, or are often what the target draws: some pass, some do not."""
    rng = np.random.default_rng(seed)
    seeds, positions = rng.integers(0, 2**63, rows), rng.integers(0, 1000, rows)
    p = rng.dirichlet(np.full(vocabulary, 0.5), (rows, tokens)).astype(np.float32)
    q = (0.6 * p + 0.4 * rng.dirichlet(np.full(vocabulary, 0.5), (rows, tokens))).astype(np.float32)
    drafts = np.zeros((rows, tokens), int)
    for b in range(rows):
        for t in range(tokens - 1):
            proposal = q[b, t].astype(float)
            drafts[b, t + 1] = rng.choice(vocabulary, p=proposal / proposal.sum())
            if not with_q and rng.random() < 0.6:
                drafts[b, t + 1] = reference.race(
                    p[b, t], int(seeds[b]), int(positions[b]) + t, Stream.TARGET
                )
    return Batch(p, q if with_q else None, drafts, rng.integers(0, tokens + 1, rows), seeds, positions)


def by_reference(batch: Batch) -> list[list[int]]:
    return [
        reference.spec_accept(
            batch.p[b], None if batch.q is None else batch.q[b], batch.tokens[b],
            int(batch.q_len[b]), int(batch.seeds[b]), int(batch.positions[b]),
        )
        for b in range(len(batch.p))
    ]  # fmt: skip


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize(("slices", "block"), [(1, 16), (3, 8)])
def test_the_kernel_decides_as_the_reference(
    with_q: bool, slices: int, block: int, interpreter: Interpreter
) -> None:
    """Token by token, whatever the vocabulary is cut into."""
    batch = random_batch(18, 5, 13, with_q, seed=7)
    wanted = by_reference(batch)
    assert accept(batch, interpreter, slices, block) == wanted
    lengths = [len(tokens) for tokens in wanted]
    assert min(lengths) == 0 and max(lengths) >= 3  # the cases are what they are meant to be


def test_at_temperature_zero_drafts_pass_while_they_are_the_argmax(interpreter: Interpreter) -> None:
    p = np.zeros((1, 4, 9), np.float32)
    p[0, [0, 1, 2, 3], [5, 2, 7, 1]] = 1
    batch = Batch(p, None, np.array([[0, 5, 2, 8]]), np.array([4]), np.array([3]), np.array([0]))
    assert accept(batch, interpreter) == [[5, 2, 7]]


def test_the_text_does_not_depend_on_deterministic_drafts(interpreter: Interpreter) -> None:
    """Each row draws its own token; a draft only says how many rows count."""
    batch = random_batch(1, 4, 11, with_q=False, seed=3)
    right = [
        reference.race(batch.p[0, t], int(batch.seeds[0]), int(batch.positions[0]) + t, Stream.TARGET)
        for t in range(4)
    ]
    full = np.array([4])
    for known in range(4):
        drafts = np.array([[0, *right[:known], *(11 - 1 - token for token in right[known:3])]])
        got = accept(Batch(batch.p, None, drafts, full, batch.seeds, batch.positions), interpreter)
        assert got[0] == right[: len(got[0])] and len(got[0]) > known


def test_rejection_without_a_residual_draws_from_the_target(interpreter: Interpreter) -> None:
    """p = q but for the draft's own entry: rounding can reject there, and p − q has no mass anywhere."""
    p = np.array([[[0.25, 0.25, 0.5, 0.0], [1, 0, 0, 0]]], np.float32).repeat(16, 0)
    q = p.copy()
    q[:, 0, 2] = 0.75
    seeds, positions = np.arange(16), np.arange(16)
    tokens = np.array([[0, 2]] * 16)
    batch = Batch(p, q, tokens, np.full(16, 2), seeds, positions)
    wanted = by_reference(batch)
    assert accept(batch, interpreter, slices=2, block=2) == wanted
    assert any(len(row) == 1 and row[0] in (0, 1) for row in wanted)


def test_a_row_of_nan_emits_no_token(interpreter: Interpreter) -> None:
    p = np.full((1, 1, 5), np.nan, np.float32)
    batch = Batch(p, None, np.array([[0]]), np.array([1]), np.array([1]), np.array([0]))
    assert accept(batch, interpreter) == [[]]


def test_random_numbers_are_philox() -> None:
    """Known answers of the Random123 distribution for Philox4x32-10."""
    ones = (0xFFFFFFFF,) * 4
    zero = [hex(int(word)) for word in reference.philox((0, 0), (0, 0, 0, 0))]
    assert zero == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    full = [hex(int(word)) for word in reference.philox(ones[:2], ones)]
    assert full == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_streams_are_those_of_the_host() -> None:
    assert all(Stream[stream.name] == stream for stream in reference.Stream)


def test_the_reference_keeps_the_targets_distribution() -> None:
    """Drafts from q, 6000 steps: first and second token are distributed as p, and a draft passes Σ min(p, q)."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(12), 2)
    q = rng.dirichlet(np.ones(12), 2)
    drafts = rng.choice(12, p=q[0], size=6000)
    counts = np.zeros((2, 12))
    accepted = 0
    for step, draft in enumerate(drafts):
        emitted = reference.spec_accept(p, q, np.array([0, draft]), 2, seed=step, position=4)
        counts[0, emitted[0]] += 1
        if len(emitted) == 2:
            accepted += 1
            counts[1, emitted[1]] += 1
    for row in range(2):
        assert chisquare(counts[row], counts[row].sum() * p[row]).pvalue > 1e-3
    rate = np.minimum(p[0], q[0]).sum()
    assert abs(accepted / 6000 - rate) < 4 * np.sqrt(rate * (1 - rate) / 6000)


def distribution(steps: int, vocabulary: int, with_q: bool, interpreter: Interpreter) -> float:
    """p-value of the first tokens that `steps` sequences with one draft each emit, against the target."""
    rng = np.random.default_rng(steps)
    p = rng.dirichlet(np.full(vocabulary, 2.0), 2).astype(np.float32)
    q = rng.dirichlet(np.full(vocabulary, 2.0), 2).astype(np.float32)
    drafts = rng.choice(vocabulary, p=q[0].astype(float) / q[0].sum(dtype=float), size=steps)
    batch = Batch(
        np.broadcast_to(p, (steps, 2, vocabulary)).copy(),
        np.broadcast_to(q, (steps, 2, vocabulary)).copy() if with_q else None,
        np.stack([np.zeros(steps, int), drafts], 1),
        np.full(steps, 2),
        np.arange(steps) * 2**33,
        np.full(steps, 9),
    )
    first = [tokens[0] for tokens in accept(batch, interpreter)]
    target = p[0].astype(float) / p[0].sum(dtype=float)
    return chisquare(np.bincount(first, minlength=vocabulary), steps * target).pvalue


@pytest.mark.parametrize("with_q", [True, False])
def test_the_kernel_keeps_the_targets_distribution(with_q: bool, interpreter: Interpreter) -> None:
    assert distribution(150, 5, with_q, interpreter) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("with_q", [True, False])
def test_the_kernel_keeps_the_targets_distribution_over_many_steps(
    with_q: bool, interpreter: Interpreter
) -> None:
    assert distribution(3000, 12, with_q, interpreter) > 1e-3
