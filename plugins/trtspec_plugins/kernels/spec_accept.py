"""Which drafts the target accepts, and the token after them, drawn so that the output is distributed as p alone.

    p          [B, T, V] fp32: the target's distribution after each row, temperature and filters applied; one-hot at
               temperature 0
    q          [B, T, V] fp32: at row t, what the draft of row t + 1 was drawn from; its last valid row is not read
    tokens     [B, T] int32: row tokens, column 0 the committed one;  q_len [B] int32: 1 + drafts, 0 for no part
    seed       [B, 2] int32: low and high word;  position [B] int32: output position of the first token emitted
    score      [B, T, NSPLIT] fp32 and winner [B, T, NSPLIT] int32: the best token of each slice of the vocabulary
    emitted    [B, T] int32: accepted drafts and one token more, then −1;  accepted [B] int32

Two rules, as `trtspec.verify.acceptance` has them. HAS_Q: rejection sampling (Leviathan et al., 2211.17192,
Algorithm 1; Chen et al., 2302.01318): draft x is accepted with probability min(1, p(x)/q(x)), at the first rejection
the token is drawn from norm(max(0, p − q)). Otherwise, for deterministic drafts, draw and compare: the token of every
row is drawn from p, drafts count while they equal it, and the text does not depend on them.

A draw is a race: of exponential times E/r(x) the shortest wins with probability r(x)/Σr, so weights need no sum and
slices of the vocabulary are scanned side by side. Random numbers are Philox4x32-10 (Salmon et al., SC'11) of key
`seed` and counter (token, output position, stream, 0): neither block size, slices, batch-mates nor draft length
change a result. Streams are those of `trtspec.verify.randomness`. A row whose p is NaN or zero throughout emits −1.

Grids: (NSPLIT, T, B), then (B). Cost: with q one row of p and q for each sequence, without it every valid row of p.
"""

import triton
import triton.language as tl

TARGET = tl.constexpr(0)
ACCEPT = tl.constexpr(1)
RESIDUAL = tl.constexpr(2)


@triton.jit
def _random(seed, token, position, stream):
    """32 random bits for each token. position, stream: of the shape of token, or scalars."""
    zero = token * 0
    low, high = tl.load(seed), tl.load(seed + 1)
    key = (high.to(tl.uint64) << 32) | (low.to(tl.uint64) & 0xFFFFFFFF)
    bits, _, _, _ = tl.philox(key, token, zero + position, zero + stream, zero)
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def _exponential(bits):
    """Exponential variates of 32 random bits, w = (bits + 1/2)/2³² and E = −log(1 − w).

    Small times decide a race, so they keep the resolution of w: below 2⁻⁷ the logarithm is a series in w.
    """
    w = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = w * (1 + w * (0.5 + w * (0.3333333333 + w * 0.25)))
    exact = -tl.log(tl.maximum(1 - w, 2.3283064365386963e-10))
    return tl.where(w < 0.0078125, series, exact)


@triton.jit
def spec_accept(
    p, q, tokens, q_len, seed, position, T, V, NSPLIT, score, winner,
    HAS_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The winner of one slice of the vocabulary in the race at row t; with q, at accepted rows, the draft itself."""
    piece, t, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, first = tl.load(q_len + batch), tl.load(position + batch)
    seed += 2 * batch
    row = (batch * T + t) * V
    token = tl.full([], -1, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    races, stream = t < rows, tl.full([], TARGET, tl.int32)
    rejected = tl.full([], -1, tl.int32)
    if HAS_Q:
        # every program finds the first rejection: the drafts' own entries of p and q are all it takes
        i = tl.arange(0, BLOCK_T)
        drafted = i + 1 < rows
        draft = tl.load(tokens + batch * T + i + 1, mask=drafted, other=0)
        entry = (batch * T + i) * V + draft
        p_draft = tl.load(p + entry, mask=drafted, other=0.0)
        q_draft = tl.load(q + entry, mask=drafted, other=1.0)
        uniform = (_random(seed, i * 0, first + i, ACCEPT) >> 8).to(tl.float32) * 5.9604644775390625e-08
        # u·q < p accepts with min(1, p/q), and never a token of probability 0
        at = tl.min(tl.where(drafted & (uniform * q_draft >= p_draft), i, rows - 1), 0)
        next_token = tl.load(tokens + batch * T + t + 1, mask=t + 1 < rows, other=-1)
        if t < at:
            token = next_token
            best = tl.full([], float("inf"), tl.float32)
        races = (t == at) & races
        if t + 1 < rows:
            rejected = next_token
            stream = tl.full([], RESIDUAL, tl.int32)
    if races:
        width = tl.cdiv(tl.cdiv(V, NSPLIT), BLOCK_V) * BLOCK_V
        for start in tl.range(piece * width, tl.minimum((piece + 1) * width, V), BLOCK_V):
            x = start + tl.arange(0, BLOCK_V)
            target = tl.load(p + row + x, mask=x < V, other=0.0)
            weight = target
            if HAS_Q:
                weight -= tl.load(q + row + x, mask=(x < V) & (rejected >= 0), other=0.0)
            time = _exponential(_random(seed, x, first + t, stream))
            # where rounding leaves p − q no mass at all, the race is that of p: all its scores are below any other
            scores = tl.where(weight > 0, weight / time, -time / target)
            scores = tl.where((target > 0) & (x != rejected), scores, float("-inf"))
            top = tl.max(scores, 0)
            leader = tl.min(tl.where(scores == top, x, V), 0)
            better = top > best
            token = tl.where(better, leader, token)
            best = tl.maximum(best, top)
    place = (batch * T + t) * NSPLIT + piece
    tl.store(score + place, best)
    tl.store(winner + place, token)


@triton.jit
def spec_accept_combine(tokens, q_len, score, winner, T, NSPLIT, emitted, accepted, BLOCK_T: tl.constexpr):
    """Winners of the rows from those of their slices; drafts are accepted while they are what their row drew."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.load(q_len + batch)
    t = tl.arange(0, BLOCK_T)
    best = tl.full([BLOCK_T], float("-inf"), tl.float32)
    drawn = tl.full([BLOCK_T], -1, tl.int32)
    for piece in tl.range(0, NSPLIT):
        place = (batch * T + t) * NSPLIT + piece
        top = tl.load(score + place, mask=t < rows, other=float("-inf"))
        token = tl.load(winner + place, mask=t < rows, other=-1)
        drawn = tl.where(top > best, token, drawn)
        best = tl.maximum(best, top)
    draft = tl.load(tokens + batch * T + t + 1, mask=t + 1 < rows, other=-2)
    count = tl.min(tl.where((t < rows) & (drawn == draft), BLOCK_T, t), 0)
    tl.store(emitted + batch * T + t, tl.where((t <= count) & (t < rows), drawn, -1), mask=t < T)
    tl.store(accepted + batch, tl.where(rows > 0, count, 0))
