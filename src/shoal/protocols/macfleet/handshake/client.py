"""The client's end of a handshake: it offers the strong one, and takes what it gets."""

from collections.abc import Callable

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.challenges import (
    drawn,
    is_ours,
    like_heartbeat,
)
from shoal.protocols.macfleet.handshake.messages import (
    Second,
    control,
    read_id,
    read_second,
    write_first,
    write_third,
)
from shoal.protocols.macfleet.handshake.steps import (
    MESSAGE_MAX,
    STEP_LIMIT,
    Agreed,
    Continue,
    Own,
    Refusal,
    Step,
    Strength,
)
from shoal.protocols.macfleet.handshake.strong_client import StrongClient, who_answers
from shoal.protocols.macfleet.wire.frames import Flag, Frame, encode

DOWNGRADED = (
    "it speaks the strong handshake, and yet does not take ours up: somebody in "
    "between has taken the offer out"
)


def rejected(where: str) -> Refusal:
    """Return what it means to be hung up on right after a handshake of v1 or v2."""
    return Refusal(
        f"the fleet at {where} hung up when it had our proof: it has another token or "
        "another id, or bars this address for a while: check --token",
        final=True,
    )


class Client:
    """Greets whom it dialled; see ``Handshake``.

    ``expected`` is the id that the other has to have; empty: any.  ``where`` is what it
    is called in errors.  ``require_strong`` where it is known to be one of ours.
    """

    def __init__(
        self,
        own: Own,
        expected: str = "",
        *,
        require_strong: bool = False,
        where: str = "the other end",
    ) -> None:
        self._own = own
        self._expected = expected
        self._where = where
        self._offers = Strength.STRONG in own.accepts
        self._require_strong = require_strong
        self._certificate = b""
        self._deadline = 0.0
        self._challenge = b""
        self._first = control(b"", 0)
        self._then: Callable[[Frame], Step] = self._second
        self._strong: StrongClient | None = None

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def limit(self) -> int:
        return MESSAGE_MAX

    def opened(self, certificate: bytes) -> None:
        self._certificate = certificate

    def begin(self, now: float) -> list[bytes]:
        own = self._own
        self._deadline = now + STEP_LIMIT
        flags = int(Flag.STRONG) if self._offers else 0
        if own.key is not None:
            self._challenge = drawn(own)
            own.outstanding.put(self._challenge, now)
            flags |= Flag.V2
        self._first = control(write_first(own.node_id, self._challenge), flags)
        return [encode(self._first)]

    def hear(self, frame: Frame, now: float) -> Step:
        step = self._then(frame)
        self._deadline = now + STEP_LIMIT
        return step

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            raise self.broken_off(f"did not answer within {STEP_LIMIT:g} s")

    def broken_off(self, why: str) -> Refusal:
        if self._strong is not None:
            return Refusal(f"{self._where} {why}")
        with_token = "without a token" if self._challenge else "with a token (--token)"
        return Refusal(
            f"{self._where} {why} to our greeting: it may be of a fleet {with_token}, "
            "or bar this address for a while"
        )

    # The second message, by what it says that it is.

    def _second(self, frame: Frame) -> Step:
        own, payload = self._own, bytes(frame.payload)
        if self._offers and frame.flags & Flag.STRONG:
            self._strong = StrongClient(
                own, self._where, self._certificate, self._first
            )
            self._then = self._strong.conclude
            return Continue((self._strong.prove(frame, self._expected),))
        if self._require_strong:
            raise Refusal(
                f"{self._where} does not speak the handshake of Shoal's own nodes: it "
                "is none, or somebody in between has taken our offer out"
            )
        if own.key is None:
            return self._open(payload)
        return self._answered(own.key, payload, signed=bool(frame.flags & Flag.V2))

    def _open(self, payload: bytes) -> Agreed:
        own = self._own
        if Strength.OPEN not in own.accepts or own.digest:
            raise Refusal(
                f"{self._where} takes everybody, and we have a token: leave --token "
                "out to join it",
                final=True,
            )
        # Others neither look at what is answered, nor have to say their id.
        server = read_id(payload) or self._expected
        who_answers(own, self._where, server, "")
        return Agreed((), server, None, Strength.OPEN)

    def _answered(self, key: bytes, payload: bytes, *, signed: bool) -> Agreed:
        """Look at the answer of a server of v1 or v2, and answer it."""
        own = self._own
        strength = Strength.V2 if signed else Strength.V1
        if strength not in own.accepts:
            raise Refusal(
                f"{self._where} speaks the handshake {strength.value}, which is not "
                "accepted here",
                final=True,
            )
        try:
            second = read_second(key, payload, self._challenge, signed=signed)
        except PeerError as error:
            raise Refusal(
                f"the fleet at {self._where} has another token or another id: check "
                f"--token ({error})",
                final=True,
            ) from error
        self._look_at(second)
        profile = own.profile if signed else None
        third = write_third(key, own.node_id, second.challenge, profile)
        send = (encode(control(third, Flag.V2 if signed else 0)),)
        return Agreed(send, second.node_id, second.profile, strength)

    def _look_at(self, second: Second) -> None:
        """Raise Refusal if we had better not answer.

        The challenge is not bound to the rest of the answer: somebody in between can
        have put it there.
        """
        own, theirs = self._own, second.challenge
        who_answers(own, self._where, second.node_id, self._expected)
        if self._offers and is_ours(theirs):
            raise Refusal(f"{self._where}: {DOWNGRADED}")
        if theirs in own.outstanding:
            raise Refusal(f"{self._where} hands a challenge of ours back")
        if like_heartbeat(theirs, own.node_id):
            raise Refusal(f"{self._where}: its challenge could be a heartbeat")
