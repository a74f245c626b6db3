"""Dispatch: desktops and phones dial in, and sign what they did.

Source: the Dispatch WebSocket protocol document, and exchanges recorded with the real
coordinator and workers; see ``docs/protocols/dispatch.md``.
"""

from collections.abc import Sequence

from shoal.protocols import WireProtocol
from shoal.protocols.dispatch.coordinator import ProviderSession
from shoal.protocols.dispatch.dialer import ProviderDialer
from shoal.protocols.dispatch.face import FACE, PAIRING
from shoal.protocols.dispatch.joining import Config, answer_headers, receive_visitor
from shoal.protocols.dispatch.messages import MESSAGE_MAX
from shoal.protocols.session import (
    Accepted,
    Hello,
    Setting,
    WebSocketRoute,
)

__all__ = ["PROTOCOL", "Config"]

LAST = 100  # rank: original workers use any path, so what no other wire claims is ours


def endpoints(config: Config, setting: Setting) -> Sequence[WebSocketRoute]:
    """Return the one endpoint."""

    def accept(hello: Hello, now: float) -> Accepted:
        visitor = receive_visitor(hello, config, setting)
        session = ProviderSession(visitor, config, setting)
        headers = answer_headers(hello, visitor, setting)
        return Accepted(session, headers, visitor.admitted)

    return [WebSocketRoute(LAST, lambda hello: True, accept, MESSAGE_MAX)]


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
