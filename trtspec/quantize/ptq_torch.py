"""ModelOpt post-training quantization of a causal language model, and its unified Hugging Face export."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from torch import nn

from trtspec.checkpoints.hf_folder import SOURCE_RECORD, patch_json, quiet_transformers
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.errors import PlanInfeasible, SetupError, StageFailed
from trtspec.events import Emit, Event, Note, Progress
from trtspec.quantize.corpora import calibration_batches
from trtspec.quantize.formats import Format, FormatPlan, check_format
from trtspec.quantize.nvfp4_torch import nvfp4_on_cpu
from trtspec.quantize.quant_cfg_torch import (
    assemble,
    default_disabled,
    excluded_by_request,
    modelopt_config,
    odd_outputs,
)
from trtspec.quantize.score_torch import text_loss
from trtspec.quantize.stage import STAGE, ModuleReport, QuantizeRequest

Batch = list[list[int]]  # token ids of texts of one length


@dataclass(frozen=True, slots=True)
class Outcome:
    """first_loss: loss per token of the calibrated model in memory on the first held-out text."""

    plan: FormatPlan
    lm_head: str | None
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...]
    first_loss: float
    calibration_samples: int
    calibration_tokens: int
    versions: dict[str, str]


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The folder's own tokenizer; SetupError when it has none."""
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the model folder has no usable tokenizer: {error}",
            where=str(folder),
            hint="put the model's tokenizer.json and tokenizer_config.json beside its weights",
        ) from None


def quantize_and_export(
    request: QuantizeRequest,
    chosen: Format,
    tokenizer: Any,
    first_text: Sequence[int],
    into: Path,
    emit: Emit,
) -> Outcome:
    """Calibrate, quantize and export `request.model` into the folder `into`, complete with its side files."""
    model, notes = load_model(request.model, request.trust_remote_code)
    lm_head = _output_layer(model)
    if request.quantize_lm_head:
        notes += _untie(model, lm_head)
    config = modelopt_config(chosen)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    skipped = excluded_by_request(request.exclude, linears)
    disabled = default_disabled(config, keep=lm_head if request.quantize_lm_head else None)
    candidates = {
        name: module.in_features
        for name, module in linears.items()
        if name not in skipped
        and not any(fnmatch.fnmatchcase(f"{name}.weight_quantizer", d) for d in disabled)
    }
    odd = odd_outputs(chosen, candidates, linears)
    if chosen.config is None:
        plan = FormatPlan(chosen.name, None, (), (), ())
    else:
        widths = {name: width for name, width in candidates.items() if name not in odd}
        plan = check_format(chosen.name, widths, request.block_size)
    if request.quantize_lm_head and lm_head not in plan.quantized:
        width, rows = linears[lm_head].in_features, linears[lm_head].out_features
        raise PlanInfeasible(
            f"quantize_lm_head: {chosen.name} cannot hold {lm_head} of [{rows}, {width}]",
            hint="set `quantize_lm_head: false`, or use int8_weight_only or fp8",
        )
    keep = (*skipped, *plan.excluded, *odd)
    config = assemble(config, plan, disabled, keep, fp8_kv=request.kv_cache == "fp8")

    notes += (*plan.notes, *(f"{name}: left at 16 bits, an odd number of outputs" for name in odd))
    for note in notes:
        emit(Note(STAGE, note))

    batches = []
    if chosen.calibrated or request.kv_cache == "fp8":
        batches = calibration_batches(
            tokenizer, request.calibration_samples, request.calibration_tokens, request.seed
        )
    with nvfp4_on_cpu(), _quiet(emit) as emit:
        _calibrate(model, config, batches, request, emit)
        _check_scales(model)
        first_loss = text_loss(model, first_text)
        emit(Progress(STAGE, "export", 0, 1))
        with torch.inference_mode():
            export_hf_checkpoint(model, dtype=model.dtype, export_dir=into)
    _complete_folder(request.model, into, chosen, str(model.dtype).removeprefix("torch."))
    emit(Progress(STAGE, "export", 1, 1))
    reasons = {
        **dict.fromkeys(plan.excluded, "its width is no multiple of the block"),
        **dict.fromkeys(odd, "its height is odd"),
        **dict.fromkeys(skipped, "excluded by the request"),
    }
    modules = tuple(
        ModuleReport(
            name,
            (module.out_features, module.in_features),
            chosen.quant_algo if name in plan.quantized else "16-bit",
            None if name in plan.quantized else reasons.get(name, "kept by default"),
        )
        for name, module in linears.items()
    )
    return Outcome(
        plan=plan,
        lm_head=lm_head,
        modules=modules,
        notes=notes,
        first_loss=first_loss,
        calibration_samples=sum(map(len, batches)),
        calibration_tokens=sum(len(ids) for batch in batches for ids in batch),
        versions={
            name: importlib.metadata.version(name) for name in ("nvidia-modelopt", "torch", "transformers")
        },
    )


def load_model(folder: Path, trust_remote_code: bool = False) -> tuple[nn.Module, tuple[str, ...]]:
    """The model in 16 bits (float16 stays, everything else becomes bfloat16) and notes for the reader.

    Where config.json does not say whether the output layer is tied, the presence of its tensor decides.
    StageFailed for tensors the files lack or that are not finite.
    """
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text_config = stated.get("text_config", stated)
    notes: tuple[str, ...] = ()
    overrides = {}
    if "tie_word_embeddings" not in text_config and "tie_word_embeddings" not in stated:
        tied = not any(name.endswith("lm_head.weight") for name in TensorFolder(folder))
        overrides["tie_word_embeddings"] = tied
        notes = (
            "config.json does not say whether the output layer is tied; "
            + ("there is no lm_head.weight, so it is" if tied else "lm_head.weight exists, so it is not"),
        )
    half = "float16" in (text_config.get("torch_dtype"), text_config.get("dtype"))
    with quiet_transformers():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float16 if half else torch.bfloat16,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **overrides,
        )
    if missing := sorted(info["missing_keys"]):
        raise StageFailed(
            f"the weights lack {len(missing)} tensor(s) the config asks for, first {missing[0]}",
            where=str(folder),
        )
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise StageFailed(f"{name} holds values that are not finite", where=str(folder))
    model.eval()
    return (model.cuda() if torch.cuda.is_available() else model), notes


