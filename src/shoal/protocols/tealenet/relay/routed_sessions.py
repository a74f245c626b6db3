"""The sessions that nodes have opened to each other through a relay."""

from collections import Counter
from dataclasses import dataclass

from shoal.protocols.tealenet.codec.relay_envelope import BadRelayMessage
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.nodes import NodeRecord


@dataclass(slots=True, eq=False)
class RoutedSession:
    """What two nodes say to each other under one id, as the opener wrote that."""

    id: str
    opener: NodeRecord
    other: NodeRecord

    def other_end(self, node: NodeRecord) -> NodeRecord | None:
        """Return who is at the other end; None if the node is at neither."""
        if node is self.opener:
            return self.other
        return self.opener if node is self.other else None


class RoutedSessions:
    """All open sessions.  Their ids differ in more than case.

    An id belongs to one pair of nodes, for there are readers that go by the id alone:
    a third that has learnt it must not get anything in.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._by_id: dict[str, RoutedSession] = {}
        self._of_node: dict[NodeRecord, set[RoutedSession]] = {}
        self._of_address = Counter[str]()  # by the opener's

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, session_id: str, opener: NodeRecord, other: NodeRecord) -> None:
        """Open a session, or find that these two have it open.

        Raises BadRelayMessage if others have, or there are too many.
        """
        key = session_id.lower()
        session = self._by_id.get(key)
        if session is not None:
            # Nodes that have been cut off open what they had again.
            if session.other_end(opener) is other:
                return
            raise BadRelayMessage(
                "session_taken",
                "sessionID: others have a session of this id; choose a random UUID",
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
        """Say whether these two have the session open."""
        session = self._by_id.get(session_id) or self._by_id.get(session_id.lower())
        return (
            session is not None
            and other is not None
            and session.other_end(node) is other
        )

    def close(self, session_id: str) -> None:
        """End a session that is open."""
        self._remove(self._by_id[session_id.lower()])

    def close_all(self, node: NodeRecord) -> list[RoutedSession]:
        """End all sessions of a node; return them."""
        ended = list(self._of_node.get(node, ()))
        for session in ended:
            self._remove(session)
        return ended

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
