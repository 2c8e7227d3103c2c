"""Shared configurations of published models, small facts, and a fake config for the planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtspec.checkpoints.facts import ArchitectureFacts, facts_from, read_facts


@pytest.fixture(scope="session")
def published(shared: Path) -> Callable[[str], ArchitectureFacts]:
    """Facts of a published model by the stem of its file; skips where the files are absent."""
    return lambda name: read_facts(shared / "data" / "model_configs" / f"{name}.json")


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "eos_token_id": [128001, 128009],
}


@pytest.fixture
def llama_8b() -> ArchitectureFacts:
    return facts_from(LLAMA_8B, "llama-8b/config.json")


@pytest.fixture
def tiny() -> ArchitectureFacts:
    """SmolLM2-135M's shape: the CPU quickstart."""
    smol = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    more = {
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    return facts_from(LLAMA_8B | smol | more, "smollm2/config.json")


@pytest.fixture
def make_config() -> Callable[..., Any]:
    return _config


def _config(**sections: dict[str, Any]) -> Any:
    """A config by attributes, with the schema's defaults; sections override field by field."""
    defaults: dict[str, dict[str, Any]] = {
        "target": {
            "model": "m", "quantization": "none", "kv_cache": "auto", "quantize_lm_head": False, "block_size": None,
        },
        "speculation": {"method": "ngram", "draft_length": "auto"},
        "engine": {
            "backend": "onnxruntime", "version": None, "device": "cpu", "tensor_parallel": 1, "pipeline_parallel": 1,
            "expert_parallel": 1, "attention_dp": "auto", "max_batch_size": 8, "max_seq_len": None, "numerics": "exact",
        },
        "workload": {
            "batch_sizes": (1,), "context": 1024, "output_length": 256, "temperature": 0.0, "max_itl_ms": None,
            "max_ttft_ms": None, "acceptance": None, "measured": None,
        },
    }  # fmt: skip
    return SimpleNamespace(
        **{name: SimpleNamespace(**{**fields, **sections.get(name, {})}) for name, fields in defaults.items()}
    )
