"""The `speculation` section: one small model per mechanism, told apart by `method`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

from trtspec.config.references import ModelReference, Quantization, Revision

MAX_DRAFT_LENGTH = 64


class Section(BaseModel):
    """Base of every part of a config: immutable, unknown keys refused, no value converted on the quiet."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _draft_length(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (whole and 1 <= value <= MAX_DRAFT_LENGTH):
        return value
    raise PydanticCustomError(
        "draft_length", "must be auto or a whole number from 1 to {limit}", {"limit": MAX_DRAFT_LENGTH}
    )


DraftLength = Annotated[
    Literal["auto"] | int,
    PlainValidator(
        _draft_length,
        json_schema_input_type=Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DRAFT_LENGTH)],
    ),
]


METHOD: Any = Field(
    description="The mechanism that drafts; none decodes plainly, auto lets the planner choose."
)


MIN_TOKEN_PROBABILITY: Any = Field(
    0.1, ge=0, le=1, description="Proposals stop where a token's estimated probability falls below this."
)


DRAFT_TEMPERATURE: Any = Field(
    None,
    ge=0,
    le=100,
    description="Temperature the draft samples at, 0 for greedy; null takes each request's.",
)


class Draft(Section):
    """A draft model or a draft head."""

    model: ModelReference = Field(description="Folder or hub id of the draft model or head.")
    revision: Revision | None = Field(
        None, description="Hub commit of the draft; only for hub ids. null pins the newest one at build time."
    )
    quantization: Quantization = Field("none", description="ModelOpt format of the draft's weights, by name.")
    max_acceptance_loss: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Largest relative fall of the acceptance length that a build with a quantized draft accepts, "
        "against the same pair without quantization; 0.05 is 5 %.",
    )


class Mechanism(Section):
    """Base of all; each narrows `method` to its own name."""

    method: str = METHOD


class Drafting(Mechanism):
    """What all mechanisms that draft share."""

    draft_length: DraftLength = Field(
        "auto", description="Tokens D proposed per verify step, 1 to 64; auto lets the planner choose."
    )
    draft_length_policy: Literal["auto", "fixed", "schedule", "adaptive"] = Field(
        "auto",
        description="Whether D changes while serving: fixed; schedule, the plan's D for the number of sequences that "
        "decode (0 switches drafting off); adaptive, by each request's recent acceptance. auto follows the plan's "
        "schedule where it varies and the drafter does not weigh its drafts itself, as ngram, suffix and rest do. No "
        "text changes with it: drafts sampled from a draft model, which could, keep D.",
    )


class WithDraft(Drafting):
    """A mechanism that needs trained weights of its own."""

    draft: Draft = Field(description="The draft model or head this method runs.")


class WithMatching(Drafting):
    """A mechanism that copies from text it finds by matching the last tokens."""

    min_draft_length: int = Field(
        1, ge=1, le=MAX_DRAFT_LENGTH, description="Shorter proposals are dropped: that step decodes plainly."
    )
    pool_tokens: int = Field(
        0,
        ge=0,
        le=2**24,
        description="Size of a pool of ended requests' tokens, the newest, from which all others are drafted too; 0 "
        "keeps requests apart. No text is ever taken over, but one that goes on as an earlier one did arrives faster: "
        "who can time answers can test guesses at others' texts. Only for users who may know each other's.",
    )
    pool_prompts: bool = Field(
        False, description="Whether prompts go to that pool too, and not only what was generated."
    )


class NoSpeculation(Mechanism):
    """Plain decoding: the baseline."""

    method: Literal["none"] = METHOD


class Auto(Drafting):
    """The planner ranks the mechanisms that need no trained weights and takes the best one."""

    method: Literal["auto"] = METHOD


class Ngram(WithMatching):
    """Prompt lookup: the longest n-gram suffix found earlier in prompt and output is continued."""

    method: Literal["ngram"] = METHOD
    max_ngram: int = Field(8, ge=1, le=64, description="Longest suffix, in tokens, that is looked up.")
    min_ngram: int = Field(1, ge=1, le=64, description="Shortest suffix, in tokens, that counts as a match.")


