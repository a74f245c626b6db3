"""Recorded messages of real peers; the file describes how to compare them."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest

VECTORS = Path(__file__).parent / "vectors" / "tealenet.json"

Case: TypeAlias = dict[str, Any]  # the fields depend on the group
CASES: list[Case] = json.loads(VECTORS.read_text("utf-8"))["cases"]


def recorded(*groups: str) -> pytest.MarkDecorator:
    """Run a test once for each case of the groups, as ``case``."""
    cases = [case for case in CASES if case["group"] in groups]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


def case_of(name: str) -> Case:
    """Return the case with an id."""
    return next(case for case in CASES if case["id"] == name)
