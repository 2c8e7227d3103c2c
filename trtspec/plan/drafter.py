"""Seconds a drafter adds to a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from trtspec.plan.deployment import Deployment
from trtspec.plan.roofline import distinct_experts, linear_s
from trtspec.plan.step_time import KERNELS_PER_LAYER

# lookup: host work only. serial: D passes of one token. block: one pass of D+1 tokens. heads: D heads in one pass.
Shape = Literal["none", "lookup", "serial", "block", "heads"]


@dataclass(frozen=True, slots=True)
class Drafter:
    """Cost of one mechanism on one deployment. parameters, bytes: read and multiplied by one pass (of `heads`: by each
    head), over all ranks; expert_parameters: routed experts of the draft, all copies.

    once_parameters: work done once a step whatever D is (fusing hidden states). layers: decoder layers of a pass.
    memory_bytes: weights it keeps resident besides the target's. kv_bytes_per_token: of its own cache.
    shared_kv_bytes_per_token: moved by a pass for the target's cache, which it reads instead. sequence_bytes: memory of
    one sequence whatever its length.
    ranks: tensor-parallel size it runs at. pass_s, step_s, host_s_per_sequence: overheads of the runtime.
    probe_rows: rows of the target's step that draft and are not drafts (lookahead's window).
    parts: several drafts that share out the D tokens, each a chain of its own, and write one after the other.
    limit: the longest draft it can make; depth: the longest path in one, None where it may be one path throughout.
    notes: what was assumed.
    """

    method: str
    shape: Shape
    parameters: float = 0.0
    bytes: float = 0.0
    once_parameters: float = 0.0
    compute: str = "bf16"
    layers: int = 0
    kv_bytes_per_token: float = 0.0
    kv_dtype: str | None = None
    shared_kv_bytes_per_token: float = 0.0
    sequence_bytes: float = 0.0
    memory_bytes: float = 0.0
    ranks: int = 1
    mixture: tuple[int, int] = (0, 0)
    expert_parameters: float = 0.0
    pass_s: float = 0.0
    step_s: float = 0.0
    host_s_per_sequence: float = 0.0
    probe_rows: int = 0
    limit: int | None = None
    depth: int | None = None
    parts: tuple[Drafter, ...] = ()
    notes: tuple[str, ...] = ()

    def seconds(self, deployment: Deployment, batch: int, draft_length: int, context: int) -> float:
        """Seconds added to one step of `batch` sequences; 0 for D = 0."""
        if self.shape == "none" or draft_length == 0:
            return 0.0
        if self.shape == "lookup":  # also where the time of parts is measured with the step's
            return self.step_s + self.host_s_per_sequence * deployment.sequences(batch)
        if self.parts:
            shares = [draft_length // len(self.parts)] * len(self.parts)
            shares[: draft_length % len(self.parts)] = [shares[0] + 1] * (draft_length % len(self.parts))
            return sum(
                part.seconds(deployment, batch, share, context)
                for part, share in zip(self.parts, shares, strict=True)
            )
        serial, batch = self.shape == "serial", deployment.sequences(batch)
        longest = min(draft_length, self.depth or draft_length)
        rows = batch * (draft_length + 1) if self.shape == "block" else batch
        heads = longest if self.shape == "heads" else 1
        once = (
            self._linear(deployment, self.once_parameters, self.once_parameters, batch)
            if self.once_parameters
            else 0.0
        )
        return (
            self.step_s
            + once
            + (longest if serial else 1) * self._pass(deployment, batch, rows, heads, context)
        )

    def deepest(self, draft_length: int) -> int:
        """Tokens one after the other in a draft of `draft_length` tokens, whose positions acceptance is about."""
        return ceil(draft_length / max(1, len(self.parts)))

    def at_no_cost(self) -> Drafter:
        """The same drafter where its work is part of measured step times: memory and limit stay."""
        kept = {
            "memory_bytes": self.memory_bytes,
            "sequence_bytes": self.sequence_bytes,
            "ranks": self.ranks,
            "limit": self.limit,
            "parts": self.parts,
            "notes": self.notes,
        }
        cache = {"kv_bytes_per_token": self.kv_bytes_per_token, "kv_dtype": self.kv_dtype}
        return Drafter(self.method, "none" if self.shape == "none" else "lookup", **kept, **cache)

    def _pass(self, deployment: Deployment, batch: int, rows: int, heads: int, context: int) -> float:
        experts, per_token = self.mixture
        routed = self.expert_parameters / experts if experts else 0.0
        active = self.parameters * heads + routed * per_token
        visited = distinct_experts(experts, per_token, rows * deployment.shares) / deployment.shares
        read = self.parameters * heads + routed * visited
        moved = self.kv_bytes_per_token + self.shared_kv_bytes_per_token
        cache = moved * context * batch / self.ranks / deployment.device.achieved_bw
        launches = self.layers * KERNELS_PER_LAYER * deployment.device.launch_s
        return self._linear(deployment, active, read, rows) + cache + launches + self.pass_s

    def _linear(self, deployment: Deployment, active: float, read: float, rows: int) -> float:
        device = deployment.device
        width = self.bytes / self.parameters if self.parameters else 2.0
        flops = device.achieved_flops(self.compute)
        return linear_s(
            active / self.ranks, read * width / self.ranks, rows, flops, device.achieved_bw, device.overlap
        )
