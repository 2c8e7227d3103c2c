"""Token ids to text while they arrive: no broken characters, no lost spaces, nothing past a stop string.

`StreamingText` = a `Decoder` (ids → text, incremental) + stop strings. The pieces it releases, joined, equal
the one-shot decode of the same ids up to the stop. The decoders know the two families of vocabularies:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is some bytes of UTF-8;
- SentencePiece (Llama 2, Mistral, Gemma): a token is text with ▁ for space, or one byte `<0xNN>`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token: int) -> str:
        """The text that has become certain with this token; may be empty."""

    def finish(self) -> str:
        """What was held back: incomplete bytes come out as U+FFFD."""


class ByteLevelDecoder:
    """Tokens are bytes. piece: id → its bytes, empty for tokens that show no text.

    An incremental UTF-8 decoder with replacement puts one U+FFFD for each maximal invalid part, as the
    one-shot decode of all bytes does (Unicode's recommended practice, which Rust's and Python's decoders
    share).
    """

    __slots__ = ("_decode", "_piece")

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._piece(token))

    def finish(self) -> str:
        return self._decode(b"", final=True)


class SentencePieceDecoder:
    """Tokens are text, or single bytes for what the vocabulary lacks.

    piece: id → text, or a byte as an int, or "" for tokens that show none. strip: leading spaces of the whole
    text to drop (the one SentencePiece adds in front).

    A run of byte tokens decodes as a whole or, when it is not valid UTF-8, as one U+FFFD per byte; so it is
    held until it ends, as the one-shot decode has it.
    """

    __slots__ = ("_piece", "_run", "_strip")

    def __init__(self, piece: Callable[[int], str | int], strip: int = 0) -> None:
        self._piece = piece
        self._run = bytearray()
        self._strip = strip

    def push(self, token: int) -> str:
        piece = self._piece(token)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if not piece:
            return ""
        return self._stripped(self._end_run() + piece)

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDecoder:
    """Any other vocabulary, through its one-shot decode: the text a few tokens add to the few before them.

    decode: ids → text. Text is released once it no longer ends in U+FFFD, the sign of a character cut in two.
    """

    __slots__ = ("_decode", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens shown last, which set the context, then the new ones
        self._shown = 0

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        return "" if text.endswith("\ufffd") else self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._shown])) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return new


class StreamingText:
    """Text of one answer with stop strings.

    Feed ids one at a time. `stop` becomes the stop string whose match begins earliest once one is complete;
    from then on nothing more is released. Text is held back only while it may still be the beginning of a
    stop string.
    """

    __slots__ = ("_decoder", "_held", "_stops", "stop")

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """Text released by one more token; may be empty."""
        return self._release(self._decoder.push(token)) if self.stop is None else ""

    def finish(self) -> str:
        """Text still held back when the sequence ends. May still complete a stop string: look at `stop` after
        it.
        """
        if self.stop is not None:
            return ""
        text = self._release(self._decoder.finish())
        if self.stop is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            at, self.stop = min(matches, key=lambda match: match[0])
            self._held = ""
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        released = len(text) - held
        self._held = text[released:]
        return text[:released]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
