"""Prompt lookup (Saxena 2023; LLMA, 2304.04487): find the last tokens earlier in the text, copy what followed.

    tokens     [B, L] int32;  length [B] int32
    draft      [B, D] int32, −1 past draft_len;  draft_len [B] int32

Of all earlier places whose last n tokens equal the text's last n, MIN_NGRAM ≤ n ≤ MAX_NGRAM, those with the largest n
count, and of those the latest. A copy that reaches the end of the text goes on through itself, as an overlapping
LZ77 copy does. STOP (−1: none) is part of no match and ends a draft. This is `trtspec.drafters.ngram.NgramIndex`
without its index.

Grid (B). Cost: MAX_NGRAM passes over the tokens, from L1 after the first; the index on the CPU is as fast, so this
kernel is for engines whose tokens never leave the device.
"""

import triton
import triton.language as tl


@triton.jit
def ngram_lookup(
    tokens, length, L, D, MIN_NGRAM, MAX_NGRAM, STOP, draft, draft_len,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    end = tl.load(length + batch)
    tokens += batch * L
    # n · 2^32 + the position after the match: the largest is the longest match, and of those the latest
    best = tl.full([], -1, tl.int64)
    for block in tl.range(1, end, BLOCK_L):
        following = block + tl.arange(0, BLOCK_L)
        equal = following < end
        matched = tl.zeros([BLOCK_L], tl.int32)
        for n in tl.range(1, MAX_NGRAM + 1):
            wanted = tl.load(tokens + end - n, mask=end >= n, other=-1)
            there = tl.load(tokens + following - n, mask=equal & (following >= n), other=-2)
            equal = equal & (there == wanted) & (wanted != STOP)
            matched += equal.to(tl.int32)
        key = (matched.to(tl.int64) << 32) | following.to(tl.int64)
        key = tl.where(matched >= MIN_NGRAM, key, -1)
        best = tl.maximum(best, tl.max(key, 0))
    found = best >= 0
    start = tl.where(found, best & 0xFFFFFFFF, 0).to(tl.int32)
    i = tl.arange(0, BLOCK_D)
    period = tl.maximum(end - start, 1)
    copied = tl.load(tokens + start + i % period, mask=found & (i < D), other=-1)
    stops = tl.min(tl.where((copied == STOP) & (i < D) & (STOP >= 0), i + 1, D), 0)
    count = tl.where(found, stops, 0)
    tl.store(draft + batch * D + i, tl.where(i < count, copied, -1), mask=i < D)
    tl.store(draft_len + batch, count)
