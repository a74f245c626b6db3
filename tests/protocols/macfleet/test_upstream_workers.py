"""A coordinator and upstream workers, which know tasks and nothing else."""

from collections.abc import Iterator
from itertools import repeat

import msgspec
import pytest
from msgspec.structs import replace

from protocols.calling import CALL, RUN, STREAM, TASK, packed
from protocols.macfleet.recorded import case_of
from protocols.macfleet.upstream_node import UpstreamNode, coordinator_with_node
from shoal.domain.ids import JobId
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Failed,
    OffersChanged,
    PushCalls,
    Rejected,
    RunJob,
    StreamedCall,
)
from shoal.domain.work import Call, CallStream, Feature, JobKind, Task
from shoal.protocols.macfleet import Config
from shoal.protocols.macfleet.codec.frames import (
    HEADER,
    Frame,
    FrameType,
    crc32,
    encode_frame,
)
from shoal.protocols.macfleet.jobs import RESULT_GRACE
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.peer_session import PeerJoined

UNKNOWN = (
    "Traceback (most recent call last):\n  File ...\nmacfleet.compute.models."
    "TaskNotRegisteredError: Task 'x' not registered on this worker. Known tasks: "
    "['demo.add', \"it's\"]\n"
)
NUMBER = (RUN.job_id, RUN.lease)


def decoded(frame: Frame) -> dict[str, object]:
    return msgspec.msgpack.decode(frame.payload, type=dict[str, object])


def worker(config: Config | None = None) -> UpstreamNode:
    """Return an upstream worker that has answered the probe."""
    beside = coordinator_with_node(config=config)
    question = beside.frames[-1]
    beside.result(str(decoded(question)["task_id"]), ok=False, error=UNKNOWN)
    beside.frames.clear()
    return beside


def asked(beside: UpstreamNode, run: RunJob = RUN) -> str:
    """Send the worker a job; return the task's id."""
    assert beside.send(run) == []
    return str(decoded(beside.frames.pop())["task_id"])


def test_an_upstream_worker_is_probed_once() -> None:
    beside = worker(Config(slots=7))

    met, offered = beside.heard
    assert isinstance(met, PeerJoined)
    assert (met.name, met.cancels, met.submits_jobs) == ("node-b", False, True)
    assert isinstance(offered, OffersChanged)
    (offer,) = offered.offers
    assert offer.kinds == {JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}
    assert offer.tasks == {"demo.add", "it's"}
    assert (offer.slots, offer.features, offer.streams) == (7, frozenset(), False)


@pytest.mark.parametrize(
    ("fields", "tasks"),
    [
        ({"ok": True, "value": 1}, frozenset()),
        ({"ok": False, "error": "something else"}, frozenset()),
        ({"ok": False, "error": UNKNOWN[:-3]}, frozenset()),
    ],
)
def test_a_worker_that_lists_no_functions_may_have_any(
    fields: dict[str, object], tasks: frozenset[str]
) -> None:
    beside = coordinator_with_node()

    beside.result(str(decoded(beside.frames[-1])["task_id"]), **fields)

    offered = beside.heard[-1]
    assert isinstance(offered, OffersChanged)
    assert offered.offers[0].tasks == tasks


def test_a_peer_that_does_not_answer_the_probe_has_no_offer() -> None:
    beside = coordinator_with_node()

    beside.task("1", name="demo.add")

    assert not any(isinstance(each, OffersChanged) for each in beside.heard)


def test_a_call_is_encoded_as_recorded_for_upstream_workers() -> None:
    beside = worker()
    case = case_of("taskrun/add")
    recorded = bytes.fromhex(case["input"]["frames_hex"][0])[24:]

    beside.send(replace(RUN, work=Call("demo.add", packed([20, 22]), packed({}), 5.0)))

    (task,) = beside.frames
    assert (task.type, task.stream, task.flags, task.sequence) == (8, 1, 0, 0)
    told, as_recorded = decoded(task), msgspec.msgpack.decode(recorded)
    assert list(told) == list(as_recorded)
    assert {**as_recorded, "task_id": told["task_id"], "args": [20, 22]} == told
    assert len(str(told["task_id"])) == len(as_recorded["task_id"])


