"""What protects one session through a relay, and how its two ends agree on that.

The first byte of the first message tells: 0x11 begins Noise, which our own nodes use
among themselves; 0x01 the channel of TealeNet's own peers; and JSON is nothing but
JSON.  A node that announced a Noise key is talked to with it or not at all, whatever a
relay shows of it later.  Others are offered TealeNet's channel if they have a key for
it, and talked to in the open when they do not answer: no real peer does so far.

What does not open is dropped, for a relay may let others put data into a session.  Only
a genuine message can end one: if it shows that others before it were lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.crowd import Protection
from shoal.protocols.session import Identity, Notice
from shoal.protocols.tealenet.encryption.channels import (
    HANDSHAKES,
    NOISE_FIRST,
    NOISE_SECOND,
    TEALE_FIRST,
    TEALE_SECOND,
    Channel,
    Numbered,
    Plain,
    Teale,
)
from shoal.protocols.tealenet.encryption.noise import Draw, Initiator, Responder
from shoal.protocols.tealenet.encryption.teale_channel import (
    Packets,
    TealeInitiator,
    TealeResponder,
    time_payload,
)

NOISE_LIMIT = 10.0  # seconds for a peer of ours to answer the handshake
TEALE_WAIT = 2.0  # seconds for another peer to answer, before we speak in the open
KEPT_MAX = 1024  # messages that wait for the handshake
KEPT_SIZE_MAX = 16 << 20  # bytes of them


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of the peer's, as it was before it was sealed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Carry:
    """What the relay is to carry to the peer."""

    data: bytes


Step: TypeAlias = Heard | Carry | Notice


@dataclass(frozen=True, slots=True)
class Ends:
    """Who talks in a session, and with which keys.

    ``epoch`` is as in ``Member``.  ``noise_key`` is the X25519 key that the peer
    announced, signed by the key it is known by; ``teale_key`` one that it says is its.
    ``is_bound`` says whether the peer signed a key (first) like this (second), and
    ``signature`` is how we signed ours: a first message has that in it, so that nobody
    has to have heard of who sends it.
    """

    own: Identity
    own_id: str
    peer_id: str
    session_id: str
    draw: Draw
    is_bound: Callable[[bytes, bytes], bool]
    signature: bytes
    epoch: float = 0.0
    noise_key: bytes | None = None
    teale_key: bytes | None = None

    def prologue(self, *, begins: bool) -> bytes:
        """Return what both ends of a Noise handshake must agree on.

        That is who talks and in which session, so that a relay cannot connect the ends
        of two.
        """
        ids = (self.own_id, self.peer_id) if begins else (self.peer_id, self.own_id)
        parts = ("shoal tealenet 1", *(each.lower() for each in ids))
        return "\n".join((*parts, self.session_id.upper())).encode(errors="replace")

    def time(self, now: float) -> bytes:
        """Return what each message of TealeNet's handshake carries."""
        return time_payload(self.epoch + now)


