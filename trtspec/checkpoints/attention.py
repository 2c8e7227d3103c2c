"""Attention shapes of a decoder, what they cache, and where they depart from one number in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.layer_pattern import Kind
from trtspec.checkpoints.layers import LayerSpec, summarize
from trtspec.checkpoints.sizes import hidden_size


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of one attention shape. heads, kv_heads: of the whole model, before tensor parallelism.

    head_dim: key width (MLA: latent rank plus rope). value_dim: value width (MLA: latent rank; 0 where the
    cache stores no separate values). group: query heads per cache head. window: tokens a layer sees.
    """

    kind: Kind
    layers: int
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    group: int | None = None
    window: int | None = None

    def per_rank(self, tensor_parallel: int) -> tuple[int, int] | None:
        """(query heads, cache heads) on one rank, cache heads replicated where there are fewer than ranks.

        None where the heads do not divide. MLA's one latent head lives on every rank.
        """
        if self.heads is None or self.kv_heads is None or self.heads % tensor_parallel:
            return None
        queries = self.heads // tensor_parallel
        if self.kind == "mla":
            return queries, 1
        larger, smaller = max(self.kv_heads, tensor_parallel), min(self.kv_heads, tensor_parallel)
        if larger % smaller:
            return None
        return queries, max(1, self.kv_heads // tensor_parallel)

    def group_per_rank(self, tensor_parallel: int) -> int | None:
        """G on one rank; None where the heads do not divide."""
        heads = self.per_rank(tensor_parallel)
        return None if heads is None else heads[0] // heads[1]

    @property
    def cache_elements_per_token(self) -> int | None:
        """Cached elements one token adds, all layers of the group, one copy of every cache head."""
        if self.kind in ("linear", "none"):
            return 0
        if self.kv_heads is None or self.head_dim is None:
            return None
        extra = 0 if self.kind == "mla" else self.value_dim if self.value_dim is not None else self.head_dim
        return self.layers * self.kv_heads * (self.head_dim + extra)

    def as_json(self) -> dict[str, object]:
        """The stable fields of `inspect`."""
        names = ("kind", "layers", "heads", "kv_heads", "head_dim", "group", "window")
        return {name: getattr(self, name) for name in names}


def attention_groups(view: ConfigView, layers: Sequence[LayerSpec]) -> tuple[AttentionGroup, ...]:
    value_dim = view.integer("v_head_dim") if not view.integer("kv_lora_rank") else None
    return tuple(
        AttentionGroup(
            kind=shape.kind,
            layers=count,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=view.integer("kv_lora_rank") or value_dim or shape.head_dim,
            group=shape.group,
            window=shape.window,
        )
        for shape, count in summarize(layers)
    )


def tile_warnings(attention: Sequence[AttentionGroup]) -> list[str]:
    """Where the draft length rule departs from `D = 128/G − 1` on one G; they concern tiled (GPU) kernels only."""
    said: list[str] = []
    groups = sorted({g.group for g in attention if g.group})
    for group in groups:
        if group & (group - 1):
            said.append(
                f"group {group} is not a power of two: the rule takes the floor of 128/{group}; check the attention "
                "backend (precompiled XQA multi-token kernels refuse such groups)"
            )
        if group > 64:
            said.append(
                f"the rule gives D = 0 for group {group}: every further draft token adds whole tiles. It is a warning, "
                "not a refusal: draft lengths 1 to 3 are run in practice, and tensor parallelism lowers the group"
            )
    if len(groups) > 1:
        said.append(
            f"layers differ in their group ({', '.join(map(str, groups))}): the largest binds the rule"
        )
    said += [
        f"MLA: all {shape.heads} query heads share one latent KV head; it has its own kernels, and "
        "num_key_value_heads of the file is not a cache head count"
        for shape in attention
        if shape.kind == "mla"
    ]
    return said


def shape_warnings(view: ConfigView, attention: Sequence[AttentionGroup]) -> list[str]:
    """Further properties of the layers that a planner or a runtime must respect on any device."""
    said: list[str] = []
    if any(shape.kind == "linear" for shape in attention):
        said.append(
            "recurrent layers: the rule covers the attention layers only, and rejected drafts must roll back "
            "their state"
        )
    hidden = hidden_size(view)
    full = next((g for g in attention if g.kind in ("full", "sliding") and g.heads and g.head_dim), None)
    if full is not None and hidden and (full.heads or 0) * (full.head_dim or 0) != hidden:
        said.append(
            f"{full.heads} heads of {full.head_dim} differ from the hidden size {hidden}: head_dim is as stated"
        )
    if view.get("index_topk", "index_n_heads") is not None:
        said.append(
            "sparse attention: a token attends to selected keys only; attention time is an upper bound"
        )
    if view.integers("compress_ratios"):
        said.append("compressed KV (compress_ratios): cache sizes are the uncompressed upper bound")
    return said
