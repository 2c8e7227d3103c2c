"""The list of mechanisms is data, complete, and cheap to read."""

import subprocess
import sys

import pytest

from trtspec.config.speculation import METHODS
from trtspec.drafters.catalog import DRAFTERS, spec_of
from trtspec.drafters.factory import open_drafter

WITH_FILES = {
    "specinfer",
    "draft_model",
    "quantspec",
    "rest",
}  # opened from an engine folder, in tests of their own


def test_every_method_a_config_may_name_has_a_spec():
    assert {spec.method for spec in DRAFTERS} == set(METHODS) - {"none", "auto"}
    assert len({spec.method for spec in DRAFTERS}) == len(DRAFTERS)


def test_what_the_catalog_says_runs_here_does():
    for spec in DRAFTERS:
        if "onnxruntime" in spec.backends and spec.method not in WITH_FILES and not spec.trained_head:
            assert open_drafter({"method": spec.method}).spec is spec
        else:
            with pytest.raises(ValueError, match=spec.method):
                open_drafter({"method": spec.method})


def test_needs_are_consistent():
    for spec in DRAFTERS:
        assert not spec.trained_head or spec.hidden_states != "none"
        assert ("tensorrt_llm" in spec.backends) == (spec.tensorrt_llm is not None)


def test_an_unknown_method_names_the_known_ones():
    with pytest.raises(KeyError, match="ngram"):
        spec_of("n-gram")


def test_reading_it_imports_no_model_library():
    code = "import sys, trtspec.drafters.catalog as c; print([m for m in c_heavy if m in sys.modules])"
    heavy = ["torch", "transformers", "onnxruntime", "modelopt", "matplotlib", "tokenizers"]
    out = subprocess.run(
        [sys.executable, "-c", f"c_heavy = {heavy}; {code}"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
