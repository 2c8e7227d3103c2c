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


class GraphWriter:
    """Collects nodes and writes `path` (the graph) beside `path`.data (the weights)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data_name = path.name + ".data"
        self._data = path.with_name(self._data_name).open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._names: set[str] = set()

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add a weight; returns `name`."""
        array = np.ascontiguousarray(array)
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
        place = {"location": self._data_name, "offset": self._data.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(array.data)
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
        domains = {"": OPSET, MICROSOFT: 1, **{f.domain: 1 for f in functions}}
        model = helper.make_model(
            graph,
            functions=list(functions),
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()],
            ir_version=IR_VERSION,
            producer_name="trtspec",
        )
        helper.set_model_props(model, metadata or {})
        self._path.write_bytes(model.SerializeToString(deterministic=True))


def tensor(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """A graph input or output."""
    return helper.make_tensor_value_info(name, dtype, list(shape))
