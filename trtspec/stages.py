"""The stages of a build as data: what each depends on, and how it is called.

A stage's request is built once, here, from the job; its key is that request, with folders replaced by what is
in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.files import JSON, files_below, link_or_copy, sha256_file
from trtspec.manifest import DataSet, ModelSource
from trtspec.models import DRAFT, TARGET, draft_role
from trtspec.stage import Job, Stage

if TYPE_CHECKING:
    from trtspec.compile.engine import CompileRequest
    from trtspec.config import Config
    from trtspec.package import PackageRequest
    from trtspec.quantize import QuantizeRequest

# Backends the compile stage has a compiler for; the planner knows more.
BUILDABLE_BACKENDS = ("onnxruntime", "tensorrt", "tensorrt_llm")

QUANTIZE_DRAFT, COMPILE_DRAFT = "quantize_draft", "compile_draft"
DATASTORE = "datastore"

# Most leaves of a drafted token tree. The CPU engine verifies each in a lane with a copy of the sequence's KV
# of its own: one more lane a slot is one more time the KV memory, and rows that all lanes share are copied.
MAX_BRANCHES = 4

# Tokens of each text that a target goes on from where its head is measured.
_MEASURING_TOKENS = 32

NOWHERE = Path()
# A draft's errors cost speed and never change the output: only one that is broken is refused.
_DRAFT_PERPLEXITY_INCREASE = 1.0


def check_buildable(config: Config, method: str) -> None:
    """Raise PlanInfeasible for a plan that no stage here can carry out."""
    from trtspec.drafters.catalog import DRAFTERS

    backend = config.engine.backend
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
    if backend == "tensorrt":
        from trtspec.tensorrt_stages import check_formats

        check_formats(config)
    if backend == "tensorrt_llm":
        from trtspec.trtllm.derive import check_runs

        check_runs(config, method)


def _quantize_request(job: Job) -> QuantizeRequest:
    from trtspec.quantize import QuantizeRequest

    target = job.config.target
    return QuantizeRequest(
        model=job.models[TARGET].path or NOWHERE,
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


def _draft_source(job: Job, number: int | None = None) -> tuple[ModelSource, str]:
    """The model that a draft with an engine of its own is made from, and the format of its weights.

    number: of one of several drafts, here and below; None where a method has one.
    """
    if number is not None:
        return job.models[draft_role(number)], job.config.speculation.drafts[number].quantization
    if job.plan["method"] == "quantspec":
        return job.models[TARGET], job.config.speculation.draft_quantization
    return job.models[DRAFT], job.config.speculation.draft.quantization


def _quantize_draft_request(job: Job, number: int | None) -> QuantizeRequest:
    """As the target's, in the draft's own format. The output layer, most of a small draft, is treated alike."""
    target, (model, quantization) = job.config.target, _draft_source(job, number)
    whole = _quantize_request(job)
    return replace(
        whole,
        model=model.path or NOWHERE,
        format=quantization,
        kv_cache="auto",
        quantize_lm_head=target.quantize_lm_head and quantization != "none",
        block_size=None,
        max_perplexity_increase=_DRAFT_PERPLEXITY_INCREASE,
        trust_remote_code=whole.trust_remote_code and model == job.models[TARGET],
    )


def _quantize_draft(job: Job, into: Path, emit: Emit, number: int | None) -> None:
    from trtspec.quantize import quantize

    quantize(_quantize_draft_request(job, number), into, emit)


def _compile_request(job: Job) -> CompileRequest:
    from trtspec.compile.engine import CompileRequest

    engine = job.config.engine
    return CompileRequest(
        model=job.artifacts["quantize"].path if "quantize" in job.artifacts else NOWHERE,
        name=model_name(job.models[TARGET]),
        speculation=speculation_of(job),
        max_batch=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        numerics=engine.numerics,
        max_branches=_max_branches(job),
        taps=_head_taps(job) if _has_head(job) else (),
        kv_group=_kv_group(job),
    )


def _has_head(job: Job) -> bool:
    """Whether the planned method drafts with a head that was trained for the target."""
    from trtspec.drafters.catalog import DRAFTERS

    return any(spec.method == job.plan["method"] and spec.trained_head for spec in DRAFTERS)


def _head_taps(job: Job) -> tuple[int, ...]:
    """Target layers whose output the head reads."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import read_head
    from trtspec.compile.heads import head_taps

    layers = read_facts(job.models[TARGET].config).layers or 0
    return head_taps(str(job.plan["method"]), read_head(_head_model(job).config), layers)


