"""Attention of D + 1 query rows against the KV cache, the query heads of a KV head packed into row tiles.

Decoding reads the whole cache for one row of each query head: memory-bound, with the matrix units idle. Row
m = t·G + g of a tile is query head g of token t, so one pass over K and V serves M rows, and the first
D = ⌊M/G⌋ − 1 drafts cost no traffic and, as a partly filled tile costs a full one, no multiplication either.
(Packed query heads: FlashInfer, 2501.01005, section 3.2; FlashDecoding for the split; online softmax in base 2:
FlashAttention-2, 2307.08691, section 3.1.)

    q, out      [B, T, HKV·G, d] fp16 | bf16
    k, v        [B, HKV, S, d], or [pages, HKV, PAGE, d] with block_table [B, S/PAGE] int32; the type of q, or e4m3
                bytes with k_scale, v_scale [HKV] fp32
    kv_len      [B] int32, the new tokens included;  q_len [B] int32, rows t ≥ q_len come out as zero
    mask        [B, T, ⌈T/32⌉] int32, token trees only: bit j of word w says that row t sees row 32·w + j
    partial     [NSPLIT, B, T, HKV·G, d] fp32 and lse [NSPLIT, B, T, HKV·G] fp32 instead of out with SPLIT

Grid (⌈T·G/M⌉, HKV·NSPLIT, B): tiles of one KV head run side by side, so all but the first find K and V in L2.
Cost of one KV head and sequence: 2·d·kv_len elements read once, and 4·d·M·BLOCK_N FLOP for each (tile, key block)
pair, `trtspec.plan.tiles.mma_key_blocks` of them: a chain's tile ends with the last key its last row sees.
Memory beyond kv_len and rows beyond q_len are never read.
"""

import triton
import triton.language as tl

from trtspec_plugins.kernels.tile import product, softmax_step