def test_a_result_completes_a_call() -> None:
    beside = worker()
    task_id = asked(beside)

    assert beside.result(task_id, value=[1, b"\x00"]) == [
        Completed(*NUMBER, value=packed([1, b"\x00"]))
    ]
    assert beside.result(task_id, value=2) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            UNKNOWN,
            Rejected(*NUMBER, UNKNOWN.strip().splitlines()[-1]),
        ),
        ("Task timed out after 5.0s", Failed(*NUMBER, "Task timed out after 5.0s")),
        (
            "Traceback ...\nValueError: x",
            Failed(*NUMBER, "Traceback ...\nValueError: x"),
        ),
    ],
)
def test_an_unknown_function_is_a_rejection(error: str, expected: object) -> None:
    beside = worker()

    assert beside.result(asked(beside), ok=False, error=error) == [expected]


def test_a_task_over_http_becomes_a_call_with_its_fields() -> None:
    beside = worker()
    fields = Task("demo.add", {"task_type": "demo.add", "x": 1})

    beside.send(replace(RUN, work=TASK))
    beside.send(replace(RUN, job_id=JobId("b"), work=fields))

    first, second = map(decoded, beside.frames)
    assert (first["args"], first["kwargs"]) == ([1], {"y": 2})
    assert (second["args"], second["kwargs"]) == ([], {"x": 1})


def test_values_without_a_json_form_are_named() -> None:
    beside = worker()

    (failed,) = beside.result(asked(beside, replace(RUN, work=TASK)), value=b"raw")

    assert isinstance(failed, Failed)
    assert "bytes" in failed.error
    assert "shoal.Pool" in failed.error


def test_tasks_too_large_for_a_worker_are_not_sent() -> None:
    beside = worker()
    large = Call("f", packed([bytes(64 << 20)]), packed({}))

    (failed,) = beside.send(replace(RUN, work=large))

    assert isinstance(failed, Failed)
    assert str(64 << 20) in failed.error
    assert failed.fault is Fault.REQUEST
    assert beside.frames == []


def test_shoal_extensions_are_not_sent_to_upstream() -> None:
    beside = worker()
    rich = replace(CALL, needs=frozenset({Feature.VALUES}))

    (rejected,) = beside.send(replace(RUN, work=rich))

    assert isinstance(rejected, Rejected)
    assert beside.frames == []


def test_a_large_task_is_one_frame_for_upstream() -> None:
    beside = worker()
    args = packed([bytes(3 << 20)])

    beside.send(replace(RUN, work=Call("f", args, packed({}))))

    (task,) = beside.frames  # its checksum was verified
    assert (task.flags, task.stream) == (0, 1)
    assert len(task.payload) > 3 << 20


def test_the_result_of_a_cancelled_task_is_ignored() -> None:
    beside = worker()
    task_id = asked(beside)

    assert beside.send(CancelJob(*NUMBER)) == []
    assert beside.frames == []
    assert beside.result(task_id, value=1) == []


def test_calls_in_a_call_stream_are_separate_tasks_for_upstream() -> None:
    beside = worker()
    calls = [StreamedCall(n, packed([n]), packed({})) for n in range(3)]

    assert beside.send(replace(RUN, work=STREAM)) == []
    assert beside.frames == []
    beside.send(PushCalls(*NUMBER, calls))
    ids = [str(decoded(each)["task_id"]) for each in beside.frames]
    beside.send(CancelCalls(*NUMBER, (1,)))

    assert beside.result(ids[2], value=9) == [
        CallsReturned(*NUMBER, [CallResult(2, packed(9))])
    ]
    assert beside.result(ids[1], value=9) == []
    assert beside.result(ids[0], ok=False, error="bad") == [
        CallsReturned(*NUMBER, [CallResult(0, b"", "bad")])
    ]
    assert beside.send(CancelJob(*NUMBER)) == [Completed(*NUMBER)]
    assert beside.send(PushCalls(*NUMBER, calls)) == []


def test_a_call_stream_ends_with_its_last_call() -> None:
    beside = worker()
    calls = [StreamedCall(n, packed([n]), packed({})) for n in range(2)]
    beside.send(replace(RUN, work=STREAM))
    beside.send(PushCalls(*NUMBER, calls))
    first, second = (str(decoded(each)["task_id"]) for each in beside.frames)

    assert beside.send(CancelJob(*NUMBER)) == []
    assert beside.result(second, value=1) == []
    assert beside.result(first, ok=False, error=UNKNOWN) == [Completed(*NUMBER)]
    assert beside.send(CancelJob(*NUMBER)) == []


