"""The sessions of a node through a relay: opening, encryption and peer sessions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event, OffersChanged
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.peer_session import PeerJoined, Protection
from shoal.protocols.seam.session import (
    Bulk,
    Close,
    Data,
    Notice,
    Output,
    PeerProfile,
    Send,
)
from shoal.protocols.tealenet import peer
from shoal.protocols.tealenet.codec.relay_messages import (
    NatConnectionInfo,
    RelayAnswer,
    RelayClose,
    RelayData,
    RelayOffer,
    RelayOpen,
    RelayReady,
    encode,
)
from shoal.protocols.tealenet.codec.scalars import HEX_KEY
from shoal.protocols.tealenet.local_node import TealeLocalNode, uuid_from
from shoal.protocols.tealenet.peer_session import FromPeer, TealePeerSession
from shoal.protocols.tealenet.relay_client import encryption
from shoal.protocols.tealenet.relay_client.registration import KnownNode

READY_TIMEOUT = 4.0  # seconds to wait for relayReady, as gateways do
SILENCE_TIMEOUT = 60.0  # seconds to wait for the first data in a session

NewPeerSession: TypeAlias = Callable[[Protection], TealePeerSession]
"""Returns the peer session for a protection."""

StateEvents: TypeAlias = Callable[[], Sequence[Event]]
"""Returns this node's state, which each new session sends first."""


class RelaySession:
    """A session with one peer.  ``initiates``: this node opened it.

    A Send that it returns has data for the peer; a Close means that the session ended.
    """

    def __init__(
        self,
        parties: encryption.SessionParties,
        *,
        initiates: bool,
        new_peer_session: NewPeerSession,
        state_events: StateEvents,
        now: float,
    ) -> None:
        self.id = parties.session_id
        self.peer_id = parties.peer_id
        self.initiates = initiates
        self.closed = False
        self.admitted = False
        self.peer_session: TealePeerSession | None = None
        self._secure = encryption.SecureSession(parties, initiates=initiates)
        self._new_peer_session = new_peer_session
        self._state_events = state_events
        self._ready = not initiates
        self._timeout_at = now + (READY_TIMEOUT if initiates else SILENCE_TIMEOUT)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        if self.closed:
            return None
        if self.peer_session is not None:
            return self.peer_session.deadline
        secure = self._secure.deadline
        return self._timeout_at if secure is None else min(self._timeout_at, secure)

    def on_ready(self, now: float) -> Sequence[FromPeer | Output]:
        """Start the session at the peer's first relayReady."""
        if self._ready or self.closed:
            return ()
        self._ready = True
        self._timeout_at = now + SILENCE_TIMEOUT
        return self._process(self._secure.start(now), now)

    def receive(
        self, batch: Sequence[bytes], now: float
    ) -> Sequence[FromPeer | Output]:
        """Process the data that arrived together."""
        if self.closed or not self._ready:
            return ()
        steps: list[encryption.SecureOutput] = []
        failure: PeerError | None = None
        try:
            for data in batch:
                steps += self._secure.receive(data, now)
        except PeerError as error:
            failure = error
        outputs = self._process(steps, now)
        if failure is not None and not self.closed:
            outputs.append(self.close(str(failure)))
        return outputs

    def send(self, message: Event | Command, now: float) -> Sequence[Output]:
        """Send a message to the peer; drop it before the peer session has started."""
        if self.closed or self.peer_session is None:
            return ()
        outputs = self.peer_session.send(message, now)
        return [each for output in outputs for each in self._encrypt(output)]

    def learn_software(self, software: peer.PeerSoftware) -> None:
        """Apply what the peer runs, which was unknown when it opened the session."""
        if self.peer_session is not None:
            self.peer_session.learn_software(software, _link_profile(software))

    def update_description(
        self, description: peer.PeerDescription, now: float
    ) -> Sequence[FromPeer | Output]:
        """Apply what the relay reports about the peer."""
        if self.closed or self.peer_session is None:
            return ()
        return self._encrypt_all(self.peer_session.update_description(description, now))

    def describe(self, profile: PeerProfile) -> Sequence[FromPeer]:
        """Apply what the relay says about a peer that reports its offers elsewhere."""
        if self.closed or self.peer_session is None:
            return ()
        return self.peer_session.describe(profile)

    def tick(self, now: float) -> Sequence[FromPeer | Output]:
        """Handle deadlines."""
        if self.closed:
            return ()
        if self.peer_session is not None:
            return self._encrypt_all(self.peer_session.tick(now))
        if now >= self._timeout_at:
            return (self.close(self._timeout_reason()),)
        return self._process(self._secure.tick(now), now)

    def close(self, reason: str) -> Close:
        """End the session."""
        self.closed = True
        return Close(reason)

    def _timeout_reason(self) -> str:
        if not self._ready:
            return f"the peer was not ready within {READY_TIMEOUT:g} s"
        return f"the peer sent nothing within {SILENCE_TIMEOUT:g} s"

    def _process(
        self, steps: Sequence[encryption.SecureOutput], now: float
    ) -> list[FromPeer | Output]:
        outputs: list[FromPeer | Output] = [
            step for step in steps if not isinstance(step, encryption.MessageReceived)
        ]
        received = [
            step.data for step in steps if isinstance(step, encryption.MessageReceived)
        ]
        protection = self._secure.protection
        if self.peer_session is None and protection is not None:
            self.peer_session = self._new_peer_session(protection)
            if received:
                self.peer_session.learn_form(received[0])
            outputs += self._encrypt_all(self.peer_session.tick(now))
            for event in self._state_events():
                outputs += self.send(event, now)
        if received and self.peer_session is not None and not self.closed:
            outputs += self._encrypt_all(self.peer_session.receive(received, now))
        return outputs

    def _encrypt_all(
        self, outputs: Sequence[FromPeer | Output]
    ) -> list[FromPeer | Output]:
        encrypted: list[FromPeer | Output] = []
        for each in outputs:
            if isinstance(each, Send | Close):
                encrypted += self._encrypt(each)
            else:
                self.admitted = self.admitted or isinstance(each, PeerJoined)
                encrypted.append(each)
        return encrypted

    def _encrypt(self, output: Output) -> Sequence[Output]:
        match output:
            case Send(data):
                message = data if isinstance(data, bytes) else data.encode()
                try:
                    return self._secure.send(message)
                except PeerError as error:
                    return (self.close(str(error)),)
            case Close(reason):
                return (self.close(reason),)
            case Bulk() | Notice():
                return (output,)