class Suffix(WithMatching):
    """SuffixDecoding (2411.04975): a suffix tree whose paths are weighted by how often they occurred."""

    method: Literal["suffix"] = METHOD
    max_tree_depth: int = Field(24, ge=2, le=256, description="Depth of the suffix tree, in tokens.")
    max_spec_factor: float = Field(
        1.0, gt=0, le=64, description="A match of p tokens proposes at most this factor times p."
    )
    min_token_probability: float = MIN_TOKEN_PROBABILITY


class DraftModel(WithDraft):
    """An independent small model with the target's tokenizer (2211.17192, 2302.01318)."""

    method: Literal["draft_model"] = METHOD
    draft_temperature: float | None = DRAFT_TEMPERATURE
    min_token_probability: float = MIN_TOKEN_PROBABILITY


class Pard(WithDraft):
    """PARD (2504.18583): a small model adapted to mask tokens, which drafts all positions in one pass."""

    method: Literal["pard"] = METHOD


Ranks = Annotated[tuple[Annotated[int, Field(ge=0, le=9)], ...], Field(strict=False, min_length=1)]


class WithRankTree(WithDraft):
    """A mechanism whose heads each offer candidates by rank, which a tree of fixed ranks combines."""

    shape: Literal["tree", "chain"] = Field(
        "tree", description="tree verifies several candidates of a head, chain only the likeliest one."
    )
    choices: Annotated[tuple[Ranks, ...], Field(strict=False, min_length=1, max_length=256)] | None = Field(
        None,
        description="Paths of candidate ranks that make the tree, as in Medusa's own lists; its first draft_length "
        "nodes are used. null searches a tree of up to four branches from acceptance measured at build.",
    )


class Medusa(WithRankTree):
    """Medusa heads (2401.10774): one head for each future position."""

    method: Literal["medusa"] = METHOD


class Hydra(WithRankTree):
    """Hydra heads (2402.05109): Medusa heads that see the tokens drafted before them."""

    method: Literal["hydra"] = METHOD


MIN_PATH_PROBABILITY: Any = Field(
    0.0,
    ge=0,
    lt=1,
    description="Drafts end where the product of the head's probabilities falls below this; 0 drafts the full length.",
)


class WithHeadTree(WithDraft):
    """A mechanism whose head is run again for every level of a token tree."""

    shape: Literal["tree", "chain"] = Field(
        "tree", description="tree verifies several candidates of a position, chain only the likeliest one."
    )


class Eagle(WithHeadTree):
    """EAGLE (2401.15077): a one-layer head over the target's last features."""

    method: Literal["eagle"] = METHOD
    choices: Annotated[tuple[Ranks, ...], Field(strict=False, min_length=1, max_length=256)] | None = Field(
        None,
        description="Paths of candidate ranks that make the static tree; its first draft_length nodes are used. null "
        "takes the tree of the EAGLE authors.",
    )


class WithDynamicTree(WithHeadTree):
    """A mechanism whose tree takes the head's surest nodes."""

    top_k: int = Field(
        4, ge=1, le=32, description="Nodes expanded on each level of the tree, each into as many candidates."
    )
    min_path_probability: float = MIN_PATH_PROBABILITY


class Eagle2(WithDynamicTree):
    """EAGLE-2 (2406.16858): EAGLE with trees shaped by the head's confidence."""

    method: Literal["eagle2"] = METHOD


class Eagle3(WithDynamicTree):
    """EAGLE-3 (2503.01840): a head over features of several target layers."""

    method: Literal["eagle3"] = METHOD


class PEagle(WithDraft):
    """P-EAGLE (2602.01469): an EAGLE head that predicts all positions in one pass."""

    method: Literal["p_eagle"] = METHOD


