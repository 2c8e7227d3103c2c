"""How tests open each mechanism that decodes on the CPU engine: one entry a mechanism, and all tests here run it.

A mechanism proposes chains or trees. Tests that ask for the *other* form get it from `Reshaped`: a tree drafter is told
that there is room for one path only, and a chain drafter's chain gets wrong branches beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tests.verify.toy import run
from trtspec.drafters.base import Ask, Draft, Drafter
from trtspec.drafters.catalog import DRAFTERS
from trtspec.drafters.factory import open_drafter
from trtspec.engines.base import Engine
from trtspec.engines.info import FILE, EngineInfo
from trtspec.engines.opening import open_engine
from trtspec.values import Completion, GenerationRequest
from trtspec.verify.acceptance import Verifier, verify
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import ROOT, TokenTree

Form = Literal["chain", "tree"]
FORMS: tuple[Form, ...] = ("chain", "tree")
BRANCHES = 3


@dataclass(frozen=True, slots=True)
class Mechanism:
    """config: of build_configs, on the real model. overrides: of it, as `--set` takes them. tiny: `speculation` of a
    build on the tiny model, where {draft} and {other_draft} are draft models, {datastore} holds its own answers and
    {head} is a head of this mechanism that learned them.

    forms: chain, tree, or both. own_target: its engine's plain output is not the other engines'. needs: paths that must
    exist, relative to the repository, and what makes them.
    """

    config: str
    tiny: str
    overrides: tuple[str, ...] = ()
    forms: tuple[Form, ...] = FORMS
    own_target: bool = False
    needs: tuple[tuple[str, str], ...] = ()


_TRAIN = "trtspec train build_configs/smollm2-draft-model.yaml"
_DRAFT_OF_4_LAYERS = ("out/drafts/smollm2-4-layers", _TRAIN)
_DRAFT_OF_2_LAYERS = (
    "out/drafts/smollm2-2-layers",
    f"{_TRAIN} --set training.options.layers=2 --out out/drafts/smollm2-2-layers",
)


def _head(
    method: str,
    draft_length: int,
    folder: str | None = None,
    *,
    overrides: tuple[str, ...] = (),
    shipped: bool = False,
) -> Mechanism:
    """A trained head; folder: of the real model's, where it is not this mechanism's own. shipped: with the configs."""
    config = f"smollm2-{method.replace('_', '-')}"
    made = folder or config
    return Mechanism(
        config,
        f"{{{{method: {method}, draft_length: {draft_length}, draft: {{{{model: {{head}}}}}}}}}}",
        overrides,
        needs=() if shipped else ((f"out/drafts/{made}", f"trtspec train build_configs/{made}.yaml"),),
    )


MECHANISMS: dict[str, Mechanism] = {
    "ngram": Mechanism("quickstart", "{{method: ngram, draft_length: 6}}", ("speculation.draft_length=8",)),
    "suffix": Mechanism(
        "quickstart",
        "{{method: suffix, draft_length: 6, min_token_probability: 0}}",
        ("speculation.method=suffix", "speculation.draft_length=8"),
    ),
    "rest": Mechanism("smollm2-rest", "{{method: rest, datastore: {datastore}, draft_length: 6}}"),
    # without room for branches it has no window, and nothing to draft from
    "lookahead": Mechanism(
        "smollm2-lookahead",
        "{{method: lookahead, draft_length: 6, window_size: 3, ngram_size: 4, verification_set_size: 2}}",
        forms=("tree",),
    ),
    "draft_model": Mechanism(
        "smollm2-draft-model",
        "{{method: draft_model, draft_length: 3, draft: {{model: {draft}}}, min_token_probability: 0}}",
        ("speculation.min_token_probability=0",),
        needs=(_DRAFT_OF_4_LAYERS,),
    ),
    "specinfer": Mechanism(
        "smollm2-specinfer",
        "{{method: specinfer, draft_length: 6, min_token_probability: 0, "
        "drafts: [{{model: {draft}}}, {{model: {other_draft}}}]}}",
        ("speculation.min_token_probability=0", "speculation.draft_length=6"),
        needs=(_DRAFT_OF_4_LAYERS, _DRAFT_OF_2_LAYERS),
    ),
    # its target reads a quantized KV cache, which holds chains only
    "quantspec": Mechanism(
        "smollm2-quantspec",
        "{{method: quantspec, draft_length: 3, kv_group_size: 32, draft_quantization: int8_weight_only, "
        "min_token_probability: 0}}",
        ("speculation.min_token_probability=0",),
        forms=("chain",),
        own_target=True,
    ),
    "medusa": _head("medusa", 6),
    "hydra": _head("hydra", 6),
    "eagle": _head("eagle", 6),
    "eagle2": _head("eagle2", 6, "smollm2-eagle"),
    "eagle3": _head("eagle3", 4, overrides=("speculation.shape=tree",), shipped=True),
    "p_eagle": _head("p_eagle", 4),
    "mtp": _head("mtp", 4, shipped=True),
    "dflash": _head("dflash", 3),
    "dspark": _head("dspark", 3),
}

CASES: tuple[tuple[str, Form], ...] = tuple((m, form) for m in MECHANISMS for form in MECHANISMS[m].forms)


def without_an_entry() -> list[str]:
    """Mechanisms of the catalog that the CPU engine runs and no test here opens."""
    return [
        spec.method for spec in DRAFTERS if "onnxruntime" in spec.backends and spec.method not in MECHANISMS
    ]


class Reshaped:
    """A drafter that proposes in the form asked for. For greedy requests: what q belongs to is not kept."""

    def __init__(self, drafter: Drafter, form: Form, vocab_size: int) -> None:
        self._drafter = drafter
        self._form = form
        self._vocab_size = vocab_size
        self.spec = replace(drafter.spec, shape=form)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        if self._form == self._drafter.spec.shape:
            return self._drafter.propose(asks, rows)
        if self._form == "chain":
            return self._drafter.propose([replace(ask, branches=1) for ask in asks], rows)
        room = [min(ask.branches - 1, ask.nodes // 2) for ask in asks]
        inner = [replace(ask, nodes=ask.nodes - spare) for ask, spare in zip(asks, room, strict=True)]
        drafts = self._drafter.propose(inner, rows)
        return [self._forked(draft, spare) for draft, spare in zip(drafts, room, strict=True)]

    def _forked(self, draft: Draft, branches: int) -> Draft:
        """The chain with a wrong child before each of its first `branches` tokens: rows no longer lie in a row."""
        tokens, parents, last = [], [], ROOT
        for depth, token in enumerate(draft.tree.tokens):
            if depth < branches:
                tokens.append((token + 1) % self._vocab_size)
                parents.append(last)
            tokens.append(token)
            parents.append(last)
            last = len(tokens) - 1
        return Draft(TokenTree(tuple(tokens), tuple(parents)))


def decode(
    engine: Path, requests: Sequence[GenerationRequest], form: Form | None, *, verifier: Verifier = verify
) -> list[Completion]:
    """Completions of an engine folder in request order. form: None decodes plainly; otherwise the folder's own drafter
    proposes all it can, whether that pays or not.
    """
    with TemporaryDirectory() as place:
        return _decode(
            with_branches(engine, Path(place)) if form == "tree" else engine, requests, form, verifier
        )


def with_branches(engine: Path, into: Path) -> Path:
    """An engine folder whose steps may be trees: itself, or the same engine with room for branches, in `into`."""
    info = EngineInfo.read(engine)
    if info.spec.trees:
        return engine
    for file in engine.iterdir():
        if file.name != FILE:
            (into / file.name).symlink_to(file.resolve())
    replace(info, spec=replace(info.spec, max_branches=BRANCHES)).write(into)
    return into


def _decode(
    engine: Path, requests: Sequence[GenerationRequest], form: Form | None, verifier: Verifier
) -> list[Completion]:
    runner = open_engine(engine)
    speculation, drafter = runner.info.speculation, None
    if form is not None:
        opened = open_drafter(speculation, engine=engine, slots=runner.spec.max_batch, target=runner)
        drafter = Reshaped(opened, form, runner.spec.tokenizer_vocab_size)
    try:
        return complete(
            runner,
            drafter,
            speculation["draft_length"],
            requests,
            stop_token_ids=runner.info.stop_token_ids,
            verifier=verifier,
        )
    finally:
        if drafter is not None:
            drafter.close()
        runner.close()


def complete(
    engine: Engine,
    drafter: Drafter | None,
    draft_length: int,
    requests: Sequence[GenerationRequest],
    *,
    stop_token_ids: Collection[int] = (),
    verifier: Verifier = verify,
) -> list[Completion]:
    """Completions of open engine and drafter, which stay open, in request order."""
    loop = DecodeLoop(
        engine,
        drafter,
        draft_length=draft_length if drafter else 0,
        stop_token_ids=stop_token_ids,
        max_queue=len(requests),
        verifier=verifier,
    )
    outcome = run(loop, requests, most_steps=1_000_000)
    if outcome.failures:
        raise AssertionError(outcome.failures)
    return [outcome.completions[request.request_id] for request in requests]
