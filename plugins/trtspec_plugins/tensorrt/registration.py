"""Registration with `tensorrt.plugin`: shapes and types, tactics, and the ahead-of-time implementation.

What TensorRT is given for a plugin is PTX from the compiled index and expressions for grid and scalars; the built
engine then needs neither Python nor this package. Attributes and tactics choose among the compiled variants; a
tactic is the variant's place (from 1) among those that fit, the largest tile first: for attention 1 is M = 128 and
2 is M = 64.

Functions are made from the signature table and carry their own `__signature__`, which `tensorrt.plugin` reads.
Tested against the bindings of TensorRT 10.15 and 11.4 on a machine without a GPU; no engine was built with it yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing  # noqa: F401  TensorRT's plugin package uses it and does not import it

from trtspec_plugins.index import COMPILED, CompiledKernel, find, read
from trtspec_plugins.signature import Tensor
from trtspec_plugins.tensorrt.plugins import NAMESPACE, PLUGINS, Plugin
from trtspec_plugins.tensorrt.shapes import launch_values, output_shape, scalar_names
from trtspec_plugins.variants import ARCHITECTURES, arch_of

# Element type of a tensor → its TensorRT name; `act`, `kv` and `bits` are what the network gives.
_FIXED = {"fp32": "FLOAT", "i32": "INT32", "u8": "UINT8", "e4m3": "FP8"}
_TRITON = {"HALF": "fp16", "BF16": "bf16", "FP8": "u8", "INT8": "u8", "UINT8": "u8", "FLOAT": "fp32"}
_BITS = {"fp16": "i16", "bf16": "i16", "u8": "i8"}  # moved, never interpreted
_STRINGS = {"FLOAT": "FP32", "HALF": "FP16"}  # what autotune calls two of the types
_ACTIVATIONS = {"float16": "HALF", "bfloat16": "BF16"}


def register(capability: tuple[int, int], folder: Path = COMPILED, names: Iterable[str] = PLUGINS) -> None:
    """Register the plugins called `names` for a GPU of this compute capability. Doing so again changes nothing.

    Do this before an ONNX file that holds them is parsed. Raises ImportError without TensorRT, FileNotFoundError
    without compiled kernels, ValueError where none of them fits a plugin.
    """
    import tensorrt as trt
    import tensorrt.plugin as trtp

    records = read(folder)
    for name in names:
        if hasattr(getattr(trtp.op, NAMESPACE, None) or object(), name):
            continue
        _Registration(PLUGINS[name], trt, trtp, arch_of(capability), records, folder).register()


class _Registration:
    def __init__(
        self,
        plugin: Plugin,
        trt: ModuleType,
        trtp: ModuleType,
        arch: str,
        records: Sequence[CompiledKernel],
        folder: Path,
    ) -> None:
        self._plugin, self._trt, self._trtp = plugin, trt, trtp
        self._arch, self._records, self._folder = arch, records, folder

    def register(self) -> None:
        trtp, plugin = self._trtp, self._plugin
        name, desc = f"{NAMESPACE}::{plugin.name}", trtp.TensorDesc
        inputs = {tensor.name: desc for tensor in plugin.inputs}
        # Typing subscripts a tuple of any length; a single output is the descriptor itself.
        returned = desc if len(plugin.outputs) == 1 else tuple[(desc,) * len(plugin.outputs)]
        described = {**inputs, **plugin.attributes}
        trtp.register(name)(_spelled(self._describe, described, returned))
        combinations = list[trtp.AutoTuneCombination]
        trtp.autotune(name)(_spelled(self._tactics, {**described, "outputs": None}, combinations))
        implemented = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
        trtp.aot_impl(name)(
            _spelled(self._implement, {**described, "outputs": None, "tactic": int}, implemented)
        )

    def _split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """(input descriptors, attributes by name)."""
        count = len(self._plugin.inputs)
        return arguments[:count], dict(zip(self._plugin.attributes, arguments[count:]))

    def _values(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        given = {scalar: attributes[name] for name, scalar in self._plugin.scalars.items()}
        return launch_values(self._plugin, [tensor.shape_expr for tensor in inputs], given)

    def _describe(self, *arguments: Any) -> Any:
        """Shapes and types of the outputs."""
        inputs, attributes = self._split(arguments)
        values = self._values(inputs, attributes)
        by_name = dict(zip((tensor.name for tensor in self._plugin.inputs), inputs))
        described = []
        for tensor in self._plugin.outputs:
            if tensor.alias is not None:
                described.append(by_name[tensor.alias].aliased())
                continue
            shape = output_shape(self._plugin.shape(tensor), values, self._trtp.cdiv)
            dtype = getattr(self._trt.DataType, self._type(tensor, inputs, attributes))
            described.append(self._trtp.from_shape_expr(shape, dtype))
        return described[0] if len(described) == 1 else tuple(described)

    def _tactics(self, *arguments: Any) -> list[Any]:
        """The one combination of types that the network has, with as many tactics as variants were compiled."""
        *arguments, _ = arguments
        inputs, attributes = self._split(arguments)
        types = [
            self._type(tensor, inputs, attributes) for tensor in (*self._plugin.inputs, *self._plugin.outputs)
        ]
        words = ", ".join(_STRINGS.get(name, name) for name in types)
        count = len(self._candidates(inputs, attributes))
        return [self._trtp.AutoTuneCombination(words, "LINEAR", list(range(1, count + 1)))]

    def _implement(self, *arguments: Any) -> tuple[str, str, Any, Any]:
        """Entry, PTX, launch and scalars of one tactic; 0, TensorRT's default, is the first."""
        *arguments, _, tactic = arguments
        inputs, attributes = self._split(arguments)
        record = self._candidates(inputs, attributes)[max(0, tactic - 1)]
        values = self._values(inputs, attributes)
        launch = self._trtp.KernelLaunchParams()
        launch.grid_x, launch.grid_y, launch.grid_z = self._plugin.signature.grid(
            values, dict(record.constants), self._trtp.cdiv
        )
        launch.block_x, launch.shared_mem = record.threads, record.shared_bytes
        # The class decides the argument's width, and arithmetic leaves the class: so it is put on last.
        scalars = tuple(self._trtp.SymInt32(values[name]) for name in scalar_names(self._plugin))
        return record.entry, record.ptx(self._folder), launch, self._trtp.SymIntExprs.from_tuple(scalars)

    def _candidates(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[CompiledKernel]:
        """Compiled variants for these types and sizes, the largest tile first. Raises ValueError without one."""
        plugin = self._plugin
        types = {}
        for tensor in (*plugin.inputs, *plugin.outputs):
            if tensor.dtype in ("act", "kv", "bits"):
                kind = _TRITON[self._type(tensor, inputs, attributes)]
                types[tensor.dtype] = _BITS[kind] if tensor.dtype == "bits" else kind
        constants = dict(plugin.constants)
        if constants.get("FP8"):
            constants["FP8"] = ARCHITECTURES[self._arch].fp8
        constants |= self._sizes(inputs)
        found = find(self._records, plugin.kernel, self._arch, types, constants)
        found = [record for record in found if self._holds(record, inputs, attributes)]
        if not found:
            raise ValueError(
                f"{plugin.name}: no variant of {plugin.kernel} is compiled for {self._arch} with {types} and "
                f"{constants}; see `python -m trtspec_plugins.aot --list`"
            )
        return sorted(found, key=lambda record: (-dict(record.constants).get("BLOCK_M", 0), record.name))

    def _sizes(self, inputs: Sequence[Any]) -> dict[str, int]:
        """Dimensions that are constants of the kernel."""
        sizes = {}
        for tensor, desc in zip(self._plugin.inputs, inputs):
            for axis, name in enumerate(self._plugin.shape(tensor)):
                if name in self._plugin.signature.constants:
                    sizes[name] = int(desc.shape[axis])
        return sizes

    def _holds(self, record: CompiledKernel, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> bool:
        """Whether blocks that must hold a whole dimension do, at its largest."""
        constants = dict(record.constants)
        given = {scalar: attributes[name] for name, scalar in self._plugin.scalars.items()}
        return all(
            constants[block] >= (given.get(name) or self._largest(name, inputs))
            for block, name in self._plugin.covers.items()
        )

    def _largest(self, name: str, inputs: Sequence[Any]) -> int:
        """The most a dimension of the inputs can be."""
        tensor, desc = next((t, d) for t, d in zip(self._plugin.inputs, inputs) if name in t.shape)
        shape = desc.shape.max if desc.shape.is_dynamic else desc.shape
        return int(shape[self._plugin.shape(tensor).index(name)])

    def _type(self, tensor: Tensor, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> str:
        """TensorRT's name of a tensor's element type."""
        if tensor.dtype in _FIXED:
            return _FIXED[tensor.dtype]
        if self._plugin.dtype and tensor.dtype == "act":
            return _ACTIVATIONS[attributes["dtype"]]
        for declared, desc in zip(self._plugin.inputs, inputs):
            if declared.dtype == tensor.dtype:
                return desc.dtype.name
        raise ValueError(f"{self._plugin.name}: no input has the type of {tensor.name}")


def _spelled(
    function: Callable[..., Any], parameters: Mapping[str, type | None], returned: Any
) -> Callable[..., Any]:
    """`function` with the signature that `tensorrt.plugin` checks: names, and annotations unless None."""

    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, *(named[name] for name in parameters if name in named))

    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    listed = [
        inspect.Parameter(name, kind, annotation=empty if annotation is None else annotation)
        for name, annotation in parameters.items()
    ]
    wrapper.__signature__ = inspect.Signature(listed, return_annotation=returned)  # type: ignore[attr-defined]
    return wrapper
