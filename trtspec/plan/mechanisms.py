"""What choosing a mechanism costs beyond step time: training, memory, deployment. Data for the ranking."""

from __future__ import annotations

from dataclasses import dataclass

# What the planner may choose by itself: nothing has to be trained or supplied.
FREE = ("ngram", "suffix", "mtp")


@dataclass(frozen=True, slots=True)
class MechanismNotes:
    """training: tokens it takes, as NVIDIA's co-design guide and the papers give them. ships: what has to be supplied.
    retrain: whether a change of the target asks for new weights."""

    training: str
    ships: str
    retrain: bool


NOTES: dict[str, MechanismNotes] = {
    "ngram": MechanismNotes("none", "nothing", False),
    "suffix": MechanismNotes("none", "nothing", False),
    "lookahead": MechanismNotes("none", "nothing", False),
    "rest": MechanismNotes("none", "a datastore of text", False),
    "draft_model": MechanismNotes("none if one exists; 100B-400B tokens distilled", "a second model", False),
    "pard": MechanismNotes("a small model adapted to mask tokens", "a second model", False),
    "specinfer": MechanismNotes("none if they exist", "several second models", False),
    "quantspec": MechanismNotes("none", "4-bit copy of the target", False),
    "medusa": MechanismNotes("about 1B tokens", "a separate head", True),
    "hydra": MechanismNotes("about 1B tokens", "a separate head", True),
    "eagle": MechanismNotes("about 1B tokens", "a separate head", True),
    "eagle2": MechanismNotes("about 1B tokens", "a separate head", True),
    "eagle3": MechanismNotes("1B-10B tokens after the target", "a separate head", True),
    "p_eagle": MechanismNotes("1B-10B tokens after the target", "a separate head", True),
    "mtp": MechanismNotes("during the target's pretraining", "inside the checkpoint", True),
    "dflash": MechanismNotes("1B-10B tokens", "a separate head", True),
    "dspark": MechanismNotes("1B-10B tokens", "a separate head", True),
}
