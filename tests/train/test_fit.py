"""What every trained draft relies on: the states it is given, how its drafts are counted, ModelOpt behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from trtspec.checkpoints.hf_folder import quiet_transformers
from trtspec.quantize.score_torch import load_for_scoring
from trtspec.train import modelopt_torch
from trtspec.train.batches_torch import StreamedBatches
from trtspec.train.fit_torch import FitSettings, fit
from trtspec.train.held_out_torch import _walk, held_out_acceptance
from trtspec.train.texts import Text

pytestmark = pytest.mark.model

VOCABULARY = 320


def texts(count: int, seed: int = 0) -> list[Text]:
    """Counting up by one or by two, from a random start: easily learned, and told apart by what came before."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        step, length = 1 + i % 2, int(rng.integers(12, 30))
        ids = (rng.integers(3, 60) + step * np.arange(length)).astype(np.uint32)
        found.append(Text(ids, 4, f"by {step}"))
    return found


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    with quiet_transformers():
        return load_for_scoring(target, torch.float32)


def batches(model: Any, **changes: Any) -> StreamedBatches:
    settings = {"captured_layers": (0, 2), "batch_tokens": 64, "seed": 0, **changes}
    layers = settings.pop("captured_layers")
    return StreamedBatches(model, texts(10), texts(4, seed=1), layers, **settings)


def test_states_are_those_of_the_whole_model(model: Any) -> None:
    """Captured after each named layer, before the final norm; padding changes nothing in front of it."""
    found = batches(model)
    batch = found.at(0)
    assert batch.features.shape == (*batch.tokens.shape, 2 * 64)
    for row in range(len(batch.tokens)):
        length = int(batch.loss_mask[row].nonzero().max()) + 1
        whole = model(batch.tokens[row : row + 1, :length], output_hidden_states=True)
        expected = torch.cat(
            [whole.hidden_states[1][0], last_layer(model, batch.tokens[row, :length])], dim=-1
        )
        torch.testing.assert_close(batch.features[row, :length], expected, atol=2e-5, rtol=1e-4)
        logits = found.target.logits(batch.last[row, :length])
        torch.testing.assert_close(logits, whole.logits[0], atol=2e-5, rtol=1e-4)
        assert not batch.loss_mask[row, :4].any() and batch.loss_mask[row, 4:length].all()


