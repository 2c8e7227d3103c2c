"""Tiny random models of every family the graph builder knows, made by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

# name → (transformers class, settings): each switch of DecoderSpec is on in at least one of them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "yarn": ("Qwen2ForCausalLM", {"rope_parameters": _YARN}),
    "yarn-mscale": ("LlamaForCausalLM", {"rope_parameters": {**_YARN, "mscale": 1.2, "mscale_all_dim": 0.8}}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 48}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 16}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    "llama-head-64": ("LlamaForCausalLM", {"head_dim": 64}),
    "one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
}


def write_tiny_model(variant: str, folder: Path) -> Path:
    """Write `VARIANTS[variant]` with seeded random weights (float32 safetensors) into `folder`; returns it."""
    import torch
    import transformers

    name, settings = VARIANTS[variant]
    torch.manual_seed(0)
    architecture = getattr(transformers, name)
    model = architecture(architecture.config_class(**{**_SIZES, **settings}))
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a missing one
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            else:
                tensor.normal_(std=0.08)
    model.save_pretrained(folder)
    return folder


CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def with_tokenizer(model: Path, into: Path, *, chat: bool = False) -> Path:
    """`model` linked into the empty folder `into`, with a byte-level tokenizer of VOCABULARY ids at most.

    chat: whether it has a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for file in model.iterdir():
        (into / file.name).symlink_to(file)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(into / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **({"chat_template": CHAT_TEMPLATE} if chat else {})}
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return into
