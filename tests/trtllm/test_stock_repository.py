"""The Triton repository around the container's own llmapi model: exact files, and that the stock code is what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.package.test_package_triton import LLMAPI_INPUTS, LLMAPI_OUTPUTS
from tests.trtllm.conftest import files_in, settings
from trtspec.errors import StageFailed
from trtspec.package.lint import lint_repository
from trtspec.trtllm.check import check_file
from trtspec.trtllm.derive import Settings
from trtspec.trtllm.package import gpu_device_ids, stock_config, write_repository, write_settings

GOLDEN = Path(__file__).parent / "golden"
STOCK = """\
import os
import helpers

class TritonPythonModel:
    served = open(os.environ["LLM_CONFIG_PATH"]).read()
    word = helpers.WORD
"""


def example(version: str = "1.2.1", decoding: str = "Eagle3", ranks: int = 1) -> Settings:
    values = settings(version, decoding, tensor_parallel_size=ranks, pipeline_parallel_size=1)
    reasons = {"max_num_tokens": "32 sequences of 4 rows and a prompt"}
    return Settings(version, values, reasons, ("count tokens per chunk",))


def test_the_files_are_exactly_these(tmp_path: Path):
    write_repository(example(), "tensorrt_llm", 1, tmp_path / "repository")
    (tmp_path / "trtllm").mkdir()
    write_settings(example(), "tensorrt_llm", 1, 8000, tmp_path / "trtllm")
    assert files_in(tmp_path) == files_in(GOLDEN)


def test_the_stock_tensors_are_nvidias_and_the_policy_is_where_its_model_reads_it(tmp_path: Path):
    pytest.importorskip("tritonclient.grpc")
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

    config = text_format.Parse(stock_config("m", 1, 1), ModelConfig())

    def table(tensors) -> dict[str, tuple[str, int]]:
        return {t.name: (DataType.Name(t.data_type).removeprefix("TYPE_"), t.dims[0]) for t in tensors}

    assert table(config.input) == LLMAPI_INPUTS and table(config.output) == LLMAPI_OUTPUTS
    assert [t.name for t in config.input if not t.optional] == ["text_input"]
    assert not config.HasField("model_transaction_policy") and "max_batch_size" not in stock_config("m", 1, 1)
    write_repository(example(), "m", 1, tmp_path)
    policy = yaml.safe_load((tmp_path / "m" / "1" / "model.yaml").read_text())["triton_config"]
    assert policy == {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 50}


@pytest.mark.parametrize(
    ("version", "decoding"),
    [("1.2.1", "NGram"), ("1.3.0rc20", "SA"), ("1.3.0rc29", "DSpark"), ("1.4.0rc4", "PARD")],
)
def test_what_is_written_passes_its_own_version(version: str, decoding: str, tmp_path: Path):
    write_repository(example(version, decoding), "m", 1, tmp_path)
    assert check_file(tmp_path / "m" / "1" / "model.yaml", version) == ()
    assert lint_repository(tmp_path) == []


def test_each_instance_has_gpus_of_its_own(tmp_path: Path):
    assert gpu_device_ids(1, 4) is None and gpu_device_ids(2, 2) == "0,1;2,3"
    write_repository(example(ranks=2), "m", 2, tmp_path)
    text = (tmp_path / "m" / "config.pbtxt").read_text()
    assert 'string_value: "0,1;2,3"' in text and "count: 2" in text
    launch = write_settings(example(ranks=2), "m", 2, 8000, tmp_path)
    assert "mpirun" not in launch.triton and launch.triton.startswith("docker run")


def test_ranks_of_several_nodes_are_started_one_per_gpu_and_the_readme_says_what_is_unconfirmed(
    tmp_path: Path,
):
    launch = write_settings(example(ranks=16), "m", 1, 8000, tmp_path)
    for command, image in (
        (launch.triton, "tritonserver:26.07"),
        (launch.trtllm_serve, "tensorrt-llm/release:1.2.1"),
    ):
        assert command.startswith("srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --mpi=pmix ")
        assert f"--container-image=nvcr.io#nvidia/{image}" in command
        assert command.split(" trtllm-llmapi-launch ")[1].split()[0] in ("tritonserver", "trtllm-serve")
    assert "Unconfirmed" in (tmp_path / "README.md").read_text()


def test_the_containers_own_model_runs_on_the_settings_beside_ours(tmp_path: Path):
    write_repository(example(), "m", 1, tmp_path / "repository")
    stock = tmp_path / "stock"
    stock.mkdir()
    (stock / "model.py").write_text(STOCK)
    (stock / "helpers.py").write_text("WORD = 'theirs'\n")
    folder = tmp_path / "repository" / "m" / "1"
    code = "import model; print(model.TritonPythonModel.word); print(model.TritonPythonModel.served, end='')"
    environment = {"TRTSPEC_LLMAPI_FOLDER": str(stock), "PYTHONPATH": str(folder), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "theirs\n" + (folder / "model.yaml").read_text(), done.stderr
    environment["TRTSPEC_LLMAPI_FOLDER"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "is this a trtllm-python-py3 container?" in done.stderr


def test_a_version_without_a_known_image_says_so(tmp_path: Path):
    launch = write_settings(example("1.4.0rc4"), "m", 1, 8000, tmp_path)
    assert launch.triton is None and "release:1.4.0rc4" in launch.trtllm_serve
    assert "No Triton image" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "settings.json").read_text())["version"] == "1.4.0rc4"


def test_a_broken_repository_is_not_published(tmp_path: Path):
    settings = example()
    broken = Settings(settings.version, {**settings.values, "model": "${unfilled}"}, {}, ())
    with pytest.raises(StageFailed, match="never filled in"):
        write_repository(broken, "m", 1, tmp_path)
