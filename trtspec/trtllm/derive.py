"""From a plan to TensorRT-LLM's settings for one version, each with the reason for its value.

What a version does not run is refused here, with the alternatives, before anything is fetched or quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtspec.errors import InternalError, PlanInfeasible
from trtspec.files import JSON
from trtspec.plan.devices import load_device
from trtspec.plan.schedule import Schedule, tensorrt_llm_schedule
from trtspec.trtllm.check import check_settings
from trtspec.trtllm.contract import (
    Contract,
    DecodingType,
    contract_for,
    default_version,
    format_support,
    known_bad,
    supported_eras,
)

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.config import Config

# Where the build folder is mounted in the container; model.yaml names folders of it.
MOUNT = "/models"

_BLOCK_TOKENS = 32  # tokens of a KV block: budgets are whole blocks
_CHUNK_TOKENS = 8192  # prompt tokens of a step where prompts are cut: TensorRT-LLM's own default budget
_GRAPHS_WITHOUT_RESERVE = 16
_MOST_GRAPH_SIZES = 12


@dataclass(frozen=True, slots=True)
class Settings:
    """`LLM()` keywords for one version. reasons: dotted key → why it has its value. notes: what has no key."""

    version: str
    values: Mapping[str, Any]
    reasons: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """Settings while they are put together."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any, reason: str) -> None:
        inside, *steps = self.values, *path.split(".")
        for step in steps[:-1]:
            inside = inside.setdefault(step, {})
        inside[steps[-1]] = value
        self.reasons[path] = reason


def check_runs(config: Config, method: str) -> Contract:
    """The contract of the config's version. Raises PlanInfeasible for what that version does not run, with what does.

    Covers the method, its draft, the checkpoint's format on the device, and separate MTP modules.
    """
    version = config.engine.version or default_version(method)[0]
    contract = contract_for(version)
    if method != "none" and contract.type_of(method) is None:
        raise PlanInfeasible(
            f"TensorRT-LLM {version} does not run {method}",
            where="speculation.method",
            hint=_alternatives(contract, method),
        )
    _check_format(config, version)
    draft = getattr(config.speculation, "draft", None)
    if draft is None:
        return contract
    if method == "mtp" and not contract.has("separate_mtp_checkpoint"):
        raise PlanInfeasible(
            f"TensorRT-LLM {version} reads MTP modules from the target's checkpoint only",
            where="speculation.draft",
            hint="engine.version: 1.3.0rc24 or newer (unconfirmed: the first release with it), or remove draft",
        )
    if draft.quantization != "none" and method != "draft_model":
        raise PlanInfeasible(
            f"trtspec quantizes no {method} draft for TensorRT-LLM",
            where="speculation.draft.quantization",
            hint="quantization: none, or name a draft that is quantized already",
        )
    return contract


def derive(
    config: Config, plan: Mapping[str, JSON], facts: ArchitectureFacts, *, draft: str | None = None
) -> Settings:
    """The settings of a planned deployment. facts: of the target. draft: where its draft lies; None: in the build.

    Raises PlanInfeasible where the version does not run the plan, InternalError if the result breaks the contract.
    """
    method, length = str(plan["method"]), int(plan["draft_length"])
    contract = check_runs(config, method)
    decoding = contract.type_of(method) if method != "none" else None
    made = _Draft()
    made.set("model", f"{MOUNT}/target", f"the target's checkpoint; mount the build folder at {MOUNT}")
    made.set("backend", "pytorch", "the only backend that runs every method; weights load as they are")
    if config.engine.version is None:
        made.notes.append(f"TensorRT-LLM {contract.version}: {default_version(method)[1]}")
    _parallelism(config, plan, decoding, facts, made)
    longest = _sequence(config, facts, length, made)
    if decoding is not None:
        _speculation(config, plan, contract, decoding, facts, made, draft or f"{MOUNT}/draft")
    _tokens(config, plan, contract, decoding, length, longest, made)
    graphs = _graphs(config, made)
    _kv_cache(config, contract, facts, decoding, graphs, made)
    made.set("stream_interval", 1, "a chunk is one step: acceptance can be counted from its tokens")
    made.set("return_perf_metrics", True, "timing and KV-cache metrics of each request")
    made.set("enable_iter_perf_stats", True, "acceptance and cache use at the server's metrics endpoint")
    if decoding and not contract.has("acceptance_statistics"):
        made.notes.append(
            f"TensorRT-LLM {contract.version} reports each request's acceptance as zero: count tokens per chunk"
        )
    if config.target.trust_remote_code == config.target.model:
        made.set("trust_remote_code", True, "the config names this model's own code as trusted")
    settings = Settings(contract.version, made.values, made.reasons, tuple(made.notes))
    if broken := [f for f in check_settings(settings.values, contract.version) if f.level == "error"]:
        raise InternalError("the derived settings break the contract:\n  " + "\n  ".join(map(str, broken)))
    return settings


