"""Builds of every mechanism over one tiny model, and the files they draft from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.mechanisms.table import MECHANISMS, decode
from tests.tiny_models import with_tokenizer
from tests.tiny_parallel_heads import fitted, own_texts, without_padding
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.config import load_config
from trtspec.drafters.datastore import Datastore, end_of, open_tokenizer, vocabulary_digest
from trtspec.drafters.datastore_build import suffix_array, write_datastore
from trtspec.pipeline import build
from trtspec.store import Store
from trtspec.train.head_modules import METHODS
from trtspec.values import GenerationRequest, SamplingParams

CONFIG = """
name: {name}
target: {{model: {target}}}
speculation: {speculation}
engine: {{max_batch_size: 4, max_seq_len: 192}}
workload: {{context: 64, output_length: 64}}
evaluation: {{output_length: 32}}
"""
BuildOf = Callable[[str], Path]
CHATS = ("rivers and rivers", "bread", "the moon, the moon", "prime numbers")


def tiny_requests(count: int, **sampling: object) -> list[GenerationRequest]:
    """Prompts of different lengths whose answers run to the context limit unless `sampling` says otherwise."""
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(6 + i % 9)),
            SamplingParams(**{"ignore_eos": True, "seed": i, **sampling}),
        )
        for i in range(count)
    ]


def tiny_chats(target: Path) -> list[GenerationRequest]:
    """CHATS with the target's chat template."""
    tokenizer = TextTokenizer.load(target)
    return [
        GenerationRequest(text, tuple(tokenizer.chat([{"role": "user", "content": text}]))) for text in CHATS
    ]


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its tokenizer."""
    return without_padding(tiny_model("llama"), tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def tiny_target(tiny_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_weights, tmp_path_factory.mktemp("target"), chat=True)


@pytest.fixture(scope="session")
def tiny_drafts(tiny_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target with noise on its weights, twice: most drafts are accepted, and many are not."""
    import torch
    import transformers

    drafts = {}
    for seed, name in enumerate(("draft", "other_draft")):
        model = transformers.LlamaForCausalLM.from_pretrained(tiny_weights)
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(torch.randn_like(tensor) * 0.004)
        saved = tmp_path_factory.mktemp("saved")
        model.save_pretrained(saved)
        drafts[name] = with_tokenizer(saved, tmp_path_factory.mktemp(name), chat=True)
    return drafts


@pytest.fixture(scope="session")
def tiny_heads(
    tiny_weights: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function from a mechanism to a head that knows the beginnings of the target's answers by heart."""
    place = tmp_path_factory.mktemp("heads")
    prompts = [request.prompt for request in (*tiny_requests(6), *tiny_chats(tiny_target))]
    texts = own_texts(tiny_weights, prompts, 40)

    def make(method: str) -> Path:
        known = METHODS[method]
        layers = known.captured_layers(3)
        head, _ = fitted(method, tiny_weights, texts, place / "work", draft_length=3, captured_layers=layers)
        shutil.rmtree(place / "work")
        import_module(known.layout).write_head(head, place / method)
        return place / method

    return make


@pytest.fixture(scope="session")
def tiny_build(
    tiny_target: Path,
    tiny_drafts: dict[str, Path],
    tiny_heads: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> BuildOf:
    """A function from a method, or "none", to its build folder; each is built once a session."""
    place = tmp_path_factory.mktemp("mechanisms")
    store = Store(place / "cache")
    made: dict[str, Path] = {}

    def make(method: str) -> Path:
        if method not in made:
            speculation = "{{method: none}}" if method == "none" else MECHANISMS[method].tiny
            datastore = place / "datastore"
            if "{datastore}" in speculation and not datastore.exists():
                _write_answers(make("none") / "engine", tiny_target, datastore)
            head = tiny_heads(method) if "{head}" in speculation else None
            filled = speculation.format(**tiny_drafts, datastore=datastore, head=head)
            path = place / f"{method}.yaml"
            path.write_text(
                CONFIG.format(name=method.replace("_", "-"), target=tiny_target, speculation=filled)
            )
            made[method] = build(load_config(path), place / method, store=store).out
        return made[method]

    return make


def _write_answers(engine: Path, target: Path, file: Path) -> None:
    """A datastore of the model's own answers, true and with tokens replaced: what is wrong is the more frequent."""
    documents = []
    asked = [*tiny_requests(6), *tiny_chats(target)]
    for number, completion in enumerate(decode(engine, asked, None)):
        documents.append(list(completion.token_ids))
        damaged, rng = np.array(documents[-1]), np.random.default_rng(number)
        damaged[rng.random(len(damaged)) < 0.15] = rng.integers(3, 200)
        documents += [damaged.tolist()] * 2
    tokens = np.array([t for document in documents for t in (*document, end_of(np.uint16))], np.uint16)
    digest = vocabulary_digest(open_tokenizer(target).get_vocab())
    write_datastore(Datastore(tokens, suffix_array(tokens), digest), file)
