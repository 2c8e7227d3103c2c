"""What the attention kernels share: products and the online softmax of a row tile."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """acc + a·b. UPCAST: in fp32, for the interpreter, whose bf16 products are not the hardware's."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def softmax_step(scores, scale, total, top, MASKED: tl.constexpr):
    """One key block of an online softmax in base 2 (FlashAttention-2, 2307.08691, section 3.1).

    scores fp32 [M, N], −inf for hidden keys (MASKED); weights are 2^(scores·scale − top). total, top [M] carry the
    sum and the maximum. Returns (weights, factor of what was accumulated before, total, top).
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    if MASKED:  # a row may have seen no key yet: keep −inf − −inf out of the exponent
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        base = new_top
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, total * shrink + tl.sum(weights, 1), new_top
