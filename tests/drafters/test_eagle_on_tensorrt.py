"""A head and its target on the TensorRT engines, run by definition, decode as they do on the CPU engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.drafters.test_eagle_on_the_engine import TakesSome, three_requests
from tests.tensorrt_reference import export_float32
from tests.tiny_heads import REDUCED, tiny_head
from tests.verify.toy import run
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head, head_taps
from trtspec.compile.reference_attention import ReferenceRunner
from trtspec.drafters.base import Ask, Draft
from trtspec.drafters.factory import open_drafter
from trtspec.engines.opening import open_engine
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import TokenTree

DRAFT_LENGTH, SLOTS, CONTEXT = 6, 2, 160


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.engines.tensorrt.PlanRunner", lambda folder, info: ReferenceRunner(folder))


def decoded(engine: Path, speculation: dict[str, object]) -> tuple[list[TokenTree], list[tuple[int, ...]]]:
    """(what was drafted, the texts) of three requests in two slots."""
    runner = open_engine(engine)
    drafter = open_drafter(speculation, engine=engine, slots=SLOTS, target=runner)
    seen: list[TokenTree] = []
    propose = drafter.propose

    def recorded(asks: Sequence[Ask], rows: int) -> list[Draft]:
        drafts = propose(asks, rows)
        seen.extend(draft.tree for draft in drafts)
        return drafts

    drafter.propose = recorded
    loop = DecodeLoop(runner, drafter, draft_length=DRAFT_LENGTH, prefill_rows=7, verifier=TakesSome(runner))
    outcome = run(loop, three_requests())
    drafter.close()
    runner.close()
    assert not outcome.failures
    return seen, [outcome.completions[str(i)].token_ids for i in range(3)]


@pytest.mark.parametrize(
    ("method", "shape", "settings"),
    [
        ("eagle3", "chain", {"d2t": REDUCED}),
        ("eagle3", "tree", {"captured": (0, 2), "norm_before_fc": True, "norm_output": True}),
        ("eagle", "tree", {"own_lm_head": False}),
        ("p_eagle", "chain", {}),
        ("mtp", "chain", {}),
        ("mtp", "chain", {"num_hidden_layers": 2}),
    ],
)
def test_drafts_and_texts_are_the_cpu_engines(
    tiny_model: Callable[[str], Path], tmp_path: Path, method: str, shape: str, settings: dict[str, object]
) -> None:
    target, head = tiny_model("llama"), tiny_head(method, **settings)
    (mtp if method == "mtp" else eagle).write_head(head, tmp_path / "head")
    taps = head_taps(method, heads.read_head(tmp_path / "head"), 3)
    speculation = {"method": method, "draft_length": DRAFT_LENGTH, "shape": shape, "top_k": 3}
    branches = 4 if shape == "tree" else 1
    common = {"max_batch": SLOTS, "max_seq_len": CONTEXT, "max_branches": branches, "taps": taps}
    found = []
    for backend in ("onnxruntime", "tensorrt"):
        engine = tmp_path / backend
        engine.mkdir()
        if backend == "onnxruntime":
            compile_engine(CompileRequest(target, "tiny", speculation, **common), engine)
        else:
            export_float32(target, engine, rows=8, numerics="fast" if branches > 1 else "exact", **common)
        compile_head(HeadRequest(method, tmp_path / "head", target, DRAFT_LENGTH), engine)
        found.append(decoded(engine, speculation))
    (drafts, texts), (their_drafts, their_texts) = found
    assert len(drafts) > 12 and any(len(tree.leaves()) > 1 for tree in drafts) == (shape == "tree")
    assert their_drafts == drafts and their_texts == texts