def _alternatives(contract: Contract, method: str) -> str:
    runs = ", ".join(["none", *contract.methods()])
    others = [
        (first, last)
        for _, first, last in supported_eras()
        if contract_for(last).type_of(method) is not None and contract_for(last).version != contract.version
    ]
    later = f"; {method} runs on {' and '.join(f'{a} to {b}' for a, b in others)}" if others else ""
    return f"it runs {runs}{later}"


def _check_format(config: Config, version: str) -> None:
    from trtspec.quantize.formats import get_format

    drafts = [("speculation.draft", getattr(config.speculation, "draft", None))]
    sm = _sm(config)
    for where, section in (("target", config.target), *drafts):
        if section is None or section.quantization == "none":
            continue
        algorithm = get_format(section.quantization).quant_algo or section.quantization
        if why := format_support(algorithm, sm, version):
            raise PlanInfeasible(
                f"TensorRT-LLM {version} cannot load {section.quantization} here: {why}",
                where=f"{where}.quantization",
                hint=f"{where}.quantization: {'fp8' if sm >= 89 else 'int4_awq'}, or another engine.device",
            )


def _sm(config: Config) -> int:
    """The device's compute capability, 90 for Hopper."""
    return int(load_device(config.engine.device).arch.removeprefix("sm_"))


def _parallelism(
    config: Config,
    plan: Mapping[str, JSON],
    decoding: DecodingType | None,
    facts: ArchitectureFacts,
    made: _Draft,
) -> None:
    engine = config.engine
    reasons = {
        **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "attention_dp"), "as configured"),
        **plan["parallelism"],  # of a plan for another backend there are none
    }
    experts = facts.weights.experts if facts.weights else 0
    made.set("tensor_parallel_size", engine.tensor_parallel, reasons["tensor_parallel"])
    made.set("pipeline_parallel_size", engine.pipeline_parallel, reasons["pipeline_parallel"])
    if engine.expert_parallel > 1:
        if engine.tensor_parallel % engine.expert_parallel:
            raise PlanInfeasible(
                f"expert_parallel {engine.expert_parallel} does not divide tensor_parallel {engine.tensor_parallel}",
                where="engine.expert_parallel",
                hint="experts are split over the ranks of tensor_parallel",
            )
        slices = engine.tensor_parallel // engine.expert_parallel
        made.set(
            "moe_expert_parallel_size",
            engine.expert_parallel,
            f"as configured: {experts // engine.expert_parallel} of {experts} experts a group of ranks, each "
            f"{f'in {slices} slices' if slices > 1 else 'whole, which sees only the rows routed to it'}",
        )
    elif experts and engine.tensor_parallel > 1:
        made.notes.append(
            f"each of {experts} experts is sliced over {engine.tensor_parallel} ranks; engine.expert_parallel keeps "
            "them whole"
        )
    data_parallel = bool(plan["engine"]["attention_dp"])
    made.set("enable_attention_dp", data_parallel, reasons["attention_dp"])
    if data_parallel and decoding and decoding.name == "Eagle3":
        made.notes.append(
            "with attention-DP the head's layers share the target's KV pool (PR 16021; unconfirmed: for every target)"
        )


