"""What a worker keeps of its jobs when its connection is lost, and says at the next."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from protocols.calling import (
    MEMBER,
    REQUEST,
    CallPair,
    connect,
    fleet_context,
    packed,
)
from protocols.session_pair import Pair
from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Delta, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, Chat
from shoal.ledger.keys import verify
from shoal.ledger.receipts import output_of
from shoal.ledger.worker_receipts import output_hash_of
from shoal.protocols.seam import worker_session
from shoal.protocols.seam.endpoints import WebSocketRoute
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerJoined, ToPeer
from shoal.protocols.seam.worker_session import GIVEN_WITHIN, KEPT_SECONDS, NOT_KEPT
from shoal.protocols.shoal import PROTOCOL

CHAT = Chat("family/model:7b", ({"role": "user", "content": "hi"},))
RUN = RunJob(JobId("job"), LeaseNumber(2), CHAT)
MEMBER_OF_CHATS = replace(MEMBER, offers=(), verify=verify)
THOUGHT = Delta(0, {THOUGHTS: "Hm. "})


def begin(pair: CallPair, run: RunJob = RUN, *pieces: AnswerPiece) -> JobId:
    """Let a worker begin an answer; return its own id of the job."""
    (command,) = pair.command(run)
    assert isinstance(command, RunJob)
    for piece in pieces:
        pair.event(AnswerChunk(command.job_id, command.lease, [piece]))
    return command.job_id


def reconnect(pair: CallPair, now: float = 1.0) -> CallPair:
    """Let the worker connect again, to another coordinator of the pool."""
    route = PROTOCOL.endpoints(PROTOCOL.config(), fleet_context())[0]
    assert isinstance(route, WebSocketRoute)
    accepted = route.accept(REQUEST, now)
    again: CallPair = Pair(
        *(accepted.session, pair.dialer.start_session({}), pair.dialer),
        partial(ToPeer, ALL_PEERS),
        b"another channel",
        streams=False,
    )
    again.begin(now)
    return again


def names(pair: CallPair) -> Sequence[tuple[str, int]] | None:
    (joined,) = [each for each in pair.events if isinstance(each, PeerJoined)]
    return joined.running


def resumed(run: RunJob = RUN, beginning: str = "", thoughts: str = "") -> RunJob:
    lease = LeaseNumber(run.lease + 1)
    return structs.replace(
        *(run,),
        lease=lease,
        resumes=run.lease,
        continues=beginning,
        thoughts=thoughts,
    )


def answered(pair: CallPair, command: RunJob, now: float = 1.0) -> list[Event]:
    """Give a job again; return what the worker sends at once."""
    before = len(pair.events)
    pair.command(command, now)
    return pair.events[before:]  # type: ignore[return-value]


def texts(events: Sequence[object]) -> list[AnswerPiece]:
    chunks = [each for each in events if isinstance(each, AnswerChunk)]
    return [piece for each in chunks for piece in each.pieces]


def test_a_worker_names_what_it_runs_and_sends_it_again() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair, RUN, THOUGHT, "Once ", "upon ")
    assert names(pair) == ()
    again = reconnect(pair)
    assert names(again) == (("job", 2),)

    # What it writes meanwhile is kept, and sent once it is given the job.
    assert again.event(AnswerChunk(job_id, RUN.lease, ["a "])) == []
    events = answered(again, resumed())
    assert texts(events) == [THOUGHT, "Once upon a "]
    assert [each.lease for each in events if isinstance(each, AnswerChunk)] == [3]
    assert again.event(AnswerChunk(job_id, RUN.lease, ["time"])) == [
        AnswerChunk(RUN.job_id, LeaseNumber(3), ["time"])
    ]
    (end,) = again.event(Completed(job_id, RUN.lease, usage=Usage(1, 2)))
    assert isinstance(end, Completed)
    assert end.lease == 3
    # Its receipt is for the whole answer.
    assert end.receipt is not None
    told = assemble([THOUGHT, "Once upon a time"], end.finish_reason, end.usage)
    receipt = json.loads(end.receipt.body)
    assert receipt["output_hash"] == output_hash_of(output_of(CHAT, told))


def test_a_worker_sends_what_the_coordinator_lacks() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    begin(pair, RUN, THOUGHT, "Once ", "upon ")
    again = reconnect(pair)

    assert texts(answered(again, resumed(beginning="Once u", thoughts="Hm. "))) == [
        "pon "
    ]
    # And once more, after that.
    third = reconnect(again, 2.0)
    assert names(third) == (("job", 3),)
    more = resumed(resumed(), beginning="Once upo", thoughts="Hm. ")
    assert texts(answered(third, more, 2.0)) == ["n "]


def test_a_worker_that_continued_an_answer_has_its_beginning_too() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    begin(pair, structs.replace(RUN, continues="Once "), "upon ")
    again = reconnect(pair)

    assert texts(answered(again, resumed())) == ["Once upon "]


def test_another_beginning_is_refused_and_the_job_stopped() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair, RUN, "Once ")
    again = reconnect(pair)
    again.commands.clear()

    assert answered(again, resumed(beginning="There was")) == [
        Rejected(RUN.job_id, LeaseNumber(3), NOT_KEPT)
    ]
    assert again.commands == [CancelJob(job_id, RUN.lease)]
    assert names(reconnect(again)) == ()


def test_an_end_that_may_be_lost_is_kept_for_a_while() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair, RUN, "Once ")
    pair.event(Completed(job_id, RUN.lease, "length", rest=("upon",)), 1.0)
    again = reconnect(pair, 2.0)
    assert names(again) == (("job", 2),)

    *chunks, end = answered(again, resumed(), 2.0)
    assert texts(chunks) == ["Once upon"]
    assert isinstance(end, Completed)
    assert (end.lease, end.finish_reason) == (3, "length")
    # Its coordinator may be lost again.
    third = reconnect(again, 3.0)
    assert names(third) == (("job", 3),)
    third.command(CancelJob(RUN.job_id, LeaseNumber(3)), 3.0)
    assert names(reconnect(third, 4.0)) == ()


def test_an_end_is_forgotten_after_a_minute() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair)
    pair.event(Failed(job_id, RUN.lease, "broken"), 1.0)

    assert names(reconnect(pair, KEPT_SECONDS)) == (("job", 2),)
    assert names(reconnect(pair, KEPT_SECONDS + 1.0)) == ()


def test_a_job_that_ends_without_a_connection_is_handed_in() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair, RUN, "Once ")
    again = reconnect(pair)
    assert again.event(Completed(job_id, RUN.lease)) == []

    *chunks, end = answered(again, resumed())
    assert texts(chunks) == ["Once "]
    assert isinstance(end, Completed)


def test_what_is_not_given_again_is_stopped() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair)
    again = reconnect(pair)
    again.commands.clear()
    again.tick(1.0 + GIVEN_WITHIN)
    assert again.commands == [CancelJob(job_id, RUN.lease)]


def test_a_job_that_is_given_anew_is_stopped_before() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair)
    again = reconnect(pair)
    again.commands.clear()
    again.command(structs.replace(RUN, lease=LeaseNumber(3)))

    stopped, begun = again.commands
    assert stopped == CancelJob(job_id, RUN.lease)
    assert isinstance(begun, RunJob)


def test_the_value_of_a_function_is_kept() -> None:
    pair = connect(PROTOCOL, MEMBER)
    call = RunJob(JobId("call"), LeaseNumber(2), Call("f", packed([]), packed({})))
    (command,) = pair.command(call)
    assert isinstance(command, RunJob)
    again = reconnect(pair)
    assert again.event(Completed(command.job_id, call.lease, value=b"7")) == []

    assert names(again) == (("call", 2),)
    (end,) = answered(again, resumed(call))
    assert isinstance(end, Completed)
    assert (end.lease, end.value) == (3, b"7")


def test_an_answer_is_kept_up_to_a_size() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    job_id = begin(pair, RUN, "x" * worker_session.KEPT_SIZE)
    again = reconnect(pair)
    assert names(again) == ()
    assert again.commands[0] == CancelJob(job_id, RUN.lease)


def test_few_ends_are_kept() -> None:
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    for number in range(worker_session.KEPT_MAX + 10):
        job_id = begin(pair, structs.replace(RUN, job_id=JobId(f"job{number}")))
        pair.event(Completed(job_id, RUN.lease))
    running = begin(pair)
    again = reconnect(pair)

    found = names(again)
    assert found is not None
    assert len(found) == worker_session.KEPT_MAX
    assert ("job", 2) not in found
    assert again.commands[0] == CancelJob(running, RUN.lease)


def test_an_older_coordinator_gives_the_job_anew() -> None:
    """Its hello says nothing of jobs, and it ignores the names in the worker's."""
    pair = connect(PROTOCOL, MEMBER_OF_CHATS)
    begin(pair)
    again = reconnect(pair)
    before = len(again.commands)
    again.command(structs.replace(RUN, lease=LeaseNumber(9)))
    stopped, begun = again.commands[before:]
    assert isinstance(stopped, CancelJob)
    assert isinstance(begun, RunJob)
