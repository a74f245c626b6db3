"""Which of a peer's sessions speaks for it, and what follows when one ends."""

from protocols.tealenet.network import HOST, local_coordinator
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import CancelJob, Completed, LoadChanged, Rejected, RunJob
from shoal.domain.work import Chat
from shoal.domain.worker import WorkerLoad
from shoal.ledger.keys import Signer
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
)
from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.tealenet.relay_client.peer import RelayPeer
from shoal.protocols.tealenet.relay_client.registration import NodeDirectory
from shoal.protocols.tealenet.relay_client.session import RelaySession, RelaySessions

PEER = Signer.from_seed(b"p" * 32).public_key.hex()
JOB = RunJob(JobId("j"), LeaseNumber(1), Chat("m", ()))
KEY = (JOB.job_id, JOB.lease)
LOAD = LoadChanged(WorkerLoad())
DESCRIBED = PeerDescribed(PeerProfile("p"))


class Peer:
    """A peer with two sessions, neither of which has joined."""

    def __init__(self) -> None:
        self.peer = RelayPeer(PEER)
        sessions = RelaySessions(local_coordinator(), HOST, str)
        node = NodeDirectory(HOST.public_key.hex()).get(PEER)
        self.first = sessions.accept(node, "1", 0.0)
        self.second = sessions.accept(node, "2", 0.0)
        self.peer.sessions |= {self.first, self.second}

    def join(self, session: RelaySession, *, main: bool = False) -> int:
        """Let a session join; return how many messages that caused."""
        session.admitted = True
        return len(self.peer.join(session, PeerJoined("p"), main=main))


def test_a_peer_joins_with_its_first_session_alone() -> None:
    it = Peer()

    assert (it.join(it.first), it.join(it.second)) == (1, 0)

    assert it.peer.reporting is it.first
    assert it.peer.main is None


def test_one_session_reports_the_state() -> None:
    it = Peer()
    it.join(it.first)
    it.join(it.second)

    for event in (LOAD, DESCRIBED):
        assert it.peer.receive(it.first, event) == (PeerMessage(PEER, event),)
        assert it.peer.receive(it.second, event) == ()


def test_a_description_arrives_before_the_peer_has_joined() -> None:
    it = Peer()

    assert it.peer.receive(it.first, DESCRIBED) == (PeerMessage(PEER, DESCRIBED),)
    assert it.peer.receive(it.first, LOAD) == ()


def test_another_admitted_session_reports_after_the_first() -> None:
    it = Peer()
    it.join(it.first)

    assert it.peer.close_session(it.first, "over") == []
    assert it.peer.reporting is None  # the other one is not admitted

    it.join(it.second)
    assert it.peer.reporting is it.second


def test_the_next_session_is_an_admitted_one() -> None:
    it = Peer()
    it.join(it.first)
    it.join(it.second)

    it.peer.close_session(it.first, "over")

    assert it.peer.reporting is it.second


def test_the_end_of_another_session_changes_nothing() -> None:
    it = Peer()
    it.join(it.first)
    it.join(it.second)

    it.peer.close_session(it.second, "over")

    assert it.peer.reporting is it.first


def test_the_end_of_the_main_session_is_that_of_the_peer() -> None:
    it = Peer()
    it.join(it.first)
    it.join(it.second, main=True)
    assert it.peer.reporting is it.peer.main is it.second

    assert it.peer.close_session(it.second, "over") == [
        PeerMessage(PEER, PeerLeft("over"))
    ]

    assert not it.peer.is_dialled
    assert it.peer.receive(it.first, LOAD) == ()
    assert it.peer.leave("again") == ()


def test_jobs_belong_to_their_session() -> None:
    it = Peer()
    it.join(it.first)

    assert it.peer.receive(it.first, JOB) == (PeerMessage(PEER, JOB),)
    assert isinstance(it.peer.receive(it.second, JOB), Rejected)
    assert it.peer.session_for(Completed(*KEY)) is it.first
    assert it.peer.session_for(Completed(*KEY)) is None  # it is over


def test_the_end_of_a_session_cancels_its_jobs_alone() -> None:
    it = Peer()
    it.join(it.first)
    it.peer.receive(it.second, JOB)

    assert it.peer.close_session(it.first, "over") == []
    assert it.peer.close_session(it.second, "over") == [
        PeerMessage(PEER, CancelJob(*KEY))
    ]


def test_a_refusal_is_reported_once_and_ends_with_the_peer() -> None:
    it = Peer()
    refused = PeerRefused("p", "no token")

    assert it.peer.refuse(refused) == (PeerMessage(PEER, refused),)
    assert it.peer.refuse(refused) == ()
    assert it.peer.leave("gone") == (PeerMessage(PEER, PeerLeft("gone")),)

    it.join(it.first)
    assert it.peer.refuse(refused) == ()
