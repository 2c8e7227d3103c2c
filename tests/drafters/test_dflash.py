"""DFlash and DSpark on their own graphs, against the PyTorch modules that ModelOpt trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import VOCABULARY
from trtspec.checkpoints.head_layouts.dflash import numbers_of, read_head, write_head
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head
from trtspec.compile.heads.dflash import export_block, export_context
from trtspec.compile.heads.graph import int8_rows
from trtspec.compile.rope import Rope
from trtspec.compile.weights import Linear, Weights, packed_linear
from trtspec.drafters.base import Ask, Draft
from trtspec.drafters.block_engine import BLOCK as BLOCK_GRAPH
from trtspec.drafters.block_engine import CONTEXT
from trtspec.drafters.dflash import DFlashDrafter, open_dflash
from trtspec.drafters.head_engine import HEAD_FOLDER, HeadGraph
from trtspec.train.batches_torch import Batch, StreamedBatches
from trtspec.train.dflash_torch import DFlashModule
from trtspec.train.modelopt_torch import convert_dflash
from trtspec.train.texts import Text
from trtspec.values import GenerationRequest

CAPTURED = (0, 2)
BLOCK = 5
# name → (method, changes of the architecture, ModelOpt's settings)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {}),
    "dflash-causal": ("dflash", {}, {"dflash_draft_attention": "causal"}),
    "dflash-window": ("dflash", {}, {"dflash_swa_window_size": 7}),
    "dflash-biases": ("dflash", {"attention_bias": True}, {}),
    "dspark": ("dspark", {"markov_head_type": "vanilla"}, {}),
    "dspark-gated": ("dspark", {"markov_head_type": "gated"}, {}),
    "dspark-rnn": ("dspark", {"markov_head_type": "rnn"}, {}),
}


@dataclass
class Pair:
    """A head as PyTorch has it and as the engine runs it."""

    module: DFlashModule
    batches: StreamedBatches
    engine: Path
    head: Path
    method: str

    def open(self, **speculation: float) -> DFlashDrafter:
        return open_dflash({"method": self.method, **speculation}, self.engine, threads=1)

    def states(self, tokens: Sequence[int]) -> Batch:
        return self.batches._run([Text(np.array(tokens, np.uint32), 1)])


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    import transformers

    model = tiny_model("llama")
    network = transformers.LlamaForCausalLM.from_pretrained(model)
    batches = StreamedBatches(network, [], [], CAPTURED, batch_tokens=512, seed=0)
    made: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in made:
            method, changes, options = KINDS[kind]
            if method == "dspark":
                changes = {
                    "projector_type": "dspark",
                    "markov_rank": 8,
                    "use_confidence_head": True,
                    **changes,
                }
            torch.manual_seed(5)
            converted = convert_dflash(
                network, CAPTURED, block_size=BLOCK, mask_token_id=3, anchors=4, options=options, **changes
            )
            with torch.no_grad():  # norms start at 1 and biases at 0, which would hide a missing one
                for tensor in converted.dflash_module.parameters():
                    tensor.add_(torch.randn_like(tensor) * (0.3 if tensor.ndim == 1 else 0.15))
            place = tmp_path_factory.mktemp(kind)
            module = DFlashModule(converted, method, CAPTURED)
            write_head(module.head(), place / "head")
            engine = place / "engine"
            engine.mkdir()
            speculation = {"method": method, "draft_length": BLOCK}
            compile_engine(CompileRequest(model, "tiny", speculation, taps=CAPTURED), engine)
            compile_head(HeadRequest(method, place / "head", model, BLOCK), engine)
            made[kind] = Pair(module, batches, engine, place / "head", method)
        return made[kind]

    return make


def opened(drafter: DFlashDrafter, tokens: Sequence[int], states: np.ndarray, pieces: Sequence[int]):
    """A sequence that knows `tokens`, whose states came in pieces that end at these positions."""
    state = drafter.open(GenerationRequest("r", tuple(tokens[:1])), seed=0)
    first = 0
    for end in pieces:
        drafter.observe(state, tokens[first + 1 : end + 1], states[first:end])
        first = end
    return state


def draft_of(drafter: DFlashDrafter, state: object, length: int = BLOCK) -> Draft:
    return drafter.propose([Ask(state, length, length)], 1)[0]


TOKENS = np.random.default_rng(4).integers(0, VOCABULARY, 90).tolist()


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_torch_module(pair: Callable[[str], Pair], kind: str) -> None:
    """At beginnings of many lengths, past a bucket of the cache and with the context made in pieces."""
    both = pair(kind)
    batch = both.states(TOKENS)
    states = batch.features[0].numpy()
    drafter = both.open()
    for known in (1, 2, 11, 64, 65, 80):  # rows of the target; the last known token is the one behind them
        state = opened(drafter, TOKENS, states, [1, known] if known > 1 else [1])
        drafted = list(draft_of(drafter, state).tree.tokens)
        assert len(drafted) == BLOCK - (both.method == "dflash")
        # The module is given the true tokens between, so the draft itself is put there.
        tokens = torch.tensor([[*TOKENS[: known + 1], *drafted]])
        filled = torch.zeros((1, tokens.shape[1], states.shape[1]))
        filled[0, :known] = batch.features[0, :known]
        expected = both.module.drafts(replace(batch, tokens=tokens, features=filled), both.batches.target)
        assert drafted == expected[0, known].tolist()


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dflash", "dspark-rnn", "dflash-window"])
def test_company_and_order_do_not_matter(pair: Callable[[str], Pair], kind: str) -> None:
    both = pair(kind)
    states = both.states(TOKENS).features[0].numpy()
    drafter = both.open()
    lengths = [70, 3, 30, 1]
    alone = [draft_of(drafter, opened(drafter, TOKENS, states, [n])) for n in lengths]
    together = [opened(drafter, TOKENS, states, [n]) for n in lengths]
    asks = [Ask(state, BLOCK, BLOCK) for state in together]
    assert drafter.propose(asks, 4) == alone
    assert drafter.propose(asks[::-1], 4) == alone[::-1], "asking again gives the same answer"
    drafter.release(together[0])
    for state, known in zip(together[1:], lengths[1:], strict=True):  # two tokens later
        drafter.observe(state, TOKENS[known + 1 : known + 3], states[known : known + 2])
    later = [draft_of(drafter, opened(drafter, TOKENS, states, [n + 2])) for n in lengths[1:]]
    assert drafter.propose([asks[1], asks[2], asks[3]], 3) == later


@pytest.mark.model
def test_drafting_stops_where_the_head_s_positions_end(pair: Callable[[str], Pair]) -> None:
    both = pair("dflash")
    states = both.states(TOKENS).features[0].numpy()
    drafter = both.open()
    drafter._info["max_positions"] = 12
    assert [len(draft_of(drafter, opened(drafter, TOKENS, states, [n])).tree) for n in (7, 9, 10, 11, 20)] == [
        4, 2, 1, 0, 0,
    ]  # fmt: skip


@pytest.mark.model
def test_a_dspark_draft_ends_where_its_confidence_does(pair: Callable[[str], Pair]) -> None:
    both = pair("dspark")
    states = both.states(TOKENS).features[0].numpy()
    whole, wary, never = (
        both.open(),
        both.open(min_token_probability=0.5),
        both.open(min_token_probability=1.0),
    )
    lengths = []
    for known in range(5, 60, 5):
        full, cut = (draft_of(d, opened(d, TOKENS, states, [known])).tree.tokens for d in (whole, wary))
        assert full[: len(cut)] == cut
        lengths.append(len(cut))
        assert not draft_of(never, opened(never, TOKENS, states, [known])).tree
    assert len(set(lengths)) > 2


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_read_as_it_was_written(pair: Callable[[str], Pair], kind: str, tmp_path: Path) -> None:
    head = read_head(pair(kind).head)
    write_head(head, tmp_path)
    again = read_head(tmp_path)
    assert (again.method, again.config, again.captured_layers) == (
        head.method,
        head.config,
        head.captured_layers,
    )
    assert again.tensors.keys() == head.tensors.keys()
    assert all(np.array_equal(again.tensors[name], head.tensors[name]) for name in head.tensors)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (pair(kind).head / name).read_bytes()


class EightBits(Weights):
    """A target whose output layer is stored in 8 bits."""

    shares_head = False

    def linear(self, modules: Sequence[str]) -> Linear:
        return packed_linear([int8_rows(self.dense(f"{modules[0]}.weight"))])


@pytest.mark.model
@pytest.mark.parametrize("stored", ["tied", "8-bit", "8-bit head"])
def test_the_output_layer_is_the_target_s_in_whatever_form(
    pair: Callable[[str], Pair], tiny_model: Callable[[str], Path], tmp_path: Path, stored: str
) -> None:
    both = pair("dflash")
    head = read_head(both.head)
    numbers = numbers_of(head, "test")
    tables = Rope.of(numbers.rope, numbers.head_dim, 256, where="test").tables(256)
    target = Weights(tiny_model("llama-tied")) if stored == "tied" else EightBits(tiny_model("llama"))
    folder, int8 = tmp_path / HEAD_FOLDER, stored == "8-bit head"
    folder.mkdir()
    export_context(head, numbers, tables, folder / CONTEXT, int8=int8)
    export_block(
        head,
        numbers,
        tables,
        target,
        drafts=4,
        vocab_size=VOCABULARY - 40,
        path=folder / BLOCK_GRAPH,
        int8=int8,
    )
    context, block = (HeadGraph(tmp_path, name, 1) for name in (CONTEXT, BLOCK_GRAPH))
    drafter = both.open()
    drafter._engine._graphs = drafter._engine._graphs._replace(
        context=lambda hidden, positions: context(hidden=hidden, positions=positions),
        block=lambda feeds: block(**feeds),
    )
    batch = both.states(TOKENS)
    states = batch.features[0].numpy()
    table = torch.from_numpy(target.dense("lm_head.weight").copy())
    shown = replace(both.batches.target, head=table)
    agreed = []
    for known in range(3, 80, 3):
        drafted = draft_of(drafter, opened(drafter, TOKENS, states, [known])).tree.tokens
        assert max(drafted) < VOCABULARY - 40
        tokens = torch.tensor([[*TOKENS[: known + 1], *drafted]])
        filled = torch.zeros((1, tokens.shape[1], states.shape[1]))
        filled[0, :known] = batch.features[0, :known]
        expected = both.module.drafts(replace(batch, tokens=tokens, features=filled), shown)[
            0, known
        ].tolist()
        agreed += [a == b for a, b in zip(drafted, expected, strict=True) if b < VOCABULARY - 40]
    assert np.mean(agreed) > {"tied": 0.99, "8-bit": 0.9, "8-bit head": 0.7}[stored]
