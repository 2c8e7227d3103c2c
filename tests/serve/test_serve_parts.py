"""What serving is made of, without a server: finding one, ports, logs, the client's wire format."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from trtspec.errors import SetupError
from trtspec.package.contract import INPUT_BY_NAME
from trtspec.serve import install
from trtspec.serve.client import _raw, _values, sampling_inputs
from trtspec.serve.install import SERVER_VARIABLE, find_triton, link_backends, server_environment
from trtspec.serve.ports import claim_ports
from trtspec.serve.process import decisive_lines
from trtspec.values import SamplingParams


def make_server(root: Path, *, python_backend: bool = True) -> Path:
    """The layout of NVIDIA's containers."""
    (root / "bin").mkdir(parents=True)
    binary = root / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    if python_backend:
        backend = root / "backends" / "python"
        backend.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"):
            (backend / name).touch()
    return binary


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No server in the environment, on PATH or in /opt."""
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(install, "_SYSTEM_ROOT", tmp_path / "none")


def test_a_server_is_looked_for_where_named_then_on_path_then_in_the_wheel(nowhere, monkeypatch, tmp_path):
    assert find_triton().origin == "nvidia-pytriton"
    on_path = make_server(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_triton().binary == on_path
    named = make_server(tmp_path / "named")
    monkeypatch.setenv(SERVER_VARIABLE, str(named))
    assert find_triton().binary == named
    given = make_server(tmp_path / "given")
    assert find_triton(given).binary == given


def test_a_named_server_that_is_not_there_or_cannot_serve_python_is_refused(nowhere, tmp_path):
    with pytest.raises(SetupError, match="no Triton server here"):
        find_triton(tmp_path / "absent")
    with pytest.raises(SetupError, match="no Python backend"):
        find_triton(make_server(tmp_path / "bare", python_backend=False))


def test_no_server_at_all_names_the_command_that_installs_one(nowhere, monkeypatch):
    monkeypatch.setattr(install, "_pytriton_root", lambda: None)
    with pytest.raises(SetupError) as missing:
        find_triton()
    assert "pip install" in missing.value.hint


def test_library_and_stub_are_linked_side_by_side_and_again_after_a_restart(nowhere, tmp_path):
    for _ in range(2):
        backends = link_backends(find_triton(), tmp_path)
    names = {path.name for path in (backends / "python").iterdir()}
    assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert all(path.exists() for path in (backends / "python").iterdir())


def test_models_run_in_this_interpreter(nowhere):
    environment = server_environment()
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert any(
        Path(folder).glob("libpython3*") for folder in environment["LD_LIBRARY_PATH"].split(os.pathsep)
    )


def test_free_ports_are_distinct_and_a_busy_one_is_named_with_its_holder():
    ports = claim_ports("127.0.0.1", {"a": 0, "b": 0, "c": 0})
    assert len(set(ports.values())) == 3
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError) as refused:
            claim_ports("127.0.0.1", {"serving.http_port": 0, "serving.grpc_port": port})
    assert refused.value.where == "serving.grpc_port"
    assert f"{port}" in refused.value.message
    assert f"pid {os.getpid()}" in refused.value.message
    assert claim_ports("127.0.0.1", {"serving.grpc_port": port}) == {"serving.grpc_port": port}


def test_one_port_for_two_services_is_refused():
    free = claim_ports("127.0.0.1", {"a": 0})["a"]
    with pytest.raises(SetupError) as refused:
        claim_ports("127.0.0.1", {"serving.http_port": free, "serving.grpc_port": free})
    assert refused.value.where == "serving.grpc_port"


def test_the_lines_of_a_log_that_matter():
    log = (
        'E1129 20:00:00.1 1 cuda.cc:1] "CudaDriverHelper has not been initialized."\n'
        "I1129 20:00:00.2 1 server.cc:1] fine\n"
        "E1129 20:00:00.3 1 model.cc:1] \"failed to load 'm': engine.json is missing\"\n"
    )
    assert [line[:5] for line in decisive_lines(log)] == ["E1129"]
    assert "engine.json is missing" in decisive_lines(log)[0]
    assert decisive_lines("nothing telling\nlast words\n") == ["nothing telling", "last words"]


def test_sampling_is_sent_by_the_contracts_names_and_defaults_are_not_sent():
    assert sampling_inputs(SamplingParams()) == {}
    everything = SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        seed=2**64 - 1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        stop=("a", "b"),
        ignore_eos=True,
        logprobs=True,
    )
    inputs = sampling_inputs(everything)
    assert len(inputs) == 11
    assert set(inputs) <= set(INPUT_BY_NAME)
    with pytest.raises(ValueError, match="stop_token_ids"):
        sampling_inputs(SamplingParams(stop_token_ids=(1,)))


def test_the_wire_format_is_tritonclients():
    texts = ["", "a", "é😀", "x" * 300]
    theirs = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=np.object_)).item()
    assert _raw("BYTES", texts) == theirs
    assert (
        list(_values("BYTES", theirs)) == texts == [raw.decode() for raw in deserialize_bytes_tensor(theirs)]
    )
    assert _values("INT32", _raw("INT32", [1, -2, 2**31 - 1])) == (1, -2, 2**31 - 1)
    assert _values("UINT64", _raw("UINT64", [2**64 - 1])) == (2**64 - 1,)
