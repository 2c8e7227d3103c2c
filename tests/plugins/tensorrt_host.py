"""A host for `tensorrt.plugin` without TensorRT: what libnvinfer does with a quick plugin when an engine is built.

The Python package `tensorrt.plugin` is the real one, from a bindings wheel; the classes it needs of the compiled
module are made here. Dimension expressions are functions of the concrete input shapes, so that one built layer can
be resolved for any of them.

Wheels are looked for in the folder $TRTSPEC_TENSORRT_BINDINGS names; one command fills it (1 MB each, nothing is
installed; of the wheels only `tensorrt_bindings/plugin/*.py` is used):

    pip download --no-deps -d FOLDER tensorrt-cu12-bindings==10.15.1.29 tensorrt-cu13-bindings==11.4.0.106
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "TRTSPEC_TENSORRT_BINDINGS"
Shapes = Sequence[Sequence[int]]


def wheels() -> list[Path]:
    """The bindings wheels there are, oldest TensorRT first."""
    folder = os.environ.get(VARIABLE)
    found = Path(folder).glob("tensorrt_cu*_bindings-*.whl") if folder else ()
    return sorted(found, key=lambda path: [int(part) for part in version_of(path).split(".")])


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1].removesuffix(".post1")


@contextmanager
def tensorrt_module(wheel: Path, folder: Path) -> Iterator[types.ModuleType]:
    """`tensorrt` and `tensorrt.plugin` importable while the block runs; the wheel is unpacked into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("tensorrt_bindings/plugin/")]
        archive.extractall(folder, members)
    trt = _module()
    trt.__version__ = version_of(wheel)
    trt.__path__ = [str(folder / "tensorrt_bindings")]
    sys.modules["tensorrt"] = trt
    try:
        trt.plugin = importlib.import_module("tensorrt.plugin")
        yield trt
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
            del sys.modules[name]


class Expression:
    """A dimension: a function of the input shapes, or a number."""

    def __init__(self, value: Callable[[Shapes], int] | int) -> None:
        self._value = value

    def is_constant(self) -> bool:
        return isinstance(self._value, int)

    def get_constant_value(self) -> int:
        return self._value

    def at(self, shapes: Shapes) -> int:
        return self._value if isinstance(self._value, int) else self._value(shapes)


class Operation(enum.Enum):
    SUM = enum.auto()
    PROD = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    SUB = enum.auto()
    EQUAL = enum.auto()
    LESS = enum.auto()
    FLOOR_DIV = enum.auto()
    CEIL_DIV = enum.auto()


