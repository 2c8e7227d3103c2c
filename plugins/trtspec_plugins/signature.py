"""How each kernel is called: tensors, int32 scalars, launch grid. The one table its callers are written against.

Arguments stand in TensorRT's order: input tensors, int32 scalars, output tensors. Every tensor is contiguous
(row-major). A tensor with a `when` is passed only by variants that set that constant; in the Triton source it is
then None and is no parameter of the compiled entry. Lengths are device tensors, so a captured CUDA graph serves
every length; floats are compile-time constants, because TensorRT passes none.

Dimensions that recur: B sequences, T query rows of a sequence in one step (row 0 the last committed token, rows
1..D the drafts), HKV heads of the KV cache, G query heads for each of them, S keys a cache holds per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[
    str, Any
]  # dimension or scalar name → int, or a symbolic expression that supports · and cdiv
Divide = Callable[[Any, Any], Any]
Grid = tuple[Any, Any, Any]


def cdiv(a: int, b: int) -> int:
    """Ceiling division of Python integers."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor argument.

    dtype: a Triton element type, or a name that the variant resolves: `act` (fp16, bf16), `kv` (act, or u8: the
    bytes of e4m3), `e4m3` (u8), `bits` (i16 or i8: moved, never interpreted). when: the constant (or "!" constant)
    that must be set for the tensor to be there. alias: of an output, the input whose memory it is.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    meaning: str
    when: str | None = None
    alias: str | None = None

    def present(self, constants: Values) -> bool:
        """Whether a variant with these constants passes the tensor."""
        if self.when is None:
            return True
        negated = self.when.startswith("!")
        return bool(constants.get(self.when.lstrip("!"), 0)) != negated


@dataclass(frozen=True, slots=True)
class Scalar:
    """One int32 argument."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """A kernel's contract. constants: names of its compile-time parameters, with their meaning.

    grid(values, constants, cdiv): programs along x, y, z from dimensions and scalars. It only multiplies with the
    symbolic operand on the left and calls the given cdiv, so that it takes TensorRT's shape expressions too.
    """

    name: str
    inputs: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    outputs: tuple[Tensor, ...]
    constants: Mapping[str, str]
    grid: Callable[[Values, Values, Divide], Grid]

    def arguments(self, constants: Values) -> tuple[Tensor | Scalar, ...]:
        """What a compiled entry with these constants takes, in order."""
        inputs = tuple(tensor for tensor in self.inputs if tensor.present(constants))
        outputs = tuple(tensor for tensor in self.outputs if tensor.present(constants))
        return (*inputs, *self.scalars, *outputs)

    def parameters(self) -> tuple[str, ...]:
        """Names of the Triton function's parameters, in order: every argument, then the constants."""
        arguments = (*self.inputs, *self.scalars, *self.outputs)
        return tuple(argument.name for argument in arguments) + tuple(self.constants)


_T = Scalar("T", "query rows of a sequence")
_S = Scalar("S", "keys a sequence's cache holds; with pages, page size · width of the block table")
_HKV = Scalar("HKV", "KV heads")
_G = Scalar("G", "query heads per KV head, any number from 1")
_NSPLIT = Scalar("NSPLIT", "pieces the keys are divided into; 1 without SPLIT")
_Q = Tensor(
    "q", "act", ("B", "T", "HQ", "HEAD_DIM"), "rotated queries; HQ = HKV · G, head h·G + g reads KV head h"
)
_Q_LEN = Tensor("q_len", "i32", ("B",), "valid rows of each sequence, 0 to T; the others come out as zero")
_TABLE = Tensor("block_table", "i32", ("B", "S/PAGE"), "page that holds keys i·PAGE and on", when="PAGE")
_ATTENDED = Tensor("out", "act", ("B", "T", "HQ", "HEAD_DIM"), "attention output", when="!SPLIT")
_PARTIAL = Tensor(
    "partial", "fp32", ("NSPLIT", "B", "T", "HQ", "HEAD_DIM"), "output over one piece", when="SPLIT"
)
_LSE = Tensor(
    "lse", "fp32", ("NSPLIT", "B", "T", "HQ"), "log2 of the piece's Σ2^score; −inf for no key", when="SPLIT"
)
_TILE = {
    "HEAD_DIM": "elements of a head, a power of two",
    "BLOCK_M": "rows of a tile: 128 or 64",
    "BLOCK_N": "keys of a block",
    "SM_SCALE": "factor of the scores, HEAD_DIM^−1/2 in the compiled variants",
    "SPLIT": "1: keys divided into NSPLIT pieces, merged by verify_combine",
}
_UPCAST = {"UPCAST": "1: multiply in fp32, for the interpreter, whose 16-bit products are not the hardware's"}


