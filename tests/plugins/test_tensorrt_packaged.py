"""Every plugin, as TensorRT would build it from the kernels that the wheel carries."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from trtspec_plugins.index import COMPILED, CompiledKernel, read
from trtspec_plugins.signature import cdiv
from trtspec_plugins.tensorrt.plugins import PLUGINS, Plugin
from trtspec_plugins.tensorrt.registration import register

from tests.plugins.tensorrt_host import VARIABLE, Layer, tensorrt_module, version_of, wheels

SIZES = {
    "B": 2, "T": 5, "T/32": 1, "HQ": 8, "HKV": 2, "S": 256, "S/GROUP": 2, "S/PAGE": 4, "HEAD_DIM": 128,
    "HEAD_DIM/2": 64, "NSPLIT": 2, "V": 1000, "R": 40, "A": 4, "L": 64, "2": 2,
}  # fmt: skip
ATTRIBUTES = {
    "splits": 2, "slices": 2, "dtype": "bfloat16", "draft_length": 7, "min_ngram": 2, "max_ngram": 4, "stop": -1,
}  # fmt: skip
TYPES = {
    "act": "BF16",
    "kv": "BF16",
    "bits": "BF16",
    "e4m3": "FP8",
    "i32": "INT32",
    "fp32": "FLOAT",
    "u8": "UINT8",
}


@pytest.fixture(scope="module", params=wheels() or [None], ids=lambda w: version_of(w) if w else "none")
def trt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    if request.param is None:
        pytest.skip(f"no bindings wheels: ${VARIABLE} names no folder of them (see tensorrt_host.py)")
    if not (COMPILED / "index.json").exists():
        pytest.skip("the kernels are not compiled: python -m trtspec_plugins.aot")
    with tensorrt_module(request.param, tmp_path_factory.mktemp("bindings")) as module:
        register((9, 0))
        yield module


@pytest.fixture(scope="module")
def by_ptx() -> dict[bytes, CompiledKernel]:
    return {record.ptx().encode(): record for record in read() if record.arch == "sm_90a"}


def shapes_of(plugin: Plugin) -> list[list[int]]:
    shapes = [[SIZES[part] for part in plugin.shape(tensor)] for tensor in plugin.inputs]
    if page := plugin.constants.get("PAGE"):
        for index, tensor in enumerate(plugin.inputs):
            if tensor.name in ("k", "v"):
                shapes[index] = [8, SIZES["HKV"], page, SIZES["HEAD_DIM"]]
    return shapes


@pytest.mark.parametrize("name", PLUGINS)
def test_its_launch_fits_the_entry_that_was_compiled_for_it(
    trt: ModuleType, by_ptx: dict[bytes, CompiledKernel], name: str
) -> None:
    plugin, shapes = PLUGINS[name], shapes_of(PLUGINS[name])
    types = TYPES | ({"kv": "FP8"} if plugin.constants.get("FP8") else {})
    inputs = [(types[tensor.dtype], shape) for tensor, shape in zip(plugin.inputs, shapes)]
    attributes = {key: ATTRIBUTES[key] for key in plugin.attributes}
    values = {**SIZES, "G": SIZES["HQ"] // SIZES["HKV"], "D": 7, "ROWS": 2 * 5 * 8}
    values["NSPLIT"] = (
        2 if plugin.scalars or plugin.kernel in ("verify_combine", "spec_accept_combine") else 1
    )
    built = Layer(trt, name, inputs, attributes, shapes).build()
    assert len(built) == tactics_of(plugin)
    for layer in built.values():
        record, launch = by_ptx[layer.ptx], layer.resolve(shapes)
        assert layer.entry == record.entry
        assert launch.grid == plugin.signature.grid(values, dict(record.constants), cdiv)
        kinds = ["pointer"] * len(inputs) + ["i32"] * len(launch.scalars) + ["pointer"] * len(launch.outputs)
        assert list(record.parameters) == kinds


def tactics_of(plugin: Plugin) -> int:
    """Tiles of 128 and of 64 rows, and of the plain kernels one within 48 KiB of shared memory."""
    if plugin.kernel != "verify_attention":
        return 1
    return 2 if plugin.constants["FP8"] or plugin.constants["SPLIT"] else 3
