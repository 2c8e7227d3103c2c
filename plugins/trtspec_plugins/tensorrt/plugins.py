"""Which plugins there are: one for each set of tensors a kernel is called with.

A plugin's inputs are fixed when it is registered, so a kernel whose constants add or drop tensors (tree mask, pages,
FP8 scales, split keys) is several plugins. All are named in the namespace `trtspec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from trtspec_plugins.signature import SIGNATURES, KernelSignature, Tensor

NAMESPACE = "trtspec"
PAGE = 64  # keys of a page in the compiled variants


@dataclass(frozen=True, slots=True)
class Plugin:
    """name: the operator's. constants: those that choose its tensors, the rest is the compiled variant's.

    scalars: attribute → the int32 argument or dimension that it gives. dtype: whether the attribute `dtype`
    ("float16" or "bfloat16") says what `act` is, because no input has that type. spread: a dimension of the kernel →
    those it is the product of in the network. covers: a block size of a variant → the dimension it must hold whole.
    """

    name: str
    kernel: str
    constants: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    dtype: bool = False
    spread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    covers: Mapping[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> KernelSignature:
        return SIGNATURES[self.kernel]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.signature.inputs if tensor.present(self.constants))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.signature.outputs if tensor.present(self.constants))

    def shape(self, tensor: Tensor) -> tuple[str, ...]:
        """Names of a tensor's dimensions in the network."""
        return tuple(part for name in tensor.shape for part in self.spread.get(name, (name,)))

    @property
    def attributes(self) -> dict[str, type]:
        """Name → type, in registration order."""
        return {**dict.fromkeys(self.scalars, int), **({"dtype": str} if self.dtype else {})}


def _attention() -> Iterator[Plugin]:
    for split, tree, paged, fp8 in product((0, 1), repeat=4):
        words = ("Split" * split, "Tree" * tree, "Paged" * paged, "Fp8" * fp8)
        yield Plugin(
            name=f"SpecVerify{''.join(words)}Attention",
            kernel="verify_attention",
            constants={"SPLIT": split, "TREE": tree, "PAGE": PAGE * paged, "FP8": fp8},
            scalars={"splits": "NSPLIT"} if split else {},
        )


PLUGINS: Mapping[str, Plugin] = {
    plugin.name: plugin
    for plugin in (
        *_attention(),
        Plugin("SpecVerifyCombine", "verify_combine", dtype=True, spread={"ROWS": ("B", "T", "HQ")}),
        Plugin("SpecAccept", "spec_accept", {"HAS_Q": 0}, {"slices": "NSPLIT"}, covers={"BLOCK_T": "T"}),
        Plugin("SpecAcceptDrawn", "spec_accept", {"HAS_Q": 1}, {"slices": "NSPLIT"}, covers={"BLOCK_T": "T"}),
        Plugin("SpecAcceptCombine", "spec_accept_combine", covers={"BLOCK_T": "T"}),
        Plugin("TreeMask", "tree_mask"),
        Plugin("KvCompact", "kv_compact", {"PAGE": 0}),
        Plugin("KvCompactPaged", "kv_compact", {"PAGE": PAGE}),
        Plugin("KvAppend", "kv_append"),
        Plugin(
            "NgramLookup",
            "ngram_lookup",
            scalars={
                "draft_length": "D",
                "min_ngram": "MIN_NGRAM",
                "max_ngram": "MAX_NGRAM",
                "stop": "STOP",
            },
            covers={"BLOCK_D": "D"},
        ),
        Plugin("Int4KvAttention", "int4_kv_attention", {"BOTH": 1}),
        Plugin("Int4KvDraftAttention", "int4_kv_attention", {"BOTH": 0}),
    )
}
