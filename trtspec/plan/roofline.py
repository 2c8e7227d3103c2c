"""Roofline arithmetic of one decode step: pure functions, seconds in and out.

Symbols: B sequences, D draft length, rows = B·(D+1); P weights; F FLOP/s and BW bytes/s as achieved.
"""

from __future__ import annotations

GEMM_ROW_TILE = 64  # M_g: the row tile of the linear layers' matrix multiply


def memory_bound_s(total_bytes: float, bw_bytes_per_s: float) -> float:
    """Seconds to read `total_bytes` once: the floor of a step (140 GB over 3,350 GB/s is 41.8 ms)."""
    return total_bytes / bw_bytes_per_s


def linear_s(
    parameters: float,
    weight_bytes: float,
    rows: float,
    flops: float,
    bw: float,
    overlap: bool = True,
    row_tile: int = GEMM_ROW_TILE,
) -> float:
    """Linear layers: weights are read once a step, 2·P FLOP per row, rows in whole tiles.

    Free of extra cost while rows ≤ F·e_w/(2·BW). Without overlap (CPU) the two times add and rows are not tiled.
    """
    if not overlap:
        return weight_bytes / bw + 2 * parameters * rows / flops
    tiled = -(-rows // row_tile) * row_tile
    return max(weight_bytes / bw, 2 * parameters * tiled / flops)


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected experts visited by `tokens` tokens that each pick `per_token` evenly: E·(1 − (1 − k/E)^n)."""
    if not experts:
        return 0.0
    return experts * (1 - (1 - per_token / experts) ** tokens)


def attention_memory_s(cache_bytes: float, bw: float) -> float:
    """K and V of all sequences, once from memory: tiles past the first are meant to hit the cache."""
    return cache_bytes / bw


def attention_mma_s(
    rows: float, keys: float, key_dim: float, value_dim: float, heads_batch: float, flops: float
) -> float:
    """Both matrix multiplies over padded rows: 2·rows·keys·(d_k + d_v) FLOP per KV head and sequence."""
    return 2 * rows * keys * (key_dim + value_dim) * heads_batch / flops


def attention_exp_s(rows: float, keys: float, heads_batch: float, sms: int, clock_hz: float) -> float:
    """Softmax exponentials: 16 per clock and multiprocessor."""
    return rows * keys * heads_batch / (sms * clock_hz * 16)


def free_rows(flops: float, bw: float, kv_bytes: float) -> float:
    """R*: padded query rows per KV head that cost nothing beyond reading K and V: F·e / (2·BW)."""
    return flops * kv_bytes / (2 * bw)


def ridge_tokens(flops: float, bw: float, weight_bytes_per_parameter: float) -> float:
    """M*: rows at which a dense linear layer leaves the memory-bound region."""
    return flops * weight_bytes_per_parameter / (2 * bw)


def compute_bound_draft_length(ridge_rows: float, batch: int) -> int:
    """Guideline 1: D at which the linear layers reach the ridge, M*/B − 1; for a mixture M* is M*·E/k."""
    return max(0, int(ridge_rows / batch) - 1)


def allreduce_s(message_bytes: float, ranks: int, link_bw: float, latency_s: float) -> float:
    """One ring all-reduce over `ranks` devices (0 for a single one)."""
    if ranks <= 1:
        return 0.0
    return latency_s + 2 * (ranks - 1) / ranks * message_bytes / link_bw
