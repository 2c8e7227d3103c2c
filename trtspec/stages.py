"""The stages of a build as data: what each depends on, and how it is called.

A stage's request is built once, here, from the job; its key is that request, with folders replaced by what is
in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.files import JSON, sha256_file
from trtspec.manifest import DataSet, ModelSource
from trtspec.models import TARGET
from trtspec.stage import Job, Stage

if TYPE_CHECKING:
    from trtspec.compile.engine import CompileRequest
    from trtspec.package import PackageRequest
    from trtspec.quantize import QuantizeRequest

# Backends the compile stage has a compiler for; the planner knows more.
BUILDABLE_BACKENDS = ("onnxruntime",)

_NOWHERE = Path()


def check_buildable(backend: str, method: str) -> None:
    """Raise PlanInfeasible for a plan that no stage here can carry out."""
    from trtspec.drafters.catalog import DRAFTERS

    if backend not in BUILDABLE_BACKENDS:
        raise PlanInfeasible(
            f"this version plans for {backend} and builds for {', '.join(BUILDABLE_BACKENDS)} only",
            where="engine.backend",
            hint=f"engine: {{backend: {BUILDABLE_BACKENDS[0]}, device: cpu}}; `trtspec plan` works as it is",
        )
    runs = [spec.method for spec in DRAFTERS if backend in spec.backends]
    if method != "none" and method not in runs:
        raise PlanInfeasible(
            f"the {backend} backend does not run {method}",
            where="speculation.method",
            hint=f"it runs {', '.join(['none', *runs])}",
        )


def _quantize_request(job: Job) -> QuantizeRequest:
    from trtspec.quantize import QuantizeRequest

    target = job.config.target
    return QuantizeRequest(
        model=job.models[TARGET].path or _NOWHERE,
        format=target.quantization,
        kv_cache=target.kv_cache,
        quantize_lm_head=target.quantize_lm_head,
        block_size=target.block_size,
        calibration_samples=target.calibration.samples,
        calibration_tokens=target.calibration.tokens,
        seed=target.calibration.seed,
        max_perplexity_increase=target.max_perplexity_increase,
        trust_remote_code=target.trust_remote_code == target.model,
    )


def _quantize(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.quantize import quantize

    quantize(_quantize_request(job), into, emit)


def _quantize_data(job: Job) -> tuple[DataSet, ...]:
    """The text that comes with trtspec, under its licence."""
    if not _quantizes(job):
        return ()
    folder = Path(__file__).parent / "quantize" / "data"
    files = ("calibration.jsonl", "heldout.jsonl")
    return tuple(DataSet(f"trtspec/quantize/data/{f}", "Apache-2.0", sha256_file(folder / f)) for f in files)


def _quantizes(job: Job) -> bool:
    return job.config.target.quantization != "none" or job.config.target.kv_cache != "auto"


def _compile_request(job: Job) -> CompileRequest:
    from trtspec.compile.engine import CompileRequest

    engine = job.config.engine
    return CompileRequest(
        model=job.artifacts["quantize"].path if "quantize" in job.artifacts else _NOWHERE,
        name=_model_name(job.models[TARGET]),
        speculation=_speculation(job),
        max_batch=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        numerics=engine.numerics,
    )


def _model_name(model: ModelSource) -> str:
    """What the engine calls its model: the reference, of a folder only its name (equal wherever it lies)."""
    return Path(model.reference).name if model.kind == "folder" else model.reference


def _compile(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(_compile_request(job), into, emit)


def _speculation(job: Job) -> dict[str, JSON]:
    """Method and draft length as planned, the method's own options as configured (or their defaults), and step times.

    step_ms: milliseconds of a verify step with 1, 2, … rows of one sequence, which drafts are weighed by. Planned
    rather than timed when the engine is opened, so that the same request is drafted alike on every run.
    """
    from trtspec.config.speculation import default_options

    configured, method = job.config.speculation, job.plan["method"]
    planned = {
        "method": method,
        "draft_length": job.plan["draft_length"],
        "step_ms": job.plan["verify_step_ms"],
    }
    section = configured if configured.method == method else default_options(method)
    options = section.model_dump(mode="json", exclude={"method", "draft_length", "draft", "drafts"})
    return {**options, **planned}


def _package_request(job: Job) -> PackageRequest:
    from trtspec.package import PackageRequest

    serving = job.config.serving
    return PackageRequest(
        engine=job.artifacts["compile"].path if "compile" in job.artifacts else _NOWHERE,
        model_name=serving.model_name,
        max_concurrency=serving.max_concurrency,
        max_queue_size=serving.max_queue_size,
        instances=serving.instances,
        threads=job.config.engine.threads,
    )


def _package(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.package import package_triton

    package_triton(_package_request(job), into, emit)


def _settings(
    request: QuantizeRequest | CompileRequest | PackageRequest, *folders: str
) -> Mapping[str, JSON]:
    """A request as JSON without the folders it names, which are keyed by their content."""
    return {name: value for name, value in asdict(request).items() if name not in folders}


def _expect_quantize(job: Job) -> str:
    target = job.config.target
    if not _quantizes(job):
        return "the model as it is, linked"
    samples, tokens = target.calibration.samples, target.calibration.tokens
    size = job.plan["memory"]["weight_bytes"] / 1e6
    return f"{target.quantization}, calibrated on {samples} × {tokens} tokens at most; about {size:,.0f} MB"


def _expect_compile(job: Job) -> str:
    engine, plan = job.config.engine, job.plan
    return f"{engine.backend} on {engine.device}, {plan['method']} with draft length {plan['draft_length']}"


STAGES: tuple[Stage, ...] = (
    Stage(
        name="quantize",
        folder="target",
        run=_quantize,
        depends_on=lambda job: {
            "model": job.models[TARGET].identity,
            **_settings(_quantize_request(job), "model"),
        },
        expects=_expect_quantize,
        data=_quantize_data,
        code=("quantize", "checkpoints"),
        tools=("torch", "transformers", "nvidia-modelopt"),
    ),
    Stage(
        name="compile",
        folder="engine",
        run=_compile,
        depends_on=lambda job: _settings(_compile_request(job), "model"),
        expects=_expect_compile,
        needs=("quantize",),
        code=("compile", "engines", "checkpoints"),
        tools=("torch", "transformers", "onnx", "onnxruntime"),
    ),
    Stage(
        name="package",
        folder="repository",
        run=_package,
        depends_on=lambda job: _settings(_package_request(job), "engine"),
        expects=lambda job: (
            f"Triton model {job.config.serving.model_name}, {job.config.serving.instances} instance(s)"
        ),
        needs=("compile",),
        code=("package",),
    ),
)
