"""Making a datastore: corpus → documents → token ids → suffix array → one file.

Takes about 60 bytes of memory for each token of the corpus.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtspec.drafters.datastore import (
    FILE,
    SORTED_TOKENS,
    Datastore,
    check_vocabulary,
    end_of,
    open_tokenizer,
    vocabulary_digest,
)
from trtspec.errors import ConfigError, SetupError
from trtspec.events import Emit, Note, Progress, silent
from trtspec.files import setup_error, sha256_file, sha256_json, sync

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STAGE = "datastore"
STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_MOST_TOKENS = 2**32 - 1  # positions are 32 bits
_BATCH = 64  # documents tokenized at a time


@dataclass(frozen=True, slots=True)
class DatastoreReport:
    """file: what was written, `bytes` long. documents, tokens: in it. skipped: files that are not UTF-8 text."""

    file: Path
    documents: int
    tokens: int
    bytes: int
    skipped: int


def corpus_files(corpus: str) -> list[Path]:
    """The files of a corpus, ordered: one file, all below a folder, or with "stdlib" the .py files of the running
    Python's standard library without its tests. Raises ConfigError where there are none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if corpus == STDLIB else Path(corpus).expanduser()
    if root.is_file():
        return [root]
    files = []
    for place, folders, names in os.walk(root):
        if corpus == STDLIB:
            folders[:] = [name for name in folders if name not in _NOT_STDLIB]
            names = [name for name in names if name.endswith(".py")]
        files += [file for name in names if (file := Path(place, name)).is_file()]
    if not files:
        raise ConfigError(
            "the corpus holds no files", where=str(root), hint=f"name a file, a folder, or {STDLIB!r}"
        )
    return sorted(files)


def build_datastore(
    files: Sequence[Path], tokenizer: Tokenizer, out: Path, emit: Emit = silent
) -> DatastoreReport:
    """Write the datastore of some files to `out`, replacing it in one step.

    tokenizer: the target's; text that looks like a special token is tokenized as text. Files that are not UTF-8
    text are skipped. Raises ConfigError where no text is left or there is too much, SetupError where a file cannot
    be read or `out` not written.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab()
    ids = max(vocabulary.values()) + 1
    dtype = np.dtype(np.uint16 if ids <= end_of(np.uint16) else np.uint32)
    pieces: list[npt.NDArray] = []
    total = skipped = 0
    for start in range(0, len(files), _BATCH):
        texts = [text for file in files[start : start + _BATCH] if (text := _text(file))]
        skipped += len(files[start : start + _BATCH]) - len(texts)
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, end_of(dtype)], dtype))
            total += len(pieces[-1])
        emit(Progress(STAGE, "tokenize", min(start + _BATCH, len(files)), len(files), "file"))
    if not pieces or total > _MOST_TOKENS:
        raise ConfigError(
            f"{total} tokens of text in {len(files)} files; a datastore holds 1 to {_MOST_TOKENS}",
            hint="name a corpus of UTF-8 text, in parts where it is too large",
        )
    tokens = np.concatenate(pieces)
    emit(Progress(STAGE, "sort suffixes", 0, 1, "array"))
    suffixes = suffix_array(tokens)
    emit(Progress(STAGE, "sort suffixes", 1, 1, "array"))
    if skipped:
        emit(Note(STAGE, f"{skipped} of {len(files)} files are empty or not UTF-8 text and were left out"))
    write_datastore(Datastore(tokens, suffixes, vocabulary_digest(vocabulary)), out)
    return DatastoreReport(out, len(pieces), len(tokens), out.stat().st_size, skipped)


def datastore_identity(datastore: str) -> str:
    """Hex digest of the text that a config's `datastore` names. Raises SetupError or ConfigError where it is none."""
    if datastore == STDLIB:
        return sha256_json([sha256_file(file) for file in corpus_files(STDLIB)])
    Datastore.open(Path(datastore))
    return sha256_file(Path(datastore))


def provide_datastore(datastore: str, model: Path, into: Path, emit: Emit = silent) -> None:
    """Put what a config's `datastore` names into the folder `into`: made now, or a copy of the user's file.

    Raises ConfigError for a file made with another tokenizer than that of the folder `model`.
    """
    if datastore == STDLIB:
        build_datastore(corpus_files(STDLIB), open_tokenizer(model), into / FILE, emit)
        return
    file = Path(datastore)
    check_vocabulary(Datastore.open(file), file, model)
    shutil.copyfile(file, into / FILE)


def suffix_array(tokens: npt.NDArray) -> npt.NDArray[np.uint32]:
    """Positions ordered by the next SORTED_TOKENS tokens or more, equal ones by position.

    Prefix doubling (Manber and Myers 1993): ranks by the first w tokens, paired with those w positions on, are keys
    for 2w tokens. The first keys are as many tokens as 64 bits hold, so that five sorts reach 64 tokens in a
    vocabulary of 2^16. O(n log n).
    """
    _, dense = np.unique(tokens, return_inverse=True)
    rank, width = dense.astype(np.uint64) + 1, 1  # 0 is past the end: what ends earlier comes first
    while (bits := int(rank.max()).bit_length()) <= 32 and width < SORTED_TOKENS:
        rank, width = _paired(rank, width, bits), 2 * width
    while True:
        order = np.argsort(rank, kind="stable")
        ordered = rank[order]
        starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        if width >= SORTED_TOKENS or starts.all():
            return order.astype(np.uint32)
        rank[order] = np.cumsum(starts)
        rank, width = _paired(rank, width, 32), 2 * width


def write_datastore(datastore: Datastore, out: Path) -> None:
    """Write a datastore file in one step. Raises SetupError where it cannot be written."""
    from safetensors.numpy import save_file

    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    arrays = {
        "tokens": datastore.tokens,
        "suffixes": datastore.suffixes,
        "tokenizer": np.frombuffer(datastore.tokenizer, np.uint8),
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, partial)
        sync(partial)
        os.replace(partial, out)
    except OSError as error:
        raise setup_error(error, out.parent) or SetupError(
            str(error), where=str(out), hint="name a file that you may write"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _paired(rank: npt.NDArray[np.uint64], width: int, bits: int) -> npt.NDArray[np.uint64]:
    """Keys of twice as many tokens: each rank, of at most `bits` bits, before the one `width` positions on."""
    following = np.zeros_like(rank)
    following[:-width] = rank[width:]
    return (rank << np.uint64(bits)) | following


def _text(file: Path) -> str:
    """The file's text, empty where it is not UTF-8 or holds NUL characters, as binary files do."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise SetupError(f"cannot read a file of the corpus: {error.strerror}", where=str(file)) from error
    return "" if "\0" in text else text
