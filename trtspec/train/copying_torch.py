"""Attention heads that copy, as start values: what came behind the present token the last times it stood?

Much of what is served repeats its context: passages, code, names, loops. A head that trains from the target's last
layer learns to copy only from far more text than it needs for the rest. One layer can copy, though, because row s of
an EAGLE-3 head or an MTP module pairs token s + 1 with the target's state at token s (an induction head, 2209.11895,
needs two layers to bring them together):

    query: the token of row t            the present one
    key:   the token the state of row s is at, found in what the head reads of the target there
    value: the token of row s            what came behind that one
    out:   the direction of the residual that the output layer takes for this token

Which directions of the state say what token it is at, canonical correlation analysis tells: between states and the
normed embeddings, over sample text and, for all the tokens that a sample lacks, random ones. The residual carries them
where it varies least, and the heads compare them in those components of query and key that rotary embedding hardly
turns. All of it is a start: every weight is trained further.

What differs by method is what a head reads of the target, and where its attention reads token and state:

| | the state is recognised in | attention reads |
|---|---|---|
| eagle3 | the first captured layer, through `fc` | the token itself, beside the normed fused state |
| mtp | the normed last state, through `eh_proj` | both in the normed sum of the two |
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
_COMMON = 0.5  # how much of all weight the sample has; random tokens, every one alike, have the rest
_ROOM = 5 / 8  # of the residual's directions that an MTP module may give up, an EAGLE-3 head half
_FEWEST = 16  # components that tell tokens apart

Weights = dict[str, torch.Tensor]


def add_copying_heads(
    weights: Weights,
    method: str,
    config: Mapping[str, JSON],
    model: Any,
    captured_layers: Sequence[int],
    sample: Sequence[npt.NDArray[np.uint32]],
    heads: int,
) -> None:
    """Make the last `heads` key-value heads copy, and every query head that reads them.

    weights: start values of an `eagle3` head or `mtp` module by canonical name, changed in place. config: as in `Head`.
    sample: token sequences of the kind that is learned. Random tokens come from torch's global generator. Raises
    PlanInfeasible where the rotary embedding has no slow components or the head is too small.
    """
    slow = _slow_components(config)
    most = _most_heads(method, config) if slow else 0
    if heads > most:
        raise PlanInfeasible(
            f"{heads} copying heads do not fit this head: "
            + (f"it has room for {most}" if slow else "its rotary embedding turns all components fast"),
            where="training.options.copying_heads",
            hint=f"write copying_heads: {most}",
        )
    hidden, size = int(config["hidden_size"]), int(config["head_dim"])
    if method == "mtp":
        slow = slow[: (int(_ROOM * hidden) // heads - size) // 2]
        seen = _observe(model, (model.config.num_hidden_layers - 1,), sample, normed=True)
    else:
        slow = slow[: hidden // (2 * heads)]
        seen = _observe(model, captured_layers, sample, normed=False)
    codes = [_Code.of(seen, index, heads, len(slow), size) for index in range(heads)]
    readers = (_join_mtp if method == "mtp" else _join_eagle3)(weights, seen, codes)

    norm = "layers.0.shared_head.norm" if method == "mtp" else "norm"
    out_gain = _divisor(weights[f"{norm}.weight"].double())
    q, k, v, o = (weights[f"layers.0.self_attn.{x}_proj.weight"] for x in "qkvo")
    kv_heads = int(config["num_key_value_heads"])
    group = int(config["num_attention_heads"]) // kv_heads
    for index, (code, reader) in enumerate(zip(codes, readers)):
        key = torch.zeros(size, k.shape[1], dtype=torch.float64)
        query = torch.zeros_like(key)
        key[slow] = reader.state
        query[slow] = _MATCH * size**0.5 / len(slow) * reader.token
        # Values leave as what the output layer's rows tell them by: a token's own row agrees with its value best.
        told = torch.linalg.solve(seen.output_moment, seen.output_by_embedding @ code.value)
        out = _BOOST / (heads * size * group) * seen.scale / out_gain[:, None] * told
        row = (kv_heads - 1 - index) * size
        k[row : row + size], v[row : row + size] = key.float(), reader.value.float()
        for member in range(group):
            place = row * group + member * size
            q[place : place + size] = query.float()
            o[:, place : place + size] = out.float()


@dataclass(frozen=True, slots=True)
class _Code:
    """What a copying head compares and hands on, of unit variance each; float64.

    state, token [H, n]: columns that take what a state is recognised in, and a normed embedding, to the same n numbers.
    value [H, head_dim]: columns that take a normed embedding to the head's value.
    """

    state: torch.Tensor
    token: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def of(seen: _Observed, index: int, heads: int, compared: int, size: int) -> _Code:
        """Components are dealt out in turn, so that every head has some of those known best; the first is a constant,
        as is the first principal direction.
        """
        share = slice(1 + index, 1 + index + heads * compared, heads)
        span = slice(1 + index * size, 1 + (index + 1) * size)
        value = seen.principal[:, span] / seen.variances[span].sqrt()
        return _Code(seen.of_state[:, share], seen.of_token[:, share], value)


@dataclass(frozen=True, slots=True)
class _Reader:
    """The rows of a head's projections that give its codes: state and token [n, in], value [head_dim, in]."""

    state: torch.Tensor
    token: torch.Tensor
    value: torch.Tensor


