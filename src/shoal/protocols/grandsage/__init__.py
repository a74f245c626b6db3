"""GrandSage: nodes connect over WebSocket and stream text.

Source: the GrandSage WebSocket protocol document, and exchanges recorded with real
servers and nodes; see ``docs/protocols/grandsage.md``.
"""

from collections.abc import Sequence

from shoal.domain.worker import CHAT_ONLY
from shoal.protocols.grandsage.admission import (
    PARAMETERS,
    WARNING_HEADER,
    Config,
    admit,
    read_contexts,
    read_query,
)
from shoal.protocols.grandsage.codec import FRAME_MAX
from shoal.protocols.grandsage.coordinator import GrandSageNodeSession, TaskIds
from shoal.protocols.grandsage.worker import GrandSageNodeDialer
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    AcceptedConnection,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.protocol import WireProtocol
from shoal.protocols.seam.sole_worker import SoleWorkerSession

__all__ = ["PROTOCOL", "Config"]

PONGS = 3.0  # a node that answers pings may be silent this many times longer


def endpoints(config: Config, context: ProtocolContext) -> Sequence[WebSocketRoute]:
    """Return the wire's only endpoint.  Raises ConfigError."""
    task_ids = TaskIds(context.epoch)
    contexts = read_contexts(config.context)

    def accept(request: UpgradeRequest, now: float) -> AcceptedConnection:
        joined, grant = admit(request, context.admission, contexts)
        remark = joined.offer.remark
        headers = {WARNING_HEADER: remark} if remark else {}
        session = GrandSageNodeSession(joined, grant, config, task_ids, now)
        return AcceptedConnection(SoleWorkerSession(session), headers, grant)

    idle_max = PONGS * config.silence
    return [WebSocketRoute(20, claims, accept, FRAME_MAX, idle_max)]


def claims(request: UpgradeRequest) -> bool:
    """Return whether a node is connecting: real nodes use any path."""
    parameters = read_query(request.query).keys()
    if request.path == "/ws":
        return not request.query or not parameters.isdisjoint(PARAMETERS)
    # ``name`` alone is too common a parameter to identify a node.
    return not parameters.isdisjoint({"token", "model", "max_concurrency"})


PROTOCOL = WireProtocol(
    name="grandsage",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"ws", "wss", "http", "https"}),
    dial=GrandSageNodeDialer,
    peers="GrandSage's nodes",
    kinds=CHAT_ONLY,
    plain_peers=lambda config, tls, anyone: "" if tls else "nodes",
)
