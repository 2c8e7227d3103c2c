"""What an engine folder holds besides a head, on the TensorRT engines run by definition: drafts and texts are those of
the CPU engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drafters.test_eagle_on_tensorrt import CONTEXT, DRAFT_LENGTH, SLOTS, decoded, no_gpu  # noqa: F401
from tests.tensorrt_reference import export_float32
from tests.test_rest_build import write
from tests.tiny_models import with_tokenizer
from trtspec.compile import CompileRequest, compile_engine
from trtspec.drafters.datastore import FILE
from trtspec.drafters.draft_model import DRAFT_FOLDER, draft_folder


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


def compiled(
    model: Path, into: Path, backend: str, branches: int = 1, numerics: str = "exact", **cache: int
) -> Path:
    """numerics: of the TensorRT engine; here the CPU's is exact."""
    common = {"max_batch": SLOTS, "max_seq_len": CONTEXT, "max_branches": branches, **cache}
    into.mkdir()
    if backend == "tensorrt":
        return export_float32(model, into, rows=8, numerics=numerics, **common)
    compile_engine(CompileRequest(model, "tiny", {"method": "none"}, **common), into)
    return into


def test_a_draft_model_has_an_engine_of_the_same_backend(
    target: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "draft").mkdir()
    draft = with_tokenizer(tiny_model("llama-tied"), tmp_path / "draft")
    speculation = {"method": "draft_model", "draft_length": DRAFT_LENGTH}
    found = []
    for backend in ("onnxruntime", "tensorrt"):
        engine = compiled(target, tmp_path / backend, backend)
        compiled(draft, engine / DRAFT_FOLDER, backend)
        found.append(decoded(engine, speculation))
    (drafts, texts), theirs = found
    assert sum(len(tree) == DRAFT_LENGTH for tree in drafts) > 10
    assert theirs == (drafts, texts)


def test_several_draft_models_make_one_tree_verified_under_a_mask(
    target: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """One is hardly ever right, the other, the target itself, always: what is accepted lies in later branches."""
    (tmp_path / "stranger").mkdir()
    stranger = with_tokenizer(tiny_model("llama-tied"), tmp_path / "stranger")
    speculation = {"method": "specinfer", "draft_length": DRAFT_LENGTH, "drafts": [{}, {}]}
    found = []
    for backend in ("onnxruntime", "tensorrt"):
        engine = compiled(target, tmp_path / backend, backend, branches=2, numerics="fast")
        for number, draft in enumerate((stranger, target)):
            compiled(draft, engine / draft_folder(number), backend, numerics="fast")
        found.append(decoded(engine, speculation))
    (drafts, texts), theirs = found
    whole = [tree for tree in drafts if len(tree) == DRAFT_LENGTH]
    assert len(whole) > 6 and all(len(tree.leaves()) == 2 for tree in whole)
    assert theirs == (drafts, texts)


def test_a_self_draft_reads_the_targets_cache(target: Path, tmp_path: Path) -> None:
    """Short groups, so that texts of a test's length reach what is read in quantized form."""
    speculation, group = {"method": "quantspec", "draft_length": DRAFT_LENGTH}, 32
    found = []
    for backend in ("onnxruntime", "tensorrt"):
        engine = compiled(target, tmp_path / backend, backend, kv_group=group)
        compiled(target, engine / DRAFT_FOLDER, backend, kv_group=group, kv_bits=4)
        found.append(decoded(engine, speculation))
    (drafts, texts), theirs = found
    assert sum(len(tree) == DRAFT_LENGTH for tree in drafts) > 10
    assert theirs == (drafts, texts)


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_retrieved_trees_are_verified_under_a_mask_and_chains_without(
    target: Path, tmp_path: Path, shape: str
) -> None:
    found, (branches, numerics) = [], (4, "fast") if shape == "tree" else (1, "exact")
    for backend in ("onnxruntime", "tensorrt"):
        engine = compiled(target, tmp_path / backend, backend, branches, numerics)
        if not found:  # what the target writes, and copies in which other tokens follow
            _, plain = decoded(engine, {"method": "ngram", "draft_length": 0})
            texts = [list(text) for text in plain]
            damaged = [[(t + 1) % 250 if i % 4 == 3 else t for i, t in enumerate(text)] for text in texts]
            write(target, tmp_path / "texts", [*texts, *damaged, *damaged])
        (engine / FILE).symlink_to(tmp_path / "texts")
        speculation = {"method": "rest", "draft_length": DRAFT_LENGTH, "datastore": FILE, "max_ngram": 2}
        speculation["shape"] = shape
        found.append(decoded(engine, speculation))
    (drafts, texts), theirs = found
    trees = [tree for tree in drafts if tree]
    assert len(trees) > 6 and any(len(tree.leaves()) > 1 for tree in trees) == (shape == "tree")
    assert theirs == (drafts, texts)
