"""The Helm chart: what Helm renders, and what Kubernetes' schemas say of it.

``test_container.py`` runs the pods' commands.
"""

from dataclasses import fields
from typing import Any

import pytest
import yaml

from cli.test_documented_commands import check_command
from harness.documents import blocks_of
from live.container_files import DATA, ROOT, SECRETS
from live.helm_chart import CHART, pods, render, variables
from shoal import __version__
from shoal.app.parts import STOP_TIMEOUT
from shoal.config import JoinConfig, ServeConfig
from shoal.config.loader import variable

MODEL_SERVER = {
    "name": "vllm",
    "image": "vllm/vllm-openai:latest",
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}
GPU = {
    "kind": "DaemonSet",
    "engine": "http://127.0.0.1:8000",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "containers": [MODEL_SERVER],
}
CHANGED: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "secret": {"existing": "shoal-secrets"},
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "pool.example.com",
        "tlsSecret": "certificate",
        "trustedProxies": ["10.1.0.0/16", "10.2.0.0/16"],
    },
    "serviceMonitor": {
        "enabled": True,
        "keySecret": {"name": "prometheus"},
        "labels": {"release": "monitoring"},
    },
    "coordinator": {
        "args": ["--log-format", "json"],
        "env": {"SHOAL_PRICE_CALL": 0.01},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"operator": "Exists"}],
        "storage": {"existingClaim": "pool"},
    },
    "workers": {"cpu": None, "gpu": GPU, "many": {"replicas": 3}},
}
"""Each value that a cluster may need otherwise."""

NODES: dict[str, Any] = {
    "coordinator": {
        "replicas": 3,
        "database": {"secret": "pool-database", "key": "uri"},
        "fronts": 2,
        "drain": 600,
    },
    "serviceMonitor": {"enabled": True, "keySecret": {"name": "prometheus"}},
}
SHOWN = {
    f"documented {number}": yaml.safe_load(block.code)
    for number, block in enumerate(blocks_of(ROOT / "docs" / "deployment.md"), 1)
    if block.language == "yaml"
}
EXAMPLES = {"defaults": {}, "changed": CHANGED, "nodes": NODES, **SHOWN}
ALL = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES.keys())


@pytest.mark.short
def test_version_is_that_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))

    assert chart["appVersion"] == chart["version"] == __version__


@ALL
def test_objects_are_valid(values: dict[str, Any]) -> None:
    rendered = render(**values)

    assert rendered["warnings"] == []
    assert "shoal" in rendered["notes"]


@ALL
def test_commands_and_variables_exist(values: dict[str, Any]) -> None:
    declared = (("serve", ServeConfig), ("join", JoinConfig))
    known = {variable(name, each) for name, of in declared for each in fields(of)}
    known.add("POD_IP")  # for the value of another
    for pod in pods(render(**values)).values():
        container = pod["containers"][0]
        check_command(container["args"])
        for name in variables(container):
            assert name in known or name.removesuffix("_FILE") in known


