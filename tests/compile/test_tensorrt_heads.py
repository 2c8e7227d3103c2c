"""Autoregressive heads for TensorRT: their graphs, run by definition, pass what those of the CPU pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.compile.test_eagle_graph import (  # the tests are run here again, on the engines of this module
    test_a_branch_of_a_tree_sees_its_ancestors_alone,  # noqa: F401
    test_a_draft_goes_on_from_the_heads_own_output,  # noqa: F401
    test_rows_of_any_pieces_are_pytorchs,  # noqa: F401
    with_head,
    written,
)
from tests.tensorrt_reference import export_float32
from tests.tiny_heads import CAPTURED, tiny_head
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.compile.heads import HeadRequest, compile_head
from trtspec.compile.reference_attention import ReferenceRunner
from trtspec.compile.tensorrt import TensorRtRequest, export_graph
from trtspec.drafters.head_engine import HEAD_FOLDER, read_info
from trtspec.drafters.pair_engine import PairStep
from trtspec.drafters.pair_engine_tensorrt import TensorRtPairEngine
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import TensorRtInfo


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's graph, without a head; a step has fewer rows than the texts."""
    settings = {"rows": 8, "numerics": "fast", "max_batch": 3, "max_branches": 7, "taps": CAPTURED}
    return export_float32(target, tmp_path_factory.mktemp("graph"), splits=2, **settings)


@pytest.fixture(scope="module")
def opened(
    target: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Head, TensorRtPairEngine]]:
    """A function from the name of a variant to the head and its engine."""
    made: dict[str, tuple[Head, TensorRtPairEngine]] = {}

    def open_variant(name: str) -> tuple[Head, TensorRtPairEngine]:
        if name not in made:
            head, engine = with_head(name, target, plain, tmp_path_factory.mktemp("head"))
            runner = ReferenceRunner(engine / HEAD_FOLDER)
            made[name] = head, TensorRtPairEngine(engine, read_info(engine, head.method), runner=runner)
        return made[name]

    return open_variant


def test_a_tree_whose_beginning_was_not_run_is_refused(opened: Callable[[str], tuple]) -> None:
    import numpy as np

    _, engine = opened("eagle3")
    states = np.zeros((1, 64), np.float32)
    step = PairStep(0, 5, np.array([1]), states=states, recycled=True, sees=np.ones((1, 3), bool))
    with pytest.raises(ValueError, match="whose beginning was not run"):
        engine.forward([step])


def test_a_build_of_the_head_has_the_targets_shapes_and_the_plugin(target: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    request = TensorRtRequest(target, "tiny", {}, rows=8, arch="sm_90", max_batch=3, splits=4, taps=CAPTURED)
    export_graph(request, engine)
    head = tiny_head("eagle3", max_position_embeddings=100)
    compile_head(HeadRequest("eagle3", written(head, tmp_path / "head"), target, 4), engine)
    ours, theirs = TensorRtInfo.read(engine / HEAD_FOLDER), TensorRtInfo.read(engine)
    assert (ours.profiles, ours.dtype, ours.splits, ours.built) == (theirs.profiles, "bfloat16", 4, None)
    info = EngineInfo.read(engine / HEAD_FOLDER)
    assert (info.backend, info.spec.max_seq_len, ours.capacity) == ("tensorrt", 100, 108)
    model = onnx.load(engine / HEAD_FOLDER / "model.onnx", load_external_data=False)
    assert not model.functions, "none that could be taken for the plugin"
    assert {entry.domain for entry in model.opset_import} == {"", "trtspec"}, "nothing of ONNX Runtime's own"
    assert [node.op_type for node in model.graph.node if node.domain] == [
        "SpecVerifySplitAttention",
        "SpecVerifyCombine",
    ]
    assert not (engine / HEAD_FOLDER / "embedding.npy").exists()
