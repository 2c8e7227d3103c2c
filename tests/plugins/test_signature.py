"""One table says how kernels are called; sources, variants and callers follow it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import trtspec_plugins
from trtspec_plugins.interpreter import MODULES
from trtspec_plugins.signature import SIGNATURES, Scalar, cdiv
from trtspec_plugins.variants import ARCHITECTURES, variants

PACKAGE = Path(trtspec_plugins.__file__).parent


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_source_takes_what_the_signature_says_in_its_order(name: str) -> None:
    source = (PACKAGE / "kernels" / f"{MODULES.get(name, name)}.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    parameters = functions[name].args.args
    assert tuple(parameter.arg for parameter in parameters) == SIGNATURES[name].parameters()
    constants = [parameter.arg for parameter in parameters if parameter.annotation is not None]
    assert constants == list(SIGNATURES[name].constants)


def test_inputs_scalars_outputs_stand_in_tensorrts_order() -> None:
    for signature in SIGNATURES.values():
        kinds = [isinstance(argument, Scalar) for argument in signature.arguments({})]
        first, last = kinds.index(True), len(kinds) - kinds[::-1].index(True)
        assert all(kinds[first:last])


def test_flags_decide_which_tensors_are_passed() -> None:
    verify = SIGNATURES["verify_attention"]
    plain = [argument.name for argument in verify.arguments({})]
    assert plain == ["q", "k", "v", "kv_len", "q_len", "T", "S", "HKV", "G", "NSPLIT", "out"]
    every = verify.arguments({"TREE": 1, "PAGE": 64, "FP8": 1, "SPLIT": 1})
    assert [argument.name for argument in every][5:9] == ["mask", "block_table", "k_scale", "v_scale"]
    assert [argument.name for argument in every][-2:] == ["partial", "lse"]


def test_the_grid_takes_symbolic_dimensions() -> None:
    """TensorRT's shape expressions multiply from the left only, and divide by their own function."""

    class Expression:
        def __init__(self, text: str) -> None:
            self.text = text

        def __mul__(self, other: object) -> Expression:
            return Expression(f"{self.text}*{getattr(other, 'text', other)}")

    values = {name: Expression(name) for name in ("B", "T", "HKV", "G", "NSPLIT")}
    grid = SIGNATURES["verify_attention"].grid(
        values, {"BLOCK_M": 128}, lambda a, b: Expression(f"cdiv({a.text},{b})")
    )
    assert [part.text for part in grid] == ["cdiv(T*G,128)", "HKV*NSPLIT", "B"]
    numbers = {"B": 2, "T": 32, "HKV": 8, "G": 4, "NSPLIT": 3}
    assert SIGNATURES["verify_attention"].grid(numbers, {"BLOCK_M": 128}, cdiv) == (1, 24, 2)


def test_variants_have_names_of_their_own_and_every_constant() -> None:
    every = list(variants())
    assert len({variant.name for variant in every}) == len(every)
    for arch in ARCHITECTURES:
        assert {variant.kernel for variant in every if variant.arch == arch} == set(SIGNATURES)
    for variant in every:
        assert [name for name, _ in variant.constants] == list(SIGNATURES[variant.kernel].constants)


def test_every_choice_of_flags_has_one_default_tactic() -> None:
    tiles = {"BLOCK_M", "BLOCK_N"}
    choices = [
        (variant.arch, variant.types, tuple(pair for pair in variant.constants if pair[0] not in tiles))
        for variant in variants()
        if variant.default
    ]
    assert len(set(choices)) == len(choices)


def test_the_table_loads_neither_compiler_nor_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import trtspec_plugins.signature, trtspec_plugins.variants, trtspec_plugins.index, trtspec_plugins.aot;"
        "assert not {'triton', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(PACKAGE.parent)], check=True)
