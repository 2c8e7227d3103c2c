"""DFlash heads (2602.06036) and DSpark's (2607.05147), as their authors and ModelOpt's exporter write them.

H width, N captured layers, d head_dim, V vocabulary, r rank; canonical names are the published ones:

    fc.weight [H, N·H], hidden_norm.weight [H]                       captured states to context features
    layers.{i}.self_attn.{q,k,v,o}_proj.weight (.bias), .{q,k}_norm.weight [d]
    layers.{i}.mlp.{gate,up,down}_proj.weight, .{input,post_attention}_layernorm.weight [H], norm.weight [H]
    markov_w1.weight [V, r], markov_w2.weight [V, r]                 DSpark: bias of the next token's logits
    gate_proj.weight [r, H+r], .bias [r]                             … gated
    joint_proj.weight [3r, 2r+H], .bias [3r]                         … recurrent
    confidence_proj.weight [1, H+r], .bias [1]                       DSpark, optional: how likely a draft is accepted

The embedding and the output layer are the target's. Some published files keep the last group below `markov_head.`;
those are read too.

config: the file's own, see `DFlashNumbers` for what is used. Target layer ids are 0-based.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.head_layouts.head import CONFIG, Head, read_tensors, write_folder
from trtspec.checkpoints.head_layouts.medusa import check_tensors
from trtspec.checkpoints.heads import head_method
from trtspec.checkpoints.json_file import read_json_object
from trtspec.checkpoints.rope import RopeFacts, read_rope
from trtspec.errors import ConfigError

_NESTED = "markov_head."


@dataclass(frozen=True, slots=True)
class DFlashNumbers:
    """The architecture of a head. window: context positions a row sees behind its own, None for all.

    causal: whether a row of a block sees only those before it. shifted: whether row k of a block stands for the token
    after its place (DSpark); otherwise for the token at it, and row 0 is the known one. markov: kind of Markov head.
    """

    hidden_size: int
    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    epsilon: float
    rope: RopeFacts
    positions: int
    block_size: int
    mask_token_id: int
    causal: bool
    window: int | None
    biases: bool
    shifted: bool
    markov: Literal["vanilla", "gated", "rnn"] | None
    markov_rank: int
    confidence: bool

    @property
    def drafts(self) -> int:
        """The most tokens one block drafts."""
        return self.block_size if self.shifted else self.block_size - 1


def read_head(folder: Path) -> Head:
    """The head in `folder`. Raises ConfigError for what is missing, contradictory or not implemented."""
    where = str(folder / CONFIG)
    config = read_json_object(folder / CONFIG)
    view = ConfigView(config, where)
    method = head_method(view)
    if method not in ("dflash", "dspark"):
        raise ConfigError(f"this is no DFlash or DSpark head (it says {method})", where=where)
    captured = view.integers("dflash_config.target_layer_ids", "target_layer_ids")
    if not captured:
        raise ConfigError("the head does not name the target layers it reads", where=where)
    tensors = {name.removeprefix(_NESTED): array for name, array in read_tensors(folder).items()}
    head = Head(method, config, tuple(captured), None, tensors)
    check_tensors(tensors, dflash_shapes(numbers_of(head, where), len(captured)), str(folder))
    return head


def write_head(head: Head, folder: Path) -> None:
    """Write a head that `read_head` gives back as it is."""
    write_folder(folder, head.config, head.tensors)


def numbers_of(head: Head, where: str) -> DFlashNumbers:
    """What a head's config says. Raises ConfigError for what it leaves out and for options not implemented."""
    view = ConfigView(head.config, where)

    def size(*names: str) -> int:
        value = view.integer(*names, minimum=1)
        if value is None:
            raise ConfigError(f"the head's config does not state {names[0]}", where=where)
        return value

    if view.flag("dflash_config.attention_sink_bias", "attention_sink_bias"):
        raise ConfigError("attention sinks of a DFlash head are not implemented", where=where)
    if any(kind != "full_attention" for kind in view.strings("layer_types")):
        raise ConfigError("DFlash layers with a window of their own are not implemented", where=where)
    mask = view.integer("dflash_config.mask_token_id", "mask_token_id", minimum=0)
    vocab = size("vocab_size")
    if mask is None or mask >= vocab:
        raise ConfigError(f"mask_token_id is {mask}; it must be an id below {vocab}", where=where)
    spark = head.method == "dspark"
    kind = view.string("dflash_config.markov_head_type", "markov_head_type") or "vanilla"
    if spark and kind not in ("vanilla", "gated", "rnn"):
        raise ConfigError(f"markov_head_type {kind!r} is not implemented", where=where)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    shifted = view.flag("dflash_config.shift_label", "shift_label")
    swa = view.flag("dflash_config.use_swa")
    return DFlashNumbers(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=view.integer("num_key_value_heads", minimum=1) or heads,
        head_dim=view.integer("head_dim", minimum=1) or hidden // heads,
        intermediate_size=size("intermediate_size"),
        epsilon=view.number("rms_norm_eps") or 1e-6,
        rope=read_rope(view),
        positions=view.integer("max_position_embeddings", minimum=1) or 32768,
        block_size=size("block_size", "dflash_config.block_size"),
        mask_token_id=mask,
        causal=bool(view.flag("dflash_config.causal")),
        window=size("dflash_config.swa_window_size", "sliding_window") if swa else None,
        biases=bool(view.flag("attention_bias")),
        shifted=spark if shifted is None else shifted,
        markov=kind if spark else None,
        markov_rank=size("dflash_config.markov_rank", "markov_rank") if spark else 0,
        confidence=spark and bool(view.flag("dflash_config.use_confidence_head", "use_confidence_head")),
    )


def dflash_shapes(numbers: DFlashNumbers, captured: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a head by canonical name, with its shape. captured: target layers it reads."""
    n, hidden, rank = numbers, numbers.hidden_size, numbers.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captured * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    queries, keys = n.heads * n.head_dim, n.kv_heads * n.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for layer in range(n.layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        for name, width in rows.items():
            shapes[f"{attention}.{name}.weight"] = (width, hidden)
        shapes[f"{attention}.o_proj.weight"] = (hidden, queries)
        if n.biases:
            shapes |= {
                f"{attention}.{name}.bias": (width,) for name, width in (*rows.items(), ("o_proj", hidden))
            }
        shapes |= {f"{attention}.{x}_norm.weight": (n.head_dim,) for x in "qk"}
        shapes |= {f"{mlp}.{x}_proj.weight": (n.intermediate_size, hidden) for x in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (hidden, n.intermediate_size)
        shapes |= {f"layers.{layer}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
    if n.markov:
        shapes |= {f"markov_w{i}.weight": (n.vocab_size, rank) for i in (1, 2)}
    if n.markov == "gated":
        shapes |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
    if n.markov == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    if n.confidence:
        shapes |= {"confidence_proj.weight": (1, hidden + rank), "confidence_proj.bias": (1,)}
    return shapes
