"""DFlash and DSpark on TensorRT, run by definition: drafts and texts are those of the CPU's graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.drafters.test_dflash import BLOCK, CAPTURED, TOKENS, Pair, draft_of, opened, pair  # noqa: F401
from tests.drafters.test_eagle_on_tensorrt import SLOTS, decoded, no_gpu  # noqa: F401
from tests.tensorrt_reference import export_float32
from trtspec.checkpoints.head_layouts.dflash import read_head, write_head
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head
from trtspec.compile.tensorrt import TensorRtRequest, export_graph
from trtspec.drafters.base import Ask
from trtspec.drafters.dflash import DFlashDrafter, open_dflash
from trtspec.drafters.head_engine import HEAD_FOLDER, read_info
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import TensorRtInfo
from trtspec.errors import PlanInfeasible

KINDS = ("dflash", "dflash-causal", "dflash-biases", "dspark", "dspark-gated", "dspark-rnn")
COMMON = {"max_batch": SLOTS, "max_seq_len": 160, "taps": CAPTURED}


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's graph, without a head. Most texts are longer than a step, and one is longer than a prompt's run."""
    return export_float32(tiny_model("llama"), tmp_path_factory.mktemp("graph"), rows=6, **COMMON)


@pytest.fixture(scope="module")
def compiled(
    tiny_model: Callable[[str], Path],
    plain: Path,
    pair: Callable[[str], Pair],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """A function from a kind of head to the engine folder with it."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind], both = tmp_path_factory.mktemp(kind) / "engine", pair(kind)
            shutil.copytree(plain, made[kind])
            compile_head(HeadRequest(both.method, both.head, tiny_model("llama"), BLOCK), made[kind])
        return made[kind]

    return make


def drafter_of(engine: Path, method: str, **options: float) -> DFlashDrafter:
    return open_dflash({"method": method, **options}, engine)


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_cpu_graphs(
    pair: Callable[[str], Pair],  # noqa: F811
    compiled: Callable[[str], Path],
    kind: str,
) -> None:
    """Of contexts of many lengths, made in one piece and in several, of prompts longer than a run too."""
    both = pair(kind)
    tokens = (TOKENS * 2)[:150]
    states = both.states(tokens).features[0].numpy()
    ours, theirs = both.open(), drafter_of(compiled(kind), both.method)
    for pieces in ([1], [2], [6], [7], [40], [3, 8, 9, 30], [149], [5, 140]):
        drafts = []
        for drafter in (ours, theirs):
            state = opened(drafter, tokens, states, pieces)
            drafts.append(draft_of(drafter, state))
            assert draft_of(drafter, state) == drafts[-1], "asking again gives the same answer"
            drafter.release(state)
        assert drafts[0].tree and drafts[1] == drafts[0]
    theirs.close()


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dflash", "dspark-rnn"])
def test_sequences_do_not_see_each_other(
    pair: Callable[[str], Pair],  # noqa: F811
    compiled: Callable[[str], Path],
    kind: str,
) -> None:
    """A slot is taken again behind a longer sequence, and beside one that is still there."""
    both = pair(kind)
    states = both.states(TOKENS).features[0].numpy()
    ours, theirs = both.open(), drafter_of(compiled(kind), both.method)
    theirs.release(opened(theirs, TOKENS, states, [80]))
    lengths = [70, 3]
    for order in (lengths, lengths[::-1]):
        expected = [draft_of(ours, opened(ours, TOKENS, states, [n])) for n in order]
        sequences = [opened(theirs, TOKENS, states, [n]) for n in order]
        asks = [Ask(state, BLOCK, BLOCK) for state in sequences]
        assert theirs.propose(asks, 2) == expected
        theirs.release(sequences[0])
        again = opened(theirs, TOKENS, states, [11])
        asked = [Ask(again, BLOCK, BLOCK), asks[1]]
        assert theirs.propose(asked, 2) == [
            draft_of(ours, opened(ours, TOKENS, states, [11])),
            expected[1],
        ]
        with pytest.raises(ValueError, match="all slots of the head are taken"):
            opened(theirs, TOKENS, states, [1])
        theirs.release(again)
        theirs.release(sequences[1])
    theirs.close()


@pytest.mark.model
def test_confidence_ends_the_same_drafts(
    pair: Callable[[str], Pair],  # noqa: F811
    compiled: Callable[[str], Path],
) -> None:
    both = pair("dspark")
    states = both.states(TOKENS).features[0].numpy()
    ours = both.open(min_token_probability=0.5)
    theirs = drafter_of(compiled("dspark"), "dspark", min_token_probability=0.5)
    lengths = set()
    for known in range(5, 60, 5):
        drafts = []
        for drafter in (ours, theirs):
            state = opened(drafter, TOKENS, states, [known])
            drafts.append(draft_of(drafter, state))
            drafter.release(state)
        assert drafts[0] == drafts[1]
        lengths.add(len(drafts[0].tree))
    assert len(lengths) > 2


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dflash", "dspark-gated"])
def test_texts_are_the_cpu_engines(
    pair: Callable[[str], Pair],  # noqa: F811
    compiled: Callable[[str], Path],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
) -> None:
    both = pair(kind)
    speculation = {"method": both.method, "draft_length": BLOCK}
    compile_engine(CompileRequest(tiny_model("llama"), "tiny", speculation, **COMMON), tmp_path)
    compile_head(HeadRequest(both.method, both.head, tiny_model("llama"), BLOCK), tmp_path)
    (drafts, texts), theirs = (decoded(engine, speculation) for engine in (tmp_path, compiled(kind)))
    assert sum(bool(tree) for tree in drafts) > 12
    assert theirs == (drafts, texts)


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "plugin"),
    [("dflash", "SpecVerifySplitTreeAttention"), ("dflash-causal", "SpecVerifySplitAttention")],
)
def test_a_build_leaves_two_graphs_with_the_plugin_in_the_block(
    pair: Callable[[str], Pair],  # noqa: F811
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    plugin: str,
) -> None:
    request = TensorRtRequest(
        tiny_model("llama"), "tiny", {}, rows=8, arch="sm_90", max_batch=3, splits=4, taps=CAPTURED
    )
    export_graph(request, tmp_path)
    compile_head(HeadRequest("dflash", pair(kind).head, tiny_model("llama"), BLOCK), tmp_path)
    layers = read_info(tmp_path, "dflash")["layers"]
    for part, plugins in (("context", ()), ("block", (plugin, "SpecVerifyCombine"))):
        folder = tmp_path / HEAD_FOLDER / part
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        assert not model.functions, "none that could be taken for the plugin"
        assert [node.op_type for node in model.graph.node if node.domain] == [*plugins] * layers
        assert {entry.domain for entry in model.opset_import} == {"", *["trtspec"] * bool(plugins)}
        shapes = TensorRtInfo.read(folder)
        assert (shapes.dtype, shapes.plugins) == ("bfloat16", plugins)
    assert EngineInfo.read(folder).layers == layers, "the plan is searched for as many"
    assert not (tmp_path / HEAD_FOLDER / "embedding.safetensors").exists()


@pytest.mark.model
def test_a_window_shorter_than_the_context_is_refused(
    pair: Callable[[str], Pair],  # noqa: F811
    plain: Path,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The plugin has none; one that no text is longer than hides nothing."""
    both = pair("dflash-window")
    request = HeadRequest("dflash", both.head, tiny_model("llama"), BLOCK)
    with pytest.raises(PlanInfeasible, match="no sliding window"):
        compile_head(request, Path(shutil.copytree(plain, tmp_path / "short")))
    head = read_head(both.head)
    config = {**head.config, "dflash_config": {**head.config["dflash_config"], "swa_window_size": 200}}
    write_head(
        type(head)(head.method, config, head.captured_layers, head.d2t, head.tensors), tmp_path / "head"
    )
    wide = HeadRequest("dflash", tmp_path / "head", tiny_model("llama"), BLOCK)
    compile_head(wide, Path(shutil.copytree(plain, tmp_path / "wide")))