SESSIONS_MAX = 8192  # open at a time
UNADMITTED_MAX = 1024  # of them whose peer is not admitted
ID_MAX = 256  # characters of a session's id
SILENCE_MAX = 3600.0  # seconds without heartbeats from a peer that sends none
ID_SIZE = 16  # bytes of an id that this node chooses
REFUSED_MAX = 256  # unknown sessions that were answered, and are not answered again


class RelaySessions:
    """All sessions of a node, by their ids without regard to case.

    ``address_of`` returns a node's network address, if the relay reports it.
    ``local_state`` has this node's state, by event type: each session sends it.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        identity: Identity,
        address_of: Callable[[str], str],
    ) -> None:
        self._local, self._identity = local, identity
        self._address_of = address_of
        self.id = identity.public_key.hex()
        self._sessions: dict[str, RelaySession] = {}  # by their ids in upper case
        self._unadmitted: dict[RelaySession, None] = {}  # in order of opening
        self._refused: dict[tuple[str, str], None] = {}  # in order of their answers
        self.local_state: dict[type, Event] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> Iterable[RelaySession]:
        """Return a copy of the current sessions."""
        return [*self._sessions.values()]

    def find(self, session_id: str) -> RelaySession | None:
        """Return the session with an id."""
        return self._sessions.get(session_id) or self._sessions.get(session_id.upper())

    def can_accept(self, peer_id: str, session_id: str) -> bool:
        """Return whether a peer may open a session under an id."""
        full = len(self._sessions) >= SESSIONS_MAX
        return self._is_possible(peer_id, session_id) and not full

    def open_outbound(self, node: KnownNode, now: float) -> tuple[RelaySession, Send]:
        """Open a session; return it and its relayOpen."""
        session_id = uuid_from(self._local.random_bytes(ID_SIZE))
        session = self._open(node, session_id, now, initiates=True)
        return session, Send(encode(RelayOpen(self.id, node.id, session_id)))

    def accept(self, node: KnownNode, session_id: str, now: float) -> RelaySession:
        """Accept a session that a peer opens."""
        session = self._open(node, session_id, now, initiates=False)
        self._unadmitted[session] = None
        return session

    def mark_admitted(self, session: RelaySession) -> None:
        """Mark the peer of a session as admitted."""
        self._unadmitted.pop(session, None)

    @property
    def excess(self) -> RelaySession | None:
        """The session to end if more than ``UNADMITTED_MAX`` wait for admission."""
        if len(self._unadmitted) <= UNADMITTED_MAX:
            return None
        return next(iter(self._unadmitted))

    def remove(self, session: RelaySession) -> None:
        """Remove a session that ended."""
        self._sessions.pop(session.id.upper(), None)
        self._unadmitted.pop(session, None)

    # Messages in a session, or about one.

    def ready_message(self, peer_id: str, session_id: str) -> Send:
        """Return the relayReady of a session."""
        return Send(encode(RelayReady(self.id, peer_id, session_id)))

    def close_message(self, peer_id: str, session_id: str) -> Send:
        """Return the relayClose of a session."""
        return Send(encode(RelayClose(self.id, peer_id, session_id)))

    def refuse(self, peer_id: str, session_id: str) -> Sequence[Send]:
        """Answer data in a session that is not open: once, as not all peers stop.

        An id that another node's session has is not answered.
        """
        key = peer_id, session_id
        if key in self._refused or self.find(session_id) is not None:
            return ()
        if not self._is_possible(*key):
            return ()
        self._refused[key] = None
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        return (self.close_message(peer_id, session_id),)

    def data_message(self, session: RelaySession, data: Data) -> Send:
        """Return the relayData of a session."""
        message = data if isinstance(data, bytes) else data.encode()
        return Send(encode(RelayData(self.id, session.peer_id, session.id, message)))

    def answer_message(self, offer: RelayOffer) -> Send:
        """Return an answer that makes the peer continue to use the relay."""
        peer_id, session_id = offer.from_node_id, offer.session_id
        # Macs do not try to connect directly to a node behind a symmetric NAT.
        key = self._identity.exchange_key.hex()
        info = NatConnectionInfo("", 0, "symmetric", wg_public_key=key)
        text = f"{self.id}:{peer_id}:{session_id}".encode(errors="replace")
        signature = self._identity.sign(text).hex()
        return Send(encode(RelayAnswer(self.id, peer_id, session_id, info, signature)))

    # Private parts, in the order in which they are called.

    def _is_possible(self, peer_id: str, session_id: str) -> bool:
        is_other = HEX_KEY.fullmatch(peer_id) is not None and peer_id != self.id
        return is_other and 0 < len(session_id) <= ID_MAX

    def _open(
        self, node: KnownNode, session_id: str, now: float, *, initiates: bool
    ) -> RelaySession:
        local = self._local
        parties = encryption.SessionParties(
            identity=self._identity,
            peer_id=node.id,
            session_id=session_id,
            random_bytes=local.random_bytes,
            epoch=local.epoch,
            peer_key=node.exchange_key,
        )
        session = RelaySession(
            parties,
            initiates=initiates,
            new_peer_session=partial(self._new_peer_session, node, initiates),
            state_events=self._state_events,
            now=now,
        )
        self._sessions[session_id.upper()] = session
        self._refused.pop((node.id, session_id), None)
        return session

    def _new_peer_session(
        self, node: KnownNode, initiates: bool, protection: Protection
    ) -> TealePeerSession:
        local = self._local
        if isinstance(changed := self.local_state.get(OffersChanged), OffersChanged):
            local = replace(local, offers=changed.offers)
        connection = peer.TealeConnection(
            dialled=initiates,
            name=node.id,
            software=node.software,
            description=node.description,
            address=self._address_of(node.id),
            protection=protection,
        )
        return TealePeerSession(local, connection, _link_profile(node.software))

    def _state_events(self) -> Sequence[Event]:
        return [
            event
            for kind, event in self.local_state.items()
            if kind is not OffersChanged
        ]


def _link_profile(software: peer.PeerSoftware) -> peer.LinkProfile:
    """Return the link's profile; it depends on how long a peer may be silent."""
    if software is peer.PeerSoftware.RUST:
        # Rust nodes read nothing while they answer a request, and gateways never send
        # heartbeats: the relay reports when they leave.
        return replace(
            peer.WAN, degraded_after=SILENCE_MAX, disconnected_after=SILENCE_MAX
        )
    return peer.WAN
