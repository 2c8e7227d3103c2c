"""Draft heads as their files describe them: mechanism, layout, widths, vocabulary, captured target layers.

Published layouts: EAGLE's own (a one-layer decoder's config.json), SpecForge and AngelSlim (`eagle_config`),
speculators (`transformer_layer_config`), ModelOpt's export, Medusa (`medusa_num_heads`), DFlash and DSpark
(`dflash_config`). Where tensors are present they decide and contradictions are refused, see `head_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec.checkpoints import head_tensors
from trtspec.checkpoints.config_view import ConfigView, config_path
from trtspec.checkpoints.facts import ArchitectureFacts, facts_from, read_facts, unknown_architecture
from trtspec.checkpoints.json_file import read_json_object, read_optional_json_object
from trtspec.checkpoints.quant_metadata import QuantizationFacts, read_quantization
from trtspec.checkpoints.safetensors_header import TensorInfo, read_folder
from trtspec.checkpoints.sizes import hidden_size
from trtspec.errors import ConfigError

# Architecture names → mechanism, by what they contain (lower case, first match wins).
_ARCHITECTURES = (
    ("peagle", "p_eagle"),
    ("dspark", "dspark"),
    ("domino", "domino"),
    ("dflash", "dflash"),
    ("eagle3", "eagle3"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("hydra", "hydra"),
    ("mtp", "mtp"),
)
_CAPTURED_KEYS = (
    "eagle_config.eagle_aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "dflash_config.target_layer_ids",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
)
_BLOCK_KEYS = ("block_size", "dflash_config.block_size")


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """One draft head. decoder: its own decoder layers, None where the file has none (Medusa) or omits them.

    method: config name of the mechanism, None where the files do not tell (EAGLE-1 against a one-layer Llama).
    captured: target layer ids as the file spells them, None where it names none. draft_vocab_size: rows of its
    output layer. heads, medusa_layers: Medusa and Hydra. block_size: rows of a pass, DFlash's are drafts + 1.
    own_embedding, own_lm_head: whether the files hold them, None without files. norms: optional norms it uses.
    parameters, stored_bytes: of the files, None without. declared_bos, declared_eos: ids in its config; the target's
    are the ones that count.
    """

    source: str
    method: str | None
    layout: str
    decoder: ArchitectureFacts | None
    hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    captured: tuple[int, ...] | None
    heads: int | None
    medusa_layers: int | None
    block_size: int | None
    mask_token_id: int | None
    markov_rank: int | None
    norms: tuple[str, ...]
    own_embedding: bool | None
    own_lm_head: bool | None
    fused_width: int | None
    quantization: QuantizationFacts
    dtype: str | None
    parameters: int | None
    stored_bytes: int | None
    declared_bos: tuple[int, ...]
    declared_eos: tuple[int, ...]
    base_model: str | None
    target_layers: int | None
    warnings: tuple[str, ...]

    @property
    def draft_limit(self) -> int | None:
        """The longest draft of the head, where its shape limits it: heads of Medusa, block size of DFlash."""
        if self.heads is not None:
            return self.heads
        if self.block_size is None or self.method == "dspark":  # whose first row drafts too
            return self.block_size
        return self.block_size - 1

    def as_json(self) -> dict[str, object]:
        """The result object of `trtspec inspect` for a head: the stable fields, and `head` with its own."""
        base = (self.decoder or unknown_architecture(self.source)).as_json()
        return base | {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "parameters": self.parameters,
            "active_parameters": None,
            "weight_bytes": self.stored_bytes,
            "dtype": self.dtype,
            "quantization": self.quantization.algorithm,
            "head": {
                "method": self.method,
                "layout": self.layout,
                "draft_vocab_size": self.draft_vocab_size,
                "captured_layers": list(self.captured) if self.captured is not None else None,
                "heads": self.heads,
                "medusa_layers": self.medusa_layers,
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "norms": list(self.norms),
                "own_embedding": self.own_embedding,
                "own_lm_head": self.own_lm_head,
                "draft_limit": self.draft_limit,
                "base_model": self.base_model,
            },
            "warnings": list(self.warnings),
        }


def inspect_model(path: Path) -> ArchitectureFacts | HeadFacts:
    """Facts of whatever lies at `path`: a model or a draft head. Raises ConfigError."""
    view = ConfigView(read_json_object(config_path(path)), str(config_path(path)))
    tensors = None
    if config_path(path).name == "config.json":
        tensors = read_folder(config_path(path).parent)
    return read_head(path) if head_method(view, tensors) else read_facts(path)


def head_of(method: str) -> str:
    """The method whose heads a method drafts with: EAGLE-2 (2406.16858) shapes trees with EAGLE-1's."""
    return "eagle" if method == "eagle2" else method


