"""Medusa and Hydra beside a target on the TensorRT engines, run by definition: hits, drafts and texts are those of the
CPU engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.drafters.test_eagle_on_tensorrt import CONTEXT, DRAFT_LENGTH, SLOTS, decoded, no_gpu  # noqa: F401
from tests.tensorrt_reference import export_float32
from tests.tiny_models import with_tokenizer
from tests.tiny_parallel_heads import hydra_head, medusa_head
from trtspec.checkpoints.head_layouts import hydra, medusa
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head
from trtspec.compile.heads.measure import measure_head
from trtspec.compile.tensorrt import TensorRtRequest, export_graph
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.head_engine import HEAD_FOLDER, read_info
from trtspec.engines.tensorrt_info import TensorRtInfo

HEADS = {"medusa": (medusa, medusa_head), "hydra": (hydra, hydra_head)}
LAST_LAYER = (2,)
BACKENDS = ("onnxruntime", "tensorrt")
Both = Callable[[str, int], tuple[Path, Path]]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def both(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A function from a method and a number of branches to the engine folders of the two backends, random heads in
    them."""

    def make(method: str, branches: int) -> tuple[Path, Path]:
        place, (layout, head) = tmp_path_factory.mktemp(method), HEADS[method]
        layout.write_head(head(heads=3, layers=1, seed=4), place / "published")
        common = {"max_batch": SLOTS, "max_seq_len": CONTEXT, "max_branches": branches, "taps": LAST_LAYER}
        for backend in BACKENDS:
            engine = place / backend
            engine.mkdir()
            if backend == "onnxruntime":
                compile_engine(CompileRequest(target, "tiny", {"method": method}, **common), engine)
            else:
                numerics = "fast" if branches > 1 else "exact"
                export_float32(target, engine, rows=DRAFT_LENGTH + 1, numerics=numerics, **common)
            compile_head(HeadRequest(method, place / "published", target, DRAFT_LENGTH), engine)
        return place / BACKENDS[0], place / BACKENDS[1]

    return make


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("choices", [[[0, 0, 0]], [[0, 0, 0], [1, 2], [0, 1], [3]]], ids=["chain", "tree"])
def test_drafts_and_texts_are_the_cpu_engines(both: Both, method: str, choices: list[list[int]]) -> None:
    shape = "tree" if len(choices) > 1 else "chain"
    speculation = {"method": method, "draft_length": DRAFT_LENGTH, "shape": shape, "choices": choices}
    found = [decoded(engine, speculation) for engine in both(method, 4 if shape == "tree" else 1)]
    (drafts, texts), theirs = found
    trees = [tree for tree in drafts if tree]
    assert len(trees) > 12 and any(len(tree.leaves()) > 1 for tree in trees) == (shape == "tree")
    assert theirs == (drafts, texts)


@pytest.mark.parametrize("method", HEADS)
def test_hits_are_counted_on_the_engine_that_runs(both: Both, method: str) -> None:
    """Nothing runs where the graph is written, so a head comes without them; they change no other folder's file. A
    text has more rows than the plan: they are run in pieces."""
    prompts = [[3 * i + 1, i + 9, i + 2] for i in range(8)]
    hits = []
    for engine in both(method, 4):
        assert "hits" not in read_info(engine, method)
        elsewhere = engine.parent / f"{engine.name}.json"
        elsewhere.hardlink_to(engine / HEAD_FOLDER / "head.json")
        measure_head(method, engine, prompts)
        hits.append(read_info(engine, method)["hits"])
        assert "hits" not in json.loads(elsewhere.read_text())
        drafter = open_drafter({"method": method, "draft_length": 6, "shape": "tree"}, engine=engine)
        drafter.close()
    assert hits[0] == hits[1]
    assert [len(ranks) for ranks in hits[0]] == [10, 10, 10] and sum(map(sum, hits[0])) > 0


@pytest.mark.parametrize(("method", "rows"), [("medusa", 3), ("hydra", 12)])
def test_a_build_leaves_graphs_of_rows_in_the_targets_type(
    target: Path, tmp_path: Path, method: str, rows: int
) -> None:
    engine, (layout, head) = tmp_path / "engine", HEADS[method]
    engine.mkdir()
    layout.write_head(head(heads=3), tmp_path / "head")
    request = TensorRtRequest(
        target,
        "tiny",
        {},
        rows=8,
        arch="sm_90",
        max_batch=3,
        max_branches=4,
        numerics="fast",
        taps=LAST_LAYER,
    )
    export_graph(request, engine)
    compile_head(HeadRequest(method, tmp_path / "head", target, 2), engine)
    parts = sorted(path.parent.name for path in (engine / HEAD_FOLDER).rglob("tensorrt.json"))
    assert parts == (["medusa"] if method == "medusa" else ["hydra.0", "hydra.1"]), (
        "no head that never drafts"
    )
    for part in parts:
        shapes = TensorRtInfo.read(engine / HEAD_FOLDER / part)
        assert (shapes.dtype, shapes.capacity, shapes.plugins) == ("bfloat16", 0, ())
        assert [profile.batch for profile in shapes.profiles] == [rows]
        model = onnx.load(engine / HEAD_FOLDER / part / "model.onnx")
        onnx.checker.check_model(model, full_check=True)  # strongly typed: every node's types agree
        assert {entry.domain for entry in model.opset_import} == {""}, "standard operators alone"
    table = engine / HEAD_FOLDER / "embedding.safetensors"
    assert table.is_file() == (method == "hydra"), (
        "Hydra's heads read the target's table, which is there once"
    )
