"""A head behind a real engine drafts what its definition gives, computed from scratch with PyTorch at every step.

Feature and token are one apart: row i pairs the target's state at token i with token i + 1. The check knows nothing of
slots, caches, pieces of prompts or rejected drafts: it runs the whole text through transformers, pairs the states, and
goes on from the head's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.compile.test_eagle_graph import Reference
from tests.tiny_heads import tiny_head
from tests.verify.toy import run
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head, head_taps
from trtspec.drafters.base import Ask, Draft
from trtspec.drafters.factory import open_drafter
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import ROOT

DRAFT_LENGTH = 4


class Truth:
    """The target's layer outputs over a text, by transformers."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> np.ndarray:
        """float32 [T, layers · H]."""
        kept: dict[int, torch.Tensor] = {}
        hooks = [
            self.model.model.layers[i].register_forward_hook(
                lambda _m, _i, out, i=i: kept.update({i: out[0]})
            )
            for i in layers
        ]
        self.model.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([kept[i].reshape(len(tokens), -1) for i in layers], dim=-1).numpy()


def next_scores(
    reference: Reference, path: Sequence[int], captured: np.ndarray, drafted: Sequence[int]
) -> np.ndarray:
    """The head's scores after `drafted` tokens behind a known path; captured: of path[:-1]."""
    states = reference.fuse(captured)
    for count in range(len(drafted) + 1):
        tokens = np.array([*path[1:], *drafted[:count]])
        logits, recycled = reference.chain(tokens, states)
        states = torch.cat([states, torch.from_numpy(recycled[-1:])])
    return logits[-1]


def three_requests() -> list[GenerationRequest]:
    """Prompts of 3, 14 and 25 tokens."""
    return [
        GenerationRequest(
            str(i),
            tuple((i * 7 + k * k) % 250 + 5 for k in range(3 + 11 * i)),
            SamplingParams(max_tokens=14, ignore_eos=True),
        )
        for i in range(3)
    ]


@pytest.mark.parametrize(
    ("method", "shape", "settings"),
    [
        ("eagle3", "chain", {}),
        ("eagle3", "tree", {"captured": (0, 2), "norm_before_fc": True, "norm_output": True}),
        ("eagle", "tree", {"own_lm_head": False}),
        ("eagle2", "chain", {}),
        ("mtp", "chain", {}),
    ],
)
def test_every_draft_is_the_one_its_text_gives(
    tiny_model: Callable[[str], Path], tmp_path: Path, method: str, shape: str, settings: dict[str, object]
) -> None:
    target = tiny_model("llama")
    head = tiny_head("eagle" if method == "eagle2" else method, **settings)
    (mtp if method == "mtp" else eagle).write_head(head, tmp_path / "head")
    taps = head_taps(method, heads.read_head(tmp_path / "head"), 3)
    engine = tmp_path / "engine"
    engine.mkdir()
    speculation = {"method": method, "draft_length": DRAFT_LENGTH, "shape": shape, "top_k": 2}
    compile_engine(
        CompileRequest(target, "tiny", speculation, max_batch=2, max_seq_len=96, max_branches=3, taps=taps),
        engine,
    )
    compile_head(HeadRequest(method, tmp_path / "head", target, DRAFT_LENGTH), engine)
    drafter = open_drafter(speculation, engine=engine, slots=2)
    seen: list[tuple[tuple[int, ...], Draft]] = []
    propose = drafter.propose

    def recorded(asks: Sequence[Ask], rows: int) -> list[Draft]:
        drafts = propose(asks, rows)
        seen.extend((tuple(ask.state.tokens), draft) for ask, draft in zip(asks, drafts, strict=True))
        return drafts

    drafter.propose = recorded
    runner = OnnxRuntimeEngine(engine)
    # A head that nobody trained would never be right: texts that the drafts steer, by a verifier that takes some.
    loop = DecodeLoop(runner, drafter, draft_length=DRAFT_LENGTH, prefill_rows=7, verifier=TakesSome(runner))
    outcome = run(loop, three_requests())
    assert not outcome.failures
    assert sum(s.accepted for c in outcome.completions.values() for s in c.steps) > 5
    truth, reference = Truth(target), Reference(head, target)
    checked = 0
    for path, draft in seen:
        captured = truth.states(path[:-1], taps)
        if head.method == "mtp" or head.method == "eagle":
            assert captured.shape[1] == 64
        for parent in {ROOT, *draft.tree.parents}:
            drafted = [
                draft.tree.tokens[node] for node in (() if parent == ROOT else draft.tree.path(parent))
            ]
            scores = next_scores(reference, path, captured, drafted)
            children = [draft.tree.tokens[child] for child in draft.tree.children[parent]]
            best = np.argsort(-scores)[: len(children)]
            assert sorted(children) == sorted(best.tolist())
            checked += 1
    assert checked > 30


class TakesSome:
    """Accepts every other first draft, whatever the target says: rows that are kept, and rows that are not."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self.vocabulary = engine.spec.tokenizer_vocab_size
        self.calls = 0

    def __call__(self, draft, logits, target, random, position):
        from trtspec.verify.acceptance import Verdict

        self.calls += 1
        path = draft.tree.path(draft.tree.leaves()[0])[: self.calls % 3] if draft.tree else ()
        row = path[-1] + 1 if path else 0
        last = int(logits[row, : self.vocabulary].argmax())
        tokens = (*(draft.tree.tokens[node] for node in path), last)
        for token in tokens:
            target.append(token)
        return Verdict(tokens, tuple(path))
