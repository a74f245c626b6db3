"""Renders Shoal's Helm chart: ``python render_chart.py CHART < VALUES.json``.

Each object is checked against the schemas of Kubernetes' API.  Prints one JSON object:
``objects``, ``notes`` and ``warnings`` of the linter, or ``error``.
"""

import json
import sys
from typing import Any

import helm_python
import kubernetes_validate
import yaml

KUBERNETES = ("1.29", "1.37")  # the chart's ``kubeVersion``, and the newest known
OF_OPERATORS = {"ServiceMonitor", "ScrapeConfig"}  # Kubernetes' own schemas lack them
WARNING = 2  # severities of the linter


def main() -> None:
    values = json.load(sys.stdin)
    try:
        result = render(sys.argv[1], values)
    except helm_python.HelmError as error:
        result = {"error": str(error)}
    json.dump(result, sys.stdout)


def render(path: str, values: dict[str, Any]) -> dict[str, Any]:
    with helm_python.Chart.load(path) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="shoal", namespace="ai")
    found = helm_python.lint(path, values, strict=True)
    (notes,) = (text for name, text in files.items() if name.endswith("NOTES.txt"))
    objects = [
        each
        for name, text in files.items()
        if not name.endswith(".txt")
        for each in yaml.safe_load_all(text)
        if each
    ]
    for each in objects:
        if each["kind"] not in OF_OPERATORS:
            for version in KUBERNETES:
                kubernetes_validate.validate(each, version, strict=True)
    return {
        "objects": objects,
        "notes": notes,
        "warnings": [each for each in found["messages"] if each["severity"] >= WARNING],
    }


if __name__ == "__main__":
    main()