def _join_eagle3(weights: Weights, seen: _Observed, codes: Sequence[_Code]) -> list[_Reader]:
    """`fc` brings the states' codes into the fused state; tokens are read from the embedding itself."""
    hidden, compared = codes[0].state.shape
    room = _Room(seen, len(codes) * compared)
    fuse = weights["fc.weight"].double()
    room.empty(fuse[:, -hidden:])
    gain = _divisor(weights["layers.0.hidden_norm.weight"].double())
    beside = torch.zeros(compared, hidden, dtype=torch.float64)
    readers = []
    for code in codes:
        state = room.take(code.state, fuse[:, :hidden], gain)
        value = torch.cat([code.value.T, torch.zeros_like(code.value.T)], dim=1)
        readers.append(
            _Reader(torch.cat([beside, state], dim=1), torch.cat([code.token.T, beside], dim=1), value)
        )
    weights["fc.weight"] = fuse.float()
    return readers


def _join_mtp(weights: Weights, seen: _Observed, codes: Sequence[_Code]) -> list[_Reader]:
    """`eh_proj` gives the target's own residual, as it was before its final norm, and beside it all codes."""
    hidden, compared = codes[0].state.shape
    room = _Room(seen, len(codes) * (2 * compared + codes[0].value.shape[1]))
    join = weights["layers.0.eh_proj.weight"].double()
    of_token, of_state = join[:, :hidden], join[:, hidden:]
    norm = weights["layers.0.shared_head.norm.weight"].double()
    of_token.zero_()
    of_state.copy_(torch.diag(seen.scale * seen.normed_size / _divisor(norm)))
    room.empty(of_state)
    gain = _divisor(weights["layers.0.input_layernorm.weight"].double())
    readers = [
        _Reader(
            room.take(code.state, of_state, gain),
            room.take(code.token, of_token, gain),
            room.take(code.value, of_token, gain),
        )
        for code in codes
    ]
    weights["layers.0.eh_proj.weight"] = join.float()
    return readers


