"""Do a draft model and its target speak the same tokens? Judged on the tokenizers themselves, entry for entry.

Equal sizes prove nothing: a draft whose ids mean other words proposes nonsense, which costs time at every step
and shows nowhere. Tables padded to different lengths are no difference: their spare rows mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.pairing import Finding, check_draft_model
from trtspec.errors import ConfigError

Vocabulary = Mapping[str, int]


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Token → id of a model or engine folder's tokenizer, added tokens included; None without tokenizer.json.

    Raises ConfigError for a file that is no tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as cause:  # the library raises bare Exception
        raise ConfigError(f"not a tokenizer: {cause}", where=str(file)) from cause


def check_draft_pair(target: ArchitectureFacts, draft: ArchitectureFacts) -> list[Finding]:
    """`check_draft_model` with the tokenizers that lie beside the two config files, where they are there.

    Raises ConfigError when they differ, in size or in what an id means.
    """
    ours, theirs = (read_vocabulary(Path(facts.source).parent) for facts in (target, draft))
    found = check_draft_model(
        target,
        draft,
        target_tokens=None if ours is None else len(ours),
        draft_tokens=None if theirs is None else len(theirs),
    )
    if ours is not None and theirs is not None and ours != theirs:
        token = min(ours.items() - theirs.items(), key=lambda entry: entry[1])[0]
        other = f"id {theirs[token]}" if token in theirs else "unknown"
        raise ConfigError(
            f"the draft's tokenizer is another one of the same size: {token!r} is id {ours[token]} for the "
            f"target and {other} for the draft",
            where=draft.source,
            hint="a draft model must share the target's tokenizer",
        )
    return found
