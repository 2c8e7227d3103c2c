"""The quantize stage: perplexity before, ModelOpt, export, verification, perplexity after, the gate, the report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trtspec.errors import PlanInfeasible, SetupError, StageFailed
from trtspec.events import Emit, silent
from trtspec.files import link_or_copy, pretty_json
from trtspec.quantize.formats import FORMATS, FormatPlan, get_format

STAGE = "quantize"
REPORT = "quantization_report.json"
# In-memory and re-read exports differ by 16-bit against 32-bit arithmetic, and AWQ re-rounds when it folds scales.
_EXPORT_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """What to quantize and how.

    model: a checked folder of safetensors with its tokenizer. format: a name of FORMATS. exclude: globs of
    module names kept at 16 bits, each must match one. calibration_tokens: the most tokens taken of each of
    `calibration_samples` texts. max_perplexity_increase: relative, 0.05 is 5 %.
    """

    model: Path
    format: str
    kv_cache: Literal["auto", "fp8"] = "auto"
    quantize_lm_head: bool = False
    block_size: int | None = None
    exclude: tuple[str, ...] = ()
    calibration_samples: int = 32
    calibration_tokens: int = 256
    seed: int = 0
    max_perplexity_increase: float = 0.05
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One Linear: `format` is the label it was exported under, or "16-bit" with the reason."""

    name: str
    shape: tuple[int, int]
    format: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize` did. Perplexities are None where nothing was changed.

    perplexity_*: exp of the mean negative log-likelihood per token over the held-out text, both computed in
    float32 from files: the original's, and the exported tensors dequantized, with the input and KV quantization
    the format prescribes. export_difference: relative, of the loss on one text from the exported files against
    ModelOpt's model in memory. weight_bytes_*: tensors on disk. calibration_tokens: tokens run; 0 when none.
    """

    format: str
    quant_algo: str | None
    kv_cache: str
    block_size: int | None
    lm_head_quantized: bool
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_increase: float | None
    export_difference: float | None
    heldout_tokens: int
    calibration_samples: int
    calibration_tokens: int
    seed: int
    weight_bytes_before: int
    weight_bytes_after: int
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]


def quantize(request: QuantizeRequest, into: Path, emit: Emit = silent) -> QuantizeReport:
    """Quantize `request.model` into the empty folder `into` and return the report, also written there as JSON.

    `into` becomes a unified Hugging Face export with tokenizer, generation config and licence. Format "none"
    with kv_cache "auto" links the model's files. Raises PlanInfeasible (the format does not fit the model),
    SetupError (ModelOpt missing or too old) and StageFailed (a non-finite scale, an export whose label and
    tensors disagree, perplexity above the limit); `into` must then be thrown away.
    """
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise StageFailed("the folder to export into is not empty", where=str(into))
    if request.format == "none" and request.kv_cache == "auto":
        report = _link(request, into)
    else:
        report = _run(request, into, emit)
    (into / REPORT).write_text(pretty_json(asdict(report)))
    return report


def _link(request: QuantizeRequest, into: Path) -> QuantizeReport:
    """The unquantized model under a new folder; one that came quantized must pass the export's checks first."""
    from trtspec.checkpoints.safetensors_files import TensorFolder
    from trtspec.quantize.verify import can_verify, verify_export

    if (request.model / "hf_quant_config.json").is_file() and can_verify(request.model):
        verify_export(request.model)
    for path in sorted(request.model.iterdir()):
        if path.is_file() and path.name != REPORT and not path.name.startswith("."):
            link_or_copy(path, into / path.name)
    size = TensorFolder(into).total_bytes
    return QuantizeReport(
        format="none",
        quant_algo=None,
        kv_cache="auto",
        block_size=None,
        lm_head_quantized=False,
        perplexity_before=None,
        perplexity_after=None,
        perplexity_increase=None,
        export_difference=None,
        heldout_tokens=0,
        calibration_samples=0,
        calibration_tokens=0,
        seed=request.seed,
        weight_bytes_before=size,
        weight_bytes_after=size,
        modules=(),
        notes=(),
        versions={},
    )


def _run(request: QuantizeRequest, into: Path, emit: Emit) -> QuantizeReport:
    chosen = get_format(request.format)
    _refuse_quantized(request.model)
    try:
        from trtspec.quantize import ptq_torch, score_torch
    except ImportError as error:
        raise SetupError(f"quantizing needs {error.name}", hint="run: pip install 'trtspec[cpu]'") from None
    from trtspec.checkpoints.safetensors_files import TensorFolder
    from trtspec.quantize.corpora import heldout_ids
    from trtspec.quantize.verify import verify_export

    tokenizer = ptq_torch.load_tokenizer(request.model, request.trust_remote_code)
    heldout = heldout_ids(tokenizer)
    trust, dtype = request.trust_remote_code, score_torch.scoring_dtype(request.model)
    before = score_torch.perplexity(
        request.model, heldout, dtype, emit, "perplexity before", trust_remote_code=trust
    )
    outcome = ptq_torch.quantize_and_export(request, chosen, tokenizer, heldout[0], into, emit)
    verify_export(
        into,
        quantized=outcome.plan.quantized,
        kept=[module.name for module in outcome.modules if module.format == "16-bit"],
        kv_cache="FP8" if request.kv_cache == "fp8" else None,
    )
    after = score_torch.perplexity(into, heldout, dtype, emit, "perplexity after", trust_remote_code=trust)
    difference = _check_export_equals_memory(outcome.first_loss, after.losses[0], request, into)
    increase = after.perplexity / before.perplexity - 1
    _gate(request, before.perplexity, after.perplexity, outcome.plan)
    return QuantizeReport(
        format=request.format,
        quant_algo=chosen.quant_algo,
        kv_cache=request.kv_cache,
        block_size=outcome.plan.block_size,
        lm_head_quantized=outcome.lm_head in outcome.plan.quantized,
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        perplexity_increase=increase,
        export_difference=difference,
        heldout_tokens=before.tokens,
        calibration_samples=outcome.calibration_samples,
        calibration_tokens=outcome.calibration_tokens,
        seed=request.seed,
        weight_bytes_before=TensorFolder(request.model).total_bytes,
        weight_bytes_after=TensorFolder(into).total_bytes,
        modules=outcome.modules,
        notes=outcome.notes,
        versions=outcome.versions,
    )


def _refuse_quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config")
    if found or (folder / "hf_quant_config.json").is_file():
        label = (found or {}).get("quant_algo") or (found or {}).get("quant_method") or "ModelOpt"
        raise PlanInfeasible(
            f"the model is quantized already ({label}); quantizing it again only adds error",
            where=str(folder / "config.json"),
            hint="use `quantization: none` to serve it as it is, or name the 16-bit model",
        )


def _check_export_equals_memory(memory: float, export: float, request: QuantizeRequest, into: Path) -> float:
    """The relative difference of the two losses; StageFailed when the files are not what was calibrated."""
    difference = abs(export - memory) / memory
    if not difference <= _EXPORT_TOLERANCE:
        raise StageFailed(
            f"the exported {request.format} tensors do not reproduce the model that was calibrated: loss per "
            f"token {export:.4f} from the files, {memory:.4f} in memory",
            where=str(into),
            hint="this is a defect of the exporter for this model; choose another format",
        )
    return difference


def _gate(request: QuantizeRequest, before: float, after: float, plan: FormatPlan) -> None:
    """StageFailed when perplexity rose above the limit (or is not a number)."""
    increase = after / before - 1
    if increase <= request.max_perplexity_increase:
        return
    bits = FORMATS[request.format].weight_bits
    safer = [name for name in ("int8_weight_only", "fp8") if name != request.format]
    advice = f"{' or '.join(safer)} usually stay{'s' if len(safer) == 1 else ''} within 5 % on small models; "
    if plan.block_size and plan.block_size > 32 and not FORMATS[request.format].fixed_block:
        advice += f"a smaller `block_size` (now {plan.block_size}) loses less; "
    if bits == 4:
        advice += "4-bit formats lose little only on models of several billion parameters; "
    raise StageFailed(
        f"{request.format} raises perplexity on held-out text by {increase:.1%} ({before:.3f} → {after:.3f}), "
        f"above max_perplexity_increase {request.max_perplexity_increase:.1%}",
        where="target.quantization",
        hint=f"{advice}to accept the loss set target.max_perplexity_increase: {_round_up(increase)}",
    )


def _round_up(value: float) -> float:
    """`value` rounded up to two digits after the point: the smallest readable limit that admits it."""
    return int(value * 100 + 1) / 100