@ALL
def test_pods_have_no_rights(values: dict[str, Any]) -> None:
    for pod in pods(render(**values)).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        # Kubernetes would set SHOAL_PORT to the address of a service named shoal.
        assert pod["enableServiceLinks"] is False
        container = pod["containers"][0]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_values_reach_the_objects() -> None:
    rendered = render(**CHANGED)
    kinds = {
        (each["kind"], each["metadata"]["name"]): each for each in rendered["objects"]
    }
    found = pods(rendered)

    assert ("Secret", "shoal") not in kinds
    assert ("Deployment", "shoal-cpu") not in kinds
    assert kinds["Deployment", "shoal-many"]["spec"]["replicas"] == 3
    worker, server = found["shoal-gpu"]["containers"]
    assert kinds["DaemonSet", "shoal-gpu"]
    assert server == MODEL_SERVER
    assert variables(worker)["SHOAL_ENGINE"] == "http://127.0.0.1:8000"
    assert worker["args"] == ["join", "http://shoal:80"]
    (coordinator,) = found["shoal"]["containers"]
    assert coordinator["args"] == ["serve", "--log-format", "json"]
    given = variables(coordinator)
    assert given["SHOAL_ALLOWED_HOST"] == "pool.example.com"
    assert given["SHOAL_TRUSTED_PROXY"] == "10.1.0.0/16,10.2.0.0/16"
    volumes = {each["name"]: each for each in found["shoal"]["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "pool"
    assert volumes["secret"]["secret"]["secretName"] == "shoal-secrets"
    mounts = {each["name"]: each["mountPath"] for each in coordinator["volumeMounts"]}
    assert mounts["data"] == DATA
    assert mounts["secret"].startswith(SECRETS)
    assert "https://pool.example.com" in rendered["notes"]


def test_nodes_share_a_database_and_no_machine() -> None:
    rendered = render(**NODES)
    kinds = {
        each["kind"]: each["spec"] for each in rendered["objects"] if "spec" in each
    }
    pod = pods(rendered)["shoal"]
    (node,) = pod["containers"]
    given = {each["name"]: each for each in node["env"]}

    assert "StatefulSet" not in kinds
    assert "PersistentVolumeClaim" not in kinds
    assert {"name": "data", "emptyDir": {}} in pod["volumes"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["database"]["secret"]["secretName"] == "pool-database"
    mounts = {each["name"]: each["mountPath"] for each in node["volumeMounts"]}
    assert given["SHOAL_STORE_FILE"]["value"] == f"{mounts['database']}/uri"
    names = list(given)
    assert names.index("POD_IP") < names.index("SHOAL_NODE")  # it is in its value
    assert given["SHOAL_NODE"]["value"] == "$(POD_IP):4011"
    assert given["SHOAL_FRONTS"]["value"] == "2"
    assert kinds["PodDisruptionBudget"]["maxUnavailable"] == 1
    (spread,) = pod["affinity"]["podAntiAffinity"].values()
    assert spread[0]["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert node["readinessProbe"]["httpGet"]["path"] == "/readyz"
    # A pool that does not answer is no reason to kill its nodes.
    assert "livenessProbe" not in node
    # Each node answers for the pool: one of them is asked.
    assert kinds["ScrapeConfig"]["staticConfigs"] == [
        {"targets": ["shoal.ai.svc:4010"]}
    ]


def test_only_nodes_reach_the_port_of_nodes() -> None:
    rendered = render(**NODES)
    (policy,) = (e for e in rendered["objects"] if e["kind"] == "NetworkPolicy")
    (pod,) = (
        each["spec"]["template"]
        for each in rendered["objects"]
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "shoal"
    )
    (container,) = pod["spec"]["containers"]
    (port,) = (e["containerPort"] for e in container["ports"] if e["name"] == "node")
    everybody, nodes = policy["spec"]["ingress"]
    ranges = [(each["port"], each["endPort"]) for each in everybody["ports"]]

    assert "from" not in everybody
    assert not any(first <= port <= last for first, last in ranges)
    assert [each["port"] for each in nodes["ports"]] == [port]
    (of,) = nodes["from"]
    labels = of["podSelector"]["matchLabels"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"] == labels


@pytest.mark.parametrize("values", [{}, NODES], ids=["file", "nodes"])
def test_a_pod_is_killed_only_after_open_answers_had_their_time(
    values: dict[str, Any],
) -> None:
    pod = pods(render(**values))["shoal"]
    (container,) = pod["containers"]
    before = container.get("lifecycle", {}).get("preStop")
    seconds = float(before["exec"]["command"][-1]) if before else 0.0
    seconds += float(variables(container)["SHOAL_DRAIN"])

    assert pod["terminationGracePeriodSeconds"] > seconds + STOP_TIMEOUT


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"image": {"repository": ""}}, "image.repository"),
        ({"image": {"repositry": "shoal"}}, "repositry"),
        ({"coordinator": {"replicas": 2}}, "coordinator.database.secret"),
        ({"workers": {"GPU": {}}}, "GPU"),
        ({"workers": {"gpu": {"kind": "Job"}}}, "gpu"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret.name"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], word: str) -> None:
    assert word in render(**values)["error"]
