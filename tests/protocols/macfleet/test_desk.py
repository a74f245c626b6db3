"""Who may take the place of whom."""

import gc

import pytest

from shoal.domain.errors import NotAdmitted
from shoal.protocols.macfleet.desk import Desk, Seat


def seat(
    key: bytes = b"", address: str = "a", heard: float = 0.0, *, outbound: bool = False
) -> Seat:
    return Seat("node", key, address, outbound, heard, 10.0 if key else None)


@pytest.mark.parametrize(
    ("older", "newer", "now"),
    [
        (seat(b"k"), seat(b"k", "b"), 1.0),  # the same machine, from elsewhere
        (seat(b"k"), seat(b"other"), 11.0),  # which has gone silent
        (seat(), seat(), 1.0),  # from the same address
    ],
)
def test_a_newer_connection_takes_the_place(
    older: Seat, newer: Seat, now: float
) -> None:
    desk = Desk()
    desk.take(older, 0.0)

    desk.take(newer, now)
    desk.leave(older)

    assert desk.has_called("node")


@pytest.mark.parametrize(
    ("older", "newer", "said"),
    [
        (seat(b"k"), seat(b"other"), "--name"),
        (seat(b"k"), seat(), "--name"),
        (seat(), seat(b"k"), "--name"),
        (seat(), seat(address="b"), "from a"),
    ],
)
def test_nobody_else_takes_the_place(older: Seat, newer: Seat, said: str) -> None:
    desk = Desk()
    desk.take(older, 0.0)

    with pytest.raises(NotAdmitted, match=said):
        desk.take(newer, 1.0)

    desk.leave(older)
    desk.take(newer, 1.0)


def test_a_seat_is_free_when_its_connection_is_no_more() -> None:
    desk = Desk()
    kept = seat(address="a")
    desk.take(kept, 0.0)

    del kept
    gc.collect()

    assert not desk.has_called("node")
    desk.take(seat(address="b"), 0.0)


def test_whom_we_called_has_not_called_us() -> None:
    desk = Desk()
    kept = seat(outbound=True)

    desk.take(kept, 0.0)

    assert not desk.has_called("node")