def _output_layer(model: nn.Module) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _untie(model: nn.Module, lm_head: str) -> tuple[str, ...]:
    """Give the output layer its own weight where it shares the embedding's, so that it can be quantized alone."""
    head = model.get_submodule(lm_head)
    if head.weight is not model.get_input_embeddings().weight:
        return ()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
    return (
        f"{lm_head} was tied to the embedding: untied, quantized on its own, the embedding stays at 16 bits",
    )


def _calibrate(
    model: nn.Module, config: dict, batches: Sequence[Batch], request: QuantizeRequest, emit: Emit
) -> None:
    """Run ModelOpt; `batches` flow through the model once per pass of its algorithm (AWQ makes several)."""
    passes, total = 0, sum(map(len, batches))

    def forward(module: nn.Module) -> None:
        nonlocal passes
        passes += 1
        task, done = "calibrate" if passes == 1 else f"calibrate, pass {passes}", 0
        emit(Progress(STAGE, task, done, total, "text"))
        for batch in batches:
            module(torch.tensor(batch, device=model.device), use_cache=False)
            done += len(batch)
            emit(Progress(STAGE, task, done, total, "text"))

    try:
        with torch.inference_mode():
            mtq.quantize(model, config, forward if batches else None)
    except AssertionError as error:  # ModelOpt's own check of what it measures
        raise StageFailed(
            f"calibration met values that are not finite{_first_not_finite(request, batches)}: {error}",
            where=str(request.model),
            hint="the weights overflow in 16 bits: check the model, or use a weight-only format",
        ) from None


def _first_not_finite(request: QuantizeRequest, batches: Sequence[Batch]) -> str:
    """The first module of a fresh copy of the model whose input is not finite, as " at NAME"."""
    model, _ = load_model(request.model, request.trust_remote_code)
    found: list[str] = []

    def watch(name: str) -> Callable:
        def check(_module: nn.Module, inputs: tuple) -> None:
            if not found and not torch.isfinite(inputs[0]).all():
                found.append(name)

        return check

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        for batch in batches:
            model(torch.tensor(batch, device=model.device), use_cache=False)
            if found:
                return f" at the input of {found[0]}"
    return ""


def _check_scales(model: nn.Module) -> None:
    """Every enabled quantizer measured a finite range; inputs also a positive one.

    ModelOpt's exporter would replace a missing range by a default and go on.
    """
    for name, quantizer in model.named_modules():
        if (
            not hasattr(quantizer, "is_enabled")
            or not quantizer.is_enabled
            or not hasattr(quantizer, "_amax")
        ):
            continue
        amax = quantizer._amax
        positive = "weight_quantizer" in name or bool((amax > 0).all())
        if not torch.isfinite(amax).all() or not positive:
            raise StageFailed(
                f"the range measured for {name} is not finite and positive",
                hint="calibration never reached that layer, or its values overflow: check the model",
            )


@contextlib.contextmanager
def _quiet(emit: Emit) -> Iterator[Emit]:
    """Silence ModelOpt, which prints, warns and logs: stdout belongs to `--json`, and our own checks say more.

    Gives an `emit` whose listeners still write to the real stdout.
    """
    real = sys.stdout

    def aloud(event: Event) -> None:
        with contextlib.redirect_stdout(real):
            emit(event)

    with contextlib.redirect_stdout(io.StringIO()), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield aloud


_WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
)
_OWN_FILES = ("config.json", "hf_quant_config.json", SOURCE_RECORD)


def _complete_folder(source: Path, into: Path, chosen: Format, dtype: str) -> None:
    """Add what ModelOpt's export leaves out: tokenizer, generation config, licence, keys older readers need."""
    for path in into.glob("*.safetensors"):
        path.chmod(0o644)  # written 0600
    for path in sorted(source.iterdir()):
        weight = any(path.match(pattern) for pattern in _WEIGHT_FILES)
        if path.is_file() and not weight and path.name not in _OWN_FILES and not path.name.startswith("."):
            (into / path.name).write_bytes(path.read_bytes())
    config = json.loads((into / "config.json").read_text(encoding="utf-8"))
    changes = {"torch_dtype": dtype}
    if (theta := (config.get("rope_parameters") or {}).get("rope_theta")) is not None:
        changes["rope_theta"] = theta
    label_path = into / "hf_quant_config.json"
    label = json.loads(label_path.read_text(encoding="utf-8"))
    quantization = label["quantization"]
    if chosen.name == "int4_weight_only":
        # ModelOpt calls plain INT4 blocks AWQ; no scale was searched and there is none in the file.
        quantization |= {"quant_algo": chosen.quant_algo, "pre_quant_scale": False}
        changes["quantization_config"] = config["quantization_config"] | {"quant_algo": chosen.quant_algo}
    label["quantization"] = {key: value for key, value in quantization.items() if value not in (None, {})}
    label_path.write_text(json.dumps(label, indent=2) + "\n")
    patch_json(into / "config.json", **changes)
