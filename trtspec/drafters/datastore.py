"""Text to draft from, as token ids with their suffix array, memory-mapped (REST, 2311.08252, section 3.1).

    tokens     uint16 or uint32 [n]: the documents one after another, END after each
    suffixes   uint32 [n]: every position of `tokens`, ordered by the tokens from there on
    tokenizer  uint8 [32]: digest of the vocabulary the ids are of

END is the largest value of the tokens' dtype and no token: no match and no continuation crosses documents. All
occurrences of a pattern are neighbours in `suffixes`, so two binary searches find them, in O(m log n) for a pattern
of m tokens, whatever the size of the text. The file is a safetensors file; see datastore_build.py for its making.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.safetensors_header import TensorInfo, read_header
from trtspec.errors import ConfigError, SetupError
from trtspec.files import canonical_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Suffixes are ordered by this many tokens, and by position among equals: patterns up to this long are found exactly.
SORTED_TOKENS = 64
FILE = "datastore.safetensors"  # its name inside an engine folder
_DTYPES = {"U8": np.dtype("u1"), "U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
_ARRAYS = {"tokens": ("U16", "U32"), "suffixes": ("U32",), "tokenizer": ("U8",)}


class Datastore:
    """See the module. Use `Datastore.open`. end: the value END of these tokens."""

    __slots__ = ("end", "suffixes", "tokenizer", "tokens")

    def __init__(self, tokens: npt.NDArray, suffixes: npt.NDArray, tokenizer: bytes) -> None:
        self.tokens = tokens
        self.suffixes = suffixes
        self.tokenizer = tokenizer
        self.end = end_of(tokens.dtype)

    @classmethod
    def open(cls, file: Path) -> Datastore:
        """Map a datastore file; nothing but its header is read. Raises SetupError where there is none, ConfigError
        where it is something else or cut off.
        """
        if not file.is_file():
            raise SetupError(
                "there is no datastore",
                where=str(file),
                hint=f"make one: trtspec datastore stdlib --model MODEL --out {file}",
            )
        arrays = read_header(file)
        wrong = [
            name for name, dtypes in _ARRAYS.items() if name not in arrays or arrays[name].dtype not in dtypes
        ]
        if wrong or not 0 < arrays["tokens"].elements == arrays["suffixes"].elements:
            raise ConfigError(
                "not a datastore of trtspec", where=str(file), hint="`trtspec datastore` makes one"
            )
        return cls(
            _mapped(arrays["tokens"]), _mapped(arrays["suffixes"]), _mapped(arrays["tokenizer"]).tobytes()
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def occurrences(self, pattern: Sequence[int]) -> range:
        """Indices of `suffixes` whose text begins with `pattern`, of 1 to SORTED_TOKENS tokens."""
        pattern, length = list(pattern), len(pattern)

        def beginning(position: int) -> list[int]:
            return self.tokens[position : int(position) + length].tolist()

        first = bisect_left(self.suffixes, pattern, key=beginning)
        return range(first, bisect_right(self.suffixes, pattern, lo=first, key=beginning))

    def longest_suffix(self, context: Sequence[int], shortest: int = 1) -> tuple[int, range]:
        """Length of the longest suffix of `context` that occurs, and its `occurrences`; (0, empty) where none of at
        least `shortest` tokens does. A suffix of one that occurs occurs too, so the length is bisected.
        """
        length, found = 0, range(0)
        low, high = shortest, min(len(context), SORTED_TOKENS)
        while low <= high:
            middle = (low + high) // 2
            if here := self.occurrences(context[len(context) - middle :]):
                length, found, low = middle, here, middle + 1
            else:
                high = middle - 1
        return length, found

    def positions(self, occurrences: range, most: int) -> npt.NDArray[np.int64]:
        """Positions of at most `most` of them, evenly spaced: in their order, which is that of what follows, every
        continuation keeps its share.
        """
        stride = -(-len(occurrences) // most) or 1
        return self.suffixes[occurrences.start : occurrences.stop : stride].astype(np.int64)


def end_of(dtype: npt.DTypeLike) -> int:
    """END of tokens of this dtype."""
    return int(np.iinfo(dtype).max)


def vocabulary_digest(vocabulary: Mapping[str, int]) -> bytes:
    """SHA-256 of a tokenizer's entries: equal for tokenizers that give ids the same meaning, however they are saved."""
    return hashlib.sha256(canonical_json(vocabulary).encode()).digest()


def open_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises SetupError where it has none."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise SetupError("the model has no tokenizer.json", where=str(model))
    try:
        return Tokenizer.from_file(str(file))
    except Exception as cause:  # the library raises bare Exception
        raise SetupError(f"not a tokenizer: {cause}", where=str(file)) from cause


def check_vocabulary(datastore: Datastore, file: Path, model: Path) -> None:
    """Raise ConfigError unless the datastore's ids are those of the tokenizer in the folder `model`."""
    if datastore.tokenizer != vocabulary_digest(open_tokenizer(model).get_vocab()):
        raise ConfigError(
            "the datastore was made with another tokenizer: its ids mean other text to this target",
            where=str(file),
            hint="make it again with the target: trtspec datastore CORPUS --model TARGET --out FILE",
        )


def _mapped(info: TensorInfo) -> npt.NDArray:
    """One array of the file, read-only. A plain view: slicing np.memmap itself costs ten times as much."""
    mapped = np.memmap(info.file, _DTYPES[info.dtype], "r", info.offset, info.shape)
    return mapped.view(np.ndarray)
