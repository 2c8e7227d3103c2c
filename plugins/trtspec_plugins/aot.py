"""Compile kernel variants to PTX for every architecture, on a machine without a GPU: `python -m trtspec_plugins.aot`.

Triton lowers each variant to PTX of a pinned version; ptxas (from the triton wheel) assembles it, which proves it
valid and tells registers, spills and shared memory. TensorRT passes inputs, scalars and outputs and nothing else,
so the two scratch pointers Triton appends are dropped, after it is checked that nothing reads them. Line and debug
information goes too. What is already compiled from the same source is kept.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from trtspec_plugins.index import COMPILED, CompiledKernel, read, write
from trtspec_plugins.interpreter import MODULES
from trtspec_plugins.signature import SIGNATURES, Scalar, Tensor
from trtspec_plugins.variants import ARCHITECTURES, Architecture, Variant, variants

TRITON = "3.7.1"  # the compiler the records are made with; another one gives other registers and another key
_RECIPE = 1  # raise it when options or stripping change what is compiled from the same source
_INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")  # the best one found is recorded


class CompileError(RuntimeError):
    """A variant does not compile, does not assemble, or is not what TensorRT can launch."""


def compile_all(
    wanted: Iterable[Variant], folder: Path = COMPILED, jobs: int = 2
) -> Iterator[tuple[CompiledKernel, bool]]:
    """Compile into `folder` and yield (record, whether it was there before) as each is done; the index keeps up.

    Records of other variants stay while they are current. Raises CompileError naming the variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(wanted)
    keys = {variant.name: source_key(variant) for variant in (*variants(), *wanted)}
    there = read(folder) if (folder / "index.json").exists() else ()
    done = {
        record.name: record
        for record in there
        if keys.get(record.name) == record.key and (folder / record.file).exists()
    }
    for variant in wanted:
        if variant.name in done:
            yield done[variant.name], True
    todo = [variant for variant in wanted if variant.name not in done]
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(compile_variant, variant, keys[variant.name], folder) for variant in todo]
        for future in as_completed(futures):
            record = future.result()
            done[record.name] = record
            write(folder, done.values())
            yield record, False
    write(folder, done.values())
    for stale in set(folder.glob("*.ptx.gz")) - {folder / record.file for record in done.values()}:
        stale.unlink()


def source_key(variant: Variant) -> str:
    """Hash of all that decides the PTX: the kernel's source, the variant, its architecture and the compiler."""
    recipe = repr((variant, ARCHITECTURES[variant.arch], TRITON, _RECIPE)).encode()
    return hashlib.sha256(_source(variant.kernel) + recipe).hexdigest()


@cache
def _source(kernel: str) -> bytes:
    folder = Path(__file__).parent / "kernels"
    return b"\0".join((folder / f"{name}.py").read_bytes() for name in (MODULES.get(kernel, kernel), "tile"))


def compile_variant(variant: Variant, key: str, folder: Path) -> CompiledKernel:
    """Compile one variant and write its PTX. Raises CompileError."""
    with tempfile.TemporaryDirectory() as scratch:
        ptx, shared, resources = _lower(variant, Path(scratch))
    threads = 32 * variant.warps
    limit = ARCHITECTURES[variant.arch].shared_limit
    if shared > limit:
        raise CompileError(
            f"{variant.name}: {shared} bytes of shared memory, {variant.arch} has {limit} a block"
        )
    text = ptx.encode()
    file = f"{variant.name}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(text, mtime=0))
    return CompiledKernel(
        name=variant.name,
        kernel=variant.kernel,
        arch=variant.arch,
        entry=variant.kernel,
        parameters=tuple(
            "i32" if isinstance(argument, Scalar) else "pointer"
            for argument in SIGNATURES[variant.kernel].arguments(dict(variant.constants))
        ),
        types=variant.types,
        constants=variant.constants,
        threads=threads,
        shared_bytes=shared,
        registers=resources["registers"],
        spill_bytes=resources["spills"],
        instruction=next((name for name in _INSTRUCTIONS if name in ptx), None),
        ptx_version=ARCHITECTURES[variant.arch].ptx_version,
        triton=TRITON,
        file=file,
        sha256=hashlib.sha256(text).hexdigest(),
        default=variant.default,
        key=key,
    )


