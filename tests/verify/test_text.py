"""Text while it streams: whole characters, kept spaces, nothing past a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.verify.text import ByteLevelDecoder, SentencePieceDecoder, StreamingText, WindowDecoder

VOCABULARY = ["▁Deep", "▁learning", "▁", "Ж", 0xF0, 0x9F, 0x98, 0x80, 0x41, ""]  # ints are single bytes


def sentencepiece(strip=1):
    return SentencePieceDecoder(
        lambda t: p if isinstance(p := VOCABULARY[t], int) else p.replace("▁", " "), strip
    )


def raw_bytes():
    return ByteLevelDecoder(lambda t: bytes([t]))


def stream(decoder, tokens, stops=()):
    text = StreamingText(decoder, stops)
    chunks = [text.push(t) for t in tokens]
    return [*chunks, text.finish()], text.stop


def test_spaces_between_words_survive_and_the_first_is_not_one():
    chunks, _ = stream(sentencepiece(), [0, 1])
    assert chunks == ["Deep", " learning", ""]


@pytest.mark.parametrize("strip", [0, 1])
def test_the_added_space_is_dropped_once_and_only_in_front(strip):
    chunks, _ = stream(sentencepiece(strip), [2, 2, 0, 2])
    assert "".join(chunks) == "   Deep "[strip:]


@pytest.mark.parametrize("decoder", [raw_bytes, sentencepiece], ids=["byte-level", "sentencepiece"])
def test_a_character_split_over_tokens_comes_out_whole(decoder):
    tokens = [0xF0, 0x9F, 0x98, 0x80] if decoder is raw_bytes else [4, 5, 6, 7]
    chunks, _ = stream(decoder(), tokens)
    assert "".join(chunks[:3]) == ""
    assert "".join(chunks) == "😀"


def test_bytes_cut_off_at_the_end_are_flushed_once():
    chunks, _ = stream(raw_bytes(), [*"Ж".encode(), 0xF0, 0x9F])
    assert chunks == ["", "Ж", "", "", "\ufffd"]
    text = StreamingText(raw_bytes())
    text.push(0xF0)
    assert (text.finish(), text.finish()) == ("\ufffd", "")


def test_hidden_tokens_do_not_break_a_character():
    chunks, _ = stream(sentencepiece(), [4, 5, 9, 6, 7])
    assert "".join(chunks) == "😀"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_stream_to_their_one_shot_decode(tokens):
    chunks, _ = stream(raw_bytes(), tokens)
    assert "".join(chunks) == bytes(tokens).decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 255) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xD0, 0x96]), max_size=40))
def test_the_window_decoder_streams_to_its_one_shot_decode_where_text_is_valid(tokens):
    whole = bytes(tokens)
    try:
        whole.decode()
    except UnicodeDecodeError:
        return
    chunks, _ = stream(WindowDecoder(lambda ids: bytes(ids).decode("utf-8", errors="replace")), tokens)
    assert "".join(chunks) == whole.decode()


# -- stop strings


PIECES = ["a", "b", "ab", "ba"]


def letters():
    return ByteLevelDecoder(lambda t: PIECES[t].encode())


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_the_earliest_match_ends_the_text_and_nothing_after_it_is_released(tokens, stops):
    seen, stopped = "", None
    for token in tokens:
        seen += PIECES[token]
        found = [(at, s) for s in stops if (at := seen.find(s)) >= 0]
        if found:
            at = min(at for at, _ in found)
            seen, stopped = seen[:at], {s for a, s in found if a == at}
            break
    chunks, stop = stream(letters(), tokens, stops)
    assert "".join(chunks) == seen
    assert stop is None if stopped is None else stop in stopped


@given(st.lists(st.integers(0, 3), max_size=30), st.text("ab", min_size=1, max_size=5))
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(tokens, stop):
    text, seen, released = StreamingText(letters(), [stop]), "", ""
    for token in tokens:
        seen += PIECES[token]
        released += text.push(token)
        if text.stop is not None:
            break
        held = seen[len(released) :]
        assert seen == released + held
        assert stop.startswith(held) and held != stop


def test_a_stop_string_is_found_in_text_and_not_in_tokens():
    # "[END]" as [5, 8, 9] alone, but as [7, 8, 9] in this text: no list of ids would match
    pieces = {5: b"[", 6: b"go", 7: b"go [", 8: b"EN", 9: b"D]"}
    chunks, stop = stream(ByteLevelDecoder(pieces.__getitem__), [6, 7, 8, 9, 6], ["[END]"])
    assert ("".join(chunks), stop) == ("gogo ", "[END]")


def test_two_stop_strings_of_different_length():
    chunks, stop = stream(letters(), [0, 1, 0, 0], ["baa", "b"])
    assert ("".join(chunks), stop) == ("a", "b")


def test_of_two_matches_in_one_token_the_earlier_one_ends_the_text():
    chunks, stop = stream(ByteLevelDecoder({0: b"x one two"}.__getitem__), [0], ["two", "one"])
    assert ("".join(chunks), stop) == ("x ", "one")


def test_a_match_that_begins_again_inside_a_failed_one_is_found():
    chunks, stop = stream(letters(), [0, 0, 0, 1], ["aab"])
    assert ("".join(chunks), stop) == ("a", "aab")


def test_a_stop_string_inside_one_token():
    chunks, stop = stream(ByteLevelDecoder({0: b"one\ntwo"}.__getitem__), [0], ["\n"])
    assert (chunks, stop) == (["one", ""], "\n")


def test_a_stop_string_completed_only_by_the_flush():
    # the byte run ends with the text, so its characters appear in `finish`
    text = StreamingText(sentencepiece(), ["A"])
    assert text.push(3) + text.push(8) == "Ж"
    assert (text.finish(), text.stop) == ("", "A")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StreamingText(letters(), ["a", ""])
