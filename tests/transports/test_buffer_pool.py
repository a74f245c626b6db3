"""Memory for large messages, used again once nobody looks at it."""

import threading

import pytest

from shoal.transports.buffer_pool import KEPT_MAX, MAPPED_MIN, BufferPool

MIB = 1 << 20


def kept(places: BufferPool) -> list[int]:
    """Return the sizes of what is kept, in MiB."""
    return [len(each) // MIB for each in places._kept]


@pytest.mark.parametrize(
    "size", [1, MAPPED_MIN - 1, MAPPED_MIN, MAPPED_MIN + 1, 5 * MIB]
)
def test_place_has_the_size_that_was_asked_for(size: int) -> None:
    place = BufferPool().allocate(size)

    assert (len(place), place.format, place.readonly) == (size, "B", False)
    place[-1] = 7
    assert place[-1] == 7


def test_place_is_used_again_when_nobody_looks_at_it() -> None:
    places = BufferPool()
    place = places.allocate(3 * MIB)
    place[0] = 7
    assert kept(places) == []
    del place
    assert kept(places) == [4]

    again = places.allocate(2 * MIB)

    assert again[0] == 7
    assert kept(places) == []


def test_place_is_not_used_again_while_anybody_looks_at_a_part_of_it() -> None:
    places = BufferPool()
    place = places.allocate(3 * MIB)
    part = place[MIB : MIB + 5].toreadonly()
    part_of_part = memoryview(part)[1:]
    del place, part
    assert kept(places) == []

    del part_of_part

    assert kept(places) == [4]


def test_place_that_is_too_small_is_not_used() -> None:
    places = BufferPool()
    places.allocate(2 * MIB)

    other = places.allocate(5 * MIB)

    assert kept(places) == [2]
    assert len(other) == 5 * MIB


def test_no_more_is_kept_than_is_allowed() -> None:
    places = BufferPool(kept_max=8 * MIB)
    held = [places.allocate(2 * MIB) for _ in range(6)]
    assert kept(places) == []

    held.clear()
    assert sum(kept(places)) <= 8

    places.allocate(8 * MIB)
    assert kept(places) == [8]
    places.allocate(16 * MIB)
    assert kept(places) == [8]
    assert BufferPool()._kept_max == KEPT_MAX


def test_last_look_may_be_of_another_thread() -> None:
    places = BufferPool()
    held = [places.allocate(2 * MIB)]
    thread = threading.Thread(target=held.clear)

    thread.start()
    thread.join()

    assert kept(places) == [2]
