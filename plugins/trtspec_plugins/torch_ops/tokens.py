"""`trtspec::spec_accept`, `tree_mask`, `kv_compact`, `kv_append`, `ngram_lookup`: what a step does beside attention."""

from typing import Optional

import numpy as np
import torch
from torch import Tensor

from trtspec_plugins.references import kv_append as append_reference
from trtspec_plugins.references import kv_compact as kv_reference
from trtspec_plugins.references import ngram_lookup as ngram_reference
from trtspec_plugins.references import spec_accept as accept_reference
from trtspec_plugins.references import tree_mask as tree_reference
from trtspec_plugins.torch_ops.launch import launch


def spec_accept(
    p: Tensor,
    q: Optional[Tensor],  # noqa: UP045
    tokens: Tensor,
    q_len: Tensor,
    seed: Tensor,
    position: Tensor,
    slices: int = 1,
) -> tuple[Tensor, Tensor]:
    """(emitted int32 [B, T], accepted int32 [B]): accepted drafts and one token more; see the kernel's module.

    p [B, T, V] fp32, q alike or None for deterministic drafts. slices: of the vocabulary, scanned side by side;
    no result depends on it.
    """
    batch, rows, vocabulary = p.shape
    values = {"B": batch, "T": rows, "V": vocabulary, "NSPLIT": slices}
    block = _power_of_two(rows)
    score = p.new_empty((batch, rows, slices))
    winner = tokens.new_empty((batch, rows, slices))
    emitted, accepted = torch.empty_like(tokens), torch.empty_like(q_len)
    given = {"tokens": tokens, "q_len": q_len, "score": score, "winner": winner}
    inputs = {**given, "p": p, "q": q, "seed": seed, "position": position}
    constants = {
        "HAS_Q": int(q is not None),
        "BLOCK_T": block,
        "BLOCK_V": min(1024, _power_of_two(vocabulary)),
    }
    launch("spec_accept", values, inputs, constants)
    outputs = {**given, "emitted": emitted, "accepted": accepted}
    launch("spec_accept_combine", values, outputs, {"BLOCK_T": block})
    return emitted, accepted


_spec_accept = torch.library.custom_op("trtspec::spec_accept", spec_accept, mutates_args=())


@_spec_accept.register_kernel("cpu")
def _(p, q, tokens, q_len, seed, position, slices=1):
    emitted, accepted = torch.full_like(tokens, -1), torch.zeros_like(q_len)
    words = seed.numpy().view(np.uint32).astype(np.uint64)
    for b in range(len(tokens)):
        drafted = None if q is None else q[b].numpy()
        key = int(words[b, 0] | words[b, 1] << np.uint64(32))
        given = (p[b].numpy(), drafted, tokens[b].numpy(), int(q_len[b]), key, int(position[b]))
        said = accept_reference.spec_accept(*given)
        emitted[b, : len(said)] = torch.tensor(said, dtype=tokens.dtype)
        accepted[b] = max(0, len(said) - 1)
    return emitted, accepted


@_spec_accept.register_fake
def _(p, q, tokens, q_len, seed, position, slices=1):
    return torch.empty_like(tokens), torch.empty_like(q_len)