class _Room:
    """Directions of the residual in which it varies least, given to codes."""

    def __init__(self, seen: _Observed, directions: int) -> None:
        spread, found = torch.linalg.eigh(seen.residual_moment)
        self._directions = found[:, :directions]
        self._size = spread[:directions].clamp(min=0).sqrt().mean()
        self._scale, self._taken = seen.scale, 0

    def empty(self, join: torch.Tensor) -> None:
        """Take what `join` [H, in] writes there away, in place."""
        join -= self._directions @ (self._directions.T @ join)

    def take(self, code: torch.Tensor, join: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Let `join`, in place, write a code [in, n] to the next n directions; the rows [n, H] that read it, at unit
        variance, from the residual after a norm with this gain.
        """
        ours = self._directions[:, self._taken : self._taken + code.shape[1]]
        self._taken += code.shape[1]
        join += self._size * ours @ code.T
        return self._scale / self._size * (ours / gain[:, None]).T


@dataclass(frozen=True, slots=True)
class _Observed:
    """float64. of_state, of_token [H, H]: columns that take what a state is recognised in, and a normed embedding, to
    the numbers that tell tokens apart, of unit variance, the best known first.

    residual_moment [H, H]: second moment of the target's residual where the head takes it over; scale: its root mean
    square. normed_size: root mean square of states after the target's final norm. variances [H], principal [H, H]: of
    the normed embeddings, by falling variance. output_moment, output_by_embedding [H, H]: second moments of the output
    layer's rows, and of these with the normed embeddings.
    """

    of_state: torch.Tensor
    of_token: torch.Tensor
    residual_moment: torch.Tensor
    scale: torch.Tensor
    normed_size: torch.Tensor
    variances: torch.Tensor
    principal: torch.Tensor
    output_moment: torch.Tensor
    output_by_embedding: torch.Tensor


@torch.no_grad()
def _observe(
    model: Any, layers: Sequence[int], sample: Sequence[npt.NDArray[np.uint32]], *, normed: bool
) -> _Observed:
    """layers: the residual is taken over behind the last; states are recognised in the first one's output, or where
    normed in what passed the target's final norm, brought to unit root mean square.
    """
    table = model.get_input_embeddings().weight
    vocab, hidden = table.shape
    embedding = nn.functional.rms_norm(table.float(), (hidden,)).double()
    made_up = torch.randint(vocab, _RANDOM_TOKENS, device=table.device)
    states, tokens = _states(model, layers, [torch.from_numpy(s.astype(np.int64)) for s in sample])
    others, other_tokens = _states(model, layers, list(made_up))
    both = torch.cat([states, others])
    known = nn.functional.rms_norm(both[:, -hidden:], (hidden,)) if normed else both[:, :hidden]
    parts = ((_COMMON, tokens), (1 - _COMMON, other_tokens))
    weight = torch.cat([torch.full((len(t),), part / len(t), device=table.device) for part, t in parts])
    of_state, of_token = _canonical(known, embedding[torch.cat([tokens, other_tokens])], weight.double())
    residual, last = states[:, -2 * hidden : -hidden], states[:, -hidden:]
    share = _COMMON * tokens.bincount(minlength=vocab).double() / len(tokens) + (1 - _COMMON) / vocab
    output = model.get_output_embeddings().weight.double()
    shared = output * share[:, None]
    output_moment = output.T @ shared
    ridge = _RIDGE * output_moment.diagonal().mean()
    variances, principal = torch.linalg.eigh(embedding.T @ (embedding * share[:, None]))
    return _Observed(
        of_state=of_state,
        of_token=of_token,
        residual_moment=residual.T @ residual / len(residual),
        scale=residual.square().mean().sqrt(),
        normed_size=last.square().mean().sqrt(),
        variances=variances.flip(0),
        principal=principal.flip(1),
        output_moment=output_moment + ridge * torch.eye(hidden, dtype=torch.float64, device=table.device),
        output_by_embedding=shared.T @ embedding,
    )


def _states(
    model: Any, layers: Sequence[int], sequences: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n, (layers + 1) · H] as `target_states` gives them, and tokens [n], without first tokens, on which
    attention rests.
    """
    states, tokens = [], []
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), _SEQUENCES_AT_ONCE):
        group = ordered[start : start + _SEQUENCES_AT_ONCE]
        padded = nn.utils.rnn.pad_sequence(group, batch_first=True).to(model.device)
        for row, sequence in zip(target_states(model, padded, layers), group):
            states.append(row[1 : len(sequence)].double())
            tokens.append(sequence[1:].to(model.device))
    return torch.cat(states), torch.cat(tokens)


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


def _most_heads(method: str, config: Mapping[str, JSON]) -> int:
    """How many key-value heads may copy: values must be independent directions, and an MTP module has less room."""
    hidden, size = int(config["hidden_size"]), int(config["head_dim"])
    room = int(_ROOM * hidden) // (size + 2 * _FEWEST) if method == "mtp" else hidden // (2 * _FEWEST)
    return min(int(config["num_key_value_heads"]), (hidden - 1) // size, room)


def _slow_components(config: Mapping[str, JSON]) -> list[int]:
    """Components of a query or key, the slowest first, in pairs that turn together."""
    size = int(config["head_dim"])
    facts = read_rope(ConfigView(dict(config), "head"))
    rates = Rope.of(facts, size, int(config["max_position_embeddings"]), where="head").inverse_frequencies
    pairs = [i for i in range(size // 2 - 1, -1, -1) if rates[i] <= _SLOW]
    return [component for i in pairs for component in (i, i + size // 2)]
