"""Attention heads that copy, as start values of an EAGLE-3 head: what came behind this token the last times it stood?

Much of what is served repeats its context: passages, code, names, loops. A head that trains from the target's last
layer learns to copy only from far more text than it needs for the rest. One layer can copy, though, because row s of
an EAGLE-3 head pairs token s + 1 with the target's state at token s (an induction head, 2209.11895, needs two layers
to bring them together):

    query: the token of row t            the present one
    key:   the token the state of row s is at, found in the output of the first captured layer
    value: the token of row s            what came behind that one
    out:   the direction of the residual that the output layer takes for this token

Which directions of the state say what token it is at, canonical correlation analysis tells: between that layer's
outputs and the normed embeddings, over sample text and, for all the tokens that a sample lacks, random ones. The fused
state carries them where the last captured layer varies least, and the heads compare them in those components of query
and key that rotary embedding hardly turns. All of it is a start: every weight is trained further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.rope import read_rope
from trtspec.compile.rope import Rope
from trtspec.errors import PlanInfeasible
from trtspec.files import JSON
from trtspec.train.batches_torch import target_states

_SLOW = 1 / 500  # radians a token: components that turn no faster compare tokens some hundred positions apart
_MATCH = 17.0  # attention score of a row whose state is at the very token that is looked for
_BOOST = 60.0  # what a row that is found adds to its token's logit, before the norm divides it
_RANDOM_TOKENS = (64, 256)  # sequences, tokens of each
_SEQUENCES_AT_ONCE = 8
_RIDGE = 1e-3  # of the mean variance, added to every variance
_COMMON = 0.5  # how much of a token's weight is its share of the sample; all share the rest alike

Weights = dict[str, torch.Tensor]


def most_copying_heads(config: Mapping[str, JSON]) -> int:
    """How many key-value heads of a head with these numbers may copy: their values must be independent directions."""
    return min(
        int(config["num_key_value_heads"]), (int(config["hidden_size"]) - 1) // int(config["head_dim"])
    )


def add_copying_heads(
    weights: Weights,
    config: Mapping[str, JSON],
    model: Any,
    captured_layers: Sequence[int],
    sample: Sequence[npt.NDArray[np.uint32]],
    heads: int,
) -> None:
    """Make the last `heads` key-value heads of an EAGLE-3 head copy, and every query head that reads them.

    weights: start values by canonical name, changed in place. config: as in `Head`. sample: token sequences of the
    kind that is learned. Random tokens come from torch's global generator. Raises PlanInfeasible where the rotary
    embedding has no slow components or the head is too small.
    """
    slow = _slow_components(config)
    most = most_copying_heads(config)
    if heads > most or not slow:
        raise PlanInfeasible(
            f"{heads} copying heads do not fit this head: "
            + (f"it has room for {most}" if slow else "its rotary embedding turns all components fast"),
            where="training.options.copying_heads",
            hint=f"write copying_heads: {most if slow else 0}",
        )
    seen = _observe(model, captured_layers, sample)
    hidden = seen.embedding.shape[1]
    compared = min(len(slow), hidden // (2 * heads))
    slow = slow[:compared]
    # Dealt out in turn, so that every head has some of the components that are known best; the first is a constant.
    shares = [range(1 + head, 1 + head + heads * compared, heads) for head in range(heads)]
    order = [component for share in shares for component in share]

    # The fused state: where the last captured layer varies least it now holds what token it is at.
    spread, directions = torch.linalg.eigh(seen.last_moment)
    room, size = directions[:, : len(order)], spread[: len(order)].clamp(min=0).sqrt().mean()
    fuse = weights["fc.weight"].double()
    fuse[:, -hidden:] -= room @ (room.T @ fuse[:, -hidden:])
    fuse[:, :hidden] += size * room @ seen.of_state[:, order].T
    weights["fc.weight"] = fuse.float()

    scale = seen.last_moment.diagonal().mean().sqrt()  # root mean square of the fused state
    gain, out_gain = (_divisor(weights[f"{n}.weight"].double()) for n in ("layers.0.hidden_norm", "norm"))
    q, k, v, o = (weights[f"layers.0.self_attn.{x}_proj.weight"] for x in "qkvo")
    size_of_head, kv_heads = int(config["head_dim"]), int(config["num_key_value_heads"])
    group = int(config["num_attention_heads"]) // kv_heads
    variances, principal = torch.linalg.eigh(seen.embedding_moment)
    variances, principal = variances.flip(0), principal.flip(1)
    for index, share in enumerate(shares):
        key = torch.zeros(size_of_head, 2 * hidden, dtype=torch.float64)
        query, value = torch.zeros_like(key), torch.zeros_like(key)
        own = room[:, index * compared : (index + 1) * compared]
        key[slow, hidden:] = scale / size * (own / gain[:, None]).T
        query[slow, :hidden] = (_MATCH * size_of_head**0.5 / compared) * seen.of_token[:, list(share)].T
        # Values are embeddings, each direction at unit variance; the first direction all tokens share. They leave as
        # what the output layer's rows tell them by, so that a token's own row agrees with its value best.
        span = slice(1 + index * size_of_head, 1 + (index + 1) * size_of_head)
        code = principal[:, span] / variances[span].sqrt()
        value[:, :hidden] = code.T
        told = torch.linalg.solve(seen.output_moment, seen.output_by_embedding @ code)
        out = _BOOST / (heads * size_of_head * group) * scale / out_gain[:, None] * told
        row = (kv_heads - 1 - index) * size_of_head
        k[row : row + size_of_head], v[row : row + size_of_head] = key.float(), value.float()
        for member in range(group):
            place = row * group + member * size_of_head
            q[place : place + size_of_head] = query.float()
            o[:, place : place + size_of_head] = out.float()


@dataclass(frozen=True, slots=True)
class _Observed:
    """float64. embedding [V, H], each row at unit root mean square, as the head's norm leaves it.

    of_state, of_token [H, H]: columns that take a state (of the first captured layer) and a normed embedding to the
    numbers that tell tokens apart, of unit variance, the best known first. last_moment, embedding_moment,
    output_moment [H, H]: second moments of the last captured layer, the normed embeddings and the output layer's rows;
    output_by_embedding [H, H]: of the latter two.
    """

    embedding: torch.Tensor
    of_state: torch.Tensor
    of_token: torch.Tensor
    last_moment: torch.Tensor
    embedding_moment: torch.Tensor
    output_moment: torch.Tensor
    output_by_embedding: torch.Tensor


@torch.no_grad()
def _observe(
    model: Any, captured_layers: Sequence[int], sample: Sequence[npt.NDArray[np.uint32]]
) -> _Observed:
    table = model.get_input_embeddings().weight
    vocab, hidden = table.shape
    embedding = nn.functional.rms_norm(table.float(), (hidden,)).double()
    made_up = torch.randint(vocab, _RANDOM_TOKENS, device=table.device)
    first, last, tokens = _states(
        model, captured_layers, [torch.from_numpy(s.astype(np.int64)) for s in sample]
    )
    other_first, _, other_tokens = _states(model, captured_layers, list(made_up))
    weight = torch.cat(
        [torch.full((len(t),), 0.5 / len(t), device=table.device) for t in (tokens, other_tokens)]
    ).double()
    states, rows = torch.cat([first, other_first]), embedding[torch.cat([tokens, other_tokens])]
    of_state, of_token = _canonical(states, rows, weight)
    share = _COMMON * tokens.bincount(minlength=vocab).double() / len(tokens) + (1 - _COMMON) / vocab
    output = model.get_output_embeddings().weight.double()
    shared = output * share[:, None]
    ridge = _RIDGE * torch.eye(hidden, dtype=torch.float64, device=table.device)
    output_moment = output.T @ shared
    return _Observed(
        embedding=embedding,
        of_state=of_state,
        of_token=of_token,
        last_moment=last.T @ last / len(last),
        embedding_moment=embedding.T @ (embedding * share[:, None]),
        output_moment=output_moment + ridge * output_moment.diagonal().mean(),
        output_by_embedding=shared.T @ embedding,
    )


def _states(
    model: Any, captured_layers: Sequence[int], sequences: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the first and the last captured layer, float64 [n, H], and tokens [n], without first tokens, on which
    attention rests.
    """
    hidden = model.config.hidden_size
    first, last, tokens = [], [], []
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), _SEQUENCES_AT_ONCE):
        group = ordered[start : start + _SEQUENCES_AT_ONCE]
        padded = nn.utils.rnn.pad_sequence(group, batch_first=True).to(model.device)
        states = target_states(model, padded, captured_layers)
        for row, sequence in enumerate(group):
            kept = states[row, 1 : len(sequence)].double()
            first.append(kept[:, :hidden])
            last.append(kept[:, (len(captured_layers) - 1) * hidden : len(captured_layers) * hidden])
            tokens.append(sequence[1:].to(model.device))
    return torch.cat(first), torch.cat(last), torch.cat(tokens)


