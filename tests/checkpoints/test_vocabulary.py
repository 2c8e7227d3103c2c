"""A draft must mean the same words by the same ids. Padding is no difference, and equal sizes are no proof."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpoints.conftest import LLAMA
from trtspec.checkpoints.facts import ArchitectureFacts, read_facts
from trtspec.checkpoints.vocabulary import check_draft_pair, read_vocabulary
from trtspec.errors import ConfigError

WORDS = ("<pad>", "<s>", "</s>", "ja", "nein", "doch")


def model(folder: Path, rows: int, words: Sequence[str] | None = WORDS, **keys: object) -> ArchitectureFacts:
    """A config.json of `rows` embedding rows, and a tokenizer of `words`."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": rows} | keys))
    if words is not None:
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        tokenizer.add_special_tokens(list(words[:3]))
        tokenizer.save(str(folder / "tokenizer.json"))
    return read_facts(folder)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(8, 16), (16, 8)])
def test_tables_padded_differently_are_a_pair(tmp_path: Path, target_rows: int, draft_rows: int) -> None:
    target, draft = model(tmp_path / "target", target_rows), model(tmp_path / "draft", draft_rows)
    found = check_draft_pair(target, draft)
    assert [finding.level for finding in found] == ["note"]
    assert "rows from 6 on are padding" in found[0].text


@pytest.mark.parametrize("other", [(*WORDS[:-1], "si"), (*WORDS[:3], "nein", "ja", "doch")])
def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path, other: Sequence[str]) -> None:
    """Nothing but its content tells it apart, and every draft would be nonsense."""
    target, draft = model(tmp_path / "target", 8), model(tmp_path / "draft", 8, other)
    for a, b in ((target, draft), (draft, target)):
        with pytest.raises(ConfigError, match="another one of the same size") as caught:
            check_draft_pair(a, b)
        assert caught.value.where == b.source


@pytest.mark.parametrize(("target_words", "draft_words"), [(6, 5), (5, 6)])
def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path, target_words: int, draft_words: int) -> None:
    target = model(tmp_path / "target", 8, WORDS[:target_words])
    draft = model(tmp_path / "draft", 8, WORDS[:draft_words])
    with pytest.raises(ConfigError, match=f"{draft_words} entries, the target's {target_words}"):
        check_draft_pair(target, draft)


def test_without_tokenizers_the_sizes_are_all_there_is(tmp_path: Path) -> None:
    target, draft = model(tmp_path / "target", 16, None), model(tmp_path / "draft", 8, None)
    assert read_vocabulary(tmp_path / "target") is None
    (finding,) = check_draft_pair(target, draft)
    assert finding.level == "warning"
    assert "do not prove" in finding.text


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    target, draft = model(tmp_path / "target", 8), model(tmp_path / "draft", 8, None)
    (tmp_path / "draft" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer") as caught:
        check_draft_pair(target, draft)
    assert caught.value.where == str(tmp_path / "draft" / "tokenizer.json")
