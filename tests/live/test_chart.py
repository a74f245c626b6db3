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

(SHOWN,) = (
    yaml.safe_load(block.code)
    for block in blocks_of(ROOT / "docs" / "deployment.md")
    if block.language == "yaml"
)
ALL = pytest.mark.parametrize(
    "values", [{}, CHANGED, SHOWN], ids=["defaults", "changed", "documented"]
)


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


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"image": {"repository": ""}}, "image.repository"),
        ({"image": {"repositry": "shoal"}}, "repositry"),
        ({"coordinator": {"replicas": 2}}, "replicas"),
        ({"workers": {"GPU": {}}}, "GPU"),
        ({"workers": {"gpu": {"kind": "Job"}}}, "gpu"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret.name"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], word: str) -> None:
    assert word in render(**values)["error"]
