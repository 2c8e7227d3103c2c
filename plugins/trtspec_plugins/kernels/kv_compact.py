"""Move the accepted rows of a token tree to where a chain would have put them, in place.

A verify step writes the keys and values of all T rows behind the sequence. Of a tree, those on the accepted path are
kept: row path[i] moves to place 1 + i after row 0 (SpecInfer, 2305.09781, section 5; the cache must look as if only
the accepted tokens had ever been there).

    k, v       [B, HKV, S, d], or [pages, HKV, PAGE, d] with block_table [B, S/PAGE]; elements of 16 or 8 bits, moved as
               they are
    path       [B, A] int32: accepted rows, strictly ascending, row 0 not among them;  path_len [B] int32
    start      [B] int32: key index of row 0
    k_out, v_out  the memory of k and v

Grid (HKV, B). path[i] ≥ i + 1, so a row never moves backwards over one that is still to be moved: blocks of BLOCK_A
rows are loaded whole, and stored after a barrier. Cost: 4·path_len·d elements, read and written.
"""

import triton
import triton.language as tl


@triton.jit
def _places(n, inside, table, head, HKV, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr):
    """int64 [A, d]: offsets of the elements of keys `n` of one KV head."""
    place = n.to(tl.int64)
    if PAGE > 0:
        page = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
        place = (page * HKV + head) * PAGE + n % PAGE
    return place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def kv_compact(
    k, v, path, path_len, start, block_table, S, HKV, A, k_out, v_out,
    HEAD_DIM: tl.constexpr, BLOCK_A: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count, first = tl.load(path_len + batch), tl.load(start + batch)
    table = None
    if PAGE == 0:
        cache = (batch * HKV + head) * S * HEAD_DIM
        k += cache
        v += cache
        k_out += cache
        v_out += cache
    else:
        table = block_table + batch * (S // PAGE)
    for block in tl.range(0, count, BLOCK_A):
        i = block + tl.arange(0, BLOCK_A)
        row = tl.load(path + batch * A + i, mask=i < count, other=0)
        moved = (i < count) & (row != i + 1)  # the others are in place already
        source = _places(first + row, moved, table, head, HKV, HEAD_DIM, PAGE)
        target = _places(first + 1 + i, moved, table, head, HKV, HEAD_DIM, PAGE)
        keys = tl.load(k + source, mask=moved[:, None], other=0)
        values = tl.load(v + source, mask=moved[:, None], other=0)
        tl.debug_barrier()  # no row of the block is overwritten before all of them are read
        tl.store(k_out + target, keys, mask=moved[:, None])
        tl.store(v_out + target, values, mask=moved[:, None])
        tl.debug_barrier()
