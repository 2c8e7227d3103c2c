"""QuantSpec's cache on TensorRT, the graph run by definition in ONNX Runtime: rows read what they read on
the CPU engine.

There the cache is a ring of float32 rows; here the newest rows move, and must move back where a step is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_hierarchical import pieces
from tests.tensorrt_reference import export_float32
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.reference_attention import ReferenceRunner
from trtspec.engines.base import SlotStep
from trtspec.engines.hierarchical import HierarchicalEngine, open_cpu_engine
from trtspec.engines.hierarchical_device_kv import DeviceKv
from trtspec.engines.hierarchical_kv import KEYS, VALUES, quantize
from trtspec.engines.hierarchical_tensorrt import HierarchicalTensorRtEngine

GROUP, SLOTS, CONTEXT = 32, 3, 224
CLOSE = 2e-3  # of logits, where a cached element next to a rounding edge may fall on the other side
CLOSE_DRAFT = 2e-2  # of a draft's: of such an element it reads the upper half alone, which is a sixteenth off


# -- the store


def small_cache(dtype: str = "float32") -> DeviceKv:
    import torch

    sizes = {"layers": 2, "slots": 2, "kv_heads": 2, "head_dim": 4, "group": 4, "capacity": 256, "rows": 16}
    return DeviceKv(**sizes, dtype=getattr(torch, dtype), device="cpu")


def codes_of(kv: DeviceKv, part: int, slot: int, places: slice) -> np.ndarray:
    """uint8 [layers, heads, positions, head_dim]: both halves of a byte, as the CPU engine has them."""
    upper, lower = (
        np.concatenate([plane & 15, plane >> 4], axis=-1)
        for plane in (tensor[:, part, slot, :, places].numpy() for tensor in (kv.upper, kv.lower))
    )
    return upper << 4 | lower


def check_view(kv: DeviceKv, slot: int, written: np.ndarray) -> None:
    """What the row after `written`, float32 [layers, 2, heads, positions, head_dim], reads is what the CPU engine's
    bytes of those very rows are, and the rest as they are."""
    position = written.shape[3]
    groups = max(0, position // kv.group - 1)
    assert kv.first_recent(slot) == groups * kv.group
    for index in range(groups):
        places = slice(index * kv.group, (index + 1) * kv.group)
        held = {
            KEYS: (kv.key_scales[:, slot, :, index], kv.key_zeros[:, slot, :, index]),
            VALUES: (kv.value_scales[:, slot, :, places], kv.value_zeros[:, slot, :, places]),
        }
        for part, axis in ((KEYS, -2), (VALUES, -1)):
            codes, scales, lows = quantize(written[:, part, :, places], axis)
            assert np.array_equal(codes_of(kv, part, slot, places), codes)
            scale, zero = (tensor.numpy() for tensor in held[part])
            np.testing.assert_array_equal(scale, scales.squeeze(axis))
            np.testing.assert_allclose(zero, (lows + 8 * scales).squeeze(axis), atol=1e-6)
    fresh = written[:, :, :, groups * kv.group :]
    assert np.array_equal(kv.recent[:, :, slot, :, : fresh.shape[3]].numpy(), fresh)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=60))
def test_every_row_reads_what_its_position_says(steps: list[tuple[int, int, bool]]) -> None:
    """Steps of which any part is taken back, past the end of a group and before it, in a slot that is copied about."""
    import torch

    rng = np.random.default_rng(0)
    kv, slot, length = small_cache(), 0, 0
    written = np.zeros((2, 2, 2, 256, 4), np.float32)
    for count, kept, copied in steps:
        for piece in pieces(length, count, kv.group):
            kv.write_from(slot, int(piece[0]))
            check_view(kv, slot, written[:, :, :, : piece[0]])
            written[:, :, :, piece] = rng.standard_normal((2, 2, 2, len(piece), 4))
            places = piece - kv.first_recent(slot)
            kv.recent[:, :, slot, :, places] = torch.from_numpy(written[:, :, :, piece])
        length += min(kept, count)
        if copied:
            kv.copy(slot, 1 - slot)
            slot = 1 - slot


def test_a_row_that_is_gone_is_not_read_as_another() -> None:
    kv = small_cache()
    for start in range(0, 24, 4):
        kv.write_from(0, start)
    kv.write_from(0, 18)
    with pytest.raises(ValueError, match="too far back"):
        kv.write_from(0, 15)
    kv.write_from(0, 0)


def test_sixteen_bits_keep_an_element_within_a_step_of_its_byte() -> None:
    """A scale that was rounded after the codes were chosen would move the largest elements by many of their steps."""
    import torch

    kv = small_cache("bfloat16")
    rows = (100 + torch.randn(2, 2, 2, 4, 4)).bfloat16()
    for start in (0, 4, 8):
        kv.write_from(0, start)
        if start == 0:
            kv.recent[:, :, 0, :, :4] = rows
    for part, scale, zero in (
        (KEYS, kv.key_scales[:, 0, :, :1], kv.key_zeros[:, 0, :, :1]),
        (VALUES, kv.value_scales[:, 0, :, :4, None], kv.value_zeros[:, 0, :, :4, None]),
    ):
        scale, zero = scale.float().numpy(), zero.float().numpy()
        read = (codes_of(kv, part, 0, slice(0, 4)) - 8.0) * scale + zero
        assert (np.abs(read - rows[:, part].float().numpy()) <= 1.01 * scale).all()


# -- the engine


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=["exact", "fast"])
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HierarchicalTensorRtEngine, HierarchicalTensorRtEngine]:
    """The target and its draft, of the same weights."""
    found: list[HierarchicalTensorRtEngine] = []
    for bits in (8, 4):
        into = tmp_path_factory.mktemp(f"bits{bits}")
        sizes = {"rows": 8, "max_batch": SLOTS, "max_seq_len": CONTEXT, "kv_group": GROUP, "kv_bits": bits}
        export_float32(model, into, numerics=request.param, **sizes)
        kv = found[0].kv if found else None
        found.append(HierarchicalTensorRtEngine(into, kv=kv, runner=ReferenceRunner(into)))
    return found[0], found[1]


@pytest.fixture
def cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HierarchicalEngine, ...]]:
    found: list[HierarchicalEngine] = []
    for bits in (8, 4):
        into = tmp_path_factory.mktemp(f"cpu{bits}")
        sizes = {"max_batch": SLOTS, "max_seq_len": CONTEXT, "kv_group": GROUP, "kv_bits": bits}
        compile_engine(CompileRequest(model, "tiny", {"method": "none"}, **sizes), into)
        found.append(HierarchicalEngine(into, kv=found[0].kv) if found else open_cpu_engine(into))
    yield tuple(found)
    for engine in found:
        engine.close()


def test_rows_are_the_cpu_engines_in_any_company(
    engines: tuple[HierarchicalTensorRtEngine, ...], cpu: tuple[HierarchicalEngine, ...]
) -> None:
    """Prompts in any pieces, drafts of which any part is rejected, the draft's own passes between them."""
    random, tokens = np.random.default_rng(5), np.random.default_rng(1).integers(0, 320, CONTEXT)
    lengths, crossed = dict.fromkeys(range(SLOTS), 0), 0
    while lengths:
        steps, kept = [], []
        for slot, start in lengths.items():
            if steps and random.random() < 0.3:
                continue  # sits this one out
            prompt = start < 70
            count = min(int(random.integers(1, GROUP + 1 if prompt else 9)), CONTEXT - start)
            rows = tokens[start : start + count].copy()
            kept.append(count if prompt else int(random.integers(1, count + 1)))
            rows[kept[-1] :] = random.integers(0, 320, count - kept[-1])
            steps.append(SlotStep(slot, start, rows))
            crossed += start // GROUP == (start + kept[-1]) // GROUP != (start + count - 1) // GROUP
        if drafting := [step for step in steps if step.start >= 70]:
            for ours, theirs in zip(engines[1].forward(drafting), cpu[1].forward(drafting), strict=True):
                np.testing.assert_allclose(ours.logits, theirs.logits, atol=CLOSE_DRAFT)
        for ours, theirs in zip(engines[0].forward(steps), cpu[0].forward(steps), strict=True):
            np.testing.assert_allclose(ours.logits, theirs.logits, atol=CLOSE)
        for step, keep in zip(steps, kept, strict=True):
            engines[0].commit(step.slot, step.start, range(keep))
            lengths[step.slot] += keep
            if lengths[step.slot] == CONTEXT:
                del lengths[step.slot]
    assert crossed > 2, "no step past the end of a group was taken back"