def _attention_grid(values: Values, constants: Values, cdiv: Divide) -> Grid:
    tiles = cdiv(values["T"] * values["G"], constants["BLOCK_M"])
    return tiles, values["HKV"] * values["NSPLIT"], values["B"]


VERIFY_ATTENTION = KernelSignature(
    name="verify_attention",
    inputs=(
        _Q,
        Tensor("k", "kv", ("B", "HKV", "S", "HEAD_DIM"), "keys; with pages [pages, HKV, PAGE, HEAD_DIM]"),
        Tensor("v", "kv", ("B", "HKV", "S", "HEAD_DIM"), "values, laid out as the keys"),
        Tensor("kv_len", "i32", ("B",), "keys of each sequence, its q_len new ones included"),
        _Q_LEN,
        Tensor(
            "mask",
            "i32",
            ("B", "T", "T/32"),
            "bit j of word w: row t sees row 32·w + j; width ⌈T/32⌉",
            when="TREE",
        ),
        _TABLE,
        Tensor("k_scale", "fp32", ("HKV",), "key = k · k_scale, positive", when="FP8"),
        Tensor("v_scale", "fp32", ("HKV",), "value = v · v_scale", when="FP8"),
    ),
    scalars=(_T, _S, _HKV, _G, _NSPLIT),
    outputs=(_ATTENDED, _PARTIAL, _LSE),
    constants={
        **_TILE,
        "TREE": "1: rows see what their mask words say; 0: a chain, row t sees rows 0..t",
        "PAGE": "keys of a page, a power of two; 0: contiguous cache",
        "FP8": "0: keys in the type of q; 1: e4m3 bytes converted by the hardware; 2: decoded by shifts",
        **_UPCAST,
    },
    grid=_attention_grid,
)

VERIFY_COMBINE = KernelSignature(
    name="verify_combine",
    inputs=(
        Tensor("partial", "fp32", ("NSPLIT", "ROWS", "HEAD_DIM"), "outputs over the pieces"),
        Tensor("lse", "fp32", ("NSPLIT", "ROWS"), "log2 of each piece's Σ2^score"),
    ),
    scalars=(Scalar("ROWS", "B · T · HQ"), _NSPLIT),
    outputs=(Tensor("out", "act", ("ROWS", "HEAD_DIM"), "attention output, that is [B, T, HQ, HEAD_DIM]"),),
    constants={"HEAD_DIM": _TILE["HEAD_DIM"], "BLOCK_R": "rows of a program"},
    grid=lambda values, constants, cdiv: (cdiv(values["ROWS"], constants["BLOCK_R"]), 1, 1),
)

INT4_KV_ATTENTION = KernelSignature(
    name="int4_kv_attention",
    inputs=(
        _Q,
        Tensor(
            "k_upper",
            "u8",
            ("B", "HKV", "S", "HEAD_DIM/2"),
            "upper codes; byte i: dims i (low) and i + d/2 (high)",
        ),
        Tensor("k_lower", "u8", ("B", "HKV", "S", "HEAD_DIM/2"), "lower codes + 8, same places", when="BOTH"),
        Tensor("k_scale", "act", ("B", "HKV", "S/GROUP", "HEAD_DIM"), "step of the 8-bit code, per channel"),
        Tensor("k_zero", "act", ("B", "HKV", "S/GROUP", "HEAD_DIM"), "key at code 0"),
        Tensor("v_upper", "u8", ("B", "HKV", "S", "HEAD_DIM/2"), "upper codes of the values"),
        Tensor(
            "v_lower", "u8", ("B", "HKV", "S", "HEAD_DIM/2"), "lower codes + 8 of the values", when="BOTH"
        ),
        Tensor("v_scale", "act", ("B", "HKV", "S"), "step of the 8-bit code, per token"),
        Tensor("v_zero", "act", ("B", "HKV", "S"), "value at code 0"),
        Tensor("k_recent", "act", ("B", "HKV", "R", "HEAD_DIM"), "keys not quantized yet, the new ones last"),
        Tensor("v_recent", "act", ("B", "HKV", "R", "HEAD_DIM"), "their values"),
        Tensor("quant_len", "i32", ("B",), "quantized keys of each sequence, a multiple of GROUP"),
        Tensor("recent_len", "i32", ("B",), "recent keys of each sequence, its q_len new ones included"),
        _Q_LEN,
    ),
    scalars=(_T, Scalar("S", "quantized keys a cache holds"), Scalar("R", "recent keys it holds"), _HKV, _G),
    outputs=(Tensor("out", "act", ("B", "T", "HQ", "HEAD_DIM"), "attention output"),),
    constants={
        **{name: meaning for name, meaning in _TILE.items() if name != "SPLIT"},
        "GROUP": "tokens that share a key scale, a multiple of BLOCK_N",
        "BOTH": "1: target, both nibbles (8-bit); 0: draft, the upper one (4-bit)",
        **_UPCAST,
    },
    grid=lambda values, constants, cdiv: (
        cdiv(values["T"] * values["G"], constants["BLOCK_M"]),
        values["HKV"],
        values["B"],
    ),
)

