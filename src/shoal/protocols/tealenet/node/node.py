"""A node on a relay: known to it, knowing the others, and in sessions with them.

One node serves and asks, over one connection to a relay.  Each peer may have any number
of sessions here: what we ask goes through one of them, and what a peer asks is answered
in the session that it came by, for gateways read an answer by its session alone.

Source: TealeNet's document, and what real nodes, gateways and relays do; see
``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from itertools import groupby

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Failed,
    Offered,
    Progress,
    Rejected,
    Reported,
    RunJob,
)
from shoal.protocols.crowd import EVERYBODY, From, Met, To
from shoal.protocols.session import Batch, Close, Data, Notice, Output, Send
from shoal.protocols.tealenet.admission import lets_strangers_in
from shoal.protocols.tealenet.node.calling import Calling
from shoal.protocols.tealenet.node.guest import Guest
from shoal.protocols.tealenet.node.guests import Guests, Heard
from shoal.protocols.tealenet.node.known import Directory, Pinned, is_bound
from shoal.protocols.tealenet.node.registration import Registration
from shoal.protocols.tealenet.node.sessions import AddressOf, Sessions, unknown
from shoal.protocols.tealenet.node.talk import Talk
from shoal.protocols.tealenet.node.timetable import Timetable
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.relay.envelope import BadRelayMessage
from shoal.protocols.tealenet.relay.messages import (
    Answer,
    Discover,
    DiscoverResponse,
    Error,
    Filter,
    IceCandidate,
    Offer,
    PeerJoined,
    PeerLeft,
    Register,
    RegisterAck,
    RegisterChallenge,
    RelayClose,
    RelayData,
    RelayMessage,
    RelayOpen,
    RelayReady,
    decode,
    encode,
)
from shoal.protocols.tealenet.wire.proving import bytes_of, key_of

DISCOVER_EVERY = 10.0  # seconds, as gateways do
DISCOVER_AGAIN = 2.0  # seconds at least between two looks, when somebody has come
FOUND_MAX = 1000  # nodes that we want to hear of at a time
BAD_MAX = 100  # bad messages in a row, after which the relay is left
ALONE = Notice(
    "nobody on this relay is asked or served, for its nodes can present nothing: that "
    "takes --tealenet-open"
)
SHOWN_MAX = 200  # characters of the relay's words that are repeated


class Node:
    """Our end of a connection to a relay.

    ``own`` must have an identity, for that is what a node is known by.  ``pinned``
    outlives the connection, and ``address_of`` says where nodes of a relay of our own
    come from.  On a relay that is no coordinator's a worker meets
    EVERYBODY, as soon as the relay knows it.
    """

    def __init__(
        self,
        own: Ourselves,
        now: float,
        pinned: Pinned | None = None,
        address_of: AddressOf = unknown,
    ) -> None:
        assert own.identity is not None, "a node is known by its key"
        self.id = own.identity.public_key.hex()
        self._own = own
        self._serves = own.role is Role.WORKER
        self._registration = Registration(own, own.identity, now)
        self._directory = Directory(self.id, pinned or Pinned())
        self._times: Timetable[Talk | Guest] = Timetable()
        sessions = Sessions(own, own.identity, address_of)
        self._guests = Guests(sessions, self._directory, self._times)
        self._calling = Calling(
            own, sessions, self._directory, self._guests, self._times
        )
        self.accepts: frozenset[type] = _ACCEPTS
        self._discovered_at: float | None = None
        self._discover_at: float | None = None
        self._bad = 0
        self._last = now  # when something was issued last
        self._closed = False

    @property
    def deadline(self) -> float | None:
        if self._closed:
            return None
        if self._guests.owed:
            return self._last
        times = (
            self._registration.deadline,
            self._discover_at,
            self._calling.look_at,
            self._times.next,
        )
        return min(each for each in times if each is not None)

    def tick(self, now: float) -> Sequence[Heard]:
        if self._closed:
            return ()
        outputs: list[Heard] = []
        try:
            registration = self._registration.tick(now)
        except PeerError as error:
            return self._close(str(error))
        if registration is not None:
            outputs.append(_said(registration))
        if self._discover_at is not None and now >= self._discover_at:
            self._discover_at = now + DISCOVER_EVERY
            self._discovered_at = now
            wanted = Filter(max_peers=FOUND_MAX)
            outputs.append(_said(Discover(self.id, wanted)))
        outputs += self._guests.owed
        self._guests.owed = []
        for each in self._times.due(now):
            if isinstance(each, Guest):
                outputs += self._calling.wake(each, now)
            else:
                outputs += self._guests.tick(each, now)
        if self._calling.look_at is not None and now >= self._calling.look_at:
            outputs += self._calling.look(now)
        return outputs

    def receive(self, batch: Batch, now: float) -> Sequence[Heard]:
        outputs: list[Heard] = []
        messages = (self._decoded(data) for data in batch)
        # What one read brought in one session goes on together.
        for session_id, group in groupby(messages, _session):
            if self._closed:
                break
            if session_id is not None:
                said = [each for each in group if isinstance(each, RelayData)]
                outputs += self._guests.data(said, now)
                continue
            for message in group:
                outputs += self._take(message, now)
        return outputs

    def issue(self, message: To, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        self._last = now
        if message.peer != EVERYBODY:
            return self._guests.tell(message.peer, message.word, now)
        if isinstance(message.word, Offered | Conditioned | Draining):
            self._registration.tell(message.word)
        return self._guests.tell_all(message.word, now)

    def _decoded(self, data: Data) -> RelayMessage | BadRelayMessage | None:
        try:
            return decode(data)
        except BadRelayMessage as error:
            return error

    def _take(
        self, message: RelayMessage | BadRelayMessage | None, now: float
    ) -> Sequence[Heard]:
        if isinstance(message, BadRelayMessage):
            self._bad += 1
            if self._bad >= BAD_MAX:
                why = f"the relay sends nothing that makes sense: {message}"
                return self._close(why)
            return (Notice(f"message of the relay ignored: {message}"),)
        self._bad = 0
        match message:
            case RelayOpen():
                return self._calling.opened(message, now)
            case RelayReady():
                return self._guests.ready(message, now)
            case RelayClose():
                return self._guests.closed(message, now)
            case Offer():
                return self._calling.offered(message)
            case RegisterChallenge():
                return (_said(self._registration.answer(message)),)
            case RegisterAck():
                return self._acknowledged(message, now)
            case DiscoverResponse(peers):
                self._directory.hear(peers, now)
                return self._calling.look(now)
            case PeerJoined():
                # Real relays say so whenever a node registers again.
                self._look_again(now)
                return ()
            case PeerLeft(node_id, _):
                self._directory.forget(node_id)
                return self._guests.left(node_id, "it left the relay", now)
            case Error():
                return self._error(message, now)
            case RelayData():
                return self._guests.data([message], now)
            case Answer() | IceCandidate() | Register() | Discover() | None:
                return ()  # we offer nothing, and are no relay

    def _acknowledged(self, ack: RegisterAck, now: float) -> Sequence[Heard]:
        first = not self._registration.done
        self._registration.acknowledged(ack, now)
        outputs: Sequence[Heard] = ()
        host = ack.shoal
        if host and is_bound(
            host.node_id, key_of(host.noise), bytes_of(host.noise_proof)
        ):
            self._directory.meet(host.node_id, key_of(host.noise))
            outputs = self._calling.hosted(host.node_id, now)
        elif first and self._serves:
            # Nobody in particular is to be met: whoever comes may ask.
            outputs = (From(EVERYBODY, Met(EVERYBODY, asks=True)),)
        elsewhere = not host or host.node_id != self.id
        if (
            first
            and elsewhere
            and not self._serves
            and not lets_strangers_in(self._own)
        ):
            outputs = (*outputs, ALONE)
        self._look_again(now)
        return outputs

    def _look_again(self, now: float) -> None:
        if not self._calling.looks:
            self._discover_at = None
            return
        since = self._discovered_at
        soon = now if since is None else max(now, since + DISCOVER_AGAIN)
        self._discover_at = min(soon, self._discover_at or soon)

    def _error(self, error: Error, now: float) -> Sequence[Heard]:
        said = ascii(error.message)[1:-1][:SHOWN_MAX]
        match error.code:
            case "peer_not_found":
                return self._guests.missing(error.message, now)
            case "registration_expired":
                self._registration.expired(now)
            case "invalid_register" if not self._registration.done:
                return self._close(f"the relay does not let us register: {said}")
            case _:
                pass
        return (Notice(f"the relay says: {said}"),)

    def _close(self, reason: str) -> Sequence[Heard]:
        self._closed = True
        return (Close(reason),)


_ACCEPTS: frozenset[type] = frozenset(
    {
        RunJob,
        CancelJob,
        Dismiss,
        Offered,
        Conditioned,
        Draining,
        Reported,
        Progress,
        Completed,
        Rejected,
        Failed,
    }
)


def _session(message: RelayMessage | BadRelayMessage | None) -> str | None:
    return message.session_id if isinstance(message, RelayData) else None


def _said(message: RelayMessage) -> Send:
    return Send(encode(message))
