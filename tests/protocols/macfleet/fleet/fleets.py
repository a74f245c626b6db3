"""Nodes for tests of the fleet: nothing that they draw is random."""

from collections.abc import Sequence
from itertools import count

from protocols.macfleet.recorded import Case
from shoal.domain.errors import TooManyFailures
from shoal.protocols.crowd import From
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.wire.hardware import (
    UNKNOWN_PROFILE,
    Profile,
    read_profile,
)
from shoal.protocols.macfleet.wire.keys import fleet_key
from shoal.protocols.session import Close, Output, Send, Uncounted

KEY = fleet_key("a-token-for-tests")
AWAY = "192.0.2.7"
LOCAL = "127.0.0.1"


def member(
    node_id: str = "node-a",
    key: bytes | None = KEY,
    profile: Profile = UNKNOWN_PROFILE,
    nonces: int = 1,
) -> Member:
    """Return a node whose nonces are counted from a number on."""
    numbers = count(nonces)
    return Member(
        node_id, key, lambda: profile, lambda size: next(numbers).to_bytes(size)
    )


def member_of(case: Case, node_id: str, hardware: str | None, nonce: str) -> Member:
    """Return the node of a recorded case, which draws the nonce of the record."""
    given = case["input"]
    token = given["token"]
    profile = read_profile(bytes.fromhex(hardware)) if hardware else UNKNOWN_PROFILE
    key = fleet_key(token, given["fleet_id"] or "") if token else None
    drawn = bytes.fromhex(nonce or "")
    return Member(node_id, key, lambda: profile, lambda size: drawn)


def limiter() -> Limiter:
    """Return one that counts for itself alone."""
    return Limiter(Uncounted())


class Others:
    """What other wires count by; whoever is in ``barred`` is barred there."""

    def __init__(self) -> None:
        self.barred: set[str] = set()
        self.counted: list[str] = []

    def check(self, address: str) -> None:
        if address in self.barred:
            raise TooManyFailures("barred", 1)

    def failed(self, address: str) -> None:
        self.counted.append(address)


def sent(outputs: Sequence[From | Output]) -> bytes:
    """Return what was sent."""
    pieces = [each.data for each in outputs if isinstance(each, Send)]
    return b"".join(each for each in pieces if isinstance(each, bytes))


def closed(outputs: Sequence[From | Output]) -> str | None:
    """Return why the connection is closed, if it is; that is the last thing said."""
    for each in outputs:
        if isinstance(each, Close):
            assert each is outputs[-1]
            return each.reason
    return None
