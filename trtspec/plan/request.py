"""What is asked of the planner, from a config or from bare arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trtspec.config import Config

DraftLengthPolicy = Literal["fixed", "schedule", "adaptive"]
AttentionDp = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One planning problem. Names and units are the config's; see its fields.

    must_fit: whether a plan that does not fit the memory is refused (a build) or only said (an exploration).
    probe_rows: rows of lookahead's window besides the last known token, W·(N − 1) − 1.
    draft_quantization: None takes what is usual for the method. kv_group: tokens of QuantSpec's quantized groups.
    other_draft_quantizations: of SpecInfer's drafts after the first.
    draft_shape, choices: of the trees of heads, see the config's speculation.shape and speculation.choices.
    only_free: whether `method: auto` may choose only mechanisms that need nothing supplied or trained.
    """

    device: str
    backend: str
    method: str = "auto"
    draft_length: int | Literal["auto"] = "auto"
    draft_length_policy: DraftLengthPolicy | Literal["auto"] = "auto"
    version: str | None = None
    quantization: str = "none"
    quantize_lm_head: bool = False
    block_size: int | None = None
    kv_cache: str = "auto"
    draft_quantization: str | None = None
    other_draft_quantizations: tuple[str, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_dp: AttentionDp = "auto"
    max_batch_size: int = 32
    max_seq_len: int | None = None
    draft_shape: Literal["tree", "chain"] = "tree"
    choices: tuple[tuple[int, ...], ...] | None = None
    exact: bool = True
    batch_sizes: tuple[int, ...] = (1,)
    context: int = 1024
    output_length: int = 256
    temperature: float = 0.0
    max_itl_ms: float | None = None
    max_ttft_ms: float | None = None
    acceptance: tuple[float, ...] | None = None
    probe_rows: int = 7
    kv_group: int = 64
    must_fit: bool = True
    only_free: bool = True


def request_from(config: Config) -> PlanRequest:
    """The planning problem of a config. Only attributes are read."""
    target, engine, workload, speculation = config.target, config.engine, config.workload, config.speculation
    drafts = [d for d in (getattr(speculation, "draft", None), *getattr(speculation, "drafts", ())) if d]
    options = {}
    if speculation.method == "lookahead":
        options["probe_rows"] = speculation.window_size * (speculation.ngram_size - 1) - 1
    if speculation.method == "quantspec":
        options["kv_group"] = speculation.kv_group_size
    return PlanRequest(
        device=engine.device,
        backend=engine.backend,
        method=speculation.method,
        draft_length=getattr(speculation, "draft_length", "auto"),
        draft_length_policy=getattr(speculation, "draft_length_policy", "auto"),
        version=engine.version,
        quantization=target.quantization,
        quantize_lm_head=target.quantize_lm_head,
        block_size=target.block_size,
        kv_cache=target.kv_cache,
        draft_quantization=drafts[0].quantization
        if drafts
        else getattr(speculation, "draft_quantization", None),
        other_draft_quantizations=tuple(d.quantization for d in drafts[1:]),
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        attention_dp=engine.attention_dp,
        max_batch_size=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        draft_shape=getattr(speculation, "shape", "tree"),
        choices=getattr(speculation, "choices", None),
        exact=engine.numerics == "exact",
        batch_sizes=tuple(workload.batch_sizes),
        context=workload.context,
        output_length=workload.output_length,
        temperature=workload.temperature,
        max_itl_ms=workload.max_itl_ms,
        max_ttft_ms=workload.max_ttft_ms,
        acceptance=tuple(workload.acceptance) if workload.acceptance else None,
        **options,
    )
