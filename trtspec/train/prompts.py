"""What the target is asked, so that a draft learns from its answers: packaged prompts, files, its own inventions.

A chat model that is given only the beginning of a user's turn writes one itself (Magpie, 2406.08464): prompts in any
number, without any data. Half of them begin with one of the openings below, so that every kind of task occurs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.quantize.corpora import read_records

PACKAGED, SELF = "packaged", "self"

_ASKING = {
    "code": "What does this code do?\n\n{}",
    "story": "Continue this story.\n\n{}",
    "summary": "Summarize this text in two sentences.\n\n{}",
}
_ASKING_ELSE = "Explain this in your own words.\n\n{}"

OPENINGS: tuple[tuple[str, str], ...] = (
    ("coding", "Write a Python function that"),
    ("coding", "Explain what this code does:\n\n```python\n"),
    ("coding", "Find the bug in the following"),
    ("humanities", "Compare"),
    ("humanities", "What were the main causes of"),
    ("humanities", "Explain the idea of"),
    ("math", "Solve the equation"),
    ("math", "A shop sells"),
    ("math", "Calculate"),
    ("multilingual", "Translate the following sentence"),
    ("multilingual", "Explique"),
    ("multilingual", "Erkläre"),
    ("multilingual", "请"),
    ("qa", "How does"),
    ("qa", "Why do"),
    ("qa", "What is the difference between"),
    ("rag", "Answer the question using only the context.\n\nContext:\n[1]"),
    ("rag", "Read the following passage and answer the question.\n\nPassage:"),
    ("reasoning", "If all"),
    ("reasoning", "Three friends"),
    ("reasoning", "Analyse this argument:"),
    ("roleplay", "You are a"),
    ("roleplay", "Pretend that you are"),
    ("stem", "Explain how"),
    ("stem", "What happens when"),
    ("stem", "Describe the process of"),
    ("summarization", "Summarize the following text in three sentences.\n\n"),
    ("summarization", "Summarize this article:\n\n"),
    ("writing", "Write a short story about"),
    ("writing", "Write an email to"),
    ("writing", "Rewrite the following text"),
)


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """text: the user's turn. kind: of task, as far as it is known."""

    text: str
    kind: str

    @property
    def order(self) -> bytes:
        """A digest of the text: the same prompts are held out whatever else is asked."""
        return hashlib.sha256(self.text.encode()).digest()


def packaged_prompts(name: str = "calibration") -> list[TrainingPrompt]:
    """The user turns of a text that comes with trtspec, and questions about its plain parts.

    name: "calibration", or "heldout", which shares nothing with it.
    """
    prompts = []
    for record in read_records(name):
        if record.messages is None:
            text = _ASKING.get(record.kind, _ASKING_ELSE).format(record.text)
        else:
            text = record.messages[0]["content"]
        prompts.append(TrainingPrompt(text, record.kind))
    return list(dict.fromkeys(prompts))


def named_prompts(data: str) -> list[TrainingPrompt]:
    """The prompts of one entry of `training.data` besides "self": the first user turns of a data set.

    Raises ConfigError and SetupError as `load_prompts` does.
    """
    from trtspec.evaluate.data import load_prompts

    if data == PACKAGED:
        return packaged_prompts()
    return [TrainingPrompt(prompt.turns[0], prompt.category) for prompt in load_prompts(data).prompts]


def prompt_ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    """As a chat turn, where the model knows chats."""
    try:
        return tokenizer.chat([{"role": "user", "content": text}])
    except ValueError:  # no chat template
        return tokenizer.encode(text)


def begun_turn(tokenizer: TextTokenizer, opening: str) -> list[int]:
    """Ids of a conversation up to a user's turn that is not finished yet: what all that begin with `opening` share.

    Raises ValueError for a model without a chat template.
    """
    first, second = (
        tokenizer.chat([{"role": "user", "content": opening + tail}]) for tail in (" one", "Two")
    )
    return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(first, second))]


def opening_of(number: int) -> tuple[str, str]:
    """Kind and first words of the prompt that the target makes up as its `number`-th; every other one is free."""
    if number % 2:
        return "free", ""
    return OPENINGS[number // 2 % len(OPENINGS)]


def made_up(
    tokenizer: TextTokenizer, start: Sequence[int], written: Sequence[int], kind: str
) -> TrainingPrompt:
    """The prompt in what the target wrote. start: `begun_turn` of no opening. written: the whole turn's ids."""
    return TrainingPrompt(tokenizer.decode(written[len(start) :]).strip(), kind)
