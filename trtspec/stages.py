"""The stages of a build as data: what each depends on, and how it is called.

A stage's request is built once, here, from the job; its key is that request, with folders replaced by what is
in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.files import JSON, files_below, link_or_copy, sha256_file
from trtspec.manifest import DataSet, ModelSource
from trtspec.models import DRAFT, TARGET
from trtspec.stage import Job, Stage

if TYPE_CHECKING:
    from trtspec.compile.engine import CompileRequest
    from trtspec.package import PackageRequest
    from trtspec.quantize import QuantizeRequest

# Backends the compile stage has a compiler for; the planner knows more.
BUILDABLE_BACKENDS = ("onnxruntime",)

QUANTIZE_DRAFT, COMPILE_DRAFT = "quantize_draft", "compile_draft"
DATASTORE = "datastore"

# Most leaves of a drafted token tree. The CPU engine verifies each in a lane with a copy of the sequence's KV
# of its own: one more lane a slot is one more time the KV memory, and rows that all lanes share are copied.
MAX_BRANCHES = 4

_NOWHERE = Path()
# A draft's errors cost speed and never change the output: only one that is broken is refused.
_DRAFT_PERPLEXITY_INCREASE = 1.0


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
    return _calibration_data() if _quantizes(job) else ()


def _calibration_data() -> tuple[DataSet, ...]:
    """The text that comes with trtspec, under its licence."""
    folder = Path(__file__).parent / "quantize" / "data"
    files = ("calibration.jsonl", "heldout.jsonl")
    return tuple(DataSet(f"trtspec/quantize/data/{f}", "Apache-2.0", sha256_file(folder / f)) for f in files)


def _quantizes(job: Job) -> bool:
    return job.config.target.quantization != "none" or job.config.target.kv_cache != "auto"


def _quantize_draft_request(job: Job) -> QuantizeRequest:
    """As the target's, in the draft's own format. The output layer, most of a small draft, is treated alike."""
    target, draft = job.config.target, job.config.speculation.draft
    return replace(
        _quantize_request(job),
        model=job.models[DRAFT].path or _NOWHERE,
        format=draft.quantization,
        kv_cache="auto",
        quantize_lm_head=target.quantize_lm_head and draft.quantization != "none",
        block_size=None,
        max_perplexity_increase=_DRAFT_PERPLEXITY_INCREASE,
        trust_remote_code=False,
    )


def _quantize_draft(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.quantize import quantize

    quantize(_quantize_draft_request(job), into, emit)


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
        max_branches=_max_branches(job),
    )


def _max_branches(job: Job) -> int:
    """1 for chains; a tree of D tokens has at most D leaves, and an engine for trees takes two at least.

    Lookahead's sizes are the config's own: a branch for each column of its window and each n-gram it verifies.
    """
    from trtspec.drafters.catalog import spec_of

    method = str(job.plan["method"])
    if method == "lookahead":
        return job.config.speculation.window_size + job.config.speculation.verification_set_size
    if method == "none" or spec_of(method).shape == "chain":
        return 1
    return max(2, min(MAX_BRANCHES, int(job.plan["draft_length"])))


def _model_name(model: ModelSource) -> str:
    """What the engine calls its model: the reference, of a folder only its name (equal wherever it lies)."""
    return Path(model.reference).name if model.kind == "folder" else model.reference


def _compile(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(_compile_request(job), into, emit)
    if COMPILE_DRAFT in job.artifacts:
        _place_draft(job.artifacts[COMPILE_DRAFT].path, into)
    if DATASTORE in job.artifacts:
        from trtspec.drafters.datastore import FILE

        link_or_copy(job.artifacts[DATASTORE].path / FILE, into / FILE)


def _place_draft(draft: Path, engine: Path) -> None:
    """Put the draft's engine inside the target's, which is then complete wherever it goes."""
    from trtspec.drafters.draft_model import DRAFT_FOLDER

    folder = engine / DRAFT_FOLDER
    folder.mkdir()
    for file in files_below(draft):
        link_or_copy(file, folder / file.relative_to(draft))


def _make_datastore(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.drafters.datastore_build import provide_datastore

    provide_datastore(job.config.speculation.datastore, job.models[TARGET].path or _NOWHERE, into, emit)


def _datastore_identity(job: Job) -> str:
    from trtspec.drafters.datastore_build import datastore_identity

    return datastore_identity(job.config.speculation.datastore)


def _datastore_data(job: Job) -> tuple[DataSet, ...]:
    """Text whose beginnings become drafts; the licence of a user's own is the user's to know."""
    given = job.config.speculation.datastore
    named = ("Python standard library", "PSF-2.0") if given == "stdlib" else (Path(given).name, None)
    return (DataSet(*named, _datastore_identity(job)),)


def _compile_draft_request(job: Job) -> CompileRequest:
    """The draft's engine: slots and numerics of the target's, and no more context than either model has."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.compile.engine import CompileRequest

    engine = job.config.engine
    own = read_facts(job.models[DRAFT].config).max_position_embeddings
    limits = [limit for limit in (engine.max_seq_len, own) if limit is not None]
    return CompileRequest(
        model=job.artifacts[QUANTIZE_DRAFT].path if QUANTIZE_DRAFT in job.artifacts else _NOWHERE,
        name=_model_name(job.models[DRAFT]),
        speculation={"method": "none", "draft_length": 0},
        max_batch=engine.max_batch_size,
        max_seq_len=min(limits, default=None),
        numerics=engine.numerics,
    )


