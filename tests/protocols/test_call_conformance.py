"""Laws of every worker protocol by which functions are called."""

import contextlib
from functools import partial
from hashlib import sha256
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.profiles import examples
from protocols.calling import (
    CALL,
    MEMBER,
    OFFER,
    RUN,
    STREAM,
    TASK,
    connect,
    in_pieces,
    packed,
    start_job,
)
from protocols.session_pair import binary
from protocols.test_conformance import stops_growing
from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    BlobMissing,
    CallProgress,
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Dismiss,
    Draining,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    PushCalls,
    Rejected,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import Call, CallStream, Feature
from shoal.domain.worker import MachineHealth, WorkerLoad
from shoal.protocols import discover
from shoal.protocols.seam.peer_session import PeerDescribed, PeerJoined, ToPeer
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.protocols.seam.session import Close

every_protocol = pytest.mark.parametrize(
    "protocol",
    [each for each in discover().values() if each.preferred],
    ids=lambda p: p.name,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
digests = st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(tuple)
calls = st.builds(
    Call,
    st.text(max_size=40),
    st.lists(values, max_size=3).map(packed),
    st.dictionaries(st.text(max_size=5), values, max_size=3).map(packed),
    st.none() | st.floats(0, 1e6),
    st.sets(st.sampled_from([Feature.VALUES, Feature.CODE])).map(frozenset),
    digests,
    st.sampled_from(["", "3.12"]),
)
texts = st.text(max_size=50)
cuts = st.lists(st.integers(1, 400), min_size=1, max_size=8)
# Each example connects two ends.
FEWER = settings(max_examples=examples(0.4))


@every_protocol
def test_a_worker_joins_with_the_offer_it_states(protocol: AnyWireProtocol) -> None:
    met, *described, offered = connect(protocol).events

    assert isinstance(met, PeerJoined)
    assert met.name == MEMBER.name
    assert all(isinstance(each, PeerDescribed) for each in described)
    assert offered == OffersChanged((OFFER,))


@every_protocol
@FEWER
@given(work=calls, cut=cuts)
def test_a_call_arrives_unchanged(
    protocol: AnyWireProtocol, work: Call, cut: list[int]
) -> None:
    pair = connect(protocol, cut=partial(in_pieces, cut))

    run = start_job(pair, replace(RUN, work=work))

    assert run.work == work


@every_protocol
@FEWER
@given(value=values.map(packed), blobs=digests, cut=cuts)
def test_a_value_arrives_unchanged(
    protocol: AnyWireProtocol, value: bytes, blobs: tuple[bytes, ...], cut: list[int]
) -> None:
    pair = connect(protocol, cut=partial(in_pieces, cut))
    run = start_job(pair)

    heard = pair.event(Completed(run.job_id, run.lease, value=value, blobs=blobs))

    assert heard == [Completed(RUN.job_id, RUN.lease, value=value, blobs=blobs)]


@every_protocol
@FEWER
@given(
    text=st.text(min_size=1, max_size=50),
    fault=st.sampled_from(Fault),
    record=st.binary(max_size=50),
)
def test_failures_arrive_unchanged(
    protocol: AnyWireProtocol, text: str, fault: Fault, record: bytes
) -> None:
    pair = connect(protocol)
    first, second = start_job(pair), start_job(pair, replace(RUN, job_id=JobId("b")))

    heard = pair.event(Rejected(first.job_id, first.lease, text))
    heard += pair.event(Failed(second.job_id, second.lease, text, fault, record))

    rejected, failed = heard
    assert isinstance(rejected, Rejected)
    assert isinstance(failed, Failed)
    assert (rejected.job_id, rejected.lease) == (RUN.job_id, RUN.lease)
    assert (rejected.reason, failed.error, failed.fault) == (text, text, fault)
    assert failed.exception == record


@every_protocol
def test_a_task_is_itself_or_a_call_at_the_worker_and_text_at_the_coordinator(
    protocol: AnyWireProtocol,
) -> None:
    pair = connect(protocol)

    run = start_job(pair, replace(RUN, work=TASK))
    if run.work == TASK:
        end = Completed(run.job_id, run.lease, rest=("42",))
        (heard_end,) = pair.event(end)
        assert isinstance(heard_end, Completed)
        assert heard_end == replace(end, job_id=RUN.job_id, receipt=heard_end.receipt)
        return
    heard = pair.event(Completed(run.job_id, run.lease, value=packed({"é": [1, None]})))

    assert run.work == Call("demo.add", packed([1]), packed({"y": 2}), None)
    assert heard == [Completed(RUN.job_id, RUN.lease, rest=('{"é": [1, null]}',))]


@every_protocol
def test_a_cancelled_call_ends_at_both_ends(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)
    run = start_job(pair)

    heard = pair.command(CancelJob(RUN.job_id, RUN.lease))

    assert heard == [CancelJob(run.job_id, run.lease)]
    assert pair.event(Completed(run.job_id, run.lease, value=packed(1))) == []
    assert pair.command(CancelJob(RUN.job_id, RUN.lease)) == []


@every_protocol
def test_two_leases_of_one_call_are_distinct(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)
    first = start_job(pair)
    second = start_job(pair, replace(RUN, lease=LeaseNumber(3)))

    heard = pair.event(Completed(second.job_id, second.lease, value=packed(2)))
    heard += pair.event(Completed(first.job_id, first.lease, value=packed(1)))

    assert heard == [
        Completed(RUN.job_id, LeaseNumber(3), value=packed(2)),
        Completed(RUN.job_id, RUN.lease, value=packed(1)),
    ]


@every_protocol
def test_progress_arrives_while_a_call_runs(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)
    run = start_job(pair)

    heard = pair.event(CallProgress(run.job_id, run.lease, 0.5, "half"))
    pair.event(Completed(run.job_id, run.lease, value=packed(1)))
    late = pair.event(CallProgress(run.job_id, run.lease, 0.9))

    assert heard == [CallProgress(RUN.job_id, RUN.lease, 0.5, "half")]
    assert late == []


@every_protocol
@FEWER
@given(
    pushed=st.lists(values, min_size=1, max_size=5),
    error=texts,
    cut=cuts,
)
def test_calls_in_a_call_stream_make_a_round_trip(
    protocol: AnyWireProtocol, pushed: list[object], error: str, cut: list[int]
) -> None:
    pair = connect(protocol, cut=partial(in_pieces, cut))
    run = start_job(pair, replace(RUN, work=STREAM))
    lane = (RUN.job_id, RUN.lease)
    given_calls = [
        StreamedCall(n, packed([x]), packed({})) for n, x in enumerate(pushed)
    ]
    returns = [CallResult(n, packed(x)) for n, x in enumerate(pushed)]
    returns.append(CallResult(len(pushed), b"", error))

    (heard,) = pair.command(PushCalls(*lane, given_calls))
    (returned,) = pair.event(CallsReturned(run.job_id, run.lease, returns))
    (recalled,) = pair.command(CancelCalls(*lane, (0, 7)))
    (closed,) = pair.command(CancelJob(*lane))

    assert run.work == STREAM
    assert heard == PushCalls(run.job_id, run.lease, given_calls)
    assert returned == CallsReturned(*lane, returns)
    assert recalled == CancelCalls(run.job_id, run.lease, (0, 7))
    assert closed == CancelJob(run.job_id, run.lease)
    assert pair.command(PushCalls(*lane, given_calls)) == []
    assert pair.event(CallsReturned(run.job_id, run.lease, returns)) == []


@every_protocol
def test_a_rejected_call_stream_is_reported_like_a_call(
    protocol: AnyWireProtocol,
) -> None:
    pair = connect(protocol)
    run = start_job(pair, replace(RUN, work=CallStream("nobody.has")))

    heard = pair.event(Rejected(run.job_id, run.lease, "no such function"))

    assert heard == [Rejected(RUN.job_id, RUN.lease, "no such function")]


@every_protocol
@pytest.mark.parametrize("size", [0, 1, 300_000, 2_000_000])
def test_blobs_are_requested_and_sent_both_ways(
    protocol: AnyWireProtocol, size: int
) -> None:
    pair = connect(protocol, cut=partial(in_pieces, [100_000]))
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    blob = SendBlob(sha256(data).digest(), data)

    (there,) = pair.command(blob)
    (here,) = pair.event(blob)
    lacked = pair.event(BlobMissing(blob.digest))

    assert isinstance(there, SendBlob)
    assert isinstance(here, SendBlob)
    assert (there.digest, bytes(there.data)) == (blob.digest, data)
    assert (here.digest, bytes(here.data)) == (blob.digest, data)
    assert lacked == [BlobMissing(blob.digest)]


@every_protocol
def test_changed_offers_and_load_are_reported(
    protocol: AnyWireProtocol,
) -> None:
    pair = connect(protocol)
    changed = OffersChanged((replace(OFFER, slots=1),))
    hot = LoadChanged(WorkerLoad("too hot", 2, 0.5))
    health = HealthReported(MachineHealth(12.5, 50.0, 1))

    assert pair.event(changed) == [changed]
    assert pair.event(changed) == []
    assert pair.event(hot) == [hot]
    assert pair.event(health) == [health]
    assert pair.event(Draining("why")) == [Draining("why")]


@every_protocol
@FEWER
@given(data=st.data())
def test_any_bytes_are_accepted_or_refused_by_either_end(
    protocol: AnyWireProtocol, data: st.DataObject
) -> None:
    pair = connect(protocol)
    run = start_job(pair)
    start_job(pair, replace(RUN, job_id=JobId("lane"), work=STREAM))
    pair.event(Completed(run.job_id, run.lease, value=packed(1)))

    seen = st.sampled_from([*binary(pair.worker_sent), *binary(pair.coordinator_sent)])
    damaged = st.tuples(
        seen, st.integers(0, 300), st.integers(0, 3), st.binary(max_size=20)
    ).map(lambda given: given[0][: given[1]] + given[3] + given[0][sum(given[1:3]) :])
    # PeerError is how a session refuses bytes; anything else is a bug.
    for session in (pair.coordinator, pair.worker):
        with contextlib.suppress(PeerError):
            for piece in data.draw(st.lists(st.binary() | damaged, max_size=4)):
                session.receive([piece], 1.0)


@every_protocol
def test_nothing_follows_a_close(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)
    start_job(pair)

    outputs = pair.coordinator.send(ToPeer("", Dismiss("not needed")), 1.0)

    *_, close = outputs
    assert isinstance(close, Close)
    assert pair.coordinator.deadline is None
    assert list(pair.coordinator.tick(1e6)) == []
    assert list(pair.coordinator.send(ToPeer("", RUN), 2.0)) == []
    for message in pair.worker_sent:
        assert list(pair.coordinator.receive([message], 2.0)) == []


@every_protocol
def test_a_dismissed_worker_does_not_reconnect_and_reports_the_reason(
    protocol: AnyWireProtocol,
) -> None:
    pair = connect(protocol)

    pair.command(Dismiss("replaced: choose another --name"))

    assert pair.ends == ["replaced: choose another --name"] * 2
    assert "another --name" in (pair.dialer.final_reason(1000, "") or "")


@every_protocol
def test_after_a_tick_the_deadline_lies_ahead(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)

    for session in (pair.coordinator, pair.worker):
        now = 0.0
        for _ in range(20):
            if session.deadline is None:
                break
            assert session.deadline > now
            now = session.deadline
            session.tick(now)


@every_protocol
def test_an_active_worker_stays_connected_and_a_silent_one_does_not(
    protocol: AnyWireProtocol,
) -> None:
    pair = connect(protocol)

    now = 0.0
    while now < 600:
        due = [each.deadline for each in (pair.coordinator, pair.worker)]
        now = min(each for each in due if each is not None)
        pair.tick(now)
        assert not pair.ends

    assert any(isinstance(e, Close) for e in pair.coordinator.tick(now + 600))


@every_protocol
def test_memory_does_not_grow_with_the_calls(protocol: AnyWireProtocol) -> None:
    pair = connect(protocol)
    turns = count()

    def run_calls() -> None:
        for turn in islice(turns, 100):
            run = start_job(pair, replace(RUN, job_id=JobId(f"job {turn}")))
            pair.event(CallProgress(run.job_id, run.lease, 0.5))
            pair.event(Completed(run.job_id, run.lease, value=packed(turn)))
            lane = replace(RUN, job_id=JobId(f"lane {turn}"), work=STREAM)
            opened = start_job(pair, lane)
            number = (lane.job_id, lane.lease)
            pair.command(PushCalls(*number, [StreamedCall(1, CALL.args, CALL.kwargs)]))
            returns = [CallResult(1, packed(2))]
            pair.event(CallsReturned(opened.job_id, opened.lease, returns))
            pair.command(CancelJob(*number))

    assert stops_growing(run_calls, pair)