_TOKENS = Tensor("tokens", "i32", ("B", "T"), "row tokens: column 0 the committed one, then the drafts")
_SCORE = Tensor("score", "fp32", ("B", "T", "NSPLIT"), "best score of a slice of the vocabulary")
_WINNER = Tensor("winner", "i32", ("B", "T", "NSPLIT"), "its token")
_SLICES = Scalar("NSPLIT", "slices the vocabulary is divided into; the result does not depend on it")

SPEC_ACCEPT = KernelSignature(
    name="spec_accept",
    inputs=(
        Tensor(
            "p", "fp32", ("B", "T", "V"), "target's distribution after each row; one-hot at temperature 0"
        ),
        Tensor(
            "q",
            "fp32",
            ("B", "T", "V"),
            "distribution row t+1 was drawn from, at row t; last row unread",
            when="HAS_Q",
        ),
        _TOKENS,
        Tensor(
            "q_len", "i32", ("B",), "valid rows of each sequence, 1 + its drafts; 0: sequence takes no part"
        ),
        Tensor("seed", "i32", ("B", "2"), "64-bit seed of each request: low word, high word"),
        Tensor("position", "i32", ("B",), "output position of the first token this step emits"),
    ),
    scalars=(_T, Scalar("V", "vocabulary"), _SLICES),
    outputs=(_SCORE, _WINNER),
    constants={
        "HAS_Q": "1: drafts drawn from q, rejection sampling; 0: deterministic drafts, draw and compare",
        "BLOCK_T": "a power of two, at least T",
        "BLOCK_V": "tokens of a step of the scan; the result does not depend on it",
    },
    grid=lambda values, constants, cdiv: (values["NSPLIT"], values["T"], values["B"]),
)

SPEC_ACCEPT_COMBINE = KernelSignature(
    name="spec_accept_combine",
    inputs=(_TOKENS, SPEC_ACCEPT.inputs[3], _SCORE, _WINNER),
    scalars=(_T, _SLICES),
    outputs=(
        Tensor("emitted", "i32", ("B", "T"), "accepted drafts and one more token, then −1"),
        Tensor(
            "accepted",
            "i32",
            ("B",),
            "accepted drafts a, 0 to D; a + 1 tokens are emitted (none where q_len = 0)",
        ),
    ),
    constants={"BLOCK_T": SPEC_ACCEPT.constants["BLOCK_T"]},
    grid=lambda values, constants, cdiv: (values["B"], 1, 1),
)

TREE_MASK = KernelSignature(
    name="tree_mask",
    inputs=(
        Tensor(
            "parents",
            "i32",
            ("B", "T"),
            "row of each row's parent, smaller than its own; −1 for row 0, the root",
        ),
        _Q_LEN,
    ),
    scalars=(_T,),
    outputs=(
        Tensor(
            "mask", "i32", ("B", "T", "T/32"), "packed ancestors and self, as verify_attention reads them"
        ),
        Tensor("depth", "i32", ("B", "T"), "distance from the root; a row's position is the root's + depth"),
    ),
    constants={"BLOCK_T": "rows of a program"},
    grid=lambda values, constants, cdiv: (
        cdiv(values["T"], constants["BLOCK_T"]),
        cdiv(values["T"], 32),
        values["B"],
    ),
)

