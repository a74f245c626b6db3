"""The memory of open calls."""

import pytest

from shoal.client import pending_calls
from shoal.client.connection import Blob
from shoal.client.pending_calls import OVERHEAD, CallMemory, ClientCall


def call_of(number: int, size: int, *blobs: Blob) -> ClientCall:
    return ClientCall(
        number, "f", bytes(size - OVERHEAD), b"", {}, lambda *_: None, False, blobs
    )


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "CALL_MEMORY_MAX", 10_000)


def test_calls_are_counted_until_they_end() -> None:
    memory = CallMemory()
    first, second = call_of(1, 6000), call_of(2, 6000)

    assert memory.add(first)
    assert not memory.add(second)
    memory.remove(first)
    assert memory.add(second)


def test_single_call_always_fits() -> None:
    assert CallMemory().add(call_of(1, 50_000))


def test_shared_blob_is_counted_and_stored_once() -> None:
    memory = CallMemory()
    calls = [call_of(n, 1100, Blob(b"d", (bytes(5000),))) for n in range(3)]

    assert all(memory.add(call) for call in calls)
    assert len({id(call.blobs[0]) for call in calls}) == 1

    for call in calls:
        memory.remove(call)
    assert memory.add(call_of(4, 10_000))


def test_ended_calls_leave_no_memory() -> None:
    memory = CallMemory()
    call = call_of(1, 2000, Blob(b"d", (bytes(8000),)), Blob(b"e", (bytes(9000),)))

    memory.add(call)
    memory.remove(call)

    assert memory.add(call_of(2, 5000))
    assert memory.add(call_of(3, 5000))
