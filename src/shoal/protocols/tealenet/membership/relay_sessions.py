"""A node's sessions through a relay: opened, encrypted, then peer sessions."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event, OffersChanged
from shoal.protocols.seam.multi_peer import PeerJoined, Protection
from shoal.protocols.seam.session import (
    Bulk,
    Close,
    Data,
    Identity,
    Notice,
    Output,
    Send,
)
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
from shoal.protocols.tealenet.codec.signatures import noise_binding
from shoal.protocols.tealenet.encryption.secure_session import (
    DataToSend,
    MessageReceived,
    SecureOutput,
    SecureSession,
    SessionParties,
)
from shoal.protocols.tealenet.link_profile import WAN, LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode, uuid_from
from shoal.protocols.tealenet.membership.node_directory import KnownNode, is_bound
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware, TealeConnection
from shoal.protocols.tealenet.peer_session import FromPeer, TealePeerSession

READY_TIMEOUT = 4.0  # seconds for the peer to say that it is ready, as gateways have it
SILENCE_TIMEOUT = 60.0  # seconds that who opened a session may take to say something

NewPeerSession: TypeAlias = Callable[[Protection, float], TealePeerSession]
"""Begins a conversation, given who can read along, and the time."""

StateEvents: TypeAlias = Callable[[], Sequence[Event]]
"""Returns what every peer is told of us when a conversation begins."""


class RelaySession:
    """A session with one peer.  ``initiates``: it was opened here.

    What it returns is for its node: a Send has what is to be carried to the peer, and
    a Close says that the session is over.
    """

    def __init__(
        self,
        parties: SessionParties,
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
        self.admitted = False  # whether the peer was let in
        self.peer_session: TealePeerSession | None = None
        self._secure = SecureSession(parties, initiates=initiates)
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

    @property
    def noise_key(self) -> bytes | None:
        """The key for Noise that the peer turned out to have."""
        return self._secure.noise_key

    def on_ready(self, now: float) -> Sequence[FromPeer | Output]:
        """Take note that the peer is ready to hear; once is enough."""
        if self._ready or self.closed:
            return ()
        self._ready = True
        self._timeout_at = now + SILENCE_TIMEOUT
        return self._guarded(self._secure.start, now)

    def receive(
        self, batch: Sequence[bytes], now: float
    ) -> Sequence[FromPeer | Output]:
        """Take what the relay carried here, all that came together."""
        if self.closed or not self._ready:
            return ()
        steps: list[SecureOutput] = []
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

    def send(self, word: Event | Command, now: float) -> Sequence[Output]:
        """Say something; before the conversation has begun there is nobody to hear."""
        if self.closed or self.peer_session is None:
            return ()
        said = self.peer_session.send(word, now)
        return [each for output in said for each in self._encrypt(output)]

    def update_description(
        self, description: PeerDescription, now: float
    ) -> Sequence[FromPeer | Output]:
        """Take what the relay tells of the peer."""
        if self.closed or self.peer_session is None:
            return ()
        return self._encrypt_all(self.peer_session.update_description(description, now))

    def tick(self, now: float) -> Sequence[FromPeer | Output]:
        """Act on time passing."""
        if self.closed:
            return ()
        if self.peer_session is not None:
            return self._encrypt_all(self.peer_session.tick(now))
        if now >= self._timeout_at:
            return (self.close(self._timeout_reason()),)
        return self._guarded(self._secure.tick, now)

    def close(self, reason: str) -> Close:
        """End the session."""
        self.closed = True
        return Close(reason)

    def _timeout_reason(self) -> str:
        if not self._ready:
            return f"the peer was not ready within {READY_TIMEOUT:g} s"
        return f"the peer said nothing within {SILENCE_TIMEOUT:g} s"

    def _guarded(
        self, act: Callable[[float], Sequence[SecureOutput]], now: float
    ) -> Sequence[FromPeer | Output]:
        try:
            steps = act(now)
        except PeerError as error:
            return (self.close(str(error)),)
        return self._process(steps, now)

    def _process(
        self, steps: Sequence[SecureOutput], now: float
    ) -> list[FromPeer | Output]:
        outputs: list[FromPeer | Output] = []
        heard: list[Data] = []
        for step in steps:
            match step:
                case MessageReceived(data):
                    heard.append(data)
                case DataToSend(data):
                    outputs.append(Send(data))
                case Notice():
                    outputs.append(step)
        settled = self._secure.protection
        if self.peer_session is None and settled is not None:
            self.peer_session = self._new_peer_session(settled, now)
            outputs += self._encrypt_all(self.peer_session.tick(now))
            for word in self._state_events():
                outputs += self.send(word, now)
        if heard and self.peer_session is not None and not self.closed:
            outputs += self._encrypt_all(self.peer_session.receive(heard, now))
        return outputs

    def _encrypt_all(
        self, said: Sequence[FromPeer | Output]
    ) -> list[FromPeer | Output]:
        outputs: list[FromPeer | Output] = []
        for each in said:
            if isinstance(each, Send | Close):
                outputs += self._encrypt(each)
            else:
                self.admitted = self.admitted or isinstance(each, PeerJoined)
                outputs.append(each)
        return outputs

    def _encrypt(self, output: Output) -> Sequence[Output]:
        match output:
            case Send(data):
                message = data if isinstance(data, bytes) else data.encode()
                try:
                    steps = self._secure.send(message)
                except PeerError as error:
                    return (self.close(str(error)),)
                return [
                    Send(step.data) for step in steps if isinstance(step, DataToSend)
                ]
            case Close(reason):
                return (self.close(reason),)
            case Bulk() | Notice():
                return (output,)


SESSIONS_MAX = 8192  # open at a time
UNADMITTED_MAX = 1024  # of them by peers that were not let in, or not yet
ID_MAX = 256  # characters of a session's id
SILENCE_MAX = 3600.0  # seconds without a heartbeat, where none is to be expected
ID_SIZE = 16  # bytes of one of ours

AddressOf: TypeAlias = Callable[[str], str]
"""Returns where the node of an id comes from; empty where that is not known."""


def unknown_address(node_id: str) -> str:
    """Return that it is not known."""
    return ""


_NODE_ID = re.compile("[0-9a-f]{64}")


class RelaySessions:
    """All sessions of a node.  Their ids differ in more than case.

    ``own_state`` is what everybody is told of us, by its kind.
    """

    def __init__(
        self, own: TealeLocalNode, identity: Identity, address_of: AddressOf
    ) -> None:
        self._own, self._identity = own, identity
        self._address_of = address_of
        self.id = identity.public_key.hex()
        self._signature = identity.sign(noise_binding(identity.exchange_key))
        self._sessions: dict[str, RelaySession] = {}  # by their ids in upper case
        self._unadmitted: dict[
            RelaySession, None
        ] = {}  # whose peers are not let in, in order
        self.own_state: dict[type, Event] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> Iterable[RelaySession]:
        """Return them, as they are now."""
        return [*self._sessions.values()]

    def find(self, session_id: str) -> RelaySession | None:
        """Return the session of an id."""
        return self._sessions.get(session_id) or self._sessions.get(session_id.upper())

    def can_accept(self, peer_id: str, session_id: str) -> bool:
        """Say whether there is room for a session that a peer wants to open."""
        return (
            _NODE_ID.fullmatch(peer_id) is not None
            and peer_id != self.id
            and 0 < len(session_id) <= ID_MAX
            and len(self._sessions) < SESSIONS_MAX
        )

    def open_outbound(self, node: KnownNode, now: float) -> tuple[RelaySession, Send]:
        """Open a session; return it and what to say."""
        session_id = uuid_from(self._own.random_bytes(ID_SIZE))
        talk = self._open(node, session_id, now, begins=True)
        return talk, Send(encode(RelayOpen(self.id, node.id, session_id)))

    def accept(self, node: KnownNode, session_id: str, now: float) -> RelaySession:
        """Take a session that a peer opens."""
        talk = self._open(node, session_id, now, begins=False)
        self._unadmitted[talk] = None
        return talk

    def mark_admitted(self, talk: RelaySession) -> None:
        """Take note that the peer was let in."""
        self._unadmitted.pop(talk, None)

    @property
    def excess(self) -> RelaySession | None:
        """The session that has to end, so that others can be let in."""
        if len(self._unadmitted) <= UNADMITTED_MAX:
            return None
        return next(iter(self._unadmitted))

    def remove(self, talk: RelaySession) -> None:
        """Forget a session."""
        self._sessions.pop(talk.id.upper(), None)
        self._unadmitted.pop(talk, None)

    # What is said in a session, or about one.

    def ready_message(self, peer_id: str, session_id: str) -> Send:
        """Return that a session may be used."""
        return Send(encode(RelayReady(self.id, peer_id, session_id)))

    def close_message(self, peer_id: str, session_id: str) -> Send:
        """Return that a session is over."""
        return Send(encode(RelayClose(self.id, peer_id, session_id)))

    def data_message(self, talk: RelaySession, data: Data) -> Send:
        """Return what a session's data is to the relay."""
        message = data if isinstance(data, bytes) else data.encode()
        return Send(encode(RelayData(self.id, talk.peer_id, talk.id, message)))

    def answer_message(self, offer: RelayOffer) -> Send:
        """Answer a peer that would rather connect directly: only the relay will do."""
        peer_id, session_id = offer.from_node_id, offer.session_id
        # With a NAT like this at one end, Macs do not even try.
        key = self._identity.exchange_key.hex()
        info = NatConnectionInfo("", 0, "symmetric", wg_public_key=key)
        text = f"{self.id}:{peer_id}:{session_id}".encode(errors="replace")
        signature = self._identity.sign(text).hex()
        return Send(encode(RelayAnswer(self.id, peer_id, session_id, info, signature)))

    # Private parts, in the order in which they are called.

    def _open(
        self, node: KnownNode, session_id: str, now: float, *, begins: bool
    ) -> RelaySession:
        ends = SessionParties(
            own=self._identity,
            own_id=self.id,
            peer_id=node.id,
            session_id=session_id,
            random_bytes=self._own.random_bytes,
            is_bound=partial(is_bound, node.id),
            signature=self._signature,
            epoch=self._own.epoch,
            noise_key=node.noise_key,
            teale_key=node.teale_key,
        )
        converse = partial(self._new_peer_session, node, begins)
        talk = RelaySession(
            ends,
            initiates=begins,
            new_peer_session=converse,
            state_events=self._state_events,
            now=now,
        )
        self._sessions[session_id.upper()] = talk
        return talk

    def _new_peer_session(
        self, node: KnownNode, begins: bool, protection: Protection, now: float
    ) -> TealePeerSession:
        own = self._own
        if isinstance(offered := self.own_state.get(OffersChanged), OffersChanged):
            own = replace(own, offers=offered.offers)
        noise = protection is Protection.NOISE
        caller = TealeConnection(
            dialled=begins,
            name=node.id,
            software=PeerSoftware.SHOAL if noise else node.software,
            description=node.description,
            address=self._address_of(node.id),
            protection=protection,
        )
        return TealePeerSession(own, caller, _link_profile(caller.software))

    def _state_events(self) -> Sequence[Event]:
        return [
            word for kind, word in self.own_state.items() if kind is not OffersChanged
        ]


def _link_profile(software: PeerSoftware) -> LinkProfile:
    """Return how long a peer may be silent, beside the rest."""
    if software is PeerSoftware.RUST:
        # Its nodes hear nothing while they answer a request, and its gateways never
        # say how they are: the relay tells when they are gone.
        return replace(WAN, degraded_after=SILENCE_MAX, disconnected_after=SILENCE_MAX)
    return WAN