def _sequence(config: Config, facts: ArchitectureFacts, length: int, made: _Draft) -> int:
    """max_seq_len: as configured, and never so short that the workload's last draft runs past it."""
    workload, limit = config.workload, facts.max_position_embeddings
    needed = workload.context + workload.output_length + (length + 1 if length else 0)
    longest = config.engine.max_seq_len or limit or needed
    reason = "as configured" if config.engine.max_seq_len else "the model's own limit"
    if longest < needed:
        longest = needed
        reason = (
            f"{workload.context} prompt + {workload.output_length} output tokens + {length + 1} of a verify step: "
            "a draft must not run past the end"
        )
    if limit and longest > limit:
        made.notes.append(f"max_seq_len {longest} is past the model's {limit} positions by the drafts' room")
    made.set("max_batch_size", config.engine.max_batch_size, "sequences decoded at once, as configured")
    made.set("max_seq_len", longest, reason)
    return longest


def _speculation(
    config: Config,
    plan: Mapping[str, JSON],
    contract: Contract,
    decoding: DecodingType,
    facts: ArchitectureFacts,
    made: _Draft,
    draft: str,
) -> None:
    length, base = int(plan["draft_length"]), "speculative_config"
    made.set(f"{base}.decoding_type", decoding.spellings[0].name, f"the spelling {contract.version} takes")
    made.set(f"{base}.{decoding.length}", length, f"planned; the {plan['binding']} term decided")
    if getattr(config.speculation, "draft", None) is not None:
        made.set(f"{base}.{contract.draft_key}", draft, "the draft's checkpoint")
    _options(config, plan, decoding, made)
    if decoding.name == "DraftTarget":
        made.notes.append(
            "target and draft run in one LLM: as two models under Triton's BLS they cannot stream or batch, and a "
            "second client hangs both (tensorrtllm_backend 0.15 to 0.17)"
        )
    if decoding.name == "MTP" and facts.mtp_layers and length > facts.mtp_layers:
        made.notes.append(f"{facts.mtp_layers} MTP layer(s) are run {length} times: the layer is reused")
    if schedule := _schedule(plan, contract, decoding, length):
        bounds = "smallest" if contract.schedule_bounds == "lower" else "largest"
        made.set(
            f"{base}.draft_len_schedule",
            schedule,
            f"planned lengths by batch size; keys are the {bounds} batch of each range in {contract.version}",
        )
    if config.workload.temperature > 0 and config.lossless:
        _sampling(contract, decoding, made)
    sm = _sm(config)
    if decoding.mla_min_sm and sm < decoding.mla_min_sm and any(g.kind == "mla" for g in facts.attention):
        raise PlanInfeasible(
            f"{decoding.name} with latent attention needs sm_{decoding.mla_min_sm}, {config.engine.device} is sm_{sm}",
            where="engine.device",
            hint="device: h100-sxm or newer",
        )
    made.notes.extend(known_bad(decoding.name, sm, contract.version))


def _options(config: Config, plan: Mapping[str, JSON], decoding: DecodingType, made: _Draft) -> None:
    """The method's own options, and those that have no equivalent."""
    section, base = config.speculation, "speculative_config"
    if decoding.name == "NGram":
        longest = getattr(section, "max_ngram", 4)
        made.set(f"{base}.max_matching_ngram_size", longest, "speculation.max_ngram")
        if getattr(section, "min_ngram", 1) > 1:
            made.notes.append("min_ngram has no equivalent: TensorRT-LLM also matches shorter n-grams")
    if decoding.name == "SA":
        made.set(
            f"{base}.max_matching_ngram_size", -1, "matches of any length, as a suffix automaton gives them"
        )
        made.notes.append("max_spec_factor and min_token_probability have no equivalent in SA")
    if decoding.name == "Eagle3":
        if layers := plan.get("captured_layers"):
            made.set(
                f"{base}.eagle3_layers_to_capture",
                list(layers),
                "0-based layers whose output is taken; the head's own file may count finished blocks",
            )
        if getattr(section, "shape", "chain") == "tree":
            made.notes.append(
                "drafted as a chain, which the plan assumes; use_dynamic_tree would draft a tree"
            )
    if getattr(section, "min_draft_length", 1) > 1:
        made.notes.append("min_draft_length has no equivalent: short drafts are verified too")
    if decoding.name in ("DraftTarget", "DSpark"):
        made.notes.append("min_token_probability has no equivalent: drafts keep their length")


