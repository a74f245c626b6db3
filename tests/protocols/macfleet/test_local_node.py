"""Which connections may replace others."""

import gc

import pytest

from shoal.domain.errors import NotAdmitted
from shoal.protocols.macfleet.local_node import FleetSeat, FleetSeatTable


def seat(
    key: bytes = b"", address: str = "a", heard: float = 0.0, *, outbound: bool = False
) -> FleetSeat:
    return FleetSeat("node", key, address, outbound, heard, 10.0 if key else None)


@pytest.mark.parametrize(
    ("older", "newer", "now"),
    [
        (seat(b"k"), seat(b"k", "b"), 1.0),  # the same machine, elsewhere
        (seat(b"k"), seat(b"other"), 11.0),  # the first is silent
        (seat(), seat(), 1.0),  # from the same address
    ],
)
def test_a_newer_connection_takes_the_seat(
    older: FleetSeat, newer: FleetSeat, now: float
) -> None:
    seats = FleetSeatTable()
    seats.claim(older, 0.0)

    seats.claim(newer, now)
    seats.release(older)

    assert seats.has_inbound("node")


@pytest.mark.parametrize(
    ("older", "newer", "said"),
    [
        (seat(b"k"), seat(b"other"), "--name"),
        (seat(b"k"), seat(), "--name"),
        (seat(), seat(b"k"), "--name"),
        (seat(), seat(address="b"), "from a"),
    ],
)
def test_another_peer_cannot_take_the_seat(
    older: FleetSeat, newer: FleetSeat, said: str
) -> None:
    seats = FleetSeatTable()
    seats.claim(older, 0.0)

    with pytest.raises(NotAdmitted, match=said):
        seats.claim(newer, 1.0)

    seats.release(older)
    seats.claim(newer, 1.0)


def test_a_seat_is_free_after_its_connection_ended() -> None:
    seats = FleetSeatTable()
    kept = seat(address="a")
    seats.claim(kept, 0.0)

    del kept
    gc.collect()

    assert not seats.has_inbound("node")
    seats.claim(seat(address="b"), 0.0)


def test_an_outbound_seat_is_not_inbound() -> None:
    seats = FleetSeatTable()
    kept = seat(outbound=True)

    seats.claim(kept, 0.0)

    assert not seats.has_inbound("node")
