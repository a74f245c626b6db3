"""Shoal's own wire: the vocabulary itself, over the HTTP port of a coordinator.

A WebSocket, encrypted by ``seam.encrypted_stream``, carries everything between a worker
and its coordinator: see ``docs/protocols/shoal.md``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal import __version__
from shoal.domain.errors import ConfigError
from shoal.domain.work import JobKind
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import (
    AcceptedConnection,
    ServiceRecord,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.protocol import Endpoint, WireProtocol
from shoal.protocols.seam.worker_session import MembershipState, WorkerSession
from shoal.protocols.shoal.codec import EVENTS
from shoal.protocols.shoal.pieces import FRAME_MAX
from shoal.protocols.shoal.ranks import ShoalRanks
from shoal.protocols.shoal.session import LocalEnd, ShoalSession

__all__ = ["PROTOCOL", "Config"]

PATH = "/shoal"
SERVICE = "_shoal._tcp"
MARK = "shoal"  # in the record of the service: the release
RANK = 0  # no other protocol has a path of its own that begins so
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
MESSAGE_MAX = FRAME_MAX + 1024  # bytes, with the records that encrypt it


@dataclass(frozen=True, slots=True)
class Config:
    """The wire has no settings."""


def endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return the WebSocket for Shoal's workers."""
    local = LocalEnd(
        *(context.name, context.identity, context.hardware, context.plain),
        verify=context.verify,
        admission=context.admission,
    )

    def accept(request: UpgradeRequest, now: float) -> AcceptedConnection:
        return AcceptedConnection(ShoalSession(local, request.address))

    service = ServiceRecord(SERVICE, context.name, {MARK: __version__})
    return [
        WebSocketRoute(
            *(RANK, _is_ours, accept, MESSAGE_MAX), encrypts=True, service=service
        )
    ]


def _is_ours(request: UpgradeRequest) -> bool:
    return request.path == PATH


class ShoalDialer:
    """Joins one coordinator, and rejoins it."""

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        try:
            parts = urlsplit(url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.scheme not in SCHEMES:
            raise ConfigError(
                f"{url.partition('?')[0]!a}: expected the coordinator's address, as "
                "http://HOST:PORT"
            )
        noise = "" if profile.plain else "noise+"
        path = parts.path.rstrip("/") + PATH
        self.url = f"{noise}{SCHEMES[parts.scheme]}://{parts.netloc}{path}"
        self._membership = MembershipState(restriction=profile.restriction)
        self._local = LocalEnd(
            *(profile.name, profile.identity, profile.hardware, profile.plain),
            token=profile.token,
            epoch=profile.epoch,
            offers=profile.first_offers,
            models=profile.expected_models,
            on_refused=self._on_refused,
        )

    def start_session(self, headers: Mapping[str, str]) -> WorkerSession:
        return WorkerSession(self._session, EVENTS, self._membership)

    def final_reason(self, code: int, text: str) -> str | None:
        self._membership.admitted = False  # until the next admission
        return self._membership.final_reason("--token")

    def _session(self, now: float) -> PeerSession:
        return ShoalSession(self._local)

    def _on_refused(self, reason: str) -> None:
        self._membership.refusal = reason


PROTOCOL = WireProtocol(
    name="shoal",
    config=Config,
    endpoints=endpoints,
    token=lambda config: "",
    schemes=frozenset({"http", "https", "ws", "wss"}),
    dial=ShoalDialer,
    peers="Shoal's workers",
    kinds=frozenset(JobKind),
    signs=True,
    joint=True,
    preferred=True,
    service=SERVICE,
    encrypts=True,
    ranks=ShoalRanks,
)
