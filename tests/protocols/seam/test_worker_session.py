"""A worker among peers: whose jobs are whose."""

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelAnswer, ModelQuery
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Draining,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat
from shoal.domain.worker import WorkerLoad
from shoal.protocols.seam.context import unenforceable
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import (
    Admitted,
    Batch,
    Close,
    Notice,
    Output,
    PeerProfile,
    Send,
)
from shoal.protocols.seam.worker_session import (
    MembershipState,
    WorkerSession,
)

CHAT = Chat("m", ({"role": "user", "content": "hi"},))
RUN = RunJob(JobId("job"), LeaseNumber(1), CHAT)
ACCEPTS = frozenset(
    {AnswerChunk, Completed, Rejected, Draining, OffersChanged, ModelAnswer, RunJob}
)


class Played:
    """A session that hears what a test plays to it."""

    accepts = ACCEPTS
    deadline = 5.0

    def __init__(self) -> None:
        self.sent: list[ToPeer] = []
        self.next: Sequence[PeerMessage | Output] = ()

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        return self.next

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        self.sent.append(message)
        return (Send(b"said"),)

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        return ()


def connected(
    state: MembershipState | None = None,
) -> tuple[WorkerSession, Played]:
    inner = Played()
    worker = WorkerSession(lambda now: inner, ACCEPTS, state or MembershipState())
    worker.tick(0.0)
    return worker, inner


def replay(
    worker: WorkerSession, inner: Played, *said: PeerMessage | Output
) -> list[Any]:
    inner.next = said
    return [*worker.receive([b""], 0.0)]


def test_jobs_of_two_peers_with_one_id_have_different_ids() -> None:
    worker, inner = connected()

    one, other = replay(worker, inner, PeerMessage("1", RUN), PeerMessage("2", RUN))
    for run in (one, other):
        worker.send(AnswerChunk(run.job_id, run.lease, ["a"]), 0.0)

    assert one.job_id != other.job_id
    assert inner.sent == [
        ToPeer("1", AnswerChunk(RUN.job_id, RUN.lease, ["a"])),
        ToPeer("2", AnswerChunk(RUN.job_id, RUN.lease, ["a"])),
    ]


def test_only_the_peer_that_submitted_a_job_cancels_it() -> None:
    worker, inner = connected()
    (run,) = replay(worker, inner, PeerMessage("1", RUN))
    cancel = CancelJob(RUN.job_id, RUN.lease)

    assert replay(worker, inner, PeerMessage("2", cancel)) == []
    assert replay(worker, inner, PeerMessage("1", cancel)) == [
        CancelJob(run.job_id, run.lease)
    ]
    assert list(worker.send(Completed(run.job_id, run.lease), 0.0)) == []
    assert inner.sent == []


def test_jobs_of_a_peer_that_left_are_cancelled() -> None:
    worker, inner = connected()
    one, other = replay(worker, inner, PeerMessage("1", RUN), PeerMessage("2", RUN))

    heard = replay(worker, inner, PeerMessage("1", PeerLeft("left")))

    assert heard == [CancelJob(one.job_id, one.lease)]
    worker.send(Completed(other.job_id, other.lease), 0.0)
    assert inner.sent == [ToPeer("2", Completed(RUN.job_id, RUN.lease))]


def test_messages_about_no_job_go_to_all_peers() -> None:
    worker, inner = connected()

    worker.send(Draining("leaving"), 0.0)

    assert inner.sent == [ToPeer("", Draining("leaving"))]


def test_a_duplicate_job_runs_once() -> None:
    worker, inner = connected()

    first, second = replay(worker, inner, PeerMessage("1", RUN), PeerMessage("1", RUN))

    assert isinstance(first, RunJob)
    assert isinstance(second, Notice)


def test_a_worker_ignores_offers_of_peers_but_receives_models_they_share() -> None:
    worker, inner = connected()

    heard = replay(
        worker,
        inner,
        PeerMessage("1", OffersChanged(())),
        PeerMessage("1", LoadChanged(WorkerLoad())),
        PeerMessage("1", ModelQuery("m")),
    )

    assert heard == [ModelQuery("m")]


