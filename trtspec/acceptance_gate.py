"""Does quantization cost acceptance? The stages of a build that answer it, where its draft is quantized.

The same pair is compiled once more without quantization, both answer the held-out prompts that come with trtspec, and
a build stops where the quantized pair emits fewer tokens a verify step than the config accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import StageFailed
from trtspec.events import Emit, Progress
from trtspec.files import pretty_json
from trtspec.stage import Job, Stage

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.runtime import Runtime

ACCEPTANCE = "acceptance"
REPORT = "acceptance_report.json"
_TOKENS = 64  # of each answer


@dataclass(frozen=True, slots=True)
class PairAcceptance:
    """steps: verify steps of all answers. acceptance_length: tokens emitted per step, token-weighted.

    draft_acceptance_rate: accepted of all drafted tokens.
    """

    steps: int
    acceptance_length: float
    draft_acceptance_rate: float


def with_acceptance_gate(stages: Sequence[Stage], config: Config) -> tuple[Stage, ...]:
    """The stages of a build and, before it is packaged, those that measure what quantizing its draft costs.

    Unchanged where no draft is quantized, where nothing is compiled, and on backends this machine may not run.
    """
    drafts = _drafts(config)
    names = [stage.name for stage in stages]
    quantized = any(draft.quantization != "none" for draft in drafts)
    if not quantized or "compile" not in names or config.engine.backend != "onnxruntime":
        return tuple(stages)
    end = names.index("compile") + 1
    compiled = stages[:end]
    return (*compiled, *(_unquantized(stage, compiled) for stage in compiled), _GATE, *stages[end:])


def _drafts(config: Config) -> tuple[Any, ...]:
    speculation = config.speculation
    one = getattr(speculation, "draft", None)
    return (one,) if one is not None else tuple(getattr(speculation, "drafts", ()))


def _twin(name: str) -> str:
    return f"{name}_unquantized"


def _unquantized(stage: Stage, all_stages: Sequence[Stage]) -> Stage:
    """The stage for the pair as it would be without quantization."""
    names = {other.name for other in all_stages}
    return replace(
        stage,
        name=_twin(stage.name),
        folder=None,
        run=lambda job, into, emit: stage.run(_plain(job, names), into, emit),
        depends_on=lambda job: stage.depends_on(_plain(job, names)),
        expects=lambda job: f"without quantization, to compare with: {stage.expects(_plain(job, names))}",
        data=lambda job: (),
        needs=tuple(_twin(name) for name in stage.needs),
    )


def _plain(job: Job, names: set[str]) -> Job:
    """The job of the unquantized pair, whose artifacts stand under their usual names."""
    config = job.config
    target = config.target.model_copy(
        update={
            "quantization": "none",
            "kv_cache": "auto",
            "quantize_lm_head": False,
            "block_size": None,
        }
    )
    plain = [draft.model_copy(update={"quantization": "none"}) for draft in _drafts(config)]
    update = {"drafts": tuple(plain)} if hasattr(config.speculation, "drafts") else {"draft": plain[0]}
    speculation = config.speculation.model_copy(update=update)
    artifacts = {name: job.artifacts[_twin(name)] for name in names if _twin(name) in job.artifacts}
    return replace(
        job,
        config=config.model_copy(update={"target": target, "speculation": speculation}),
        artifacts=artifacts,
    )


def _limit(job: Job) -> float:
    return min(draft.max_acceptance_loss for draft in _drafts(job.config))


def _run(job: Job, into: Path, emit: Emit) -> None:
    threads = job.config.engine.threads
    found = {
        name: measure(job.artifacts[stage].path, threads, partial(_progress, emit, name))
        for name, stage in (("unquantized", _twin("compile")), ("quantized", "compile"))
    }
    before, after = found["unquantized"].acceptance_length, found["quantized"].acceptance_length
    loss = 1 - after / before
    if loss > _limit(job):
        raise StageFailed(
            f"quantization takes {loss:.1%} of the acceptance length on held-out prompts ({before:.3f} → "
            f"{after:.3f} tokens a step), above max_acceptance_loss {_limit(job):.1%}",
            where="speculation.draft.quantization",
            hint="write quantization: none for the draft, or another format; to accept the loss set "
            f"speculation.draft.max_acceptance_loss: {int(loss * 100 + 1) / 100}",
        )
    report = {name: asdict(acceptance) for name, acceptance in found.items()}
    (into / REPORT).write_text(pretty_json({**report, "loss": loss, "limit": _limit(job)}))


def _progress(emit: Emit, pair: str, done: int, total: int) -> None:
    emit(Progress(ACCEPTANCE, f"answers of the {pair} pair", done, total, "prompt"))


def measure(engine: Path, threads: int | None, progress: Any) -> PairAcceptance:
    """Greedy answers of an engine folder to the held-out prompts. progress: called with answers done and in all."""
    from trtspec.runtime import Runtime

    with Runtime.open(engine, threads=threads) as runtime:
        requests = _requests(runtime)
        progress(0, len(requests))
        ended = []

        def count(completion: Any) -> None:
            ended.append(completion)
            progress(len(ended), len(requests))

        completions = runtime.generate_many(requests, on_done=count)
    steps = [step for completion in completions for step in completion.steps]
    return PairAcceptance(
        steps=len(steps),
        acceptance_length=sum(step.emitted for step in steps) / len(steps),
        draft_acceptance_rate=sum(step.accepted for step in steps) / max(1, sum(s.drafted for s in steps)),
    )


def _requests(runtime: Runtime) -> list[Any]:
    """The held-out prompts, each cut to a half of the engine's context."""
    from trtspec.train.prompts import packaged_prompts, prompt_ids
    from trtspec.values import GenerationRequest, SamplingParams

    half = runtime.info.spec.max_seq_len // 2
    sampling = SamplingParams(max_tokens=min(_TOKENS, half), seed=0)
    return [
        GenerationRequest(str(i), tuple(prompt_ids(runtime.tokenizer, prompt)[:half]), sampling)
        for i, prompt in enumerate(packaged_prompts("heldout"))
    ]


_GATE = Stage(
    name=ACCEPTANCE,
    folder=ACCEPTANCE,
    run=_run,
    depends_on=lambda job: {"limit": _limit(job)},
    expects=lambda job: f"at most {_limit(job):.0%} less acceptance than without quantization",
    needs=("compile", _twin("compile")),
    code=("drafters", "verify", "engines", "acceptance_gate", "runtime"),
    tools=("onnxruntime",),
)
