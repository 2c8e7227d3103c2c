"""The engine computes what the PyTorch model computes, for every family and every switch of the config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.tiny_models import VARIANTS
from trtspec.compile import CompileRequest, compile_engine
from trtspec.engines.info import EngineInfo
from trtspec.errors import PlanInfeasible, StageFailed

NO_SPECULATION = {"method": "none", "draft_length": 0}


def compiled(model: Path, into: Path, **options: object) -> EngineInfo:
    return compile_engine(CompileRequest(model, "tiny", NO_SPECULATION, **options), into)


@pytest.fixture
def copy(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model folder a test may change."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def edit_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_equals_pytorch(variant: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    info = compiled(tiny_model(variant), tmp_path)
    assert info.checks["graph_error"] < 2e-4
    assert info.checks["top1_agreement"] == 1.0


def test_the_same_model_gives_the_same_bytes(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        compiled(tiny_model("qwen3"), folder)
    for name in ("model.onnx", "model.onnx.data", "config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_graph_that_computes_something_else_is_not_published(copy: Path, tmp_path: Path) -> None:
    """Had the builder read another RoPE base than PyTorch, every tensor would fit and every answer be worse."""
    from trtspec.compile import check
    from trtspec.compile.decoder import read_decoder
    from trtspec.compile.export_onnx import GraphOptions, export_decoder
    from trtspec.compile.weights import Weights

    engine = tmp_path / "engine"
    engine.mkdir()
    compiled(copy, engine)
    edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    export_decoder(read_decoder(copy), Weights(copy), GraphOptions(257), engine / "model.onnx")
    edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    with pytest.raises(StageFailed, match="graph_error"):
        check.check_engine(copy, engine)


def test_weights_that_are_not_finite_are_not_published(copy: Path, tmp_path: Path) -> None:
    """NaN compares false with any bound, so a careless check would let it through."""
    path = copy / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    engine = tmp_path / "engine"
    engine.mkdir()
    with pytest.raises(StageFailed, match="does not compute"):
        compiled(copy, engine)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_key_value_heads": 3}, "4 query heads over 3"),
        ({"head_dim": 20}, "head_dim 20"),
        ({"rope_scaling": {"rope_type": "foo"}, "rope_parameters": None}, "foo"),
    ],
)
def test_what_the_graph_cannot_do_is_refused_by_name(
    copy: Path, tmp_path: Path, values: dict[str, object], named: str
) -> None:
    edit_config(copy, **values)
    with pytest.raises(PlanInfeasible, match=named) as caught:
        compiled(copy, tmp_path / "model")
    assert caught.value.where.endswith("config.json")


def test_a_context_past_the_model_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match="max_seq_len 999"):
        compiled(copy, tmp_path / "model", max_seq_len=999)


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [(None, 2, (2,)), ([2, 5], 2, (2, 5)), (7, 2, (7,)), (None, [3, 4], (3, 4))],
)
def test_stop_ids_come_from_the_generation_config_first(
    copy: Path, tmp_path: Path, generation: object, config: object, stops: tuple[int, ...]
) -> None:
    edit_config(copy, eos_token_id=config)
    path = copy / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps({"eos_token_id": generation}))
    into = tmp_path / "engine"
    into.mkdir()
    assert compiled(copy, into).stop_token_ids == stops