@triton.jit
def _decode(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """K or V elements as `dtype`. FP8 = 2: e4m3 bytes moved to fp16's fields, which is the value / 256."""
    if FP8 == 1:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == 2:
        bits = x.to(tl.int16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _tree_visible(mask_row, start, prefix, keys, words, valid, BLOCK_N: tl.constexpr):
    """bool [M, BLOCK_N]: which of the keys from `start` on each row sees.

    One word for each row and 32 keys is loaded and shifted so that its bit i is key start + i; a gathered tile of
    words would not fit beside K and V. The first block may begin before the new tokens, so bits are counted from
    BLOCK_N keys earlier: division truncates, and must not meet a negative number.
    """
    n = start + tl.arange(0, BLOCK_N)
    offset = start - prefix + BLOCK_N
    word, shift = offset // 32 - BLOCK_N // 32, (offset % 32).to(tl.int64)
    low = _tree_word(mask_row, word, words, valid)
    bits = tl.zeros([mask_row.shape[0], BLOCK_N], tl.int32)
    for part in tl.static_range(BLOCK_N // 32):
        high = _tree_word(mask_row, word + part + 1, words, valid)
        both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        aligned = (both >> shift).to(tl.int32)
        here = (tl.arange(0, BLOCK_N) // 32 == part)[None, :]
        bits = tl.where(here, aligned[:, None], bits)
        low = high
    seen = (bits >> (tl.arange(0, BLOCK_N) % 32)[None, :]) & 1
    return (seen != 0) & (n < keys)[None, :]


@triton.jit
def _tree_word(mask_row, word, words, valid):
    """Word `word` of each row's mask: all ones before the first (the prefix), zero past the last."""
    loaded = tl.load(mask_row + word, mask=valid & (word >= 0) & (word < words), other=0)
    return tl.where(word < 0, -1, loaded)


@triton.jit
def _attend(
    acc, total, top, q, k, v, table, first_key, last_key, stride, keys, head, HKV, scale,
    limit, mask_row, prefix, words, valid,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, TREE: tl.constexpr,
    UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks from first_key to last_key. acc [M, d], total and top [M] carry it."""
    dims = tl.arange(0, HEAD_DIM)
    for start in tl.range(first_key, last_key, stride):
        n = start + tl.arange(0, BLOCK_N)
        if PAGE == 0:
            cache, place = 0, n
        elif PAGE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE).to(tl.int64)
            cache, place = (page * HKV + head) * PAGE * HEAD_DIM, n % PAGE
        else:
            page = tl.load(table + n // PAGE, mask=n < keys, other=0).to(tl.int64)
            cache, place = 0, (page * HKV + head) * PAGE + n % PAGE
        offsets = place[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            k_block = tl.load(k + cache + offsets, mask=(n < keys)[:, None], other=0)
        else:
            k_block = tl.load(k + cache + offsets)
        k_block = _decode(k_block, q.dtype, FP8)
        zero = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        scores = product(q, tl.trans(k_block), zero, UPCAST)
        if MASKED:
            if TREE:
                visible = _tree_visible(mask_row, start, prefix, keys, words, valid, BLOCK_N)
            else:
                visible = n[None, :] <= limit[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        weights, shrink, total, top = softmax_step(scores, scale, total, top, MASKED)
        acc = acc * shrink[:, None]
        if MASKED:
            v_block = tl.load(v + cache + offsets, mask=(n < keys)[:, None], other=0)
        else:
            v_block = tl.load(v + cache + offsets)
        v_block = _decode(v_block, q.dtype, FP8)
        acc = product(weights.to(q.dtype), v_block, acc, UPCAST)
    return acc, total, top


@triton.jit
def verify_attention(
    q, k, v, kv_len, q_len, mask, block_table, k_scale, v_scale,
    T, S, HKV, G, NSPLIT,
    out, partial, lse,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SM_SCALE: tl.constexpr,
    SPLIT: tl.constexpr, TREE: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row tile of one KV head, sequence and piece of the keys. Shapes: see the module."""
    tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, piece = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    keys, tokens = tl.load(kv_len + batch), tl.load(q_len + batch)
    rows, prefix = tokens * G, keys - tokens

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // G
    valid = m < rows
    # 64-bit arithmetic stays in the pointers: offsets within a sequence take half the registers
    row = (t * HKV + head) * G + m % G
    sequence = batch * T * HKV * G
    dims = tl.arange(0, HEAD_DIM)
    place = row[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + sequence * HEAD_DIM + place, mask=valid[:, None], other=0)

    # keys every row of the tile sees, and the end of those any row sees
    if TREE:
        shared, end = prefix, keys
    else:
        shared = prefix + tile * BLOCK_M // G + 1
        end = prefix + (tl.minimum((tile + 1) * BLOCK_M, rows) - 1) // G + 1
    end = tl.where(tile * BLOCK_M < rows, end, 0)
    unmasked = tl.minimum(shared, end) // BLOCK_N
    if SPLIT:
        # every NSPLIT-th block: even work at any length, and which piece a key is in depends on nothing but the key,
        # so a row's result does not depend on the rows beside it
        stride = BLOCK_N * NSPLIT
        first_masked = piece + tl.cdiv(tl.maximum(unmasked - piece, 0), NSPLIT) * NSPLIT
    else:
        stride: tl.constexpr = BLOCK_N
        first_masked = unmasked

    scale = SM_SCALE * 1.4426950408889634
    if FP8:
        scale *= tl.load(k_scale + head)
    if FP8 == 2:
        scale *= 256.0
    if PAGE == 0:
        cache = (batch * HKV + head) * S * HEAD_DIM
        k += cache
        v += cache
        table = None
    else:
        table = block_table + batch * (S // PAGE)
    limit = prefix + tl.minimum(t, tokens - 1)
    words = tl.cdiv(T, 32)
    if TREE:
        mask_row = mask + batch * T * words + t * words
    else:
        mask_row = None

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, total, top = _attend(
        acc, total, top, queries, k, v, table, piece * BLOCK_N, unmasked * BLOCK_N, stride, keys, head, HKV, scale,
        limit, mask_row, prefix, words, valid, HEAD_DIM, BLOCK_N, PAGE, FP8, TREE, UPCAST, False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, queries, k, v, table, first_masked * BLOCK_N, end, stride, keys, head, HKV, scale,
        limit, mask_row, prefix, words, valid, HEAD_DIM, BLOCK_N, PAGE, FP8, TREE, UPCAST, True,
    )  # fmt: skip

    attended = valid & (total > 0)  # padding rows and rows without a key in this piece are zero
    factor = 1.0 / tl.where(attended, total, 1.0)
    if FP8:
        factor *= tl.load(v_scale + head)
    if FP8 == 2:
        factor *= 256.0
    result = tl.where(attended[:, None], acc * factor[:, None], 0.0)
    inside = m < T * G
    if SPLIT:
        sequence += piece * (tl.num_programs(2).to(tl.int64) * T * HKV * G)
        tl.store(partial + sequence * HEAD_DIM + place, result, mask=inside[:, None])
        log_sum = top + tl.log2(tl.where(attended, total, 1.0))
        tl.store(lse + sequence + row, tl.where(attended, log_sum, float("-inf")), mask=inside)
    else:
        result = result.to(out.dtype.element_ty)
        tl.store(out + sequence * HEAD_DIM + place, result, mask=inside[:, None])


@triton.jit
def verify_combine(partial, lse, ROWS, NSPLIT, out, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr):
    """Merge the pieces of a SPLIT verify_attention: Σ 2^lse·partial / Σ 2^lse; rows without any key are zero.

    partial [NSPLIT, ROWS, d] fp32, lse [NSPLIT, ROWS] fp32, out [ROWS, d]. Reads 4·NSPLIT·ROWS·(d + 1) bytes.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, HEAD_DIM)
    inside, stride = rows < ROWS, tl.cast(ROWS, tl.int64)
    acc = tl.zeros([BLOCK_R, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for piece in tl.range(0, NSPLIT):
        log_sum = tl.load(lse + piece * stride + rows, mask=inside, other=float("-inf"))
        seen = log_sum > float("-inf")
        place = (piece * stride + rows)[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(partial + place, mask=seen[:, None], other=0.0)
        new_top = tl.maximum(top, log_sum)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp2(log_sum - base), tl.exp2(top - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside[:, None])
