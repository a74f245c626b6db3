"""What MacFleet's programs send, accept and reject; the file says how to compare."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest

VECTORS = Path(__file__).parent / "vectors" / "macfleet.json"

Case: TypeAlias = dict[str, Any]  # the fields depend on the kind
CASES: list[Case] = json.loads(VECTORS.read_text("utf-8"))["cases"]


def recorded(*kinds: str) -> pytest.MarkDecorator:
    """Run a test once for each case of the kinds, as ``case``."""
    cases = [case for case in CASES if case["kind"] in kinds]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


def case_of(name: str) -> Case:
    """Return the case of this name."""
    return next(case for case in CASES if case["name"] == name)
