"""The end of a block's graph, for every backend: from the drafted rows' logits to tokens and confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.dflash import DFlashNumbers
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.compile.graph import tensor
from trtspec.compile.heads.graph import HeadLayers

if TYPE_CHECKING:
    from trtspec.compile.export_tensorrt import TensorRtLayers

_F32, _I32 = TensorProto.FLOAT, TensorProto.INT32


class BlockTokens:
    """What of a block's graph gives its tokens: the likeliest ones, or what DSpark's serial head makes of them.

    drafts: D. vocab_size: V, of the logits.
    """

    def __init__(
        self,
        layers: HeadLayers | TensorRtLayers,
        head: Head,
        numbers: DFlashNumbers,
        drafts: int,
        vocab_size: int,
    ) -> None:
        self.layers, self.head, self.n = layers, head, numbers
        self.drafts, self.vocab_size = drafts, vocab_size
        self.node = layers.writer.node
        self._known: set[str] = set()

    def write(self, logits: str, state: str, last: str) -> list[onnx.ValueInfoProto]:
        """The graph's outputs. logits [S, D, V], state [S, D, H]: of the drafted rows. last int64 [S]: the last known
        token, which only a serial head reads."""
        logits = self._wide(logits)
        outputs = [tensor("tokens", _I32, ["S", self.drafts])]
        if self.n.markov:
            ids = self._serial(logits, state, last)
        else:
            ids = self.node("ArgMax", [logits], "tokens.ids", axis=-1, keepdims=0)
        self.node("Cast", [ids], "tokens", to=_I32)  # TensorRT's own type for them
        if self.n.confidence:
            outputs.append(tensor("confidence", _F32, ["S", self.drafts]))
        return outputs

    def _serial(self, logits: str, state: str, last: str) -> str:
        """Token after token (2607.05147): the logits of each, biased by the token before it."""
        node, n, drafts = self.node, self.n, self.drafts
        table = self._constant("markov_w1.weight", self.head.array("markov_w1.weight"))
        output = self.head.array("markov_w2.weight")[: self.vocab_size].T
        output = self._constant("markov_w2.weight", output)
        axis = self.layers.writer.constant("step_axis", np.array([1], np.int64))
        rows = {"hidden": state, "own": logits}
        for name, source in rows.items():
            node("Split", [source], [f"{name}.{i}.row" for i in range(drafts)], axis=1, num_outputs=drafts)
        previous, memory = last, None
        tokens, confidences = [], []
        for step in range(drafts):
            hidden, own = (node("Squeeze", [f"{x}.{step}.row", axis], f"{x}.{step}") for x in rows)
            embedded = node("Gather", [table, previous], f"markov.{step}")
            if n.confidence:
                both = node("Concat", [hidden, embedded], f"both.{step}", axis=-1)
                sure = node("Sigmoid", [self._plain("confidence_proj", both, step)], f"sure.{step}")
                confidences.append(self._wide(sure))
            code, memory = self._code(step, hidden, embedded, memory)
            bias = node("MatMul", [code, output], f"bias.{step}")
            total = node("Add", [own, self._wide(bias)], f"total.{step}")
            previous = node("ArgMax", [total], f"token.{step}", axis=-1, keepdims=0)
            tokens.append(node("Unsqueeze", [previous, axis], f"column.{step}"))
        if confidences:
            node("Concat", confidences, "confidence", axis=1)
        return node("Concat", tokens, "tokens.ids", axis=1)

    def _code(self, step: int, hidden: str, embedded: str, memory: str | None) -> tuple[str, str | None]:
        """(what the Markov head's output layer reads [S, r], its state afterwards) for one step."""
        node, n = self.node, self.n
        if n.markov == "vanilla":
            return embedded, None
        if n.markov == "gated":
            both = node("Concat", [hidden, embedded], f"gate.{step}.in", axis=-1)
            gate = node("Sigmoid", [self._plain("gate_proj", both, step)], f"gate.{step}")
            return node("Mul", [gate, embedded], f"gated.{step}"), None
        memory = memory or node("Sub", [embedded, embedded], "memory.none")  # zeros, as many as sequences
        joint = node("Concat", [memory, embedded, hidden], f"joint.{step}.in", axis=-1)
        parts = [f"joint.{step}.{x}" for x in ("gate", "candidate", "output")]
        node("Split", [self._plain("joint_proj", joint, step)], parts, axis=-1, num_outputs=3)
        gate = node("Sigmoid", [parts[0]], f"keep.{step}")
        candidate = node("Tanh", [parts[1]], f"new.{step}")
        # gate · memory + (1 − gate) · candidate
        change = node("Sub", [memory, candidate], f"change.{step}")
        kept = node("Mul", [gate, change], f"kept.{step}")
        memory = node("Add", [candidate, kept], f"memory.{step}")
        return node("Tanh", [parts[2]], f"code.{step}"), memory

    def _plain(self, name: str, source: str, step: int) -> str:
        """A linear layer with bias over [S, I], whose weights all steps share."""
        weight = self._constant(f"{name}.weight", self.head.array(f"{name}.weight"))
        bias = self._constant(f"{name}.bias", self.head.array(f"{name}.bias"))
        return self.node("Gemm", [source, weight, bias], f"{name}.{step}", transB=1)

    def _wide(self, source: str) -> str:
        """In float32, in which scores are compared and given out."""
        return self.node("Cast", [source], f"{source}.float", to=_F32)

    def _constant(self, name: str, array: np.ndarray) -> str:
        """A constant, written once however often it is used."""
        if name not in self._known:
            self._known.add(name)
            self.layers.constant(name, array)
        return name
