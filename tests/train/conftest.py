"""A tiny target, its engine, and a request that trains a draft for it in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.compile import CompileRequest, compile_engine
from trtspec.train.job import TrainRequest
from trtspec.train.prompts import TrainingPrompt
from trtspec.train.responses import ResponseSettings

PROMPTS = tuple(TrainingPrompt(f"{'abcdefghij'[i % 10] * (3 + i)} {i}", f"kind {i % 2}") for i in range(24))
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_SURENESS = 6


@pytest.fixture(scope="session")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def sure_target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, but sure of itself as trained models are: a teacher without opinions teaches nothing."""
    from safetensors.torch import load_file, save_file

    folder = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("sure"))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= _SURENESS
    weights.unlink()  # a link to the model that other tests share
    save_file(tensors, weights, {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def engine(sure_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    compile_engine(
        CompileRequest(sure_target, "tiny", {"method": "none", "draft_length": 0}, max_batch=4), folder
    )
    return folder


@pytest.fixture(scope="session")
def request_for(sure_target: Path, engine: Path) -> Callable[..., TrainRequest]:
    """A request with the settings below, changed as named; `method` is draft_model unless it is one of them."""
    settings = {
        "responses": ResponseSettings(max_tokens=20, temperature=0.0),
        "epochs": 16,
        "batch_tokens": 160,
        "learning_rate": 5e-3,
        "held_out_prompts": 4,
        "evaluations": 2,
        "checkpoint_steps": 25,
        "threads": 1,
        "warm_up_steps": 10,
    }

    def make(method: str = "draft_model", **changes: object) -> TrainRequest:
        return TrainRequest(method, sure_target, engine, PROMPTS, **{**settings, **changes})

    return make
