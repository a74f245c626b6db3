"""Dispatch: desktop and phone workers connect, and sign a receipt for each job.

Source: the Dispatch WebSocket protocol document, and exchanges recorded with the real
coordinator and workers; see ``docs/protocols/dispatch.md``.
"""

from collections.abc import Sequence

from shoal.protocols.dispatch.admission import Config, admit_connection, answer_headers
from shoal.protocols.dispatch.codec.messages import MESSAGE_MAX
from shoal.protocols.dispatch.coordinator import ProviderSession
from shoal.protocols.dispatch.dialer import FACE, PAIRING, ProviderDialer
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


def endpoints(config: Config, setting: ProtocolContext) -> Sequence[WebSocketRoute]:
    """Return the wire's only endpoint."""

    def accept(hello: UpgradeRequest, now: float) -> AcceptedConnection:
        visitor = admit_connection(hello, config, setting)
        session = ProviderSession(visitor, config, setting)
        headers = answer_headers(hello, visitor, setting)
        grant = visitor.admitted
        return AcceptedConnection(SoleWorkerSession(session, grant), headers, grant)

    return [WebSocketRoute(LAST_RANK, lambda hello: True, accept, MESSAGE_MAX)]


PROTOCOL = WireProtocol(
    name="dispatch",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https"}),
    dial=ProviderDialer,
    models_max=1,
    signs=True,
    face=FACE,
    pairing=PAIRING,
    anonymous_http=lambda config: config.open,
)
