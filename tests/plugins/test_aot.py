"""Ahead-of-time compilation without a GPU: what is shipped assembles, does not spill, and can be launched."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import trtspec_plugins
from trtspec_plugins import index
from trtspec_plugins.aot import CompileError, source_key, strip
from trtspec_plugins.variants import ARCHITECTURES, variants

PACKAGES = Path(trtspec_plugins.__file__).parent.parent
SAMPLE = (
    r"^verify_attention-bf16-d128-m128-sm|^verify_attention-bf16-d128-m64-kv_e4m3-page64-tree-sm_(80|120a)"
    r"|^verify_attention-bf16-d128-small-tree-sm_100a|^verify_attention-bf16-d128-m128-split-sm_90a"
    r"|^int4_kv_attention-bf16-d128-target-sm_(90|100)a"
    r"|^(verify_combine-fp16-d64|spec_accept.*|tree_mask|kv_compact-i16-d128-page64|kv_append-fp16-d128|ngram_lookup)-sm_90a"
)


def compile_into(folder: Path, pattern: str) -> str:
    """What the command prints. The interpreter's variable must not reach it: it decides at import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "trtspec_plugins.aot", "--out", str(folder), "--match", pattern]
    ran = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(PACKAGES)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def compiled(triton: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sample of every kernel and of both kinds of everything."""
    folder = tmp_path_factory.mktemp("compiled")
    compile_into(folder, SAMPLE)
    return folder


def check(records: tuple[index.CompiledKernel, ...], folder: Path) -> None:
    for record in records:
        architecture = ARCHITECTURES[record.arch]
        assert record.shared_bytes <= architecture.shared_limit
        if record.default:
            assert record.spill_bytes == 0, record
        if "-small-" in record.name:
            assert record.shared_bytes <= 48 * 1024
        if record.kernel in ("verify_attention", "int4_kv_attention"):
            assert record.instruction == architecture.instruction, record.name
        ptx = record.ptx(folder)
        version = f"{architecture.ptx_version // 10}.{architecture.ptx_version % 10}"
        assert re.search(rf"^\.version {version}$", ptx, re.MULTILINE)
        assert re.search(rf"^\.target {record.arch}$", ptx, re.MULTILINE)
        listed = ptx.partition(f".entry {record.entry}(")[2].partition(")")[0].split(",")
        kinds = tuple("pointer" if ".u64" in line else "i32" for line in listed)
        assert kinds == record.parameters
        assert not re.search(r"^\s*\.(loc|file|section)\b", ptx, re.MULTILINE)


def test_a_sample_of_every_kernel_assembles_for_its_architecture(compiled: Path) -> None:
    records = index.read(compiled)
    assert {record.arch for record in records} == set(ARCHITECTURES)
    assert {record.kernel for record in records} == {variant.kernel for variant in variants()}
    check(records, compiled)
    found = {record.arch: record.instruction for record in records if record.kernel == "verify_attention"}
    assert found["sm_90a"] == "wgmma.mma_async"
    assert found["sm_100a"] == "tcgen05.mma"


def test_what_is_compiled_from_the_same_source_is_kept(compiled: Path) -> None:
    before = (compiled / "index.json").read_bytes()
    printed = compile_into(compiled, SAMPLE)
    assert printed.count("(kept)") == len(printed.splitlines()) == len(index.read(compiled))
    assert (compiled / "index.json").read_bytes() == before


def test_the_index_finds_the_tactics_of_a_launch(compiled: Path) -> None:
    flags = {"HEAD_DIM": 128, "SPLIT": 0, "PAGE": 0}
    records = index.read(compiled)
    found = index.find(records, "verify_attention", "sm_100a", {"act": "bf16", "kv": "bf16"}, flags)
    assert {dict(record.constants)["BLOCK_M"] for record in found} == {128, 64}


def test_a_file_that_is_not_the_indexed_one_is_refused(compiled: Path, tmp_path: Path) -> None:
    record = index.read(compiled)[0]
    (tmp_path / record.file).write_bytes(gzip.compress(b"other"))
    with pytest.raises(ValueError, match="not what index"):
        record.ptx(tmp_path)


ENTRY = ".visible .entry f(\n.param .u64 f_param_0,\n.param .u32 f_param_1,\n.param .u64 {0},\n.param .u64 {1}\n)\n"


def test_only_unread_scratch_pointers_are_dropped() -> None:
    ptx = ENTRY.format("f_param_2", "f_param_3") + "{\n\t.loc 1 2 3\n\tret;\n}\n\t.section\t.debug_abbrev\n"
    stripped = strip(ptx, "f")
    assert "f_param_1" in stripped and "f_param_2" not in stripped and "f_param_3" not in stripped
    assert stripped.endswith("{\n\tret;\n}\n")
    with pytest.raises(CompileError, match="f_param_3"):
        strip(ptx.replace("ret;", "ld.param.u64 %rd1, [f_param_3];\n\tret;"), "f")
    with pytest.raises(CompileError, match="no entry"):
        strip(ptx, "g")


def test_a_key_is_of_one_variant() -> None:
    every = list(variants())
    assert len({source_key(variant) for variant in every}) == len(every)


@pytest.mark.long
def test_the_whole_set(triton: None, tmp_path: Path) -> None:
    compile_into(tmp_path, "")
    records = index.read(tmp_path)
    assert len(records) == len(list(variants()))
    check(records, tmp_path)


@pytest.mark.long
def test_the_wheel_carries_what_was_compiled(compiled: Path, tmp_path: Path) -> None:
    """Its users need no compiler."""
    root = PACKAGES.parent
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    hidden = shutil.ignore_patterns("__pycache__", "compiled", "*.egg-info")
    for folder in ("trtspec", "plugins"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=hidden)
    shutil.copytree(compiled, tmp_path / "plugins" / "trtspec_plugins" / "compiled")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    wheel = next((tmp_path / "wheels").glob("trtspec-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "trtspec_plugins/compiled/index.json" in names
    assert {f"trtspec_plugins/compiled/{record.file}" for record in index.read(compiled)} <= names
    assert {"trtspec/cli.py", "trtspec_plugins/kernels/verify_attention.py"} <= names
