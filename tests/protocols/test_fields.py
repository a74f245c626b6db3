"""The fields of the wires' documents: each is used, or its codec says why not."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from protocols.fields.page import PAGE, page
from protocols.fields.wire import WIRES, Section, Wire, wire
from shoal.protocols.seam.document_fields import Unread

Object: TypeAlias = Mapping[str, Any]


@pytest.mark.parametrize("name", WIRES)
def test_no_field_is_dropped_without_a_reason(name: str) -> None:
    faults = wire(name).faults()

    assert not faults, "\n".join(["", *faults])


def test_page_shows_what_the_codecs_say() -> None:
    assert PAGE.read_text() == page(), "run make fields"


# Messages of real programs.


def of_macfleet(value: Object) -> tuple[object, object]:
    if {"chip_name", "data_port"} <= value.keys():
        return "hw_json", dict.fromkeys(value)  # the recording describes the values
    return "result" if {"task_id", "ok"} <= value.keys() else None, value


def of_tealenet(value: Object) -> tuple[object, object]:
    kind, payload = next(iter(value.items())) if len(value) == 1 else (None, None)
    return kind, payload.get("_0", payload) if isinstance(payload, dict) else None


RECORDED: Mapping[str, Callable[[Object], tuple[object, object]]] = {
    "dispatch": lambda value: (value.get("type"), value),
    "grandsage": lambda value: ({"state", "id"} <= value.keys() and "task", value),
    "macfleet": of_macfleet,
    "tealenet": of_tealenet,
}
"""The message that an object in a recording is, if any, and its payload."""


@pytest.mark.parametrize("name", WIRES)
def test_fields_of_recorded_messages_are_listed(name: str) -> None:
    sections = {each.name: each for each in wire(name).sections}
    path = Path(__file__).parent / name / "vectors" / f"{name}.json"
    found, seen = set[str](), 0

    for value in objects_in(json.loads(path.read_text())["cases"]):
        kind, payload = RECORDED[name](value)
        if isinstance(kind, str) and kind in sections and isinstance(payload, dict):
            found |= {*unlisted(sections, kind, payload, wire(name))}
            seen += 1

    assert found == set()
    assert seen, "the recordings have messages"


def objects_in(value: object) -> Iterator[Object]:
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


def unlisted(
    sections: Mapping[str, Section], kind: str, payload: Object, made: Wire
) -> Iterator[str]:
    """Yield the fields of a message that are not listed."""
    for name, value in payload.items():
        if not sections[kind].open and name not in made.rows(sections[kind]):
            yield f"{kind}.{name}"
        for inner in value if isinstance(value, list) else [value]:
            if name in sections and isinstance(inner, dict):
                yield from unlisted(sections, name, inner, made)


# What the check notices.

Change: TypeAlias = Callable[[Wire, Mapping[str, Section]], object]

CHANGES: Mapping[str, Change] = {
    "MachineMetrics.cpu_pct: decoded and then unused; read it, or add Unread(why)": (
        lambda made, _: made.done["read"].remove("cpu_pct")
    ),
    "JobReject.reason: the document lacks it; add Undocumented(what)": (
        lambda _, sections: sections["job_reject"].fields.remove("reason")
    ),
    "TaskHead.stop: the document has it; remove Undocumented": (
        lambda _, sections: sections["task"].fields.append("stop")
    ),
    "receipt_submit.region: no codec reads it; read it, or say why not": (
        lambda _, sections: sections["receipt_submit"].fields.append("region")
    ),
    "DispatchReceipt.completed_at: a codec reads it; remove Unread": (
        lambda made, _: made.done["read"].add("completed_at")
    ),
    "payload.prompt: a codec reads it; remove the reason": (
        lambda _, sections: sections["payload"].reasons(Unread).update(prompt="why")
    ),
    "register: there is no Register; name its codec": (
        lambda _, sections: sections["register"].codec.append("Register")
    ),
}


@pytest.mark.parametrize(("fault", "change"), CHANGES.items(), ids=CHANGES)
def test_fault_is_one_line_with_what_to_do(fault: str, change: Change) -> None:
    made = Wire("grandsage" if fault.startswith("Task") else "dispatch")

    change(made, {each.name: each for each in made.sections})

    assert made.faults() == [f"{made.name}: {fault}"]
