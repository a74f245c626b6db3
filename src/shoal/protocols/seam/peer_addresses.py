"""Addresses of peers, some of which have a wire that is not known yet.

Peers of some wires penalise messages of other wires.  Such a wire probes the address
first, and the other wires wait.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from shoal.domain.addresses import has_space
from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import ListedNode, OutgoingConnection
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.session import Batch, Output

CHECK_INTERVAL = 1.0  # seconds until the end of a probe takes effect


def split_url(
    url: str, schemes: Container[str], expected: str, with_port: Container[str] = ()
) -> SplitResult:
    """Split the URL of a peer, which has one of some schemes, and a host.

    ``with_port`` are schemes that have no default port.  Raises ConfigError with what
    was ``expected``.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port  # an invalid port raises ValueError
    except ValueError as error:
        problem = str(error)
    else:
        if parts.scheme not in schemes:
            problem = f"unknown scheme {parts.scheme!r}"
        elif has_space(url):
            problem = "a space or control character in it"
        elif not host or port == 0:
            problem = "no port" if host else "no host"
        elif parts.scheme in with_port and port is None:
            problem = "no port"
        else:
            return parts
    raise ConfigError(f"URL {without_query(url)!a}: {problem}; {expected}")


def without_query(url: str) -> str:
    """Return a URL for messages, without its query, which may contain a secret."""
    return url.partition("?")[0]


@dataclass(slots=True, eq=False)
class PeerAddress:
    """HOST:PORT; ``wire`` is the peer's wire once it is known.

    ``probing`` has the wires that have yet to probe before others may dial.
    """

    address: str
    wire: str = ""
    probing: set[str] = field(default_factory=set)

    def may_dial(self, wire: str) -> bool:
        """Return whether a wire may dial the address now."""
        return self.wire == wire or not (self.wire or self.probing - {wire})


class AddressDialer:
    """The ``MembershipProber`` of a wire that dials addresses after others have probed.

    ``connection_to`` returns how to connect to an address.
    """

    def __init__(
        self,
        wire: str,
        addresses: Sequence[PeerAddress],
        connection_to: Callable[[str], OutgoingConnection],
    ) -> None:
        self._wire = wire
        self._addresses = addresses
        self._connection_to = connection_to
        self._outgoing: dict[PeerAddress, OutgoingConnection] = {}
        self.deadline = float("-inf")

    def tick(self, now: float) -> Sequence[OutgoingConnection]:
        self.deadline = now + CHECK_INTERVAL
        return [
            self._open(each)
            for each in self._addresses
            if each not in self._outgoing and each.may_dial(self._wire)
        ]

    def dropped(self) -> Sequence[OutgoingConnection]:
        lost = [each for each in self._outgoing if not each.may_dial(self._wire)]
        return [self._outgoing.pop(each) for each in lost]

    def nodes(self) -> Sequence[ListedNode]:
        return ()

    def _open(self, address: PeerAddress) -> OutgoingConnection:
        plain = self._connection_to(address.address)

        def claim() -> None:
            address.wire = self._wire

        outgoing = OutgoingConnection(
            plain.url,
            lambda now: _Claiming(plain.new_session(now), claim),
            plain.headers,
            plain.message_max,
            plain.fingerprint,
        )
        self._outgoing[address] = outgoing
        return outgoing


class _Claiming:
    """A session that claims its address when a peer joins."""

    def __init__(self, inner: PeerSession, claim: Callable[[], None]) -> None:
        self._inner = inner
        self._claim = claim
        self.accepts = inner.accepts

    @property
    def deadline(self) -> float | None:
        return self._inner.deadline

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        return self._claim_if_joined(self._inner.tick(now))

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        return self._claim_if_joined(self._inner.receive(batch, now))

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        return self._inner.send(message, now)

    def _claim_if_joined(
        self, outputs: Sequence[PeerMessage | Output]
    ) -> Sequence[PeerMessage | Output]:
        if any(
            isinstance(each, PeerMessage) and isinstance(each.message, PeerJoined)
            for each in outputs
        ):
            self._claim()
        return outputs
