"""The mechanisms `trtspec train` makes drafts for: where their PyTorch modules are, and what may be set.

A module file has `build(blueprint, model) -> fit_torch.DraftHead`; PyTorch is imported only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trtspec.checkpoints.head_layouts.head import Head

Option = int | float | bool
_LAYOUTS = "trtspec.checkpoints.head_layouts"

REPORT = "training_report.json"  # beside every trained draft

# Options that say what a head is made of: a trained one has settled them.
SETTLED = ("layers", "kv_heads", "copying_heads", "mask_token_id")

# Every option that some method has; a config's `training.options` holds these and no others.
OPTIONS: Mapping[str, str] = {
    "layers": "Layers of the draft: decoder layers kept of the target (draft_model) or trained, residual blocks of "
    "each Medusa or Hydra head.",
    "first_position_share": "Share of the training steps that learn the first draft position alone, at a fraction of "
    "the cost; the rest learn all (eagle3, mtp).",
    "kv_heads": "Key-value heads of the head's layers, a multiple of the target's; 0 takes as many (eagle3, "
    "mtp).",
    "copying_heads": "How many of them copy from the start: they look up what came behind the present token the last "
    "times it stood (eagle3, mtp).",
    "mask_token_id": "Token that stands for one not known yet (dflash, dspark, p_eagle); one that text hardly uses.",
    "anchors": "Blocks drawn from each sequence in a training step (dflash, dspark).",
    "markov_rank": "Rank of DSpark's Markov head.",
}


@dataclass(frozen=True, slots=True)
class Method:
    """module: dotted name of the file with `build`. options: the method's own settings with their defaults, by the
    names `training.options` takes. captures: the target's layers it reads by default, "last" for the state after the
    final norm alone. reduced_vocabulary: whether it may draft from a part of the vocabulary. learning_rate: default.
    layout: dotted name of the file whose `write_head` stores the head, None for a draft that is a whole model.
    goes_on: whether it may start from a trained head.
    """

    module: str
    options: Mapping[str, Option] = field(default_factory=dict)
    captures: Literal["last", "three"] = "last"
    reduced_vocabulary: bool = False
    learning_rate: float = 1e-3
    layout: str | None = None
    goes_on: bool = False

    def captured_layers(self, layers: int) -> tuple[int, ...]:
        """Its default layers of a target with `layers` of them, 0-based and ascending."""
        if self.captures == "last":
            return ()
        return tuple(sorted({min(1, layers - 1), max(0, layers // 2 - 1), max(0, layers - 4)}))


METHODS: Mapping[str, Method] = {
    "draft_model": Method("trtspec.train.pruned_torch", {"layers": 4}),
    "medusa": Method("trtspec.train.medusa_torch", {"layers": 1}, layout=f"{_LAYOUTS}.medusa"),
    "hydra": Method("trtspec.train.hydra_torch", {"layers": 1}, layout=f"{_LAYOUTS}.hydra"),
    **{
        method: Method("trtspec.train.eagle_torch", layout=f"{_LAYOUTS}.eagle", goes_on=True)
        for method in ("eagle", "eagle2")
    },
    "eagle3": Method(
        "trtspec.train.eagle_torch",
        {"layers": 1, "first_position_share": 0.0, "kv_heads": 0, "copying_heads": 0},
        "three",
        reduced_vocabulary=True,
        layout=f"{_LAYOUTS}.eagle",
        goes_on=True,
    ),
    "p_eagle": Method(
        "trtspec.train.eagle_torch",
        {"layers": 1, "mask_token_id": 0},
        "three",
        reduced_vocabulary=True,
        layout=f"{_LAYOUTS}.eagle",
        goes_on=True,
    ),
    "mtp": Method(
        "trtspec.train.eagle_torch",
        {"first_position_share": 0.0, "kv_heads": 0, "copying_heads": 0},
        reduced_vocabulary=True,
        layout=f"{_LAYOUTS}.mtp",
        goes_on=True,
    ),
    "dflash": Method(
        "trtspec.train.dflash_torch",
        {"mask_token_id": 0, "anchors": 64},
        "three",
        layout=f"{_LAYOUTS}.dflash",
    ),
    "dspark": Method(
        "trtspec.train.dflash_torch",
        {"mask_token_id": 0, "anchors": 64, "markov_rank": 64},
        "three",
        layout=f"{_LAYOUTS}.dflash",
    ),
}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a head is built from, besides its target's model.

    captured_layers: 0-based target layers whose outputs it reads, ascending. d2t: int64 [Vd], offsets of the
    reduced draft vocabulary (target id = draft id + d2t[draft id]), None for the whole one. draft_length: positions
    it is trained for. options: all of the method's own, the defaults filled in. sample: uint32 token sequences of the
    kind it will learn from, for start values that are measured. start: the trained head it goes on from.
    """

    method: str
    captured_layers: tuple[int, ...]
    draft_length: int
    d2t: npt.NDArray[np.int64] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    sample: Sequence[npt.NDArray[np.uint32]] = ()
    start: Head | None = None


def build_module(blueprint: Blueprint, model: Any) -> Any:
    """The head for `model`, a frozen causal language model of transformers; a fit_torch.DraftHead.

    Random start values come from torch's global generator, which the caller seeds. Raises PlanInfeasible for a
    target or options it cannot be made for.
    """
    return import_module(METHODS[blueprint.method].module).build(blueprint, model)
