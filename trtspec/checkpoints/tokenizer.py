"""A model folder's tokenizer: text and chats to ids with exactly one BOS, ids back to text, and when to stop.

Built on `tokenizers` and a jinja2 sandbox, the two parts of transformers that are needed here: it opens in a
tenth of a second, where importing transformers takes several, and a server, a test or a command line opens it
every time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.checkpoints.chat_template import ChatTemplates
from trtspec.errors import SetupError
from trtspec.verify.text import (
    ByteLevelDecoder,
    Decoder,
    SentencePieceDecoder,
    StreamingText,
    WindowDecoder,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """See the module. vocab_size: one more than the largest id it can emit. bos_id: None where it has none.

    stop_ids: the model's own ends of text, from generation_config.json, else config.json, else the
    tokenizer's EOS. special_ids: control tokens (end of text, turn markers), which no text shows.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        config: Mapping[str, Any],
        templates: ChatTemplates,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._templates = templates
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), *(id + 1 for id in added), 0)
        self.special_tokens = {
            name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None
        }
        bos = self.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        eos = self.special_tokens.get("eos_token")
        self.stop_ids = tuple(stop_ids) or (() if eos is None else (backend.token_to_id(eos),))
        # an explicit setting replaces what the saved post-processor does, as in transformers
        explicit = config.get("add_bos_token")
        self._adds_bos = self.bos_id is not None and (
            self._processor_adds_bos() if explicit is None else bool(explicit)
        )

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Open the tokenizer of a model or engine folder. Raises SetupError when it has no usable one."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise SetupError(
                "the folder has no tokenizer.json",
                where=str(folder),
                hint="transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one",
            )
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as cause:  # the library raises bare Exception
            raise SetupError(f"not a tokenizer: {cause}", where=str(file)) from cause
        backend.no_truncation()  # saved settings of a training run: a prompt is never cut or padded silently
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(
            backend,
            config=config,
            templates=ChatTemplates.of_folder(folder, config.get("chat_template")),
            stop_ids=stop_token_ids(folder),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the tokenizer's own BOS once, if it adds one."""
        ids = self._backend.encode(text, add_special_tokens=True).ids
        written = self.bos_id is not None and text.startswith(self.special_tokens["bos_token"])
        if ids[:1] == [self.bos_id] and not self._adds_bos and not written:
            return ids[1:]
        return self._one_bos(ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """Ids of a conversation under the model's chat template, with exactly one BOS where the model has
        one.

        template_args go to the template (tools=…, enable_thinking=…). Raises ValueError when the model has no
        template or the template refuses the messages.
        """
        text = self._templates.render(
            messages, add_generation_prompt=add_generation_prompt, **self.special_tokens, **template_args
        )
        return self._one_bos(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens show nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, stops: Sequence[str] = ()) -> StreamingText:
        """Incremental `decode` for one answer, ending at the first of the stop strings."""
        return StreamingText(self._decoder(), stops)

    def _one_bos(self, ids: list[int]) -> list[int]:
        """The template may render BOS, the tokenizer may add it, and the model was trained with one."""
        if self.bos_id is None:
            return ids
        leading = next((index for index, id in enumerate(ids) if id != self.bos_id), len(ids))
        if leading == 0:
            return [self.bos_id, *ids] if self._adds_bos else ids
        return ids[leading - 1 :]

    def _processor_adds_bos(self) -> bool:
        return self._backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]

    # -- incremental decoding

    def _decoder(self) -> Decoder:
        kind, strip = self._decoding
        if kind == "bytes":
            return ByteLevelDecoder(self._bytes_of)
        if kind == "pieces":
            return SentencePieceDecoder(self._piece_of, strip)
        return WindowDecoder(self.decode)

    @cached_property
    def _decoding(self) -> tuple[str, int]:
        """Which of our decoders the file's `decoder` section amounts to, and the leading spaces it strips."""
        if self._backend.decoder is None:
            return "window", 0
        outer = json.loads(self._backend.decoder.__getstate__())
        steps = outer["decoders"] if outer["type"] == "Sequence" else [outer]
        kinds = [step["type"] for step in steps]
        if "ByteLevel" in kinds:
            return "bytes", 0
        strips = [step for step in steps if step["type"] == "Strip"]
        known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds
        fused = not strips or (kinds[-2:] == ["Fuse", "Strip"] and strips[0]["stop"] == 0)
        patterns = [step["pattern"] for step in steps if step["type"] == "Replace"]
        if not known or not fused or len(strips) > 1 or any("String" not in pattern for pattern in patterns):
            return "window", 0
        self._replace = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        return "pieces", strips[0]["start"] if strips else 0

    def _token(self, id: int) -> str | None:
        """The vocabulary's entry, None for ids that show no text."""
        return None if id in self.special_ids else self._backend.id_to_token(id)

    def _bytes_of(self, id: int) -> bytes:
        if (known := self._pieces.get(id)) is None:
            token = self._token(id) or ""
            try:
                known = bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token: plain text, not the byte alphabet
                known = token.encode()
            self._pieces[id] = known
        return known

    def _piece_of(self, id: int) -> str | int:
        if (known := self._pieces.get(id)) is None:
            token = self._token(id) or ""
            if byte := _BYTE_TOKEN.fullmatch(token):
                known = int(byte[1], 16)
            else:
                known = token
                for pattern, content in self._replace:
                    known = known.replace(pattern, content)
            self._pieces[id] = known
        return known

    @cached_property
    def _pieces(self) -> dict[int, Any]:
        return {}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_alphabet()


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else config.json's (one or a list in either); may be none."""
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()
