"""The acceptance that a trained draft brings along: measured on held-out text when `trtspec train` made it."""

from __future__ import annotations

from pathlib import Path

from trtspec.checkpoints.heads import head_of
from trtspec.checkpoints.json_file import read_json_object
from trtspec.errors import ConfigError
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.train.head_modules import REPORT


def trained_acceptance(draft: str, method: str) -> tuple[AcceptanceCurve, float] | None:
    """Acceptance by position and the temperature of the text, from the report beside the configuration file `draft`.

    None where there is no report, or one of another method. Raises ConfigError for a file that is none.
    """
    file = Path(draft).with_name(REPORT)
    if not file.is_file():
        return None
    told = read_json_object(file)
    try:
        of, tokens = str(told["method"]), int(told["held_out_tokens"])
        rates = tuple(float(rate) for rate in told["held_out"][-1][1]["conditional_acceptance"])
        temperature = float(told["settings"]["temperature"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ConfigError(
            "this is not the report of a training run",
            where=str(file),
            hint="remove it, or train the draft again",
        ) from None
    if head_of(of) != head_of(method) or not rates:
        return None
    source = f"measured when it was trained: {tokens:,} held-out tokens, T = {temperature:g}"
    return AcceptanceCurve(rates, source, len(rates), "trained"), temperature
