"""Calibration and held-out text: disjoint, seeded, and with exactly one BOS."""

from __future__ import annotations

import collections

import pytest

from tests.quantize.tiny_llama import byte_tokenizer
from trtspec.quantize.corpora import Record, calibration_batches, heldout_ids, read_records, token_ids

BOS, EOS = 0, 1


@pytest.fixture(scope="module", params=[False, True], ids=["plain tokenizer", "tokenizer adds BOS"])
def tokenizer(request, tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder, add_bos=request.param)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _text(record: Record) -> str:
    return record.text or "\n".join(message["content"] for message in record.messages)


def test_no_passage_of_the_heldout_text_is_in_the_calibration_text():
    calibration = " ".join(_text(record) for record in read_records("calibration")).split()
    windows = {tuple(calibration[i : i + 8]) for i in range(len(calibration) - 7)}
    for record in read_records("heldout"):
        words = _text(record).split()
        shared = [words[i : i + 8] for i in range(len(words) - 7) if tuple(words[i : i + 8]) in windows]
        assert not shared


@pytest.mark.parametrize(("name", "least", "kinds"), [("calibration", 200, 6), ("heldout", 15, 8)])
def test_the_texts_are_many_and_of_several_kinds(name, least, kinds):
    records = read_records(name)
    assert len(records) >= least
    assert len(collections.Counter(record.kind for record in records)) >= kinds
    assert len({_text(record) for record in records}) == len(records)
    assert all((record.text is None) != (record.messages is None) for record in records)


def test_chat_text_begins_with_one_bos_though_template_and_tokenizer_both_would_add_it(tokenizer):
    chat = Record("dialogue", messages=({"role": "user", "content": "test"},))
    ids = token_ids(chat, tokenizer)
    assert ids[0] == BOS and ids.count(BOS) == 1 and ids.count(EOS) == 1


def test_every_calibration_and_heldout_text_has_at_most_one_bos(tokenizer):
    calibration = _texts(calibration_batches(tokenizer, 10_000, 100_000, 0))
    for ids in [*calibration, *heldout_ids(tokenizer)]:
        assert ids.count(BOS) <= 1 and BOS not in ids[1:]


def test_plain_text_keeps_the_tokenizers_own_bos(tokenizer):
    adds = tokenizer("x")["input_ids"][0] == BOS
    assert (token_ids(Record("prose", text="A plain text."), tokenizer)[0] == BOS) == adds


def _texts(batches: list[list[list[int]]]) -> list[list[int]]:
    return [ids for batch in batches for ids in batch]


def test_the_seed_decides_the_calibration_texts(tokenizer):
    first = calibration_batches(tokenizer, 20, 64, seed=3)
    assert first == calibration_batches(tokenizer, 20, 64, seed=3)
    assert first != calibration_batches(tokenizer, 20, 64, seed=4)
    assert len(_texts(first)) == 20 and max(map(len, _texts(first))) <= 64


def test_the_rows_of_a_batch_have_one_length_so_that_nothing_is_padded(tokenizer):
    batches = calibration_batches(tokenizer, 50, 4096, seed=0)
    assert all(len({len(ids) for ids in batch}) == 1 for batch in batches)
    whole = sum(map(len, _texts(calibration_batches(tokenizer, 10**6, 4096, seed=0))))
    longest = sum(len(token_ids(record, tokenizer)) for record in read_records("calibration"))
    assert whole > 0.95 * longest  # little is cut away for it


def test_asking_for_more_texts_than_there_are_gives_all(tokenizer):
    found = calibration_batches(tokenizer, 10**6, 64, seed=0)
    assert len(_texts(found)) == len(read_records("calibration"))
