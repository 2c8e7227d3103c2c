"""Attention against QuantSpec's hierarchical KV cache (2502.10424, section 4): one cache for draft and target.

A key or value is an 8-bit code in two nibbles: the upper one alone is a 4-bit cache, which the draft reads, both
together are the 8-bit cache of the target. They lie in two planes, so drafting moves half the bytes of verifying.

    q, out                [B, T, HKV·G, d] fp16 | bf16
    k_upper, v_upper      [B, HKV, S, d/2] uint8; byte i holds dims i (low nibble) and i + d/2 (high nibble), so the
                          halves of a head are two products of width d/2 and no nibble is ever interleaved
    k_lower, v_lower      the same of the lower code + 8, with BOTH
    k_scale, k_zero       [B, HKV, S/GROUP, d]: per channel and GROUP tokens
    v_scale, v_zero       [B, HKV, S]: per token
    k_recent, v_recent    [B, HKV, R, d]: the last tokens in 16 bits, the step's own included
    quant_len, recent_len, q_len  [B] int32; quant_len a multiple of GROUP, recent_len ≥ q_len

    value = scale · 16 · upper + zero            draft
    value = scale · (16 · upper + lower) + zero  target, lower in −8..7

Grid (⌈T·G/M⌉, HKV, B). Row t of a chain sees every quantized key and recent keys up to its own. Cost of one KV head
and sequence: d·quant_len bytes (half of that for the draft) and 4·d·recent_len, read once; 4·d·M·BLOCK_N FLOP for each
key block, as in `verify_attention`.
"""

import triton
import triton.language as tl

from trtspec_plugins.kernels.tile import product, softmax_step


@triton.jit
def _halves(upper, lower, n, HALF: tl.constexpr, BOTH: tl.constexpr):
    """fp32 codes [BLOCK_N, d/2] of the lower and the upper half of the dims of tokens n."""
    places = n[:, None] * HALF + tl.arange(0, HALF)[None, :]
    codes = tl.load(upper + places).to(tl.int32)
    first, second = (codes & 15) * 16, codes & 240
    if BOTH:
        codes = tl.load(lower + places).to(tl.int32)
        first, second = first + (codes & 15) - 8, second + (codes >> 4) - 8
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def int4_kv_attention(
    q, k_upper, k_lower, k_scale, k_zero, v_upper, v_lower, v_scale, v_zero, k_recent, v_recent,
    quant_len, recent_len, q_len,
    T, S, R, HKV, G,
    out,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SM_SCALE: tl.constexpr,
    GROUP: tl.constexpr, BOTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row tile of one KV head and sequence. Shapes: see the module."""
    HALF: tl.constexpr = HEAD_DIM // 2
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    quantized, recent = tl.load(quant_len + batch), tl.load(recent_len + batch)
    tokens = tl.load(q_len + batch)
    rows, prefix = tokens * G, recent - tokens

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // G
    valid = m < rows
    # 64-bit arithmetic stays in the pointers: offsets within a sequence take half the registers
    row = (t * HKV + head) * G + m % G
    q += batch * T * HKV * G * HEAD_DIM
    out += batch * T * HKV * G * HEAD_DIM
    half = tl.arange(0, HALF)
    place = row[:, None] * HEAD_DIM + half[None, :]
    q_first = tl.load(q + place, mask=valid[:, None], other=0)
    q_second = tl.load(q + place + HALF, mask=valid[:, None], other=0)

    cache = batch * HKV + head
    k_upper += cache * S * HALF
    v_upper += cache * S * HALF
    if BOTH:
        k_lower += cache * S * HALF
        v_lower += cache * S * HALF
    k_scale += cache * (S // GROUP) * HEAD_DIM
    k_zero += cache * (S // GROUP) * HEAD_DIM
    v_scale += cache * S
    v_zero += cache * S
    k_recent += cache * R * HEAD_DIM
    v_recent += cache * R * HEAD_DIM
    scale = SM_SCALE * 1.4426950408889634
    first = tl.zeros([BLOCK_M, HALF], tl.float32)
    second = tl.zeros([BLOCK_M, HALF], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)

    active = tile * BLOCK_M < rows
    for start in tl.range(0, tl.where(active, quantized, 0), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        channel = start // GROUP * HEAD_DIM + half[None, :]
        code_first, code_second = _halves(k_upper, k_lower, n, HALF, BOTH)
        keys_first = code_first * tl.load(k_scale + channel) + tl.load(k_zero + channel)
        keys_second = code_second * tl.load(k_scale + channel + HALF) + tl.load(k_zero + channel + HALF)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = product(q_first, tl.trans(keys_first.to(q_first.dtype)), zero, UPCAST)
        scores = product(q_second, tl.trans(keys_second.to(q_first.dtype)), scores, UPCAST)
        weights, shrink, total, top = softmax_step(scores, scale, total, top, False)
        weights = weights.to(q_first.dtype)
        code_first, code_second = _halves(v_upper, v_lower, n, HALF, BOTH)
        step, base = tl.load(v_scale + n)[:, None].to(tl.float32), tl.load(v_zero + n)[:, None]
        values = (code_first * step + base).to(q_first.dtype)
        first = product(weights, values, first * shrink[:, None], UPCAST)
        values = (code_second * step + base).to(q_first.dtype)
        second = product(weights, values, second * shrink[:, None], UPCAST)

    limit = prefix + tl.minimum(t, tokens - 1)
    end = prefix + (tl.minimum((tile + 1) * BLOCK_M, rows) - 1) // G + 1
    for start in tl.range(0, tl.where(active, end, 0), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        places, inside = n[:, None] * HEAD_DIM + half[None, :], (n < recent)[:, None]
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        keys = tl.load(k_recent + places, mask=inside, other=0)
        scores = product(q_first, tl.trans(keys), zero, UPCAST)
        keys = tl.load(k_recent + places + HALF, mask=inside, other=0)
        scores = product(q_second, tl.trans(keys), scores, UPCAST)
        scores = tl.where(n[None, :] <= limit[:, None], scores, float("-inf"))
        weights, shrink, total, top = softmax_step(scores, scale, total, top, True)
        weights = weights.to(q_first.dtype)
        values = tl.load(v_recent + places, mask=inside, other=0)
        first = product(weights, values, first * shrink[:, None], UPCAST)
        values = tl.load(v_recent + places + HALF, mask=inside, other=0)
        second = product(weights, values, second * shrink[:, None], UPCAST)

    factor = tl.where(valid, 1.0 / tl.where(valid, total, 1.0), 0.0)[:, None]
    inside = (m < T * G)[:, None]
    first = tl.where(valid[:, None], first * factor, 0.0).to(out.dtype.element_ty)
    second = tl.where(valid[:, None], second * factor, 0.0).to(out.dtype.element_ty)
    tl.store(out + place, first, mask=inside)
    tl.store(out + place + HALF, second, mask=inside)
