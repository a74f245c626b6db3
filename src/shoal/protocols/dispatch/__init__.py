"""Dispatch: desktop and phone workers connect, and sign a receipt for each job.

Source: the Dispatch WebSocket protocol document, and exchanges recorded with the real
coordinator and workers; see ``docs/protocols/dispatch.md``.
"""

from collections.abc import Sequence

from shoal.protocols.dispatch.admission import admit_connection, answer_headers
from shoal.protocols.dispatch.codec.messages import MESSAGE_MAX
from shoal.protocols.dispatch.config import Config
from shoal.protocols.dispatch.coordinator import ProviderSession
from shoal.protocols.dispatch.dialer import PAIRING, PROBE, ProviderDialer
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
        connection = admit_connection(request, config, context)
        session = ProviderSession(connection, config, context)
        headers = answer_headers(request, connection, context)
        grant = connection.admitted
        return AcceptedConnection(SoleWorkerSession(session, grant), headers, grant)

    return [WebSocketRoute(LAST_RANK, lambda request: True, accept, MESSAGE_MAX)]


PROTOCOL = WireProtocol(
    name="dispatch",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https"}),
    dial=ProviderDialer,
    peers="Dispatch's phones and desktops",
    models_max=1,
    signs=True,
    coordinator_probe=PROBE,
    pairing=PAIRING,
    anonymous_http=lambda config: config.open,
    plain_peers=lambda config, tls: "" if tls else "workers",
)
