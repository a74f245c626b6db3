"""The objects of the Helm chart, rendered by Helm."""

import json
import subprocess
from typing import Any

from clients.conftest import INSTALLED
from live.container_files import ROOT

CHART = ROOT / "examples" / "deploy" / "chart"
RENDER = ROOT / "tests" / "clients" / "render_chart.py"
IMAGE = {"repository": "registry.example.com/shoal"}  # no default can be right


def render(**values: Any) -> dict[str, Any]:
    """Return what ``render_chart.py`` prints."""
    assert INSTALLED.exists(), "Helm is not installed: make .venv-clients/.made"
    done = subprocess.run(
        [INSTALLED / "bin" / "python", RENDER, CHART],
        input=json.dumps({"image": IMAGE, **values}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rendered: dict[str, Any] = json.loads(done.stdout)
    return rendered


def pods(rendered: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of each pod, by the name of its object."""
    return {
        each["metadata"]["name"]: each["spec"].get("template", each)["spec"]
        for each in rendered["objects"]
        if each["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Pod")
    }


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container; ``pod`` for those from the pod's fields."""
    return {each["name"]: each.get("value", "pod") for each in container.get("env", ())}
