"""The sessions that nodes have opened to each other through a relay."""

from collections import Counter
from dataclasses import dataclass

from shoal.protocols.tealenet.codec.relay_envelope import BadRelayMessage
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.nodes import NodeRecord


@dataclass(slots=True, eq=False)
class RoutedSession:
    """A session between two nodes; ``id`` is as the opener wrote it."""

    id: str
    opener: NodeRecord
    other: NodeRecord

    def other_end(self, node: NodeRecord) -> NodeRecord | None:
        """Return the other end's node; None if ``node`` is at neither end."""
        if node is self.opener:
            return self.other
        return self.opener if node is self.other else None


class RoutedSessions:
    """All open sessions, by their ids without regard to case.

    An id belongs to one pair of nodes.  Some peers identify a session by its id alone,
    so a third node that knows the id must not be able to send into the session.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._by_id: dict[str, RoutedSession] = {}
        self._of_node: dict[NodeRecord, set[RoutedSession]] = {}
        self._of_address = Counter[str]()  # by the opener's

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, session_id: str, opener: NodeRecord, other: NodeRecord) -> None:
        """Open a session, if these nodes have not opened it already.

        Raises BadRelayMessage if other nodes have this id, or at a limit.
        """
        key = session_id.lower()
        session = self._by_id.get(key)
        if session is not None:
            # Nodes that reconnect open their sessions again.
            if session.other_end(opener) is other:
                return
            raise BadRelayMessage(
                "session_taken",
                "sessionID: other nodes use this id; choose a random UUID",
            )
        if opener.opened_sessions >= self._limits.sessions_per_node:
            raise BadRelayMessage(
                "too_many_sessions",
                f"{opener.opened_sessions} sessions are open; end some with relayClose",
            )
        of_address = self._of_address[opener.address]
        if of_address >= self._limits.sessions_per_address:
            raise BadRelayMessage(
                "too_many_sessions",
                f"{of_address} sessions are open from your address; end some with "
                "relayClose",
            )
        if len(self._by_id) >= self._limits.sessions:
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more sessions; try again later"
            )
        self._by_id[key] = session = RoutedSession(session_id, opener, other)
        opener.opened_sessions += 1
        self._of_address[opener.address] += 1
        for end in (opener, other):
            self._of_node.setdefault(end, set()).add(session)

    def is_open(
        self, session_id: str, node: NodeRecord, other: NodeRecord | None
    ) -> bool:
        """Return whether these nodes have the session open."""
        session = self._by_id.get(session_id) or self._by_id.get(session_id.lower())
        return (
            session is not None
            and other is not None
            and session.other_end(node) is other
        )

    def close(self, session_id: str) -> None:
        """Close an open session."""
        self._remove(self._by_id[session_id.lower()])

    def close_all(self, node: NodeRecord) -> list[RoutedSession]:
        """Close all sessions of a node, and return them."""
        closed = list(self._of_node.get(node, ()))
        for session in closed:
            self._remove(session)
        return closed

    def _remove(self, session: RoutedSession) -> None:
        del self._by_id[session.id.lower()]
        opener = session.opener
        opener.opened_sessions -= 1
        self._of_address[opener.address] -= 1
        if not self._of_address[opener.address]:
            del self._of_address[opener.address]
        for end in (session.opener, session.other):
            of_node = self._of_node[end]
            of_node.discard(session)
            if not of_node:
                del self._of_node[end]
