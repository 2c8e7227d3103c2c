"""ModelOpt's speculative modes behind `Batch`: convert a target, take a training step, read the weights back.

Its offline form is used: the target's states come in with the batch (`StreamedBatches` computed them), so the
converted model holds no layers of the target, only its two tables. What ModelOpt 0.47 does otherwise than its
documentation says is put right here, each at the place where it matters.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trtspec.checkpoints.head_layouts.head import read_tensors
from trtspec.files import JSON
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.fit_torch import HeadLoss

_IGNORED = -100  # label of a position that has no loss
_MEDUSA_WEIGHT, _MEDUSA_DECAY = 1.0, 0.8  # of the loss of head i: weight * decay^i (Medusa, section 2.2.1)


def architecture(config: Any, **changes: JSON) -> dict[str, JSON]:
    """The size of one layer of the target, which a converted head does not inherit: 32 heads of 128 by default.

    Its rope settings are repeated in both places ModelOpt reads: a head otherwise trains with theta 10000.
    """
    rope = dict(config.rope_parameters)
    heads = config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope,
        **changes,
    }


def convert_eagle3(
    model: Any,
    captured_layers: Sequence[int],
    d2t: npt.NDArray[np.int64] | None,
    *,
    decay: float = 0.9,
    **changes: JSON,
) -> Any:
    """An EAGLE-3 head for `model` whose loss weights step i of training-time test by decay^i.

    d2t: int64 [Vd], None for the whole vocabulary, whose output layer is then the target's. changes: of
    `architecture`. The trainable head is `.eagle_module`.
    """
    sizes = architecture(
        model.config, use_aux_hidden_state=True, use_last_layernorm=True, torch_dtype="float32", **changes
    )
    sizes |= {"eagle_aux_hidden_state_layer_ids": list(captured_layers)}
    if d2t is not None:
        sizes["draft_vocab_size"] = len(d2t)
    settings = {
        "eagle_offline": True,
        "eagle_architecture_config": sizes,
        "eagle_loss_decay_factor": decay,
        "eagle_use_torch_compile": False,
        "eagle_export_rope_scaling": {},  # else YaRN × 32 is written for a head that was trained without
    }
    converted = _convert(model, "eagle", settings)
    if d2t is not None:
        # Left alone it is all zeros: the draft vocabulary would be the first ids, without any error.
        converted.eagle_module.d2t.copy_(torch.from_numpy(d2t))
        # What would pick the draft vocabulary's logits out of all: `eagle3_loss` computes no others.
        converted._map_logits_to_draft_vocab = lambda logits: logits
    return converted


def convert_dflash(
    model: Any,
    captured_layers: Sequence[int],
    *,
    block_size: int,
    mask_token_id: int,
    anchors: int,
    options: Mapping[str, JSON] | None = None,
    **changes: JSON,
) -> Any:
    """A DFlash head with one layer for each captured layer; `projector_type="dspark"` among `changes` makes it DSpark.

    block_size: positions of a block. anchors: blocks drawn at random from each sequence and step. options: further
    settings of ModelOpt's DFlashConfig. changes: of `architecture`. The trainable head is `.dflash_module`.
    """
    sizes = architecture(
        model.config,
        num_hidden_layers=len(captured_layers),
        target_layer_ids=list(captured_layers),
        **changes,
    )
    # Standard rotary embedding at the target's theta: Qwen3's configuration reads it here under transformers 5.
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    del sizes["rope_scaling"]
    settings = {
        "dflash_offline": True,
        "dflash_architecture_config": sizes,
        "dflash_block_size": block_size,
        "dflash_mask_token_id": mask_token_id,
        "dflash_num_anchors": anchors,
        "dflash_use_torch_compile": False,
        **(options or {}),
    }
    return _convert(model, "dflash", settings)


def convert_medusa(model: Any, *, heads: int, layers: int) -> Any:
    """Medusa heads for `model`; the trainable part is `.medusa_heads`, whose output layers are random at first."""
    converted = _convert(model, "medusa", {"medusa_num_heads": heads, "medusa_num_layers": layers})
    converted.model = _Given()
    return converted


def eagle3_loss(converted: Any, batch: Batch, target: FrozenTarget, steps: int) -> HeadLoss:
    """Loss and accuracy of an EAGLE-3 head on a batch, over `steps` steps of training-time test."""
    converted.train()  # in evaluation ModelOpt runs one test step
    converted.eagle_ttt_steps = steps
    converted._cached_attn_blk_masks.clear()  # kept by test step alone: the next batch has another length
    converted.config.dtype = _working_dtype(batch.last)  # of those masks
    d2t = getattr(converted.eagle_module, "d2t", None)
    ids = None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t
    found = converted(
        input_ids=batch.tokens,
        # ModelOpt masks the target's predictions; ours says which tokens are the target's.
        loss_mask=torch.nn.functional.pad(batch.loss_mask[:, 1:], (0, 1)),
        base_model_outputs={
            "base_model_hidden_states": batch.last,
            "base_model_logits": target.logits(batch.last, ids),
            "base_model_input_embeds": target.embed(batch.tokens),
            "aux_hidden_states": batch.features,
        },
    )
    return HeadLoss(found.loss, [float(value) for value in found.train_acc[0]])


def modelopt_loss(converted: Any, batch: Batch, target: FrozenTarget) -> HeadLoss:
    """Loss and accuracy of another converted model on a batch.

    DFlash kinds give the accuracy of a whole block as one number.
    """
    converted.train()  # in evaluation ModelOpt refuses DFlash
    if hasattr(converted, "dflash_module"):
        return _dflash_loss(converted, batch, target)
    return _medusa_loss(converted, batch)


def exported(converted: Any) -> tuple[dict[str, JSON], dict[str, np.ndarray]]:
    """What ModelOpt's own exporter writes for a converted EAGLE-3 or DFlash kind: config.json and float32 tensors."""
    from modelopt.torch.export import export_speculative_decoding

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        export_speculative_decoding(converted, export_dir=folder)
        config = json.loads(Path(folder, "config.json").read_text())
        tensors = read_tensors(Path(folder))
    return config, tensors


