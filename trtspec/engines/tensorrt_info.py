"""`tensorrt.json`: the static shapes a TensorRT graph is for, and, once a plan was built, what it was built with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtspec.errors import SetupError

FILE = "tensorrt.json"
GRAPH = "model.onnx"
PLAN = "model.plan"
KvCache = Literal["auto", "fp8"]
OLDEST_TENSORRT = (10, 15)  # the first with an in-place KV cache update
MEMORY_BOUND_ROWS = 128  # of a run, about: more turn the linear layers compute-bound
LAYERS = "model.layers.json"  # what the plan is made of, as TensorRT's inspector lists it


@dataclass(frozen=True, slots=True)
class Profile:
    """One static shape: `rows` rows of each of `batch` sequences, and logits of `logits` rows of them all.

    reads: rows that nobody wants logits of ("prompt", one sequence at a time) or rows of steps, of all slots.
    """

    batch: int
    rows: int
    logits: int
    reads: Literal["steps", "prompt"] = "steps"


def mask_words(rows: int) -> int:
    """Words of 32 bits that say which of a step's rows one of them sees."""
    return -(-rows // 32)


COMBINE, APPEND = "SpecVerifyCombine", "KvAppend"  # plugins besides attention


def attention_plugin(splits: int, trees: bool, fp8: bool) -> str:
    """Which attention a graph has: keys divided into pieces, rows under a mask, an FP8 cache."""
    return f"SpecVerify{'Split' * (splits > 1)}{'Tree' * trees}{'Fp8' * fp8}Attention"


def int4_plugin(bits: Literal[4, 8]) -> str:
    """Attention over QuantSpec's cache, of which a draft reads 4 bits and a target 8."""
    return "Int4KvAttention" if bits == 8 else "Int4KvDraftAttention"


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """What a plan is bound to. version: of TensorRT. sm: of the GPU, as "sm_90". sha256: of the plan's bytes.

    attention_layers: layers of the plan that are our attention plugin; fewer than the model's means a parser took
    something else for it.
    """

    version: str
    sm: str
    device: str
    sha256: str
    attention_layers: int


@dataclass(frozen=True, slots=True)
class TensorRtInfo:
    """dtype: of activations and KV. capacity: keys a sequence's cache holds, 0 in a graph without attention. splits:
    pieces of attention's keys.

    arch: GPU architecture that was planned for. profiles: in the order they have in the plan. trees: attention takes
    a mask of the step's rows. kv_cache: "fp8" keeps keys and values as e4m3, with the checkpoint's scales. quantized:
    keys a sequence's hierarchical cache holds in codes, before `capacity` in full, and 0 where it is no such cache;
    kv_bits: of the codes that are read. built: None for a graph that no plan was built from yet.
    """

    dtype: Literal["float32", "float16", "bfloat16"]
    capacity: int
    splits: int
    arch: str
    profiles: tuple[Profile, ...]
    trees: bool = False
    kv_cache: KvCache = "auto"
    quantized: int = 0
    kv_bits: Literal[4, 8] = 8
    built: BuiltPlan | None = None

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of those that the graph holds."""
        if not self.capacity:
            return ()
        if self.quantized:
            return (int4_plugin(self.kv_bits),)
        fp8 = self.kv_cache == "fp8"
        names = [attention_plugin(self.splits, self.trees, fp8), *[COMBINE] * (self.splits > 1)]
        return (*names, *[APPEND] * fp8)

    @property
    def cache_dtype(self) -> str:
        """PyTorch's name of the KV cache's elements; FP8's are bytes, and floats in a graph of float32."""
        return "uint8" if self.kv_cache == "fp8" and self.dtype != "float32" else self.dtype

    def write(self, folder: Path) -> None:
        """Write `tensorrt.json` into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
        (folder / FILE).write_text(text + "\n")

    @staticmethod
    def read(folder: Path) -> TensorRtInfo:
        """Read `tensorrt.json` of `folder`; SetupError when it is missing."""
        path = folder / FILE
        if not path.is_file():
            raise SetupError(
                "not a TensorRT engine folder", where=str(path), hint="run `trtspec build` first"
            )
        raw = json.loads(path.read_text())
        profiles = tuple(Profile(**profile) for profile in raw["profiles"])
        built = BuiltPlan(**raw["built"]) if raw["built"] else None
        return TensorRtInfo(**raw | {"profiles": profiles, "built": built})
