"""How much the open calls take."""

import pytest

from shoal.client import pending_calls
from shoal.client.blobs import Blob
from shoal.client.pending_calls import OVERHEAD, CallMemory, ClientCall


def asked(number: int, size: int, *blobs: Blob) -> ClientCall:
    return ClientCall(
        number, "f", bytes(size - OVERHEAD), b"", {}, lambda *_: None, False, blobs
    )


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "CALL_MEMORY_MAX", 10_000)


def test_calls_are_counted_until_they_end() -> None:
    there = CallMemory()
    first, second = asked(1, 6000), asked(2, 6000)

    assert there.add(first)
    assert not there.add(second)
    there.remove(first)
    assert there.add(second)


def test_single_call_always_fits() -> None:
    assert CallMemory().add(asked(1, 50_000))


def test_shared_blob_is_counted_and_stored_once() -> None:
    there = CallMemory()
    calls = [asked(n, 1100, Blob(b"d", (bytes(5000),))) for n in range(3)]

    assert all(there.add(call) for call in calls)
    assert len({id(call.blobs[0]) for call in calls}) == 1

    for call in calls:
        there.remove(call)
    assert there.add(asked(4, 10_000))


def test_ended_calls_leave_no_memory() -> None:
    there = CallMemory()
    call = asked(1, 2000, Blob(b"d", (bytes(8000),)), Blob(b"e", (bytes(9000),)))

    there.add(call)
    there.remove(call)

    assert there.add(asked(2, 5000))
    assert there.add(asked(3, 5000))
