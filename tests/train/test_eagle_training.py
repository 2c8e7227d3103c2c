"""Heads that pair tokens with the target's states: that they learn, and that what was learned is what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.verify.toy import run
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head, head_taps
from trtspec.drafters.factory import open_drafter
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.train.batches_torch import Batch, FrozenTarget, StreamedBatches
from trtspec.train.fit_torch import FitSettings, fit
from trtspec.train.head_modules import Blueprint, build_module
from trtspec.train.held_out_torch import _hits, _walk
from trtspec.train.texts import Text
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

pytestmark = pytest.mark.model

D = 3
METHODS = ("eagle", "eagle3", "mtp", "p_eagle")
REDUCED = np.sort(np.random.default_rng(0).choice(320, 200, replace=False)) - np.arange(200)


@pytest.fixture(scope="module")
def bare(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is sure of itself, as a trained one is, and goes by its last tokens mostly, which can be learned
    from little text. It has no tokenizer: every id is a token."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.mlp.down_proj.weight.mul_(0.5)
    model.save_pretrained(folder := tmp_path_factory.mktemp("sure"))
    return folder


@pytest.fixture(scope="module")
def model(bare: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(model) -> list[Text]:
    """The target's own greedy answers to random prompts: it falls into loops, which a head can learn."""
    prompts = torch.from_numpy(np.random.default_rng(1).integers(5, 250, (480, 6)))
    with torch.inference_mode():
        ids = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [Text(row.astype(np.int32), prompts.shape[1]) for row in ids.numpy()]


def blueprint(method: str, d2t: np.ndarray | None = None) -> Blueprint:
    options = {"layers": 1, "mask_token_id": 3} if method == "p_eagle" else {}
    return Blueprint(method, (0, 1, 2) if method in eagle.THREE else (), D, d2t, options)


def batches(model, texts: list[Text], method: str) -> StreamedBatches:
    taps = blueprint(method).captured_layers
    return StreamedBatches(model, texts[8:], texts[:8], taps, batch_tokens=512, seed=0)


def some_batch(model, method: str, texts: list[Text]) -> tuple[Batch, FrozenTarget]:
    streamed = batches(model, texts, method)
    return streamed.at(0), streamed.target


