"""The server's end of a handshake: whoever dialled chooses how strong it is."""

from collections.abc import Callable

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.challenges import (
    drawn,
    is_ours,
    like_heartbeat,
)
from shoal.protocols.macfleet.handshake.messages import (
    control,
    read_first,
    read_id,
    read_third,
    write_second,
)
from shoal.protocols.macfleet.handshake.steps import (
    FIRST_MAX,
    MESSAGE_MAX,
    STEP_LIMIT,
    Agreed,
    Continue,
    Own,
    Refusal,
    Step,
    Strength,
)
from shoal.protocols.macfleet.handshake.strong_server import StrongServer
from shoal.protocols.macfleet.wire.frames import Flag, Frame, FrameType, encode

DOWNGRADED = (
    "it speaks the strong handshake and did not offer it: somebody in between has "
    "taken the offer out"
)


class Server:
    """Waits for whoever comes from an address; see ``Handshake``.

    In v1 and v2 our answer comes before the client's: whoever leaves with it, or gets
    it wrong, may have come for it, and counts as one who has guessed.
    """

    def __init__(self, own: Own, address: str = "") -> None:
        self._own = own
        self._address = address
        self._certificate = b""
        self._deadline = 0.0
        self._then: Callable[[Frame, float], Step] = self._first
        self._client = ""
        self._challenge = b""  # that v1's or v2's client has to answer
        self._signed = False  # it is v2's
        self._strong: StrongServer | None = None

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def limit(self) -> int:
        return MESSAGE_MAX if self._client else FIRST_MAX

    def opened(self, certificate: bytes) -> None:
        self._certificate = certificate

    def begin(self, now: float) -> list[bytes]:
        self._deadline = now + STEP_LIMIT
        return []

    def hear(self, frame: Frame, now: float) -> Step:
        step = self._then(frame, now)
        self._deadline = now + STEP_LIMIT
        return step

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            raise self.broken_off(f"nothing came within {STEP_LIMIT:g} s")

    def broken_off(self, why: str) -> Refusal:
        who = f"{self._client!a}: " if self._client else ""
        return Refusal(f"{who}{why}", counts=bool(self._challenge))

    # The first message, in the order in which it is looked at.

    def _first(self, frame: Frame, now: float) -> Step:
        own = self._own
        if frame.type is not FrameType.CONTROL:
            raise Refusal(f"it began with {frame.type.name}, expected CONTROL")
        if frame.flags & Flag.STRONG and Strength.STRONG in own.accepts:
            self._strong = StrongServer(own, self._address, self._certificate)
            send = self._strong.answer(frame)
            self._client = self._strong.client
            self._then = self._strong_third
            return Continue((send,))
        payload = bytes(frame.payload)
        if own.key is not None:
            return self._challenged(own.key, payload, frame.flags, now)
        return self._open(payload)

    def _open(self, payload: bytes) -> Agreed:
        own = self._own
        if Strength.OPEN not in own.accepts or own.digest:
            raise Refusal("only nodes of ours are let in here, and it is none")
        client = read_id(payload)
        if client == own.node_id:
            raise Refusal(f"it claims our own id, {client!a}")
        send = (encode(control(own.node_id.encode(), 0)),)
        return Agreed(send, client, None, Strength.OPEN)

    def _challenged(self, key: bytes, payload: bytes, flags: int, now: float) -> Step:
        """Answer a client of v1 or v2, and challenge it in turn."""
        own = self._own
        client, theirs = read_first(payload)
        strength = Strength.V2 if flags & Flag.V2 else Strength.V1
        if strength not in own.accepts:
            raise Refusal(
                f"{client!a} speaks the handshake {strength.value}, which is not "
                "accepted here"
            )
        if (why := self._objection(client, theirs)) is not None:
            raise Refusal(f"{client!a}: {why}", counts=True)
        ours = drawn(own)
        own.outstanding.put(ours, now)
        self._client, self._challenge = client, ours
        self._signed = strength is Strength.V2
        self._then = self._third
        profile = own.profile if self._signed else None
        second = write_second(key, own.node_id, theirs, ours, profile)
        flag = Flag.V2 if self._signed else 0
        return Continue((encode(control(second, flag)),))

    def _objection(self, client: str, challenge: bytes) -> str | None:
        """Say why a challenge is not answered, or None."""
        own = self._own
        if client == own.node_id:
            return "it claims our own id"
        if challenge in own.outstanding:
            return "it hands a challenge of ours back"
        if Strength.STRONG in own.accepts and is_ours(challenge):
            return DOWNGRADED
        if like_heartbeat(challenge, own.node_id):
            return "its challenge could be a heartbeat, which we would sign"
        return None

    # The third, which is of the kind that the first was of, whatever it says.

    def _third(self, frame: Frame, now: float) -> Agreed:
        key = self._own.key
        assert key is not None, "or there would have been no challenge"
        try:
            profile = read_third(
                key,
                self._client,
                bytes(frame.payload),
                self._challenge,
                signed=self._signed,
            )
        except PeerError as error:
            raise Refusal(f"{self._client!a}: {error}", counts=True) from error
        strength = Strength.V2 if self._signed else Strength.V1
        return Agreed((), self._client, profile, strength)

    def _strong_third(self, frame: Frame, now: float) -> Agreed:
        assert self._strong is not None, "it has answered the first"
        return self._strong.conclude(frame)
