"""What a worker keeps of the calls in its streams when its connection is lost."""

import pytest

from protocols.calling import MEMBER, CallPair, connect, packed
from protocols.shoal.test_kept_jobs import answered, names, reconnect, resumed
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CallName,
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Failed,
    PushCalls,
    Rejected,
    RunJob,
    StreamedCall,
)
from shoal.domain.work import Call, CallStream
from shoal.protocols.seam.streamed_calls import CALLS_KEPT_MAX, RESULT_SECONDS
from shoal.protocols.seam.worker_session import GIVEN_WITHIN
from shoal.protocols.shoal import PROTOCOL

STREAM = RunJob(JobId("stream"), LeaseNumber(1), CallStream("f"))
FIRST: CallName = JobId("first"), LeaseNumber(4)
SECOND: CallName = JobId("second"), LeaseNumber(1)
VALUE = packed(7)


def call(number: int) -> StreamedCall:
    return StreamedCall(number, packed([number]), packed({}))


def push(*numbers: int, named: tuple[CallName, ...] = (), lease: int = 1) -> PushCalls:
    calls = [call(number) for number in numbers]
    return PushCalls(STREAM.job_id, LeaseNumber(lease), calls, [*named])


def given(name: CallName) -> RunJob:
    """Return the command for a call that its worker still runs."""
    job_id, lease = name
    work = Call("f", packed([1]), packed({}))
    return resumed(RunJob(job_id, lease, work))


class Streaming:
    """A worker that has the calls 1 and 2 in a stream, which are stored."""

    def __init__(self) -> None:
        self.pair: CallPair = connect(PROTOCOL, MEMBER)
        (opened,) = self.pair.command(STREAM)
        assert isinstance(opened, RunJob)
        self.id = opened.job_id
        self.pair.command(push(1, 2, named=(FIRST, SECOND)))

    def returned(self, *numbers: int, error: str = "") -> CallsReturned:
        results = [CallResult(number, VALUE, error) for number in numbers]
        return CallsReturned(self.id, STREAM.lease, results)


def test_a_resumed_stream_goes_on_with_its_calls() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    assert names(again) == (("stream", 1), FIRST, SECOND)
    again.event(its.returned(1))  # before the coordinator goes on with it
    again.commands.clear()

    assert answered(again, resumed(STREAM)) == []
    before = len(again.events)
    again.command(push(1, 2, 3, named=(FIRST, SECOND), lease=2))

    assert again.events[before:] == [
        CallsReturned(STREAM.job_id, LeaseNumber(2), [CallResult(1, VALUE)])
    ]
    # It runs the second one already.
    assert [e.calls for e in again.commands if isinstance(e, PushCalls)] == [[call(3)]]
    assert again.event(its.returned(2)) == [
        CallsReturned(STREAM.job_id, LeaseNumber(2), [CallResult(2, VALUE)])
    ]


def test_calls_that_are_not_repeated_are_not_wanted() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.command(resumed(STREAM))
    again.commands.clear()

    again.command(push(2, named=(SECOND,), lease=2))
    again.command(push(3, lease=2))

    recalled, pushed = again.commands
    assert recalled == CancelCalls(its.id, LeaseNumber(2), (1,))
    assert isinstance(pushed, PushCalls)


def test_a_coordinator_without_the_stream_goes_on_with_its_calls() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.commands.clear()
    again.command(CancelJob(STREAM.job_id, STREAM.lease))
    assert again.commands == []
    again.command(given(FIRST))
    again.command(given(SECOND))

    assert again.event(its.returned(1)) == [
        Completed(FIRST[0], LeaseNumber(5), value=VALUE)
    ]
    assert again.event(its.returned(2, error="it raised")) == [
        Failed(SECOND[0], LeaseNumber(2), "it raised", exception=VALUE)
    ]
    # Its slot is free then.
    again.tick(1.0)
    assert again.commands[-1] == CancelJob(its.id, STREAM.lease)
    assert names(reconnect(again, 2.0)) == (
        (SECOND[0], 2),
        (FIRST[0], 5),
    )


def test_a_result_that_may_be_lost_is_kept_for_a_while() -> None:
    its = Streaming()
    its.pair.event(its.returned(1), 1.0)
    its.pair.command(CancelJob(STREAM.job_id, STREAM.lease), 1.0)
    again = reconnect(its.pair, 2.0)
    assert names(again) == (FIRST,)
    assert answered(again, given(FIRST), 2.0) == [
        Completed(FIRST[0], LeaseNumber(5), value=VALUE)
    ]

    third = reconnect(again, 3.0)
    assert names(third) == ((FIRST[0], 5),)
    third.command(CancelJob(FIRST[0], LeaseNumber(5)), 3.0)
    assert names(reconnect(third, 4.0)) == ()

    others = Streaming()
    others.pair.event(others.returned(1, 2), 1.0)
    later = reconnect(others.pair, RESULT_SECONDS + 1.0)
    assert names(later) == (("stream", 1),)


def test_a_stream_that_was_given_up_rejects_its_calls() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.command(given(FIRST))

    (refused,) = again.event(Rejected(its.id, STREAM.lease, "given up"))

    assert isinstance(refused, Rejected)
    assert (refused.job_id, refused.lease) == (FIRST[0], 5)


def test_calls_that_nobody_gives_again_are_stopped() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.command(given(SECOND))
    again.commands.clear()
    again.tick(1.0 + GIVEN_WITHIN)
    assert again.commands == [CancelCalls(its.id, STREAM.lease, (1,))]

    other = Streaming()
    after = reconnect(other.pair)
    after.commands.clear()
    after.tick(1.0 + GIVEN_WITHIN)
    assert after.commands[-1] == CancelJob(other.id, STREAM.lease)


@pytest.mark.parametrize("lease", [FIRST[1], 9])
def test_a_call_that_has_ended_elsewhere_is_stopped(lease: int) -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.commands.clear()
    again.command(CancelJob(FIRST[0], LeaseNumber(lease)))

    stopped = [CancelCalls(its.id, STREAM.lease, (1,))]
    assert again.commands == (stopped if lease == FIRST[1] else [])


def test_a_call_that_is_given_anew_is_stopped_before() -> None:
    its = Streaming()
    again = reconnect(its.pair)
    again.commands.clear()
    work = Call("f", packed([1]), packed({}))
    again.command(RunJob(FIRST[0], LeaseNumber(6), work))

    stopped, begun = again.commands
    assert stopped == CancelCalls(its.id, STREAM.lease, (1,))
    assert isinstance(begun, RunJob)


def test_as_many_calls_are_kept_as_fit_into_a_hello() -> None:
    its = Streaming()
    numbers = [*range(3, CALLS_KEPT_MAX + 10)]
    named = tuple((JobId(f"j{number}"), LeaseNumber(1)) for number in numbers)
    its.pair.command(push(*numbers, named=named))
    again = reconnect(its.pair)

    found = names(again)
    assert found is not None
    assert len(found) == 1 + CALLS_KEPT_MAX
    recalled = [e.numbers for e in again.commands if isinstance(e, CancelCalls)]
    assert recalled == [(number,) for number in numbers[-9:]]