def test_a_draft_reads_less_than_its_target(engines: tuple[HierarchicalTensorRtEngine, ...]) -> None:
    target, draft = engines
    tokens = np.random.default_rng(2).integers(0, 320, 130)
    for start in range(0, 128, 16):
        target.forward([SlotStep(0, start, tokens[start : start + 16])])
    one = SlotStep(0, 128, tokens[128:129])
    drafted = draft.forward([one])[0].logits.copy()
    assert np.abs(drafted - target.forward([one])[0].logits).max() > 5 * CLOSE


def test_a_copied_sequence_goes_on(engines: tuple[HierarchicalTensorRtEngine, ...]) -> None:
    target, tokens = engines[0], np.random.default_rng(3).integers(0, 320, 110)
    for start in range(0, 100, 20):
        target.forward([SlotStep(2, start, tokens[start : start + 20])])
    target.copy(2, 0, 100)
    target.forward([SlotStep(2, 100, tokens[::-1][:8].copy())])
    copied = target.forward([SlotStep(0, 100, tokens[100:105])])[0].logits.copy()
    assert np.array_equal(target.forward([SlotStep(2, 100, tokens[100:105])])[0].logits, copied)


def test_trees_are_refused(engines: tuple[HierarchicalTensorRtEngine, ...]) -> None:
    with pytest.raises(ValueError, match="chains only"):
        engines[0].forward([SlotStep(0, 0, np.arange(3), np.array([-1, 0, 0]))])
    with pytest.raises(ValueError, match="no path of a chain"):
        engines[0].commit(0, 0, (0, 2))