def read_head(path: Path) -> HeadFacts:
    """Facts of a draft head's folder or bare config. Raises ConfigError where tensors contradict the configuration."""
    file = config_path(path)
    root = read_json_object(file)
    folder = file.parent if file.name == "config.json" else None
    view = ConfigView(root, str(file))
    tensors = read_folder(folder) if folder else None
    hf_quant = read_optional_json_object(folder / "hf_quant_config.json") if folder else None
    warnings: list[str] = []
    method = head_method(view, tensors)
    if method is None and (view.integer("num_hidden_layers", "n_layer") or 0) > 8:
        raise ConfigError(
            "this is a model, not a draft head",
            where=str(file),
            hint="use it as speculation.method draft_model",
        )
    if method is None:
        warnings.append("the configuration alone does not tell an EAGLE-1 head from a one-layer model")
    heads = view.integer("medusa_num_heads", "hydra_num_heads")
    medusa_layers = view.integer("medusa_num_layers", "hydra_num_layers")
    if method == "mtp":  # counts the target's layers, which are not in it
        root = {
            **root,
            "num_hidden_layers": view.get("num_nextn_predict_layers"),
            "num_nextn_predict_layers": 0,
        }
    decoder = _decoder(view, root, str(file), hf_quant)
    shapes = head_tensors.HeadShapes.of(tensors) if tensors else None
    if shapes is not None and method in ("medusa", "hydra"):
        heads = shapes.medusa_heads(heads, warnings)
        medusa_layers = shapes.medusa_layers(medusa_layers, warnings)
    if shapes is None and method in ("medusa", "hydra"):
        warnings.append(
            f"{heads} heads by the configuration; published Medusa files understate it (the loaders force 5): "
            "the weights decide, and there are none here"
        )
    vocab = view.integer("vocab_size", minimum=1)
    draft_vocab = view.integer("draft_vocab_size", minimum=1)
    if shapes is not None and method in ("eagle", "eagle2", "eagle3", "p_eagle"):
        head_tensors.check_decoder(shapes, view, method, decoder, str(file), warnings)
        draft_vocab = head_tensors.check_vocabulary(shapes, vocab, draft_vocab, str(file), warnings)
    return HeadFacts(
        source=str(file),
        method=method,
        layout=_layout(view),
        decoder=decoder,
        hidden_size=hidden_size(view),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        captured=view.integers(*_CAPTURED_KEYS),
        heads=heads,
        medusa_layers=medusa_layers,
        block_size=view.integer(*_BLOCK_KEYS, minimum=2)
        if method in ("dflash", "dspark", "domino")
        else None,
        mask_token_id=view.integer("dflash_config.mask_token_id", "mask_token_id"),
        markov_rank=view.integer("dflash_config.markov_rank", "markov_rank"),
        norms=head_tensors.optional_norms(view, shapes, str(file)),
        own_embedding=shapes.has("embed_tokens") if shapes else None,
        own_lm_head=shapes.has("lm_head") if shapes else None,
        fused_width=shapes.width("fc") if shapes else None,
        quantization=read_quantization(view, hf_quant, warnings),
        dtype=shapes.dtype if shapes else view.string("dtype", "torch_dtype"),
        parameters=shapes.parameters if shapes else None,
        stored_bytes=sum(t.nbytes for t in tensors.values()) if tensors else None,
        declared_bos=view.token_ids("bos_token_id"),
        declared_eos=view.token_ids("eos_token_id"),
        base_model=view.string("base_model_name_or_path", "speculators_config.verifier.name_or_path"),
        target_layers=view.integer("num_target_layers"),
        warnings=(
            *warnings,
            *_decoder_warnings(method, decoder),
        ),
    )


