"""The datastore against brute force: every suffix in order, every occurrence found, nothing across documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtspec.drafters.datastore import SORTED_TOKENS, Datastore, check_vocabulary, end_of
from trtspec.drafters.datastore_build import (
    build_datastore,
    corpus_files,
    datastore_identity,
    provide_datastore,
    suffix_array,
)
from trtspec.errors import ConfigError, SetupError

END = end_of(np.uint16)
texts = st.lists(st.lists(st.sampled_from([0, 1, 2, 60_000]), max_size=90), min_size=1, max_size=4)


def tokens_of(documents):
    return np.array([token for document in documents for token in (*document, END)], np.uint16)


def made(documents):
    tokens = tokens_of(documents)
    return Datastore(tokens, suffix_array(tokens), b"")


def byte_tokenizer(first: int = 0) -> Tokenizer:
    """A token for each byte and two special ones; `first` shifts the ids."""
    alphabet = ["<s>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: first + i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    return tokenizer


def model_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@given(texts)
def test_suffixes_are_ordered_by_64_tokens_then_by_position(documents):
    tokens = tokens_of(documents).tolist()
    expected = sorted(range(len(tokens)), key=lambda p: (tokens[p : p + SORTED_TOKENS], p))
    assert suffix_array(np.array(tokens, np.uint16)).tolist() == expected


def test_a_large_vocabulary_and_long_repeats_are_sorted_too():
    rng = np.random.default_rng(3)
    block = rng.integers(0, 200_000, 100)
    tokens = np.concatenate([block, block, block[:70], [end_of(np.uint32)]]).astype(np.uint32)
    listed = tokens.tolist()
    expected = sorted(range(len(listed)), key=lambda p: (listed[p : p + SORTED_TOKENS], p))
    assert suffix_array(tokens).tolist() == expected


@given(texts, st.lists(st.sampled_from([0, 1, 2, 7, 60_000]), min_size=1, max_size=8), st.integers(1, 3))
def test_the_longest_suffix_and_all_its_occurrences_are_found(documents, context, shortest):
    datastore, tokens = made(documents), tokens_of(documents).tolist()

    def occurrences(pattern):
        return [p for p in range(len(tokens)) if tokens[p : p + len(pattern)] == pattern]

    lengths = [n for n in range(shortest, len(context) + 1) if occurrences(context[-n:])]
    length, found = datastore.longest_suffix(context, shortest)
    assert length == max(lengths, default=0)
    positions = datastore.positions(found, most=10_000)
    assert sorted(positions.tolist()) == (occurrences(context[-length:]) if length else [])


def test_a_sample_of_many_occurrences_keeps_their_proportions():
    datastore = made([[1, 2, 3]] * 600 + [[1, 2, 4]] * 300)
    _, found = datastore.longest_suffix([1, 2])
    positions = datastore.positions(found, most=90)
    following = datastore.tokens[positions + 2].tolist()
    assert (following.count(3), following.count(4)) == (60, 30)


def test_what_is_written_is_the_text_and_is_mapped_not_read(tmp_path: Path):
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    (corpus / "a.txt").write_text("twice <|end|> said, twice é", encoding="utf-8")
    (corpus / "b" / "c.py").write_text("x = 1\n")
    (corpus / "b" / "picture").write_bytes(b"\x89PNG\xff\xfe")
    (corpus / "b" / "nul").write_bytes(b"text\0")
    out, tokenizer = tmp_path / "made" / "store", byte_tokenizer()
    report = build_datastore(corpus_files(str(corpus)), tokenizer, out)
    datastore = Datastore.open(out)
    assert (report.documents, report.skipped, report.tokens) == (2, 2, len(datastore))
    assert report.bytes == out.stat().st_size
    assert isinstance(datastore.tokens.base, np.memmap) and not datastore.tokens.flags.writeable
    documents = np.split(datastore.tokens, np.flatnonzero(datastore.tokens == datastore.end) + 1)[:-1]
    texts = [tokenizer.decode(document[:-1].tolist(), skip_special_tokens=True) for document in documents]
    # text that looks like a special token is text: decoding without special tokens still shows it
    assert texts == ["twice <|end|> said, twice é", "x = 1\n"]
    listed = datastore.tokens.tolist()
    assert datastore.suffixes.tolist() == sorted(range(len(listed)), key=lambda p: listed[p:])
    again = build_datastore(corpus_files(str(corpus)), tokenizer, tmp_path / "again")
    assert again.file.read_bytes() == out.read_bytes()


def test_the_standard_library_is_a_corpus_without_tests_and_packages():
    files = corpus_files("stdlib")
    assert {"argparse.py", "heapq.py"} <= {file.name for file in files}
    assert not [file for file in files if {"test", "site-packages"} & set(file.parts) or file.suffix != ".py"]


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("some text")
    ours, others = byte_tokenizer(), byte_tokenizer(first=1)
    file = build_datastore([text], ours, tmp_path / "store").file
    check_vocabulary(Datastore.open(file), file, model_folder(tmp_path / "ours", ours))
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_vocabulary(Datastore.open(file), file, model_folder(tmp_path / "others", others))


def test_what_is_no_datastore_is_refused_with_the_way_to_make_one(tmp_path: Path):
    with pytest.raises(SetupError, match="no datastore") as missing:
        Datastore.open(tmp_path / "store")
    assert "trtspec datastore" in missing.value.hint
    text = tmp_path / "text"
    text.write_text("some text")
    whole = build_datastore([text], byte_tokenizer(), tmp_path / "store").file
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-3])
    for broken in (text, cut):
        with pytest.raises(ConfigError):
            Datastore.open(broken)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"])
def test_a_corpus_without_text_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match="0 tokens"):
        build_datastore(corpus_files(str(tmp_path)), byte_tokenizer(), tmp_path / "store")
    with pytest.raises(ConfigError, match="no files"):
        corpus_files(str(tmp_path / "nothing"))
    assert not (tmp_path / "store").exists()


def test_a_build_gets_a_copy_and_a_key_that_follows_the_content(tmp_path: Path):
    text, tokenizer = tmp_path / "text", byte_tokenizer()
    text.write_text("some text")
    file = build_datastore([text], tokenizer, tmp_path / "store").file
    before = datastore_identity(str(file))
    into = tmp_path / "into"
    into.mkdir()
    provide_datastore(str(file), model_folder(tmp_path / "model", tokenizer), into)
    (copy,) = into.iterdir()
    assert copy.read_bytes() == file.read_bytes() and not copy.samefile(file)
    text.write_text("other text")
    build_datastore([text], tokenizer, file)
    assert datastore_identity(str(file)) != before
    assert datastore_identity("stdlib") == datastore_identity("stdlib")
