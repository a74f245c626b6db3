"""A worker's way to whoever has functions called: one of ours, or any other node."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.domain.credentials import digest_of
from shoal.domain.errors import ConfigError
from shoal.protocols.as_worker import AsWorker, Stay
from shoal.protocols.crowd import Protection
from shoal.protocols.framed_worker import FramedWorker
from shoal.protocols.macfleet.addresses import (
    EXPECTED,
    PLAIN,
    WEB,
    fleet_of,
    shown,
    split,
    transport_url,
)
from shoal.protocols.macfleet.conversation import SPOKEN
from shoal.protocols.macfleet.finding import NAMESAKE, Finding
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.own import Member as Node
from shoal.protocols.macfleet.fleet.pinging import PingExchange, Pong
from shoal.protocols.macfleet.handshake import Outstanding, Own, rejected
from shoal.protocols.macfleet.ourselves import (
    WORKS,
    Ourselves,
    Role,
    node_id,
    profile_of,
)
from shoal.protocols.macfleet.peer import Caller
from shoal.protocols.macfleet.session import PeerSession
from shoal.protocols.macfleet.wire.keys import TOKEN_MIN, fleet_key
from shoal.protocols.session import (
    Member,
    Uncounted,
    WorkerSession,
)

MESSAGE_MAX = 0  # there are none on a byte stream
APART = "-worker"  # after a worker's name, if its coordinator has the same
REJECTED_MAX = 3  # times in a row to be hung up on, until that is taken for an answer


class FleetDialer:
    """Joins one node, again and again.

    Of HOST:PORT nobody knows at first which of a node's two ports it is.  It is pinged,
    for whoever answers says where the other is; if nobody does, it is that one.

    Raises ConfigError from the constructor if the URL cannot be dialled.
    """

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, member: Member) -> None:
        parts = split(url)
        self._ours = parts.scheme in WEB
        self._stay = Stay()
        self._was_rejected = False
        self._rejections = 0  # in a row
        self._pings_again = False  # under another name
        self._is_apart = False  # our name is another than the one we were given
        self._own = worker(
            member,
            fleet_of(parts),
            turned_away=self._turned_away,
            rejected=self._note_rejection,
            namesake=self._take_another_name,
        )
        self._expected = ""  # the id of whom we have found
        self._heartbeats = ""
        if self._ours:
            if not member.direct:
                raise ConfigError(
                    f"{shown(url)}: no port of this wire is known there; {EXPECTED}"
                )
            self.url = member.direct
        else:
            secure = parts.scheme != PLAIN or bool(member.token)
            self.url = self._heartbeats = transport_url(parts.netloc, secure=secure)
        self._pings = not self._ours

    def connected(self, headers: Mapping[str, str]) -> WorkerSession:
        if self._pings:
            own = self._own
            node = Node(own.node.node_id, own.key, own.profile, own.node.draw)
            return Finding(PingExchange(node), self._found, self._ping_as_another)
        session = self._session()
        begun = AsWorker(lambda now: session, SPOKEN, self._stay)
        return FramedWorker(begun, session)

    def final(self, code: int, text: str) -> str | None:
        if self._stay.refusal:
            refused = f"the coordinator refuses this worker: {self._stay.refusal}"
            named = "--" in refused  # most refusals say what to do
            return refused if named else f"{refused}: check --token"
        self._rejections = self._rejections + 1 if self._was_rejected else 0
        self._was_rejected = False
        if self._rejections >= REJECTED_MAX:
            return str(rejected(shown(self.url)))
        if self._pings_again:
            self._pings_again = False
        elif self._pings:
            self._pings = False  # go on where we were told, or else here
        elif self._heartbeats and not self._stay.welcome:
            self._pings, self.url, self._expected = True, self._heartbeats, ""
        self._stay.welcome = False  # until it is let in again
        return None

    def _found(self, pong: Pong) -> None:
        at = split(self._heartbeats)
        told = 0 if pong.profile is None else pong.profile.data_port
        host = at.netloc.rpartition(":")[0]
        port = told or (at.port or 0) + 1  # as is custom
        self.url = transport_url(f"{host}:{port}", secure=at.scheme != PLAIN)
        self._expected = pong.node_id

    def _session(self) -> PeerSession:
        parts = split(self.url)
        secure = parts.scheme != PLAIN
        caller = Caller(
            dialled=True,
            expected=self._expected,
            ours=self._ours,
            address=parts.netloc,
            protection=Protection.TLS if secure else Protection.PLAIN,
        )
        return PeerSession(self._own, caller)

    def _turned_away(self, reason: str) -> None:
        self._stay.refusal = reason

    def _take_another_name(self) -> bool:
        """Be another than the coordinator: both may be called like their machine.

        Once: whoever has the second name as well means it.
        """
        if self._is_apart:
            return False
        self._is_apart = True
        node = self._own.node
        apart = node_id(f"{node.node_id}{APART}")
        self._own = replace(self._own, node=replace(node, node_id=apart))
        return True

    def _ping_as_another(self) -> bool:
        self._pings_again = self._take_another_name()
        if not self._pings_again:
            self._turned_away(f"{NAMESAKE}, as had the one before: give it a --name")
        return self._pings_again

    def _note_rejection(self, where: str) -> None:
        self._was_rejected = True


def worker(
    member: Member,
    fleet: str,
    *,
    turned_away: Callable[[str], None],
    rejected: Callable[[str], None],
    namesake: Callable[[], bool],
) -> Ourselves:
    """Return a worker's side; the callbacks are as in ``Ourselves``.

    A token that is too short for a fleet may still be a join token of one of ours.
    """
    token = member.token
    node = Own(
        node_id(member.name),
        fleet_key(token, fleet) if len(token) >= TOKEN_MIN else None,
        b"",  # it is told as it is at the time
        member.draw,
        Outstanding(),
        digest=digest_of(token) if token else b"",
        fleet=fleet,
        features=frozenset({WORKS}),
        identity=member.identity,
    )
    return Ourselves(
        role=Role.WORKER,
        node=node,
        profile=lambda: profile_of(member.hardware),
        slots=0,
        limiter=Limiter(Uncounted()),
        turned_away=turned_away,
        rejected=rejected,
        namesake=namesake,
    )
