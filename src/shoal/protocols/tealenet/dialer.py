"""A worker's ways into one coordinator: directly, or through its relay."""

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from shoal.protocols.as_worker import AsWorker, Stay
from shoal.protocols.crowd import CrowdSession, Outgoing
from shoal.protocols.session import Member
from shoal.protocols.tealenet.addresses import DIRECT, peer_url, ways
from shoal.protocols.tealenet.conversation import SPOKEN
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.lan import MESSAGE_MAX, lan_session
from shoal.protocols.tealenet.manners import LAN
from shoal.protocols.tealenet.node.known import Pinned
from shoal.protocols.tealenet.node.node import Node
from shoal.protocols.tealenet.ourselves import Ourselves, Role, worker
from shoal.protocols.tealenet.peer import Caller
from shoal.protocols.tealenet.wire.sharing import WORDS

AWAY = 1012  # close code: it starts again (registered with IANA, RFC 6455, section 7.4)
REPLACED = "Replaced by newer session"  # how a relay ends a node's older connection


class TealeDialer:
    """Joins one coordinator, again and again, by each of its addresses in turn.

    One at which it was let in is tried again first, and so is one at which the
    coordinator is AWAY: then it is away at the others, too.  Raises ConfigError from
    the constructor if the URL cannot be dialled.
    """

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, member: Member) -> None:
        self._stay = Stay()
        self._own = replace(worker(member), turned_away=self._turned_away)
        self._ways = ways(url, member)
        self._desk = Desk(self._own.device_id, LAN.gone_after)
        self._pinned = Pinned()
        self.url = self._ways[0]

    def connected(self, headers: Mapping[str, str]) -> AsWorker:
        if urlsplit(self.url).scheme in DIRECT:
            return AsWorker(self._directly, SPOKEN | WORDS, self._stay)
        return AsWorker(self._by_relay, SPOKEN, self._stay)

    def final(self, code: int, text: str) -> str | None:
        if self._stay.refusal:
            refused = f"the coordinator refuses this worker: {self._stay.refusal}"
            # Most refusals say what to do.
            named = "--" in refused
            return refused if named else f"{refused}: check --token or --passcode"
        if text == REPLACED:
            return "another worker joined with the same key: choose another --name"
        if not self._stay.welcome and code != AWAY:
            following = self._ways.index(self.url) + 1
            self.url = self._ways[following % len(self._ways)]
        self._stay.welcome = False  # until it is let in again
        return None

    def _directly(self, now: float) -> CrowdSession:
        return called_on(self._own, self.url, self._desk)

    def _by_relay(self, now: float) -> CrowdSession:
        return Node(self._own, now, self._pinned)

    def _turned_away(self, reason: str) -> None:
        self._stay.refusal = reason


def call_on(url: str, member: Member) -> Outgoing:
    """Return how to call on a peer on the local network, to ask and not to serve.

    Raises ConfigError if there can be none at the address.
    """
    url = peer_url(url)
    # Not as a worker, which would take the place of another of that name.
    own = replace(worker(member), role=Role.COORDINATOR, offers=())
    desk = Desk(own.device_id, LAN.gone_after)
    return Outgoing(url, lambda now: called_on(own, url, desk), message_max=MESSAGE_MAX)


def called_on(
    own: Ourselves, url: str, desk: Desk, *, named: bool = True
) -> CrowdSession:
    """Return a session with a peer that was dialled; ``named`` is as in ``Caller``."""
    protection = DIRECT[urlsplit(url).scheme]
    return lan_session(own, Caller(True, named, protection=protection), desk)