def tree_mask(parents: Tensor, q_len: Tensor) -> tuple[Tensor, Tensor]:
    """(mask int32 [B, T, ⌈T/32⌉], depth int32 [B, T]) of parents int32 [B, T]: ancestors and self, packed."""
    batch, rows = parents.shape
    mask, depth = parents.new_empty((batch, rows, -(-rows // 32))), torch.empty_like(parents)
    tensors = {"parents": parents, "q_len": q_len, "mask": mask, "depth": depth}
    launch("tree_mask", {"B": batch, "T": rows}, tensors, {"BLOCK_T": min(128, _power_of_two(rows))})
    return mask, depth


_tree_mask = torch.library.custom_op("trtspec::tree_mask", tree_mask, mutates_args=())


@_tree_mask.register_kernel("cpu")
def _(parents, q_len):
    mask, depth = tree_reference.tree_mask(parents.numpy(), q_len.numpy())
    return torch.from_numpy(np.array(mask, np.int32)), torch.from_numpy(np.array(depth, np.int32))


@_tree_mask.register_fake
def _(parents, q_len):
    batch, rows = parents.shape
    return parents.new_empty((batch, rows, (rows + 31) // 32)), torch.empty_like(parents)


def kv_compact(
    k: Tensor,
    v: Tensor,
    path: Tensor,
    path_len: Tensor,
    start: Tensor,
    block_table: Optional[Tensor] = None,  # noqa: UP045
) -> None:
    """Move rows start + path of k and v to start + 1 and on, in place; see the kernel's module."""
    kv_heads, page = k.shape[1], k.shape[2] if block_table is not None else 0
    keys = page * block_table.shape[1] if block_table is not None else k.shape[2]
    values = {"B": len(path), "S": keys, "HKV": kv_heads, "A": path.shape[1]}
    bits = torch.int8 if k.element_size() == 1 else torch.int16
    caches = {"k": k.view(bits), "v": v.view(bits), "k_out": k.view(bits), "v_out": v.view(bits)}
    rows = {"path": path, "path_len": path_len, "start": start, "block_table": block_table}
    launch("kv_compact", values, {**caches, **rows}, {"HEAD_DIM": k.shape[-1], "BLOCK_A": 32, "PAGE": page})


_kv_compact = torch.library.custom_op("trtspec::kv_compact", kv_compact, mutates_args=("k", "v"))


@_kv_compact.register_kernel("cpu")
def _(k, v, path, path_len, start, block_table=None):
    table = None if block_table is None else block_table.numpy()
    for cache in (k, v):
        bits = cache.view(torch.int8 if cache.element_size() == 1 else torch.int16)
        moved = kv_reference.kv_compact(bits.numpy(), path.numpy(), path_len.numpy(), start.numpy(), table)
        bits.copy_(torch.from_numpy(moved))


@_kv_compact.register_fake
def _(k, v, path, path_len, start, block_table=None):
    return None


def kv_append(
    k: Tensor,
    v: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    start: Tensor,
    q_len: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write the valid rows of k_new and v_new [B, T, HKV, d] into e4m3 caches k and v [B, HKV, S, d], in place.

    k, v: float8_e4m3fn, or its bytes; see the kernel's module.
    """
    (batch, rows, kv_heads, dim), keys = k_new.shape, k.shape[2]
    values = {"B": batch, "T": rows, "S": keys, "HKV": kv_heads}
    codes = {"k": k.view(torch.uint8), "v": v.view(torch.uint8)}
    tensors = {
        **codes, "k_out": codes["k"], "v_out": codes["v"], "k_new": k_new, "v_new": v_new, "start": start,
        "q_len": q_len, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    launch("kv_append", values, tensors, {"HEAD_DIM": dim, "BLOCK_T": 16})


_kv_append = torch.library.custom_op("trtspec::kv_append", kv_append, mutates_args=("k", "v"))


@_kv_append.register_kernel("cpu")
def _(k, v, k_new, v_new, start, q_len, k_scale, v_scale):
    lengths = (start.numpy(), q_len.numpy())
    for cache, new, scale in ((k, k_new, k_scale), (v, v_new, v_scale)):
        codes = cache.view(torch.uint8)
        written = append_reference.kv_append(codes.numpy(), new.float().numpy(), *lengths, scale.numpy())
        codes.copy_(torch.from_numpy(written))


@_kv_append.register_fake
def _(k, v, k_new, v_new, start, q_len, k_scale, v_scale):
    return None


def ngram_lookup(
    tokens: Tensor, length: Tensor, draft_length: int, min_ngram: int, max_ngram: int, stop: int = -1
) -> tuple[Tensor, Tensor]:
    """(draft int32 [B, D], draft_len int32 [B]): what followed the latest match of the longest suffix, then −1."""
    batch, width = tokens.shape
    draft, found = tokens.new_empty((batch, draft_length)), torch.empty_like(length)
    lengths = {"MIN_NGRAM": min_ngram, "MAX_NGRAM": max_ngram}
    values = {"B": batch, "L": width, "D": draft_length, "STOP": stop, **lengths}
    constants = {"BLOCK_L": min(1024, _power_of_two(width)), "BLOCK_D": _power_of_two(draft_length)}
    tensors = {"tokens": tokens, "length": length, "draft": draft, "draft_len": found}
    launch("ngram_lookup", values, tensors, constants)
    return draft, found


_ngram_lookup = torch.library.custom_op("trtspec::ngram_lookup", ngram_lookup, mutates_args=())


@_ngram_lookup.register_kernel("cpu")
def _(tokens, length, draft_length, min_ngram, max_ngram, stop=-1):
    draft, found = tokens.new_full((len(tokens), draft_length), -1), torch.zeros_like(length)
    for b, count in enumerate(length.tolist()):
        said = ngram_reference.ngram_lookup(
            tokens[b, :count].tolist(), draft_length, min_ngram, max_ngram, stop
        )
        draft[b, : len(said)] = torch.tensor(said, dtype=tokens.dtype)
        found[b] = len(said)
    return draft, found


@_ngram_lookup.register_fake
def _(tokens, length, draft_length, min_ngram, max_ngram, stop=-1):
    return tokens.new_empty((len(tokens), draft_length)), torch.empty_like(length)


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
