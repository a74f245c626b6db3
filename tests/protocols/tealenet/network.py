"""Nodes around a relay of ours, in memory and in virtual time."""

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from protocols.settings import setting
from shoal.domain.vocabulary import Command, Event
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import AdmissionCheck
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend
from shoal.protocols.seam.session import Close, Data, Notice, Send
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.local_node import TealeLocalNode, coordinator_node
from shoal.protocols.tealenet.membership.relay_node import RelayNode
from shoal.protocols.tealenet.relay.server import RelayServer

HOST = Signer.from_seed(b"h" * 32)
EPOCH = 1.8e9  # seconds


def deterministic_bytes(seed: bytes) -> Callable[[int], bytes]:
    """Return a source of chance that never says the same twice."""
    count = 0

    def draw(size: int) -> bytes:
        nonlocal count
        count += 1
        return b"".join(
            sha256(seed + bytes([count % 256, count // 256, part])).digest()
            for part in range(size // 32 + 1)
        )[:size]

    return draw


def coordinator_side(
    config: Config | None = None,
    admission: AdmissionCheck | None = None,
    signer: Signer = HOST,
) -> TealeLocalNode:
    """Return a coordinator's side."""
    given = setting(1, admission)
    given = replace(
        given,
        identity=signer,
        random_bytes=deterministic_bytes(signer.public_key),
        epoch=EPOCH,
        name="host",
    )
    return coordinator_node(config or Config(), given)


@dataclass
class ShoalNode:
    """A node of ours, and all that was heard of it."""

    link: int
    node: RelayNode
    heard: list[PeerMessage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    closed: str | None = None

    def words(self, kind: type, peer: str | None = None) -> list[Any]:
        """Return what was heard of a kind, from a peer or from all of them."""
        return [
            each.message
            for each in self.heard
            if isinstance(each.message, kind) and peer in (None, each.peer)
        ]


@dataclass
class ForeignNode:
    """A node that is not ours: it says what a test wants it to."""

    link: int
    inbox: list[dict[str, Any]] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the payloads of the messages of a kind that it got."""
        return [each[kind] for each in self.inbox if kind in each]


class Network:
    """A relay and whoever is connected to it."""

    def __init__(self, signer: Signer = HOST) -> None:
        given = replace(
            setting(),
            identity=signer,
            random_bytes=deterministic_bytes(b"relay"),
            epoch=EPOCH,
        )
        self.relay = RelayServer(given)
        self.now = 0.0
        self.carried: list[str] = []  # all that nodes said to the relay
        self._links = 0
        self._ends: dict[int, ShoalNode | ForeignNode] = {}
        self._to_relay: deque[tuple[int, Data]] = deque()

    def attach(self, own: TealeLocalNode, **options: Any) -> ShoalNode:
        """Connect a node of ours."""
        end = ShoalNode(self._link(), RelayNode(own, self.now, **options))
        self._ends[end.link] = end
        self._out(end, end.node.tick(self.now))
        self.settle()
        return end

    def attach_raw(self) -> ForeignNode:
        """Connect somebody else."""
        end = ForeignNode(self._link())
        self._ends[end.link] = end
        return end

    def detach(self, end: ShoalNode | ForeignNode) -> None:
        """Cut a connection."""
        del self._ends[end.link]
        self._route(self.relay.link_closed(end.link, self.now))
        self.settle()

    def say(self, end: ForeignNode, kind: str, payload: object) -> None:
        """Let somebody else say something."""
        self._to_relay.append((end.link, json.dumps({kind: payload})))
        self.settle()

    def tell(self, end: ShoalNode, peer: str, word: Event | Command) -> None:
        """Let a node of ours say something."""
        self._out(end, end.node.send(ToPeer(peer, word), self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver everything that is on its way."""
        while True:
            while self._to_relay:
                link, data = self._to_relay.popleft()
                self.carried.append(str(data))
                self._route(self.relay.receive(link, [data], self.now))
            if not self._tick():
                return

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while True:
            self.settle()
            due = [each for each in self._deadlines() if each <= until]
            if not due:
                break
            self.now = max(self.now, min(due))
        self.now = until
        self.settle()

    def _link(self) -> int:
        self._links += 1
        self._route(
            self.relay.link_opened(
                self._links, UpgradeRequest("/ws", address="here"), self.now
            )
        )
        return self._links

    def _nodes(self) -> list[ShoalNode]:
        return [each for each in self._ends.values() if isinstance(each, ShoalNode)]

    def _deadlines(self) -> list[float]:
        times = [self.relay.deadline, *(each.node.deadline for each in self._nodes())]
        return [each for each in times if each is not None]

    def _tick(self) -> bool:
        acted = False
        for end in self._nodes():
            due = end.node.deadline
            if due is not None and due <= self.now:
                self._out(end, end.node.tick(self.now))
                acted = True
        due = self.relay.deadline
        if due is not None and due <= self.now:
            self._route(self.relay.tick(self.now))
            acted = True
        return acted

    def _out(self, end: ShoalNode, outputs: Iterable[object]) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    self._to_relay.append((end.link, data))
                case Close(reason):
                    end.closed = reason
                case Notice(text):
                    end.notices.append(text)
                case PeerMessage():
                    end.heard.append(output)
                case _:
                    raise AssertionError(output)

    def _route(self, outputs: Iterable[RelaySend | RelayBroadcast]) -> None:
        for output in outputs:
            if isinstance(output, RelayBroadcast):
                for link, start in output.links:
                    for data in output.messages[start:]:
                        self._deliver(link, data)
            elif output.close:
                end = self._ends.pop(output.link, None)
                if isinstance(end, ForeignNode):
                    end.closed = (output.close, str(output.data))
                elif end is not None:
                    end.closed = str(output.data)
            else:
                self._deliver(output.link, output.data)

    def _deliver(self, link: int, data: Data) -> None:
        end = self._ends.get(link)
        if isinstance(end, ForeignNode):
            end.inbox.append(json.loads(data))
        elif end is not None:
            self._out(end, end.node.receive([data], self.now))