def test_a_call_that_upstream_cannot_decode_returns_an_error() -> None:
    beside = worker()
    beside.send(replace(RUN, work=STREAM))

    (returned,) = beside.send(
        PushCalls(*NUMBER, [StreamedCall(4, packed([{1: 2}]), packed({}))])
    )

    assert isinstance(returned, CallsReturned)
    assert returned.results[0].number == 4
    assert "key" in returned.results[0].error


def test_a_call_stream_of_an_unknown_function_is_rejected() -> None:
    beside = worker()
    beside.send(replace(RUN, work=STREAM))
    beside.send(PushCalls(*NUMBER, [StreamedCall(1, CALL.args, CALL.kwargs)]))
    task_id = str(decoded(beside.frames[-1])["task_id"])

    (rejected,) = beside.result(task_id, ok=False, error=UNKNOWN)

    assert isinstance(rejected, Rejected)
    assert (
        beside.send(PushCalls(*NUMBER, [StreamedCall(2, CALL.args, CALL.kwargs)])) == []
    )


def test_a_malformed_result_fails_only_its_task() -> None:
    beside = worker()
    task_id = asked(beside)

    (failed,) = beside.result(task_id, value={1: 2})
    beside.says(b"\x00\x00\x00\x01" + b"\x00\x09" + bytes(18))

    assert isinstance(failed, Failed)
    assert beside.end == ""
    assert "result" in beside.notices[-1]


@pytest.mark.parametrize(
    ("work", "timeout"),
    [(Call("f", packed([]), packed({})), 300.0), (CALL, 5.0), (TASK, 300.0)],
)
def test_a_task_without_a_result_ends_after_its_timeout(
    work: Call | Task, timeout: float
) -> None:
    beside = worker()
    asked(beside, replace(RUN, work=work))
    due = timeout + RESULT_GRACE

    assert beside.tick(due - 0.1) == []
    (failed,) = beside.tick(due)

    assert isinstance(failed, Failed)
    assert failed.error.startswith(f"Task timed out after {timeout}s: ")
    assert "no result" in failed.error
    assert beside.tick(due + 1) == []


@pytest.mark.parametrize(
    ("work", "timeout"),
    [
        (Call("f", packed([]), packed({})), 40.0),
        (Call("f", packed([]), packed({}), 5), 5.0),
        (Call("f", packed([]), packed({}), 60.0), 40.0),
        (TASK, 40.0),
    ],
)
def test_a_task_carries_what_remains_of_its_jobs_limit(
    work: Call | Task, timeout: float
) -> None:
    beside = worker()

    beside.send(replace(RUN, work=work, remaining=40.0))

    sent_timeout = decoded(beside.frames[-1])["timeout"]
    assert sent_timeout == timeout
    assert type(sent_timeout) is float


def test_a_streamed_call_carries_what_remains_of_its_streams_limit() -> None:
    beside = worker()
    beside.send(replace(RUN, work=CallStream("demo.add"), remaining=40.0), 100.0)

    calls = [StreamedCall(1, CALL.args, CALL.kwargs)]
    beside.send(PushCalls(*NUMBER, calls), 130.0)

    assert decoded(beside.frames[-1])["timeout"] == 10.0


def test_a_cancelled_call_frees_its_slot_after_its_timeout() -> None:
    beside = worker()
    beside.send(replace(RUN, work=CallStream("demo.add")))
    calls = [StreamedCall(n, CALL.args, CALL.kwargs) for n in range(2)]
    beside.send(PushCalls(*NUMBER, calls))
    first, _ = (decoded(each) for each in beside.frames)
    assert first["timeout"] == 300.0
    assert beside.result(str(first["task_id"]), value=1)

    assert beside.send(CancelJob(*NUMBER)) == []  # the other call is still pending

    assert beside.tick(300.0 + RESULT_GRACE) == [Completed(*NUMBER)]