@pytest.fixture(scope="module")
def trained(model, texts: list[Text], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    made: dict[str, tuple] = {}

    def make(method: str):
        if method not in made:
            torch.manual_seed(0)
            module = build_module(blueprint(method), model)
            settings = FitSettings(steps=150, learning_rate=3e-3, evaluate_steps=1000, checkpoint_steps=1000)
            curves = fit(module, batches(model, texts, method), settings, tmp_path_factory.mktemp("fit"))
            made[method] = module, curves
        return made[method]

    return make


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_more_is_accepted(trained: Callable, method: str) -> None:
    _, curves = trained(method)
    losses = [value for _, value in curves.loss]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    right = [accuracy for _, accuracy in curves.accuracy]
    assert (np.mean(right[-10:], axis=0) > np.mean(right[:10], axis=0) + 0.03).all(), "at every position"
    before, after = curves.held_out[0][1], curves.held_out[-1][1]
    # EAGLE-1's regression first unlearns the start, the state handed on, which loops of one token reward.
    assert after.acceptance_length > before.acceptance_length + (0.1 if method != "eagle" else -0.1)


@pytest.mark.parametrize("method", METHODS)
def test_a_served_head_is_accepted_as_often_as_it_was_in_training(
    trained: Callable, model, texts: list[Text], bare: Path, tmp_path: Path, method: str
) -> None:
    """The walk over held-out text and the real loop share no code: one state beside the wrong token, one position
    counted otherwise, and a head that learned would draft at random here."""
    module, _ = trained(method)
    head = module.head()
    (mtp if method == "mtp" else eagle).write_head(head, tmp_path / "head")
    taps = head_taps(method, heads.read_head(tmp_path / "head"), 3)
    speculation = {"method": method, "draft_length": D, "shape": "chain"}
    engine = tmp_path / "engine"
    engine.mkdir()
    compile_engine(CompileRequest(bare, "tiny", speculation, max_batch=4, max_seq_len=96, taps=taps), engine)
    compile_head(HeadRequest(method, tmp_path / "head", bare, D), engine)
    drafter = open_drafter(speculation, engine=engine, slots=4)
    asked = [
        GenerationRequest(
            str(i), tuple(text.tokens[: text.start].tolist()), SamplingParams(max_tokens=40, ignore_eos=True)
        )
        for i, text in enumerate(texts[:8])
    ]
    outcome = run(DecodeLoop(OnnxRuntimeEngine(engine), drafter, draft_length=D, max_queue=8), asked)
    for i, text in enumerate(texts[:8]):
        assert list(outcome.completions[str(i)].token_ids) == text.tokens[text.start :].tolist()
    streamed = batches(model, texts, method)
    module.eval()
    accepted = 0
    for i, text in enumerate(texts[:8]):
        batch = streamed._run([text])
        hits, _ = _hits(module.drafts(batch, streamed.target), batch.tokens, batch.loss_mask)
        walked = _walk(hits[0], text.start, len(text.tokens))
        served = [step.accepted for step in outcome.completions[str(i)].steps if step.drafted == D]
        assert served == walked[: len(served)], "step by step"
        accepted += sum(served)
    assert accepted > 20


@pytest.mark.parametrize("d2t", [None, REDUCED], ids=["whole vocabulary", "reduced"])
def test_this_packages_pass_is_modelopts(model, texts: list[Text], d2t: np.ndarray | None) -> None:
    """Training-time test by ModelOpt's code and by ours gives one loss and one accuracy."""
    torch.manual_seed(1)
    module = build_module(blueprint("eagle3", d2t), model)
    batch, target = some_batch(model, "eagle3", texts)
    with torch.no_grad():
        theirs = module.loss(batch, target)
        weights, total, accuracy = module.weights(), 0.0, []
        for step, (scored, _) in enumerate(module._unrolled(batch, target, weights, D)):
            # ModelOpt judges rows step … T − 2 by the target's scores one row on, where the next token is its own.
            logits = module._logits(weights, target, scored[:, step:-1])
            truth = target.logits(batch.last[:, 1 + step :])[..., module.ids]
            judged = torch.nn.functional.pad(batch.loss_mask[:, 2 + step :], (0, 1))
            entropy = -(truth.softmax(-1) * logits.log_softmax(-1)).sum(-1)
            total += 0.9**step * float((entropy * judged).sum() / judged.sum())
            right = (truth.argmax(-1) == logits.argmax(-1)) & judged
            accuracy.append(float(right.sum() / judged.sum()))
    assert total == pytest.approx(float(theirs.loss), rel=1e-4)
    assert accuracy == pytest.approx(theirs.accuracy, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_stand_where_they_are_said_to(
    trained: Callable, model, texts: list[Text], method: str
) -> None:
    """Entry [b, t, i] may depend on tokens up to t and, of those after, on the i − 1 it has drafted itself."""
    module, _ = trained(method)
    module.eval()
    streamed = batches(model, texts[:9], method)
    text = texts[0]
    t = 20

    def drafts(tokens: np.ndarray) -> torch.Tensor:
        batch = streamed._run([Text(tokens.astype(np.int32), text.start)])
        return module.drafts(batch, streamed.target)[0, t]

    first = drafts(text.tokens.copy())
    for changed in range(t + 1, t + D + 1):
        other = text.tokens.copy()
        other[changed:] = (other[changed:] + 7) % 300
        same = drafts(other) == first
        until = D if method == "p_eagle" else min(D, changed - t)
        assert same[:until].all()
    other = text.tokens.copy()
    other[t - 3 : t + 1] = (other[t - 3 : t + 1] + 7) % 300
    assert not (drafts(other) == first).all()


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_gives_nearly_the_same_loss_and_gradient(
    trained: Callable, model, texts: list[Text], method: str
) -> None:
    module, _ = trained(method)
    batch, target = some_batch(model, method, texts)
    found = {}
    for precise in (True, False):
        torch.manual_seed(0)
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
            loss = module.loss(batch, target).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in module.parameters() if p.requires_grad and p.grad is not None]
        found[precise] = loss.item(), torch.cat(gradients)
    assert found[False][0] == pytest.approx(found[True][0], rel=0.02)
    assert torch.nn.functional.cosine_similarity(found[True][1], found[False][1], dim=0) > 0.98


@pytest.mark.parametrize("method", METHODS)
def test_a_head_goes_into_its_layout_and_back(model, tmp_path: Path, method: str) -> None:
    d2t = REDUCED if method != "eagle" else None
    module = build_module(blueprint(method, d2t), model)
    head = module.head()
    layout = mtp if method == "mtp" else eagle
    layout.write_head(head, tmp_path)
    read = layout.read_head(tmp_path)
    assert read.method == method
    assert dict(read.config) == dict(head.config)
    assert read.captured_layers == head.captured_layers
    assert all(np.array_equal(read.tensors[name], array) for name, array in head.tensors.items())
    assert ("lm_head.weight" in read) == (d2t is not None)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_first_position_is_learned_alone_for_its_share_of_the_steps(
    model, texts: list[Text], tmp_path: Path, method: str
) -> None:
    torch.manual_seed(0)
    plan = blueprint(method)
    module = build_module(replace(plan, options={**plan.options, "first_position_share": 0.5}), model)
    curves = fit(
        module,
        batches(model, texts, method),
        FitSettings(steps=6, learning_rate=1e-3, evaluate_steps=100),
        tmp_path,
    )
    assert [len(accuracy) for _, accuracy in curves.accuracy] == [1, 1, 1, D, D, D]
    assert len(curves.held_out[-1][1].conditional_acceptance) == D, "all are drafted throughout"
