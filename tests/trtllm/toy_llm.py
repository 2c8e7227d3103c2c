"""A TensorRT-LLM build for the LLM API of `fake/`: a byte tokenizer, settings, the repository with trtspec's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trtllm.conftest import settings
from trtspec.checkpoints.tokenizer import _BYTE_OF
from trtspec.trtllm.derive import Settings
from trtspec.trtllm.repository import write_own_repository

FAKE = Path(__file__).parent / "fake"
END = 256
DRAFT = 4  # of an n-gram deployment, 3 of an EAGLE one
SLOTS, QUEUE, LONGEST = 4, 6, 4096
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def answer(prompt: bytes, max_tokens: int) -> bytes:
    """What the fake says to a prompt without a newline."""
    backwards = prompt[::-1]
    return (backwards * (max_tokens // len(backwards) + 1))[:max_tokens]


def write_target(folder: Path) -> None:
    """A model folder of which only the tokenizer is looked at: ids are bytes, and 256 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


def llm_settings(version: str = "1.2.1", decoding: str = "NGram", **changes: Any) -> Settings:
    values = settings(version, decoding, tensor_parallel_size=1, pipeline_parallel_size=1)
    values |= {
        "max_batch_size": SLOTS,
        "max_seq_len": LONGEST,
        "cuda_graph_config": {"batch_sizes": [1, 2, 4]},
    }
    return Settings(version, values | changes, {"max_seq_len": "as configured"}, ())


def write_build(build: Path, made: Settings, *, instances: int = 1, max_queue_size: int = QUEUE) -> Path:
    """The target and the repository of a build; returns the repository."""
    write_target(build / "target")
    write_own_repository(made, "tensorrt_llm", instances, max_queue_size, build / "trtllm" / "repository")
    return build / "trtllm" / "repository"
