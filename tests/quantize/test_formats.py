"""A format that does not fit a model is replaced or refused in the plan, before an hour of calibration."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.quantize.formats import FORMATS, check_format, get_format, qformat_name

SMOLLM2 = {"q_proj": 576, "down_proj": 1536}


def test_importing_the_table_loads_nothing_heavy():
    heavy = {"torch", "transformers", "modelopt", "onnxruntime", "numpy"}
    code = f"import sys, trtspec.quantize; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_default_block_that_does_not_divide_is_replaced_by_the_largest_that_does():
    plan = check_format("int4_awq", SMOLLM2)
    assert plan.block_size == 64
    assert plan.quantized == ("q_proj", "down_proj")
    assert any("128 does not divide the width 576 of q_proj" in note and "64" in note for note in plan.notes)


def test_a_default_block_that_divides_is_kept_without_a_note():
    plan = check_format("int4_awq", {"q_proj": 4096, "down_proj": 14336})
    assert (plan.block_size, plan.notes) == (128, ())


def test_a_block_asked_for_that_does_not_divide_is_refused_naming_what_works():
    with pytest.raises(PlanInfeasible) as caught:
        check_format("w4a8_awq", SMOLLM2, block_size=128)
    assert "576" in caught.value.message and "q_proj" in caught.value.message
    assert "64, 32, 16" in caught.value.hint


def test_a_smaller_block_asked_for_is_taken():
    assert check_format("int4_awq", SMOLLM2, block_size=32).block_size == 32


@pytest.mark.parametrize("block_size", [24, 48, 512])
def test_a_block_no_kernel_has_is_refused_though_it_divides(block_size):
    with pytest.raises(PlanInfeasible, match=f"{block_size}"):
        check_format("int4_awq", {"up_proj": 1536 * 3}, block_size=block_size)


def test_nvfp4_leaves_a_layer_of_588_inputs_at_16_bits_and_lists_it():
    plan = check_format("nvfp4", {"a": 588, "b": 592})
    assert plan.quantized == ("b",)
    assert plan.excluded == ("a",)
    assert "a (588)" in plan.notes[0]


def test_a_fixed_block_cannot_be_changed():
    with pytest.raises(PlanInfeasible, match="16"):
        check_format("nvfp4", SMOLLM2, block_size=32)


@pytest.mark.parametrize("name", ["fp8", "int8_weight_only", "int8_smoothquant"])
def test_a_format_without_blocks_takes_any_width_and_refuses_a_block(name):
    assert check_format(name, {"odd": 577}).quantized == ("odd",)
    with pytest.raises(PlanInfeasible, match="no block size"):
        check_format(name, {"odd": 577}, block_size=64)


def test_a_model_no_block_fits_is_refused_with_a_format_that_does():
    with pytest.raises(PlanInfeasible) as caught:
        check_format("int4_awq", {"a": 588, "b": 20})
    assert "int8_weight_only" in caught.value.hint


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        get_format("int8_wo")
    assert "int8_weight_only" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("int8_weight_only", "0.37.0", "int8_wo"),
        ("int8_weight_only", "0.47.0", "int8_weight_only"),
        ("w4a8_awq", "0.37.0", "w4a8_awq"),
        ("w4a8_awq", "0.45.0", "w4a8_awq_beta"),
    ],
)
def test_names_follow_the_modelopt_version(name, version, expected):
    assert qformat_name(name, version) == expected


def test_a_format_an_old_modelopt_lacks_is_refused():
    with pytest.raises(PlanInfeasible):
        qformat_name("w4a16_nvfp4", "0.37.0")


def test_nvfp4_counts_its_block_scales():
    assert FORMATS["nvfp4"].bits_per_weight == 4.5


@given(
    st.sampled_from([name for name, item in FORMATS.items() if item.block_size]),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20_000), min_size=1),
    st.none() | st.integers(8, 1024),
)
def test_whatever_the_plan_quantizes_its_block_divides(name, widths, block_size):
    try:
        plan = check_format(name, widths, block_size)
    except PlanInfeasible as refusal:
        assert refusal.hint
        return
    assert plan.quantized and all(widths[module] % plan.block_size == 0 for module in plan.quantized)
    assert set(plan.quantized) | set(plan.excluded) == set(widths)
    assert block_size in (None, plan.block_size)
