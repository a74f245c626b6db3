"""All sessions of a node through a relay, and the relay's messages about them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from shoal.domain.vocabulary import Event, OffersChanged
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Data, Send
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
from shoal.protocols.tealenet.codec.signatures import HEX_KEY, noise_binding
from shoal.protocols.tealenet.encryption.secure_session import SessionParties
from shoal.protocols.tealenet.link_profile import WAN, LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode, uuid_from
from shoal.protocols.tealenet.membership.node_directory import KnownNode, is_bound
from shoal.protocols.tealenet.membership.relay_session import RelaySession
from shoal.protocols.tealenet.peer import PeerSoftware, TealeConnection
from shoal.protocols.tealenet.peer_session import TealePeerSession

SESSIONS_MAX = 8192  # open at a time
UNADMITTED_MAX = 1024  # of them whose peer is not admitted
ID_MAX = 256  # characters of a session's id
SILENCE_MAX = 3600.0  # seconds without heartbeats from a peer that sends none
ID_SIZE = 16  # bytes of an id that this node chooses
REFUSED_MAX = 256  # unknown sessions that were answered, and are not answered again


class HostRelay(Protocol):
    """What a relay in this process tells its coordinator's node, and is told by it."""

    def address_of(self, node_id: str) -> str:
        """Return the network address of a node; empty if it is unknown."""
        ...

    def admit(self, node_id: str) -> None:
        """Take a node, which has presented a credential, for one of the pool."""
        ...

    def dismiss(self, node_id: str) -> None:
        """Take a node for a stranger again, which has left the pool."""
        ...


class RemoteRelay:
    """A relay elsewhere: it tells no addresses, and who is admitted is its own."""

    def address_of(self, node_id: str) -> str:
        return ""

    def admit(self, node_id: str) -> None:
        pass

    def dismiss(self, node_id: str) -> None:
        pass


class RelaySessions:
    """All sessions of a node, by their ids without regard to case.

    ``local_state`` has this node's state, by event type: each session sends it.
    """

    def __init__(
        self, local: TealeLocalNode, identity: Identity, relay: HostRelay
    ) -> None:
        self._local, self._identity = local, identity
        self._relay = relay
        self.id = identity.public_key.hex()
        self._signature = identity.sign(noise_binding(identity.exchange_key))
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
        parties = SessionParties(
            identity=self._identity,
            local_id=self.id,
            peer_id=node.id,
            session_id=session_id,
            random_bytes=self._local.random_bytes,
            is_bound=partial(is_bound, node.id),
            signature=self._signature,
            epoch=self._local.epoch,
            noise_key=node.noise_key,
            teale_key=node.teale_key,
        )
        new_peer_session = partial(self._new_peer_session, node, initiates)
        session = RelaySession(
            parties,
            initiates=initiates,
            new_peer_session=new_peer_session,
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
        noise = protection is Protection.NOISE
        connection = TealeConnection(
            dialled=initiates,
            name=node.id,
            software=PeerSoftware.SHOAL if noise else node.software,
            description=node.description,
            address=self._relay.address_of(node.id),
            protection=protection,
        )
        return TealePeerSession(local, connection, _link_profile(connection.software))

    def _state_events(self) -> Sequence[Event]:
        return [
            event
            for kind, event in self.local_state.items()
            if kind is not OffersChanged
        ]


def _link_profile(software: PeerSoftware) -> LinkProfile:
    """Return the link's profile; it depends on how long a peer may be silent."""
    if software is PeerSoftware.RUST:
        # Rust nodes read nothing while they answer a request, and gateways never send
        # heartbeats: the relay reports when they leave.
        return replace(WAN, degraded_after=SILENCE_MAX, disconnected_after=SILENCE_MAX)
    return WAN
