"""What every writer of a Hugging Face model folder needs."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

SOURCE_RECORD = (
    "trtspec_source.json"  # where a converted folder came from, with the hash of each of its files
)

# Files without weights that a model is served with; each is optional.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "LICENSE",
)  # fmt: skip


def patch_json(path: Path, **changes: object) -> None:
    """Rewrite a JSON object with `changes`; None removes a key, and nulls go (strict parsers trip over them)."""
    merged = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in merged.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers and ModelOpt without their own progress bars and reports: ours are the only ones shown."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    modelopt = logging.getLogger("modelopt")
    modelopt_level = modelopt.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    modelopt.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        modelopt.setLevel(modelopt_level)
        if bars:
            transformers_logging.enable_progress_bar()
