"""The header of a GGUF file, read with the standard library: metadata, tensor names, and a config made of them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from trtspec.errors import SetupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_metadata(path: Path) -> dict[str, object]:
    """The key-value header of a GGUF file (version 2 or 3, little-endian); arrays become their length.

    Tensor data is not read. Adds "tensor_names" (tuple). SetupError on a file that is not GGUF or ends early.
    """

    def take(format_: str) -> tuple:
        size = struct.calcsize("<" + format_)
        data = file.read(size)
        if len(data) != size:
            raise SetupError("the GGUF header ends early: the file is cut short", where=str(path))
        return struct.unpack("<" + format_, data)

    def text() -> str:
        (length,) = take("Q")
        return take(f"{length}s")[0].decode("utf-8", errors="replace")

    def value(kind: int) -> object:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            item, count = take("IQ")
            if item in _SCALARS:
                file.seek(count * struct.calcsize("<" + _SCALARS[item]), os.SEEK_CUR)
            else:
                for _ in range(count):
                    value(item)
            return count
        if kind not in _SCALARS:
            raise SetupError(f"unknown value type {kind} in the GGUF header", where=str(path))
        return take(_SCALARS[kind])[0]

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SetupError("not a GGUF file", where=str(path))
        (version,) = take("I")
        if version not in (2, 3):
            raise SetupError(f"GGUF version {version} is not supported (2 and 3 are)", where=str(path))
        tensors, pairs = take("QQ")
        header: dict[str, object] = {}
        for _ in range(pairs):
            key = text()
            header[key] = value(take("I")[0])
        names = []
        for _ in range(tensors):
            names.append(text())
            (dimensions,) = take("I")
            take(f"{dimensions}QIQ")  # shape, element type, offset
    return {**header, "tensor_names": tuple(names)}


_CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def gguf_config(path: Path) -> dict[str, object]:
    """A Hugging Face style config.json of the model in a GGUF file, from its header alone: enough to plan.

    Covers the dense Llama family. SetupError for another architecture.
    """
    header = read_gguf_metadata(path)
    kind = header.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise SetupError(
            f"GGUF architecture {kind!r} is not supported ({', '.join(_ARCHITECTURES)} are)", where=str(path)
        )
    config: dict[str, object] = {"model_type": kind, "architectures": [_ARCHITECTURES[kind]]}
    for ours, theirs in _CONFIG_KEYS.items():
        if (found := header.get(f"{kind}.{theirs}")) is not None:
            config[ours] = shortest_float(found) if isinstance(found, float) else found
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["vocab_size"] = header.get(f"{kind}.vocab_size") or header.get("tokenizer.ggml.tokens")
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = header.get(f"tokenizer.ggml.{name}_token_id")
    tied = "output.weight" not in header["tensor_names"]
    return {**config, "tie_word_embeddings": tied, "torch_dtype": "bfloat16"}


def shortest_float(value: float) -> float:
    """A float32 of the header as the decimal its author wrote (9.9999997e-06 is 1e-05)."""
    return float(f"{value:.7g}")
