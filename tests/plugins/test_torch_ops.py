"""`torch.ops.trtspec.*`: operators as PyTorch wants them, and what their Triton side launches.

The launches run in the interpreter, in a process of their own: the GPU script's dry run compares every operator's
Triton kernel with its CPU reference on small shapes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trtspec_plugins import torch_ops
from trtspec_plugins.references.int4_kv_attention import quantize
from trtspec_plugins.references.verify_attention import verify_attention

from tests.plugins.cases import Case, tensors_of

ROOT = Path(__file__).resolve().parents[2]


def integers(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(**changes: object) -> dict[str, torch.Tensor]:
    """Arguments by name, with finite padding: opcheck compares runs, and NaN is no equal of itself."""
    case = Case(group=3, past=(20, 0), tokens=(4, 7), kv_heads=2, **changes)
    tensors = tensors_of(case)
    return {
        name: torch.nan_to_num(t.float()).to(t.dtype) if t.is_floating_point() else t
        for name, t in tensors.items()
    }


def two_nibbles() -> tuple[torch.Tensor | None, ...]:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 2, 2, 32, 16))
    key, value = quantize(keys, axis=-2), quantize(values, axis=-1)
    recent = torch.tensor(rng.standard_normal((2, 2, 2, 9, 16))).half()
    planes = [torch.from_numpy(plane) for plane in (key.upper, key.lower, value.upper, value.lower)]
    half = [
        torch.tensor(part).half() for part in (key.scale, key.zero, value.scale[..., 0], value.zero[..., 0])
    ]
    q = torch.tensor(rng.standard_normal((2, 4, 6, 16))).half()
    lengths = (integers(32, 0), integers(9, 5), integers(4, 2))
    return (
        q,
        planes[0],
        planes[1],
        half[0],
        half[1],
        planes[2],
        planes[3],
        half[2],
        half[3],
        *recent,
        *lengths,
    )


def distributions() -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(1)
    p, q = (torch.tensor(rng.dirichlet(np.ones(11), (2, 5)), dtype=torch.float32) for _ in "pq")
    tokens = torch.tensor(rng.integers(0, 11, (2, 5)), dtype=torch.int32)
    return p, q, tokens, integers(5, 3), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), integers(7, 0)


SAMPLES = {
    "verify_attention": [attention()],
    "int4_kv_attention": [two_nibbles()],
    "spec_accept": [distributions()],
    "tree_mask": [(integers([-1, 0, 0, 2], [-1, 0, 1, 2]), integers(4, 3))],
    "kv_compact": [
        (*torch.randn(2, 2, 3, 9, 8).half(), integers([2, 4], [1, 1]), integers(2, 0), integers(3, 1))
    ],
    "kv_append": [
        (
            *torch.zeros(2, 2, 3, 9, 8, dtype=torch.uint8),
            *torch.randn(2, 2, 4, 3, 8).half(),
            integers(3, 0),
            integers(4, 2),
            *torch.rand(2, 3) + 0.5,
        )
    ],
    "ngram_lookup": [(integers([1, 2, 3, 1, 2, 0], [5, 5, 5, 5, 5, 5]), integers(5, 6), 3, 1, 4)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_operators_keep_pytorchs_contract(name: str) -> None:
    """Schema, what is mutated, and that meta tensors get the shapes and types of real ones."""
    operator = getattr(torch.ops.trtspec, name).default
    for sample in SAMPLES[name]:
        named = sample if isinstance(sample, dict) else {}
        torch.library.opcheck(operator, () if named else sample, named)


def test_an_fp8_cache_has_a_meta_kernel_too() -> None:
    """PyTorch's schema check multiplies its inputs, which nothing on a CPU does with 8-bit floats."""
    operator = torch.ops.trtspec.verify_attention.default
    torch.library.opcheck(operator, (), attention(fp8=1), test_utils="test_faketensor")


def test_every_kernel_has_an_operator() -> None:
    assert set(torch_ops.__all__) == set(SAMPLES)


def test_cpu_attention_is_the_reference_rounded_once() -> None:
    tensors = attention()
    found = torch.ops.trtspec.verify_attention(**tensors)
    expected = verify_attention(**{name: tensor.numpy() for name, tensor in tensors.items()})
    assert torch.equal(found, torch.from_numpy(expected).half())


def test_a_compiled_graph_holds_the_operators() -> None:
    """Dynamo traces a step through their fake kernels without a break."""

    def step(parents: torch.Tensor, q_len: torch.Tensor) -> torch.Tensor:
        mask, depth = torch.ops.trtspec.tree_mask(parents, q_len)
        return mask[..., 0] + depth

    parents, q_len = SAMPLES["tree_mask"][0]
    traced = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(traced(parents, q_len), step(parents, q_len))


def test_the_gpu_script_agrees_with_the_references_when_interpreted() -> None:
    pytest.importorskip(
        "triton", reason="the Triton compiler is not installed: pip install 'trtspec[kernels]'"
    )
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "run_kernels.py"), "--dry-run"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all kernels agree" in ran.stdout
