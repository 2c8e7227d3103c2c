"""The text quantization calibrates on and is judged by: original records shipped with the package.

`data/calibration.jsonl` and `data/heldout.jsonl` share no text. A record is {"kind", "text"} or
{"kind", "messages": [{"role", "content"}, …]}.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_SHORTEST = 2  # tokens; one token predicts nothing
_BATCH = 8  # calibration texts that run together


@dataclass(frozen=True, slots=True)
class Record:
    """`kind` names the sort of text; exactly one of `text` and `messages` is set."""

    kind: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None


def read_records(name: str) -> tuple[Record, ...]:
    """The records of data/`name`.jsonl ("calibration" or "heldout")."""
    lines = files("trtspec.quantize").joinpath(f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return tuple(
        Record(entry["kind"], entry.get("text"), tuple(entry["messages"]) if "messages" in entry else None)
        for entry in entries
    )


def token_ids(record: Record, tokenizer: Any) -> list[int]:
    """A record's token ids for a transformers tokenizer.

    Messages pass through the chat template once, and the tokenizer adds no BOS of its own to what the template
    already wrote; plain text (and messages where there is no template) keeps the tokenizer's own BOS.
    """
    if record.messages is None:
        return tokenizer(record.text)["input_ids"]
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(list(record.messages), tokenize=False)
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return tokenizer("\n\n".join(message["content"] for message in record.messages))["input_ids"]


def calibration_batches(tokenizer: Any, samples: int, tokens: int, seed: int) -> list[list[list[int]]]:
    """`samples` texts drawn by `seed` (all when there are fewer), each cut at `tokens` tokens, in batches.

    The rows of a batch have one length, without padding that calibration would measure: texts of similar length
    go together and are cut to the shortest of them. Few batches matter, because AWQ re-quantizes every weight
    for each of them.
    """
    records = read_records("calibration")
    drawn = random.Random(seed).sample(records, min(samples, len(records)))
    texts = sorted((token_ids(record, tokenizer)[:tokens] for record in drawn), key=len)
    texts = [ids for ids in texts if len(ids) >= _SHORTEST]
    batches = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
    return [[ids[: len(batch[0])] for ids in batch] for batch in batches]


def heldout_ids(tokenizer: Any) -> list[list[int]]:
    """Every held-out record's token ids, in the file's order."""
    return [
        ids for record in read_records("heldout") if len(ids := token_ids(record, tokenizer)) >= _SHORTEST
    ]
