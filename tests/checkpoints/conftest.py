"""Model and head folders written on the spot: a configuration and safetensors headers without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

_ITEM = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1}


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, list[int]] | tuple[str, list[int], bytes]]
) -> None:
    """Write name → (dtype, shape[, bytes]); zeros where no bytes are given."""
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, (dtype, shape, *given) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        data = given[0] if given else bytes(count * _ITEM[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder from a config, optional tensors and further JSON files by stem."""
    made = iter(range(1000))

    def make(config: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, **files: Any) -> Path:
        path = tmp_path / f"model{next(made)}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        for stem, content in files.items():
            (path / f"{stem}.json").write_text(json.dumps(content))
        if tensors is not None:
            write_safetensors(path / "model.safetensors", tensors)
        return path

    return make


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
