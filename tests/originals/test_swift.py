"""The imitation reads what the real Mac was seen to read, and refuses the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from originals import swift

VECTORS = Path(__file__).parents[1] / "protocols" / "tealenet" / "vectors"
CASES = json.loads((VECTORS / "tealenet.json").read_text())["cases"]


def of(group: str) -> list[Any]:
    cases = [case for case in CASES if case["group"] == group]
    return [pytest.param(case, id=case["id"]) for case in cases]


@pytest.mark.parametrize("case", of("cluster_decode"))
def test_reads_what_the_mac_reads(case: dict[str, Any]) -> None:
    try:
        swift.read(case["json_text"].encode())
    except swift.Refused:
        accepted = False
    else:
        accepted = True

    assert accepted == case["swift"]["accepts"]


IMITATED = [
    each
    for each in of("cluster_swift_emits")
    if next(iter(each.values[0]["value"])) in swift.KINDS
]


@pytest.mark.parametrize("case", IMITATED)
def test_writes_what_the_mac_writes(case: dict[str, Any]) -> None:
    kind, payload = next(iter(case["value"].items()))

    written = swift.write(kind, payload["_0"])

    assert json.loads(written) == case["value"]
