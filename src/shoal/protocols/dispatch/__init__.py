"""Dispatch: desktop and phone workers connect, and sign a receipt for each job.

Source: the Dispatch WebSocket protocol document, and exchanges recorded with the real
coordinator and workers; see ``docs/protocols/dispatch.md``.
"""

from collections.abc import Sequence

from shoal.domain.work import JobKind
from shoal.protocols.dispatch.config import Config
from shoal.protocols.dispatch.coordinator import ProviderSession, answer_headers
from shoal.protocols.dispatch.dialer import PAIRING, PROBE, ProviderDialer
from shoal.protocols.dispatch.messages import MESSAGE_MAX
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    AcceptedConnection,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.protocol import WireProtocol
from shoal.protocols.seam.sole_worker import SoleWorkerSession

__all__ = ["PROTOCOL", "Config"]

# Original workers use any path: Dispatch gets what no other wire claims.
LAST_RANK = 100


def endpoints(config: Config, context: ProtocolContext) -> Sequence[WebSocketRoute]:
    """Return the wire's only endpoint."""

    def accept(request: UpgradeRequest, now: float) -> AcceptedConnection:
        session = ProviderSession(request, config, context)
        return AcceptedConnection(SoleWorkerSession(session), answer_headers(request))

    return [WebSocketRoute(LAST_RANK, lambda request: True, accept, MESSAGE_MAX)]


PROTOCOL = WireProtocol(
    name="dispatch",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https"}),
    dial=ProviderDialer,
    peers="Dispatch's phones and desktops",
    kinds=frozenset({JobKind.CHAT, JobKind.TASK}),
    models_max=1,
    has_keys=True,
    coordinator_probe=PROBE,
    pairing=PAIRING,
    anonymous_http=lambda config: config.open,
    plain_peers=lambda config, tls: "" if tls else "workers",
)
