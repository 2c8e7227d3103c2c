"""Images and compose files fit each other, the command line and the table of versions."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import DEPLOY
from trtspec.trtllm.contract import triton_image

ROOT = DEPLOY.parent
COMPOSE = ["compose.yaml", "compose.trtllm.yaml"]
IMAGES = ["Dockerfile.cpu", "Dockerfile.trtllm"]


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", file.read_text("utf-8")))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", IMAGES)
def test_an_image_has_what_it_copies_and_runs_the_launcher_as_nobody(file):
    steps = instructions(DEPLOY / file)
    assert [value for name, value in steps if name == "USER"][-1] == "10001"
    copied = {}
    for name, value in steps:
        if name == "COPY":
            *sources, target = [part for part in value.split() if not part.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), sources
            copied |= dict.fromkeys(sources, target)
    (entry,) = (json.loads(value) for name, value in steps if name == "ENTRYPOINT")
    assert copied["deploy/launch.sh"] == f"/usr/local/bin/{entry[-1]}"
    assert [json.loads(value) for name, value in steps if name == "CMD"] == [["trtspec"]]
    # What is sent to the builder is what is copied, or the folder that has it.
    ignored = (DEPLOY / f"{file}.dockerignore").read_text("utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert {source if source in sent else str(Path(source).parent) for source in copied} == sent
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (install,) = (value for name, value in steps if name == "RUN" and "pip" in value)
    assert re.search(r"\.\[(\w+)\]", install)[1] in extras


def test_the_cpu_image_has_the_python_that_trtspec_is_tested_on():
    (base,) = (value for name, value in instructions(DEPLOY / "Dockerfile.cpu") if name == "FROM")
    python = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f">={python}," in project["requires-python"]


def test_nvidias_image_is_the_one_that_carries_the_version_of_the_tag():
    version = services()["trtspec"]["image"].removeprefix("trtspec:trtllm-")
    (base,) = (value for name, value in instructions(DEPLOY / "Dockerfile.trtllm") if name == "ARG")
    assert base == f"BASE={triton_image(version)}", "one table says which image carries which version"


def test_what_the_image_installs_to_serve_is_pinned_as_where_it_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    tested = {requirement.split("==")[0].split("[")[0]: requirement for requirement in extras["cpu"]}
    for requirement in extras["serve"]:
        name = requirement.split("==")[0].split("[")[0]
        if "==" in requirement:
            assert requirement.split("==")[1] == tested[name].split("==")[1]


def services(files: Sequence[str] = COMPOSE) -> dict[str, Any]:
    """The services of compose files that lie over each other: mappings are merged, lists joined."""

    def over(below: Any, above: Any) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            return {name: over(below.get(name), above.get(name)) for name in {**below, **above}}
        if isinstance(below, list) and isinstance(above, list):
            return below + above
        return below if above is None else above

    texts = [(DEPLOY / file).read_text("utf-8") for file in files]
    return reduce(over, (yaml.safe_load(text)["services"] for text in texts))


@pytest.mark.parametrize("files", [COMPOSE[:1], COMPOSE])
def test_compose_pins_images_stays_on_loopback_and_mounts_what_is_there(files):
    made = services(files)
    for service in made.values():
        assert re.search(r":(cpu|(trtllm-|v)?\d+\.\d+\.\d+)$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for mount in service["volumes"]:
            if mount.startswith("./"):
                assert (DEPLOY / mount.split(":")[0]).exists(), mount
            assert mount.endswith(":ro")
    server = made["trtspec"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and server["tmpfs"][0] == "/tmp"
    assert server["volumes"] == ["${TRTSPEC_BUILD:?the build folder to serve}:/models:ro"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/trtspec.yml").read_text("utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    assert any(f":{folder}/" in mount for mount in made["grafana"]["volumes"])


def test_compose_gives_nvidias_image_the_gpus_and_a_home_for_its_kernels():
    server = services()["trtspec"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert f"{server['environment']['HOME']}:exec" in server["tmpfs"]
