"""Recorded messages of real peers; the file describes how to compare them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from protocols.each_case import Test, in_each_case

VECTORS = Path(__file__).parent / "vectors" / "tealenet.json"

Case: TypeAlias = dict[str, Any]  # the fields depend on the group
CASES: list[Case] = json.loads(VECTORS.read_text("utf-8"))["cases"]


def recorded(*groups: str) -> Callable[[Test], Test]:
    """Run a test once for each case of the groups, as ``case``."""
    return in_each_case({case["id"]: case for case in CASES if case["group"] in groups})


def case_of(name: str) -> Case:
    """Return the case with an id."""
    return next(case for case in CASES if case["id"] == name)
