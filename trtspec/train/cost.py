"""How long training may take, before anything runs: measured rates times what is asked for.

A machine that has trained before goes by its own rates (`rates.json` in the training folder). Until then rates are
those of SmolLM2-135M on two cores of an AMD EPYC, for other targets in proportion to their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtspec.files import pretty_json, write_atomic

_RATES = "rates.json"
_REFERENCE_PARAMETERS = 134.5e6
_CORES = 2
# CPU seconds for 1,000 tokens of the reference target; of the fit in bfloat16 and over the whole vocabulary.
_WRITE = 9.4  # by the int8 engine, eight sequences at a time
_STATES = {"float32": 4.1, "bfloat16": 1.6}
_FIT = {
    "draft_model": 1.8,
    "eagle": 1.2,
    "eagle2": 1.2,
    "eagle3": 5.6,
    "mtp": 5.3,
    "medusa": 10.7,
    "hydra": 12.4,
    "dflash": 4.9,
    "dspark": 5.8,
}
_FIT_ELSE = 6.0
_OF_FLOAT32 = 2.5  # of the fit, as the target's own states take
_OF_A_QUARTER = 0.45  # of the fit, over a quarter of the vocabulary
_FIRST_ALONE = 0.35  # of the fit, while it learns the first draft position alone
_INVENTED = 0.45  # tokens of made-up prompts, kept or not, for each response token
_PROMPT = 0.6  # prompt tokens that a batch holds for each response token


@dataclass(frozen=True, slots=True)
class Estimate:
    """tokens: that the stage works through. seconds: of wall time. basis: where the rate comes from."""

    stage: str
    tokens: int
    seconds: float
    basis: str


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for. parameters: of the target. response_tokens: to collect, at most."""

    method: str
    parameters: int
    response_tokens: int
    invent: bool
    epochs: int
    precision: str
    reduced_vocabulary: bool
    first_position_share: float = 0.0

    @property
    def learned(self) -> int:
        """Tokens that pass through the target and the draft while fitting."""
        return round(self.response_tokens * (1 + _PROMPT) * self.epochs)


def write_rate(invent: bool) -> str:
    """The name a rate of writing responses is remembered under; invent: and the prompts."""
    return "write responses and prompts" if invent else "write responses"


def fit_rate(method: str, precision: str, reduced_vocabulary: bool, first_position_share: float) -> str:
    """The name a fitting rate is remembered under."""
    vocabulary = "reduced" if reduced_vocabulary else "whole"
    first = f", {first_position_share:g} of it the first position" if first_position_share else ""
    return f"fit {method} {precision} {vocabulary} vocabulary{first}"


def estimates(work: Work, folder: Path) -> tuple[Estimate, ...]:
    """Writing and fitting, in order. folder: of all training on this machine."""
    known = _known(folder)
    scale = work.parameters / _REFERENCE_PARAMETERS / _CORES / 1000
    fit = _FIT.get(work.method, _FIT_ELSE) * (_OF_A_QUARTER if work.reduced_vocabulary else 1)
    fit *= _OF_FLOAT32 if work.precision == "float32" else 1
    fit *= 1 - work.first_position_share * (1 - _FIRST_ALONE)
    fitting = fit_rate(work.method, work.precision, work.reduced_vocabulary, work.first_position_share)
    states = _STATES[work.precision] / work.epochs  # kept after the first, where memory has room
    writing, write = write_rate(work.invent), _WRITE * (1 + _INVENTED * work.invent)
    assumed = {writing: write * scale, fitting: (states + fit) * scale}
    found = []
    stages = (("responses", writing, work.response_tokens), ("training", fitting, work.learned))
    for stage, name, tokens in stages:
        own = known.get(name)
        rate = assumed[name] if own is None else own * work.parameters
        basis = "135M target on two cores of an AMD EPYC" if own is None else "last run on this machine"
        found.append(Estimate(stage, tokens, tokens * rate, basis))
    return tuple(found)


def remember(folder: Path, name: str, parameters: int, tokens: int, seconds: float) -> None:
    """Keep what a stage really took. name: a `write_rate` or a `fit_rate`. tokens: of responses, or learned."""
    if tokens and parameters:
        write_atomic(folder / _RATES, pretty_json({**_known(folder), name: seconds / tokens / parameters}))


def _known(folder: Path) -> Mapping[str, float]:
    """Seconds for each token and parameter of the target, by name."""
    file = folder / _RATES
    return json.loads(file.read_text()) if file.is_file() else {}