def _compile_draft(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(_compile_draft_request(job), into, emit)


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
    if method == "rest":
        from trtspec.drafters.datastore import FILE

        options["datastore"] = FILE  # inside the engine's folder, which is then complete wherever it goes
    if method == "draft_model":
        name = _model_name(job.models[DRAFT])
        options["draft"] = {"model": name, "quantization": section.draft.quantization}
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


# What every build runs; `stages_for` adds what a method needs besides.
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

_QUANTIZE, _COMPILE, _PACKAGE = STAGES
_OF_A_DRAFT = (
    replace(
        _QUANTIZE,
        name=QUANTIZE_DRAFT,
        folder="draft",
        run=_quantize_draft,
        depends_on=lambda job: {
            "model": job.models[DRAFT].identity,
            **_settings(_quantize_draft_request(job), "model"),
        },
        expects=lambda job: f"the draft's weights, format {job.config.speculation.draft.quantization}",
        data=lambda job: () if job.config.speculation.draft.quantization == "none" else _calibration_data(),
    ),
    replace(
        _COMPILE,
        name=COMPILE_DRAFT,
        folder=None,
        run=_compile_draft,
        depends_on=lambda job: _settings(_compile_draft_request(job), "model"),
        expects=lambda job: f"the draft's own engine on {job.config.engine.backend}",
        needs=(QUANTIZE_DRAFT,),
    ),
)

_MAKE_DATASTORE = Stage(
    name=DATASTORE,
    folder=None,
    run=_make_datastore,
    depends_on=lambda job: {"model": job.models[TARGET].identity, "text": _datastore_identity(job)},
    expects=lambda job: f"tokens and suffix array of {job.config.speculation.datastore}",
    data=_datastore_data,
    code=("drafters/datastore", "drafters/datastore_build"),
    tools=("tokenizers", "safetensors"),
)


def stages_for(method: str, last: str) -> tuple[Stage, ...]:
    """The stages of a build with this planned method, up to and including the one of STAGES named `last`.

    A draft model is quantized and compiled like a target before the engine that it becomes a part of; so is a
    datastore made.
    """
    stages = STAGES
    if method == "rest":
        with_datastore = replace(_COMPILE, needs=(*_COMPILE.needs, DATASTORE))
        stages = (_MAKE_DATASTORE, _QUANTIZE, with_datastore, _PACKAGE)
    if method == "draft_model":
        with_draft = replace(_COMPILE, needs=(*_COMPILE.needs, COMPILE_DRAFT))
        stages = (_QUANTIZE, *_OF_A_DRAFT, with_draft, _PACKAGE)
    names = [stage.name for stage in stages]
    return stages[: names.index(last) + 1]
