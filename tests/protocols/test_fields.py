"""The table of fields: every cell is true, or has a reason (``make fields``)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocols.fields.table import COMMAND, PAGE, WIRES, WireTable, page, table_of


@pytest.mark.parametrize("wire", WIRES)
def test_no_field_is_dropped_without_a_reason(wire: str) -> None:
    assert [*table_of(wire).faults()] == []


def test_page_shows_what_the_codecs_do() -> None:
    assert PAGE.read_text() == page(), f"run {COMMAND}"


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
