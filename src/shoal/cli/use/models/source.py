"""Where a model is copied from: a coordinator by its URL, or another peer."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shoal.cli.worker.join_target import resolve_direct, resolve_target, split_token
from shoal.config import USER_DATA
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models.download import DownloadedModel, DownloadRequest
from shoal.models.peer_download import download_model
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed

WEB = ("http", "https")
PEERS = ("tcp", "tls")


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where to copy a model from, as the command line gives it.

    ``where`` is the URL of a coordinator, or the address of a peer.
    """

    where: str
    passcode: str = field(repr=False)
    token: str = field(repr=False)
    plain: bool

    @property
    def is_url(self) -> bool:
        """Whether it is the URL of a coordinator."""
        return self.where.partition("://")[0] in WEB

    def check(self) -> None:
        """Raise ConfigError unless it has a host, and a peer's address a port."""
        url = self.where if "://" in self.where else f"tcp://{self.where}"
        try:
            parts = urlsplit(url)
            valid = parts.scheme in (*WEB, *PEERS) and bool(parts.hostname)
            valid = valid and (parts.port is not None or self.is_url)
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"--from {self.where}: expected the URL of a coordinator, such as "
                "http://HOST:4010, or HOST:PORT of another peer"
            )


async def download_from(
    source: CopySource,
    request: DownloadRequest,
    progress: Callable[[int, int | None], None],
) -> DownloadedModel:
    """Download a model; ``progress`` is as in ``ModelDownload``.

    HOST:PORT may also be that of a coordinator's HTTP API.

    Raises as ``download_model`` does, and ConfigError if there is no coordinator at the
    URL.
    """
    if source.is_url:
        address = await _peer_address(source, source.where)
        return await _download_at(address, source, request, progress)
    try:
        return await _download_at(source.where, source, request, progress)
    except Unavailable as error:
        if "://" in source.where:
            raise
        _, fingerprint = split_token(source.token)
        scheme = "http" if fingerprint is None else "https"
        try:
            address = await _peer_address(source, f"{scheme}://{source.where}")
        except (Unavailable, ConfigError):
            raise error from None
    return await _download_at(address, source, request, progress)


async def _peer_address(source: CopySource, url: str) -> str:
    """Return the address for peers of the coordinator at a URL, as it reports it.

    Raises ConfigError or Unavailable.
    """
    # The folder is for targets without a URL.
    target = await resolve_target(url, model_wire().name, source.token, USER_DATA)
    address = await resolve_direct(target)
    if not address:
        raise ConfigError(
            f"--from {url}: this is no coordinator of Shoal, or it has no port for "
            "peers; give HOST:PORT of another peer"
        )
    return address


async def _download_at(
    address: str,
    source: CopySource,
    request: DownloadRequest,
    progress: Callable[[int, int | None], None],
) -> DownloadedModel:
    token, fingerprint = split_token(source.token)
    url = address if "://" in address else f"tcp://{address}"
    outgoing = _outgoing(url, source.passcode, token, plain=source.plain)
    clock = LoopClock()
    try:
        async with dialer.dial(
            outgoing.url,
            outgoing.headers,
            outgoing.message_max,
            fingerprint=fingerprint or outgoing.fingerprint,
        ) as (link, _):
            session = outgoing.new_session(clock.now())
            return await download_model(session, link, clock, request, progress)
    except LinkClosed as closed:
        raise Unavailable(str(closed)) from closed


def _outgoing(
    url: str, passcode: str, token: str, *, plain: bool
) -> OutgoingConnection:
    """Return how to connect to a peer, by the wire that carries models."""
    # A key of its own: with the worker's key it would replace the worker.
    signer = Signer.from_seed(secrets.token_bytes(32))
    profile = WorkerProfile(
        "shoal-models",
        ServedModel(""),
        0,
        token,
        identity=signer,
        random_bytes=secrets.token_bytes,
        passcode=passcode,
        plain=plain,
    )
    connect = model_wire().peering
    assert connect is not None, "the wire carries models"
    return connect(url, profile)


def model_wire() -> AnyWireProtocol:
    """Return the wire that carries models."""
    return next(each for each in discover().values() if each.peering is not None)
