"""The peers of a node, and the sessions that each of them has.

One session of a peer is its *main* one: jobs for the peer go there, and what the peer
is and offers counts as it says there.  When the main session ends, the peer has left.
Peers that only submit jobs, as gateways do with a session for each request, have none.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Draining,
    Event,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.protocols.seam.multi_peer import PeerJoined, PeerLeft, PeerMessage
from shoal.protocols.seam.session import Bulk, Close, Notice, Output, Send
from shoal.protocols.tealenet.codec.relay_messages import (
    RelayClose,
    RelayData,
    RelayReady,
)
from shoal.protocols.tealenet.membership.deadline_queue import DeadlineQueue
from shoal.protocols.tealenet.membership.node_directory import KnownNode, NodeDirectory
from shoal.protocols.tealenet.membership.relay_sessions import (
    RelaySession,
    RelaySessions,
)
from shoal.protocols.tealenet.peer import PeerSoftware
from shoal.protocols.tealenet.peer_session import FromPeer

JobKey: TypeAlias = tuple[JobId, LeaseNumber]

DUPLICATE_JOB = "a job of this number is at work, from another session"


@dataclass(slots=True, eq=False)
class RelayPeer:
    """A peer.

    ``reporting`` is the session that speaks for it: ``main``, or the one by which it
    was met.  ``jobs`` says by which session each of its jobs came.  It is called on
    from ``dial_at``, after so many ``failures``, and forgotten at ``forget_at``, if it
    has no session by then.
    """

    id: str
    sessions: set[RelaySession] = field(default_factory=set)
    main: RelaySession | None = None
    reporting: RelaySession | None = None
    joined: bool = False
    jobs: dict[JobKey, RelaySession] = field(default_factory=dict)
    failures: int = 0
    dial_at: float = 0.0
    forget_at: float = 0.0

    @property
    def is_dialled(self) -> bool:
        """Whether we have called on it, or have no need to."""
        return self.main is not None or any(talk.initiates for talk in self.sessions)

    def join(
        self, talk: RelaySession, met: PeerJoined, *, main: bool
    ) -> Sequence[PeerMessage]:
        """Let a session speak for the peer, if it is the main one or none does."""
        if main:
            self.main = self.reporting = talk
            self.failures = 0
        elif self.reporting is None:
            self.reporting = talk
        if self.joined:
            return ()
        self.joined = True
        return (PeerMessage(self.id, met),)

    def receive(
        self, talk: RelaySession, word: FromPeer
    ) -> Sequence[PeerMessage] | Rejected:
        """Take what was said in a session; or say why a job is not done."""
        match word:
            case RunJob(job_id, lease):
                if (job_id, lease) in self.jobs:
                    return Rejected(job_id, lease, DUPLICATE_JOB)
                self.jobs[job_id, lease] = talk
            case CancelJob(job_id, lease):
                self.jobs.pop((job_id, lease), None)
            case OffersChanged() | LoadChanged() | Draining() | HealthReported():
                if talk is not self.reporting:
                    return ()
            case _:
                pass  # about what we asked for
        return (PeerMessage(self.id, word),)

    def session_for(self, word: Event | Command) -> RelaySession | None:
        """Return the session in which to say something; None: it does not matter."""
        match word:
            case AnswerChunk(job_id, lease):
                return self.jobs.get((job_id, lease))
            case Completed() | Rejected() | Failed():
                return self.jobs.pop((word.job_id, word.lease), None)
            case _:
                return self.main

    def close_session(self, talk: RelaySession, reason: str) -> Sequence[PeerMessage]:
        """Draw the consequences of a session's end.

        Jobs that came by it are done for nobody; with its main one the peer is gone.
        """
        self.sessions.discard(talk)
        heard = []
        for job, by in [*self.jobs.items()]:
            if by is talk:
                del self.jobs[job]
                heard.append(PeerMessage(self.id, CancelJob(*job)))
        if talk is self.main:
            return [*heard, *self.leave(reason)]
        if talk is self.reporting:
            self.reporting = next(
                (each for each in self.sessions if each.admitted), None
            )
        return heard

    def leave(self, reason: str) -> Sequence[PeerMessage]:
        """Take note that the peer is gone."""
        self.main = self.reporting = None
        if not self.joined:
            return ()
        self.joined = False
        self.jobs.clear()
        return (PeerMessage(self.id, PeerLeft(reason)),)


LINGER = 60.0  # seconds for which who came to ask is remembered between two sessions
REDIAL_FIRST = 1.0  # seconds until a peer is called on again, and twice that next time
REDIAL_MAX = 60.0  # seconds
DISMISSED_PAUSE = 300.0  # seconds for which nobody whom we sent away is called on
ID_SHOWN = 16  # characters of a peer's id in notices

NodeOutput: TypeAlias = PeerMessage | Output

_NODE_ID = re.compile("[0-9a-f]{64}")


class RelayPeers:
    """All peers of a node; what is returned is for the relay or for whoever listens.

    Sessions come up in ``deadlines`` when they are to act, and guests without any.
    """

    def __init__(
        self,
        sessions: RelaySessions,
        directory: NodeDirectory,
        deadlines: DeadlineQueue[RelaySession | RelayPeer],
    ) -> None:
        self._sessions = sessions
        self._directory = directory
        self._deadlines = deadlines
        self._peers: dict[str, RelayPeer] = {}
        self.pending: list[
            PeerMessage
        ] = []  # what was heard where things can only be said

    def find(self, node_id: str) -> RelayPeer | None:
        """Return a peer that is there, or is to be called on again."""
        return self._peers.get(node_id)

    def add_session(self, talk: RelaySession) -> None:
        """Take note of a session that has been opened."""
        guest = self._peers.setdefault(talk.peer_id, RelayPeer(talk.peer_id))
        guest.sessions.add(talk)
        self._deadlines.set(talk, talk.deadline)

    def forget(self, guest: RelayPeer) -> None:
        """Forget a peer that has gone."""
        del self._peers[guest.id]

    def evict_unadmitted(self, now: float) -> list[NodeOutput]:
        """End the oldest session of a peer that was not let in, if there are too many.

        Anybody can open sessions, and may not keep others from being let in by that.
        """
        talk = self._sessions.excess
        if talk is None:
            return []
        closing = self._sessions.close_message(talk.peer_id, talk.id)
        return [closing, *self._close_session(talk, "others want to be let in", now)]

    def update_description(self, node: KnownNode, now: float) -> list[NodeOutput]:
        """Take what the relay tells of a peer."""
        guest = self._peers.get(node.id)
        if guest is None:
            return []
        if guest.main is None and node.software is PeerSoftware.MAC:
            guest.main = (
                guest.reporting
            )  # it came before it was known; it takes no other
        if guest.main is None:
            return []
        outputs = guest.main.update_description(node.description, now)
        return self._process(guest.main, outputs, now)

    def tick(self, talk: RelaySession, now: float) -> list[NodeOutput]:
        """Let a session act on time passing, if it is time."""
        if talk.deadline is None or talk.deadline > now:
            self._deadlines.set(talk, talk.deadline)
            return []
        return self._process(talk, talk.tick(now), now)

    # What the relay says.

    def on_ready(self, message: RelayReady, now: float) -> list[NodeOutput]:
        """Take note that a peer is ready."""
        talk = self._session(message.from_node_id, message.session_id)
        return [] if talk is None else self._process(talk, talk.on_ready(now), now)

    def on_data(self, batch: Sequence[RelayData], now: float) -> list[NodeOutput]:
        """Take what was said in one session, from who says it to be itself."""
        talk = self._session(batch[0].from_node_id, batch[0].session_id)
        if talk is None:
            return []
        said = [each.data for each in batch if each.from_node_id == talk.peer_id]
        return self._process(talk, talk.receive(said, now), now)

    def on_close(self, message: RelayClose, now: float) -> list[NodeOutput]:
        """Take note that a peer has ended a session."""
        talk = self._session(message.from_node_id, message.session_id)
        if talk is None:
            return []
        return self._close_session(talk, "the peer ended the session", now)

    def on_left(self, node_id: str, reason: str, now: float) -> list[NodeOutput]:
        """Take note that a peer is not there any more."""
        guest = self._peers.get(node_id)
        if guest is None:
            return []
        outputs: list[NodeOutput] = [*guest.leave(reason)]
        for talk in [*guest.sessions]:
            outputs += self._close_session(talk, reason, now)
        return outputs

    def on_not_found(self, text: str, now: float) -> list[NodeOutput]:
        """Take note that the relay does not know whom we talk to."""
        node_id = _NODE_ID.search(text)
        if node_id is None:
            return []
        return self.on_left(node_id[0], "the relay does not know it any more", now)

    # What is said to peers.

    def send(self, peer: str, word: Event | Command, now: float) -> list[Output]:
        """Say something to one peer."""
        guest = self._peers.get(peer)
        if guest is None:
            return []  # it has gone meanwhile
        if isinstance(word, Dismiss):
            return self._dismiss(guest, word, now)
        talk = guest.session_for(word)
        return [] if talk is None else self._send(talk, word, now)

    def send_to_all(self, word: Event | Command, now: float) -> list[Output]:
        """Say something of us to everybody, and to whoever comes later."""
        match word:
            case OffersChanged() | LoadChanged() | Draining() | HealthReported():
                self._sessions.own_state[type(word)] = word
            case _:
                raise AssertionError("nothing else is said to everybody")
        outputs: list[Output] = []
        for talk in self._sessions.all():
            outputs += self._send(talk, word, now)
        return outputs

    # Private parts, in the order in which they are called.

    def _session(self, peer_id: str, session_id: str) -> RelaySession | None:
        talk = self._sessions.find(session_id)
        return talk if talk is not None and talk.peer_id == peer_id else None

    def _process(
        self, talk: RelaySession, outputs: Sequence[FromPeer | Output], now: float
    ) -> list[NodeOutput]:
        """Pass on what came out of a session."""
        heard: list[NodeOutput] = []
        for each in outputs:
            match each:
                case Send(data):
                    heard.append(self._sessions.data_message(talk, data))
                case Close(reason):
                    heard.append(self._sessions.close_message(talk.peer_id, talk.id))
                    heard += self._close_session(talk, reason, now)
                case Bulk():
                    raise AssertionError("a relay carries messages, and no streams")
                case Notice(text):
                    heard.append(Notice(f"node {talk.peer_id[:ID_SHOWN]}: {text}"))
                case PeerJoined():
                    heard += self._join(talk, each, now)
                case word:
                    heard += self._receive(talk, word, now)
        if not talk.closed:
            self._deadlines.set(talk, talk.deadline)
        return heard

    def _join(
        self, talk: RelaySession, met: PeerJoined, now: float
    ) -> list[NodeOutput]:
        guest = self._peers[talk.peer_id]
        self._sessions.mark_admitted(talk)
        if talk.noise_key is not None:
            self._directory.pin_key(guest.id, talk.noise_key)
        main = self._may_be_main(guest, talk)
        outputs: list[NodeOutput] = []
        if main and (older := guest.main) is not None:
            outputs.append(self._sessions.close_message(guest.id, older.id))
            outputs += self._close_session(older, "it has begun anew", now)
        return [*outputs, *guest.join(talk, met, main=main)]

    def _may_be_main(self, guest: RelayPeer, talk: RelaySession) -> bool:
        node = self._directory.get(guest.id)
        if (
            talk.initiates
            or talk.noise_key is not None
            or node.software is PeerSoftware.SHOAL
        ):
            return True  # one of ours that opens another has forgotten the first
        # Gateways open one for each request; Macs keep theirs.
        return guest.main is None and node.software is PeerSoftware.MAC

    def _receive(
        self, talk: RelaySession, word: FromPeer, now: float
    ) -> Sequence[NodeOutput]:
        heard = self._peers[talk.peer_id].receive(talk, word)
        if isinstance(heard, Rejected):
            return self._process(talk, talk.send(heard, now), now)
        return heard

    def _close_session(
        self, talk: RelaySession, reason: str, now: float
    ) -> list[NodeOutput]:
        """Draw the consequences of a session's end; the peer knows of it."""
        talk.close(reason)
        self._sessions.remove(talk)
        guest = self._peers[talk.peer_id]
        was_main = talk is guest.main
        outputs: list[NodeOutput] = [*guest.close_session(talk, reason)]
        if was_main:
            for other in [*guest.sessions]:
                outputs.append(self._sessions.close_message(guest.id, other.id))
                outputs += self._close_session(other, reason, now)
        if talk.initiates or was_main:
            guest.dial_at = max(guest.dial_at, now + _redial_delay(guest.failures))
            guest.failures += 1
        if not guest.sessions:
            guest.forget_at = now + LINGER
            self._deadlines.set(guest, min(guest.forget_at, max(now, guest.dial_at)))
        return outputs

    def _dismiss(self, guest: RelayPeer, word: Dismiss, now: float) -> list[Output]:
        guest.dial_at = now + DISMISSED_PAUSE
        outputs: list[Output] = []
        for talk in [*guest.sessions]:
            outputs += self._send(talk, word, now)
            if not talk.closed:
                outputs.append(self._sessions.close_message(guest.id, talk.id))
                self._hold_received(self._close_session(talk, word.reason, now))
        self._hold_received(guest.leave(word.reason))
        return outputs

    def _send(
        self, talk: RelaySession, word: Event | Command, now: float
    ) -> list[Output]:
        return self._hold_received(self._process(talk, talk.send(word, now), now))

    def _hold_received(self, heard: Sequence[NodeOutput]) -> list[Output]:
        """Return what is to be said; what was heard is owed."""
        outputs: list[Output] = []
        for each in heard:
            if isinstance(each, PeerMessage):
                self.pending.append(each)
            else:
                outputs.append(each)
        return outputs


def _redial_delay(failures: int) -> float:
    """Return for how long a peer is left alone, in seconds."""
    return min(REDIAL_MAX, REDIAL_FIRST * 2.0 ** min(failures, 10))
