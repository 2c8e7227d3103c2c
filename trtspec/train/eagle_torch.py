"""Training the heads that pair tokens with the target's states: EAGLE-1, -2, -3, P-EAGLE and an MTP module.

| method | trained by | loss |
|---|---|---|
| eagle, eagle2 | one pass over true states with noise (2401.15077, section 3.2) | regression of the next state, and 0.1 × cross-entropy |
| eagle3 | ModelOpt's `eagle` mode: training-time test (2503.01840, section 3.2) | soft cross-entropy, 0.9^i at step i |
| mtp | one module, its own output taken back for the positions past it | as eagle3 |
| p_eagle | all positions at once, fewer of the later ones (2602.01469, section 3) | soft cross-entropy, each position alike |

Soft cross-entropy is against what the target thinks, over the draft vocabulary. Start values are the target's: its last
layer, its final norm, its output layer; what joins token and state begins as the state alone.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from trtspec.checkpoints.head_layouts.eagle import THREE
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.heads import head_of
from trtspec.errors import PlanInfeasible
from trtspec.files import JSON
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.copying_torch import add_copying_heads
from trtspec.train.fit_torch import HeadLoss
from trtspec.train.head_modules import Blueprint
from trtspec.train.modelopt_torch import architecture, convert_eagle3, eagle3_loss
from trtspec.train.pair_network_torch import PairNetwork, Weights
from trtspec.train.start import WHERE
from trtspec.train.vocabulary import target_ids

_DECAY = 0.9  # of the weight of each further draft position
_CROSS_ENTROPY = 0.1  # EAGLE-1's weight of it beside the regression
_NOISE = 0.1  # EAGLE-1: added to the states, uniform in ± this
_RETAINED = 0.8  # P-EAGLE: of the drafts that go on from one position to the next
_SPREAD = 0.02  # of start values that the target has none for


def build(blueprint: Blueprint, model: Any) -> PairModule:
    """The head of `blueprint.method`; options: `layers` (eagle3, p_eagle), `first_position_share`, `kv_heads` and
    `copying_heads` (eagle3, mtp), `mask_token_id` (p_eagle).
    """
    module = {"eagle3": Eagle3Module, "p_eagle": ParallelModule, "mtp": MtpModule}
    return module.get(blueprint.method, EagleModule)(blueprint, model)


class PairModule(nn.Module, ABC):
    """What the modules below share; each is a fit_torch.DraftHead."""

    progress = 0.0

    def __init__(self, blueprint: Blueprint, model: Any) -> None:
        super().__init__()
        self._blueprint = blueprint
        self._config = head_config(blueprint, model)
        self.network = PairNetwork(blueprint.method, self._config, len(blueprint.captured_layers))
        offsets = blueprint.d2t
        ids = np.arange(model.config.vocab_size if offsets is None else len(offsets))
        self.register_buffer(
            "ids", torch.from_numpy(ids if offsets is None else ids + offsets), persistent=False
        )

    @abstractmethod
    def weights(self) -> Weights:
        """What is trained, by canonical name."""

    @abstractmethod
    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        """See `fit_torch.DraftHead.loss`."""

    @torch.no_grad()
    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        weights, length = self.weights(), batch.tokens.shape[1]
        found = []
        for step, (scored, _) in enumerate(
            self._unrolled(batch, target, weights, self._blueprint.draft_length)
        ):
            # The step that begins at token t has the pair of row t − 1 as its last known one.
            rows = (torch.arange(length, device=scored.device) - 1 + step).clamp(0, length - 1)
            best = self._logits(weights, target, scored[:, rows]).argmax(dim=-1)
            found.append(self.ids[best])
        return torch.stack(found, dim=2)

    def head(self) -> Head:
        tensors = {name: value.detach().float().cpu().numpy() for name, value in self.weights().items()}
        return Head(
            head_of(self._blueprint.method),
            self._config,
            self._blueprint.captured_layers,
            self._blueprint.d2t,
            tensors,
        )

    def _positions(self) -> int:
        """How many draft positions are learned now."""
        alone = self.progress < float(self._blueprint.options.get("first_position_share", 0))
        return 1 if alone else self._blueprint.draft_length

    def _states(self, batch: Batch, weights: Weights) -> torch.Tensor:
        captured = batch.features if self._blueprint.captured_layers else batch.last
        return self.network.fuse(weights, captured)

    def _unrolled(self, batch: Batch, target: FrozenTarget, weights: Weights, steps: int) -> Any:
        embedded = target.embed(batch.tokens.roll(-1, dims=1))
        return self.network.unroll(weights, embedded, self._states(batch, weights), steps)

    def _logits(self, weights: Weights, target: FrozenTarget, scored: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary."""
        if "lm_head.weight" in weights:
            return nn.functional.linear(scored, weights["lm_head.weight"]).float()
        return target.logits(scored, self.ids)

    def _soft_loss(
        self,
        weights: Weights,
        target: FrozenTarget,
        scored: torch.Tensor,
        truth: torch.Tensor,
        tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, float]:
        """Mean cross-entropy over rows, and the share whose first choice is the token that came.

        scored [n, H]: of the head. truth [n, H]: the target's states that gave `tokens` [n].
        """
        logits = self._logits(weights, target, scored)
        with torch.no_grad():
            p = target.logits(truth, self.ids).softmax(dim=-1)
        count = max(1, len(tokens))
        loss = -(p * logits.log_softmax(dim=-1)).sum() / count
        right = (self.ids[logits.argmax(dim=-1)] == tokens).sum()
        return loss, float(right) / count


