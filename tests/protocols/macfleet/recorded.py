"""What MacFleet's programs send, accept and reject; the file says how to compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from protocols.each_case import Test, in_each_case

VECTORS = Path(__file__).parent / "vectors" / "macfleet.json"

Case: TypeAlias = dict[str, Any]  # the fields depend on the kind
CASES: list[Case] = json.loads(VECTORS.read_text("utf-8"))["cases"]


def recorded(*kinds: str) -> Callable[[Test], Test]:
    """Run a test once for each case of the kinds, as ``case``."""
    return in_each_case({case["name"]: case for case in CASES if case["kind"] in kinds})


def case_of(name: str) -> Case:
    """Return the case of this name."""
    return next(case for case in CASES if case["name"] == name)
