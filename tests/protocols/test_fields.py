"""The table of fields: every cell is true, or has a reason (``make fields``)."""

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocols.fields.flow import analyse
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


# What is followed.

DECLARED = """
class Inner:
    size: int

class Message:
    name: str
    inner: Inner
    pieces: list[Inner]

class Known:
    label: str
    total: int
"""

FOLLOWED = {
    "a parameter": ("def f(m: Message): return Known(m.name)", {"Known.label"}),
    "a keyword": ("def f(m: Message): return Known(label=m.name)", {"Known.label"}),
    "a condition": ("def f(m: Message):\n if m.name: return 1", {"m.f"}),
    "a variable": (
        "def f(m: Message):\n n = m.name\n return Known(n)",
        {"Known.label"},
    ),
    "a decoder": (
        "d = json.Decoder(Message)\ndef f(b): return Known(d.decode(b).name)",
        {"Known.label"},
    ),
    "a pattern": (
        "def f(m):\n match m:\n  case Message(name): return Known(name)",
        {"Known.label"},
    ),
    "a pattern that drops it": (
        "def f(m):\n match m:\n  case Message(_, inner): return inner",
        set[str](),
    ),
    "isinstance": (
        "def f(m):\n if isinstance(m, Message): return Known(m.name)",
        {"Known.label"},
    ),
    "a changed copy": (
        "def f(m: Message, k: Known): return replace(k, label=m.name)",
        {"Known.label"},
    ),
    "another class": ("def f(m: Known): return m.name", set[str]()),
    "an unknown object": ("def f(m): return m.name", set[str]()),
    "an encoder": ("def encode_f(m: Message): return Known(m.name)", set[str]()),
}


@pytest.mark.parametrize(("text", "targets"), FOLLOWED.values(), ids=FOLLOWED)
def test_value_is_followed_to_what_gets_it(text: str, targets: set[str]) -> None:
    flow = analyse({"m": ast.parse(f"{DECLARED}\n{text}")})

    assert flow.targets("Message", "name") == targets


def test_fields_of_elements_are_followed() -> None:
    text = "def f(m: Message): return [Known(total=each.size) for each in m.pieces]"
    flow = analyse({"m": ast.parse(f"{DECLARED}\n{text}")})

    assert flow.targets("Inner", "size") == {"Known.total"}


def test_keys_of_mappings_are_followed() -> None:
    text = "def f(q): return Known(q['name'], total=q.get('count'))"
    flow = analyse({"m": ast.parse(f"{DECLARED}\n{text}")})

    assert flow.keys["m:f", "name"] == {"Known.label"}
    assert flow.keys["m:f", "count"] == {"Known.total"}


def faults_with(table: WireTable, text: str) -> Sequence[str]:
    return [each for each in table.faults() if text in each]
