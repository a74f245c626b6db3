"""Tasks and results as upstream encodes, accepts and rejects them."""

from typing import Any

import msgpack
import msgspec
import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError, TooLarge
from shoal.protocols.macfleet.codec import tasks
from shoal.protocols.macfleet.codec.frames import Frame, FrameType, encode_frame
from shoal.protocols.macfleet.codec.tasks import (
    ERROR_MAX,
    NO_REASON,
    decode_result,
    decode_task,
    encode_result,
    encode_task,
)

# Upstream accepts values of types the document excludes, and fails with them.
TIGHTENED = {"taskdec/wrong types pass through": "Expected `str`, got `int`"}

# Upstream cannot encode these; they are not valid MessagePack.
UNWRITABLE = {"task/int too big", "result/set not packable"}


def plain(value: Any) -> Any:
    """Return a value of a case without its type tags."""
    match value:
        case {"$bytes": str(digits)}:
            return bytes.fromhex(digits)
        case {"$map": [*pairs]}:
            return {plain(key): plain(each) for key, each in pairs}
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case [*each]:
            return [plain(one) for one in each]
        case _:
            return value


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(plain(value))
    return data


@recorded("task_spec")
def test_tasks_are_encoded_as_upstream_does(case: Case) -> None:
    said, expected = case["input"], case["expect"]
    if case["name"] in UNWRITABLE:
        with pytest.raises(OverflowError):
            msgspec.msgpack.encode(plain(said["args"]))
        return
    args, kwargs = packed(said["args"]), packed(said["kwargs"])

    if case["name"] == "task/int keys":  # upstream cannot decode it itself
        with pytest.raises(InvalidRequest, match="neither text nor bytes"):
            encode_task(said["task_id"], said["name"], args, kwargs, said["timeout"])
        return
    written = b"".join(
        encode_task(said["task_id"], said["name"], args, kwargs, said["timeout"])
    )

    assert written.hex() == expected["payload_hex"]
    frame = encode_frame(Frame(FrameType.TASK, 1, 0, 0, written))
    assert frame.hex() == expected["task_frame_hex"]
    asked = decode_task(written)
    assert asked[:2] == (said["task_id"], said["name"])
    assert (bytes(asked.args), bytes(asked.kwargs)) == (args, kwargs)
    assert asked.timeout == said["timeout"]


@recorded("task_result")
def test_results_are_encoded_as_upstream_does(case: Case) -> None:
    said, expected = case["input"], case["expect"]
    if case["name"] in UNWRITABLE:
        assert said["value"] == "<set>"
        return
    value = packed(said["value"])

    written = b"".join(encode_result(said["task_id"], value, said["error"]))

    assert written.hex() == expected["payload_hex"]
    frame = encode_frame(Frame(FrameType.RESULT, 1, 0, 0, written))
    assert frame.hex() == expected["result_frame_hex"]
    answered = decode_result(written)
    assert (answered.task_id, answered.error) == (said["task_id"], said["error"])
    assert bytes(answered.value) == value


@recorded("TaskSpec_decode")
def test_tasks_that_upstream_accepts_are_accepted(case: Case) -> None:
    payload = bytes.fromhex(case["input"]["payload_hex"])

    if "error" in case["expect"] or case["name"] in TIGHTENED:
        with pytest.raises(PeerError, match=TIGHTENED.get(case["name"], "task: ")):
            decode_task(payload)
        return
    accepted, asked = case["expect"]["accepted"], decode_task(payload)
    assert asked[:2] == (accepted["task_id"], accepted["task_name"])
    assert asked.timeout == accepted["timeout_sec"]
    sent = msgpack.unpackb(payload)
    assert bytes(asked.args) == msgpack.packb(sent.get("args") or [])
    assert bytes(asked.kwargs) == msgpack.packb(sent.get("kwargs") or {})