def _head_model(job: Job) -> ModelSource:
    """Where the head's weights are: a folder of its own, or the target's."""
    return job.models.get(DRAFT) or job.models[TARGET]


def _compile_head(job: Job, engine: Path, emit: Emit) -> None:
    from trtspec.compile.heads import HeadRequest, compile_head

    request = HeadRequest(
        method=str(job.plan["method"]),
        head=_head_model(job).path or NOWHERE,
        model=job.artifacts["quantize"].path,
        draft_length=int(job.plan["draft_length"]),
        prompts=_measuring_prompts(engine),
        quantization=job.config.speculation.draft.quantization if DRAFT in job.models else "none",
    )
    compile_head(request, engine, emit)


def _measuring_prompts(engine: Path) -> list[list[int]]:
    """Beginnings the target goes on from where a head is measured: held-out records, as the model would read them."""
    from trtspec.checkpoints.tokenizer import TextTokenizer
    from trtspec.quantize.corpora import read_records

    tokenizer = TextTokenizer.load(engine)
    texts = [record.text or record.messages[0]["content"] for record in read_records("heldout")]
    return [tokenizer.encode(text)[:_MEASURING_TOKENS] for text in texts]


def _kv_group(job: Job) -> int:
    """Tokens of a group of the hierarchical KV cache that QuantSpec's target and draft share; 0 without it."""
    return job.config.speculation.kv_group_size if job.plan["method"] == "quantspec" else 0


def _max_branches(job: Job) -> int:
    """1 for chains; a tree of D tokens has at most D leaves, and an engine for trees takes two at least.

    Lookahead's sizes are the config's own: a branch for each column of its window and each n-gram it verifies.
    """
    from trtspec.drafters.catalog import spec_of

    method = str(job.plan["method"])
    if method == "lookahead":
        return job.config.speculation.window_size + job.config.speculation.verification_set_size
    if method == "specinfer":  # a path for each draft
        return max(2, len(job.config.speculation.drafts))
    section = job.config.speculation
    chain = getattr(section, "shape", None) == "chain"
    if method == "none" or spec_of(method).shape == "chain" or chain:
        return 1
    draft_length = int(job.plan["draft_length"])
    if choices := getattr(section, "choices", None):
        return _branches_of(job, choices, draft_length)
    return max(2, min(MAX_BRANCHES, draft_length))


def _branches_of(job: Job, choices: Sequence[Sequence[int]], draft_length: int) -> int:
    """Leaves of a tree of fixed ranks. Raises ConfigError for one deeper than there are heads."""
    from trtspec.checkpoints.heads import read_head
    from trtspec.drafters.rank_tree import fixed_shape

    # A head that is run again for every level, as EAGLE's, has no depth of its own.
    heads = read_head(_head_model(job).config).heads or max(map(len, choices))
    tree = fixed_shape(choices, heads)(draft_length, heads, draft_length)
    return max(2, len(tree.leaves()))


def model_name(model: ModelSource) -> str:
    """What the engine calls its model: the reference, of a folder only its name (equal wherever it lies)."""
    return Path(model.reference).name if model.kind == "folder" else model.reference


