"""The chart: every value documented and used, what it renders taken by Kubernetes, and its objects fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import CHART, DEPLOY, RELEASE, TEMPLATES, VALUES, by_kind
from trtspec.trtllm.derive import MOUNT

# Every kind of Kubernetes' own in the chart has been stable since 1.25 or earlier.
KUBERNETES = "1.33"
# LeaderWorkerSet is not Kubernetes' own: the fields of its v1 that the chart may set, from its API's types. The pods
# inside are Kubernetes' and are held against its schemas.
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {"properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}},
        "rolloutStrategy": {
            "required": ["type"],
            "additionalProperties": False,
            "properties": {
                "type": {"const": "RollingUpdate"},
                "rollingUpdateConfiguration": {
                    "additionalProperties": False,
                    "properties": {
                        name: {"type": "integer"} for name in ("maxSurge", "maxUnavailable", "partition")
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Dotted names of all values; lists and empty mappings are one value."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path


def documented() -> list[tuple[str, str]]:
    """(value, default) of each row of the table of values."""
    text = (DEPLOY / "README.md").read_text("utf-8").split("| value | default | meaning |")[1]
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
    "triton": {"server": "triton", "gpus": 1, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
    **{path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (DEPLOY / "helm/examples").iterdir()},
}
CASES["two nodes, scaled"] = {
    **CASES["tensorrt-llm-two-nodes"],
    "autoscaling": {"enabled": True, "verifyStepsPerSecond": "400"},
}
BUILD = {"build": {"claim": "builds"}}


def pods(objects: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Role → pod template."""
    if "Deployment" in objects:
        return {"server": objects["Deployment"]["spec"]["template"]}
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {"server": group["leaderTemplate"], "worker": group["workerTemplate"]}


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_what_kubernetes_takes(render, case):
    objects = render(**{**BUILD, **CASES[case]})
    for kind, document in objects.items():
        if kind == "LeaderWorkerSet":
            assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
            jsonschema.validate(document["spec"], LEADER_WORKER_SET)
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for template in pods(objects).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": "one", **pod["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_helm_itself_renders_the_same(render):
    """The tests render without Helm, whose package is large. Where it is installed, both must agree."""
    helm = pytest.importorskip("helm_python", reason="Helm is not here: pip install helm-python-sdk")
    for case in CASES.values():
        values = {**BUILD, **case}
        with helm.Chart.load(CHART) as loaded:
            assert by_kind(loaded.render(values=values, name=RELEASE).values()) == render(**values)


@pytest.mark.parametrize("case", CASES)
def test_pods_are_confined_and_probes_and_policy_name_ports_that_are_there(render, case):
    objects = render(**{**BUILD, **CASES[case]})
    for role, template in pods(objects).items():
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[name] for name in container if name.endswith("Probe")]
        assert probes and all(
            (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports for probe in probes
        )
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        assert all(
            mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] in ("build", "key")
        )
        if role == "server":
            annotations = template["metadata"]["annotations"]
            assert int(annotations["prometheus.io/port"]) in ports.values()
            assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} <= set(ports)
            if policy := objects.get("NetworkPolicy"):
                assert {port["port"] for port in policy["spec"]["ingress"][0]["ports"]} == set(ports)


@pytest.mark.parametrize(
    ("server", "ready"),
    [("trtspec", "/health"), ("triton", "/v2/health/ready"), ("trtllm-serve", "/health")],
)
def test_the_images_launcher_starts_the_server_on_the_mounted_build(render, server, ready):
    pod = pods(render(**BUILD, server=server))["server"]["spec"]
    (container,) = pod["containers"]
    assert "command" not in container, "the image's entry point is the launcher"
    assert container["args"] == [server]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment == {"PORT": str(VALUES["port"]), "DRAIN_SECONDS": str(VALUES["drainSeconds"])}
    assert pod["terminationGracePeriodSeconds"] > VALUES["drainSeconds"] + 10
    assert {"name": "build", "mountPath": MOUNT, "readOnly": True} in container["volumeMounts"]
    assert container["readinessProbe"]["httpGet"]["path"] == ready


def test_the_front_has_what_the_probes_ask_and_loading_has_its_time(render):
    (container,) = pods(render(**BUILD))["server"]["spec"]["containers"]
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness", "startup")}
    app = (DEPLOY.parent / "trtspec/serve/openai/app.py").read_text("utf-8")
    assert all(f'add_get("{path}"' in app for path in paths)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == VALUES["startupSeconds"]


def test_a_server_of_one_node_has_its_gpus_and_makes_no_connections(render):
    objects = render(**{**BUILD, **CASES["gpus"]})
    (container,) = pods(objects)["server"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    policy = objects["NetworkPolicy"]["spec"]
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["http"]
    assert "Egress" in policy["policyTypes"] and "egress" not in policy


def test_a_group_of_nodes_shares_a_key_and_a_network_and_clients_reach_its_leader(render):
    objects = render(**CASES["tensorrt-llm-two-nodes"])
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    containers = {role: template["spec"]["containers"][0] for role, template in pods(objects).items()}
    assert {role: container["args"] for role, container in containers.items()} == {
        "server": ["trtllm-serve"],
        "worker": ["worker"],
    }
    for template in pods(objects).values():
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        folder, key = environment["SSH_KEY"].rsplit("/", 1)
        assert key == "ssh-privatekey", "the key of a Secret of type kubernetes.io/ssh-auth"
        assert {"name": "key", "mountPath": folder, "readOnly": True} in container["volumeMounts"]
    assert objects["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    policy = objects["NetworkPolicy"]["spec"]
    mine = [{"podSelector": policy["podSelector"]}]
    assert {"from": mine} in policy["ingress"] and {"to": mine} in policy["egress"]


@pytest.mark.parametrize("case", ["autoscaling", "two nodes, scaled"])
def test_the_autoscaler_scales_what_is_there_on_what_the_adapter_makes(render, case):
    adapter = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text("utf-8"))
    objects = render(**{**BUILD, **CASES[case]})
    spec = objects["HorizontalPodAutoscaler"]["spec"]
    metrics = [metric["pods"]["metric"]["name"] for metric in spec["metrics"]]
    assert len(metrics) == 2 and set(metrics) <= {rule["name"]["as"] for rule in adapter}
    target = objects[spec["scaleTargetRef"]["kind"]]
    assert spec["scaleTargetRef"]["apiVersion"] == target["apiVersion"]
    assert spec["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert "replicas" not in target["spec"], "the autoscaler's number would be undone"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"build": {"claim": ""}}, r"build\.claim"),
        ({"server": "vllm"}, "server: vllm is none of triton, trtllm-serve, trtspec"),
        ({"nodes": 2, "sshKeySecret": "key"}, "set server to trtllm-serve or triton"),
        ({"nodes": 2, "server": "triton"}, "sshKeySecret"),
        ({"server": "triton", "autoscaling": {"enabled": True}}, "exports no queue"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_one_to_set(render, values, says):
    with pytest.raises(Exception, match=says):
        render(**{**BUILD, **values})