_ARITHMETIC: Mapping[Operation, Callable[[int, int], int]] = {
    Operation.SUM: lambda a, b: a + b,
    Operation.PROD: lambda a, b: a * b,
    Operation.MAX: max,
    Operation.MIN: min,
    Operation.SUB: lambda a, b: a - b,
    Operation.EQUAL: lambda a, b: int(a == b),
    Operation.LESS: lambda a, b: int(a < b),
    Operation.FLOOR_DIV: lambda a, b: a // b,
    Operation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Expressions:
    """TensorRT's IExprBuilder."""

    def constant(self, value: int) -> Expression:
        return Expression(int(value))

    def operation(self, operation: Operation, first: Expression, second: Expression) -> Expression:
        compute = _ARITHMETIC[operation]
        if first.is_constant() and second.is_constant():
            return Expression(compute(first.at(()), second.at(())))
        return Expression(lambda shapes: compute(first.at(shapes), second.at(shapes)))


class Dims(list):
    MAX_DIMS = 8


class DimsExprs(list):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


@dataclass
class TensorDescription:
    type: Any = None
    format: Any = None
    dims: Dims | None = None
    scale: float = 1.0


@dataclass
class DynamicDescription:
    desc: TensorDescription
    min: Dims
    opt: Dims
    max: Dims


@dataclass
class Field:
    name: str
    data: Any
    type: Any

    def __post_init__(self) -> None:
        if isinstance(self.data, bytes):  # the compiled module hands every field back as an array
            self.data = np.frombuffer(self.data, np.int8)


class Registry:
    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str = "") -> bool:
        self._creators[creator.name, creator.plugin_version, namespace or creator.plugin_namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self._creators[name, version, namespace]


def _module() -> types.ModuleType:
    trt = types.ModuleType("tensorrt")
    registry = Registry()

    def names(title: str, *members: str) -> type[enum.Enum]:
        return enum.Enum(title, {member: index for index, member in enumerate(members)})

    class Logger:
        WARNING = 2

        def log(self, *_: object) -> None: ...

    empty = (
        "ITensor IPluginV3 IPluginV3QuickCore IPluginV3QuickBuild IPluginV3QuickAOTBuild IPluginV3QuickRuntime "
        "IPluginCreatorV3Quick ISymExpr"
    )
    for name in empty.split():
        setattr(trt, name, type(name, (), {}))
    data_types = "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4"
    field_types = "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 INT64 CHAR DIMS UNKNOWN"
    trt.Logger = Logger
    trt.DataType = names("DataType", *data_types.split())
    trt.TensorFormat = names("TensorFormat", "LINEAR", "HWC", "CHW32")
    trt.PluginFieldType = names("PluginFieldType", *field_types.split())
    trt.TensorRTPhase = names("TensorRTPhase", "BUILD", "RUNTIME")
    requests = ("UNKNOWN", "PREFER_JIT", "PREFER_AOT", "STRICT_JIT", "STRICT_AOT")
    trt.QuickPluginCreationRequest = names("QuickPluginCreationRequest", *requests)
    trt.PluginArgType = names("PluginArgType", "INT")
    trt.PluginArgDataType = names("PluginArgDataType", "INT8", "INT16", "INT32")
    trt.DimensionOperation = Operation
    trt.IDimensionExpr, trt.IExprBuilder = Expression, Expressions
    trt.Dims, trt.DimsExprs = Dims, DimsExprs
    trt.PluginTensorDesc, trt.DynamicPluginTensorDesc = TensorDescription, DynamicDescription
    trt.PluginField, trt.PluginFieldCollection = Field, list
    trt.get_plugin_registry = lambda: registry
    return trt


@dataclass(frozen=True)
class Resolved:
    """A launch for concrete input shapes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    scalars: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]


class BuiltLayer:
    """One tactic of a layer, as an engine keeps it: no Python of the plugin is called any more."""

    def __init__(self, entry: str, ptx: bytes, launch: Any, scalars: Sequence[Any], layer: Layer) -> None:
        self.entry, self.ptx = entry, ptx
        self._launch, self._scalars = launch, scalars
        self.output_types, self._shapes, self.aliases = layer.output_types, layer.output_shapes, layer.aliases

    def resolve(self, shapes: Shapes) -> Resolved:
        def three(prefix: str) -> tuple[int, int, int]:
            return tuple(getattr(self._launch, f"{prefix}_{axis}").at(shapes) for axis in "xyz")

        return Resolved(
            three("grid"),
            three("block"),
            self._launch.shared_mem.at(shapes),
            tuple(scalar.expr.at(shapes) for scalar in self._scalars),
            tuple(tuple(dim.at(shapes) for dim in shape) for shape in self._shapes),
        )


class Layer:
    """A plugin layer of a network: build it as TensorRT does, in its order of calls.

    inputs: (type name, dimensions; −1 for a dynamic one). limits: the largest of each dynamic dimension.
    """

    def __init__(
        self,
        trt: types.ModuleType,
        name: str,
        inputs: Sequence[tuple[str, Sequence[int]]],
        attributes: Mapping[str, Any],
        limits: Shapes,
    ) -> None:
        self._trt = trt
        definition = getattr(trt.plugin.op.trtspec, name)
        create = definition(*(trt.ITensor() for _ in inputs), **attributes)
        _, _, self._plugin = create(trt.QuickPluginCreationRequest.STRICT_AOT)
        self._types = [getattr(trt.DataType, kind) for kind, _ in inputs]
        self._dims, self._limits = [list(dims) for _, dims in inputs], [list(limit) for limit in limits]
        self._build = Expressions()
        self.output_types = self._plugin.get_output_data_types(self._types, [len(d) for d in self._dims])
        self.output_shapes = self._plugin.get_output_shapes(self._symbols(), [], self._build)
        self.aliases = [self._plugin.get_aliased_input(i) for i in range(len(self.output_shapes))]

    def _symbols(self) -> list[list[Expression]]:
        def symbol(index: int, axis: int, size: int) -> Expression:
            return Expression(size) if size >= 0 else Expression(lambda shapes: shapes[index][axis])

        return [
            [symbol(index, axis, size) for axis, size in enumerate(dims)]
            for index, dims in enumerate(self._dims)
        ]

    def _described(self) -> list[DynamicDescription]:
        def described(kind: Any, dims: Sequence[int], most: Sequence[int]) -> DynamicDescription:
            desc = TensorDescription(kind, self._trt.TensorFormat.LINEAR, Dims(dims))
            least = Dims(1 if size < 0 else size for size in dims)
            return DynamicDescription(desc, least, Dims(most), Dims(most))

        outputs = [[dim.at(()) if dim.is_constant() else -1 for dim in shape] for shape in self.output_shapes]
        largest = [[dim.at(self._limits) for dim in shape] for shape in self.output_shapes]
        kinds = [*self._types, *self.output_types]
        return [
            described(*of)
            for of in zip(kinds, [*self._dims, *outputs], [*self._limits, *largest], strict=True)
        ]

    def build(self) -> dict[int, BuiltLayer]:
        """Tactic → what the engine keeps."""
        described, count = self._described(), len(self._types)
        plugin = self._plugin
        combinations = plugin.get_supported_format_combinations(described, count)
        kinds = [entry.desc.type for entry in described]
        assert [entry.type for entry in combinations] == kinds, "the network's own types, in one combination"
        plugin.configure_plugin(described[:count], described[count:])
        built = {}
        for tactic in plugin.get_valid_tactics() or [0]:
            plugin.set_tactic(tactic)
            launch, scalars = types.SimpleNamespace(), _Scalars()
            symbols = self._symbols()
            plugin.get_launch_params(symbols, described, count, launch, scalars, self._build)
            for name, value in vars(launch).items():
                setattr(launch, name, value.expr)
            assert len(scalars) == scalars.nbSymExprs
            assert all(s.dtype is self._trt.PluginArgDataType.INT32 for s in scalars.values())
            entry, ptx = plugin.get_kernel(
                [entry.desc for entry in described[:count]], [entry.desc for entry in described[count:]]
            )
            built[tactic] = BuiltLayer(entry, ptx, launch, list(scalars.values()), self)
        return built


class _Scalars(dict):
    nbSymExprs = 0
