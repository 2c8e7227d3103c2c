"""`trtspec::verify_attention` and `trtspec::int4_kv_attention`."""

from typing import Optional

import torch
from torch import Tensor

from trtspec_plugins.references import int4_kv_attention as int4_reference
from trtspec_plugins.references import verify_attention as verify_reference
from trtspec_plugins.torch_ops.launch import architecture, launch, tile_of

# Annotations are read by torch.library when the operators are made: they are types, and Optional is spelt out.


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    mask: Optional[Tensor] = None,  # noqa: UP045
    block_table: Optional[Tensor] = None,  # noqa: UP045
    k_scale: Optional[Tensor] = None,  # noqa: UP045
    v_scale: Optional[Tensor] = None,  # noqa: UP045
    splits: int = 1,
    tile_rows: int = 128,
) -> Tensor:
    """Attention of the valid rows of q [B, T, HQ, d] over a contiguous or paged cache; see the kernel's module.

    k and v in q's type, or float8_e4m3fn with scales. splits: pieces the keys are divided into, merged afterwards.
    tile_rows: 128 or 64. Rows from q_len on are zero. Raises ValueError for a cache that is not contiguous.
    """
    (batch, rows, heads, dim), kv_heads = q.shape, k.shape[1]
    page = k.shape[2] if block_table is not None else 0
    values = {
        "B": batch,
        "T": rows,
        "S": page * block_table.shape[1] if block_table is not None else k.shape[2],
        "HKV": kv_heads,
        "G": heads // kv_heads,
        "NSPLIT": splits,
    }
    tile, options = tile_of(q, tile_rows)
    quantized = k.dtype == torch.float8_e4m3fn
    constants = {
        **tile,
        "SPLIT": int(splits > 1),
        "TREE": int(mask is not None),
        "PAGE": page,
        "FP8": architecture(q.device).fp8 if quantized else 0,
    }
    cache = {"k": k.view(torch.uint8), "v": v.view(torch.uint8)} if quantized else {"k": k, "v": v}
    tensors = {
        "q": q.contiguous(), **cache, "kv_len": kv_len, "q_len": q_len, "mask": mask, "block_table": block_table,
        "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    out = torch.empty_like(tensors["q"])
    if splits == 1:
        launch("verify_attention", values, {**tensors, "out": out}, constants, **options)
        return out
    partial = q.new_empty((splits, *q.shape), dtype=torch.float32)
    lse = q.new_empty((splits, *q.shape[:-1]), dtype=torch.float32)
    launch("verify_attention", values, {**tensors, "partial": partial, "lse": lse}, constants, **options)
    merge = {"ROWS": batch * rows * heads, "NSPLIT": splits}
    pieces = {"partial": partial, "lse": lse, "out": out}
    launch("verify_combine", merge, pieces, {"HEAD_DIM": dim, "BLOCK_R": 16})
    return out


_verify_attention = torch.library.custom_op("trtspec::verify_attention", verify_attention, mutates_args=())


@_verify_attention.register_kernel("cpu")
def _(
    q, k, v, kv_len, q_len, mask=None, block_table=None, k_scale=None, v_scale=None, splits=1, tile_rows=128
):
    lengths = (kv_len.numpy(), q_len.numpy())
    optional = [None if t is None else t.numpy() for t in (mask, block_table, k_scale, v_scale)]
    found = verify_reference.verify_attention(*(_real(t) for t in (q, k, v)), *lengths, *optional)
    return torch.from_numpy(found).to(q.dtype)


@_verify_attention.register_fake
def _(
    q, k, v, kv_len, q_len, mask=None, block_table=None, k_scale=None, v_scale=None, splits=1, tile_rows=128
):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def int4_kv_attention(
    q: Tensor,
    k_upper: Tensor,
    k_lower: Optional[Tensor],  # noqa: UP045
    k_scale: Tensor,
    k_zero: Tensor,
    v_upper: Tensor,
    v_lower: Optional[Tensor],  # noqa: UP045
    v_scale: Tensor,
    v_zero: Tensor,
    k_recent: Tensor,
    v_recent: Tensor,
    quant_len: Tensor,
    recent_len: Tensor,
    q_len: Tensor,
    tile_rows: int = 128,
) -> Tensor:
    """Attention of a chain's rows over QuantSpec's two-nibble cache and its recent 16-bit rows; see the kernel.

    k_lower and v_lower None: the draft, which reads the upper nibbles only.
    """
    batch, rows, heads, _ = q.shape
    kv_heads, keys = k_upper.shape[1:3]
    values = {
        "B": batch, "T": rows, "S": keys, "R": k_recent.shape[2], "HKV": kv_heads, "G": heads // kv_heads,
    }  # fmt: skip
    tile, options = tile_of(q, tile_rows)
    constants = {**tile, "GROUP": keys // k_scale.shape[2], "BOTH": int(k_lower is not None)}
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = {
        "q": q.contiguous(), "k_upper": k_upper, "k_lower": k_lower, "k_scale": k_scale, "k_zero": k_zero,
        "v_upper": v_upper, "v_lower": v_lower, "v_scale": v_scale, "v_zero": v_zero, "k_recent": k_recent,
        "v_recent": v_recent, "quant_len": quant_len, "recent_len": recent_len, "q_len": q_len, "out": out,
    }  # fmt: skip
    launch("int4_kv_attention", values, tensors, constants, **options)
    return out


_int4_kv_attention = torch.library.custom_op("trtspec::int4_kv_attention", int4_kv_attention, mutates_args=())


@_int4_kv_attention.register_kernel("cpu")
def _(
    q, k_upper, k_lower, k_scale, k_zero, v_upper, v_lower, v_scale, v_zero, k_recent, v_recent, quant_len,
    recent_len, q_len, tile_rows=128,
):  # fmt: skip
    group = k_upper.shape[2] // k_scale.shape[2]

    def dequantized(upper, lower, scale, zero):
        codes = 16.0 * int4_reference.unpack(upper.numpy())
        if lower is not None:
            codes += int4_reference.unpack(lower.numpy()) - 8.0
        return codes * scale + zero

    key_scale, key_zero = (_real(t).repeat(group, axis=2) for t in (k_scale, k_zero))
    value_scale, value_zero = (_real(t)[..., None] for t in (v_scale, v_zero))
    keys = dequantized(k_upper, k_lower, key_scale, key_zero)
    values = dequantized(v_upper, v_lower, value_scale, value_zero)
    recent = (_real(k_recent), _real(v_recent))
    lengths = (quant_len.numpy(), recent_len.numpy(), q_len.numpy())
    found = int4_reference.int4_kv_attention(_real(q), keys, values, *recent, *lengths)
    return torch.from_numpy(found).to(q.dtype)


@_int4_kv_attention.register_fake
def _(
    q, k_upper, k_lower, k_scale, k_zero, v_upper, v_lower, v_scale, v_zero, k_recent, v_recent, quant_len,
    recent_len, q_len, tile_rows=128,
):  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _real(tensor: Tensor):
    """float64 NumPy array of a tensor of any floating type."""
    return tensor.to(torch.float64).numpy()
