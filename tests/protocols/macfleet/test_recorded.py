"""The cases of the vectors are used, and every documented test exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from protocols.macfleet.recorded import CASES, VECTORS, case_of

TESTS = Path(__file__).parents[2]

NEVER_SENT = {
    *("v1_tensor", "v1_compressed", "v1_compressed_decode"),
    *("topk", "fp16", "adaptive", "v1_quant"),
}
"""Layouts and compressions that no program sends or reads (decision 61)."""


def called(name: str) -> Iterator[str]:
    """Yield the text arguments of a function's calls in the tests."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text("utf-8")
        if "macfleet" not in text or f"{name}(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name(id=found), args=args) if found == name:
                    for each in args:
                        if isinstance(each, ast.Constant):
                            yield str(each.value)


def replayed() -> set[str]:
    """Return the kinds whose cases are all replayed."""
    whole = set(called("recorded"))
    named = set(called("case_of"))
    single = {kind for kind in kinds() if names_of(kind) <= named}
    return whole | single


def kinds() -> set[str]:
    return {case["kind"] for case in CASES}


def names_of(kind: str) -> set[str]:
    return {case["name"] for case in CASES if case["kind"] == kind}


def test_every_kind_of_case_that_is_sent_is_replayed() -> None:
    assert VECTORS.exists()
    assert replayed() == kinds() - NEVER_SENT


def test_each_test_named_in_the_documentation_exists() -> None:
    page = (TESTS.parent / "docs" / "protocols" / "macfleet.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    tests = (path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    there = {name for text in tests for name in re.findall(r"def (test_\w+)", text)}

    assert len(named) > 20
    assert named <= there


def test_the_pairing_code_is_the_only_case_used_by_name() -> None:
    assert names_of("qr_text") == {case_of("qr/short url")["name"]}
