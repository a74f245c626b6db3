"""Which nodes a relay knows, from their registration until they are gone."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import UNSET

from shoal.protocols.crowd import Carried, Spread
from shoal.protocols.session import Setting
from shoal.protocols.tealenet.relay.envelope import BadRelayMessage, write
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.lines import Line, Lines, told, told_to_wait
from shoal.protocols.tealenet.relay.messages import (
    Discover,
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
from shoal.protocols.tealenet.relay.news import News
from shoal.protocols.tealenet.relay.nodes import (
    About,
    Node,
    about,
    check_proof,
    check_signature,
    found,
    knows_extension,
    read_registration,
)
from shoal.protocols.tealenet.relay.sessions import Sessions
from shoal.protocols.tealenet.wire.proving import noise_fields

SINCE_2001 = -978_307_200.0  # seconds to add to Unix time for the wire's own
CHALLENGE_SIZE = 32  # bytes

REPLACED = (1012, "Replaced by newer session")  # as real relays have it
UNREGISTERED = (1008, "nobody registered in time")

Output: TypeAlias = Carried | Spread


class Registry:
    """The nodes by their ids, and the news of them.

    With a node go its sessions.
    """

    def __init__(
        self, setting: Setting, limits: RelayLimits, lines: Lines, sessions: Sessions
    ) -> None:
        self._setting = setting
        self._limits = limits
        self._lines = lines
        self._sessions = sessions
        identity = setting.identity
        self._host = Host(identity.public_key.hex(), *noise_fields(identity))
        self._epoch = setting.epoch + SINCE_2001
        self._kept = 0  # bytes, about
        self.nodes: dict[str, Node] = {}
        self.news = News(self.nodes.values())

    def register(
        self, line: Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        """Register a node, again or at last, or ask it for a proof.

        Raises BadRelayMessage.
        """
        if wait := line.registrations.take_one(now):
            return (told_to_wait(line, "registrations", wait),)
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

    def discover(
        self, line: Line, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[Output]:
        """Say who is there.  Raises BadRelayMessage."""
        asker = line.registered
        if wait := line.questions.take_one(now):
            return (told_to_wait(line, "questions", wait),)
        # Who asks is known: what it calls itself does not matter.
        message = read(kind, {**payload, "requestingNodeID": asker.id})
        assert isinstance(message, Discover), "this is what that kind is read as"
        # Each question may lead to a look at all nodes, and those who ask from one
        # address may be many as well.
        if wait := line.origin.looks.take_if(len(self.nodes), now):
            return (told_to_wait(line, "questions", wait),)
        first = int.from_bytes(self._setting.draw(8)) % len(self.nodes)
        peers = found(
            self.nodes, asker, message.filter, self._limits, first, self._epoch
        )
        return (Carried(line.link, write("discoverResponse", {"peers": peers})),)

    def leave(self, node: Node, now: float) -> Sequence[Output]:
        """Forget a node and tell the others."""
        del self.nodes[node.id]
        self._kept -= node.about.cost
        self.news.add(encode(PeerLeft(node.id, node.about.name)), now)
        return self._end_sessions(node)

    def sweep(self, now: float) -> Sequence[Output]:
        """Have those go who never registered, and those who are not heard of."""
        outputs: list[Output] = []
        for line in self._lines:
            node = line.node
            if node is None:
                if now - line.since >= self._limits.to_register:
                    self._lines.remove(line)
                    code, why = UNREGISTERED
                    outputs.append(Carried(line.link, why, code))
            elif now - node.heard >= self._limits.to_live:
                line.node, line.since = None, now
                outputs += self.leave(node, now)
                why = "Nothing was heard for too long; register again"
                outputs.append(told(line, "registration_expired", why))
        return outputs

    # Private parts, in the order in which they are called.

    def _enter(
        self, line: Line, node_id: str, said: About, now: float, *, proven: bool
    ) -> Sequence[Output]:
        """Let a node in, or let it say something else of itself."""
        node = line.node
        holder = self.nodes.get(node_id)
        if node is None and holder is not None and holder.proven and not proven:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: registered by a node that has proved its key, which can only "
                "be replaced by one that does so",
            )
        kept = self._kept + said.cost - (holder.about.cost if holder else 0)
        if kept > self._limits.kept or (
            holder is None and len(self.nodes) >= self._limits.nodes
        ):
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more nodes; try again later"
            )
        self._kept = kept
        if node is not None:
            node.about, node.proven = said, proven
            return ()
        line.node = self.nodes[node_id] = node = Node(
            node_id, line.link, said, now, proven, line.origin.address
        )
        if holder is None:
            self.news.add(encode(PeerJoined(node_id, said.name)), now)
            self.news.skip(node)
            return ()
        node.told = holder.told
        code, why = REPLACED
        older = self._lines.of(holder.link)
        assert older is not None, "with its line a node goes"
        self._lines.remove(older)
        return [*self._end_sessions(holder), Carried(holder.link, why, code)]

    def _acknowledge(self, link: int, node_id: str, said: About, now: float) -> Output:
        lifetime = int(self._limits.to_live)
        host = self._host if said.extended else UNSET
        ack = RegisterAck(node_id, self._epoch + now, lifetime, host)
        return Carried(link, encode(ack))

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