def last_layer(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Output of the last layer, which transformers shows only after the final norm."""
    kept = []
    hook = model.model.layers[-1].register_forward_hook(lambda _m, _i, out: kept.append(out))
    model(tokens[None])
    hook.remove()
    return (kept[0][0] if isinstance(kept[0], tuple) else kept[0])[0]


def test_a_batch_is_a_function_of_seed_and_step(model: Any) -> None:
    first, second, other = batches(model), batches(model), batches(model, seed=1)
    order = [first.at(step).tokens.tolist() for step in range(2 * first.steps)]
    assert [second.at(step).tokens.tolist() for step in reversed(range(2 * first.steps))] == order[::-1]
    assert [other.at(step).tokens.tolist() for step in range(first.steps)] != order[: first.steps]
    seen = sorted(tuple(ids) for tokens in order[: first.steps] for ids in tokens)
    assert len(seen) == 10, "each text once an epoch"
    assert all(np.size(tokens) <= 64 for tokens in order)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kept_states_are_the_ones_that_the_target_gives_again(model: Any, ranks: int) -> None:
    streamed, kept = batches(model), batches(model, memory_bytes=1 << 20)
    for step in range(2 * streamed.steps):
        one, other = (found.at(step, 0, ranks) for found in (streamed, kept))
        for name in ("tokens", "loss_mask"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        for name in ("features", "last"):  # of padding they are zeros when kept
            real = one.tokens != 0
            assert torch.equal(getattr(one, name)[real], getattr(other, name)[real])
    assert len(kept._kept) >= 10 // ranks and not streamed._kept
    tokens = sum(len(text.tokens) for text in texts(10))
    too_little = batches(model, memory_bytes=tokens * 3 * 64 * 4 - 1)
    too_little.at(0)
    assert not too_little._kept


def test_ranks_share_a_batch_without_overlap(model: Any) -> None:
    found = batches(model)
    for step in range(found.steps):
        whole = {tuple(ids[:3]) for ids in found.at(step).tokens.tolist()}
        parts = [{tuple(ids[:3]) for ids in found.at(step, rank, 2).tokens.tolist()} for rank in (0, 1)]
        assert parts[0] | parts[1] == whole
        assert len(whole) == 1 or not parts[0] & parts[1]


def test_a_step_that_accepts_all_moves_on_by_all_and_one() -> None:
    hits = np.zeros((12, 3), bool)
    hits[2], hits[6, 0], hits[8, 1:] = True, True, True
    # starts at 2: 3 accepted → 6: 1 → 8: none, the first is wrong → 9 has not three tokens after it
    assert _walk(hits, 2, 12) == [3, 1, 0]


class Oracle(torch.nn.Module):
    """Knows texts that count up by one, and drafts so everywhere; has one weight, which nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def drafts(self, batch: Any, target: Any) -> torch.Tensor:
        return batch.tokens[:, :, None] + torch.arange(1, 4)


def test_acceptance_is_walked_by_kind_and_position(model: Any) -> None:
    found = held_out_acceptance(Oracle(), batches(model))
    assert found.by_kind == {"by 1": 4.0, "by 2": 1.0}
    assert found.conditional_acceptance[1:] == (1.0, 1.0)
    assert 0 < found.conditional_acceptance[0] < 1
    assert found.acceptance_length == pytest.approx(1 + 3 * found.conditional_acceptance[0])
    assert found.accuracy[0] == pytest.approx(0.5, abs=0.2)


MODES: dict[str, Callable[[Any], Any]] = {
    "eagle3": lambda m: modelopt_torch.convert_eagle3(m, (0, 2), None),
    "eagle3 reduced": lambda m: modelopt_torch.convert_eagle3(m, (0, 2), np.arange(120) * 2 - np.arange(120)),
    "medusa": lambda m: modelopt_torch.convert_medusa(m, heads=3, layers=1),
    "dflash": lambda m: modelopt_torch.convert_dflash(m, (0, 2), block_size=4, mask_token_id=0, anchors=8),
    "dspark": lambda m: modelopt_torch.convert_dflash(
        m,
        (0, 2),
        block_size=4,
        mask_token_id=0,
        anchors=8,
        projector_type="dspark",
        markov_rank=16,
        markov_head_type="vanilla",
        use_confidence_head=True,
        options={"dflash_confidence_head_alpha": 1.0},
    ),
}


class Converted(torch.nn.Module):
    """A converted model as a DraftHead that drafts nothing right, to see its loss alone."""

    def __init__(self, converted: Any) -> None:
        super().__init__()
        self.converted = converted

    def loss(self, batch: Any, target: Any) -> Any:
        if hasattr(self.converted, "eagle_module"):
            return modelopt_torch.eagle3_loss(self.converted, batch, target, 3)
        return modelopt_torch.modelopt_loss(self.converted, batch, target)

    def drafts(self, batch: Any, target: Any) -> torch.Tensor:
        return torch.full((*batch.tokens.shape, 3), -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_modelopt_learns_on_given_states(model: Any, tmp_path: Path, mode: str, precision: Any) -> None:
    torch.manual_seed(0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    module = Converted(MODES[mode](model))
    settings = FitSettings(
        steps=24, learning_rate=5e-3, warm_up_steps=2, evaluate_steps=24, precision=precision
    )
    curves = fit(module, batches(model), settings, tmp_path)
    losses = [loss for _, loss in curves.loss]
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4])
    assert all(p.equal(before[name]) for name, p in model.named_parameters()), "the target stays as it is"


@pytest.mark.parametrize("mode", ["eagle3 reduced", "dspark"])
def test_killing_a_fit_changes_no_bit(model: Any, tmp_path: Path, mode: str) -> None:
    """Noise and anchors included: they are drawn anew for every step. States that were kept are computed again."""
    states = []
    for name, stop in (("whole", None), ("killed", 7)):
        settings = FitSettings(steps=12, learning_rate=5e-3, evaluate_steps=4, checkpoint_steps=3)
        for attempt in (stop, None) if stop else (None,):
            torch.manual_seed(0)
            module = Converted(MODES[mode](model))

            def emit(event: Any, stop: int | None = attempt) -> None:
                if event.done == stop:
                    raise KeyboardInterrupt

            if attempt:
                with pytest.raises(KeyboardInterrupt):
                    fit(module, batches(model, memory_bytes=1 << 20), settings, tmp_path / name, emit)
            else:
                curves = fit(module, batches(model, memory_bytes=1 << 20), settings, tmp_path / name)
        states.append(({n: p for n, p in module.named_parameters() if p.requires_grad}, curves))
    assert states[0][1] == states[1][1]
    for name, parameter in states[0][0].items():
        assert parameter.equal(states[1][0][name]), name


def test_the_export_holds_what_was_trained_under_the_target_s_settings(model: Any) -> None:
    torch.manual_seed(0)
    config, tensors = modelopt_torch.exported(MODES["eagle3 reduced"](model))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert config["rope_scaling"]["rope_type"] == "default", "no YaRN that it was not trained with"
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert tensors["d2t"].tolist() == list(range(120)), "not zeros"
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
