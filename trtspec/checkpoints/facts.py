"""Architecture facts of a model folder or a bare `config.json`: what `inspect` prints and the planner needs.

Nothing but JSON and safetensors headers is read and nothing heavy is imported. What cannot be known is None
and said in `warnings`, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.attention import AttentionGroup, attention_groups, shape_warnings, tile_warnings
from trtspec.checkpoints.config_view import ConfigView, config_path
from trtspec.checkpoints.json_file import read_json_object, read_optional_json_object
from trtspec.checkpoints.layer_pattern import Kind
from trtspec.checkpoints.layers import LayerSpec, read_layers
from trtspec.checkpoints.quant_metadata import QuantizationFacts, dtype_bytes, read_quantization
from trtspec.checkpoints.rope import RopeFacts, read_rope
from trtspec.checkpoints.safetensors_header import TensorInfo, read_folder
from trtspec.checkpoints.sizes import ffn_size, hidden_size
from trtspec.checkpoints.weights import WeightFacts, read_weights
from trtspec.errors import ConfigError

TILES = (128, 64, 32, 16)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
# Model classes whose output layer is the embedding unless the file says otherwise.
_TIED_CLASSES = frozenset(
    [
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "gpt2",
        "bloom",
        "cohere",
        "cohere2",
        "mpt",
        "opt",
    ]
)
# hierarchical_int8: QuantSpec's bytes, with float32 scales and lows of groups of 64 tokens and heads of 64 elements.
_KV_BYTES = {"fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "hierarchical_int8": 1.125}


@dataclass(frozen=True, slots=True)
class ArchitectureFacts:
    """One decoder as its files describe it. Widths in elements; None means the files do not say.

    model_type: of the decoder (a wrapper's `text_config` wins). vocab_size: rows of the embedding table.
    dtype: of unquantized weights. eos_token_ids: generation_config.json first, then config.json.
    recurrent_state_elements: of one sequence, all recurrent layers. source: the file that was read.
    tile_warnings: those of `warnings` that concern the tiles of GPU kernels only.
    """

    source: str
    model_type: str | None
    architectures: tuple[str, ...]
    layers: int | None
    vocab_size: int | None
    hidden_size: int | None
    ffn_size: int | None
    attention: tuple[AttentionGroup, ...]
    layer_kinds: tuple[Kind, ...]
    weights: WeightFacts | None
    quantization: QuantizationFacts
    dtype: str | None
    tied_embeddings: bool | None
    mtp_layers: int
    max_position_embeddings: int | None
    rope: RopeFacts
    eos_token_ids: tuple[int, ...]
    bos_token_ids: tuple[int, ...]
    recurrent_state_elements: int | None
    sparse_attention: bool
    warnings: tuple[str, ...]
    tile_warnings: tuple[str, ...] = ()

    @property
    def parameters(self) -> int | None:
        """Parameters without MTP layers; None where a size is missing or assumed."""
        known = self.weights is not None and not self.weights.assumed and self.tied_embeddings is not None
        return self.weights.parameters if known and self.weights else None

    @property
    def binding(self) -> AttentionGroup | None:
        """The attention shape that binds the draft length rule: the largest group, hence the smallest D."""
        grouped = [g for g in self.attention if g.group]
        return max(grouped, key=lambda g: (g.group or 0, g.layers)) if grouped else None

    @property
    def group(self) -> int | None:
        """G of the binding shape; None for models without attention."""
        return self.binding.group if self.binding else None

    def group_per_rank(self, tensor_parallel: int) -> int | None:
        """The largest G over the attention shapes on one rank; None where any of them does not divide."""
        groups = [
            g.group_per_rank(tensor_parallel) for g in self.attention if g.kind not in ("linear", "none")
        ]
        return None if not groups or None in groups else max(g for g in groups if g is not None)

    @property
    def kv_dtype(self) -> str:
        """The cache's element type: what the checkpoint's quantization states, otherwise the activations' type."""
        return self.quantization.kv_dtype or self.dtype or "bfloat16"

    def kv_bytes_per_token(self, dtype: str | None = None) -> float | None:
        """Cache bytes one token adds while every window is still open, whole model, at `dtype` (default `kv_dtype`)."""
        elements = [g.cache_elements_per_token for g in self.attention]
        if not self.attention or None in elements:
            return None
        return sum(e for e in elements if e is not None) * element_bytes(dtype or self.kv_dtype)

    def as_json(self) -> dict[str, object]:
        """The result object of `trtspec inspect`."""
        group = self.group
        kv_bytes = self.kv_bytes_per_token()
        return {
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "ffn_size": self.ffn_size,
            "vocab_size": self.vocab_size,
            "parameters": self.parameters,
            "active_parameters": self.weights.active_parameters if self.weights and self.parameters else None,
            "experts": self.weights.experts if self.weights else None,
            "experts_per_token": self.weights.experts_per_token if self.weights else None,
            "weight_bytes": round(self.weights.bytes) if self.weights and self.parameters else None,
            "quantization": self.quantization.algorithm,
            "dtype": self.dtype,
            "tied_embeddings": self.tied_embeddings,
            "kv_bytes_per_token": None if kv_bytes is None else round(kv_bytes),
            "kv_dtype": self.kv_dtype,
            "attention": [g.as_json() for g in self.attention],
            "group": group,
            "tile_draft_length": {str(t): None if not group or group > t else t // group - 1 for t in TILES},
            "tile_exact": bool(group) and 128 % group == 0,
            "tensor_parallel": {str(size): self.group_per_rank(size) for size in TENSOR_PARALLEL_SIZES},
            "mtp_layers": self.mtp_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "rope": self.rope.describe(),
            "eos_token_ids": list(self.eos_token_ids),
            "warnings": list(self.warnings),
        }


def element_bytes(dtype: str) -> float:
    """Bytes of one cached element; 2 for 16-bit types and names that are not known."""
    return _KV_BYTES.get(dtype) or dtype_bytes(dtype) or 2.0


def unknown_architecture(source: str) -> ArchitectureFacts:
    """Facts of a file that describes no decoder at all."""
    return ArchitectureFacts(
        source=source,
        model_type=None,
        architectures=(),
        layers=None,
        vocab_size=None,
        hidden_size=None,
        ffn_size=None,
        attention=(),
        layer_kinds=(),
        weights=None,
        quantization=QuantizationFacts(),
        dtype=None,
        tied_embeddings=None,
        mtp_layers=0,
        max_position_embeddings=None,
        rope=RopeFacts("default", None),
        eos_token_ids=(),
        bos_token_ids=(),
        recurrent_state_elements=None,
        sparse_attention=False,
        warnings=(),
    )


def read_facts(path: Path) -> ArchitectureFacts:
    """Facts of a model folder or a bare configuration file. Raises ConfigError with file and place."""
    file = config_path(path)
    root = read_json_object(file)
    # A file of this name stands in a model folder, whether the folder or the file was named.
    folder = file.parent if file.name == "config.json" else None
    hf_quant = read_optional_json_object(folder / "hf_quant_config.json") if folder else None
    generation = read_optional_json_object(folder / "generation_config.json") if folder else None
    return facts_from(root, str(file), hf_quant, generation, read_folder(folder) if folder else None)


def facts_from(
    root: Mapping[str, Any],
    where: str,
    hf_quant: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> ArchitectureFacts:
    """Facts from the parsed files. where: the configuration's path, for errors."""
    view = ConfigView(dict(root), where)
    if view.get("medusa_num_heads") is not None and hidden_size(view) is None:
        raise ConfigError(
            "this is a Medusa head, not a model",
            where=where,
            hint="name its base model as the target and this as its draft",
        )
    if hidden_size(view) is None and view.get("num_attention_heads", "n_head", "n_heads") is None:
        raise ConfigError(
            "neither hidden_size nor num_attention_heads is present: this is not a decoder's config.json",
            where=where,
            hint="name the model folder or its config.json",
        )
    warnings: list[str] = []
    layers = read_layers(view, warnings)
    quantization = read_quantization(view, hf_quant, warnings)
    dtype = view.string("dtype", "torch_dtype")
    if dtype is None:
        warnings.append("the file does not state the weights' dtype: 16 bit assumed for sizes in bytes")
    tied = _tied(view, tensors, warnings)
    weights = read_weights(view, layers, tied, quantization, dtype_bytes(dtype) or 2.0, tensors, warnings)
    attention = attention_groups(view, layers or ())
    of_tiles = tile_warnings(attention)
    warnings = [*warnings, *of_tiles, *shape_warnings(view, attention)]
    eos = ConfigView(generation, where).token_ids("eos_token_id") if generation else ()
    return ArchitectureFacts(
        source=where,
        model_type=view.string("model_type"),
        architectures=view.strings("architectures"),
        layers=len(layers) if layers is not None else None,
        vocab_size=view.integer("vocab_size", "padded_vocab_size", minimum=1),
        hidden_size=hidden_size(view),
        ffn_size=ffn_size(view),
        attention=attention,
        layer_kinds=tuple(layer.kind for layer in layers or ()),
        weights=weights,
        quantization=quantization,
        dtype=dtype,
        tied_embeddings=tied,
        mtp_layers=_mtp_layers(view, layers, tensors, warnings),
        max_position_embeddings=view.integer(
            "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"
        ),
        rope=read_rope(view),
        eos_token_ids=eos or view.token_ids("eos_token_id"),
        bos_token_ids=view.token_ids("bos_token_id"),
        recurrent_state_elements=_recurrent_state(view, layers or ()),
        sparse_attention=view.get("index_topk", "index_n_heads") is not None,
        warnings=tuple(dict.fromkeys(warnings)),
        tile_warnings=tuple(of_tiles),
    )


def _tied(view: ConfigView, tensors: Mapping[str, TensorInfo] | None, warnings: list[str]) -> bool | None:
    """Whether the output layer is the embedding table: stated, else read from the files, else the class's default."""
    if tensors:
        stored = any(
            name.endswith(("lm_head.weight", "output_layer.weight", "embed_out.weight")) for name in tensors
        )
        has_table = any("embed" in name or ".wte." in name for name in tensors)
        stated = view.root.get("tie_word_embeddings", view.get("tie_word_embeddings"))
        if not isinstance(stated, bool) and (stored or has_table):
            warnings.append(
                "tie_word_embeddings is not stated: decided by the files, lm_head.weight is "
                f"{'present' if stored else 'absent'}"
            )
            return not stored
        if stated is True and stored:
            warnings.append("tie_word_embeddings is true and the files hold an lm_head.weight as well")
    for source in (view.root, view.keys):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return source["tie_word_embeddings"]
    if view.string("model_type") in _TIED_CLASSES:
        return True
    warnings.append(
        "tie_word_embeddings is not stated and there is no weight file to decide by: parameters are not known"
    )
    return None


def _mtp_layers(
    view: ConfigView,
    layers: tuple[LayerSpec, ...] | None,
    tensors: Mapping[str, TensorInfo] | None,
    warnings: list[str],
) -> int:
    """Multi-token-prediction layers under any of their spellings; 0 where the file names none."""
    names = (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "num_mtp_layers",
        "mtp_num_layers",
    )
    count = view.integer(*names, "num_mtp_heads", "n_predict", "mtp_depth")
    if count is None and view.get("mtp_hybrid_override_pattern", "mtp_layers_block_type"):
        count = 1
    if view.flag("use_mtp") is False:
        return 0
    if tensors is not None and layers is not None:
        stored = {
            name.split("layers.")[1].split(".")[0]
            for name in tensors
            if ".eh_proj" in name and "layers." in name
        }
        has_mtp = bool(stored) or any(name.startswith(("mtp.", "model.mtp")) for name in tensors)
        if count and not has_mtp:
            warnings.append(f"the configuration names {count} MTP layer(s), the files hold none")
        if not count and has_mtp:
            warnings.append("the files hold MTP tensors that the configuration does not name")
            count = max(1, len(stored))
    elif count is None and view.string("model_type") == "qwen3_next":
        warnings.append("Qwen3-Next checkpoints may hold an MTP layer that this file does not name")
    return count or 0


def _recurrent_state(view: ConfigView, layers: tuple[LayerSpec, ...]) -> int | None:
    """State elements one sequence keeps over all recurrent layers (the small convolution state included)."""
    count = sum(layer.kind == "linear" for layer in layers)
    if not count:
        return 0
    value_heads, key_heads = view.integer("linear_num_value_heads"), view.integer("linear_num_key_heads")
    key_dim, value_dim = view.integer("linear_key_head_dim"), view.integer("linear_value_head_dim")
    if value_heads and key_heads and key_dim and value_dim:
        conv = (2 * key_heads * key_dim + value_heads * value_dim) * (
            view.integer("linear_conv_kernel_dim") or 4
        )
        return count * (value_heads * key_dim * value_dim + conv)
    state = view.integer("ssm_state_size", "mamba_d_state", "state_size")
    heads, dim = (
        view.integer("mamba_num_heads", "mamba_n_heads"),
        view.integer("mamba_head_dim", "mamba_d_head"),
    )
    expand, hidden = view.integer("mamba_expand", "expand"), hidden_size(view)
    inner = heads * dim if heads and dim else expand * hidden if expand and hidden else None
    if inner and state:
        return count * inner * (state + (view.integer("conv_kernel", "mamba_d_conv") or 4))
    return None