def _schedule(
    plan: Mapping[str, JSON], contract: Contract, decoding: DecodingType, length: int
) -> dict[int, int] | None:
    """draft_len_schedule in this version's bounds; None where the length does not vary with the batch.

    Its first range holds max_draft_len in every version, so a configured length is kept there, however long.
    """
    if plan["draft_length_policy"] != "schedule" or decoding.name == "NGram":
        return None
    (first, _), *rest = sorted((int(batch), planned) for batch, planned in plan["schedule"].items())
    entries = ((first, length), *((batch, min(planned, length)) for batch, planned in rest))
    if len({planned for _, planned in entries}) < 2:
        return None
    return tensorrt_llm_schedule(Schedule(entries), contract.version)


def _sampling(contract: Contract, decoding: DecodingType, made: _Draft) -> None:
    """Sampled output that is to keep the target's distribution."""
    if decoding.name in ("NGram", "SA"):
        made.notes.append(
            "sampled drafts are judged by exact match; rejection sampling does not run with lookups"
        )
    elif "use_rejection_sampling" in contract.speculative_fields:
        made.set(
            "speculative_config.use_rejection_sampling",
            True,
            "the traffic is sampled: without it drafts are judged by exact match, which TensorRT-LLM's documentation "
            "calls not distribution-preserving",
        )
    else:
        made.notes.append(
            f"TensorRT-LLM {contract.version} judges sampled drafts by exact match and has no rejection sampling; "
            "lossless holds for greedy requests"
        )


