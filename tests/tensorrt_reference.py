"""What a build for TensorRT leaves, with the graph in float32: ONNX Runtime has no bfloat16 kernels on a CPU."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from trtspec.compile.export_tensorrt import TensorRtOptions
from trtspec.compile.tensorrt import TensorRtRequest, export_graph, write_graph
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import TensorRtInfo


def export_float32(model: Path, into: Path, **settings: object) -> Path:
    """`export_graph` of `model` into the empty folder `into`, its graph then written again in float32."""
    request = TensorRtRequest(model, "tiny", {"method": "none"}, arch="sm_90", **settings)
    export_graph(request, into)
    shapes = dataclasses.replace(TensorRtInfo.read(into), dtype="float32")
    shapes.write(into)
    options = TensorRtOptions(
        dtype="float32",
        max_positions=EngineInfo.read(into).spec.max_seq_len,
        capacity=shapes.capacity,
        splits=shapes.splits,
        taps=request.taps,
        trees=shapes.trees,
        kv_cache=shapes.kv_cache,
    )
    write_graph(request, shapes, options, into)
    return into


def with_cache_scales(model: Path, into: Path, layers: int) -> Path:
    """A copy of `model` in the new folder `into` with scales of an FP8 KV cache, as ModelOpt's export has them."""
    shutil.copytree(model, into)
    tensors = safetensors.numpy.load_file(into / "model.safetensors")
    scales = iter(np.random.default_rng(0).uniform(0.02, 0.5, 2 * layers).astype(np.float32))
    for layer in range(layers):
        for part in "kv":
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = np.array(next(scales))
    safetensors.numpy.save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into
