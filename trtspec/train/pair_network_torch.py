"""Autoregressive heads (EAGLE-1, -2, -3, P-EAGLE, one MTP module) in PyTorch: what compile/heads/eagle.py computes.

Row t of a sequence pairs token t + 1 with the state that token was predicted from, and scores token t + 2. Whole
sequences are run at once. For a draft of several tokens, step j runs every row again with its own output of step
j − 1, one row on, in the place of the target's state ("training-time test", 2503.01840, section 3.2): row t then
stands for a draft that began j rows before, and sees the target-made rows up to there and its own draft's behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.head_layouts.eagle import THREE
from trtspec.checkpoints.rope import read_rope
from trtspec.compile.rope import Rope
from trtspec.files import JSON

Weights = Mapping[str, torch.Tensor]  # by canonical name
Cache = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [B, KV heads, S, d]


class PairNetwork:
    """The forward pass of a head with these numbers; weights are given with every call.

    method, config, captured: as in `Head`, captured a number of layers.
    """

    def __init__(self, method: str, config: Mapping[str, JSON], captured: int) -> None:
        self.method = method
        self.layers = int(config["num_hidden_layers"])
        self._config, self._captured = config, captured
        self._heads, self._kv_heads, self._dim = (
            int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self._epsilon = float(config["rms_norm_eps"])
        positions = int(config["max_position_embeddings"])
        rope = Rope.of(read_rope(ConfigView(dict(config), "head")), self._dim, positions, where="head")
        self._cos, self._sin = (torch.from_numpy(table) for table in rope.tables(positions))

    def fuse(self, weights: Weights, captured: torch.Tensor) -> torch.Tensor:
        """States [..., H] of captured ones [..., W]; without captured layers they are the target's last, unchanged."""
        if not self._captured:
            return captured
        if self._config["norm_before_fc"]:
            captured = self._norm(weights, "input_norm", captured)
        if self._config["fc_norm"]:
            parts = captured.chunk(self._captured, dim=-1)
            captured = torch.cat(
                [self._norm(weights, f"fc_norm.{i}", p) for i, p in enumerate(parts)], dim=-1
            )
        return _linear(weights, "fc", captured)

    def run(
        self,
        weights: Weights,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output layer reads and what is recycled, both [B, T, H], of new rows behind those in `cache`.

        embedded, states: [B, T, H]. positions: int64 [T]. seen: bool [T, S + T], the rows each one sees. The cache
        takes the new rows in.
        """
        normed, residual = self._enter(weights, embedded, states)
        for index in range(self.layers):
            prefix = f"layers.{index}"
            if index:
                normed = self._norm(weights, f"{prefix}.input_layernorm", residual)
            residual = residual + self._attend(weights, index, normed, positions, seen, cache)
            normed = self._norm(weights, f"{prefix}.post_attention_layernorm", residual)
            gate = nn.functional.silu(_linear(weights, f"{prefix}.mlp.gate_proj", normed))
            inner = gate * _linear(weights, f"{prefix}.mlp.up_proj", normed)
            residual = residual + _linear(weights, f"{prefix}.mlp.down_proj", inner)
        norm = "layers.0.shared_head.norm" if self.method == "mtp" else "norm"
        if f"{norm}.weight" not in weights:
            return residual, residual
        scored = self._norm(weights, norm, residual)
        after = self.method == "mtp" or bool(self._config.get("norm_output"))
        return scored, scored if after else residual

    def unroll(
        self, weights: Weights, embedded: torch.Tensor, states: torch.Tensor, steps: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`run` of steps 0 … steps − 1 (see the module) over whole sequences; row t's entries mean nothing for t < j.

        embedded: [B, T, H], of token t + 1 at row t. states: [B, T, H], the target's at row t.
        """
        rows = torch.arange(embedded.shape[1], device=embedded.device)
        cache: Cache = []
        seen = embedded.new_zeros((len(rows), 0), dtype=torch.bool)
        for step in range(steps):
            made_by_target = rows[None, :] <= rows[:, None] - step
            # Of its own draft: what step i made at the row as far back as the steps since.
            drafted = [rows[None, :] == rows[:, None] - step + i for i in range(1, step + 1)]
            seen = torch.cat([made_by_target, *drafted], dim=1)
            scored, recycled = self.run(weights, embedded, states, rows, seen, cache)
            yield scored, recycled
            states = recycled.roll(1, dims=1)

    def _enter(
        self, weights: Weights, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = "layers.0"
        if self.method in THREE:
            embedded = self._norm(weights, f"{first}.input_layernorm", embedded)
            normed = self._norm(weights, f"{first}.hidden_norm", states)
            residual = normed if self._config["norm_before_residual"] else states
            return torch.cat([embedded, normed], dim=-1), residual
        if self.method == "mtp":
            embedded = self._norm(weights, f"{first}.enorm", embedded)
            states = self._norm(weights, f"{first}.hnorm", states)
        name = f"{first}.eh_proj" if self.method == "mtp" else "fc"
        residual = _linear(weights, name, torch.cat([embedded, states], dim=-1))
        if f"{first}.input_layernorm.weight" not in weights:
            return residual, residual
        return self._norm(weights, f"{first}.input_layernorm", residual), residual

    def _attend(
        self,
        weights: Weights,
        index: int,
        normed: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        prefix = f"layers.{index}.self_attn"
        q, k, v = (self._by_head(_linear(weights, f"{prefix}.{x}_proj", normed)) for x in "qkv")
        if f"{prefix}.q_norm.weight" in weights:
            q, k = self._norm(weights, f"{prefix}.q_norm", q), self._norm(weights, f"{prefix}.k_norm", k)
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        if index < len(cache):
            k, v = torch.cat([cache[index][0], k], dim=2), torch.cat([cache[index][1], v], dim=2)
            cache[index] = (k, v)
        else:
            cache.append((k, v))
        group = self._heads // self._kv_heads
        attended = nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), attn_mask=seen
        )
        return _linear(weights, f"{prefix}.o_proj", attended.transpose(1, 2).flatten(2))

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, heads · d] → [B, heads, T, d]."""
        return rows.unflatten(-1, (-1, self._dim)).transpose(1, 2)

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (table.to(rows.device)[positions] for table in (self._cos, self._sin))
        one, other = rows.float().chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(rows.dtype)

    def _norm(self, weights: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(
            rows.float(), rows.shape[-1:], weights[f"{name}.weight"].float(), self._epsilon
        )


def _linear(weights: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def tensors_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """float32 tensors of float32 arrays; nothing is shared."""
    return {name: torch.tensor(array) for name, array in arrays.items()}