def _tokens(
    config: Config,
    plan: Mapping[str, JSON],
    contract: Contract,
    decoding: DecodingType | None,
    length: int,
    longest: int,
    made: _Draft,
) -> None:
    """max_num_tokens, chunked prefill and the overlap scheduler, which share one budget."""
    rows = decoding.rows(length) if decoding else 1
    decoding_tokens = config.engine.max_batch_size * rows
    cache, draft_cache = plan["engine"]["kv_dtype"], plan["engine"]["draft_kv_dtype"]
    mixed = decoding is not None and decoding.name == "Eagle3" and cache == "fp8" != draft_cache
    whole = mixed and not contract.has("mixed_kv_dtypes")
    chunked = longest > _CHUNK_TOKENS and not whole
    prompt = min(longest, _CHUNK_TOKENS) if chunked else longest
    budget = -(-(decoding_tokens + prompt) // _BLOCK_TOKENS) * _BLOCK_TOKENS
    prompt_words = f"a prompt chunk of {prompt}" if chunked else f"the longest prompt, {prompt}"
    made.set(
        "max_num_tokens",
        budget,
        f"{config.engine.max_batch_size} sequences of {rows} row(s) a step, and {prompt_words}, in whole KV blocks",
    )
    made.set(
        "enable_chunked_prefill",
        chunked,
        "an FP8 cache beside a 16-bit head's is wrong with it in this version (issue 7842; unconfirmed: until when)"
        if whole
        else f"prompts of up to {longest} tokens are {'cut to' if chunked else 'no longer than'} {_CHUNK_TOKENS}",
    )
    overlap, why = True, "scheduling overlaps with the running step"
    if decoding and not decoding.overlap:
        overlap, why = False, f"{decoding.name} runs without it"
    elif decoding and decoding.name == "DraftTarget" and not contract.has("one_model_draft_target"):
        overlap, why = False, "a draft model is a second engine in this version, which runs without it"
    elif decoding and decoding.name == "MTP" and chunked and not contract.has("draft_tokens_reserved"):
        overlap, why = (
            False,
            (
                "MTP with chunked prefill: this version's scheduler reserves no draft tokens "
                "(PR 16101; unconfirmed: the first release with it)"
            ),
        )
    made.set("disable_overlap_scheduler", not overlap, why)


def _graphs(config: Config, made: _Draft) -> int:
    """CUDA-graph batch sizes; returns how many graphs they and the draft lengths make."""
    largest = config.engine.max_batch_size
    speculative = made.values.get("speculative_config", {})
    schedule = speculative.get("draft_len_schedule", {})
    powers = [1 << power for power in range(largest.bit_length())]
    wanted = {*config.workload.batch_sizes, *schedule, largest, *powers}
    sizes = sorted(size for size in wanted if 1 <= size <= largest)
    if len(sizes) > _MOST_GRAPH_SIZES:
        kept = {*config.workload.batch_sizes, *schedule, largest}
        sizes = sorted(size for size in kept if size <= largest)[-_MOST_GRAPH_SIZES:]
    lengths = len(set(schedule.values())) or 1
    graphs = len(sizes) * lengths
    made.set(
        "cuda_graph_config.batch_sizes",
        sizes,
        f"powers of two, the workload's sizes and the schedule's: {graphs} graph(s) over {lengths} draft length(s)",
    )
    made.set("cuda_graph_config.enable_padding", True, "batches in between take the next larger graph")
    return graphs


def _kv_cache(
    config: Config,
    contract: Contract,
    facts: ArchitectureFacts,
    decoding: DecodingType | None,
    graphs: int,
    made: _Draft,
) -> None:
    base = "kv_cache_config"
    made.set(
        f"{base}.dtype",
        config.target.kv_cache,
        "the checkpoint's calibrated scales"
        if config.target.kv_cache == "fp8"
        else "as the checkpoint has it",
    )
    reuse, why = True, "prompts that begin alike share their blocks"
    if decoding and decoding.name == "Eagle3":
        reuse, why = (
            False,
            (
                "reused blocks hold no draft KV: acceptance fell from 0.190 to 0.029 on repeated prompts (PR 18280; "
                "unconfirmed: whether it was merged)"
            ),
        )
    elif "linear" in facts.layer_kinds:
        reuse, why = False, "recurrent layers keep a state that blocks do not hold"
    made.set(f"{base}.enable_block_reuse", reuse, why)
    reserve = 0.05 * bool(decoding and decoding.draft) + 0.05 * (graphs > _GRAPHS_WITHOUT_RESERVE)
    parts = [f"{graphs} CUDA graph(s)"] + (["the draft's own buffers"] if decoding and decoding.draft else [])
    made.set(
        f"{base}.free_gpu_memory_fraction",
        round(0.9 - reserve, 2),
        f"of what the weights leave free; the rest is for {' and '.join(parts)} (a rule of thumb)",
    )
    if decoding and decoding.draft and contract.era == "1.2":
        made.notes.append(
            "the draft's KV pool is sized like the target's here (issue 9279): watch free memory at start"
        )


def settings_text(settings: Settings, *, leave_out: Sequence[str] = (), extra: str = "") -> str:
    """The settings as YAML with each reason above its key. leave_out: top-level keys that are said elsewhere."""
    head = [f"# Settings of TensorRT-LLM {settings.version}, written by trtspec from plan.json."]
    lines = [line for key, value in settings.values.items() if key not in leave_out
             for line in _entry(settings, key, value, "")]  # fmt: skip
    notes = [f"# note: {note}" for note in settings.notes]
    return "\n".join([*head, *notes, *lines]) + "\n" + extra


def _entry(settings: Settings, path: str, value: Any, indent: str) -> Iterator[str]:
    if reason := settings.reasons.get(path):
        yield f"{indent}# {reason}"
    key = path.rpartition(".")[2]
    if isinstance(value, Mapping) and path not in settings.reasons:
        yield f"{indent}{key}:"
        for inner, item in value.items():
            yield from _entry(settings, f"{path}.{inner}", item, indent + "  ")
    else:
        yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").rstrip("\n")
