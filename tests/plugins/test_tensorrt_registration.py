"""The plugins against the real `tensorrt.plugin`: a layer is built as TensorRT builds one, its grid, block, shared
memory and scalars are resolved for concrete shapes, and the kernel runs with exactly those."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from trtspec_plugins.aot import compile_all
from trtspec_plugins.index import CompiledKernel, read
from trtspec_plugins.interpreter import Interpreter, Launch
from trtspec_plugins.references.verify_attention import verify_attention
from trtspec_plugins.signature import SIGNATURES, Scalar
from trtspec_plugins.tensorrt.plugins import PLUGINS
from trtspec_plugins.tensorrt.registration import register
from trtspec_plugins.variants import arch_of, variants

from tests.plugins.tensorrt_host import VARIABLE, BuiltLayer, Layer, tensorrt_module, version_of, wheels

COMPILED = (
    r"verify_attention-fp16-d128-((m128|m64|small)|m128-(tree|split))-sm_90a|verify_combine-fp16-d128-sm_90a"
)
TYPES = {torch.float16: "HALF", torch.float32: "FLOAT", torch.int32: "INT32"}
HEADS, GROUP, DIM, CAPACITY = 2, 3, 128, 160


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Path:
    """Kept between runs, as compilation takes seconds a variant; what changed is compiled again."""
    pytest.importorskip(
        "triton", reason="the Triton compiler is not installed: pip install 'trtspec[kernels]'"
    )
    folder = pytestconfig.cache.mkdir("trtspec-registration")
    list(compile_all([v for v in variants() if re.fullmatch(COMPILED, v.name)], folder, jobs=1))
    return folder


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as process:
        yield process


@pytest.fixture(scope="module", params=wheels() or [None], ids=lambda w: version_of(w) if w else "none")
def trt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compiled: Path
) -> Iterator[ModuleType]:
    if request.param is None:
        pytest.skip(f"no bindings wheels: ${VARIABLE} names no folder of them (see tensorrt_host.py)")
    with tensorrt_module(request.param, tmp_path_factory.mktemp("bindings")) as module:
        register((9, 0), compiled)
        yield module


class Step:
    """Tensors of one verify step with ragged lengths: B sequences, T rows."""

    def __init__(self, batch: int, rows: int, seed: int = 0, tree: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.shape = batch, rows
        self.q = torch.tensor(rng.standard_normal((batch, rows, HEADS * GROUP, DIM))).half()
        self.k, self.v = (
            torch.tensor(rng.standard_normal((batch, HEADS, CAPACITY, DIM))).half() for _ in "kv"
        )
        tokens = rng.integers(0, rows + 1, batch)
        self.q_len = torch.tensor(tokens, dtype=torch.int32)
        self.kv_len = torch.tensor(tokens + rng.integers(0, CAPACITY - rows, batch), dtype=torch.int32)
        chain = np.tril(np.ones((rows, 32 * -(-rows // 32)), bool))
        self.mask = torch.tensor(np.packbits(chain, 1, "little").view("<i4")[None].repeat(batch, 0))
        self.inputs = [self.q, self.k, self.v, self.kv_len, self.q_len, *([self.mask] if tree else [])]

    @property
    def expected(self) -> np.ndarray:
        tensors = (self.q, self.k, self.v, self.kv_len, self.q_len)
        return verify_attention(*(tensor.numpy() for tensor in tensors))

    def layer(self, trt: ModuleType, name: str, **attributes: object) -> Layer:
        """Batch and rows dynamic, as in a plan with several profiles; 8 sequences of 48 rows at most."""
        largest = {0: 8, 1: 48}
        dims, limits = [], []
        for tensor in self.inputs:
            cache = tensor is self.k or tensor is self.v
            dynamic = [0] if cache or tensor.ndim == 1 else [0, 1]
            dims.append([-1 if axis in dynamic else size for axis, size in enumerate(tensor.shape)])
            limits.append(
                [largest[axis] if axis in dynamic else size for axis, size in enumerate(tensor.shape)]
            )
        if len(self.inputs) == 6:
            dims[5][2], limits[5][2] = -1, 2
        inputs = [(TYPES[tensor.dtype], d) for tensor, d in zip(self.inputs, dims)]
        return Layer(trt, name, inputs, attributes, limits)


def record_of(folder: Path, built: BuiltLayer) -> CompiledKernel:
    """The compiled variant whose PTX the layer holds."""
    return next(record for record in read(folder) if record.ptx(folder).encode() == built.ptx)


def launched(interpreter: Interpreter, folder: Path, plugin: str, built: BuiltLayer, inputs: list) -> list:
    """Outputs of the kernel under the grid and scalars that the layer resolves to."""
    record, shapes = record_of(folder, built), [tuple(tensor.shape) for tensor in inputs]
    resolved = built.resolve(shapes)
    assert resolved.block == (record.threads, 1, 1) and resolved.shared_bytes == record.shared_bytes
    kinds = {name: dtype for dtype, name in TYPES.items()}
    outputs = [
        torch.full(shape, float("nan"), dtype=kinds[kind.name])
        for shape, kind in zip(resolved.outputs, built.output_types)
    ]
    given = iter([*inputs, *resolved.scalars, *outputs])
    constants, signature = dict(record.constants), SIGNATURES[PLUGINS[plugin].kernel]
    arguments = tuple(
        next(given) if isinstance(argument, Scalar) or argument.present(constants) else None
        for argument in (*signature.inputs, *signature.scalars, *signature.outputs)
    )
    assert next(given, None) is None, "every argument of the entry is one of the kernel's"
    outcome = interpreter.run(Launch(record.kernel, resolved.grid, arguments, constants))
    return [t for t, argument in zip(outcome.arguments, arguments) if any(argument is o for o in outputs)]


def assert_close(found: torch.Tensor, expected: np.ndarray) -> None:
    assert np.abs(found.double().numpy() - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 7), (3, 43)])
@pytest.mark.parametrize("tactic", [1, 2, 3])
def test_attention_is_the_reference_under_tensorrts_launch(
    trt: ModuleType, compiled: Path, interpreter: Interpreter, batch: int, rows: int, tactic: int
) -> None:
    """43 rows of a group of 3 are 129: two tiles of 128, three of 64."""
    step = Step(batch, rows)
    layers = step.layer(trt, "SpecVerifyAttention").build()
    tiles = [dict(record_of(compiled, layers[t]).constants)["BLOCK_M"] for t in sorted(layers)]
    assert tiles == [128, 64, 64]
    built = layers[tactic]
    tile = tiles[tactic - 1]
    assert built.resolve([t.shape for t in step.inputs]).grid == (-(-rows * GROUP // tile), HEADS, batch)
    (out,) = launched(interpreter, compiled, "SpecVerifyAttention", built, step.inputs)
    assert_close(out, step.expected)


def test_a_tree_mask_is_one_more_input(trt: ModuleType, compiled: Path, interpreter: Interpreter) -> None:
    """A chain's own mask gives what the chain kernel gives."""
    step = Step(2, 35, tree=True)
    for built in step.layer(trt, "SpecVerifyTreeAttention").build().values():
        (out,) = launched(interpreter, compiled, "SpecVerifyTreeAttention", built, step.inputs)
        assert_close(out, step.expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_split_keys_and_their_merge_are_two_plugins(
    trt: ModuleType, compiled: Path, interpreter: Interpreter, splits: int
) -> None:
    step = Step(2, 9)
    built = step.layer(trt, "SpecVerifySplitAttention", splits=splits).build()[1]
    pieces = launched(interpreter, compiled, "SpecVerifySplitAttention", built, step.inputs)
    assert [tuple(t.shape) for t in pieces] == [
        (splits, 2, 9, HEADS * GROUP, DIM),
        (splits, 2, 9, HEADS * GROUP),
    ]
    inputs = [("FLOAT", [splits, -1, -1, HEADS * GROUP, DIM]), ("FLOAT", [splits, -1, -1, HEADS * GROUP])]
    limits = [[splits, 8, 48, HEADS * GROUP, DIM], [splits, 8, 48, HEADS * GROUP]]
    merge = Layer(trt, "SpecVerifyCombine", inputs, {"dtype": "float16"}, limits).build()[1]
    (out,) = launched(interpreter, compiled, "SpecVerifyCombine", merge, pieces)
    assert_close(out, step.expected)


def test_every_plugin_registers_and_registering_again_changes_nothing(
    trt: ModuleType, compiled: Path
) -> None:
    register((9, 0), compiled)
    assert all(hasattr(trt.plugin.op.trtspec, name) for name in PLUGINS)


def test_a_missing_variant_is_named(trt: ModuleType) -> None:
    """Nothing was compiled for pages here: the builder must say so, not launch another kernel."""
    cache = ("HALF", [64, HEADS, 64, DIM])
    inputs = [("HALF", [2, 4, 6, DIM]), cache, cache, ("INT32", [2]), ("INT32", [2]), ("INT32", [2, 8])]
    layer = Layer(trt, "SpecVerifyPagedAttention", inputs, {}, [dims for _, dims in inputs])
    with pytest.raises(
        ValueError, match=r"no variant of verify_attention is compiled for sm_90a.*'PAGE': 64"
    ):
        layer.build()


def test_the_caches_of_a_compaction_are_the_inputs_memory(trt: ModuleType) -> None:
    cache = ("HALF", [2, HEADS, CAPACITY, DIM])
    inputs = [cache, cache, ("INT32", [2, 5]), ("INT32", [2]), ("INT32", [2])]
    layer = Layer(trt, "KvCompact", inputs, {}, [dims for _, dims in inputs])
    assert layer.aliases == [0, 1]


def test_an_fp8_cache_is_written_where_it_lies(trt: ModuleType) -> None:
    new, cache, lengths = ("HALF", [2, 5, HEADS, DIM]), ("FP8", [2, HEADS, CAPACITY, DIM]), ("INT32", [2])
    inputs = [new, new, cache, cache, lengths, lengths, ("FLOAT", [HEADS]), ("FLOAT", [HEADS])]
    layer = Layer(trt, "KvAppend", inputs, {}, [dims for _, dims in inputs])
    assert layer.aliases == [2, 3]


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 9), "sm_80"), ((10, 3), "sm_80")]
)
def test_targets_without_forward_compatibility_serve_only_their_own_gpu(
    capability: tuple[int, int], arch: str
) -> None:
    assert arch_of(capability) == arch
