"""Heads that copy do so before the first training step, and only where there is something to copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trtspec.errors import PlanInfeasible  # noqa: E402
from trtspec.train.batches_torch import StreamedBatches  # noqa: E402
from trtspec.train.head_modules import METHODS, Blueprint, build_module  # noqa: E402
from trtspec.train.texts import Text  # noqa: E402

VOCAB, HALF, D = 400, 48, 3
LAYERS = (0, 1, 2)
COPYING = {"first_position_share": 0.0, "kv_heads": 4}
HEADS = {"eagle3": 3, "mtp": 1}


def make_model(**changes: object):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = transformers.LlamaConfig(**{**sizes, **heads, "rope_theta": 1e5, **changes})
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Random tokens, said twice: nothing but what came before tells the second half."""
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(VOCAB), (24, 1)), axis=1)[:, :HALF]
    return [Text(np.tile(row, 2).astype(np.uint32), HALF + 1) for row in rows]


def blueprint(method: str, texts: list[Text], **options: int) -> Blueprint:
    chosen = {**METHODS[method].options, **COPYING, "copying_heads": HEADS[method], **options}
    layers = LAYERS if method == "eagle3" else ()
    return Blueprint(method, layers, D, None, chosen, tuple(text.tokens for text in texts))


@pytest.fixture
def shares(model, texts: list[Text]) -> Callable[[Blueprint], tuple[float, float]]:
    """Right first drafts where the text repeats itself, and where it does not."""

    def measure(plan: Blueprint) -> tuple[float, float]:
        torch.manual_seed(0)
        module = build_module(plan, model).eval()
        layers = plan.captured_layers
        streamed = StreamedBatches(model, texts[1:], texts, layers, batch_tokens=1024, seed=0)
        repeated, new = [], []
        for batch, _ in streamed.held_out():
            right = module.drafts(batch, streamed.target)[:, :-1, 0] == batch.tokens[:, 1:]
            repeated.append(right[:, HALF:].float().mean().item())
            new.append(right[:, : HALF - 1].float().mean().item())
        return float(np.mean(repeated)), float(np.mean(new))

    return measure


@pytest.mark.parametrize("method", HEADS)
def test_what_came_behind_a_token_is_proposed_again(shares: Callable, texts: list[Text], method: str) -> None:
    repeated, new = shares(blueprint(method, texts))
    assert repeated > 0.95
    assert new < 0.1, "in the first half there is nothing to copy"
    plain, _ = shares(blueprint(method, texts, copying_heads=0))
    assert plain < 0.1


def test_what_the_heads_do_not_take_stays(model, texts: list[Text]) -> None:
    torch.manual_seed(0)
    with_copies = build_module(blueprint("eagle3", texts), model).head()
    torch.manual_seed(0)
    without = build_module(blueprint("eagle3", texts, copying_heads=0), model).head()
    assert with_copies.config == without.config and with_copies.config["num_key_value_heads"] == 4
    changed = {n for n, t in with_copies.tensors.items() if not np.array_equal(t, without.tensors[n])}
    assert changed == {"fc.weight", *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo")}
    for x in "qkv":
        first = f"layers.0.self_attn.{x}_proj.weight"
        assert np.array_equal(with_copies.tensors[first][:64], without.tensors[first][:64])
    targets = model.model.layers[-1].self_attn.k_proj.weight.detach().numpy()
    assert np.array_equal(without.tensors["layers.0.self_attn.k_proj.weight"][64:128, 256:], targets[:64])


@pytest.mark.parametrize(
    ("method", "options", "changes", "message"),
    [
        ("eagle3", {"copying_heads": 5}, {}, "5 copying heads .* room for 3"),
        ("mtp", {"copying_heads": 2}, {}, "2 copying heads .* room for 1"),
        ("eagle3", {"copying_heads": 2}, {"rope_theta": 2.0}, "turns all components fast"),
        ("mtp", {"kv_heads": 3}, {}, "3 key-value heads do not go with the target's 2 and 4 query heads"),
    ],
)
def test_what_does_not_fit_is_refused(
    texts: list[Text], method: str, options: dict, changes: dict, message: str
) -> None:
    with pytest.raises(PlanInfeasible, match=message):
        build_module(blueprint(method, texts, **options), make_model(**changes))