KV_COMPACT = KernelSignature(
    name="kv_compact",
    inputs=(
        Tensor("k", "bits", ("B", "HKV", "S", "HEAD_DIM"), "keys; with pages [pages, HKV, PAGE, HEAD_DIM]"),
        Tensor("v", "bits", ("B", "HKV", "S", "HEAD_DIM"), "values, laid out as the keys"),
        Tensor("path", "i32", ("B", "A"), "accepted rows, ascending, row 0 left out"),
        Tensor("path_len", "i32", ("B",), "how many of them; 0 leaves the cache alone"),
        Tensor("start", "i32", ("B",), "key index of row 0: keys before this step"),
        _TABLE,
    ),
    scalars=(_S, _HKV, Scalar("A", "width of path")),
    outputs=(
        Tensor("k_out", "bits", ("B", "HKV", "S", "HEAD_DIM"), "the same cache", alias="k"),
        Tensor("v_out", "bits", ("B", "HKV", "S", "HEAD_DIM"), "the same cache", alias="v"),
    ),
    constants={
        "HEAD_DIM": _TILE["HEAD_DIM"],
        "BLOCK_A": "rows moved at once",
        "PAGE": "keys of a page; 0: contiguous",
    },
    grid=lambda values, constants, cdiv: (values["HKV"], values["B"], 1),
)

KV_APPEND = KernelSignature(
    name="kv_append",
    inputs=(
        Tensor("k_new", "act", ("B", "T", "HKV", "HEAD_DIM"), "rotated keys of the step's rows"),
        Tensor("v_new", "act", ("B", "T", "HKV", "HEAD_DIM"), "their values"),
        Tensor("k", "e4m3", ("B", "HKV", "S", "HEAD_DIM"), "keys"),
        Tensor("v", "e4m3", ("B", "HKV", "S", "HEAD_DIM"), "values"),
        Tensor("start", "i32", ("B",), "key index of row 0"),
        Tensor("q_len", "i32", ("B",), "valid rows of each sequence; the others are not written"),
        Tensor("k_scale", "fp32", ("HKV",), "key = k · k_scale, positive"),
        Tensor("v_scale", "fp32", ("HKV",), "value = v · v_scale, positive"),
    ),
    scalars=(_T, _S, _HKV),
    outputs=(
        Tensor("k_out", "e4m3", ("B", "HKV", "S", "HEAD_DIM"), "the same cache", alias="k"),
        Tensor("v_out", "e4m3", ("B", "HKV", "S", "HEAD_DIM"), "the same cache", alias="v"),
    ),
    constants={"HEAD_DIM": _TILE["HEAD_DIM"], "BLOCK_T": "rows of a program"},
    grid=lambda values, constants, cdiv: (
        cdiv(values["T"], constants["BLOCK_T"]),
        values["HKV"],
        values["B"],
    ),
)

NGRAM_LOOKUP = KernelSignature(
    name="ngram_lookup",
    inputs=(
        Tensor("tokens", "i32", ("B", "L"), "prompt and output of each sequence"),
        Tensor("length", "i32", ("B",), "valid tokens of each"),
    ),
    scalars=(
        Scalar("L", "width of tokens"),
        Scalar("D", "draft length asked for"),
        Scalar("MIN_NGRAM", "shortest suffix that counts as a match, from 1"),
        Scalar("MAX_NGRAM", "longest suffix compared"),
        Scalar("STOP", "token that no match holds and that ends a draft; −1: none"),
    ),
    outputs=(
        Tensor("draft", "i32", ("B", "D"), "what followed the match, then −1"),
        Tensor("draft_len", "i32", ("B",), "drafts found: D, fewer where STOP ends them, 0 without a match"),
    ),
    constants={
        "BLOCK_L": "positions of a step of the scan",
        "BLOCK_D": "a power of two, at least D",
    },
    grid=lambda values, constants, cdiv: (values["B"], 1, 1),
)

SIGNATURES: Mapping[str, KernelSignature] = {
    signature.name: signature
    for signature in (
        VERIFY_ATTENTION,
        VERIFY_COMBINE,
        INT4_KV_ATTENTION,
        SPEC_ACCEPT,
        SPEC_ACCEPT_COMBINE,
        TREE_MASK,
        KV_COMPACT,
        KV_APPEND,
        NGRAM_LOOKUP,
    )
}
