"""Buffers for large messages, reused once unreferenced."""

import threading

import pytest

from shoal.transports.message_splitter import KEPT_MAX, MAPPED_MIN, BufferPool

MIB = 1 << 20


def retained(places: BufferPool) -> list[int]:
    """Return the sizes of retained buffers, in MiB."""
    return [len(each) // MIB for each in places._kept]


@pytest.mark.parametrize(
    "size", [1, MAPPED_MIN - 1, MAPPED_MIN, MAPPED_MIN + 1, 5 * MIB]
)
def test_buffer_has_the_requested_size(size: int) -> None:
    place = BufferPool().allocate(size)

    assert (len(place), place.format, place.readonly) == (size, "B", False)
    place[-1] = 7
    assert place[-1] == 7


def test_unreferenced_buffer_is_reused() -> None:
    places = BufferPool()
    place = places.allocate(3 * MIB)
    place[0] = 7
    assert retained(places) == []
    del place
    assert retained(places) == [4]

    again = places.allocate(2 * MIB)

    assert again[0] == 7
    assert retained(places) == []


def test_referenced_buffer_is_not_reused() -> None:
    places = BufferPool()
    place = places.allocate(3 * MIB)
    part = place[MIB : MIB + 5].toreadonly()
    part_of_part = memoryview(part)[1:]
    del place, part
    assert retained(places) == []

    del part_of_part

    assert retained(places) == [4]


def test_small_buffer_is_not_reused() -> None:
    places = BufferPool()
    places.allocate(2 * MIB)

    other = places.allocate(5 * MIB)

    assert retained(places) == [2]
    assert len(other) == 5 * MIB


def test_retained_size_is_limited() -> None:
    places = BufferPool(kept_max=8 * MIB)
    held = [places.allocate(2 * MIB) for _ in range(6)]
    assert retained(places) == []

    held.clear()
    assert sum(retained(places)) <= 8

    places.allocate(8 * MIB)
    assert retained(places) == [8]
    places.allocate(16 * MIB)
    assert retained(places) == [8]
    assert BufferPool()._kept_max == KEPT_MAX


def test_last_reference_may_be_in_another_thread() -> None:
    places = BufferPool()
    held = [places.allocate(2 * MIB)]
    thread = threading.Thread(target=held.clear)

    thread.start()
    thread.join()

    assert retained(places) == [2]
