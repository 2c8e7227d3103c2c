"""Random launches of the attention kernels: shapes, poisoned memory and the float64 answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trtspec_plugins.interpreter import Interpreter, Launch, launch_of
from trtspec_plugins.references.verify_attention import verify_attention

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2}  # of the largest output
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Case:
    """One verify_attention launch. past: keys before the step, by sequence. tokens: valid rows, by sequence."""

    group: int
    past: tuple[int, ...]
    tokens: tuple[int, ...]
    kv_heads: int = 1
    head_dim: int = 16
    block_m: int = 128
    block_n: int = 32
    dtype: str = "fp16"
    fp8: int = 0
    page: int = 0
    tree: bool = False
    splits: int = 0
    padding: int = 0  # rows beyond the longest sequence's
    seed: int = 0

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "SM_SCALE": self.head_dim**-0.5,
            "SPLIT": int(self.splits > 0),
            "TREE": int(self.tree),
            "PAGE": self.page,
            "FP8": self.fp8,
            "UPCAST": int(self.dtype == "bf16"),
        }

    @property
    def values(self) -> dict[str, int]:
        longest = max(p + t for p, t in zip(self.past, self.tokens))
        capacity = longest + 5
        if self.page:
            capacity = -(-capacity // self.page) * self.page
        return {
            "B": len(self.past),
            "T": max(1, max(self.tokens)) + self.padding,
            "S": capacity,
            "HKV": self.kv_heads,
            "G": self.group,
            "NSPLIT": max(1, self.splits),
        }


def random_tree(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Parents of `tokens` rows: row 0 the root, every other row below an earlier one."""
    return np.array([-1, *(int(rng.integers(0, t)) for t in range(1, tokens))], np.int32)[:tokens]


def wild_mask(rng: np.random.Generator, parents: np.ndarray, words: int) -> np.ndarray:
    """int32 [tokens, words]: bit j of row t says that j is t or an ancestor of it; bits past the tokens are wild."""
    tokens = len(parents)
    seen = rng.integers(0, 2, (tokens, 32 * words)).astype(bool)
    seen[:, :tokens] = False
    for t, parent in enumerate(parents):
        if parent >= 0:
            seen[t, :tokens] = seen[parent, :tokens]
        seen[t, t] = True
    return np.packbits(seen, axis=1, bitorder="little").view("<i4")


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """Arguments by name. Everything a kernel must not read is NaN, and pages and words it must not use are wild."""
    rng, values, dtype = np.random.default_rng(case.seed), case.values, DTYPES[case.dtype]
    batch, rows, keys, heads = values["B"], values["T"], values["S"], values["HKV"] * case.group
    tensors = {
        "q": torch.full((batch, rows, heads, case.head_dim), float("nan"), dtype=dtype),
        "kv_len": torch.tensor([p + t for p, t in zip(case.past, case.tokens)], dtype=torch.int32),
        "q_len": torch.tensor(case.tokens, dtype=torch.int32),
    }
    for b, tokens in enumerate(case.tokens):
        tensors["q"][b, :tokens] = torch.tensor(rng.standard_normal((tokens, heads, case.head_dim))).to(dtype)
    cache_type = E4M3 if case.fp8 else dtype
    for name in "kv":
        cache = torch.full((batch, values["HKV"], keys, case.head_dim), float("nan"), dtype=dtype)
        for b in range(batch):
            used = case.past[b] + case.tokens[b]
            shape = (values["HKV"], used, case.head_dim)
            cache[b, :, :used] = torch.tensor(rng.standard_normal(shape)).to(dtype)
        tensors[name] = cache.to(cache_type)
    if case.page:
        _page(case, tensors, rng)
    if case.tree:
        words = -(-rows // 32)
        mask = rng.integers(-(2**31), 2**31, (batch, rows, words)).astype(np.int32)
        for b, tokens in enumerate(case.tokens):
            if tokens:
                mask[b, :tokens] = wild_mask(rng, random_tree(rng, tokens), words)
        tensors["mask"] = torch.tensor(mask)
    if case.fp8:
        for name in ("k_scale", "v_scale"):
            tensors[name] = torch.tensor(rng.uniform(0.5, 1.5, values["HKV"]).astype(np.float32))
    return tensors


def _page(case: Case, tensors: dict[str, torch.Tensor], rng: np.random.Generator) -> None:
    """Scatter the contiguous caches over shuffled pages; table entries past the last used page are wild."""
    values, page = case.values, case.page
    batch, per_sequence = values["B"], values["S"] // page
    table = rng.permutation(batch * per_sequence).astype(np.int32).reshape(batch, per_sequence)
    for name in "kv":
        pages = tensors[name].reshape(batch, values["HKV"], per_sequence, page, case.head_dim).transpose(1, 2)
        scattered = torch.empty((batch * per_sequence, *pages.shape[2:]), dtype=pages.dtype)
        scattered[torch.tensor(table.reshape(-1), dtype=torch.long)] = pages.reshape(scattered.shape)
        tensors[name] = scattered
    for b in range(batch):
        table[b, -(-(case.past[b] + case.tokens[b]) // page) :] = 2**30
    tensors["block_table"] = torch.tensor(table)


def expected(case: Case, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """The reference's answer for the elements as stored."""
    real = {
        name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items() if name in ("q", "k", "v")
    }
    rest = {name: tensor.numpy() for name, tensor in tensors.items() if name not in real}
    return verify_attention(**real, **rest)


def launches(case: Case, tensors: dict[str, torch.Tensor]) -> tuple[Launch, torch.Tensor | None]:
    """The verify_attention launch, with outputs full of NaN."""
    values, dtype = case.values, DTYPES[case.dtype]
    shape = (values["B"], values["T"], values["HKV"] * case.group)
    launched = dict(tensors)
    if case.fp8:
        launched |= {name: tensors[name].view(torch.uint8) for name in "kv"}
    if case.splits:
        launched["partial"] = torch.full((case.splits, *shape, case.head_dim), float("nan"))
        launched["lse"] = torch.full((case.splits, *shape), float("nan"))
    else:
        launched["out"] = torch.full((*shape, case.head_dim), float("nan"), dtype=dtype)
    return launch_of("verify_attention", values, launched, case.constants)


def run(case: Case, tensors: dict[str, torch.Tensor], interpreter: Interpreter) -> tuple[np.ndarray, tuple]:
    """(output float64 [B, T, Hq, d], the products counted) of the kernel, pieces merged where there are several."""
    outcome = interpreter.run(launches(case, tensors))
    *_, out, partial, lse = outcome.arguments
    if case.splits:
        rows = lse[0].numel()
        merged = torch.full(partial.shape[1:], float("nan"), dtype=DTYPES[case.dtype])
        launch = launch_of(
            "verify_combine",
            {"ROWS": rows, "NSPLIT": case.splits},
            {"partial": partial, "lse": lse, "out": merged},
            {"HEAD_DIM": case.head_dim, "BLOCK_R": 16},
        )
        out = interpreter.run(launch).arguments[-1]
    return out.to(torch.float64).numpy(), outcome.products
