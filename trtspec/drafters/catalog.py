"""Every mechanism trtspec knows, as data. The one list; importing it loads no model library.

`backends` says which engine backends run a mechanism: `onnxruntime` and `tensorrt` through trtspec's own
decode loop, `tensorrt_llm` through TensorRT-LLM's runtime. Empty: known, and refused by name until something
runs it.
"""

from __future__ import annotations

from trtspec.drafters.base import DrafterSpec

_OWN = ("onnxruntime", "tensorrt")  # trtspec's own decode loop
_LLM = ("tensorrt_llm",)

DRAFTERS: tuple[DrafterSpec, ...] = (
    DrafterSpec("ngram", "Prompt lookup", "2304.04487", "chain", True, _OWN + _LLM, "NGram"),
    DrafterSpec("suffix", "Suffix automaton", "2411.10666", "chain", True, _OWN + _LLM, "SA"),
    DrafterSpec(
        "draft_model",
        "Draft model",
        "2211.17192",
        "chain",
        False,
        _OWN + _LLM,
        "Draft_Target",
        own_engine=True,
    ),
    DrafterSpec("pard", "PARD", "2504.18583", "chain", True, _LLM, "PARD", own_engine=True),
    DrafterSpec("medusa", "Medusa", "2401.10774", "tree", True, _OWN, None, "last", trained_head=True),
    DrafterSpec("hydra", "Hydra", "2402.05109", "tree", True, _OWN, None, "last", trained_head=True),
    DrafterSpec("eagle", "EAGLE", "2401.15077", "tree", True, _OWN, None, "last", True, True),
    DrafterSpec("eagle2", "EAGLE-2", "2406.16858", "tree", True, _OWN, None, "last", True, True),
    DrafterSpec(
        "eagle3", "EAGLE-3", "2503.01840", "tree", True, _OWN + _LLM, "Eagle3", "several", True, True
    ),
    DrafterSpec("p_eagle", "P-EAGLE", "2602.01469", "chain", True, _OWN, None, "several", True, True),
    DrafterSpec(
        "mtp", "Multi-token prediction", "2412.19437", "chain", True, _OWN + _LLM, "MTP", "last", True, True
    ),
    DrafterSpec(
        "dflash", "DFlash", "2602.06036", "chain", True, _OWN + _LLM, "DFlash", "several", True, True
    ),
    DrafterSpec(
        "dspark", "DSpark", "2607.05147", "chain", True, _OWN + _LLM, "DSpark", "several", True, True
    ),
    DrafterSpec("lookahead", "Lookahead decoding", "2402.02057", "tree", True, _OWN),
    DrafterSpec("rest", "REST", "2311.08252", "tree", True, _OWN),
    DrafterSpec("specinfer", "SpecInfer", "2305.09781", "tree", False, _OWN, own_engine=True),
    DrafterSpec("quantspec", "QuantSpec", "2502.10424", "chain", False, _OWN, own_engine=True),
)

# Heads that keep a KV cache of their own and pair tokens with the target's states.
AUTOREGRESSIVE_HEADS = ("eagle", "eagle2", "eagle3", "p_eagle", "mtp")
# Heads whose candidates make a tree by how often each is right, which is measured on the engine they are built for.
TOKEN_HEADS = ("medusa", "hydra")


def spec_of(method: str) -> DrafterSpec:
    """The spec of a method. Raises KeyError naming the known ones."""
    for spec in DRAFTERS:
        if spec.method == method:
            return spec
    raise KeyError(f"no drafter {method!r}; known: {', '.join(spec.method for spec in DRAFTERS)}")
