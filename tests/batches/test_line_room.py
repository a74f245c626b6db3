"""The room for lines: its share for each batch, and who is woken as it frees."""

import asyncio

from shoal.batches.batch_run import LineRoom

QUEUE = ("al", "m")
OTHER = ("al", "n")


def waiting(room: LineRoom, batch_id: str) -> asyncio.Event:
    """Let a batch wait; return what wakes it."""
    wake = asyncio.Event()
    room.wait(QUEUE, batch_id, wake)
    return wake


def test_one_batch_has_all_the_room() -> None:
    room = LineRoom()
    assert room.share(QUEUE, 4, "a", 0) == 4

    room.begin(QUEUE, 3)

    assert room.share(QUEUE, 4, "a", 3) == 1
    assert room.share(OTHER, 4, "b", 0) == 4


def test_batches_that_wait_share_the_room() -> None:
    room = LineRoom()
    waiting(room, "a")
    waiting(room, "b")

    assert room.share(QUEUE, 5, "a", 0) == 3
    room.begin(QUEUE, 3)
    assert room.share(QUEUE, 5, "a", 3) == 0
    assert room.share(QUEUE, 5, "b", 0) == 2

    room.leave(QUEUE, "b")
    assert room.share(QUEUE, 5, "a", 3) == 2


def test_line_that_ends_wakes_the_batches_that_wait() -> None:
    room = LineRoom()
    first, left = waiting(room, "a"), waiting(room, "b")
    room.leave(QUEUE, "b")
    room.begin(QUEUE, 1)

    room.end(QUEUE)

    assert first.is_set()
    assert not left.is_set()
    assert room.share(QUEUE, 1, "a", 0) == 1


def test_batch_may_leave_that_never_waited() -> None:
    room = LineRoom()

    room.leave(QUEUE, "a")

    assert room.share(QUEUE, 2, "b", 0) == 2


def test_no_line_begins_when_stopped() -> None:
    room = LineRoom(stopped=True)

    assert room.share(QUEUE, 4, "a", 0) == 0


def test_nothing_is_kept_of_what_has_ended() -> None:
    room = LineRoom()
    waiting(room, "a")
    room.begin(QUEUE, 1)

    room.leave(QUEUE, "a")
    room.end(QUEUE)

    assert repr(room) == repr(LineRoom())
