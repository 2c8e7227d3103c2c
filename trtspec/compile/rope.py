"""Rotary position embedding tables: default, linear, Llama 3 and YaRN scaling.

RoPE is "RoFormer" (2104.09864); `llama3` is the frequency blend published with Llama 3.1; `yarn` is
2309.00071 (section 3.2, "NTK-by-parts", and the attention temperature of section 3.3, folded into the tables).
What another schedule would compute is never taken for the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.rope import RopeFacts
from trtspec.errors import PlanInfeasible

SCALINGS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0  # what transformers assumes where a config states none


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies: float64 [head_dim / 2]; magnitude multiplies cos and sin (YaRN's temperature)."""

    inverse_frequencies: tuple[float, ...]
    magnitude: float

    @staticmethod
    def of(facts: RopeFacts, head_dim: int, max_positions: int, *, where: str) -> Rope:
        """The schedule `facts` describe. Raises PlanInfeasible, at `where`, for one not in SCALINGS."""
        if facts.kind not in SCALINGS:
            raise PlanInfeasible(
                f"rope_type {facts.kind!r} is not implemented in the graph",
                where=where,
                hint=f"implemented: {', '.join(SCALINGS)}",
            )
        base = facts.theta or _DEFAULT_THETA
        plain = base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        numbers = dict(facts.scaling)
        magnitude = 1.0
        if facts.kind == "linear":
            plain = plain / numbers["factor"]
        elif facts.kind == "llama3":
            plain = _llama3(plain, numbers)
        elif facts.kind == "yarn":
            plain, magnitude = _yarn(plain, base, head_dim, max_positions, numbers)
        return Rope(tuple(plain.tolist()), magnitude)

    def tables(self, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin: float32 [positions, head_dim / 2].

        Angles are formed in float32, as PyTorch's reference does: at long positions the rounding of the
        angle is part of what the model was trained with.
        """
        inverse = np.asarray(self.inverse_frequencies, np.float32)
        angles = np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :]
        scale = np.float32(self.magnitude)
        return np.cos(angles) * scale, np.sin(angles) * scale


def _llama3(plain: npt.NDArray[np.float64], numbers: Mapping[str, float]) -> npt.NDArray[np.float64]:
    factor, low, high = (numbers[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = numbers["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
    plain: npt.NDArray[np.float64],
    base: float,
    head_dim: int,
    max_positions: int,
    numbers: Mapping[str, float],
) -> tuple[npt.NDArray[np.float64], float]:
    original = numbers.get("original_max_position_embeddings") or max_positions
    factor = numbers.get("factor") or max_positions / original

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(numbers.get("beta_fast", 32)), dimension(numbers.get("beta_slow", 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    blended = plain / factor * ramp + plain * (1 - ramp)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in numbers:
        return blended, numbers["attention_factor"]
    if numbers.get("mscale_all_dim") and numbers.get("mscale"):
        return blended, temperature(numbers["mscale"]) / temperature(numbers["mscale_all_dim"])
    return blended, temperature(1.0)