def test_an_admitted_worker_receives_admitted() -> None:
    state = MembershipState()
    worker, inner = connected(state)

    assert replay(worker, inner, PeerMessage("1", PeerJoined("name"))) == [Admitted()]
    described = PeerMessage("1", PeerDescribed(PeerProfile("Studio")))
    assert replay(worker, inner, described) == [Admitted(PeerProfile("Studio"))]
    assert state.admitted


def test_a_restricted_worker_leaves_a_coordinator_that_ignores_offers() -> None:
    state = MembershipState(restriction="--only-for")
    worker, inner = connected(state)

    heard = replay(worker, inner, PeerMessage("1", PeerJoined("theirs")))

    assert heard == [Close(unenforceable("--only-for"))]
    assert not state.admitted


def test_a_restricted_worker_serves_a_coordinator_that_respects_offers() -> None:
    worker, inner = connected(MembershipState(restriction="--only-for"))
    joined = PeerJoined("shoal", respects_offers=True)

    heard = replay(worker, inner, PeerMessage("1", joined), PeerMessage("1", RUN))

    assert [type(each) for each in heard] == [Admitted, RunJob]


def test_on_a_relay_a_restricted_worker_rejects_jobs_of_other_nodes() -> None:
    inner = Played()
    state = MembershipState(restriction="--only-for")
    worker = WorkerSession(lambda now: inner, ACCEPTS, state, on_relay=True)
    worker.tick(0.0)
    ours = PeerMessage("1", PeerJoined("shoal", respects_offers=True))
    theirs = PeerMessage("2", PeerJoined("theirs"))

    heard = replay(
        worker, inner, ours, theirs, PeerMessage("2", RUN), PeerMessage("1", RUN)
    )

    assert [type(each) for each in heard] == [Admitted, Admitted, Send, RunJob]
    reason = unenforceable("--only-for")
    assert inner.sent == [ToPeer("2", Rejected(RUN.job_id, RUN.lease, reason))]


def test_a_restricted_worker_leaves_a_relay_without_a_coordinator() -> None:
    inner = Played()
    state = MembershipState(restriction="--privacy")
    worker = WorkerSession(lambda now: inner, ACCEPTS, state, on_relay=True)
    worker.tick(0.0)

    heard = replay(worker, inner, PeerMessage(ALL_PEERS, PeerJoined(ALL_PEERS)))

    assert heard == [Close(unenforceable("--privacy"))]


def test_a_refusal_ends_the_connection() -> None:
    state = MembershipState()
    worker, inner = connected(state)
    state.refusal = "not wanted"

    assert replay(worker, inner) == [Close("not wanted")]


def test_the_next_connection_starts_by_cancelling_the_jobs_of_the_last() -> None:
    state = MembershipState()
    worker, inner = connected(state)
    (run,) = replay(worker, inner, PeerMessage("1", RUN))

    again = WorkerSession(lambda now: Played(), ACCEPTS, state)
    assert again.deadline is None

    assert list(again.tick(1.0)) == [CancelJob(run.job_id, run.lease)]
    assert again.deadline == 5.0
    assert state.jobs.running == {}


def test_concurrent_jobs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.protocols.seam.worker_session.JOBS_MAX", 20)
    worker, inner = connected()
    for number in range(20):
        replay(
            worker, inner, PeerMessage("1", RunJob(JobId(str(number)), RUN.lease, CHAT))
        )

    (sent,) = replay(worker, inner, PeerMessage("1", RUN))

    assert isinstance(sent, Send)
    ((sent),) = inner.sent
    assert isinstance(sent.message, Rejected)
    assert str(20) in sent.message.reason


def test_only_messages_of_the_inner_session_are_accepted() -> None:
    worker, _ = connected()

    assert worker.accepts == ACCEPTS - {RunJob}


@pytest.mark.parametrize("respects", [True, False])
def test_only_a_coordinator_of_shoal_takes_a_job_back(*, respects: bool) -> None:
    worker, inner = connected()
    joined = PeerMessage("1", PeerJoined("one", respects_offers=respects))

    *_, run = replay(worker, inner, joined, PeerMessage("1", RUN))

    assert isinstance(run, RunJob)
    assert run.returnable is respects
