"""What the images start: the launcher runs for real, with stand-ins for MPI, SSH and the servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.conftest import DEPLOY, TEMPLATES
from trtspec.cli import make_parser

LAUNCHER = DEPLOY / "launch.sh"
PUBLIC = "ssh-ed25519 AAAA"
LEADER = "demo-0.demo.default"
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": LEADER, "LWS_WORKER_INDEX": "0", "HOSTNAME": "demo-0"}
# A stand-in writes its arguments to a file of its name; ssh fails the first time, as before a worker is there.
STAND_IN = """#!/bin/sh
{before}
printf '%s\\n' "$@" >"$RECORD/$(basename "$0")"
"""
BEFORE = {
    "ssh": '[ -e "$RECORD/tried" ] || { touch "$RECORD/tried"; exit 255; }',
    "ssh-keygen": f"echo {PUBLIC}; exit",
    "nvidia-smi": "seq 8; exit",
    "sleep": "exit",
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the launcher is a bash script")


@dataclass(frozen=True, slots=True)
class Launched:
    """How the launcher ended. started: program → its arguments."""

    code: int
    said: str
    started: dict[str, list[str]]
    ssh_files: Path


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launched]:
    """A function that runs the launcher on a build for `ranks` GPUs, on a machine with eight."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("trtspec", "mpirun", "tritonserver", "sshd", *BEFORE):
        (programs / name).write_text(STAND_IN.format(before=BEFORE.get(name, "")))
        (programs / name).chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    (tmp_path / "key").write_text("a private key")

    def run(role: str, ranks: int, instances: str = "", **environment: str) -> Launched:
        record, models = tmp_path / "record", tmp_path / "models"
        record.mkdir()
        (models / "trtllm").mkdir(parents=True)
        values = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 1}
        (models / "trtllm/settings.json").write_text(json.dumps({"values": values}))
        (models / "repository/m").mkdir(parents=True)
        (models / "repository/m/config.pbtxt").write_text(f'name: "m"\n{instances}\n')
        done = subprocess.run(
            ["bash", str(LAUNCHER), role],
            env={
                "PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin",
                "RECORD": str(record),
                "MODELS": str(models),
                "SSH_FILES": str(tmp_path / "ssh"),
                "SSH_KEY": str(tmp_path / "key"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=30,
        )
        started = {
            file.name: file.read_text().splitlines() for file in record.iterdir() if file.name != "tried"
        }
        return Launched(done.returncode, done.stderr, started, tmp_path / "ssh")

    return run


def test_trtspecs_own_server_opens_the_front_and_keeps_triton_inside(launch):
    made = launch("trtspec", 1, PORT="9001", DRAIN_SECONDS="45")
    arguments = make_parser().parse_args(made.started["trtspec"])
    assert (arguments.openai_address, arguments.openai_port, arguments.drain_timeout) == ("0.0.0.0", 9001, 45)
    assert arguments.openai and arguments.address == "127.0.0.1"


def test_one_node_serves_under_mpi_as_nvidias_launcher_does(launch):
    made = launch("triton", 8, PORT="9000", DRAIN_SECONDS="30")
    assert made.code == 0, made.said
    (arguments,) = made.started.values()
    server = arguments[arguments.index("tritonserver") :]
    assert arguments[: arguments.index("tritonserver")][-2:] == ["-n", "1"]
    assert "--http-port=9000" in server and "--exit-timeout-secs=30" in server
    assert "--disable-auto-complete-config" not in server, "model.yaml's policy would not be read"
    # MPI ends what does not end itself; the drain comes first.
    assert int(arguments[arguments.index("odls_base_sigkill_timeout") + 1]) > 30


def test_instances_with_gpus_of_their_own_start_their_ranks_themselves(launch):
    made = launch(
        "triton", 2, instances='parameters { key: "gpu_device_ids" value { string_value: "0,1;2,3" } }'
    )
    assert set(made.started) == {"tritonserver"}, made.said


def test_a_leader_waits_for_its_workers_and_starts_a_rank_per_gpu(launch):
    made = launch("trtllm-serve", 16, NCCL_DEBUG="WARN", NVIDIA_VISIBLE_DEVICES="GPU-1", **GROUP)
    assert made.code == 0, made.said
    assert made.started["ssh"] == ["demo-0-1.demo.default", "true"], "asked again until it answered"
    arguments = made.started["mpirun"]
    command = arguments.index("trtllm-llmapi-launch")
    assert arguments[command + 1] == "trtllm-serve"
    assert arguments[arguments.index("-n") + 1] == "16"
    assert arguments[arguments.index("--host") + 1] == f"{LEADER}:8,demo-0-1.demo.default:8"
    forwarded = {arguments[i + 1] for i in range(command) if arguments[i] == "-x"}
    assert {"PATH", "NCCL_DEBUG"} <= forwarded
    assert not forwarded & {*GROUP, "NVIDIA_VISIBLE_DEVICES", "PWD"}, "they say which node this is"


def test_the_key_is_for_its_owner_alone_and_is_what_every_node_must_show(launch):
    made = launch("worker", 16, **GROUP)
    assert made.started == {"sshd": ["-D", "-e", "-f", "/etc/trtspec/sshd_config"]}, made.said
    assert stat.S_IMODE((made.ssh_files / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(made.ssh_files.stat().st_mode) == 0o700
    assert (made.ssh_files / "known_hosts").read_text() == f"* {PUBLIC}\n"


@pytest.mark.parametrize(
    ("role", "ranks", "environment", "says"),
    [
        ("triton", 16, {}, "the build is for 16 GPUs, this node has 8"),
        ("trtllm-serve", 8, GROUP, "the build is for 8 GPUs, 2 nodes of 8 have 16"),
        ("trtllm-serve", 16, {**GROUP, "SSH_KEY": "/nowhere"}, "SSH_KEY names no readable private key"),
        ("serve", 8, {}, "one of trtspec, trtllm-serve, triton, worker"),
    ],
)
def test_what_would_hang_or_fail_late_is_said_at_once(launch, role, ranks, environment, says):
    made = launch(role, ranks, **environment)
    assert made.code == 1 and says in made.said
    assert "mpirun" not in made.started


def test_launcher_ssh_and_chart_mean_the_same_files_and_port():
    client, server = ((DEPLOY / "ssh" / name).read_text("utf-8") for name in ("ssh_config", "sshd_config"))
    files = re.search(r"SSH_FILES:-([\w/-]+)}", LAUNCHER.read_text("utf-8"))[1]
    assert set(re.findall(r"(/tmp/[\w/-]+)/\w+", client + server)) == {files}
    ports = re.findall(r"^Port (\d+)$", client + server, re.MULTILINE)
    pod = TEMPLATES["_pod.tpl"]
    assert len(ports) == 2 and set(ports) == {re.search(r"name: ssh, containerPort: (\d+)", pod)[1]}
    image = (DEPLOY / "Dockerfile.trtllm").read_text("utf-8")
    assert (
        re.search(r"^AllowUsers (\w+)$", server, re.MULTILINE)[1] == re.search(r"/bin/bash (\w+)\n", image)[1]
    )
