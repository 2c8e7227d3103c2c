"""A sweep as a user writes it. A list is an axis: every value of one is run with every value of the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from trtspec.config.rules import Contradiction
from trtspec.config.schema import BatchSizes, Evaluation, Names, Seed, Temperature, Text, Tokens, distinct
from trtspec.config.speculation import MAX_DRAFT_LENGTH, Section

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_AXIS = (Field(strict=False, min_length=1, max_length=64), AfterValidator(distinct))

Length = Annotated[int, Field(ge=1, le=MAX_DRAFT_LENGTH)]
Rate = Annotated[float, Field(gt=0, le=1_000_000)]
Lengths = Annotated[tuple[Length, ...], *_AXIS]
Rates = Annotated[tuple[Rate, ...], *_AXIS]
Temperatures = Annotated[tuple[Temperature, ...], *_AXIS]
FolderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def as_folder_name(text: str) -> str:
    """Text with everything replaced that does not belong in a folder's name."""
    return _UNFIT.sub("-", text).strip("-.") or "unnamed"


def _about(name: str) -> str:
    """What the field of this name in a config's `evaluation` section is."""
    return str(Evaluation.model_fields[name].description)


class SweepTarget(Section):
    """One thing to measure: a build, a config to build first, or a server."""

    build: Text | None = Field(
        None, description="A build folder; with `url`, of the build it serves, for the baseline."
    )
    config: Text | None = Field(None, description="A config; it is built before anything is measured.")
    set: Names | None = Field(
        None, description="Other values of the config's fields, as `trtspec build --set` takes them."
    )
    url: Text | None = Field(
        None,
        description="A running server: grpc://HOST:PORT or http://HOST:PORT/v2 of Triton, http://HOST:PORT/v1 of "
        "OpenAI's protocol.",
    )
    model: Text | None = Field(None, description="With `url`: the model's name there.")
    tokenizer: Text | None = Field(
        None, description="With `url`: the model's folder, whose tokenizer counts the tokens of text."
    )
    draft_length: Length | None = Field(
        None, description="With an OpenAI-compatible `url`: how many tokens the server drafts."
    )
    name: FolderName | None = Field(
        None,
        description="What its runs are called; null takes the folder's, the config's or the host's name.",
    )

    @property
    def label(self) -> str:
        """`name`, or what stands for it; fit for a folder's name."""
        if self.name:
            return self.name
        if self.url:
            return as_folder_name(self.url.partition("://")[2])
        return as_folder_name(Path(self.build).name if self.build else Path(self.config or "").stem)


class Sweep(Section):
    """Runs of `trtspec eval`, one for each combination of targets, data, temperatures, draft lengths and loads."""

    targets: Annotated[tuple[SweepTarget, ...], Field(strict=False, min_length=1, max_length=1024)] = Field(
        description="What is measured: builds, configs and servers."
    )
    data: Names | None = Field(
        None, description=f"{_about('data')} null takes each build's own, builtin for a server without one."
    )
    concurrency: BatchSizes | None = Field(
        None, description=f"{_about('concurrency')} null takes 1 where no rate is given."
    )
    rate_per_s: Rates | None = Field(
        None, description="Conversations that begin per second, at random (Poisson), whatever is in flight."
    )
    draft_length: Lengths | None = Field(
        None,
        description="Draft lengths that builds run with; null takes the planned one. Servers keep theirs.",
    )
    temperature: Temperatures | None = Field(
        None, description=f"{_about('temperature')} null takes each build's own."
    )
    output_length: Tokens | None = Field(None, description=_about("output_length"))
    prompts: int | None = Field(None, ge=1, le=10_000_000, description=_about("prompts"))
    time_limit_s: float | None = Field(None, gt=0, le=31_536_000, description=_about("time_limit_s"))
    categories: Names | None = Field(None, description=_about("categories"))
    seed: Seed | None = Field(None, description=_about("seed"))
    baseline: bool = Field(
        True, description="Measures each engine without speculation too, for speed-up and losslessness."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Sweep:
        if found := tuple(_contradictions(self)):
            text = "; ".join(contradiction.message for contradiction in found)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "found": found})
        return self


def _contradictions(sweep: Sweep) -> Iterator[Contradiction]:
    """Targets that say too little or too much, and names that two of them share."""
    first: dict[str, int] = {}
    for number, target in enumerate(sweep.targets):
        place = ("targets", number)
        if not any((target.build, target.config, target.url)):
            yield Contradiction(
                (place,), "nothing to measure is named", "name a build, a config to build, or a url"
            )
            continue
        yield from _in_target(target, place)
        if number != first.setdefault(target.label, number):
            yield Contradiction(
                ((*place, "name"), place),
                f"targets[{first[target.label]}] is called {target.label!r} too",
                "give one of them another name",
            )


def _in_target(target: SweepTarget, place: tuple[str | int, ...]) -> Iterator[Contradiction]:
    url = target.url or ""
    # Of Triton's own protocol over HTTP the address ends in /v2.
    openai = url.startswith(("http://", "https://")) and not url.rstrip("/").endswith("/v2")
    if target.config and (target.build or url):
        other = "build" if target.build else "url"
        yield Contradiction(
            ((*place, "config"), (*place, other)), f"a {other} is named too", "measure them as two targets"
        )
        return
    if url and not url.startswith(("grpc://", "http://", "https://")):
        yield Contradiction(
            ((*place, "url"),),
            f"{url!r} is not a server's address",
            "write grpc://HOST:PORT, http://HOST:PORT/v1 or http://HOST:PORT/v2",
        )
    belongs = {"set": ("a config", target.config), "draft_length": ("an OpenAI-compatible url", openai)}
    belongs |= dict.fromkeys(("model", "tokenizer"), ("a url", url))
    for field, (what, given) in belongs.items():
        if getattr(target, field) is not None and not given:
            yield Contradiction(((*place, field),), f"goes with {what}", f"remove it, or name {what}")
    if openai and not target.build:
        for field, why in (("model", "may serve several models"), ("tokenizer", "sends text, not tokens")):
            if getattr(target, field) is None:
                yield Contradiction(
                    ((*place, field), (*place, "url")),
                    f"missing, and an OpenAI-compatible server {why}",
                    f"add {field}, or the build it serves",
                )
