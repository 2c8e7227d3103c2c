"""Image, compose file and chart fit each other, the command line and their documentation."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import DEPLOY
from trtspec.cli import make_parser

ROOT = DEPLOY.parent
CHART = DEPLOY / "helm/trtspec"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
TEMPLATES = {path.name: path.read_text("utf-8") for path in (CHART / "templates").iterdir()}
# The 1.33 schemas: every kind of the chart has been stable since 1.25 or earlier.
KUBERNETES = "1.33"


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", file.read_text("utf-8")))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Dotted names of all values; lists and empty mappings are one value."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path


def parsed(arguments: list[str]) -> Any:
    """What `trtspec` makes of a command line. Exits, and so fails, on an option it does not have."""
    assert arguments[0] == "trtspec"
    return make_parser().parse_args(arguments[1:])


def test_the_image_runs_as_nobody_on_the_python_that_trtspec_runs_on():
    steps = instructions(DEPLOY / "Dockerfile.cpu")
    (base,) = (value for name, value in steps if name == "FROM")
    python = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f">={python}," in project["requires-python"]
    users = [value for name, value in steps if name == "USER"]
    assert users == ["10001"]
    for name, value in steps:
        if name == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
    (install,) = (value for name, value in steps if name == "RUN" and "pip" in value)
    assert re.search(r"\.\[(\w+)\]", install)[1] in project["optional-dependencies"]
    ignored = (DEPLOY / "Dockerfile.cpu.dockerignore").read_text("utf-8").splitlines()
    copied = {s for name, value in steps if name == "COPY" for s in value.split()[:-1]}
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_what_the_image_installs_to_serve_is_pinned_as_where_it_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    tested = {requirement.split("==")[0].split("[")[0]: requirement for requirement in extras["cpu"]}
    for requirement in extras["serve"]:
        name = requirement.split("==")[0].split("[")[0]
        if "==" in requirement:
            assert requirement.split("==")[1] == tested[name].split("==")[1]


def test_the_image_opens_the_front_and_keeps_triton_inside():
    (entry,) = (value for name, value in instructions(DEPLOY / "Dockerfile.cpu") if name == "ENTRYPOINT")
    arguments = parsed(json.loads(entry))
    assert arguments.openai and arguments.openai_address == "0.0.0.0" and arguments.openai_port == 9000
    assert arguments.address == "127.0.0.1"


def test_compose_pins_images_stays_on_loopback_and_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    for service in compose["services"].values():
        assert re.search(r":(cpu|v?\d+\.\d+\.\d+)$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for mount in service["volumes"]:
            if mount.startswith("./"):
                assert (DEPLOY / mount.split(":")[0]).exists(), mount
                assert mount.endswith(":ro")
    server = compose["services"]["trtspec"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and server["tmpfs"] == ["/tmp"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/trtspec.yml").read_text("utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    assert any(f":{folder}/" in mount for mount in compose["services"]["grafana"]["volumes"])


def documented() -> list[tuple[str, str]]:
    """(value, default) of each row of the table of values."""
    text = (DEPLOY / "README.md").read_text("utf-8")
    return re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| .+\|$", text, re.MULTILINE)


def test_every_value_is_documented_once_and_used():
    assert sorted(name for name, _ in documented()) == sorted(leaves(VALUES))
    used = set(re.findall(r"\.Values\.([\w.]+)", "".join(TEMPLATES.values())))
    for name in leaves(VALUES):
        assert any(name == use or name.startswith(f"{use}.") for use in used), f"{name} does nothing"
    for use in used:
        assert any(name == use or name.startswith(f"{use}.") for name in leaves(VALUES)), use


def test_documented_defaults_are_the_charts():
    for name, default in documented():
        value: Any = VALUES
        for part in name.split("."):
            value = value[part]
        assert yaml.safe_load(default) == value, name


def test_template_blocks_are_closed():
    for name, text in TEMPLATES.items():
        words = re.findall(r"{{-?\s*(if|with|range|define|end)\b", text)
        assert words.count("end") == len(words) - words.count("end"), name


@pytest.fixture(scope="module")
def render():
    """A function from values to the chart's objects by kind, made by Helm itself."""
    chart = pytest.importorskip("helm_python", reason="Helm is not here: pip install helm-python-sdk").Chart

    def make(**values: Any) -> dict[str, dict[str, Any]]:
        with chart.load(CHART) as loaded:
            texts = loaded.render(values={"build": {"claim": "builds"}, **values}, name="demo")
        documents = [one for text in texts.values() for one in yaml.safe_load_all(text) if one]
        return {document["kind"]: document for document in documents}

    return make


CASES = {
    "defaults": {},
    "gpus": {
        "gpus": 2,
        "runtimeClassName": "nvidia",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "image": {"pullSecrets": [{"name": "registry"}]},
        "podAnnotations": {"a": "b"},
    },
    "autoscaling": {"autoscaling": {"enabled": True, "verifyStepsPerSecond": "40"}},
    "bare": {"networkPolicy": {"enabled": False}, "disruptionBudget": {"enabled": False}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_helm_renders_is_what_kubernetes_takes(render, case):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="Kubernetes schemas are not here: pip install kubernetes-validate"
    ).validate
    for document in render(**CASES[case]).values():
        validate(document, KUBERNETES, strict=True)


def test_pods_are_confined_and_start_the_server_that_the_probes_ask(render):
    objects = render(**CASES["gpus"])
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    arguments = parsed([*container["command"], *container["args"]])
    assert (arguments.openai_port, arguments.address) == (VALUES["port"], "127.0.0.1")
    assert pod["terminationGracePeriodSeconds"] > arguments.drain_timeout + 10
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness", "startup")}
    app = (ROOT / "trtspec/serve/openai/app.py").read_text("utf-8")
    assert all(f'add_get("{path}"' in app for path in paths)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == VALUES["startupSeconds"]
    ingress = objects["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for rule in ingress for port in rule["ports"]] == ["http"]
    assert "egress" not in objects["NetworkPolicy"]["spec"]


def test_the_autoscaler_scales_on_what_the_adapter_makes(render):
    adapter = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text("utf-8"))
    objects = render(**CASES["autoscaling"])
    metrics = [
        metric["pods"]["metric"]["name"] for metric in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    ]
    assert metrics == [rule["name"]["as"] for rule in adapter]
    assert "replicas" not in objects["Deployment"]["spec"], "the autoscaler's number would be undone"


def test_a_chart_without_a_build_is_refused_with_the_value_to_set(render):
    with pytest.raises(Exception, match=r"build\.claim"):
        render(build={"claim": ""})
