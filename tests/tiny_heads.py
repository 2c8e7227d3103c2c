"""Small random draft heads of the EAGLE family and MTP modules, for the models of `tiny_models`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.tiny_models import VOCABULARY
from trtspec.checkpoints.head_layouts.eagle import THREE, eagle_shapes
from trtspec.checkpoints.head_layouts.head import Head, to_bfloat16
from trtspec.checkpoints.head_layouts.mtp import mtp_shapes
from trtspec.files import JSON

HIDDEN, LAYERS = 64, 3  # of the tiny models
CAPTURED = (0, 1, 2)
REDUCED = np.array([i // 2 for i in range(120)], np.int64)  # 120 of the target's ids


def tiny_head(
    method: str,
    *,
    seed: int = 0,
    d2t: npt.NDArray[np.int64] | None = None,
    own_lm_head: bool = True,
    own_embedding: bool = False,
    biases: bool = False,
    qk_norm: bool = False,
    bfloat16: bool = False,
    captured: tuple[int, ...] = CAPTURED,
    **changes: JSON,
) -> Head:
    """Normal weights (norm gains around 1) for a target of HIDDEN width; changes: of the head's config."""
    captured = captured if method in THREE else ()
    config: dict[str, JSON] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY if d2t is None else len(d2t),
        "target_hidden_size": HIDDEN,
        "num_target_layers": LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    if method != "mtp":
        config |= dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    if method == "p_eagle":
        config["mask_token_id"] = 3
    config |= changes
    wanted = {"lm_head.weight"} if own_lm_head else set()
    wanted |= {"embed_tokens.weight"} if own_embedding else set()
    if method not in THREE and method != "mtp":
        wanted |= {"fc.bias"}
    everything = _Everything(biases, qk_norm, wanted)
    shapes = (
        mtp_shapes(config, everything)
        if method == "mtp"
        else eagle_shapes(method, config, len(captured), everything)
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in sorted(shapes):
        values = rng.standard_normal(shapes[name]).astype(np.float32)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif len(shapes[name]) == 2:
            values *= 0.7 / np.sqrt(shapes[name][1])
        tensors[name] = to_bfloat16(values) if bfloat16 else values
    return Head(method, config, captured, d2t, tensors)


class _Everything:
    """Says of every optional tensor whether it shall be there."""

    def __init__(self, biases: bool, qk_norm: bool, wanted: set[str]) -> None:
        self.biases, self.qk_norm, self.wanted = biases, qk_norm, wanted

    def __contains__(self, name: str) -> bool:
        if name in self.wanted:
            return True
        if name.startswith("layers.") and name.endswith(".bias"):
            return self.biases
        return self.qk_norm and name.endswith(("q_norm.weight", "k_norm.weight"))
