"""Addresses of which nobody knows the wire, and who calls there when."""

from collections.abc import Sequence
from typing import Any

from runtime.wires import ScriptedSession
from shoal.protocols.contacts import LOOK_EVERY, Contact, Contacting
from shoal.protocols.crowd import From, Met, Outgoing


def call(address: str) -> Outgoing:
    def open_(now: float) -> Any:
        return ScriptedSession(lambda data: [From("", Met(f"{data!r}"))])

    return Outgoing(f"tcp://{address}", open_)


def called(rounds: Contacting, now: float) -> Sequence[str]:
    return [each.url for each in rounds.tick(now)]


def test_address_is_called_at_once_if_nobody_wants_to_ask_first() -> None:
    rounds = Contacting("wire", [Contact("127.0.0.1:1")], call)

    assert called(rounds, 0.0) == ["tcp://127.0.0.1:1"]
    assert called(rounds, 1.0) == []
    assert rounds.deadline == 1.0 + LOOK_EVERY


def test_address_waits_for_the_wire_that_asks_first() -> None:
    contact = Contact("127.0.0.1:1")
    contact.first.add("other")
    rounds = Contacting("wire", [contact], call)
    assert called(rounds, 0.0) == []

    contact.first.discard("other")

    assert called(rounds, 1.0) == ["tcp://127.0.0.1:1"]


def test_address_that_speaks_another_wire_is_left_alone() -> None:
    contact = Contact("127.0.0.1:1")
    rounds = Contacting("wire", [contact], call)
    (outgoing,) = rounds.tick(0.0)

    contact.wire = "other"

    assert rounds.unwanted() == [outgoing]
    assert rounds.unwanted() == []
    assert called(rounds, 1.0) == []


def test_who_is_met_shows_which_wire_is_spoken() -> None:
    contact = Contact("127.0.0.1:1")
    (outgoing,) = Contacting("wire", [contact], call).tick(0.0)
    session = outgoing.open(0.0)
    session.tick(0.0)
    assert contact.wire == ""

    session.receive([b"hello"], 1.0)

    assert contact.wire == "wire"
    assert contact.is_for("wire")
    assert not contact.is_for("other")
