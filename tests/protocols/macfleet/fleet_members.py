"""Nodes for tests of the fleet, with deterministic random bytes."""

from collections.abc import Sequence
from itertools import count

from protocols.macfleet.recorded import Case
from shoal.domain.errors import TooManyFailures
from shoal.protocols.macfleet.codec.hardware import (
    UNKNOWN_PROFILE,
    HardwareProfile,
    decode_profile,
)
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.admission import NoThrottle
from shoal.protocols.seam.peer_session import PeerMessage
from shoal.protocols.seam.session import Close, Output, Send

KEY = fleet_key("a-token-for-tests")
AWAY = "192.0.2.7"
LOCAL = "127.0.0.1"


def member(
    node_id: str = "node-a",
    key: bytes | None = KEY,
    profile: HardwareProfile = UNKNOWN_PROFILE,
    nonces: int = 1,
) -> FleetMember:
    """Return a node whose nonces count from a number."""
    numbers = count(nonces)
    return FleetMember(
        node_id, key, lambda: profile, lambda size: next(numbers).to_bytes(size)
    )


def member_of(
    case: Case, node_id: str, hardware: str | None, nonce: str
) -> FleetMember:
    """Return the node of a recorded case, with the recorded nonce."""
    given = case["input"]
    token = given["token"]
    profile = decode_profile(bytes.fromhex(hardware)) if hardware else UNKNOWN_PROFILE
    key = fleet_key(token, given["fleet_id"] or "") if token else None
    drawn = bytes.fromhex(nonce or "")
    return FleetMember(node_id, key, lambda: profile, lambda size: drawn)


def limiter() -> FleetRateLimiter:
    """Return a limiter with a throttle of its own."""
    return FleetRateLimiter(NoThrottle())


class OtherGuesses:
    """The throttle of all protocols; addresses in ``barred`` are banned."""

    def __init__(self) -> None:
        self.barred: set[str] = set()
        self.counted: list[str] = []

    def check(self, address: str) -> None:
        if address in self.barred:
            raise TooManyFailures("barred", 1)

    def check_passcode(self, address: str) -> None:
        pass

    def failed(self, address: str) -> None:
        self.counted.append(address)


def sent(outputs: Sequence[PeerMessage | Output]) -> bytes:
    """Return the bytes that were sent."""
    pieces = [each.data for each in outputs if isinstance(each, Send)]
    return b"".join(each for each in pieces if isinstance(each, bytes))


def closed(outputs: Sequence[PeerMessage | Output]) -> str | None:
    """Return why the connection closes, if it does; that is the last output."""
    for each in outputs:
        if isinstance(each, Close):
            assert each is outputs[-1]
            return each.reason
    return None