def _compile(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.engine import compile_engine
    from trtspec.drafters.draft_model import draft_folder

    compile_engine(_compile_request(job), into, emit)
    if _has_head(job):
        _compile_head(job, into, emit)
    for number in (None, *range(len(job.models) - 1)):
        if (stage := f"{COMPILE_DRAFT}{_mark(number)}") in job.artifacts:
            _place_draft(job.artifacts[stage].path, into / draft_folder(number))
    if DATASTORE in job.artifacts:
        from trtspec.drafters.datastore import FILE

        link_or_copy(job.artifacts[DATASTORE].path / FILE, into / FILE)


def _place_draft(draft: Path, folder: Path) -> None:
    """Put a draft's engine inside the target's, which is then complete wherever it goes."""
    folder.mkdir()
    for file in files_below(draft):
        link_or_copy(file, folder / file.relative_to(draft))


def _make_datastore(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.drafters.datastore_build import provide_datastore

    provide_datastore(job.config.speculation.datastore, job.models[TARGET].path or NOWHERE, into, emit)


def _datastore_identity(job: Job) -> str:
    from trtspec.drafters.datastore_build import datastore_identity

    return datastore_identity(job.config.speculation.datastore)


def _datastore_data(job: Job) -> tuple[DataSet, ...]:
    """Text whose beginnings become drafts; the licence of a user's own is the user's to know."""
    given = job.config.speculation.datastore
    named = ("Python standard library", "PSF-2.0") if given == "stdlib" else (Path(given).name, None)
    return (DataSet(*named, _datastore_identity(job)),)


def _compile_draft_request(job: Job, number: int | None) -> CompileRequest:
    """The draft's engine: slots and numerics of the target's, and no more context than either model has."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.compile.engine import CompileRequest

    engine, (model, _) = job.config.engine, _draft_source(job, number)
    quantized = f"{QUANTIZE_DRAFT}{_mark(number)}"
    own = read_facts(model.config).max_position_embeddings
    limits = [limit for limit in (engine.max_seq_len, own) if limit is not None]
    return CompileRequest(
        model=job.artifacts[quantized].path if quantized in job.artifacts else NOWHERE,
        name=model_name(model),
        speculation={"method": "none", "draft_length": 0},
        max_batch=engine.max_batch_size,
        max_seq_len=min(limits, default=None),
        numerics=engine.numerics,
        kv_group=_kv_group(job),
        kv_bits=4,
    )


def _compile_draft(job: Job, into: Path, emit: Emit, number: int | None) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(_compile_draft_request(job, number), into, emit)


def speculation_of(job: Job) -> dict[str, JSON]:
    """Method and draft length as planned, the method's own options as configured (or their defaults), and step times.

    step_ms: milliseconds of a verify step with 1, 2, … rows of one sequence, which drafts are weighed by. Planned
    rather than timed when the engine is opened, so that the same request is drafted alike on every run.
    schedule: largest number of decoding sequences → draft length. draft_ms, acceptance: what drafting 0, 1, … tokens
    takes, and conditional acceptance by position. Each only where the policy needs it.
    verification: a lossy acceptance rule; absent for the exact one.
    """
    from trtspec.config.speculation import default_options

    configured, method = job.config.speculation, job.plan["method"]
    planned = {
        "method": method,
        "draft_length": job.plan["draft_length"],
        "step_ms": job.plan["verify_step_ms"],
        "draft_length_policy": job.plan["draft_length_policy"],
    }
    if planned["draft_length_policy"] == "schedule":
        planned["schedule"] = job.plan["schedule"]
    if planned["draft_length_policy"] == "adaptive":
        planned["draft_ms"] = job.plan["draft_ms"]
        planned["acceptance"] = job.plan["acceptance"]["rates"]
    section = configured if configured.method == method else default_options(method)
    options = section.model_dump(mode="json", exclude={"method", "draft_length", "draft", "drafts"})
    if method == "rest":
        from trtspec.drafters.datastore import FILE

        options["datastore"] = FILE  # inside the engine's folder, which is then complete wherever it goes
    if DRAFT in job.models and (method == "draft_model" or _has_head(job)):
        name = model_name(job.models[DRAFT])
        options["draft"] = {"model": name, "quantization": section.draft.quantization}
    if method == "specinfer":
        options["drafts"] = [
            {"model": model_name(job.models[draft_role(number)]), "quantization": draft.quantization}
            for number, draft in enumerate(section.drafts)
        ]
    verification = job.config.verification
    if verification.acceptance != "exact":
        planned["verification"] = verification.model_dump(mode="json", exclude_none=True)
    return {**options, **planned}


def _package_request(job: Job) -> PackageRequest:
    from trtspec.package import PackageRequest

    serving = job.config.serving
    return PackageRequest(
        engine=job.artifacts["compile"].path if "compile" in job.artifacts else NOWHERE,
        model_name=serving.model_name,
        max_concurrency=serving.max_concurrency,
        max_queue_size=serving.max_queue_size,
        reuse_prefixes=serving.reuse_prefixes,
        instances=serving.instances,
        threads=job.config.engine.threads,
    )


def _package(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.package import package_triton

    package_triton(_package_request(job), into, emit)


def settings_of(
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
            **settings_of(_quantize_request(job), "model"),
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
        depends_on=lambda job: {
            **settings_of(_compile_request(job), "model"),
            **({"head": _head_model(job).identity} if _has_head(job) else {}),
        },
        expects=_expect_compile,
        data=lambda job: _calibration_data()[1:] if _has_head(job) else (),
        needs=("quantize",),
        code=("compile", "engines", "checkpoints"),
        tools=("torch", "transformers", "onnx", "onnxruntime"),
    ),
    Stage(
        name="package",
        folder="repository",
        run=_package,
        depends_on=lambda job: settings_of(_package_request(job), "engine"),
        expects=lambda job: (
            f"Triton model {job.config.serving.model_name}, {job.config.serving.instances} instance(s)"
        ),
        needs=("compile",),
        code=("package",),
    ),
)

_QUANTIZE, _COMPILE, _PACKAGE = STAGES


def _mark(number: int | None) -> str:
    """What the stages of one of several drafts have after their name."""
    return "" if number is None else f"_{number}"


def _stages_of_draft(number: int | None) -> tuple[Stage, Stage]:
    """A draft is quantized and compiled as a target is."""
    from trtspec.drafters.draft_model import draft_folder

    mark = _mark(number)
    quantize = replace(
        _QUANTIZE,
        name=f"{QUANTIZE_DRAFT}{mark}",
        folder=draft_folder(number),
        run=partial(_quantize_draft, number=number),
        depends_on=lambda job: {
            "model": _draft_source(job, number)[0].identity,
            **settings_of(_quantize_draft_request(job, number), "model"),
        },
        expects=lambda job: f"the draft's weights, format {_draft_source(job, number)[1]}",
        data=lambda job: () if _draft_source(job, number)[1] == "none" else _calibration_data(),
    )
    compile_it = replace(
        _COMPILE,
        name=f"{COMPILE_DRAFT}{mark}",
        folder=None,
        run=partial(_compile_draft, number=number),
        depends_on=lambda job: settings_of(_compile_draft_request(job, number), "model"),
        expects=lambda job: f"the draft's own engine on {job.config.engine.backend}",
        needs=(quantize.name,),
    )
    return quantize, compile_it


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


def stages_for(method: str, last: str, backend: str, drafts: int = 0) -> tuple[Stage, ...]:
    """The stages of a build with this planned method, up to and including the one of STAGES named `last`.

    drafts: models that the config names besides the target.

    A draft model, and the target's own draft, is quantized and compiled like a target before the engine that it
    becomes a part of; so is a datastore made.
    """
    stages = STAGES
    if backend == "tensorrt":
        from trtspec.tensorrt_stages import BUILD_PLAN, EXPORT

        stages = (_QUANTIZE, EXPORT, BUILD_PLAN, _PACKAGE)
    if backend == "tensorrt_llm":
        from trtspec.tensorrt_llm_stages import stages_of

        stages = stages_of(_QUANTIZE, _stages_of_draft(None)[0], method, drafts > 0)
    elif method == "rest":
        with_datastore = replace(_COMPILE, needs=(*_COMPILE.needs, DATASTORE))
        stages = (_MAKE_DATASTORE, _QUANTIZE, with_datastore, _PACKAGE)
    elif method in ("draft_model", "quantspec", "specinfer"):
        numbers = range(drafts) if method == "specinfer" else (None,)
        of_drafts = [stage for number in numbers for stage in _stages_of_draft(number)]
        engines = tuple(stage.name for stage in of_drafts[1::2])
        with_drafts = replace(_COMPILE, needs=(*_COMPILE.needs, *engines))
        stages = (_QUANTIZE, *of_drafts, with_drafts, _PACKAGE)
    names = [stage.name for stage in stages]
    return stages[: names.index(last) + 1]
