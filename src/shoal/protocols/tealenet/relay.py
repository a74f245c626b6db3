"""The relay: nodes register, find each other, and talk through it.

Source: the TealeNet document, and what real relays do; see
``docs/protocols/tealenet.md``.  Unlike those it believes nobody: an id is that of
whoever has its key, a sender is who it says, and a session is between the two that have
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeAlias

from msgspec import UNSET

from shoal.protocols.crowd import Carried, Spread
from shoal.protocols.session import Data, Hello, Setting
from shoal.protocols.tealenet.proving import noise_fields
from shoal.protocols.tealenet.relay_data import check_data
from shoal.protocols.tealenet.relay_envelope import (
    SHOWN_MAX,
    BadRelayMessage,
    open_envelope,
    write,
)
from shoal.protocols.tealenet.relay_limits import Bucket, RelayLimits
from shoal.protocols.tealenet.relay_messages import (
    Discover,
    Error,
    Host,
    PeerJoined,
    PeerLeft,
    Proof,
    RegisterAck,
    RegisterChallenge,
    RelayClose,
    encode,
    read,
)
from shoal.protocols.tealenet.relay_nodes import (
    About,
    Node,
    about,
    check_proof,
    check_signature,
    found,
    knows_extension,
    read_registration,
)
from shoal.protocols.tealenet.relay_sessions import Sessions

SINCE_2001 = -978_307_200.0  # seconds to add to Unix time for the wire's own
CHALLENGE_SIZE = 32  # bytes
NEWS_AFTER = 0.02  # seconds for which news are gathered: each link has one write then
NEWS_AFTER_EACH = 0.0001  # seconds for each node, where there are many to be told
NEWS_MAX = 1024  # news that are gathered before they are told at once
TOLD_AT_ONCE = 500  # links, so that other messages get their turn
SWEEP_EVERY = 5.0  # seconds between looks for who has to go

REPLACED = (1012, "Replaced by newer session")  # as real relays have it
UNREGISTERED = (1008, "nobody registered in time")
CROWDED = (1013, "too many connections: try again later")

LIMITS = RelayLimits()

Output: TypeAlias = Carried | Spread


@dataclass(slots=True, eq=False)
class _Line:
    """A link, and what it has left of what it may do.  ``since`` it has no node."""

    link: int
    address: str
    since: float
    messages: Bucket
    size: Bucket
    openings: Bucket
    questions: Bucket
    registrations: Bucket
    node: Node | None = None
    challenge: str = ""
    read_at: float = 0.0  # when it may be read from again


@dataclass(slots=True)
class _News:
    """Who came and left.

    ``telling`` is being told to those ``waiting``; ``texts`` are next.
    """

    texts: list[str] = field(default_factory=list)
    telling: tuple[str, ...] = ()
    waiting: list[tuple[int, int]] = field(default_factory=list)
    due: float | None = None


class Relay:
    """A Switch between nodes."""

    def __init__(self, setting: Setting, limits: RelayLimits = LIMITS) -> None:
        self._setting = setting
        self._limits = limits
        identity = setting.identity
        self._host = Host(identity.public_key.hex(), *noise_fields(identity))
        self._epoch = setting.epoch + SINCE_2001
        self._lines: dict[int, _Line] = {}
        self._of_address: dict[str, int] = {}
        self._nodes: dict[str, Node] = {}
        self._kept = 0  # bytes, about
        self._sessions = Sessions(limits)
        self._news = _News()
        self._sweep_due: float | None = None
        self._handlers: Mapping[str, _Handler] = {
            "register": self._register,
            "discover": self._discover,
            "offer": self._signal,
            "answer": self._signal,
            "iceCandidate": self._signal,
            "relayOpen": self._open,
            "relayReady": self._pass_on,
            "relayData": self._pass_on,
            "relayClose": self._close,
        }

    def connected(self, link: int, hello: Hello, now: float) -> Sequence[Output]:
        limits, address = self._limits, hello.address
        count = self._of_address.get(address, 0)
        if len(self._lines) >= limits.links or count >= limits.links_of_address:
            code, why = CROWDED
            return (Carried(link, why, code),)
        self._of_address[address] = count + 1
        self._lines[link] = _Line(
            link,
            address,
            now,
            Bucket.full(limits.messages, now),
            Bucket.full(limits.size, now),
            Bucket.full(limits.openings, now),
            Bucket.full(limits.questions, now),
            Bucket.full(limits.registrations, now),
        )
        if self._sweep_due is None:
            self._sweep_due = now + SWEEP_EVERY
        return ()

    def receive(self, link: int, batch: Sequence[Data], now: float) -> Sequence[Output]:
        line = self._lines.get(link)
        if line is None:
            return ()  # it is being closed
        size = sum(map(len, batch))
        wait = max(line.messages.take(len(batch), now), line.size.take(size, now))
        if wait:
            line.read_at = now + min(wait, self._limits.pause_max)
        if line.node is not None:
            line.node.heard = now
        outputs: list[Output] = []
        for data in batch:
            try:
                kind, payload = open_envelope(data)
                handler = self._handlers.get(kind, _unsupported)
                outputs += handler(line, kind, payload, now)
            except BadRelayMessage as error:
                outputs.append(_error(link, error.code, str(error)))
        return outputs

    def gone(self, link: int, now: float) -> Sequence[Output]:
        line = self._lines.get(link)
        if line is None:
            return ()
        self._forget(line)
        return self._leave(line.node, now) if line.node is not None else ()

    def pause(self, link: int, now: float) -> float:
        line = self._lines.get(link)
        return line.read_at - now if line is not None else 0.0

    @property
    def deadline(self) -> float | None:
        news, sweep = self._news.due, self._sweep_due
        return sweep if news is None or (sweep is not None and sweep < news) else news

    def tick(self, now: float) -> Sequence[Output]:
        outputs: list[Output] = []
        if self._sweep_due is not None and now >= self._sweep_due:
            outputs += self._sweep(now)
            self._sweep_due = now + SWEEP_EVERY if self._lines else None
        if self._news.due is not None and now >= self._news.due:
            outputs += self._tell(now)
        return outputs

    # What each kind of message leads to; all raise BadRelayMessage.

    def _register(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        if wait := line.registrations.take_one(now):
            return (_later(line, "registrations", wait),)
        message = read_registration(payload)
        before = line.node
        if before is not None and before.id != message.node_id:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: another one is registered on this connection; use one "
                "connection for each",
            )
        verifies = self._setting.verifies
        if before is None or before.about.signature != message.signature:
            check_signature(message, verifies)
        proven = before is not None and before.proven
        if not isinstance(message.shoal, Proof):
            if not proven and knows_extension(message.capabilities):
                # The signature may be a copy: it is the same each time.
                line.challenge = (
                    line.challenge or self._setting.draw(CHALLENGE_SIZE).hex()
                )
                challenge = RegisterChallenge(line.challenge)
                return (Carried(line.link, encode(challenge)),)
        else:
            check_proof(message, message.shoal, line.challenge, verifies)
            proven = True
        said = about(message, self._limits)
        return [
            *self._enter(line, message.node_id, said, now, proven=proven),
            self._acknowledge(line.link, message.node_id, said, now),
        ]

    def _discover(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        asker = _registered(line)
        if wait := line.questions.take_one(now):
            return (_later(line, "questions", wait),)
        # Who asks is known: what it calls itself does not matter.
        message = read(kind, {**payload, "requestingNodeID": asker.id})
        assert isinstance(message, Discover), "this is what that kind is read as"
        first = int.from_bytes(self._setting.draw(8)) % len(self._nodes)
        peers = found(
            self._nodes, asker, message.filter, self._limits, first, self._epoch
        )
        return (Carried(line.link, write("discoverResponse", {"peers": peers})),)

    def _signal(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        _, other, _ = self._ends(line, kind, payload)
        if wait := line.openings.take_one(now):
            return (_later(line, "offers", wait),)
        return (Carried(other.link, write(kind, payload)),)

    def _open(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        node, other, session_id = self._ends(line, kind, payload)
        if wait := line.openings.take_one(now):
            return (_later(line, "sessions", wait),)
        self._sessions.open(session_id, node, other)
        return (Carried(other.link, write(kind, payload)),)

    def _pass_on(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        node, other, session_id = self._ends(line, kind, payload)
        if not self._sessions.between(session_id, node, other):
            raise BadRelayMessage(
                "session_not_found",
                f"{kind}: no session of this sessionID is open between these two; "
                "open one with relayOpen",
            )
        if kind == "relayData":
            check_data(payload.get("data"))
        return (Carried(other.link, write(kind, payload)),)

    def _close(
        self, line: _Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        try:
            node, other, session_id = self._ends(line, kind, payload)
        except _NotConnected:
            return ()  # with the peer the session went
        if not self._sessions.between(session_id, node, other):
            return ()  # both ends may have closed it at once
        self._sessions.close(session_id)
        return (Carried(other.link, write(kind, payload)),)

    # Who is there.

    def _enter(
        self, line: _Line, node_id: str, said: About, now: float, *, proven: bool
    ) -> Sequence[Output]:
        """Let a node in, or let it say something else of itself."""
        node = line.node
        holder = self._nodes.get(node_id)
        if node is None and holder is not None and holder.proven and not proven:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: registered by a node that has proved its key, which can only "
                "be replaced by one that does so",
            )
        kept = self._kept + said.cost - (holder.about.cost if holder else 0)
        if kept > self._limits.kept or (
            holder is None and len(self._nodes) >= self._limits.nodes
        ):
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more nodes; try again later"
            )
        self._kept = kept
        if node is not None:
            node.about, node.proven = said, proven
            return ()
        line.node = self._nodes[node_id] = node = Node(
            node_id, line.link, said, now, proven
        )
        if holder is None:
            self._announce(encode(PeerJoined(node_id, said.name)), now)
            node.told = len(self._news.texts)
            return ()
        node.told = holder.told
        code, why = REPLACED
        self._forget(self._lines[holder.link])
        return [*self._end_sessions(holder), Carried(holder.link, why, code)]

    def _acknowledge(self, link: int, node_id: str, said: About, now: float) -> Output:
        lifetime = int(self._limits.to_live)
        host = self._host if said.extended else UNSET
        ack = RegisterAck(node_id, self._epoch + now, lifetime, host)
        return Carried(link, encode(ack))

    def _leave(self, node: Node, now: float) -> Sequence[Output]:
        """Forget a node and tell the others."""
        del self._nodes[node.id]
        self._kept -= node.about.cost
        self._announce(encode(PeerLeft(node.id, node.about.name)), now)
        return self._end_sessions(node)

    def _end_sessions(self, node: Node) -> Sequence[Output]:
        """End a node's sessions in its name, for those who expect a relay to do that.

        A real node would take it for a reason to come back again and again.
        """
        outputs = []
        for session in self._sessions.end_all(node):
            other = session.beyond(node)
            assert other is not None, "it is one of the session's two"
            if other.about.extended:
                closing = RelayClose(node.id, other.id, session.id)
                outputs.append(Carried(other.link, encode(closing)))
        return outputs

    def _forget(self, line: _Line) -> None:
        del self._lines[line.link]
        self._of_address[line.address] -= 1
        if not self._of_address[line.address]:
            del self._of_address[line.address]

    def _sweep(self, now: float) -> Sequence[Output]:
        outputs: list[Output] = []
        for line in list(self._lines.values()):
            node = line.node
            if node is None:
                if now - line.since >= self._limits.to_register:
                    self._forget(line)
                    code, why = UNREGISTERED
                    outputs.append(Carried(line.link, why, code))
            elif now - node.heard >= self._limits.to_live:
                line.node, line.since = None, now
                outputs += self._leave(node, now)
                why = "Nothing was heard for too long; register again"
                outputs.append(_error(line.link, "registration_expired", why))
        return outputs

    # News.

    def _announce(self, text: str, now: float) -> None:
        news = self._news
        news.texts.append(text)
        if news.due is None:
            news.due = now + max(NEWS_AFTER, NEWS_AFTER_EACH * len(self._nodes))
        if len(news.texts) >= NEWS_MAX:
            news.due = now

    def _tell(self, now: float) -> Sequence[Output]:
        """Tell some of those who have yet to hear the news."""
        news = self._news
        if not news.waiting:
            news.telling, news.texts = tuple(news.texts), []
            for node in self._nodes.values():
                if node.told < len(news.telling):
                    news.waiting.append((node.link, node.told))
                node.told = 0
        now_told = news.waiting[:TOLD_AT_ONCE]
        del news.waiting[:TOLD_AT_ONCE]
        if news.waiting:
            news.due = now
        elif news.texts:
            news.due = now + max(NEWS_AFTER, NEWS_AFTER_EACH * len(self._nodes))
        else:
            news.due = None
        return (Spread(news.telling, now_told),) if now_told else ()

    def _ends(
        self, line: _Line, kind: str, payload: dict[str, Any]
    ) -> tuple[Node, Node, str]:
        """Return who says this, to whom, and in which session.

        Raises BadRelayMessage unless both are there and the sender is itself.
        """
        node = _registered(line)
        sender, target = payload.get("fromNodeID"), payload.get("toNodeID")
        session_id = payload.get("sessionID")
        if (
            type(sender) is not str
            or type(target) is not str
            or type(session_id) is not str
            or not 0 < len(session_id) <= self._limits.session_id
        ):
            raise BadRelayMessage(
                "invalid_message",
                f"{kind}: fromNodeID, toNodeID, sessionID: expected texts, the last of "
                f"1 to {self._limits.session_id} characters",
            )
        if sender != node.id:
            raise BadRelayMessage(
                "wrong_sender",
                f"{kind}: fromNodeID: another node is registered on this connection",
            )
        other = self._nodes.get(target)
        if other is None:
            raise _NotConnected(
                "peer_not_found", f"Peer {target[:SHOWN_MAX]} is not connected"
            )
        if other is node:
            raise BadRelayMessage("invalid_message", f"{kind}: toNodeID: that is you")
        return node, other, session_id


_Handler: TypeAlias = Callable[[_Line, str, dict[str, Any], float], Sequence[Output]]


class _NotConnected(BadRelayMessage):
    """The peer that is meant is not there."""


def _unsupported(
    line: _Line, kind: str, payload: dict[str, Any], now: float
) -> Sequence[Output]:
    shown = kind[:SHOWN_MAX]
    raise BadRelayMessage("unsupported_message", f"Unsupported relay message: {shown}")


def _registered(line: _Line) -> Node:
    if line.node is None:
        raise BadRelayMessage("not_registered", "Send register first")
    return line.node


def _later(line: _Line, what: str, wait: float) -> Output:
    seconds = ceil(wait)
    why = f"Too many {what}; try again in {seconds} s"
    return Carried(line.link, encode(Error("rate_limited", why, seconds)))


def _error(link: int, code: str, why: str) -> Output:
    return Carried(link, encode(Error(code, why)))
