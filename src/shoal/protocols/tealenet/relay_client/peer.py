"""A peer of a node on a relay, and its sessions.

One session of a peer is its *main* session: it carries the jobs for the peer and
reports the peer's state.  Without one the peer offers nothing, and when it ends, the
peer has left.  Peers that only submit jobs, such as gateways with one session for each
request, have no main session.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
)
from shoal.protocols.tealenet.peer_session import FromPeer
from shoal.protocols.tealenet.relay_client.session import RelaySession

JobKey: TypeAlias = tuple[JobId, LeaseNumber]

DUPLICATE_JOB = "a job with this id is running already, from another session"


@dataclass(slots=True, eq=False)
class RelayPeer:
    """A peer and its sessions.

    ``reporting`` is the session that reports the peer's state: ``main``, or the session
    in which it joined.  ``refused``: its refusal was reported.  ``jobs`` maps the
    peer's jobs to their sessions.  The node may dial the peer again from ``dial_at``
    on, and forgets it at ``forget_at`` if it has no session then.
    """

    id: str
    sessions: set[RelaySession] = field(default_factory=set)
    main: RelaySession | None = None
    reporting: RelaySession | None = None
    joined: bool = False
    refused: bool = False
    jobs: dict[JobKey, RelaySession] = field(default_factory=dict)
    failures: int = 0
    dial_at: float = 0.0
    forget_at: float = 0.0

    @property
    def is_dialled(self) -> bool:
        """Whether the node has dialled the peer, or need not."""
        return self.main is not None or any(
            session.initiates for session in self.sessions
        )

    def join(
        self, session: RelaySession, event: PeerJoined, *, main: bool
    ) -> Sequence[PeerMessage]:
        """Add an admitted session; the first one makes the peer join."""
        if main:
            self.main = self.reporting = session
            self.failures = 0
        elif self.reporting is None:
            self.reporting = session
        if self.joined:
            return ()
        self.joined, self.refused = True, False
        return (PeerMessage(self.id, event),)

    def refuse(self, event: PeerRefused) -> Sequence[PeerMessage]:
        """Report that the peer is not admitted, unless it is known already."""
        if self.joined or self.refused:
            return ()
        self.refused = True
        return (PeerMessage(self.id, event),)

    def receive(
        self, session: RelaySession, message: FromPeer
    ) -> Sequence[PeerMessage] | words.Rejected:
        """Return the peer's messages for the node, or a job's rejection."""
        match message:
            case words.RunJob(job_id, lease):
                if (job_id, lease) in self.jobs:
                    return words.Rejected(job_id, lease, DUPLICATE_JOB)
                self.jobs[job_id, lease] = session
            case words.CancelJob(job_id, lease):
                self.jobs.pop((job_id, lease), None)
            case words.OffersChanged() if session is not self.main:
                return ()  # nothing would carry the jobs
            case words.LoadChanged() if session is not self.reporting:
                return ()
            case PeerDescribed() if self.joined and session is not self.reporting:
                return ()
            case _:
                pass  # a report on one of this node's jobs
        return (PeerMessage(self.id, message),)

    def session_for(self, message: words.Event | words.Command) -> RelaySession | None:
        """Return the session that carries a message; None if the session has ended."""
        match message:
            case words.AnswerChunk(job_id, lease):
                return self.jobs.get((job_id, lease))
            case words.Completed() | words.Rejected() | words.Failed():
                return self.jobs.pop((message.job_id, message.lease), None)
            case _:
                return self.main

    def close_session(
        self, session: RelaySession, reason: str
    ) -> Sequence[PeerMessage]:
        """Remove a session that ended, and cancel the jobs that it carried."""
        self.sessions.discard(session)
        messages = []
        for job, origin in [*self.jobs.items()]:
            if origin is session:
                del self.jobs[job]
                messages.append(PeerMessage(self.id, words.CancelJob(*job)))
        if session is self.main:
            return [*messages, *self.leave(reason)]
        if session is self.reporting:
            self.reporting = next(
                (each for each in self.sessions if each.admitted), None
            )
        return messages

    def leave(self, reason: str) -> Sequence[PeerMessage]:
        """Report that the peer has left."""
        self.main = self.reporting = None
        if not (self.joined or self.refused):
            return ()
        self.joined = self.refused = False
        self.jobs.clear()
        return (PeerMessage(self.id, PeerLeft(reason)),)
