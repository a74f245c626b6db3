"""GrandSage: nodes dial in over WebSocket and stream text back.

Source: the GrandSage WebSocket protocol document, and exchanges recorded with real
servers and nodes; see ``docs/protocols/grandsage.md``.
"""

from collections.abc import Sequence

from shoal.protocols import WireProtocol
from shoal.protocols.grandsage.codec import FRAME_MAX
from shoal.protocols.grandsage.coordinator import NodeSession
from shoal.protocols.grandsage.desk import Config, Desk
from shoal.protocols.grandsage.extensions import HEADER, write_extensions
from shoal.protocols.grandsage.joining import (
    PARAMETERS,
    WARNING,
    admit,
    read_query,
)
from shoal.protocols.grandsage.worker import NodeDialer
from shoal.protocols.session import (
    Accepted,
    Hello,
    Setting,
    WebSocketRoute,
)

__all__ = ["PROTOCOL", "Config"]


def endpoints(config: Config, setting: Setting) -> Sequence[WebSocketRoute]:
    """Return the one endpoint."""
    desk = Desk(setting.start)

    def accept(hello: Hello, now: float) -> Accepted:
        node = admit(hello, setting.admission)
        headers = {}
        if node.extended:
            headers[HEADER] = write_extensions()
        if node.offer.remark:
            headers[WARNING] = node.offer.remark
        session = NodeSession(node, config, desk, now)
        return Accepted(session, headers, node.admitted)

    return [WebSocketRoute(20, claims, accept, FRAME_MAX)]


def claims(hello: Hello) -> bool:
    """Say whether a connection is a node's: real ones use any path."""
    given = read_query(hello.query).keys()
    if hello.path == "/ws":
        return not hello.query or not given.isdisjoint(PARAMETERS)
    # A name alone is too common a parameter to go by.
    return not given.isdisjoint({"token", "model", "max_concurrency"})


PROTOCOL = WireProtocol(
    name="grandsage",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"ws", "wss", "http", "https"}),
    dial=NodeDialer,
)
