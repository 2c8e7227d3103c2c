"""Ancestor mask and depth of every row of a token tree (SpecInfer, 2305.09781, section 4.2), packed into bits.

    parents  [B, T] int32: row of each row's parent, smaller than its own; −1 for row 0, the root
    q_len    [B] int32: valid rows; those past it get no bit and depth 0
    mask     [B, T, ⌈T/32⌉] int32: bit j of word w says that row t is row 32·w + j or a descendant of it
    depth    [B, T] int32: distance from the root, that is, RoPE position minus the root's

Grid (⌈T/BLOCK_T⌉, ⌈T/32⌉, B): one program makes one word of BLOCK_T rows. All rows climb to the root together, so
the cost is the tree's depth times one gather of BLOCK_T parents, which stay in L1.
"""

import triton
import triton.language as tl


@triton.jit
def tree_mask(parents, q_len, T, mask, depth, BLOCK_T: tl.constexpr):
    word, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.where(t < tl.load(q_len + batch), t, -1)
    bits = tl.zeros([BLOCK_T], tl.int32)
    steps = tl.full([BLOCK_T], -1, tl.int32)
    climbing = tl.max(at, 0)
    while climbing >= 0:
        on = at >= 0
        bits |= tl.where(on & (at // 32 == word), 1 << (at % 32), 0)
        steps += on.to(tl.int32)
        above = tl.load(parents + batch * T + at, mask=on, other=-1)
        at = tl.where(above < at, above, -1)  # whatever the parents say, every climb ends
        climbing = tl.max(at, 0)
    row = batch * T + t
    tl.store(mask + row * tl.cdiv(T, 32) + word, bits, mask=t < T)
    if word == 0:
        tl.store(depth + row, tl.maximum(steps, 0), mask=t < T)
