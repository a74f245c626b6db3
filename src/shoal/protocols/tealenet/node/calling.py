"""Which other nodes are called on, when, and whose calls are taken.

A coordinator calls on whoever has models for it; a worker calls on the coordinator that
a relay of ours belongs to, and works for nobody else there.  On any other relay it is
called on, like any node.  Who does not answer is called on again, later each time.
"""

from shoal.protocols.session import Notice, Send
from shoal.protocols.tealenet.node.guest import Guest
from shoal.protocols.tealenet.node.guests import Guests, Heard
from shoal.protocols.tealenet.node.known import Acquaintance, Directory
from shoal.protocols.tealenet.node.sessions import SESSIONS_MAX, Sessions
from shoal.protocols.tealenet.node.talk import Talk
from shoal.protocols.tealenet.node.timetable import Timetable
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.peer import Breed
from shoal.protocols.tealenet.relay.messages import Offer, RelayOpen

SESSIONS_OF_PEER_MAX = 256
CALLS_MAX = 50  # peers that are called on at once
CALLS_EVERY = 1.0  # seconds from one such lot to the next


class Calling:
    """Who is called on.  ``host`` is the coordinator of the relay, once it is known.

    Guests come up in ``times`` when they are to be called on or forgotten.
    """

    def __init__(
        self,
        own: Ourselves,
        sessions: Sessions,
        directory: Directory,
        guests: Guests,
        times: Timetable[Talk | Guest],
    ) -> None:
        self._own = own
        self._sessions = sessions
        self._directory = directory
        self._guests = guests
        self._times = times
        self._host: str | None = None
        self.look_at: float | None = None

    @property
    def looks(self) -> bool:
        """Whether it matters to us who is on the relay."""
        return self._own.role is Role.COORDINATOR or self._host is None

    def hosted(self, node_id: str, now: float) -> list[Heard]:
        """Take note of whose relay this is."""
        self._host = node_id
        return self.look(now)

    def look(self, now: float) -> list[Heard]:
        """Look at who is there, and call on those who are worth it."""
        self.look_at = None
        nodes = {node.id: node for node in self._directory.all()}
        if self._host is not None:
            nodes[self._host] = self._directory.of(self._host)
        outputs: list[Heard] = []
        calls = 0
        for node in nodes.values():
            outputs += self._guests.describe(node, now)
            if not self._is_due(node, now):
                continue
            if calls < CALLS_MAX and len(self._sessions) < SESSIONS_MAX:
                outputs.append(self._call(node, now))
                calls += 1
            else:
                self.look_at = now + CALLS_EVERY
        return outputs

    def wake(self, guest: Guest, now: float) -> list[Heard]:
        """Call on a peer again that has no session with us, or forget it."""
        if self._guests.find(guest.id) is not guest or guest.talks:
            return []
        outputs: list[Heard] = []
        if now >= guest.leave_at:
            outputs += guest.go("it has no session with us any more")
        node = self._directory.of(guest.id)
        if self._is_due(node, now) and len(self._sessions) < SESSIONS_MAX:
            outputs.append(self._call(node, now))
        elif guest.call_at > now:
            self._times.set(guest, guest.call_at)
        elif guest.met:
            self._times.set(guest, guest.leave_at)
        elif not self._wants(node):
            self._guests.forget(guest)
        else:
            self.look_at = now + CALLS_EVERY
        return outputs

    def opened(self, message: RelayOpen, now: float) -> list[Heard]:
        """Take a session that a peer opens; one that is open already is still ready."""
        peer_id, session_id = message.from_node_id, message.session_id
        talk = self._sessions.find(session_id)
        if talk is not None and talk.peer_id != peer_id:
            return [Notice("a session was opened under the id of another's")]
        ready = self._sessions.ready(peer_id, session_id)
        if talk is not None:
            return [ready]
        if not self._takes(peer_id, session_id):
            return [self._sessions.close(peer_id, session_id)]
        node = self._directory.of(peer_id)
        self._guests.begin(self._sessions.take(node, session_id, now))
        return [ready, *self._guests.make_room(now)]

    def offered(self, message: Offer) -> list[Heard]:
        """Answer a peer that would rather connect directly."""
        if not self._takes(message.from_node_id, message.session_id):
            return []
        return [self._sessions.answer(message)]

    # Private parts, in the order in which they are called.

    def _is_due(self, node: Acquaintance, now: float) -> bool:
        if node.id == self._sessions.id or not self._wants(node):
            return False
        guest = self._guests.find(node.id)
        return guest is None or (not guest.called and guest.call_at <= now)

    def _wants(self, node: Acquaintance) -> bool:
        """Say whether a node is one to call on."""
        if self._own.role is Role.WORKER:
            return node.id == self._host
        if node.breed is not Breed.OURS:
            return node.described.available and bool(node.described.models)
        if node.role == Role.WORKER.value:
            return self._host is None  # else it calls on its coordinator
        # Of two coordinators one calls, and not who would show its passcode to anybody.
        return (
            node.role == Role.COORDINATOR.value
            and self._sessions.id > node.id
            and self._own.passcode is None
        )

    def _call(self, node: Acquaintance, now: float) -> Send:
        talk, opening = self._sessions.call(node, now)
        self._guests.begin(talk)
        return opening

    def _takes(self, peer_id: str, session_id: str) -> bool:
        if not self.looks and peer_id != self._host:
            return False
        guest = self._guests.find(peer_id)
        few = guest is None or len(guest.talks) < SESSIONS_OF_PEER_MAX
        return few and self._sessions.takes(peer_id, session_id)