class _OwnWeights(PairModule):
    """Heads whose weights lie here, and not in a converted model."""

    def __init__(self, blueprint: Blueprint, model: Any) -> None:
        super().__init__(blueprint, model)
        starts = start_values(blueprint, model)
        # A parameter's name holds no dots.
        self.own = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(t) for n, t in starts.items()})

    def weights(self) -> Weights:
        return {name.replace("/", "."): value for name, value in self.own.items()}


class EagleModule(_OwnWeights):
    """EAGLE-1 and EAGLE-2: the same head, which is to continue the sequence of the target's last states."""

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        weights = self.weights()
        states = batch.last + (torch.rand_like(batch.last) * 2 - 1) * _NOISE
        embedded = target.embed(batch.tokens.roll(-1, dims=1))
        ((scored, made),) = self.network.unroll(weights, embedded, states, 1)
        judged = batch.loss_mask[:, 2:]
        rows, truth = made[:, :-2][judged].float(), batch.last[:, 1:-1][judged]
        regression = nn.functional.smooth_l1_loss(rows, truth, reduction="sum") / max(1, truth.numel())
        entropy, accuracy = self._soft_loss(
            weights, target, scored[:, :-2][judged], truth, batch.tokens[:, 2:][judged]
        )
        return HeadLoss(regression + _CROSS_ENTROPY * entropy, [accuracy])


class MtpModule(_OwnWeights):
    """One MTP module, reused for every further position as it will be when it drafts."""

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        weights, total, accuracy = self.weights(), batch.last.new_zeros(()), []
        for step, (scored, _) in enumerate(self._unrolled(batch, target, weights, self._positions())):
            judged = batch.loss_mask[:, 2:].clone()
            judged[:, :step] = False  # their drafts would have begun before the text
            loss, right = self._soft_loss(
                weights,
                target,
                scored[:, :-2][judged],
                batch.last[:, 1:-1][judged],
                batch.tokens[:, 2:][judged],
            )
            total = total + _DECAY**step * loss
            accuracy.append(right)
        return HeadLoss(total, accuracy)


class Eagle3Module(PairModule):
    """EAGLE-3 in ModelOpt's mode: its loss and its weights; drafts are this package's own forward pass over them."""

    def __init__(self, blueprint: Blueprint, model: Any) -> None:
        super().__init__(blueprint, model)
        self._converted = convert_eagle3(
            model,
            blueprint.captured_layers,
            blueprint.d2t,
            decay=_DECAY,
            num_hidden_layers=self._config["num_hidden_layers"],
            num_key_value_heads=self._config["num_key_value_heads"],
        )
        starts = start_values(blueprint, model)
        with torch.no_grad():
            for name, parameter in self._converted.eagle_module.named_parameters():
                parameter.copy_(starts[name])

    def weights(self) -> Weights:
        return dict(self._converted.eagle_module.named_parameters())

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        return eagle3_loss(self._converted, batch, target, self._positions())


