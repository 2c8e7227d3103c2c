"""Valid settings of each version, and plans of the shipped configs as TensorRT-LLM would run them."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.bare_configs import PUBLISHED, SMOLLM2
from trtspec.checkpoints.facts import ArchitectureFacts, facts_from
from trtspec.checkpoints.heads import inspect_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "build_configs").glob("*.yaml"))
VERSIONS = ("1.2.1", "1.3.0rc20", "1.3.0rc29", "1.4.0rc4")


def files_in(folder: Path) -> dict[str, str]:
    """Path below `folder` → text, of every file."""
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


# The minimal valid forms, by decoding type as the contract names them: (1.2.1's, the one from 1.3.0rc27 on).
MINIMAL: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "Eagle3": (
        {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/models/draft"},
        {
            "decoding_type": "Eagle3",
            "max_draft_len": 4,
            "speculative_model": "/models/draft",
            "draft_len_schedule": {4: 4, 8: 2, 32: 1},
        },
    ),
    "MTP": (
        {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
        {"decoding_type": "MTP", "max_draft_len": 3},
    ),
    "NGram": (
        {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 4},
        {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 4},
    ),
    "DraftTarget": (
        {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model_dir": "/models/draft"},
        {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "/models/draft"},
    ),
    "PARD": (None, {"decoding_type": "PARD", "max_draft_len": 4, "speculative_model": "/models/draft"}),
    "DFlash": (None, {"decoding_type": "DFlash", "max_draft_len": 4, "speculative_model": "/models/draft"}),
    "DSpark": (None, {"decoding_type": "DSpark", "max_draft_len": 4, "speculative_model": "/models/draft"}),
    "SA": (None, {"decoding_type": "SA", "max_draft_len": 4}),
}


def settings(version: str, decoding: str, **changes: Any) -> dict[str, Any]:
    """Valid settings with one decoding type; changes: of the top level."""
    old, new = MINIMAL[decoding]
    speculative = deepcopy(old if version < "1.3" else new)
    without_overlap = decoding == "NGram" or (decoding == "DraftTarget" and version < "1.3")
    return {
        "model": "/models/target",
        "backend": "pytorch",
        "max_batch_size": 32,
        "max_num_tokens": 8448,
        "max_seq_len": 8192,
        "disable_overlap_scheduler": without_overlap,
        "kv_cache_config": {"enable_block_reuse": decoding != "Eagle3", "free_gpu_memory_fraction": 0.85},
        "cuda_graph_config": {"batch_sizes": [1, 2, 4, 8, 16, 32], "enable_padding": True},
        "speculative_config": speculative,
        **changes,
    }


def decoding_types(version: str) -> tuple[str, ...]:
    """Those of MINIMAL that a version runs."""
    if version < "1.3":
        return tuple(name for name, (old, _) in MINIMAL.items() if old is not None)
    return tuple(name for name in MINIMAL if name != "DSpark" or version >= "1.3.0rc27")


@pytest.fixture
def published(tmp_path: Path) -> Callable[[str], Any]:
    """Facts of a model or head that a shipped config names on the hub; None for other names."""

    def read(name: str) -> Any:
        if name not in PUBLISHED:
            return None
        folder = tmp_path / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
        return inspect_model(folder)

    return read


@pytest.fixture
def smollm2() -> ArchitectureFacts:
    return facts_from(SMOLLM2, "smollm2/config.json")


@pytest.fixture
def draft_of(tmp_path: Path) -> Callable[[str], Any]:
    """Facts of a draft for smollm2 by method; None for methods without one."""
    layer = {**SMOLLM2, "num_hidden_layers": 1, "draft_vocab_size": 49152, "tie_word_embeddings": False}
    block = {"block_size": 6, "mask_token_id": 16, "target_layer_ids": [1, 14, 26]}
    made: dict[str, dict[str, Any]] = {
        "eagle3": {**layer, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        "mtp": {**layer, "architectures": ["LlamaMTP"]},
        "dflash": {
            **layer,
            "architectures": ["DFlashDraftModel"],
            "dflash_config": block,
            "num_target_layers": 30,
        },
        "dspark": {
            **layer,
            "architectures": ["DSparkDraftModel"],
            "dflash_config": block | {"markov_rank": 8, "projector_type": "dspark"},
            "num_target_layers": 30,
        },
        "draft_model": {**SMOLLM2, "num_hidden_layers": 4},
        "pard": {**SMOLLM2, "num_hidden_layers": 4, "pard_token": 17},
    }

    def make(method: str) -> Any:
        if method not in made:
            return None
        folder = tmp_path / f"draft-{method}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(made[method]))
        return inspect_model(folder)

    return make
