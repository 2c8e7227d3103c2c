"""Write a step's keys and values into an e4m3 cache, in place.

    k_new, v_new      [B, T, HKV, d] fp16 | bf16: of the step's rows, keys rotated
    k, v              [B, HKV, S, d] bytes of e4m3
    start             [B] int32: key index of row 0;  q_len [B] int32: valid rows, the others are not written
    k_scale, v_scale  [HKV] fp32: value of a stored 1, as verify_attention reads them
    k_out, v_out      the memory of k and v

Grid (⌈T/BLOCK_T⌉, HKV, B). Values are divided by their scale, held to ±448 (the largest e4m3) and rounded to nearest,
ties to even, by arithmetic on their bits: sm_80 has no instruction for it, and so every GPU stores the same bytes.
Cost: 2 bytes read and 1 written for each element. (e4m3: FP8 formats for deep learning, 2209.05433, section 3.)
"""

import triton
import triton.language as tl


@triton.jit
def _e4m3(x):
    """uint8 codes of fp32 values: sign, four bits of exponent + 7, three of mantissa."""
    bits = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # twenty bits of mantissa go, the last that stays decides a tie; exponents lose 127 − 7
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^−6 a code counts steps of 2^−9: beside 2^23 a float has no room for less than one of them
    value = magnitude.to(tl.float32, bitcast=True)
    steps = (value * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(value < 0.015625, steps, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def kv_append(
    k_new, v_new, k, v, start, q_len, k_scale, v_scale, T, S, HKV, k_out, v_out,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    valid = (t < tl.load(q_len + batch))[:, None]
    source = ((batch * T + t) * HKV + head)[:, None] * HEAD_DIM + dims
    place = ((batch * HKV + head) * S + tl.load(start + batch) + t)[:, None] * HEAD_DIM + dims
    keys = tl.load(k_new + source, mask=valid, other=0).to(tl.float32)
    values = tl.load(v_new + source, mask=valid, other=0).to(tl.float32)
    tl.store(k_out + place, _e4m3(tl.math.div_rn(keys, tl.load(k_scale + head))), mask=valid)
    tl.store(v_out + place, _e4m3(tl.math.div_rn(values, tl.load(v_scale + head))), mask=valid)