def test_a_streamed_call_without_a_result_ends_after_its_timeout() -> None:
    beside = worker()
    beside.send(replace(RUN, work=STREAM))
    beside.send(PushCalls(*NUMBER, [StreamedCall(1, CALL.args, CALL.kwargs)]), 10.0)

    (returned,) = beside.tick(15.0 + RESULT_GRACE)

    assert isinstance(returned, CallsReturned)
    assert returned.results[0].error.startswith("Task timed out after 5.0s")


def test_nothing_is_kept_of_jobs_that_have_ended() -> None:
    beside = worker()
    calls = [StreamedCall(n, CALL.args, CALL.kwargs) for n in range(2)]

    for number in range(200):
        beside.result(asked(beside), value=number)
        asked(beside)
        beside.send(CancelJob(*NUMBER))
        beside.send(replace(RUN, work=STREAM))
        beside.send(PushCalls(*NUMBER, calls))
        for task in beside.frames:
            beside.result(str(decoded(task)["task_id"]), value=number)
        beside.frames.clear()
        beside.send(CancelJob(*NUMBER))

    assert isinstance(beside.session, FleetSession)
    assert beside.session._connection is not None
    outbound = beside.session._connection._outbound
    assert (outbound._sent, outbound._ids, outbound._streams) == ({}, {}, {})
    assert outbound.due is None


def too_large(type_: FrameType, fields: dict[str, object]) -> Iterator[bytes]:
    """Yield a frame with one field too large for any reader, as upstream writes it."""
    piece, count = bytes(1 << 20), 300
    # The value is the last field, so that its bytes can follow the rest.
    start = packed({**fields, "value": b""})[:-2]
    start += b"\xc6" + (count << 20).to_bytes(4)
    crc = crc32(start)
    for _ in range(count):
        crc = crc32(piece, crc)
    size = len(start) + (count << 20)
    yield HEADER.pack(1, type_, 0, size, 0, crc, 0) + start
    yield from repeat(piece, count)


def test_a_result_too_large_for_any_reader_fails_its_task_alone() -> None:
    beside = worker()
    task_id = asked(beside)
    other = asked(beside, replace(RUN, job_id=JobId("other")))

    heard = [
        each
        for data in too_large(FrameType.RESULT, {"task_id": task_id, "ok": True})
        for each in beside.says(data)
    ]

    (failed,) = heard
    assert isinstance(failed, Failed)
    assert failed.error.startswith("shoal.domain.errors.TooLarge: ")
    assert str(256 << 20) in failed.error
    assert beside.end == ""
    assert beside.result(other, value=1) == [
        Completed(JobId("other"), RUN.lease, value=packed(1))
    ]


def test_a_streamed_result_too_large_for_any_reader_fails_its_call_alone() -> None:
    beside = worker()
    beside.send(replace(RUN, work=STREAM))
    beside.send(PushCalls(*NUMBER, [StreamedCall(1, CALL.args, CALL.kwargs)]))
    task_id = str(decoded(beside.frames[-1])["task_id"])

    heard = [
        each
        for data in too_large(FrameType.RESULT, {"task_id": task_id, "ok": True})
        for each in beside.says(data)
    ]

    (returned,) = heard
    assert isinstance(returned, CallsReturned)
    assert "TooLarge" in returned.results[0].error
    assert beside.end == ""


def test_a_task_too_large_for_any_reader_is_answered() -> None:
    beside = worker()

    heard = [
        each
        for data in too_large(FrameType.TASK, {"task_id": "1", "name": "f"})
        for each in beside.says(data)
    ]

    assert heard == []
    answer = decoded(beside.frames[-1])
    assert (answer["task_id"], answer["ok"]) == ("1", False)
    assert str(64 << 20) in str(answer["error"])
    assert beside.end == ""


def test_frames_that_are_no_tasks_are_ignored() -> None:
    beside = worker()

    for type_ in (FrameType.STATE, FrameType.CONTROL, FrameType.STATE):
        beside.says(encode_frame(Frame(type_, 1, 0, 0, b"")))

    assert beside.notices == [
        "ignored a frame of type STATE",
        "ignored a frame of type CONTROL",
    ]
    assert beside.end == ""


def test_a_gradient_ends_the_connection_with_the_reason() -> None:
    beside = worker()

    beside.says(encode_frame(Frame(FrameType.GRADIENT, 1, 0, 0, b"")))

    assert "each rank of a training run has a port of its own" in beside.end
