"""Dimensions and scalars of a launch from the shapes of its tensors, by the names in `signature`.

Everything works on Python integers and on TensorRT's shape expressions alike: the symbolic operand stands on the
left, and ceiling division is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

from trtspec_plugins.signature import Divide, Scalar
from trtspec_plugins.tensorrt.plugins import Plugin


def launch_values(
    plugin: Plugin, shapes: Sequence[Sequence[Any]], given: Mapping[str, int]
) -> dict[str, Any]:
    """Name → value of every dimension and scalar. shapes: of the inputs, in order. given: what attributes say."""
    values: dict[str, Any] = dict(given)
    paged = bool(plugin.constants.get("PAGE"))
    for tensor, shape in zip(plugin.inputs, shapes, strict=True):
        for axis, name in enumerate(plugin.shape(tensor)):
            if paged and tensor.name in ("k", "v") and name in ("B", "S"):
                continue  # [pages, HKV, PAGE, HEAD_DIM]
            if name.isidentifier():
                values.setdefault(name, shape[axis])
            elif name == "S/PAGE":
                values["S"] = shape[axis] * plugin.constants["PAGE"]
    if "HKV" in values and "HQ" in values:
        values["G"] = values["HQ"] // values["HKV"]
    for name, parts in plugin.spread.items():
        values[name] = reduce(mul, (values[part] for part in parts))
    needed = [scalar.name for scalar in plugin.signature.scalars]
    if "NSPLIT" in needed:
        values.setdefault("NSPLIT", 1)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{plugin.name}: no input or attribute says {', '.join(missing)}")
    return values


def output_shape(names: Sequence[str], values: Mapping[str, Any], cdiv: Divide) -> tuple[Any, ...]:
    """The shape that `names` spell: a dimension, a number, or `NAME/number`, rounded up."""

    def dimension(name: str) -> Any:
        whole, divided, by = name.partition("/")
        size = int(whole) if whole.isdigit() else values[whole]
        return cdiv(size, int(by)) if divided else size

    return tuple(dimension(name) for name in names)


def scalar_names(plugin: Plugin) -> tuple[str, ...]:
    """The int32 arguments, in order."""
    scalars: tuple[Scalar, ...] = plugin.signature.scalars
    return tuple(scalar.name for scalar in scalars)
