"""Addresses of which nobody knows the wire, and who calls there when."""

from collections.abc import Sequence
from typing import Any

from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.peer_addresses import (
    CHECK_INTERVAL,
    AddressDialer,
    PeerAddress,
)
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage
from transports.memory_links import ScriptedSession


def call(address: str) -> OutgoingConnection:
    def open_(now: float) -> Any:
        return ScriptedSession(lambda data: [PeerMessage("", PeerJoined(f"{data!r}"))])

    return OutgoingConnection(f"tcp://{address}", open_)


def called(rounds: AddressDialer, now: float) -> Sequence[str]:
    return [each.url for each in rounds.tick(now)]


def test_an_address_is_dialled_at_once_if_no_wire_probes_it() -> None:
    rounds = AddressDialer("wire", [PeerAddress("127.0.0.1:1")], call)

    assert called(rounds, 0.0) == ["tcp://127.0.0.1:1"]
    assert called(rounds, 1.0) == []
    assert rounds.deadline == 1.0 + CHECK_INTERVAL


def test_an_address_waits_for_the_wire_that_probes_it() -> None:
    address = PeerAddress("127.0.0.1:1")
    address.probing.add("other")
    rounds = AddressDialer("wire", [address], call)
    assert called(rounds, 0.0) == []

    address.probing.discard("other")

    assert called(rounds, 1.0) == ["tcp://127.0.0.1:1"]


def test_an_address_of_another_wire_is_not_dialled() -> None:
    address = PeerAddress("127.0.0.1:1")
    rounds = AddressDialer("wire", [address], call)
    (outgoing,) = rounds.tick(0.0)

    address.wire = "other"

    assert rounds.dropped() == [outgoing]
    assert rounds.dropped() == []
    assert called(rounds, 1.0) == []


def test_a_peer_that_joins_shows_the_wire_of_its_address() -> None:
    address = PeerAddress("127.0.0.1:1")
    (outgoing,) = AddressDialer("wire", [address], call).tick(0.0)
    session = outgoing.new_session(0.0)
    session.tick(0.0)
    assert address.wire == ""

    session.receive([b"hello"], 1.0)

    assert address.wire == "wire"
    assert address.may_dial("wire")
    assert not address.may_dial("other")
