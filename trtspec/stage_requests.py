"""What each stage of a build is asked to do: from a job to the requests of the parts that do it.

Requests are frozen values; a stage's key is its request, with folders replaced by what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.drafters.catalog import spec_of
from trtspec.files import JSON, sha256_file
from trtspec.manifest import DataSet, ModelSource
from trtspec.models import DRAFT, TARGET, draft_role
from trtspec.plan.tree import MAX_BRANCHES
from trtspec.stage import Job

if TYPE_CHECKING:
    from trtspec.compile.engine import CompileRequest
    from trtspec.compile.heads import HeadRequest
    from trtspec.config import Config
    from trtspec.package import PackageRequest
    from trtspec.quantize import QuantizeRequest

QUANTIZE_DRAFT, COMPILE_DRAFT = "quantize_draft", "compile_draft"

# Tokens of each text that a target goes on from where its head is measured.
_MEASURING_TOKENS = 32

NOWHERE = Path()
# A draft's errors cost speed and never change the output: only one that is broken is refused.
_DRAFT_PERPLEXITY_INCREASE = 1.0


def shipped_text(file: str) -> DataSet:
    """Text that comes with trtspec, under its licence."""
    path = Path(__file__).parent / "quantize" / "data" / file
    return DataSet(f"trtspec/quantize/data/{file}", "Apache-2.0", sha256_file(path))


def model_name(model: ModelSource) -> str:
    """What the engine calls its model: the reference, of a folder only its name (equal wherever it lies)."""
    return Path(model.reference).name if model.kind == "folder" else model.reference


def quantize_request(job: Job) -> QuantizeRequest:
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


def draft_source(job: Job, number: int | None = None) -> tuple[ModelSource, str]:
    """The model that a draft with an engine of its own is made from, and the format of its weights.

    number: of one of several drafts, here and below; None where a method has one.
    """
    if number is not None:
        return job.models[draft_role(number)], job.config.speculation.drafts[number].quantization
    if job.plan["method"] == "quantspec":
        return job.models[TARGET], job.config.speculation.draft_quantization
    return job.models[DRAFT], job.config.speculation.draft.quantization


def quantize_draft_request(job: Job, number: int | None) -> QuantizeRequest:
    """As the target's, in the draft's own format. The output layer, most of a small draft, is treated alike."""
    target, (model, quantization) = job.config.target, draft_source(job, number)
    whole = quantize_request(job)
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


def compile_request(job: Job) -> CompileRequest:
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
        taps=head_taps_of(job),
        kv_group=kv_group_of(job),
    )


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
    if DRAFT in job.models and (method == "draft_model" or drafts_with_head(method)):
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


def kv_group_of(job: Job) -> int:
    """Tokens of a group of the hierarchical KV cache that QuantSpec's target and draft share; 0 without it."""
    return job.config.speculation.kv_group_size if job.plan["method"] == "quantspec" else 0


def _max_branches(job: Job) -> int:
    """1 for chains; a tree of D tokens has at most D leaves, and an engine for trees takes two at least.

    Lookahead's sizes are the config's own: a branch for each column of its window and each n-gram it verifies.
    """
    method = str(job.plan["method"])
    if method == "lookahead":
        return job.config.speculation.window_size + job.config.speculation.verification_set_size
    if method == "specinfer":  # a path for each draft
        return max(2, len(job.config.speculation.drafts))
    if not drafts_trees(job.config, method):
        return 1
    draft_length = int(job.plan["draft_length"])
    if choices := getattr(job.config.speculation, "choices", None):
        return branches_of(job, choices, draft_length)
    return max(2, min(MAX_BRANCHES, draft_length))


def branches_of(job: Job, choices: Sequence[Sequence[int]], draft_length: int) -> int:
    """Leaves of a tree of fixed ranks. Raises ConfigError for one deeper than there are heads."""
    from trtspec.checkpoints.heads import read_head
    from trtspec.drafters.rank_tree import fixed_shape

    # A head that is run again for every level, as EAGLE's, has no depth of its own.
    heads = read_head(head_model(job).config).heads or max(map(len, choices))
    tree = fixed_shape(choices, heads)(draft_length, heads, draft_length)
    return max(2, len(tree.leaves()))


def drafts_trees(config: Config, method: str) -> bool:
    """Whether a method's drafts are token trees, as the config has it."""
    chain = getattr(config.speculation, "shape", None) == "chain"
    return method != "none" and spec_of(method).shape == "tree" and not chain


def drafts_with_head(method: str) -> bool:
    """Whether a method drafts with a head that was trained for its target."""
    return method != "none" and spec_of(method).trained_head


def head_model(job: Job) -> ModelSource:
    """Where the head's weights are: a folder of its own, or the target's."""
    return job.models.get(DRAFT) or job.models[TARGET]


def head_taps_of(job: Job) -> tuple[int, ...]:
    """Target layers whose output the method's head reads; none where it has no head."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import read_head
    from trtspec.compile.heads import head_taps

    if not drafts_with_head(str(job.plan["method"])):
        return ()
    layers = read_facts(job.models[TARGET].config).layers or 0
    return head_taps(str(job.plan["method"]), read_head(head_model(job).config), layers)


def head_request(job: Job) -> HeadRequest:
    from trtspec.compile.heads import HeadRequest

    return HeadRequest(
        method=str(job.plan["method"]),
        head=head_model(job).path or NOWHERE,
        model=job.artifacts["quantize"].path,
        draft_length=int(job.plan["draft_length"]),
        quantization=job.config.speculation.draft.quantization if DRAFT in job.models else "none",
    )


def measuring_prompts(engine: Path) -> list[list[int]]:
    """Beginnings the target goes on from where a head is measured: held-out records, as the model would read them.

    engine: the compiled target's folder, for its tokenizer.
    """
    from trtspec.checkpoints.tokenizer import TextTokenizer
    from trtspec.quantize.corpora import read_records

    tokenizer = TextTokenizer.load(engine)
    texts = [record.text or record.messages[0]["content"] for record in read_records("heldout")]
    return [tokenizer.encode(text)[:_MEASURING_TOKENS] for text in texts]


def compile_draft_request(job: Job, number: int | None) -> CompileRequest:
    """The draft's engine: slots and numerics of the target's, and no more context than either model has."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.compile.engine import CompileRequest

    engine, (model, _) = job.config.engine, draft_source(job, number)
    quantized = f"{QUANTIZE_DRAFT}{mark(number)}"
    own = read_facts(model.config).max_position_embeddings
    limits = [limit for limit in (engine.max_seq_len, own) if limit is not None]
    return CompileRequest(
        model=job.artifacts[quantized].path if quantized in job.artifacts else NOWHERE,
        name=model_name(model),
        speculation={"method": "none", "draft_length": 0},
        max_batch=engine.max_batch_size,
        max_seq_len=min(limits, default=None),
        numerics=engine.numerics,
        kv_group=kv_group_of(job),
        kv_bits=4,
    )


def package_request(job: Job) -> PackageRequest:
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


def settings_of(
    request: QuantizeRequest | CompileRequest | PackageRequest, *folders: str
) -> Mapping[str, JSON]:
    """A request as JSON without the folders it names, which are keyed by their content."""
    return {name: value for name, value in asdict(request).items() if name not in folders}


def mark(number: int | None) -> str:
    """What the stages of one of several drafts have after their name."""
    return "" if number is None else f"_{number}"