@recorded("TaskResult_decode")
def test_results_that_upstream_accepts_are_accepted(case: Case) -> None:
    payload = bytes.fromhex(case["input"]["payload_hex"])

    if "error" in case["expect"]:
        with pytest.raises(PeerError, match="result: "):
            decode_result(payload)
        return
    accepted, answered = case["expect"]["accepted"], decode_result(payload)
    assert answered.task_id == accepted["task_id"]
    assert msgpack.unpackb(bytes(answered.value)) == accepted["value"]
    assert answered.error == accepted["error"]


@pytest.mark.parametrize(
    ("args", "kwargs", "field"),
    [
        (b"", b"\x80", "args"),
        (b"\x90\xa6kwargs", b"\x80", "args"),  # injects a field into the map
        (b"\x92\x01", b"\x80", "args"),
        (b"\x01", b"\x80", "args"),
        (b"\x90", b"\x90", "kwargs"),
        (b"\x90", b"\x81\x01\x02", "kwargs"),
        (b"\x91\xa1\xff", b"\x80", "args"),
        (b"\x91" * 600 + b"\x01", b"\x80", "args"),
        (b"\x91" * 9000 + b"\x01", b"\x80", "args"),
    ],
)
def test_values_that_upstream_cannot_decode_are_not_encoded(
    args: bytes, kwargs: bytes, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as caught:
        encode_task("1", "f", args, kwargs, 1.0)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("timeout", "read"), [(float("inf"), None), (-3, 0.0), (0, 0.0), (2, 2.0)]
)
def test_unusual_timeouts_are_interpreted_as_upstream_does(
    timeout: float, read: float | None
) -> None:
    assert (
        decode_task(packed({"task_id": "1", "name": "f", "timeout": timeout})).timeout
        == read
    )


def test_a_timeout_of_nan_is_rejected() -> None:
    with pytest.raises(PeerError, match="not a number"):
        decode_task(packed({"task_id": "1", "name": "f", "timeout": float("nan")}))


def test_a_failure_without_an_error_is_a_failure() -> None:
    assert decode_result(packed({"task_id": "1", "ok": False})).error == NO_REASON


def test_a_long_error_is_cut_at_the_start() -> None:
    error = "x" * ERROR_MAX + "ValueError: zap \udcff"

    read = decode_result(b"".join(encode_result("1", None, error))).error

    assert read is not None
    assert len(read) == ERROR_MAX
    assert read.endswith("ValueError: zap ?")


@pytest.mark.parametrize("field", ["task_id", "name"])
def test_long_ids_and_names_are_rejected(field: str) -> None:
    with pytest.raises(PeerError, match="are the limits"):
        decode_task(packed({"task_id": "1", "name": "f"} | {field: "x" * 5000}))


def test_sizes_are_checked_on_encoding_and_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "TASK_MAX", 100)
    monkeypatch.setattr(tasks, "RESULT_MAX", 100)
    large = packed([bytes(100)])

    with pytest.raises(TooLarge, match="by file or by blob"):
        encode_task("1", "f", large, b"\x80", 1.0)
    with pytest.raises(TooLarge, match="return less"):
        encode_result("1", large)
    with pytest.raises(LimitExceeded):
        decode_task(bytes(101))
    with pytest.raises(LimitExceeded):
        decode_result(bytes(101))


@pytest.mark.parametrize("task_id", ["", "1", "a" * 31, "a" * 32, "ä" * 128, "€" * 256])
@pytest.mark.parametrize(
    "head",
    [b"\x81", b"\x8f", b"\xde\x00\x10", b"\xdf\x00\x01\x00\x00"],
    ids=["1 field", "15 fields", "16 fields", "65536 fields"],
)
def test_the_id_is_read_from_the_start_of_a_message(task_id: str, head: bytes) -> None:
    start = head + packed("task_id") + packed(task_id) + packed("name")

    assert tasks.task_id_at_start(memoryview(start)) == task_id


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x90",
        packed({"name": "f", "task_id": "1"}),
        packed({"task_id": 1}),
        packed({"task_id": "a" * 257}),
        packed({"task_id": "abc"})[:-1],
        b"\x81\xa7task_id\xa1\xff",
    ],
)
def test_no_id_is_read_from_another_start(start: bytes) -> None:
    assert tasks.task_id_at_start(start) is None
