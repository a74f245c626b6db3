"""What workers say: their text goes straight into answers, the rest becomes stimuli."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.domain.ids import JobId, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    Advanced,
    CallsReturned,
    CallWord,
    CancelJob,
    Completed,
    Conditioned,
    Draining,
    Event,
    Failed,
    Joined,
    Offered,
    Presented,
    Progress,
    Rejected,
    Reported,
)
from shoal.domain.worker import Health
from shoal.pool.open_job import NO_LEASE
from shoal.pool.state import Pool
from shoal.pool.stimuli import (
    Answered,
    Arrived,
    Began,
    Departed,
    Retiring,
    Spoiled,
    Withdrawn,
)
from shoal.runtime.answer import Answer, Slow, Spoilt
from shoal.runtime.clock import Clock
from shoal.runtime.conditions import Conditions
from shoal.runtime.examining import Mail, Shown
from shoal.runtime.peers import Connection, Peers


class Hearing:
    """Listens to all workers, and posts what the hub has to decide about."""

    def __init__(
        self,
        pool: Pool,
        answers: Mapping[JobId, Answer],
        peers: Peers,
        clock: Clock,
        post: Callable[[Mail], None],
    ) -> None:
        self.healths: dict[WorkerId, Health] = {}
        """How the workers' machines are, as far as they say so."""

        self._pool = pool
        self._answers = answers
        self._peers = peers
        self._clock = clock
        self._post = post
        self._conditions = Conditions(clock, post)

    def heard(self, connection: Connection, event: Event) -> None:
        """Take what the worker at the other end says."""
        if isinstance(event, Progress):
            self._progress(event)
            return
        if isinstance(event, Joined):
            self.gone(connection, "joined anew")
            worker_id = self._peers.join(connection, event.name)
            cancels = CancelJob in connection.peer.accepts
            self._post(Arrived(worker_id, event.offer, cancels))
            return
        speaker = self._peers.speaker(connection)
        if speaker is None:
            return  # replaced by a newer connection, and not gone yet
        if isinstance(event, CallsReturned):
            self._returned(event)
            return
        match event:
            case Completed():
                self._completed(speaker, event)
            case Rejected() | Failed():
                self._post(Answered(speaker, event))
            case Draining():
                self._post(Retiring(speaker, event))
            case Reported(health):
                self.healths[speaker] = health
            case Conditioned(condition):
                self._conditions.heard(speaker, condition)
            case Advanced():
                self._advanced(event)
            case Offered() | CallWord() | ModelWord():
                pass  # said of a peer as a whole
            case Presented(job_id, receipt):
                worker = self._pool.workers.get(speaker)
                if worker is not None and worker.offer.public_key:
                    key = worker.offer.public_key
                    self._post(Shown(speaker, key, job_id, receipt))

    def gone(self, connection: Connection, reason: str) -> None:
        """Take note that a connection has ended."""
        if (worker_id := self._peers.leave(connection)) is not None:
            self.healths.pop(worker_id, None)
            self._conditions.forget(worker_id)
            self._post(Departed(worker_id, reason))

    def _progress(self, event: Progress) -> None:
        # The path of every token: no task, no lock, no fact but for the first.
        answer = self._answers.get(event.job_id)
        if answer is None or answer.ended or not answer.admits(event.lease):
            return
        try:
            if answer.put(event.pieces, self._clock.now()):
                self._post(Began(event.job_id, event.lease))
        except Slow:
            if not self._goes_on_unread(event.job_id):
                self._post(Withdrawn(event.job_id, "the client reads too slowly"))
        except Spoilt as spoilt:
            self._post(Spoiled(event.job_id, str(spoilt), spoilt.lost))

    def _returned(self, event: CallsReturned) -> None:
        # The path of every call in a lane: no fact, no task, no lock.
        answer = self._answers.get(event.job_id)
        if answer is not None and answer.lease == event.lease:
            answer.put_returns(event.returns)

    def _advanced(self, event: Advanced) -> None:
        answer = self._answers.get(event.job_id)
        if answer is not None and answer.admits(event.lease):
            answer.advance(event.share, event.remark, self._clock.now())

    def _completed(self, worker_id: WorkerId, event: Completed) -> None:
        answer = self._answers.get(event.job_id)
        if answer is None or event.lease == NO_LEASE or not answer.admits(event.lease):
            self._post(Answered(worker_id, event))
            return
        if event.value:
            value, blobs = event.value, event.blobs
            outcome = Outcome("", event.finish_reason, value=value, blobs=blobs)
            self._post(Answered(worker_id, event, outcome))
            return
        try:
            if event.rest:
                # That it began need not be told: the end is on its way.
                answer.put(event.rest, self._clock.now())
            answer.check_whole()
        except Slow:
            if not self._goes_on_unread(event.job_id):
                self._post(Withdrawn(event.job_id, "the client reads too slowly"))
        except Spoilt as spoilt:
            self._post(Spoiled(event.job_id, str(spoilt), spoilt.lost))
        # Said in any case, for it is what frees the slot on a wire that cannot cancel.
        outcome = answer.whole(event.finish_reason, event.usage)
        if event.output:
            outcome = replace(outcome, output=event.output)
        self._post(Answered(worker_id, event, outcome))

    def _goes_on_unread(self, job_id: JobId) -> bool:
        job = self._pool.jobs.get(job_id)
        return job is not None and job.job.goes_on


class Port:
    """Where one connection's driver reports to."""

    def __init__(self, hearing: Hearing, connection: Connection) -> None:
        self._hearing = hearing
        self._connection = connection

    def heard(self, event: Event) -> None:
        """Take what the worker says."""
        self._hearing.heard(self._connection, event)

    def gone(self, reason: str) -> None:
        """Take note that the connection has ended."""
        self._hearing.gone(self._connection, reason)
