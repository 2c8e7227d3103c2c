"""Prompts of random tokens: a load of an exact input length, and no measure of acceptance.

`random:TOKENS` names them. No text continues from noise, so what a draft proposes after it, and whether the target
agrees, says nothing of real use; what it is good for is prefill and memory at a given length.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trtspec.errors import ConfigError
from trtspec.evaluate.data import Prompt, PromptSet

if TYPE_CHECKING:
    from trtspec.checkpoints.tokenizer import TextTokenizer

PREFIX = "random:"
CAUTION = (
    "random tokens are not acceptance data, and they overstate throughput: by 23 % on average in SPEED-Bench "
    "(arXiv 2604.09557)"
)


def prompt_length(data: str) -> int | None:
    """Tokens of a prompt for a data set named `random:TOKENS`; None for any other. Raises ConfigError for no number."""
    if not data.startswith(PREFIX):
        return None
    text = data.removeprefix(PREFIX)
    if not text.isdecimal() or not int(text):
        raise ConfigError(
            f"{data} does not say how many tokens a prompt has",
            where="evaluation.data",
            hint=f"write {PREFIX}1024",
        )
    return int(text)


def random_prompts(tokenizer: TextTokenizer, length: int, count: int, seed: int) -> PromptSet:
    """`count` prompts, each the text of `length` tokens drawn uniformly, from those that are whole characters.

    Targets tokenize the text again, in which neighbours may join: a few tokens less. Prompt i depends on seed, length
    and i only.
    """
    return PromptSet(
        f"{PREFIX}{length}",
        tuple(
            Prompt(
                f"random-{length}-{index}", "random tokens", (_text(tokenizer, length, f"{seed}/{index}"),)
            )
            for index in range(count)
        ),
        (),
        caution=CAUTION,
    )


def _text(tokenizer: TextTokenizer, length: int, seed: str) -> str:
    draw, ids = random.Random(seed), []
    while len(ids) < length:
        token = draw.randrange(tokenizer.vocab_size)
        shown = "" if token in tokenizer.special_ids else tokenizer.decode([token])
        # A part of a character would be replaced, and the replacement is other tokens.
        if shown.strip() and "\ufffd" not in shown:
            ids.append(token)
    return tokenizer.decode(ids)
