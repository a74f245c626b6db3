"""A worker's connections to one coordinator: a Shoal coordinator or any MacFleet node.

Given HOST:PORT of a MacFleet node, the dialer first pings it as a heartbeat port,
because the pong contains the transport port.
"""

from collections.abc import Mapping
from dataclasses import replace

from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet import addresses, local_node
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.connection import ACCEPTED_MESSAGES
from shoal.protocols.macfleet.handshake import rejection
from shoal.protocols.macfleet.heartbeat import PingExchange, PingSession, Pong
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.admission import NoThrottle
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.peer_addresses import without_query
from shoal.protocols.seam.session import CloseCode, WorkerEnd
from shoal.protocols.seam.worker_session import (
    FramedWorkerSession,
    MembershipState,
    WorkerSession,
)

PONG_TIMEOUT = 10.0  # seconds for the answer to a ping
ID_CONFLICT = (
    "the node at that address has the id of this worker also after a change: set "
    "another --name"
)


MESSAGE_MAX = 0  # a byte stream has no messages
WORKER_SUFFIX = "-worker"  # appended to a worker's id if its coordinator has the same
REJECTIONS_MAX = 3  # rejections in a row after which the worker gives up


class FleetDialer:
    """Connects to one node, repeatedly.

    HOST:PORT may be either of a node's two ports.  The dialer pings it: a pong contains
    the transport port; without a pong it is taken to be the transport port itself.  Of
    a Shoal coordinator both ports are known; the pong has its id.

    Raises ConfigError from the constructor if the URL cannot be dialled.
    """

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        parts = addresses.parse_url(url)
        self._membership = MembershipState(restriction=profile.restriction)
        self._was_rejected = False
        self._rejections = 0  # in a row
        self._retries_ping = False  # under another id
        self._is_renamed = False  # the id differs from the configured name
        self._expected_id = ""  # the id in the pong
        self._transport = ""  # the URL of the transport port, if it is known
        if parts.scheme in addresses.WEB_SCHEMES:
            if not profile.direct_url:
                raise ConfigError(
                    f"{without_query(url)}: no MacFleet port is known there; "
                    f"{addresses.EXPECTED}"
                )
            direct = addresses.parse_url(profile.direct_url)
            secure = direct.scheme != addresses.PLAIN_SCHEME
            self._transport = f"{direct.scheme}://{direct.netloc}"
            self._heartbeats = addresses.heartbeat_url(direct)
        else:
            secure = parts.scheme != addresses.PLAIN_SCHEME or bool(profile.token)
            self._heartbeats = addresses.transport_url(parts.netloc, secure=secure)
        fleet, token = addresses.fleet_in_url(parts), profile.token
        hardware = local_node.hardware_profile(profile.hardware)
        member = FleetMember(
            local_node.node_id(profile.name),
            fleet_key(token, fleet) if token else None,
            lambda: hardware,
            profile.random_bytes,
            open_tls=secure,
        )
        self._local = local_node.FleetLocalNode(
            role=local_node.FleetRole.WORKER,
            member=member,
            slots=0,
            limiter=FleetRateLimiter(NoThrottle()),
            registry=FleetRegistry(member.node_id, member.profile),
            on_refused=self._on_refused,
            on_rejected=self._on_rejected,
            on_id_conflict=self._rename,
        )
        self._pings = bool(self._heartbeats)
        self.url = self._heartbeats or self._transport

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        if self._pings:
            exchange = PingExchange(self._local.member, accepts_own_id=True)
            return PingSession(
                exchange, self._on_pong, timeout=PONG_TIMEOUT, code=CloseCode.MOVED
            )
        session = self._session()
        session_end = WorkerSession(
            lambda now: session, ACCEPTED_MESSAGES, self._membership
        )
        return FramedWorkerSession(session_end, session)

    def final_reason(self, code: int, text: str) -> str | None:
        if reason := self._membership.final_reason("--token"):
            return reason
        self._rejections = self._rejections + 1 if self._was_rejected else 0
        self._was_rejected = False
        if self._rejections >= REJECTIONS_MAX:
            return str(rejection(without_query(self.url)))
        if self._retries_ping:
            self._retries_ping = False
        elif self._pings:
            self._pings = False  # connect to the port in the pong, or else to this one
            self.url = self._transport or self.url
        elif self._heartbeats and not self._membership.admitted:
            self._pings, self.url, self._expected_id = True, self._heartbeats, ""
        self._membership.admitted = False  # until the next admission
        return None

    def _on_pong(self, pong: Pong, now: float) -> None:
        if pong.node_id == self._local.member.node_id:
            self._retries_ping = self._rename()
            if not self._retries_ping:
                self._on_refused(ID_CONFLICT)
            return
        self._expected_id = pong.node_id
        at = addresses.parse_url(self._heartbeats)
        announced = 0 if pong.profile is None else pong.profile.data_port
        host = at.netloc.rpartition(":")[0]
        port = announced or (at.port or 0) + 1  # the default
        self.url = f"{at.scheme}://{host}:{port}"

    def _session(self) -> FleetSession:
        connection = local_node.FleetConnectionInfo(
            dialled=True,
            address=addresses.parse_url(self.url).netloc,
            expected_id=self._expected_id,
        )
        return FleetSession(self._local, connection)

    def _on_refused(self, reason: str) -> None:
        self._membership.refusal = reason

    def _rename(self) -> bool:
        """Use another id than the coordinator, which may have this machine's name too.

        Only once: a second conflict is an error.
        """
        if self._is_renamed:
            return False
        self._is_renamed = True
        member = self._local.member
        new_id = local_node.node_id(f"{member.node_id}{WORKER_SUFFIX}")
        self._local = replace(self._local, member=replace(member, node_id=new_id))
        return True

    def _on_rejected(self, address: str) -> None:
        self._was_rejected = True
