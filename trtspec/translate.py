"""The same deployment in another server's flags, and what it loses there.

Flags are those of vLLM 0.33, SGLang 0.5.23 and llama.cpp's llama-server of autumn 2026. What a server has no word
for is said, never dropped in silence; what is second-hand is marked (unconfirmed).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtspec.errors import PlanInfeasible
from trtspec.files import JSON

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.config import Config

# Formats whose exported checkpoints vLLM and SGLang load, by the name SGLang's --quantization has.
_MODELOPT = {"fp8": "modelopt_fp8", "nvfp4": "modelopt_fp4"}
# llama.cpp's nearest weight type to a format; blocks and scales are its own.
_GGUF = {"none": "bf16", "fp8": "q8_0", "int8_weight_only": "q8_0", "int8_smoothquant": "q8_0"}


@dataclass(slots=True)
class Translation:
    """command: argv. files: name → text that the command reads. lost: settings without an equivalent."""

    server: str
    command: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def flag(self, name: str, value: object = None) -> None:
        """Append a flag, with its value if it takes one."""
        self.command += [name] if value is None else [name, str(value)]

    @property
    def line(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command)


def translate(config: Config, plan: Mapping[str, JSON], facts: ArchitectureFacts, server: str) -> Translation:
    """A planned deployment for one of SERVERS. facts: of the target.

    Raises PlanInfeasible where the server has no such method, naming those that have.
    """
    made = Translation(server)
    SERVERS[server](config, plan, facts, made)
    _common_losses(config, made)
    return made


def _vllm(config: Config, plan: Mapping[str, JSON], _facts: ArchitectureFacts, made: Translation) -> None:
    engine = config.engine
    made.command = ["vllm", "serve", _hf_model(config, made)]
    _identity(config, made)
    made.flag("--max-num-seqs", engine.max_batch_size)
    if engine.max_seq_len:
        made.flag("--max-model-len", engine.max_seq_len)
    data_parallel = plan["engine"]["attention_dp"]
    if engine.tensor_parallel > 1:
        made.flag(
            "--data-parallel-size" if data_parallel else "--tensor-parallel-size", engine.tensor_parallel
        )
    if engine.pipeline_parallel > 1:
        made.flag("--pipeline-parallel-size", engine.pipeline_parallel)
    if engine.expert_parallel > 1 or data_parallel:
        made.flag("--enable-expert-parallel")
        if engine.expert_parallel not in (1, engine.tensor_parallel):
            made.lost.append("engine.expert_parallel: experts are split over all tensor-parallel ranks")
    if config.target.kv_cache == "fp8":
        made.flag("--kv-cache-dtype", "fp8")
    method = str(plan["method"])
    if method == "none":
        return
    section = config.speculation
    words: dict[str, dict[str, Any]] = {
        "ngram": {
            "method": "ngram",
            "prompt_lookup_max": getattr(section, "max_ngram", 8),
            "prompt_lookup_min": getattr(section, "min_ngram", 1),
        },
        "suffix": {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": getattr(section, "max_tree_depth", 24),
            "suffix_decoding_max_spec_factor": getattr(section, "max_spec_factor", 1.0),
            "suffix_decoding_min_token_prob": getattr(section, "min_token_probability", 0.1),
            "suffix_decoding_max_cached_requests": 0,
        },
        "draft_model": {"method": "draft_model"},
        "pard": {"method": "draft_model", "parallel_drafting": True},
        "medusa": {"method": "medusa"},
        "eagle": {"method": "eagle"},
        "eagle2": {"method": "eagle"},
        "eagle3": {"method": "eagle3"},
        "p_eagle": {"method": "eagle3", "parallel_drafting": True},
        "mtp": {"method": "mtp"},
        "dflash": {"method": "dflash"},
        "dspark": {"method": "dspark"},
    }
    speculative = {**_known(words, method, "vLLM"), "num_speculative_tokens": int(plan["draft_length"])}
    if draft := _draft(config, made):
        speculative["model"] = draft
    if method == "suffix":
        made.notes.append("suffix decoding needs the package arctic-inference")
    if ranges := _ranges(plan):
        speculative["num_speculative_tokens_per_batch_size"] = ranges
    _tree_is_a_chain(config, method, made)
    if method != "suffix":
        _full_length(config, made)
    made.flag("--speculative-config", json.dumps(speculative))


def _sglang(config: Config, plan: Mapping[str, JSON], _facts: ArchitectureFacts, made: Translation) -> None:
    engine = config.engine
    made.command = ["python3", "-m", "sglang.launch_server", "--model-path", _hf_model(config, made)]
    _identity(config, made)
    if config.target.quantization in _MODELOPT:
        made.flag("--quantization", _MODELOPT[config.target.quantization])
    made.flag("--max-running-requests", engine.max_batch_size)
    if engine.max_seq_len:
        made.flag("--context-length", engine.max_seq_len)
    sizes = {"--tp-size": engine.tensor_parallel, "--pp-size": engine.pipeline_parallel}
    for name, size in {**sizes, "--ep-size": engine.expert_parallel}.items():
        if size > 1:
            made.flag(name, size)
    if config.target.kv_cache == "fp8":
        made.flag("--kv-cache-dtype", "fp8_e4m3")
    method, length = str(plan["method"]), int(plan["draft_length"])
    if plan["engine"]["attention_dp"] and method == "ngram":
        made.lost.append("attention-DP: NGRAM does not run with it")
    elif plan["engine"]["attention_dp"]:
        made.flag("--enable-dp-attention")
        made.flag("--dp-size", engine.tensor_parallel)
        if method == "dspark":
            made.flag("--enable-dp-lm-head")
    if method == "none":
        return
    section = config.speculation
    words = {
        "ngram": "NGRAM",
        "draft_model": "STANDALONE",
        "eagle": "EAGLE",
        "eagle2": "EAGLE",
        "eagle3": "EAGLE3",
        "mtp": "EAGLE",
        "dflash": "DFLASH",
        "dspark": "DSPARK",
    }
    made.flag("--speculative-algorithm", _known(words, method, "SGLang"))
    draft = _draft(config, made)
    if draft:
        made.flag("--speculative-draft-model-path", draft)
    if draft and config.target.quantization != "none" and section.draft.quantization == "none":
        made.flag("--speculative-draft-model-quantization", "unquant")  # else it takes the target's
    if method == "ngram":
        depth = getattr(section, "max_ngram", 8) + length
        made.flag("--speculative-ngram-max-trie-depth", depth)
        made.flag("--speculative-ngram-max-bfs-breadth", 1)
        made.notes.append(
            "the trie holds matched n-gram and continuation, so its depth is the sum of both (derived)"
        )
        if getattr(section, "min_ngram", 1) > 1:
            made.lost.append("speculation.min_ngram")
    elif method == "dspark":
        made.flag("--speculative-dspark-block-size", length)
    elif method != "dflash":
        topk = (
            section.top_k if getattr(section, "shape", "chain") == "tree" and hasattr(section, "top_k") else 1
        )
        made.flag("--speculative-num-steps", length)
        made.flag("--speculative-eagle-topk", topk)
        if topk == 1 and config.workload.temperature > 0 and config.lossless:
            made.flag("--speculative-use-rejection-sampling")
            made.notes.append(
                "rejection sampling, off by default, keeps the target's distribution (unconfirmed)"
            )
    _full_length(config, made)
    made.flag("--speculative-num-draft-tokens", length + 1)  # the token before the drafts counts
    if _ranges(plan):
        made.lost.append("the schedule of draft lengths by batch size: one length for all")


def _llama_cpp(config: Config, plan: Mapping[str, JSON], facts: ArchitectureFacts, made: Translation) -> None:
    engine, section = config.engine, config.speculation
    made.command = ["llama-server", "--model", "target.gguf", "--alias", config.serving.model_name]
    made.flag("--host", config.serving.address)
    made.flag("--port", config.serving.http_port)
    slots, longest = engine.max_batch_size, engine.max_seq_len or facts.max_position_embeddings
    made.flag("--parallel", slots)
    if longest:
        made.flag("--ctx-size", slots * longest)
        made.notes.append(f"--ctx-size is shared by all slots: {slots} × {longest}")
    if engine.device != "cpu":
        made.flag("--n-gpu-layers", 999)
    elif engine.threads:
        made.flag("--threads", engine.threads)
    kind = _GGUF.get(config.target.quantization)
    made.notes.append(
        f"target.gguf: convert_hf_to_gguf.py {_original(config)} --outtype {kind or 'bf16'} --outfile target.gguf"
        + ("" if kind else ", then llama-quantize target.gguf Q4_K_M")
    )
    if config.target.quantization != "none":
        made.lost.append(
            f"target.quantization {config.target.quantization}: {kind or 'Q4_K_M'} is the nearest type"
        )
    if config.target.kv_cache == "fp8":
        made.flag("--cache-type-k", "q8_0")
        made.flag("--cache-type-v", "q8_0")
        made.lost.append("target.kv_cache fp8: q8_0 is the nearest type")
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        if getattr(engine, name) > 1:
            made.lost.append(f"engine.{name}: GPUs are shared out by --split-mode and --tensor-split")
    if plan["engine"]["attention_dp"]:
        made.lost.append("attention-DP: every sequence runs on all GPUs")
    method, length = str(plan["method"]), int(plan["draft_length"])
    if method == "none":
        return
    words = {
        "ngram": "ngram-simple",
        "draft_model": "draft-simple",
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
        "dflash": "draft-dflash",
        "dspark": "draft-dspark",
    }
    made.flag("--spec-type", _known(words, method, "llama.cpp"))
    if method == "ngram":
        made.flag("--spec-ngram-simple-size-n", getattr(section, "max_ngram", 8))
        made.flag("--spec-ngram-simple-size-m", length)
        made.lost.append("speculation.min_ngram: one n-gram size is looked up, and shorter ones are not")
    elif (draft := getattr(section, "draft", None)) is not None:
        made.flag("--model-draft", "draft.gguf")
        outtype = _GGUF.get(draft.quantization, "bf16")
        made.notes.append(
            f"draft.gguf: convert_hf_to_gguf.py {draft.model} --outtype {outtype} --outfile draft.gguf"
        )
        if draft.quantization != "none":
            made.lost.append(
                f"speculation.draft.quantization {draft.quantization}: {outtype} is the nearest type"
            )
        if method == "eagle3":
            made.notes.append(f"an EAGLE-3 head is converted with --target-model-dir {_original(config)}")
    made.flag("--spec-draft-n-max", length)
    if method == "draft_model":
        made.flag("--spec-draft-p-min", section.min_token_probability)
    else:
        _full_length(config, made)
    if (shortest := getattr(section, "min_draft_length", 1)) > 1:
        made.flag("--spec-draft-n-min", shortest)
    _tree_is_a_chain(config, method, made)
    if _ranges(plan):
        made.lost.append("the schedule of draft lengths by batch size: one length for all")


def _trtllm_serve(
    config: Config, plan: Mapping[str, JSON], facts: ArchitectureFacts, made: Translation
) -> None:
    from trtspec.trtllm.derive import derive, settings_text

    engine, target = config.engine, config.target
    if engine.backend != "tensorrt_llm":
        device = "h100-sxm" if engine.device == "cpu" else engine.device
        engine = engine.model_copy(update={"backend": "tensorrt_llm", "device": device, "version": None})
        made.notes.append(f"kernels are assumed to be those of {device}")
    if target.quantization != "none" and config.engine.backend != "tensorrt_llm":
        made.lost.append(
            f"target.quantization {target.quantization}: set engine.backend: tensorrt_llm to build for it"
        )
        target = target.model_copy(update={"quantization": "none"})
    section = config.speculation
    draft = getattr(section, "draft", None)
    if draft is not None and draft.quantization != "none" and config.engine.backend != "tensorrt_llm":
        made.lost.append(
            f"speculation.draft.quantization {draft.quantization}: the draft is served as it was"
        )
        draft = draft.model_copy(update={"quantization": "none"})
        section = section.model_copy(update={"draft": draft})
    moved = config.model_copy(update={"engine": engine, "target": target, "speculation": section})
    built = draft is not None and draft.quantization != "none"  # then it is that folder of the build
    settings = derive(moved, plan, facts, draft="draft" if built else draft and draft.model)
    model = _original(config) if target.quantization == "none" else "target"
    made.files["trtllm-serve.yaml"] = settings_text(settings, leave_out=("model",))
    made.command = ["trtllm-serve", model, "--backend", "pytorch"]
    made.flag("--host", config.serving.address)
    made.flag("--port", config.serving.http_port)
    made.flag("--config", "trtllm-serve.yaml")
    if built or model == "target":
        made.notes.append(
            "`target` and `draft` are folders of the build: run this in it, after trtspec build"
        )
    made.notes += [f"for TensorRT-LLM {settings.version}", *settings.notes]


SERVERS: Mapping[str, Callable[[Config, Mapping[str, JSON], ArchitectureFacts, Translation], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm-serve": _trtllm_serve,
    "llama.cpp": _llama_cpp,
}


def _identity(config: Config, made: Translation) -> None:
    target, serving = config.target, config.serving
    if target.revision and target.quantization == "none":
        made.flag("--revision", target.revision)
    if target.trust_remote_code == target.model:
        made.flag("--trust-remote-code")
    made.flag("--served-model-name", serving.model_name)
    made.flag("--host", serving.address)
    made.flag("--port", serving.http_port)


def _original(config: Config) -> str:
    """The target before quantization; a model inside a package is a folder only after a build."""
    return "target" if _packaged(config) else config.target.model


def _packaged(config: Config) -> bool:
    from trtspec.config.references import PACKAGE_PREFIX

    return config.target.model.startswith(PACKAGE_PREFIX)


def _hf_model(config: Config, made: Translation) -> str:
    """What a server of Hugging Face checkpoints loads: the model, or the build's folder where that is another one."""
    quantization = config.target.quantization
    if quantization != "none" and quantization not in _MODELOPT:
        made.lost.append(
            f"target.quantization {quantization}: not loaded from ModelOpt's layout; served as it was"
        )
        return _original(config)
    if quantization != "none" or _packaged(config):
        made.notes.append("`target` is that folder of the build: run this in it, after trtspec build")
        return "target"
    return config.target.model


