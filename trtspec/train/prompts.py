"""What the target is asked, so that a draft learns from its answers: packaged prompts, files, its own inventions.

A chat model that is given only the beginning of a user's turn writes one itself (Magpie, 2406.08464): prompts in any
number, without any data. Half of them begin with one of the openings below, so that every kind of task occurs.

Such prompts are short, and their answers rarely repeat them. Much of what is served does: summaries, questions about
passages, a second turn. The tasks of `follow_up` are of that sort, about what the target answered before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.quantize.corpora import read_records

PACKAGED, SELF, FOLLOW_UP = "packaged", "self", "follow_up"

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

_TURN = "next turn"  # the kind of a task that goes on with the conversation; all others begin one
# {asked} and {answer}: of the conversation it is about. {passage}: another answer.
_TASKS: tuple[tuple[str, str], ...] = (
    ("summarization", "Summarize the following text in three sentences.\n\n{answer}"),
    (
        "rag",
        "Use the passages below to answer the question, and name the passage that you used.\n\n[1] {passage}\n\n"
        "[2] {answer}\n\nQuestion: {asked}",
    ),
    (_TURN, "Make your answer half as long."),
    ("writing", "Rewrite the text below for a reader of twelve years.\n\n{answer}"),
    ("multilingual", "{language}{asked}"),
    (
        "rag",
        "Read these notes, then answer the question with a sentence from them.\n\nNotes:\n{answer}\n\n{passage}"
        "\n\nQuestion: {asked}",
    ),
    (_TURN, "Now make it a list with one short line for each point."),
    ("summarization", "Write a headline for this article, and below it a summary.\n\n{answer}"),
    ("multilingual", "{language}{answer}"),
    (_TURN, "Explain the most important point of that with an example."),
    ("writing", "Correct all mistakes in this text and give the whole corrected text.\n\n{answer}"),
    ("summarization", "List every name, number and date in this text, each with its sentence.\n\n{answer}"),
)
_CODE = "```"
_CODE_TASKS: tuple[tuple[str, str], ...] = (
    (_TURN, "Change the code so that it checks its input, and give the whole new version."),
    ("coding", "Add comments and a docstring to this code.\n\n{answer}"),
    (_TURN, "Write three tests for this code."),
)
_LANGUAGES = (
    "Antworte auf Deutsch: ",
    "Réponds en français : ",
    "Responde en español: ",
    "请用中文回答：",
    "Rispondi in italiano: ",
    "日本語で答えてください：",
    "हिंदी में उत्तर दीजिए: ",
    "Odpowiedz po polsku: ",
    "أجب بالعربية: ",
)


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """text: the user's turn. kind: of task, as far as it is known.

    earlier: turns before it, the user's and the model's by turns. root: text of the prompt whose answer it is about.
    """

    text: str
    kind: str
    earlier: tuple[str, ...] = ()
    root: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Everything that is said up to the answer."""
        return (*self.earlier, self.text)

    @property
    def order(self) -> bytes:
        """A digest of the text or its root's: the same prompts are held out whatever else is asked, and with them the
        tasks about their answers.
        """
        return hashlib.sha256((self.text if self.root is None else self.root).encode()).digest()


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


def follow_up(answered: TrainingPrompt, answer: str, passage: str, number: int) -> TrainingPrompt:
    """The task that follows as the `number`-th of all, about `answer`, which the target gave to a first turn.

    passage: another of its answers.
    """
    tasks = _CODE_TASKS if _CODE in answer else _TASKS
    kind, task = tasks[number % len(tasks)]
    language = _LANGUAGES[number // len(tasks) % len(_LANGUAGES)]
    text = task.format(asked=answered.text, answer=answer, passage=passage, language=language)
    earlier = (answered.text, answer) if kind == _TURN else ()
    return TrainingPrompt(text, kind, earlier, answered.text)


def prompt_ids(tokenizer: TextTokenizer, prompt: TrainingPrompt) -> list[int]:
    """As the turns of a chat, where the model knows chats."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(prompt.key)]
    try:
        return tokenizer.chat(turns)
    except ValueError:  # no chat template
        return tokenizer.encode("\n\n".join(prompt.key))


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
