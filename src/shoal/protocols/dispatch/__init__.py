"""Dispatch: desktop and phone workers connect, and sign a receipt for each job.

Source: the Dispatch WebSocket protocol document, and exchanges recorded with the real
coordinator and workers; see ``docs/protocols/dispatch.md``.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from shoal.domain.errors import NotAdmitted
from shoal.domain.work import JobKind
from shoal.protocols.dispatch.admission import Config
from shoal.protocols.dispatch.coordinator import ProviderSession, answer_headers
from shoal.protocols.dispatch.messages import MESSAGE_MAX
from shoal.protocols.dispatch.worker import DispatchWorkerSession, WorkerState
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import (
    AcceptedConnection,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_addresses import split_url
from shoal.protocols.seam.protocol import CoordinatorProbe, Pairing, WireProtocol
from shoal.protocols.seam.sole_worker import SoleWorkerSession

__all__ = ["PROTOCOL", "Config"]

# Original workers use any path: Dispatch gets what no other wire claims.
LAST_RANK = 100


SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class ProviderDialer:
    """Connects and reconnects to one coordinator; keeps unsent messages meanwhile.

    The constructor raises ConfigError if the URL is invalid.
    """

    message_max = MESSAGE_MAX

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        self.url = _address(url)
        headers = {}
        if profile.token:
            token = quote(profile.token, safe="", errors="replace")
            headers["Authorization"] = f"Bearer {token}"
        self.headers: Mapping[str, str] = headers
        self._profile = profile
        self._state = WorkerState()

    def start_session(self, headers: Mapping[str, str]) -> DispatchWorkerSession:
        return DispatchWorkerSession(self._profile, self._state)

    def final_reason(self, code: int, text: str) -> str | None:
        if self._state.refusal:
            return f"the coordinator refuses this worker: {self._state.refusal}"
        return None


def _address(url: str) -> str:
    """Return the WebSocket URL to dial, with the given path and query."""
    parts = split_url(url, SCHEMES, "expected http://HOST:PORT or ws://HOST:PORT")
    query = f"?{parts.query}" if parts.query else ""
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{parts.path or '/'}{query}"


ERROR_MAX = 300  # characters shown of an error from a coordinator

HEALTH_FIELDS = frozenset({"status", "workers_online", "network"})

PAIRING_REFUSALS = {
    "invalid_code": "there is no such code: ask for a new one",
    "already_claimed": "the code has been used; if this worker did, it is paired",
    "expired": "the code has expired: ask for a new one",
}


def is_health(answer: object) -> bool:
    """Return whether this is the health response of a Dispatch coordinator."""
    return isinstance(answer, Mapping) and answer.keys() >= HEALTH_FIELDS


def claim_body(code: str, public_key: bytes) -> dict[str, object]:
    """Return the request body with which a worker claims a pairing code."""
    # Original codes are upper case, and the comparison is case-sensitive.
    return {"pairing_code": code.upper(), "provider_pubkey": public_key.hex()}


def paired_user(answer: object) -> str:
    """Return the user who created the code.

    Raises NotAdmitted with the reason if the coordinator refuses the code.
    """
    match answer:
        case {"user_id": str() as user}:
            return user
        case {"error": str() as error} | {"error": {"message": str() as error}}:
            raise NotAdmitted(PAIRING_REFUSALS.get(error, error[:ERROR_MAX]))
        case _:
            raise NotAdmitted("the coordinator does not know pairing codes")


PROBE = CoordinatorProbe("/v1/health", is_health)
PAIRING = Pairing("/v1/trust/claim", claim_body, paired_user)


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
    plain_peers=lambda config, tls, anyone: "" if tls else "workers",
)
