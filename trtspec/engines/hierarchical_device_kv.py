"""QuantSpec's hierarchical KV cache (2502.10424, section 4) in the memory of a GPU, as our attention kernel reads it.

What a row reads, and why that is exact, is said in hierarchical_kv.py; here the same bytes lie in two planes, of upper
and of lower halves, so that a draft moves half of what the target moves. Scales and zeros (the value of code 0) have
the newest rows' own type, and codes are those nearest to the rows under them as they are rounded.

Newest rows start at the first position that is not read in quantized form, since the kernel counts them from there.
They move when that position does, one group on or, where a step past a multiple of G is taken back, one group back:
the group that went last is kept in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtspec.engines.hierarchical_kv import HALF, KEYS, STEPS, SUBSTEPS, VALUES, quantized_groups

if TYPE_CHECKING:
    import torch


class DeviceKv:
    """All sequences' keys and values, index KEYS or VALUES of the axis of length 2.

    upper, lower: uint8 [layers, 2, slots, KV heads, capacity, head_dim/2], dim i in the low half of byte i and dim
    i + head_dim/2 in the high one. key_scales, key_zeros: [layers, slots, KV heads, capacity/G, head_dim].
    value_scales, value_zeros: [layers, slots, KV heads, capacity]. recent: [layers, 2, slots, KV heads, rows,
    head_dim].

    capacity: positions, a multiple of `group`, that may be read in quantized form. rows: of `recent`, 2G and the most
    of one pass at least. dtype: of all that is not uint8. device: as PyTorch names it.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        group: int,
        capacity: int,
        rows: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        import torch

        def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        self.group = group
        heads = (slots, kv_heads)
        self.upper = zeros(layers, 2, *heads, capacity, head_dim // 2, of=torch.uint8)
        self.lower = torch.zeros_like(self.upper)
        self.key_scales = zeros(layers, *heads, capacity // group, head_dim)
        self.key_zeros = torch.zeros_like(self.key_scales)
        self.value_scales = zeros(layers, *heads, capacity)
        self.value_zeros = torch.zeros_like(self.value_scales)
        self.recent = zeros(layers, 2, *heads, rows, head_dim)
        self._last = zeros(layers, 2, *heads, group, head_dim)  # the newest quantized group in full
        self._holds_last = [False] * slots
        self._groups = [0] * slots

    def first_recent(self, slot: int) -> int:
        """Position of the first row of `recent`; all before it are read in quantized form."""
        return self._groups[slot] * self.group

    def write_from(self, slot: int, start: int) -> None:
        """The next pass writes rows from `start` on, all before the next multiple of G.

        Raises ValueError where a row they read in full precision is no longer held.
        """
        groups = quantized_groups(start, self.group)
        if start == 0:
            self._groups[slot], self._holds_last[slot] = 0, False
        while self._groups[slot] < groups:
            self._move_on(slot)
        if groups < self._groups[slot]:
            if groups < self._groups[slot] - 1 or not self._holds_last[slot]:
                raise ValueError(
                    f"slot {slot}: position {start} is too far back, its full-precision rows are gone"
                )
            self._move_back(slot)

    def copy(self, source: int, destination: int) -> None:
        """One slot's sequence becomes another slot's."""
        for tensor in (self.upper, self.lower, self.recent, self._last):
            tensor[:, :, destination] = tensor[:, :, source]
        for tensor in (self.key_scales, self.key_zeros, self.value_scales, self.value_zeros):
            tensor[:, destination] = tensor[:, source]
        self._groups[destination] = self._groups[source]
        self._holds_last[destination] = self._holds_last[source]

    def _move_on(self, slot: int) -> None:
        """The first group of the newest rows is read in quantized form from now on."""
        recent, index, group = self.recent[:, :, slot], self._groups[slot], self.group
        self._last[:, :, slot] = recent[:, :, :, :group]
        places = slice(index * group, (index + 1) * group)
        for part, axis in ((KEYS, -2), (VALUES, -1)):
            upper, lower, scales, zeros = _coded(recent[:, part, :, :group], axis)
            self.upper[:, part, slot, :, places] = _packed(upper)
            self.lower[:, part, slot, :, places] = _packed(lower)
            if part == KEYS:
                self.key_scales[:, slot, :, index], self.key_zeros[:, slot, :, index] = scales, zeros
            else:
                self.value_scales[:, slot, :, places], self.value_zeros[:, slot, :, places] = scales, zeros
        recent[:, :, :, :-group] = recent[:, :, :, group:].clone()
        self._groups[slot] += 1
        self._holds_last[slot] = True

    def _move_back(self, slot: int) -> None:
        recent, group = self.recent[:, :, slot], self.group
        recent[:, :, :, group:] = recent[:, :, :, :-group].clone()
        recent[:, :, :, :group] = self._last[:, :, slot]
        self._groups[slot] -= 1
        self._holds_last[slot] = False


def _coded(rows: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(upper codes, lower codes + HALF, scales, zeros) of rows whose elements along `axis` share a scale; the latter
    two lack that axis and have the rows' type."""
    import torch

    values = rows.float()
    zero = values.amin(axis, keepdim=True)  # one of the rows, so it has their type already
    step = (values.amax(axis, keepdim=True) - zero) / STEPS
    scale = (torch.where(step > 0, step, 1.0) / SUBSTEPS).to(rows.dtype)
    step = SUBSTEPS * scale.float()
    upper = ((values - zero) / step).round().clamp(0, STEPS)
    left = ((values - (upper * step + zero)) / scale.float()).round().clamp(-HALF, HALF - 1)
    codes = (part.to(torch.uint8) for part in (upper, left + HALF))
    return *codes, scale.squeeze(axis), zero.to(rows.dtype).squeeze(axis)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., d/2] of codes 0..15 [..., d]."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4
