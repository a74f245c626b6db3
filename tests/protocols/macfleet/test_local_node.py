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
    desk = FleetSeatTable()
    desk.claim(older, 0.0)

    desk.claim(newer, now)
    desk.release(older)

    assert desk.has_inbound("node")


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
    desk = FleetSeatTable()
    desk.claim(older, 0.0)

    with pytest.raises(NotAdmitted, match=said):
        desk.claim(newer, 1.0)

    desk.release(older)
    desk.claim(newer, 1.0)


def test_a_seat_is_free_after_its_connection_ended() -> None:
    desk = FleetSeatTable()
    kept = seat(address="a")
    desk.claim(kept, 0.0)

    del kept
    gc.collect()

    assert not desk.has_inbound("node")
    desk.claim(seat(address="b"), 0.0)


def test_an_outbound_seat_is_not_inbound() -> None:
    desk = FleetSeatTable()
    kept = seat(outbound=True)

    desk.claim(kept, 0.0)

    assert not desk.has_inbound("node")