def _canonical(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Canonical directions of x and y [n, H], about zero, as columns, by falling correlation; weight [n] sums to 1."""
    weighted = weight[:, None]
    left, right = _inverse_root(x.T @ (x * weighted)), _inverse_root(y.T @ (y * weighted))
    u, _, vt = torch.linalg.svd(left @ (x.T @ (y * weighted)) @ right)
    return left @ u, right @ vt.T


def _inverse_root(moment: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return vectors @ torch.diag((values.clamp(min=0) + _RIDGE * values.mean()).rsqrt()) @ vectors.T


def _divisor(gain: torch.Tensor) -> torch.Tensor:
    """`gain`, with nothing near zero in it."""
    least = gain.abs().mean() / 10
    return torch.where(gain.abs() < least, least, gain)


def _slow_components(config: Mapping[str, JSON]) -> list[int]:
    """Components of a query or key, the slowest first, in pairs that turn together."""
    size = int(config["head_dim"])
    facts = read_rope(ConfigView(dict(config), "head"))
    rates = Rope.of(facts, size, int(config["max_position_embeddings"]), where="head").inverse_frequencies
    pairs = [i for i in range(size // 2 - 1, -1, -1) if rates[i] <= _SLOW]
    return [component for i in pairs for component in (i, i + size // 2)]
