"""The backend's operations beside gloo's; ``docs/training.md`` has the table."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from training.test_torch_backend import run_by_torchrun

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
TABLE = re.compile(r"(<!-- operations -->\n).*?(?=\n## )", re.DOTALL)
HEAD = (
    "| operations | gloo refuses | Shoal refuses |",
    "|---|---|---|",
)

Tried: TypeAlias = Sequence[Mapping[str, str]]
"""By case: the operation, what was tried, the verdict, and the errors."""


def tried() -> Tried:
    """Return what became of all cases, each once, of the ranks that tried it."""
    ended = run_by_torchrun("torch_operations.py")
    assert ended.returncode == 0, ended.stderr
    return [line for rank in json.loads(ended.stdout) for line in rank]


def page(lines: Tried) -> str:
    """Return ``docs/training.md`` with the table."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for operation in dict.fromkeys(line["operation"] for line in lines):
        found = {
            (line["case"], line["verdict"])
            for line in lines
            if line["operation"] == operation
        }
        refused = (
            ", ".join(sorted(case for case, verdict in found if verdict in wanted))
            or "nothing"
            for wanted in (("only shoal", "neither"), ("only gloo", "neither"))
        )
        alike.setdefault(tuple(refused), []).append(operation.replace("_", " "))
    rows = (
        f"| {', '.join(operations)} | {' | '.join(refused)} |"
        for refused, operations in alike.items()
    )
    table = "\n".join([*HEAD, *rows])
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n", PAGE.read_text())


@pytest.mark.long
def test_results_are_those_of_gloo_or_an_error_that_names_the_operation() -> None:
    lines = tried()

    assert not [line for line in lines if line["verdict"] == "different"]
    for line in lines:
        words = re.findall(r"[a-z_]{6,}", line["shoal"])
        assert not words or any(word in line["operation"] for word in words), line
    refused = [line for line in lines if line["gloo"] or line["shoal"]]
    assert page(lines) == PAGE.read_text(), ("run make operations", refused)