def _decoder_warnings(method: str | None, decoder: ArchitectureFacts | None) -> tuple[str, ...]:
    if decoder is not None:
        return decoder.warnings
    if method in ("medusa", "hydra"):  # which have none
        return ()
    return ("the file does not describe the head's own layers",)


def head_method(view: ConfigView, tensors: Mapping[str, TensorInfo] | None = None) -> str | None:
    """The mechanism a configuration (and its tensors) names; None for a plain model."""
    if view.get("medusa_num_heads") is not None:
        return "medusa"
    if view.get("hydra_num_heads") is not None:
        return "hydra"
    if tensors and any(name.endswith("mask_hidden") for name in tensors):
        return "p_eagle"  # published configs may call it a Llama
    dflash = view.get("dflash_config")
    if isinstance(dflash, Mapping):
        projector = dflash.get("projector_type")
        return str(projector) if projector in ("dspark", "domino") else "dflash"
    names = [
        *view.strings("architectures"),
        view.root.get("speculators_model_type"),
        view.root.get("model_type"),
    ]
    for name in names:
        text = str(name or "").lower().replace("_", "").replace("-", "")
        for part, method in _ARCHITECTURES:
            if part in text:
                parallel = view.integer("eagle_config.parallel_draft_step") or 1
                return "p_eagle" if method == "eagle3" and parallel > 1 else method
    if view.get("draft_vocab_size") is not None or view.get("eagle_config") is not None:
        return "eagle3"
    if tensors and any(name.removeprefix("model.").startswith("fc.") for name in tensors):
        three = any(name.endswith(("d2t", "t2d")) or ".hidden_norm." in name for name in tensors)
        return "eagle3" if three else "eagle"
    return None


def _layout(view: ConfigView) -> str:
    if view.root.get("speculators_model_type") or "Speculator" in str(view.get("architectures")):
        return "speculators"
    if view.get("medusa_num_heads", "hydra_num_heads") is not None:
        return "medusa"
    if view.get("dflash_config") is not None:
        return "dflash"
    eagle = view.get("eagle_config")
    if isinstance(eagle, Mapping) and "use_input_layernorm_in_first_layer" in eagle:
        return "modelopt"
    if eagle is not None or "Eagle3" in str(view.get("architectures")):
        return "specforge"
    return "eagle"


def _decoder(
    view: ConfigView, root: Mapping[str, object], where: str, hf_quant: dict[str, object] | None
) -> ArchitectureFacts | None:
    """The head's own layers as a small decoder; None where the file does not describe them."""
    if hidden_size(view) is None or view.get("num_attention_heads", "n_head") is None:
        return None
    return facts_from(root, where, hf_quant)


def medusa_tree(choices: Sequence[Sequence[int]], heads: int) -> tuple[tuple[int, ...], ...]:
    """The draft tree of `medusa_choices`: every path with all its prefixes, shallow paths first.

    A path lists, depth by depth, which of a head's candidates it takes; TensorRT-LLM's lists may leave prefixes
    out. Its longest path is the draft length. Raises ConfigError for paths deeper than there are heads.
    """
    nodes = {tuple(path[:depth]) for path in choices for depth in range(1, len(path) + 1)}
    deepest = max(nodes, key=len, default=())
    if len(deepest) > heads:
        raise ConfigError(
            f"medusa choice {list(deepest)} is {len(deepest)} deep, there are {heads} heads",
            hint="remove the deeper choices or use a checkpoint with more heads",
        )
    if any(candidate < 0 for path in nodes for candidate in path):
        raise ConfigError("medusa choices count a head's candidates from 0")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))
