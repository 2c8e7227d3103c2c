"""Does a draft fit its target? Vocabulary, widths, RoPE, context, captured layers: from facts alone.

`check_head` and `check_draft_model` refuse what cannot work (ConfigError) and return what a reader should know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.heads import HeadFacts
from trtspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """level "warning" asks for attention, "note" only informs."""

    level: Literal["warning", "note"]
    text: str


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """Target layers whose output a head reads.

    zero_based: 0-based layers whose output is taken, TensorRT-LLM's `eagle3_layers_to_capture`. boundaries: blocks
    done before the state is taken (0 is the embedding), as EAGLE-3 configs and vLLM count. convention: how the
    file's own ids were read; "default" where it names none.
    """

    zero_based: tuple[int, ...]
    boundaries: tuple[int, ...]
    convention: Literal["boundary", "zero_based", "default"]

    def describe(self) -> str:
        """One line with both numberings."""
        spelled = {
            "boundary": "read as blocks done",
            "zero_based": "read as 0-based layers",
            "default": "not stated, the default",
        }
        return (
            f"captured layers {spelled[self.convention]}: after blocks {list(self.boundaries)}, "
            f"eagle3_layers_to_capture {list(self.zero_based)}"
        )


def captured_layers(ids: Sequence[int] | None, layers: int, method: str = "eagle3") -> CapturedLayers:
    """Resolve captured layer ids on a target of `layers` layers.

    EAGLE-3's ids count finished blocks; ids equal to the training frameworks' 0-based default {1, L//2 − 1, L − 4}
    are read as such. DFlash and DSpark ids are 0-based. None gives the default 2, L//2, L − 3 (in blocks).
    Raises ConfigError for an id past the model.
    """
    if ids is None:
        boundaries: tuple[int, ...] = (2, layers // 2, layers - 3)
        return CapturedLayers(tuple(b - 1 for b in boundaries), boundaries, "default")
    zero_based = method in ("dflash", "dspark", "domino") or tuple(ids) == (1, layers // 2 - 1, layers - 4)
    largest = layers - 1 if zero_based else layers
    if max(ids) > largest:
        raise ConfigError(
            f"captured layer {max(ids)} does not exist: the target has {layers} layers ({max(ids)} > {largest})",
            hint="the head was trained for another target, or its ids are numbered another way",
        )
    if zero_based:
        return CapturedLayers(tuple(ids), tuple(i + 1 for i in ids), "zero_based")
    if min(ids) == 0:
        raise ConfigError(
            "captured layer 0 is the embedding, no layer's output", hint="ids count finished blocks from 1"
        )
    return CapturedLayers(tuple(i - 1 for i in ids), tuple(ids), "boundary")


def check_head(target: ArchitectureFacts, head: HeadFacts) -> tuple[list[Finding], CapturedLayers | None]:
    """Findings of a head against its target. Raises ConfigError where the pair cannot work."""
    found: list[Finding] = []
    captured = None
    _check_vocab(target, head, found)
    _check_ids(target, head, found)
    if head.method in ("eagle3", "p_eagle", "dflash", "dspark") and target.layers:
        captured = captured_layers(head.captured, target.layers, head.method)
        found.append(Finding("note", captured.describe()))
        recurrent = [
            i
            for i in captured.zero_based
            if i < len(target.layer_kinds) and target.layer_kinds[i] == "linear"
        ]
        if recurrent:
            found.append(
                Finding(
                    "warning",
                    f"captured layers {recurrent} are recurrent layers of this target: check the runtime's support",
                )
            )
        if head.target_layers is not None and head.target_layers != target.layers:
            raise ConfigError(
                f"the head was made for a target of {head.target_layers} layers, this one has {target.layers}",
                where=head.source,
            )
    _check_widths(target, head, captured)
    if head.decoder is not None and head.method not in ("medusa", "hydra"):
        _check_positions(target, head, found)
    found.append(
        Finding(
            "note",
            f"target weights {_dtype(target)}, head weights "
            f"{head.quantization.algorithm or head.dtype or 'not stated'}",
        )
    )
    return found, captured


def check_draft_model(
    target: ArchitectureFacts,
    draft: ArchitectureFacts,
    *,
    target_tokens: int | None = None,
    draft_tokens: int | None = None,
) -> list[Finding]:
    """Findings of a draft model. target_tokens, draft_tokens: entries of the two tokenizers, where they were read.

    Embedding tables may differ by padding alone: rows past the tokenizer are never proposed or emitted. Raises
    ConfigError for tokenizers of different sizes.
    """
    found: list[Finding] = []
    if target_tokens is not None and draft_tokens is not None and target_tokens != draft_tokens:
        raise ConfigError(
            f"the draft's tokenizer has {draft_tokens} entries, the target's {target_tokens}: they are "
            "different tokenizers",
            where=draft.source,
            hint="a draft model must share the target's tokenizer",
        )
    if target.vocab_size and draft.vocab_size and target.vocab_size != draft.vocab_size:
        tokens = target_tokens or draft_tokens
        limit = tokens if tokens is not None else min(target.vocab_size, draft.vocab_size)
        proof = (
            "" if tokens is not None else " (if the tokenizers agree, which their sizes alone do not prove)"
        )
        found.append(
            Finding(
                "note" if tokens is not None else "warning",
                f"padded vocabularies differ: target {target.vocab_size} rows, draft {draft.vocab_size}; rows "
                f"from {limit} on "
                f"are padding, never proposed or emitted{proof}",
            )
        )
    if (
        target.max_position_embeddings
        and draft.max_position_embeddings
        and draft.max_position_embeddings < target.max_position_embeddings
    ):
        found.append(
            _shorter_context(draft.max_position_embeddings, target.max_position_embeddings, "draft model")
        )
    return found


def last_draft_length(position: int, limit: int, draft_length: int) -> int:
    """Drafts that may follow a sequence of `position` tokens so that no draft position reaches `limit`.

    A head limited to 8 positions after a prompt of 6 drafts positions 6 and 7: two tokens.
    """
    return max(0, min(draft_length, limit - position))


def _check_vocab(target: ArchitectureFacts, head: HeadFacts, found: list[Finding]) -> None:
    if not target.vocab_size or not head.vocab_size or target.vocab_size == head.vocab_size:
        return
    if head.draft_vocab_size and head.draft_vocab_size != head.vocab_size:
        limit = min(target.vocab_size, head.vocab_size)
        found.append(
            Finding(
                "warning",
                f"head vocabulary {head.vocab_size}, target {target.vocab_size}: ids from {limit} on are "
                "never proposed",
            )
        )
        return
    found.append(
        Finding(
            "warning",
            f"padded vocabularies differ: target {target.vocab_size}, head {head.vocab_size}; rows past the "
            "tokenizer are never proposed",
        )
    )


def _check_ids(target: ArchitectureFacts, head: HeadFacts, found: list[Finding]) -> None:
    declared = {*head.declared_bos, *head.declared_eos}
    foreign = sorted(i for i in declared if head.vocab_size and i >= head.vocab_size)
    differs = (
        head.declared_eos and target.eos_token_ids and not set(head.declared_eos) <= set(target.eos_token_ids)
    )
    if foreign:
        found.append(
            Finding(
                "warning",
                f"the head's config names token ids {foreign} outside its own vocabulary of "
                f"{head.vocab_size}: ignored, stop ids come from the target",
            )
        )
    elif differs:
        found.append(
            Finding(
                "warning",
                f"the head's config names stop ids {list(head.declared_eos)}, the target "
                f"{list(target.eos_token_ids)}: the target's are used",
            )
        )


def _check_widths(target: ArchitectureFacts, head: HeadFacts, captured: CapturedLayers | None) -> None:
    """The fusing layer takes every captured state at the target's width; a shared table must have the head's."""
    if target.hidden_size is None or head.hidden_size is None:
        return
    if captured is not None and head.fused_width is not None and head.method in ("eagle3", "p_eagle"):
        expected = len(captured.boundaries) * target.hidden_size
        if head.fused_width != expected:
            raise ConfigError(
                f"fc takes {head.fused_width} inputs, {len(captured.boundaries)} captured layers of width "
                f"{target.hidden_size} give {expected}",
                where=head.source,
                hint="eagle_aux_hidden_state_layer_ids must name every layer the head was trained on",
            )
    if head.hidden_size != target.hidden_size and head.own_embedding is False:
        raise ConfigError(
            f"the head is {head.hidden_size} wide, the target {target.hidden_size}, and the head has no "
            "embedding of its own: "
            f"it cannot share the target's",
            where=head.source,
            hint="use a head with its own embed_tokens, or one of the target's width",
        )


def _check_positions(target: ArchitectureFacts, head: HeadFacts, found: list[Finding]) -> None:
    own = head.decoder.max_position_embeddings if head.decoder else None
    if own is not None and target.max_position_embeddings and own < target.max_position_embeddings:
        found.append(_shorter_context(own, target.max_position_embeddings, "head"))
    rope = head.decoder.rope if head.decoder else None
    if rope is None:
        return
    if not rope.known:
        raise ConfigError(
            f"rope_type {rope.kind!r} of the head is unknown",
            where=head.source,
            hint="it is never treated as the default schedule",
        )
    if head.method in ("eagle", "eagle2", "eagle3", "p_eagle") and not rope.same_schedule(target.rope):
        start = target.rope.original_max_position
        beyond = f" beyond position {start}" if start else ""
        found.append(
            Finding(
                "warning",
                f"the head's RoPE differs from the target's{beyond}: head {rope.describe()}, target "
                f"{target.rope.describe()}; acceptance falls at long positions",
            )
        )


def _shorter_context(own: int, target: int, what: str) -> Finding:
    return Finding(
        "warning",
        f"the {what} knows {own} positions, the target {target}: drafting stops so that no draft position "
        f"reaches {own}, then decoding is plain; "
        "override max_position_embeddings in its config.json to rebuild its RoPE",
    )


def _dtype(facts: ArchitectureFacts) -> str:
    return facts.quantization.algorithm or facts.dtype or "not stated"