class ParallelModule(_OwnWeights):
    """P-EAGLE: every position of a draft from one pass, the unknown states replaced by one that is learned."""

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        weights, length = self.weights(), batch.tokens.shape[1]
        anchors = _kept_anchors(length, self._blueprint.draft_length)
        scored = self._at_once(batch, target, weights, anchors)
        total, accuracy = batch.last.new_zeros(()), []
        for ahead, kept in enumerate(anchors):
            kept = kept[kept + ahead + 2 < length]
            judged = batch.loss_mask[:, kept + ahead + 2]
            loss, right = self._soft_loss(
                weights,
                target,
                scored[ahead][:, : len(kept)][judged],
                batch.last[:, kept + ahead + 1][judged],
                batch.tokens[:, kept + ahead + 2][judged],
            )
            total = total + loss / len(anchors)
            accuracy.append(right)
        return HeadLoss(total, accuracy)

    @torch.no_grad()
    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        weights, length = self.weights(), batch.tokens.shape[1]
        every = torch.arange(length, device=batch.tokens.device)
        scored = self._at_once(batch, target, weights, [every] * self._blueprint.draft_length)
        begins = (every - 1).clamp(min=0)
        best = [self._logits(weights, target, rows[:, begins]).argmax(dim=-1) for rows in scored]
        return torch.stack([self.ids[ids] for ids in best], dim=2)

    def _at_once(
        self, batch: Batch, target: FrozenTarget, weights: Weights, anchors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What the output layer reads at each position ahead, [B, n, H] for the n anchors of that position.

        anchors: ascending rows that a draft goes on from, for each position ahead; the first are all rows.
        """
        tokens, device = batch.tokens, batch.tokens.device
        ahead = torch.cat([torch.full_like(rows, i) for i, rows in enumerate(anchors)])
        anchor = torch.cat(anchors)
        masked = int((ahead > 0).sum())
        mask_tokens = torch.full((masked,), int(self._config["mask_token_id"]), device=device)
        embedded = torch.cat(
            [target.embed(tokens.roll(-1, dims=1)), target.embed(mask_tokens).expand(len(tokens), -1, -1)],
            dim=1,
        )
        stand_in = self.network.fuse(weights, weights["mask_hidden"])
        states = torch.cat([self._states(batch, weights), stand_in.expand(len(tokens), masked, -1)], dim=1)
        known = (ahead[None, :] == 0) & (anchor[None, :] <= anchor[:, None])
        own = (anchor[None, :] == anchor[:, None]) & (ahead[None, :] <= ahead[:, None])
        scored, _ = self.network.run(weights, embedded, states, anchor + ahead, known | own, [])
        return list(scored.split([len(rows) for rows in anchors], dim=1))


def _kept_anchors(length: int, positions: int) -> list[torch.Tensor]:
    """Rows whose drafts reach each position: all, then ever fewer of them, chosen at random."""
    order = torch.randperm(length)
    return [order[: max(1, round(length * _RETAINED**i))].sort().values for i in range(positions)]


def head_config(blueprint: Blueprint, model: Any) -> dict[str, JSON]:
    """The head's numbers: of the one it goes on from, else a layer of the target's sizes."""
    if blueprint.start is not None:
        stated = {  # of the target, and not by every layout
            "num_target_layers": model.config.num_hidden_layers,
            "max_position_embeddings": model.config.max_position_embeddings,
        }
        return {**blueprint.start.config, **stated}
    sizes = architecture(model.config)
    rope = dict(sizes["rope_scaling"])
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    vocab = model.config.vocab_size
    config: dict[str, JSON] = {
        **{name: sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
        **{name: sizes[name] for name in ("intermediate_size", "rms_norm_eps")},
        "hidden_size": model.config.hidden_size,
        "num_hidden_layers": int(blueprint.options.get("layers", 1)),
        "max_position_embeddings": model.config.max_position_embeddings,
        "vocab_size": vocab,
        "draft_vocab_size": vocab if blueprint.d2t is None else len(blueprint.d2t),
        "target_hidden_size": model.config.hidden_size,
        "num_target_layers": model.config.num_hidden_layers,
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else rope,
    }
    if blueprint.method != "mtp":
        config |= dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    if kv_heads := int(blueprint.options.get("kv_heads", 0)):
        config["num_key_value_heads"] = _checked_kv_heads(kv_heads, config)
    if blueprint.method == "p_eagle":
        config["mask_token_id"] = int(blueprint.options["mask_token_id"])
    return config


def _checked_kv_heads(kv_heads: int, config: Mapping[str, JSON]) -> int:
    """Raises PlanInfeasible for a number that the target's cannot be repeated to, or that queries do not part into."""
    heads, targets = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    if kv_heads % targets or heads % kv_heads:
        fitting = [n for n in range(targets, heads + 1, targets) if heads % n == 0]
        raise PlanInfeasible(
            f"{kv_heads} key-value heads do not go with the target's {targets} and {heads} query heads",
            where="training.options.kv_heads",
            hint=f"write one of {', '.join(map(str, fitting))}",
        )
    return kv_heads


def start_values(blueprint: Blueprint, model: Any) -> dict[str, torch.Tensor]:
    """float32, by canonical name. Random ones come from torch's global generator."""
    if blueprint.start is not None:
        return _trained_values(blueprint, model)
    method, hidden = blueprint.method, model.config.hidden_size
    three, taps = method in THREE, len(blueprint.captured_layers)
    last = {n: t.detach().float().clone() for n, t in model.model.layers[-1].state_dict().items()}
    if kv_heads := int(blueprint.options.get("kv_heads", 0)):
        targets = model.config.num_key_value_heads
        for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            by_head = last[name].unflatten(0, (targets, -1))
            last[name] = by_head.repeat_interleave(kv_heads // targets, dim=0).flatten(0, 1)
    one = torch.ones(hidden)
    found: dict[str, torch.Tensor] = {}
    for index in range(int(blueprint.options.get("layers", 1))):
        found |= {f"layers.{index}.{name}": tensor.clone() for name, tensor in last.items()}
    if three:
        for x in "qkv":  # the half that reads the embedding is new
            name = f"layers.0.self_attn.{x}_proj.weight"
            found[name] = torch.cat([_noise(found[name].shape), found[name]], dim=1)
        found |= {"layers.0.hidden_norm.weight": found["layers.0.input_layernorm.weight"].clone()}
        found |= {"layers.0.input_layernorm.weight": one.clone()}
        found["fc.weight"] = torch.cat([torch.zeros(hidden, (taps - 1) * hidden), torch.eye(hidden)], dim=1)
        found["fc.weight"] += _noise(found["fc.weight"].shape) / 2
        found["norm.weight"] = model.model.norm.weight.detach().float().clone()
    else:
        joined = torch.cat([_noise((hidden, hidden)), torch.eye(hidden)], dim=1)
        if method == "mtp":
            norms = {"enorm": one, "hnorm": one, "shared_head.norm": model.model.norm.weight.detach().float()}
            found |= {f"layers.0.{name}.weight": gain.clone() for name, gain in norms.items()}
            found["layers.0.eh_proj.weight"] = joined
        else:
            del found["layers.0.input_layernorm.weight"]
            found |= {"fc.weight": joined, "fc.bias": torch.zeros(hidden)}
    if blueprint.d2t is not None:
        rows = torch.from_numpy(target_ids(blueprint.d2t))
        found["lm_head.weight"] = model.get_output_embeddings().weight.detach().float()[rows].clone()
    if method == "p_eagle":
        found["mask_hidden"] = torch.randn(taps * hidden) / 2
    if copying := int(blueprint.options.get("copying_heads", 0)):
        config, layers = head_config(blueprint, model), blueprint.captured_layers
        add_copying_heads(found, method, config, model, layers, blueprint.sample, copying)
    return found


def _trained_values(blueprint: Blueprint, model: Any) -> dict[str, torch.Tensor]:
    """The weights of the head that training goes on from. Raises PlanInfeasible for one of another make."""
    start = blueprint.start
    options = {**blueprint.options, "layers": start.config["num_hidden_layers"], "copying_heads": 0}
    options["kv_heads"] = start.config["num_key_value_heads"]
    if "mask_token_id" in start.config:
        options["mask_token_id"] = start.config["mask_token_id"]
    ours = replace(blueprint, start=None, options=options)
    config, values, given = head_config(ours, model), start_values(ours, model), head_config(blueprint, model)
    differing = [f"{name} {given.get(name)}" for name in config if given.get(name) != config[name]]
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    theirs = {name: value.shape for name, value in start.tensors.items()}
    differing += sorted(
        name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name)
    )
    if differing:
        raise PlanInfeasible(
            f"the head is not made as this package trains it for this target: {', '.join(differing[:5])}",
            where=WHERE,
            hint="name a head that was trained for this target, with its layer sizes and rotary embedding",
        )
    return {name: torch.from_numpy(start.array(name).copy()) for name in values}


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * _SPREAD
