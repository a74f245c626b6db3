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
from shoal.protocols.crowd import Carried, From, Spread, To
from shoal.protocols.session import Admission, Close, Data, Hello, Notice, Send
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.node.node import Node
from shoal.protocols.tealenet.ourselves import Ourselves, coordinator
from shoal.protocols.tealenet.relay.relay import Relay

HOST = Signer.from_seed(b"h" * 32)
EPOCH = 1.8e9  # seconds


def drawn(seed: bytes) -> Callable[[int], bytes]:
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


def own_side(
    config: Config | None = None,
    admission: Admission | None = None,
    signer: Signer = HOST,
) -> Ourselves:
    """Return a coordinator's side."""
    given = setting(1, admission)
    given = replace(
        given, identity=signer, draw=drawn(signer.public_key), epoch=EPOCH, name="host"
    )
    return coordinator(config or Config(), given)


@dataclass
class Attached:
    """A node of ours, and all that was heard of it."""

    link: int
    node: Node
    heard: list[From] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    closed: str | None = None

    def words(self, kind: type, peer: str | None = None) -> list[Any]:
        """Return what was heard of a kind, from a peer or from all of them."""
        return [
            each.word
            for each in self.heard
            if isinstance(each.word, kind) and peer in (None, each.peer)
        ]


@dataclass
class Raw:
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
        given = replace(setting(), identity=signer, draw=drawn(b"relay"), epoch=EPOCH)
        self.relay = Relay(given)
        self.now = 0.0
        self.carried: list[str] = []  # all that nodes said to the relay
        self._links = 0
        self._ends: dict[int, Attached | Raw] = {}
        self._to_relay: deque[tuple[int, Data]] = deque()

    def attach(self, own: Ourselves, **options: Any) -> Attached:
        """Connect a node of ours."""
        end = Attached(self._link(), Node(own, self.now, **options))
        self._ends[end.link] = end
        self._out(end, end.node.tick(self.now))
        self.settle()
        return end

    def attach_raw(self) -> Raw:
        """Connect somebody else."""
        end = Raw(self._link())
        self._ends[end.link] = end
        return end

    def detach(self, end: Attached | Raw) -> None:
        """Cut a connection."""
        del self._ends[end.link]
        self._route(self.relay.gone(end.link, self.now))
        self.settle()

    def say(self, end: Raw, kind: str, payload: object) -> None:
        """Let somebody else say something."""
        self._to_relay.append((end.link, json.dumps({kind: payload})))
        self.settle()

    def tell(self, end: Attached, peer: str, word: Event | Command) -> None:
        """Let a node of ours say something."""
        self._out(end, end.node.issue(To(peer, word), self.now))
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
            self.relay.connected(self._links, Hello("/ws", address="here"), self.now)
        )
        return self._links

    def _nodes(self) -> list[Attached]:
        return [each for each in self._ends.values() if isinstance(each, Attached)]

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

    def _out(self, end: Attached, outputs: Iterable[object]) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    self._to_relay.append((end.link, data))
                case Close(reason):
                    end.closed = reason
                case Notice(text):
                    end.notices.append(text)
                case From():
                    end.heard.append(output)
                case _:
                    raise AssertionError(output)

    def _route(self, outputs: Iterable[Carried | Spread]) -> None:
        for output in outputs:
            if isinstance(output, Spread):
                for link, start in output.links:
                    for data in output.messages[start:]:
                        self._deliver(link, data)
            elif output.close:
                end = self._ends.pop(output.link, None)
                if isinstance(end, Raw):
                    end.closed = (output.close, str(output.data))
                elif end is not None:
                    end.closed = str(output.data)
            else:
                self._deliver(output.link, output.data)

    def _deliver(self, link: int, data: Data) -> None:
        end = self._ends.get(link)
        if isinstance(end, Raw):
            end.inbox.append(json.loads(data))
        elif end is not None:
            self._out(end, end.node.receive([data], self.now))