def _draft(config: Config, made: Translation) -> str | None:
    draft = getattr(config.speculation, "draft", None)
    if draft is None:
        return None
    if draft.quantization != "none":
        made.lost.append(
            f"speculation.draft.quantization {draft.quantization}: the draft is served as it was"
        )
    return draft.model


def _known(words: Mapping[str, Any], method: str, server: str) -> Any:
    if method not in words:
        raise PlanInfeasible(
            f"{server} has no {method} speculation",
            where="speculation.method",
            hint=f"it has {', '.join(['none', *words])}",
        )
    return words[method]


def _ranges(plan: Mapping[str, JSON]) -> list[list[int]]:
    """[first batch, last batch, draft length] of a plan that follows a schedule; empty for one fixed length."""
    if plan["draft_length_policy"] != "schedule":
        return []
    ranges, first = [], 1
    for batch, length in sorted((int(batch), length) for batch, length in plan["schedule"].items()):
        ranges.append([first, batch, min(length, int(plan["draft_length"]))])
        first = batch + 1
    return ranges


def _tree_is_a_chain(config: Config, method: str, made: Translation) -> None:
    if (
        method in ("medusa", "eagle", "eagle2", "eagle3")
        and getattr(config.speculation, "shape", "") == "tree"
    ):
        made.lost.append("speculation.shape tree: drafted as a chain")


def _full_length(config: Config, made: Translation) -> None:
    """Where a server has no threshold at which drafts end early."""
    for name in ("min_token_probability", "min_path_probability"):
        if value := getattr(config.speculation, name, 0):
            made.lost.append(f"speculation.{name} {value:g}: drafts keep their length")


def _common_losses(config: Config, made: Translation) -> None:
    speculation, serving = config.speculation, config.serving
    if config.verification.acceptance != "exact":
        made.lost.append(
            f"verification.acceptance {config.verification.acceptance}: drafts are judged exactly"
        )
    if getattr(speculation, "pool_tokens", 0):
        made.lost.append("speculation.pool_tokens: requests share no pool of bounded size")
    if getattr(speculation, "draft_length_policy", "auto") == "adaptive":
        made.lost.append("speculation.draft_length_policy adaptive: the length stays")
    if config.engine.numerics == "exact" and config.engine.backend == "onnxruntime":
        made.lost.append(
            "engine.numerics exact: greedy output can differ where two tokens are nearly as likely"
        )
    if serving.instances > 1:
        made.lost.append("serving.instances: start the command once for each, on ports of their own")
    made.notes.append(
        f"requests wait without trtspec's limit of serving.max_queue_size {serving.max_queue_size}"
    )
