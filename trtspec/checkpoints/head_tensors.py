"""Does a head's file hold what its configuration says? Shapes, vocabulary maps, optional norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.safetensors_header import TensorInfo, read_integers
from trtspec.errors import ConfigError

_FLOAT_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
# Norm option of the configuration → the tensor that must come with it.
_NORM_OPTIONS = {
    "norm_before_fc": "input_norm",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}
# Where Medusa's and Hydra's files keep their heads, if not at the top.
_TOKEN_HEAD = r"(?:\w+_heads?\.|hydra_mlp\.)?"
# Every tensor a published EAGLE layout may hold, after the layer prefix is taken off.
_KNOWN = re.compile(
    r"(fc|lm_head|embed_tokens|norm|input_norm|fc_norm|norm_output|hidden_norm|d2t|t2d|enorm|hnorm|eh_proj|"
    r"self_attn\.([qkvo]_proj|q_norm|k_norm|qkv_proj)|mlp\.(gate|up|down|gate_up)_proj|"
    r"input_layernorm|post_attention_layernorm|rotary_emb|final_norm|verifier_lm_head|verifier_norm|mask_hidden)"
    r"(\..*)?$"
)


@dataclass(frozen=True, slots=True)
class HeadShapes:
    """Tensors of a head by short name: the layer number kept, prefixes and `.weight` dropped, `midlayer` is layer 0."""

    tensors: Mapping[str, TensorInfo]

    @staticmethod
    def of(tensors: Mapping[str, TensorInfo]) -> HeadShapes:
        """Shorten every name."""
        return HeadShapes({_short(name): tensor for name, tensor in tensors.items()})

    def has(self, name: str) -> bool:
        """Whether a weight of that short name is stored."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Stored shape, None where absent."""
        found = self.tensors.get(name)
        return found.shape if found else None

    def width(self, name: str) -> int | None:
        """Input width of a linear weight."""
        shape = self.shape(name)
        return shape[1] if shape and len(shape) == 2 else None

    @property
    def parameters(self) -> int:
        """Elements of all weights (maps between vocabularies not counted)."""
        return sum(t.elements for name, t in self.tensors.items() if name not in ("d2t", "t2d"))

    @property
    def dtype(self) -> str | None:
        """Element type of most weights."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype in _FLOAT_NAMES:
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.nbytes
        return _FLOAT_NAMES[max(counts, key=counts.__getitem__)] if counts else None

    def medusa_heads(self, stated: int | None, warnings: list[str]) -> int | None:
        """Heads that the weights hold; a different number in the configuration is said and overruled."""
        found = {
            int(m.group(1)) for name in self.tensors if (m := re.match(rf"{_TOKEN_HEAD}(\d+)\.\d+", name))
        }
        if not found:
            return stated
        heads = max(found) + 1
        if stated is not None and heads != stated:
            warnings.append(
                f"the configuration says {stated} heads, the weights hold {heads}: {heads} are used"
            )
        return heads

    def medusa_layers(self, stated: int | None, warnings: list[str]) -> int | None:
        """Residual layers of one head by the weights: each has a linear layer, and the output layer is named apart."""
        layers = sum(bool(re.match(rf"{_TOKEN_HEAD}0\.\d+\.linear$", name)) for name in self.tensors)
        if not any(re.match(rf"{_TOKEN_HEAD}0\.\d+", name) for name in self.tensors):
            return stated
        if stated is not None and layers != stated:
            warnings.append(
                f"the configuration says {stated} residual layers, the weights hold {layers}: {layers} are used"
            )
        return layers


def check_decoder(
    shapes: HeadShapes,
    view: ConfigView,
    method: str,
    decoder: ArchitectureFacts | None,
    where: str,
    warnings: list[str],
) -> None:
    """Attention widths of every layer, and tensors no layout knows. Raises ConfigError naming both numbers."""
    unknown = sorted(name for name in shapes.tensors if not _KNOWN.match(re.sub(r"^layers\.\d+\.", "", name)))
    if unknown:
        warnings.append(
            f"tensors that no known layout uses: {', '.join(unknown[:6])}{' …' if len(unknown) > 6 else ''}"
        )
    hidden = view.integer("hidden_size")
    heads = view.integer("num_attention_heads")
    first = _linear_shape(shapes, "layers.0.self_attn.q_proj", where)
    if first is None or hidden is None:
        return
    if heads:
        _check_head_dim(view, first[0], heads, hidden, where, warnings)
    layer = 0
    while (shape := _linear_shape(shapes, f"layers.{layer}.self_attn.q_proj", where)) is not None:
        # EAGLE-3 concatenates embedding and fused state before its first layer; later layers take the state alone.
        expected = 2 * hidden if layer == 0 and method in ("eagle3", "p_eagle") else hidden
        if shape[1] != expected:
            reason = "EAGLE-1 style or plain decoder layer: " if layer == 0 and shape[1] == hidden else ""
            raise ConfigError(
                f"{reason}layer {layer} takes input width {shape[1]}, expected {expected}",
                where=where,
                hint="EAGLE-3's first layer takes 2 × hidden (embedding and fused state); name the head's real method",
            )
        layer += 1
    stated = decoder.layers if decoder else None
    if stated is not None and layer != stated:
        raise ConfigError(f"the configuration says {stated} layers, the weights hold {layer}", where=where)


def _linear_shape(shapes: HeadShapes, name: str, where: str) -> tuple[int, ...] | None:
    shape = shapes.shape(name)
    if shape is not None and len(shape) != 2:
        raise ConfigError(f"{name} has shape {list(shape)}, expected [out, in]", where=where)
    return shape


def _check_head_dim(
    view: ConfigView, rows: int, heads: int, hidden: int, where: str, warnings: list[str]
) -> None:
    stated = view.integer("head_dim")
    if rows % heads:
        raise ConfigError(f"q_proj has {rows} rows, which {heads} heads do not divide", where=where)
    found = rows // heads
    if stated is not None and stated != found:
        raise ConfigError(
            f"head_dim is {stated}, but q_proj's {rows} rows over {heads} heads give {found}",
            where=where,
            hint=f"set head_dim to {found} in the head's config.json",
        )
    if stated is None and found * heads != hidden:
        warnings.append(f"head_dim is not stated: {found} by q_proj ({rows}/{heads}), not hidden/heads")


def check_vocabulary(
    shapes: HeadShapes, vocab: int | None, draft_vocab: int | None, where: str, warnings: list[str]
) -> int | None:
    """Output rows, d2t and t2d against the two vocabulary sizes; returns the draft vocabulary's size.

    d2t holds offsets: target id = draft id + d2t[draft id]. t2d is a mask over the target vocabulary.
    Raises ConfigError for every contradiction.
    """
    rows = (shapes.shape("lm_head") or (None,))[0]
    size = draft_vocab or rows or vocab
    if rows is not None and draft_vocab is not None and rows != draft_vocab:
        raise ConfigError(
            f"lm_head has shape {list(shapes.shape('lm_head') or ())}, draft_vocab_size is {draft_vocab}: "
            f"expected {draft_vocab} rows",
            where=where,
            hint="one of the two belongs to another head",
        )
    d2t, t2d = shapes.tensors.get("d2t"), shapes.tensors.get("t2d")
    if d2t is None:
        if size is not None and vocab is not None and size != vocab:
            raise ConfigError(
                f"the draft vocabulary has {size} of {vocab} tokens and there is no d2t map", where=where
            )
        return size
    offsets = read_integers(d2t)
    if size is not None and len(offsets) != size:
        raise ConfigError(f"d2t maps {len(offsets)} tokens, the draft vocabulary has {size}", where=where)
    ids = [index + offset for index, offset in enumerate(offsets)]
    if vocab is not None and ids and not (min(ids) >= 0 and max(ids) < vocab):
        bad = next(i for i, target in enumerate(ids) if not 0 <= target < vocab)
        raise ConfigError(
            f"d2t sends draft id {bad} to {ids[bad]}, outside the target vocabulary of {vocab}",
            where=where,
            hint="d2t stores offsets (target id = draft id + d2t[draft id]), not target ids",
        )
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise ConfigError("d2t is not strictly increasing in target ids", where=where)
    if t2d is not None:
        mask = read_integers(t2d)
        if sum(map(bool, mask)) != len(ids):
            raise ConfigError(f"t2d marks {sum(map(bool, mask))} tokens, d2t maps {len(ids)}", where=where)
        if any(not mask[target] for target in ids if target < len(mask)):
            raise ConfigError("t2d and d2t name different target tokens", where=where)
    return len(ids)


def draft_to_target(tensor: TensorInfo) -> list[int]:
    """Target id of every draft id, from a d2t tensor of offsets."""
    return [index + offset for index, offset in enumerate(read_integers(tensor))]


def optional_norms(view: ConfigView, shapes: HeadShapes | None, where: str) -> tuple[str, ...]:
    """Extra norms the head uses (EAGLE-3.1). Raises ConfigError where flag and tensor disagree."""
    used: list[str] = []
    for option, tensor in _NORM_OPTIONS.items():
        flag = view.flag(option, f"eagle_config.{option}")
        stored = shapes.has(tensor) or shapes.has(f"{tensor}.0") if shapes else None
        if stored is not None and option != "norm_output" and bool(flag) != stored:
            raise ConfigError(
                f"{option} is {'set' if flag else 'not set'} and the tensor {tensor}.weight is "
                f"{'present' if stored else 'absent'}",
                where=where,
                hint=f"a head with {tensor} must say {option}: true, and the other way round",
            )
        if flag or (flag is None and stored):
            used.append(option)
    return tuple(used)


def _short(name: str) -> str:
    """`model.midlayer.self_attn.q_proj.weight` → `layers.0.self_attn.q_proj`."""
    for prefix in ("draft_model.", "eagle_module.", "eagle_layer.", "model."):
        name = name.removeprefix(prefix)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    return name.removesuffix(".weight")
