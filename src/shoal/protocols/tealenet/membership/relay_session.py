"""One session through a relay: opening, encryption, and peer session."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event
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
from shoal.protocols.tealenet.encryption.secure_session import (
    DataToSend,
    MessageReceived,
    SecureOutput,
    SecureSession,
    SessionParties,
)
from shoal.protocols.tealenet.peer import PeerDescription
from shoal.protocols.tealenet.peer_session import FromPeer, TealePeerSession

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
        self.admitted = False
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
        """The peer's Noise key, once the handshake has proved it."""
        return self._secure.noise_key

    def on_ready(self, now: float) -> Sequence[FromPeer | Output]:
        """Start the session at the peer's first relayReady."""
        if self._ready or self.closed:
            return ()
        self._ready = True
        self._timeout_at = now + SILENCE_TIMEOUT
        return self._guarded(self._secure.start, now)

    def receive(
        self, batch: Sequence[bytes], now: float
    ) -> Sequence[FromPeer | Output]:
        """Process the data that arrived together."""
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

    def send(self, message: Event | Command, now: float) -> Sequence[Output]:
        """Send a message to the peer; drop it before the peer session has started."""
        if self.closed or self.peer_session is None:
            return ()
        outputs = self.peer_session.send(message, now)
        return [each for output in outputs for each in self._encrypt(output)]

    def probe(self, now: float) -> Sequence[FromPeer | Output]:
        """Make a peer that has joined show that it still has this session."""
        if self.closed or self.peer_session is None:
            return ()
        return self._encrypt_all(self.peer_session.probe(now))

    def update_description(
        self, description: PeerDescription, now: float
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
        return self._guarded(self._secure.tick, now)

    def close(self, reason: str) -> Close:
        """End the session."""
        self.closed = True
        return Close(reason)

    def _timeout_reason(self) -> str:
        if not self._ready:
            return f"the peer was not ready within {READY_TIMEOUT:g} s"
        return f"the peer sent nothing within {SILENCE_TIMEOUT:g} s"

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
        received: list[Data] = []
        for step in steps:
            match step:
                case MessageReceived(data):
                    received.append(data)
                case DataToSend(data):
                    outputs.append(Send(data))
                case Notice():
                    outputs.append(step)
        protection = self._secure.protection
        if self.peer_session is None and protection is not None:
            self.peer_session = self._new_peer_session(protection)
            if self._secure.binding:
                self.peer_session.bind(self._secure.binding)
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