def _lower(variant: Variant, scratch: Path) -> tuple[str, int, dict[str, int]]:
    """(stripped PTX, dynamic shared memory in bytes, what ptxas reports) of one variant."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise CompileError("TRITON_INTERPRET is set: Triton then interprets and cannot compile")
    os.environ["TRITON_CACHE_DIR"] = str(scratch)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.__version__ != TRITON:
        raise CompileError(f"compiled with triton {TRITON}, found {triton.__version__}")
    signature, architecture = SIGNATURES[variant.kernel], ARCHITECTURES[variant.arch]
    constants = dict(variant.constants)
    types: dict[str, str] = {}
    absent: dict[str, None] = {}
    for argument in (*signature.inputs, *signature.scalars, *signature.outputs):
        if isinstance(argument, Scalar):
            types[argument.name] = "i32"
        elif argument.present(constants):
            types[argument.name] = "*" + _element(argument, variant)
        else:
            types[argument.name], absent[argument.name] = "constexpr", None
    pointers = [index for index, kind in enumerate(types.values()) if kind.startswith("*")]
    types |= dict.fromkeys(constants, "constexpr")
    function = getattr(
        import_module(f"trtspec_plugins.kernels.{MODULES.get(variant.kernel, variant.kernel)}"),
        variant.kernel,
    )
    captured: dict[str, Any] = {}
    triton.knobs.runtime.add_stages_inspection_hook = _assemble_here(variant, architecture, scratch, captured)
    try:
        compiled = triton.compile(
            # without the divisibility of pointers there is no cp.async, and every target spills
            ASTSource(
                function, types, {**absent, **constants}, {(i,): [["tt.divisibility", 16]] for i in pointers}
            ),
            target=GPUTarget("cuda", architecture.capability, 32),
            options={
                "num_warps": variant.warps,
                "num_stages": variant.stages,
                "maxnreg": variant.max_registers,
                "ptx_version": architecture.ptx_version,
                "enable_fp_fusion": True,
            },
        )
    finally:
        triton.knobs.runtime.add_stages_inspection_hook = None
    if compiled.metadata.num_warps != variant.warps:
        raise CompileError(f"{variant.name}: Triton wants {compiled.metadata.num_warps} warps")
    return captured["ptx"], compiled.metadata.shared, captured


def _assemble_here(
    variant: Variant, architecture: Architecture, scratch: Path, captured: dict[str, Any]
) -> Any:
    """A Triton stage hook that assembles the PTX as it will be shipped, instead of as Triton would launch it."""

    def assemble(ptx: str, metadata: dict[str, Any]) -> bytes:
        captured["ptx"] = strip(ptx, variant.kernel)
        source, binary = scratch / "kernel.ptx", scratch / "kernel.cubin"
        source.write_text(captured["ptx"])
        command = [_ptxas(architecture), "-v", "--regAllocOptLevel=2", f"--gpu-name={variant.arch}"]
        ran = subprocess.run([*command, str(source), "-o", str(binary)], capture_output=True, text=True)
        if ran.returncode:
            raise CompileError(f"{variant.name}: ptxas refuses it\n{ran.stderr}")
        captured["registers"] = int(re.search(r"Used (\d+) registers", ran.stderr)[1])
        captured["spills"] = int(re.search(r"(\d+) bytes spill stores", ran.stderr)[1])
        return binary.read_bytes()

    def hook(backend: Any = None, stages: Any = None, *rest: Any) -> Any:
        if stages is None:  # the part of Triton's own cache key
            return "assembled by trtspec", "assembled by trtspec"
        stages["cubin"] = assemble
        return None

    return hook


def _ptxas(architecture: Architecture) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(architecture.capability).path


def _element(tensor: Tensor, variant: Variant) -> str:
    return dict(variant.types).get(tensor.dtype, tensor.dtype)


def strip(ptx: str, entry: str) -> str:
    """PTX without Triton's two trailing scratch pointers and without line and debug information.

    Raises CompileError when the last two parameters are not unread 64-bit pointers.
    """
    head, found, rest = ptx.partition(f".visible .entry {entry}(")
    if not found:
        raise CompileError(f"no entry {entry} in the PTX")
    listed, _, body = rest.partition(")")
    parameters = [parameter.strip() for parameter in listed.split(",")]
    for parameter in parameters[-2:]:
        name = parameter.split()[-1]
        if ".u64" not in parameter or re.search(rf"\b{re.escape(name)}\b", body):
            raise CompileError(
                f"{entry}: parameter {name} is no unread scratch pointer; was the compiler changed?"
            )
    body = body.partition("\t.section\t.debug")[0]
    text = head + found + "\n\t" + ",\n\t".join(parameters[:-2]) + "\n)" + body
    return "".join(line for line in text.splitlines(True) if not re.match(r"\s*\.(loc|file)\s", line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every variant that matches, print one line each."""
    parser = argparse.ArgumentParser(
        prog="python -m trtspec_plugins.aot", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=COMPILED, help="folder of PTX and index.json (default: in the package)"
    )
    parser.add_argument(
        "--match", default="", help="only variants whose name matches this regular expression"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the variants' names and stop")
    options = parser.parse_args(arguments)
    wanted = [variant for variant in variants() if re.search(options.match, variant.name)]
    if options.list:
        print("\n".join(variant.name for variant in wanted))
        return 0
    try:
        for record, kept in compile_all(wanted, options.out, options.jobs):
            print(
                f"{record.name}: {record.registers} registers, {record.spill_bytes} bytes spilled, "
                f"{record.shared_bytes} shared, {record.instruction or 'no mma'}{' (kept)' if kept else ''}",
                flush=True,
            )
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
