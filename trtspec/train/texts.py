"""Token sequences that the target wrote, and the file they are collected in."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_RECORD = struct.Struct("<IIII?")  # number, start, tokens, checksum of the tokens, ended by itself


@dataclass(frozen=True, slots=True)
class Text:
    """One response. tokens: uint32 [n], prompt and response. start: index of the response's first token.

    kind: of the prompt (coding, writing, …), by which acceptance is reported.
    """

    tokens: npt.NDArray[np.uint32]
    start: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """What the target wrote after prompt `number`. ended: a stop token ended it (and is the last), no limit did."""

    number: int
    tokens: npt.NDArray[np.uint32]
    start: int
    ended: bool

    @property
    def response(self) -> npt.NDArray[np.uint32]:
        """The tokens after the prompt."""
        return self.tokens[self.start :]


class TextLog:
    """Responses in one file, four bytes a token, each there from the moment it is finished.

    What a kill left half written is cut off when the file is opened again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.found: dict[int, Written] = {}
        size = 0
        if file.is_file():
            for written, end in _records(file.read_bytes()):
                self.found[written.number] = written
                size = end
        self._handle = file.open("ab")
        self._handle.truncate(size)

    def add(self, written: Written) -> None:
        """Append one, and hand it to the operating system at once."""
        payload = written.tokens.astype("<u4").tobytes()
        head = (written.number, written.start, len(written.tokens), zlib.crc32(payload), written.ended)
        self._handle.write(_RECORD.pack(*head) + payload)
        self._handle.flush()
        self.found[written.number] = written

    def close(self) -> None:
        """Close the file; calling it twice is harmless."""
        self._handle.close()


def read_log(file: Path) -> list[Written]:
    """What a TextLog has written to `file` so far."""
    return [written for written, _ in _records(file.read_bytes())]


def _records(data: bytes) -> Iterator[tuple[Written, int]]:
    """Each whole record and where it ends, up to the first that is not whole."""
    place = 0
    while place + _RECORD.size <= len(data):
        number, start, count, checksum, ended = _RECORD.unpack_from(data, place)
        end = place + _RECORD.size + 4 * count
        payload = data[place + _RECORD.size : end]
        if end > len(data) or zlib.crc32(payload) != checksum:
            return
        yield Written(number, np.frombuffer(payload, "<u4"), start, ended), end
        place = end


def write_texts(texts: Sequence[Text], file: Path) -> None:
    """Store texts as one array of tokens and where each begins."""
    np.savez(
        file,
        tokens=np.concatenate([text.tokens for text in texts]).astype(np.uint32),
        lengths=np.array([len(text.tokens) for text in texts], np.int64),
        starts=np.array([text.start for text in texts], np.int64),
        kinds=np.array([text.kind for text in texts]),
    )


def read_texts(file: Path) -> list[Text]:
    """What `write_texts` stored."""
    with np.load(file, allow_pickle=False) as stored:
        parts = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
        return [Text(*each) for each in zip(parts, stored["starts"].tolist(), stored["kinds"].tolist())]