def _convert(model: Any, mode: str, settings: dict[str, JSON]) -> Any:
    import modelopt.torch.speculative as mtsp

    base = _without_layers(model)
    with contextlib.redirect_stdout(io.StringIO()):
        converted = mtsp.convert(base, [(mode, settings)])
    for name, parameter in converted.named_parameters():
        parameter.requires_grad_("eagle_module" in name or "dflash_module" in name or "medusa_heads" in name)
    for name in ("eagle_module", "dflash_module", "medusa_heads"):
        if hasattr(converted, name):
            getattr(converted, name).float()  # else it has the target's dtype, too coarse for small updates
    return converted


def _without_layers(model: Any) -> Any:
    """A model of the same class that shares the target's tables and final norm and has no layers."""
    config = copy.deepcopy(model.config)
    config.num_orig_hidden_layers = config.num_hidden_layers
    with torch.device("meta"):
        base = type(model)(config)
    base.set_input_embeddings(model.get_input_embeddings())
    base.set_output_embeddings(model.get_output_embeddings())
    base.model.norm, base.model.rotary_emb = model.model.norm, model.model.rotary_emb
    base.model.layers = nn.ModuleList()
    return base


def _working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What linear layers give on a tensor's device: attention masks must have the same."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


def _dflash_loss(converted: Any, batch: Batch, target: FrozenTarget) -> HeadLoss:
    spare = -batch.tokens.shape[1] % converted.dflash_block_size  # lengths must be whole blocks
    found = converted(
        input_ids=torch.nn.functional.pad(batch.tokens, (0, spare)),
        loss_mask=torch.nn.functional.pad(batch.loss_mask, (0, spare)).float(),
        base_model_outputs={
            "base_model_logits": torch.nn.functional.pad(target.logits(batch.last), (0, 0, 0, spare)),
            "aux_hidden_states": torch.nn.functional.pad(batch.features, (0, 0, 0, spare)).to(
                _working_dtype(batch.features)
            ),
        },
    )
    return HeadLoss(found.loss, [float(value) for value in found.train_acc[0]])


def _medusa_loss(converted: Any, batch: Batch) -> HeadLoss:
    # ModelOpt shifts once for its first head, which is to predict the token after the next: shifted once before.
    labels = batch.tokens.masked_fill(~batch.loss_mask, _IGNORED)
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    converted.model.states = batch.last
    found = converted(
        input_ids=batch.tokens,
        labels=labels,
        medusa_heads_coefficient=_MEDUSA_WEIGHT,
        medusa_decay_coefficient=_MEDUSA_DECAY,
    )
    accuracy = []
    for head, logits in enumerate(found.medusa_logits):
        truth = labels[:, head + 1 :]
        right = (logits[:, : truth.shape[1]].argmax(dim=-1) == truth).sum()
        accuracy.append(float(right / (truth != _IGNORED).sum().clamp(min=1)))
    return HeadLoss(found.loss, accuracy)


class _Given(nn.Module):
    """In the place of the target's layers: gives the states of the batch."""

    states: torch.Tensor

    def forward(self, **_arguments: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.states)