class Mtp(Drafting):
    """Multi-token prediction: modules trained with the target (DeepSeek-V3, 2412.19437)."""

    method: Literal["mtp"] = METHOD
    draft: Draft | None = Field(
        None, description="Folder of separate MTP modules; null takes those inside the target's checkpoint."
    )
    min_path_probability: float = MIN_PATH_PROBABILITY


class DFlash(WithDraft):
    """DFlash (2602.06036): a block-diffusion head that fills all positions at once."""

    method: Literal["dflash"] = METHOD


class DSpark(WithDraft):
    """DSpark (2607.05147): DFlash with a light serial Markov head."""

    method: Literal["dspark"] = METHOD
    min_token_probability: float = MIN_TOKEN_PROBABILITY


class Lookahead(Drafting):
    """Lookahead decoding (2402.02057): Jacobi window and n-gram pool, no draft weights."""

    method: Literal["lookahead"] = METHOD
    window_size: int = Field(4, ge=2, le=64, description="Jacobi window W, in positions.")
    ngram_size: int = Field(3, ge=2, le=64, description="n-gram length N; each n-gram proposes N-1 tokens.")
    verification_set_size: int = Field(4, ge=1, le=64, description="n-grams G verified per step.")


class Rest(Drafting):
    """REST (2311.08252): retrieval from a datastore of text or code into a token tree."""

    method: Literal["rest"] = METHOD
    datastore: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = Field(
        description="File that `trtspec datastore` made, or stdlib: Python's standard library, made by the build."
    )
    shape: Literal["tree", "chain"] = Field(
        "tree", description="tree verifies several continuations, chain only the most frequent one."
    )
    max_ngram: int = Field(16, ge=1, le=64, description="Longest suffix, in tokens, that is looked up.")
    tree_size: int = Field(64, ge=1, le=256, description="Most nodes of the retrieved token tree.")


class SpecInfer(Drafting):
    """SpecInfer (2305.09781): the proposals of several draft models merged into one token tree."""

    method: Literal["specinfer"] = METHOD
    drafts: Annotated[tuple[Draft, ...], Field(strict=False, min_length=1, max_length=8)] = Field(
        description="The draft models, one entry each, the best one first."
    )
    draft_temperature: float | None = DRAFT_TEMPERATURE
    min_token_probability: float = MIN_TOKEN_PROBABILITY


class QuantSpec(Drafting):
    """QuantSpec (2502.10424): the target drafts for itself with 4-bit weights and a hierarchical KV cache."""

    method: Literal["quantspec"] = METHOD
    kv_group_size: int = Field(
        64,
        ge=32,
        le=1024,
        description="Tokens G of one quantized group of the KV cache, longer than any draft; the newest G to 2G tokens "
        "stay in full precision. The paper has 128.",
    )
    draft_quantization: Quantization = Field(
        "int4_weight_only",
        description="ModelOpt format of the draft's copy of the weights, by name; none leaves them as the model has "
        "them, so that only the cache tells draft and target apart.",
    )
    draft_temperature: float | None = DRAFT_TEMPERATURE
    min_token_probability: float = MIN_TOKEN_PROBABILITY


Speculation = Annotated[
    NoSpeculation
    | Auto
    | Ngram
    | Suffix
    | DraftModel
    | Pard
    | Medusa
    | Hydra
    | Eagle
    | Eagle2
    | Eagle3
    | PEagle
    | Mtp
    | DFlash
    | DSpark
    | Lookahead
    | Rest
    | SpecInfer
    | QuantSpec,
    Field(discriminator="method"),
]

SPECULATION_MODELS: tuple[type[Mechanism], ...] = get_args(get_args(Speculation)[0])
METHODS: tuple[str, ...] = tuple(
    get_args(model.model_fields["method"].annotation)[0] for model in SPECULATION_MODELS
)


def default_options(method: str) -> Mechanism:
    """The section of a method that needs nothing but its name. Raises ValidationError for one that needs more."""
    model = SPECULATION_MODELS[METHODS.index(method)]
    return model(method=method)
