"""The table of fields: every cell is true, or has a reason (``make fields``)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocols.fields.table import COMMAND, PAGE, WIRES, WireTable, page, table_of


@pytest.mark.parametrize("wire", WIRES)
def test_no_field_is_dropped_without_a_reason(wire: str) -> None:
    assert [*table_of(wire).faults()] == []


def test_page_shows_what_the_codecs_do() -> None:
    assert PAGE.read_text() == page(), f"run {COMMAND}"


# Messages of real programs.


def of_dispatch(value: Mapping[str, Any]) -> tuple[object, object]:
    return value.get("type"), value


def of_grandsage(value: Mapping[str, Any]) -> tuple[object, object]:
    return "task" if {"state", "id"} <= value.keys() else None, value


def of_macfleet(value: Mapping[str, Any]) -> tuple[object, object]:
    if {"chip_name", "data_port"} <= value.keys():
        return "hw_json", dict.fromkeys(value)  # the recording describes the values
    return "result" if {"task_id", "ok"} <= value.keys() else None, value


def of_tealenet(value: Mapping[str, Any]) -> tuple[object, object]:
    kind, payload = next(iter(value.items())) if len(value) == 1 else (None, None)
    return kind, payload.get("_0", payload) if isinstance(payload, dict) else None


RECORDED: Mapping[str, Callable[[Mapping[str, Any]], tuple[object, object]]] = {
    "dispatch": of_dispatch,
    "grandsage": of_grandsage,
    "macfleet": of_macfleet,
    "tealenet": of_tealenet,
}
"""The message that an object in a recording is, if any, and its payload."""


@pytest.mark.parametrize("wire", WIRES)
def test_fields_of_recorded_messages_are_listed(wire: str) -> None:
    messages = {each.name: each for each in table_of(wire).messages}
    path = Path(__file__).parent / wire / "vectors" / f"{wire}.json"
    unlisted, seen = set[str](), set[str]()

    for value in objects_in(json.loads(path.read_text())["cases"]):
        name, payload = RECORDED[wire](value)
        if isinstance(name, str) and name in messages and isinstance(payload, dict):
            seen.add(name)
            unlisted |= {f"{name}.{each}" for each in messages[name].unlisted(payload)}

    assert unlisted == set()
    assert seen, "the recordings have messages"


def objects_in(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a recording, also those in texts."""
    match value:
        case dict():
            yield value
            for inner in value.values():
                yield from objects_in(inner)
        case list():
            for inner in value:
                yield from objects_in(inner)
        case str() if value.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                yield from objects_in(json.loads(value))
        case _:
            pass


# What the table notices.


def test_field_that_is_decoded_and_then_unused_is_a_fault() -> None:
    table = WireTable("dispatch")
    table.flow.reads = [
        each for each in table.flow.reads if each.attribute != "pricing_hint"
    ]

    (fault,) = table.faults()

    assert fault.startswith("dispatch: register.pricing_hint coordinator read: known")


def test_field_copied_to_where_nothing_reads_it_is_a_fault() -> None:
    table = WireTable("tealenet")
    table.flow.reads = [
        each for each in table.flow.reads if each.attribute != "passcode"
    ]

    faults = faults_with(table, "clusterPasscodeHash")

    assert any("helloAck.clusterPasscodeHash worker read: known" in f for f in faults)


def test_field_of_the_document_that_no_codec_knows_is_a_fault() -> None:
    table = WireTable("dispatch")
    register = table.messages[0]
    table.messages[0] = replace(register, fields=(*register.fields, "region"))

    faults = faults_with(table, "region")

    assert faults == [
        "dispatch: register.region coordinator read: unknown; use it, or give a reason",
        "dispatch: register.region worker write: unknown; use it, or give a reason",
    ]


def test_field_of_a_codec_that_the_document_lacks_is_a_fault() -> None:
    table = WireTable("dispatch")
    table.messages[0] = replace(table.messages[0], extensions={})

    (fault,) = table.faults()

    assert fault == "dispatch: register.shoal: not in the document; say what it is"


def test_reason_for_a_cell_that_is_not_empty_is_a_fault() -> None:
    table = WireTable("dispatch")
    register = table.messages[0]
    reasons = {**register.reasons, "capabilities read": "nobody asks"}
    table.messages[0] = replace(register, reasons=reasons)

    (fault,) = table.faults()

    assert "register.capabilities coordinator read: the reason is obsolete" in fault


def faults_with(table: WireTable, text: str) -> Sequence[str]:
    return [each for each in table.faults() if text in each]
