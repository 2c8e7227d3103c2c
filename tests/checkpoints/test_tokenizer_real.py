"""The real model's tokenizer, against transformers and against itself one-shot."""

from pathlib import Path

import numpy as np
import pytest

from trtspec.checkpoints.tokenizer import TextTokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "Hello world",
    " leading",
    "a\n\nb\t",
    "Ärger im Wald 😀👩‍👩‍👧",
    "1234567",
    "<|im_end|>",
    "",
    "  def f(x):\n    return x",
]
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 😀"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture(scope="module")
def folder(quickstart_build: Path) -> Path:
    return quickstart_build / "engine"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(tokenizer, theirs, text):
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_chats_are_those_of_transformers(tokenizer, theirs, messages, generate):
    ids = tokenizer.chat(messages, add_generation_prompt=generate)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert ids[0] == tokenizer.bos_id != ids[1]


def test_the_models_stop_and_special_ids(tokenizer):
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.vocab_size == 49_152


@pytest.mark.parametrize("highest", [600, 49_152], ids=["mostly bytes", "whole vocabulary"])
def test_streamed_text_equals_decoded_text_for_random_ids(tokenizer, highest):
    rng = np.random.default_rng(highest)
    for _ in range(1000):
        ids = rng.integers(0, highest, rng.integers(0, 40)).tolist()
        text = tokenizer.stream()
        assert "".join([*map(text.push, ids), text.finish()]) == tokenizer.decode(ids)
