"""The Triton repository around trtspec's own model: exact files, settings that pass their version, and its folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.trtllm.conftest import files_in, settings
from tests.trtllm.toy_llm import llm_settings, write_build
from trtspec.errors import ConfigError, StageFailed
from trtspec.package.lint import lint_repository
from trtspec.package.settings import LLMSettings, load_settings
from trtspec.serve.openai.upstream import ServedModel
from trtspec.trtllm.check import check_file
from trtspec.trtllm.derive import Settings
from trtspec.trtllm.repository import write_own_repository

GOLDEN = Path(__file__).parent / "golden_own"


def example(version: str = "1.2.1", decoding: str = "Eagle3", ranks: int = 1) -> Settings:
    values = settings(version, decoding, tensor_parallel_size=ranks, pipeline_parallel_size=1)
    reasons = {"model": "mount it", "max_num_tokens": "32 sequences of 4 rows and a prompt"}
    return Settings(version, values, reasons, ("a note",))


def test_the_files_are_exactly_these(tmp_path: Path):
    write_own_repository(example(ranks=2), "tensorrt_llm", 2, 64, tmp_path)
    assert files_in(tmp_path) == files_in(GOLDEN)


@pytest.mark.parametrize(
    ("version", "decoding"),
    [("1.2.1", "NGram"), ("1.3.0rc20", "SA"), ("1.3.0rc29", "DSpark"), ("1.4.0rc4", "PARD")],
)
def test_what_is_written_passes_its_own_version_and_reads_back(version: str, decoding: str, tmp_path: Path):
    write_own_repository(example(version, decoding), "m", 1, 7, tmp_path)
    file = tmp_path / "m" / "1" / "model.yaml"
    assert check_file(file, version) == ()
    assert lint_repository(tmp_path) == []
    read = load_settings(file)
    assert isinstance(read, LLMSettings)
    assert (read.trtspec.version, read.trtspec.max_queue_size, read.draft_length) == (version, 7, 4)


def test_a_misspelt_key_of_trtspecs_own_section_is_found_by_both_readers(tmp_path: Path):
    write_own_repository(example(), "m", 1, 64, tmp_path)
    file = tmp_path / "m" / "1" / "model.yaml"
    file.write_text(file.read_text().replace("max_queue_size", "max_queue"))
    with pytest.raises(ConfigError, match=r"trtspec\.max_queue"):
        load_settings(file)
    assert [(f.rule, f.path) for f in check_file(file, "1.2.1")] == [("unknown-key", "trtspec.max_queue")]


def test_the_front_knows_the_model_from_its_package_alone(tmp_path: Path):
    repository = write_build(tmp_path / "build", llm_settings(decoding="MTP"))
    model = ServedModel.read(repository / "tensorrt_llm")
    assert (model.name, model.max_seq_len, model.draft_length) == ("tensorrt_llm", 4096, 3)
    assert not model.samples  # MTP in 1.2 takes the likeliest token whatever a request says
    stream = model.tokenizer.stream()
    assert stream.push(104) + stream.push(105) == "hi"
    plain = {key: value for key, value in llm_settings().values.items() if key != "speculative_config"}
    other = write_build(tmp_path / "plain", Settings("1.2.1", plain, {}, ()))
    model = ServedModel.read(other / "tensorrt_llm")
    assert (model.draft_length, model.samples) == (0, True)


def test_a_broken_repository_is_not_published(tmp_path: Path):
    made = example()
    broken = Settings(made.version, {**made.values, "model": "${unfilled}"}, {}, ())
    with pytest.raises(StageFailed, match="never filled in"):
        write_own_repository(broken, "m", 1, 64, tmp_path)


def test_a_folder_that_is_not_the_builds_is_left_as_it_is(tmp_path: Path):
    made = example()
    elsewhere = Settings(made.version, {**made.values, "model": "/data/llama"}, {}, ())
    write_own_repository(elsewhere, "m", 1, 64, tmp_path)
    written = yaml.safe_load((tmp_path / "m" / "1" / "model.yaml").read_text())
    assert written["model"] == "/data/llama"
    assert written["speculative_config"]["speculative_model_dir"] == "../../../../draft"
