"""Which connections may replace others."""

import gc

import pytest

from shoal.domain.errors import NotAdmitted
from shoal.protocols.macfleet.local_node import FleetSeat, FleetSeatTable


def seat(address: str = "a", *, outbound: bool = False) -> FleetSeat:
    return FleetSeat("node", address, outbound)


def test_a_newer_connection_from_the_same_address_takes_the_seat() -> None:
    seats = FleetSeatTable()
    older, newer = seat(), seat()
    seats.claim(older)

    seats.claim(newer)
    seats.release(older)

    assert seats.has_inbound("node")


def test_a_peer_at_another_address_cannot_take_the_seat() -> None:
    seats = FleetSeatTable()
    older, newer = seat(), seat("b")
    seats.claim(older)

    with pytest.raises(NotAdmitted, match="from a"):
        seats.claim(newer)

    seats.release(older)
    seats.claim(newer)


def test_a_seat_is_free_after_its_connection_ended() -> None:
    seats = FleetSeatTable()
    kept = seat()
    seats.claim(kept)

    del kept
    gc.collect()

    assert not seats.has_inbound("node")
    seats.claim(seat("b"))


def test_an_outbound_seat_is_not_inbound() -> None:
    seats = FleetSeatTable()
    kept = seat(outbound=True)

    seats.claim(kept)

    assert not seats.has_inbound("node")
