"""The variants that are compiled ahead of time: what is known only when a model is chosen, made finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from trtspec_plugins.index import Constants, Types


@dataclass(frozen=True, slots=True)
class Architecture:
    """capability: compute capability · 10. ptx_version: the oldest PTX ISA · 10 that assembles, so that the oldest
    driver loads it. shared_limit: bytes of shared memory a block may ask for. instruction: its matrix instruction.
    fp8: how e4m3 becomes 16-bit, as the kernels' constant FP8 has it. key_block, stages: keys of a block and blocks
    in flight. Where the accumulator lives in the registers of mma.sync, 64 keys spill; shorter blocks do not, and
    three of them in flight hide the same latency.
    """

    capability: int
    ptx_version: int
    shared_limit: int
    instruction: str
    fp8: int
    key_block: int
    stages: int


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_80": Architecture(80, 80, 163 * 1024, "mma.sync", fp8=2, key_block=32, stages=3),
    "sm_90a": Architecture(90, 80, 227 * 1024, "wgmma.mma_async", fp8=1, key_block=64, stages=2),
    "sm_100a": Architecture(100, 86, 227 * 1024, "tcgen05.mma", fp8=1, key_block=64, stages=2),
    "sm_120a": Architecture(120, 87, 99 * 1024, "mma.sync", fp8=1, key_block=32, stages=3),
}


def arch_of(capability: tuple[int, int]) -> str:
    """The compiled architecture a GPU runs: its own; else sm_80, whose PTX every later GPU can compile."""
    own = f"sm_{capability[0]}{capability[1]}a"
    return own if own in ARCHITECTURES else "sm_80"


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, compiled once. types: what its named element types are. default: what a build uses unless it
    measures otherwise; these do not spill. max_registers: of a thread, where ptxas left alone aims lower and spills.
    """

    name: str
    kernel: str
    arch: str
    types: Types
    constants: Constants
    warps: int
    stages: int
    default: bool = True
    max_registers: int | None = None


def variants() -> Iterator[Variant]:
    """All of them, in a fixed order."""
    for arch in ARCHITECTURES:
        yield from _attention(arch)
        yield from _int4_attention(arch)
        yield from _helpers(arch)


_DTYPES = ("bf16", "fp16")
# where the accumulator is in tensor memory, ptxas aims at 128 registers and may spill for it
_REGISTERS = {"sm_100a": 168}


@dataclass(frozen=True, slots=True)
class _Tactic:
    """A tile. warps: one for 16 rows, what a matrix instruction takes. key_block, stages: None: the architecture's."""

    word: str
    rows: int
    warps: int
    key_block: int | None = None
    stages: int | None = None


_LARGE, _HALF = _Tactic("m128", 128, 8), _Tactic("m64", 64, 4)
# for launchers that do not raise the limit of 48 KiB of shared memory: unpipelined, several blocks on a processor
_SMALL = _Tactic("small", 64, 4, key_block=32, stages=1)


def _attention(arch: str) -> Iterator[Variant]:
    """verify_attention and its tactics. FP8 keys make 128 rows compute-bound: there the 64-row tile is default."""
    for dtype, dim, page, tree, split, fp8, tactic in product(
        _DTYPES, (128, 64), (0, 64), (0, 1), (0, 1), (0, 1), (_LARGE, _HALF, _SMALL)
    ):
        if (dim == 64 and (fp8 or tactic is not _LARGE)) or (tactic is _SMALL and (fp8 or split)):
            continue  # small heads need no second tactic, and no FP8
        words = [
            tactic.word,
            *["kv_e4m3"] * fp8,
            *[f"page{page}"] * bool(page),
            *["tree"] * tree,
            *["split"] * split,
        ]
        flags = {
            "SPLIT": split,
            "TREE": tree,
            "PAGE": page,
            "FP8": ARCHITECTURES[arch].fp8 if fp8 else 0,
            "UPCAST": 0,
        }
        yield _variant(
            "verify_attention",
            arch,
            [dtype, f"d{dim}", *words],
            {"act": dtype, "kv": "u8" if fp8 else dtype},
            {**_tile(arch, dim, tactic.rows, tactic.key_block), **flags},
            tactic.warps,
            tactic.stages or ARCHITECTURES[arch].stages,
            default=tactic is (_HALF if fp8 else _LARGE),
            max_registers=_REGISTERS.get(arch) if tactic is _SMALL else None,
        )


def _int4_attention(arch: str) -> Iterator[Variant]:
    for dtype, dim, both in product(_DTYPES, (128, 64), (0, 1)):
        yield _variant(
            "int4_kv_attention",
            arch,
            [dtype, f"d{dim}", "target" if both else "draft"],
            {"act": dtype},
            {**_tile(arch, dim, 128), "GROUP": 128, "BOTH": both, "UPCAST": 0},
            warps=8,
            stages=2,
            max_registers=_REGISTERS.get(arch),
        )


def _helpers(arch: str) -> Iterator[Variant]:
    for dtype, dim in product(_DTYPES, (128, 64)):
        yield _variant(
            "verify_combine", arch, [dtype, f"d{dim}"], {"act": dtype}, {"HEAD_DIM": dim, "BLOCK_R": 16}
        )
    for has_q in (0, 1):
        words = ["sampled" if has_q else "deterministic"]
        yield _variant("spec_accept", arch, words, {}, {"HAS_Q": has_q, "BLOCK_T": 256, "BLOCK_V": 1024})
    yield _variant("spec_accept_combine", arch, [], {}, {"BLOCK_T": 256})
    yield _variant("tree_mask", arch, [], {}, {"BLOCK_T": 128})
    for bits, dim, page in product(("i16", "i8"), (128, 64), (0, 64)):
        words = [bits, f"d{dim}", *[f"page{page}"] * bool(page)]
        yield _variant(
            "kv_compact", arch, words, {"bits": bits}, {"HEAD_DIM": dim, "BLOCK_A": 32, "PAGE": page}
        )
    for dtype, dim in product(_DTYPES, (128, 64)):
        types = {"act": dtype, "e4m3": "u8"}
        yield _variant("kv_append", arch, [dtype, f"d{dim}"], types, {"HEAD_DIM": dim, "BLOCK_T": 16})
    yield _variant("ngram_lookup", arch, [], {}, {"BLOCK_L": 1024, "BLOCK_D": 256})


def _tile(arch: str, head_dim: int, rows: int, key_block: int | None = None) -> dict[str, int | float]:
    keys = key_block or ARCHITECTURES[arch].key_block
    return {"HEAD_DIM": head_dim, "BLOCK_M": rows, "BLOCK_N": keys, "SM_SCALE": head_dim**-0.5}


def _variant(
    kernel: str,
    arch: str,
    words: list[str],
    types: Mapping[str, str],
    constants: Mapping[str, int | float],
    warps: int = 4,
    stages: int = 1,
    default: bool = True,
    max_registers: int | None = None,
) -> Variant:
    name, pairs = "-".join([kernel, *words, arch]), (tuple(types.items()), tuple(constants.items()))
    return Variant(name, kernel, arch, *pairs, warps, stages, default, max_registers)
