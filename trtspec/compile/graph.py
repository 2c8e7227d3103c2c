"""A small writer for ONNX graphs whose weights go straight to disk.

Weights are appended to one external data file as they are added, so that a model of any size is written
with the memory of its largest tensor, and past protobuf's 2 GiB limit. Writing is deterministic: the same
calls give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"
_INLINE_BYTES = 1024  # smaller tensors live in the graph itself
_ALIGNMENT = 4096  # lets a runtime map the file
_FOUR_BITS = (TensorProto.FLOAT4E2M1,)


class GraphWriter:
    """Collects nodes and writes `path` (the graph) beside `path`.data (the weights)."""

    def __init__(self, path: Path, opset: int = OPSET, ir_version: int = IR_VERSION) -> None:
        self._path = path
        self._opset, self._ir_version = opset, ir_version
        self._data_name = path.name + ".data"
        self._data = path.with_name(self._data_name).open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._names: set[str] = set()

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add a weight; returns `name`. 4-bit values (ml_dtypes) are stored two a byte, the first in the low half."""
        array = np.asarray(array, order="C")  # np.ascontiguousarray would make a vector of a scalar
        if array.nbytes <= _INLINE_BYTES:
            self._initializers.append(onnx.numpy_helper.from_array(array, name))
            return name
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        stored = array.view(np.uint8).ravel()
        if tensor.data_type in _FOUR_BITS:
            stored = stored[0::2] | stored[1::2] << 4
        place = {"location": self._data_name, "offset": self._data.tell(), "length": stored.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(stored.data)
        self._initializers.append(tensor)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node, named after its first output, which is returned. Attributes that are None are left out."""
        outputs = [outputs] if isinstance(outputs, str) else list(outputs)
        given = {k: v for k, v in attributes.items() if v is not None}
        self._nodes.append(
            helper.make_node(op, list(inputs), outputs, name=outputs[0], domain=domain, **given)
        )
        return outputs[0]

    def save(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        functions: Sequence[onnx.FunctionProto] = (),
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Write both files; the writer is spent afterwards."""
        self._data.close()
        graph = helper.make_graph(self._nodes, "trtspec", list(inputs), list(outputs), self._initializers)
        used = sorted({"", *(node.domain for node in self._nodes), *_body_domains(functions)})
        domains = {domain: 1 if domain else self._opset for domain in used}
        model = helper.make_model(
            graph,
            functions=list(functions),
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()],
            ir_version=self._ir_version,
            producer_name="trtspec",
        )
        helper.set_model_props(model, metadata or {})
        self._path.write_bytes(model.SerializeToString(deterministic=True))


def _body_domains(functions: Sequence[onnx.FunctionProto]) -> set[str]:
    return {node.domain for function in functions for node in function.node}


def tensor(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """A graph input or output."""
    return helper.make_tensor_value_info(name, dtype, list(shape))