class Secure:
    """One end of a session: messages go in and out, and the relay carries the rest.

    ``begins`` is whoever opened the session.  ``protection`` is None until it is
    decided, and what is said until then is kept.  ``noise_key`` is the one that the
    peer turned out to have.
    """

    def __init__(self, ends: Ends, *, begins: bool) -> None:
        self.protection: Protection | None = None
        self.deadline: float | None = None
        self.noise_key = ends.noise_key
        self._ends = ends
        self._begins = begins
        self._noise: Initiator | None = None
        self._teale: TealeInitiator | None = None
        self._channel: Channel | None = None
        self._kept: list[bytes] = []
        self._kept_size = 0
        self._odd = False  # whether a notice was given: one is enough

    def open(self, now: float) -> Sequence[Step]:
        """Begin, once the peer is ready to hear.

        Raises PeerError if the peer announced a key that is no good.
        """
        ends = self._ends
        if not self._begins:
            return ()
        if ends.noise_key is not None:
            prologue = ends.prologue(begins=True)
            self._noise = Initiator(ends.own, ends.noise_key, prologue, ends.draw)
            self.deadline = now + NOISE_LIMIT
            first = self._noise.begin(ends.signature)
            return (Carry(bytes([NOISE_FIRST]) + first),)
        if ends.teale_key is None:
            return self._settle(Plain())
        try:
            self._teale = TealeInitiator(ends.own, ends.teale_key, ends.draw)
            offer = self._teale.begin(ends.time(now))
        except PeerError as error:
            plain = self._settle(Plain())
            return (Notice(f"the peer's key for encryption: {error}"), *plain)
        self.deadline = now + TEALE_WAIT
        return (Carry(bytes([TEALE_FIRST]) + offer),)

    def say(self, message: bytes) -> Sequence[Step]:
        """Seal a message; or keep it, while it is open what protects the session.

        Raises PeerError if too much is kept, or if the session has to begin anew.
        """
        if self._channel is not None:
            return (Carry(self._channel.seal(message)),)
        self._kept.append(message)
        self._kept_size += len(message)
        if len(self._kept) > KEPT_MAX or self._kept_size > KEPT_SIZE_MAX:
            what = "what waits for the peer's handshake"
            raise LimitExceeded(what, self._kept_size, KEPT_SIZE_MAX)
        return ()

    def receive(self, data: bytes, now: float) -> Sequence[Step]:
        """Take what the relay carried here.

        Raises PeerError if messages were lost on the way: the session has to end.
        """
        if self._channel is None:
            return self._agree(data, now)
        message = self._channel.open(data)
        if message is not None:
            return (Heard(message),)
        if self._offered_too_late(data):
            raise PeerError("the peer answered the offer of encryption too late")
        return self._dropped("something in the session is not the peer's")

    def tick(self, now: float) -> Sequence[Step]:
        """Act on time passing.  Raises PeerError if a peer of ours does not answer."""
        if self.deadline is None or now < self.deadline:
            return ()
        if self._noise is not None:
            why = f"no answer to the handshake within {NOISE_LIMIT:g} s"
            raise PeerError(f"{why}, and without encryption nothing is said")
        return self._settle(Plain())

    def _agree(self, data: bytes, now: float) -> Sequence[Step]:
        kind = data[0] if data else None
        try:
            if self._noise is not None:
                return self._finish_noise(self._noise, kind, data)
            if self._teale is not None and kind == TEALE_SECOND:
                packets = Packets(self._teale.finish(data[1:]))
                return self._settle(Teale(packets))
            if not self._begins and kind == NOISE_FIRST:
                return self._answer_noise(data[1:])
            if self._ends.noise_key is not None:
                return self._dropped("a peer that announced encryption does without")
            if not self._begins and kind == TEALE_FIRST:
                return self._answer_teale(data[1:], now)
        except PeerError as error:
            return self._dropped(str(error))
        if kind in HANDSHAKES:
            return self._dropped("a handshake message out of turn")
        return (*self._settle(Plain()), Heard(data))

    def _finish_noise(
        self, noise: Initiator, kind: int | None, data: bytes
    ) -> Sequence[Step]:
        if kind != NOISE_SECOND:
            return self._dropped("a peer that announced encryption does without")
        _, secrets = noise.finish(data[1:])
        return self._settle(Numbered(secrets))

    def _answer_noise(self, message: bytes) -> Sequence[Step]:
        ends = self._ends
        responder = Responder(ends.own, ends.prologue(begins=False), message)
        if not ends.is_bound(responder.peer_key, responder.payload):
            raise PeerError("the handshake was begun with a key that is not the peer's")
        self.noise_key = responder.peer_key
        second, secrets = responder.answer(ends.draw)
        answer = Carry(bytes([NOISE_SECOND]) + second)
        return (answer, *self._settle(Numbered(secrets)))

    def _answer_teale(self, message: bytes, now: float) -> Sequence[Step]:
        ends = self._ends
        responder = TealeResponder(ends.own, message)
        if ends.teale_key not in (None, responder.peer_key):
            raise PeerError("the handshake was begun with a key that is not the peer's")
        second, secrets = responder.answer(ends.draw, ends.time(now))
        answer = Carry(bytes([TEALE_SECOND]) + second)
        return (answer, *self._settle(Teale(Packets(secrets))))

    def _settle(self, channel: Channel) -> Sequence[Step]:
        self._channel = channel
        self.protection = channel.protection
        self.deadline = None
        kept, self._kept = self._kept, []
        return [Carry(channel.seal(message)) for message in kept]

    def _offered_too_late(self, data: bytes) -> bool:
        if self._teale is None or data[:1] != bytes([TEALE_SECOND]):
            return False
        if self.protection is not Protection.PLAIN:
            return False
        try:
            self._teale.finish(data[1:])
        except PeerError:
            return False
        return True

    def _dropped(self, why: str) -> Sequence[Step]:
        if self._odd:
            return ()
        self._odd = True
        return (Notice(f"{why}: it is dropped"),)
