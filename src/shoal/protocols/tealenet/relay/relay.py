"""The relay: nodes register, find each other, and talk through it.

Source: the TealeNet document, and what real relays do; see
``docs/protocols/tealenet.md``.  Unlike those it believes nobody: an id is that of
whoever has its key, a sender is who it says, and a session is between the two that have
it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.protocols.crowd import Carried
from shoal.protocols.session import Data, Hello, Setting
from shoal.protocols.tealenet.relay.data import check_data
from shoal.protocols.tealenet.relay.envelope import (
    SHOWN_MAX,
    BadRelayMessage,
    open_envelope,
    write,
)
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.lines import Line, Lines, told, told_to_wait
from shoal.protocols.tealenet.relay.nodes import Node
from shoal.protocols.tealenet.relay.registry import Output, Registry
from shoal.protocols.tealenet.relay.sessions import Sessions

SWEEP_EVERY = 5.0  # seconds between looks for who has to go

CROWDED = (1013, "too many connections: try again later")

LIMITS = RelayLimits()


class Relay:
    """A Switch between nodes."""

    def __init__(self, setting: Setting, limits: RelayLimits = LIMITS) -> None:
        self._limits = limits
        self._lines = Lines(limits)
        self._sessions = Sessions(limits)
        self._registry = Registry(setting, limits, self._lines, self._sessions)
        self._sweep_due: float | None = None
        self._handlers: Mapping[str, _Handler] = {
            "register": self._registry.register,
            "discover": self._registry.discover,
            "offer": self._signal,
            "answer": self._signal,
            "iceCandidate": self._signal,
            "relayOpen": self._open,
            "relayReady": self._pass_on,
            "relayData": self._pass_on,
            "relayClose": self._close,
        }

    def connected(self, link: int, hello: Hello, now: float) -> Sequence[Output]:
        if not self._lines.add(link, hello.address, now):
            code, why = CROWDED
            return (Carried(link, why, code),)
        if self._sweep_due is None:
            self._sweep_due = now + SWEEP_EVERY
        return ()

    def receive(self, link: int, batch: Sequence[Data], now: float) -> Sequence[Output]:
        line = self._lines.of(link)
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
                outputs.append(told(line, error.code, str(error)))
        return outputs

    def address_of(self, node_id: str) -> str:
        """Return where a node comes from; empty if it is not there."""
        node = self._registry.nodes.get(node_id)
        line = None if node is None else self._lines.of(node.link)
        return "" if line is None else line.origin.address

    def gone(self, link: int, now: float) -> Sequence[Output]:
        line = self._lines.of(link)
        if line is None:
            return ()
        self._lines.remove(line)
        return () if line.node is None else self._registry.leave(line.node, now)

    def pause(self, link: int, now: float) -> float:
        line = self._lines.of(link)
        return line.read_at - now if line is not None else 0.0

    @property
    def deadline(self) -> float | None:
        news, sweep = self._registry.news.due, self._sweep_due
        return sweep if news is None or (sweep is not None and sweep < news) else news

    def tick(self, now: float) -> Sequence[Output]:
        outputs: list[Output] = []
        if self._sweep_due is not None and now >= self._sweep_due:
            outputs += self._registry.sweep(now)
            self._sweep_due = now + SWEEP_EVERY if self._lines else None
        news = self._registry.news
        if news.due is not None and now >= news.due:
            outputs += news.tell(now)
        return outputs

    # What each kind of message leads to; all raise BadRelayMessage.

    def _signal(
        self, line: Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        _, other, _ = self._ends(line, kind, payload)
        if wait := line.openings.take_one(now):
            return (told_to_wait(line, "offers", wait),)
        return (Carried(other.link, write(kind, payload)),)

    def _open(
        self, line: Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        node, other, session_id = self._ends(line, kind, payload)
        if wait := line.openings.take_one(now):
            return (told_to_wait(line, "sessions", wait),)
        self._sessions.open(session_id, node, other)
        return (Carried(other.link, write(kind, payload)),)

    def _pass_on(
        self, line: Line, kind: str, payload: dict[str, Any], now: float
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
        self, line: Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        try:
            node, other, session_id = self._ends(line, kind, payload)
        except _NotConnected:
            return ()  # with the peer the session went
        if not self._sessions.between(session_id, node, other):
            return ()  # both ends may have closed it at once
        self._sessions.close(session_id)
        return (Carried(other.link, write(kind, payload)),)

    def _ends(
        self, line: Line, kind: str, payload: dict[str, Any]
    ) -> tuple[Node, Node, str]:
        """Return who says this, to whom, and in which session.

        Raises BadRelayMessage unless both are there and the sender is itself.
        """
        node = line.registered
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
        other = self._registry.nodes.get(target)
        if other is None:
            raise _NotConnected(
                "peer_not_found", f"Peer {target[:SHOWN_MAX]} is not connected"
            )
        if other is node:
            raise BadRelayMessage("invalid_message", f"{kind}: toNodeID: that is you")
        return node, other, session_id


_Handler: TypeAlias = Callable[[Line, str, dict[str, Any], float], Sequence[Output]]


class _NotConnected(BadRelayMessage):
    """The peer that is meant is not there."""


def _unsupported(
    line: Line, kind: str, payload: dict[str, Any], now: float
) -> Sequence[Output]:
    shown = kind[:SHOWN_MAX]
    raise BadRelayMessage("unsupported_message", f"Unsupported relay message: {shown}")
