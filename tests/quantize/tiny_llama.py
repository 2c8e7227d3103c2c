"""A tiny Llama folder with a byte-level tokenizer: real files, seconds instead of minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
)


def byte_tokenizer(folder: Path, *, add_bos: bool = False) -> None:
    """A tokenizer of one token per byte, with bos/eos and a chat template that writes the BOS itself."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1} | {char: index + 2 for index, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_model(
    folder: Path,
    *,
    tied: bool = True,
    hidden: int = 64,
    intermediate: int = 128,
    vocab: int = 258,
    edit: Callable | None = None,
    **config: object,
) -> Path:
    """A random Llama in bfloat16; `edit(model)` may change it before it is saved."""
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            vocab_size=vocab,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.1,
            **config,
        )
    ).to(torch.bfloat16)
    if edit:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(folder)
    byte_tokenizer(folder)
    (folder / "LICENSE").write_text("Apache License\nVersion 2.0\n")
    return folder
