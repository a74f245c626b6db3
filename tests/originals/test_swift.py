"""The imitation accepts and refuses the same messages as the recorded Mac."""

import json
from pathlib import Path
from typing import Any

import pytest

from originals import swift

VECTORS = Path(__file__).parents[1] / "protocols" / "tealenet" / "vectors"
CASES = json.loads((VECTORS / "tealenet.json").read_text())["cases"]


def cases(group: str) -> list[Any]:
    found = [case for case in CASES if case["group"] == group]
    return [pytest.param(case, id=case["id"]) for case in found]


@pytest.mark.parametrize("case", cases("cluster_decode"))
def test_accepts_the_same_messages_as_the_mac(case: dict[str, Any]) -> None:
    try:
        swift.read(case["json_text"].encode())
    except swift.Dropped:
        accepted = False
    else:
        accepted = True

    assert accepted == case["swift"]["accepts"]


IMITATED = [
    each
    for each in cases("cluster_swift_emits")
    if next(iter(each.values[0]["value"])) in swift.KINDS
]


@pytest.mark.parametrize("case", IMITATED)
def test_writes_messages_like_the_mac(case: dict[str, Any]) -> None:
    kind, payload = next(iter(case["value"].items()))

    written = swift.write(kind, payload["_0"])

    assert json.loads(written) == case["value"]
