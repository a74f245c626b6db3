"""Where a model is copied from: a coordinator, or a peer of another program."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shoal.cli.worker.join_target import split_token
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models.download import DownloadedModel, DownloadRequest
from shoal.models.peer_download import download_model
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed

WEB = ("http", "https")
PEERS = ("tcp", "tls")


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where to copy a model from, as the command line gives it.

    ``where`` is the URL of a coordinator or HOST:PORT; ``plain``: the connection is not
    encrypted, as to peers of other programs.
    """

    where: str
    passcode: str = field(repr=False)
    token: str = field(repr=False)
    plain: bool

    @property
    def url(self) -> str:
        """Where to connect to, with a scheme.

        HOST:PORT is a coordinator's, unless the connection is ``plain``: with HTTPS, if
        the token names a certificate.
        """
        if "://" in self.where:
            return self.where
        _, fingerprint = split_token(self.token)
        web = "http" if fingerprint is None else "https"
        return f"{'tcp' if self.plain else web}://{self.where}"

    @property
    def is_pool(self) -> bool:
        """Whether it is a coordinator of Shoal's."""
        return self.url.partition("://")[0] in WEB

    def check(self) -> None:
        """Raise ConfigError unless it has a host, and a peer's address a port."""
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in (*WEB, *PEERS) and bool(parts.hostname)
            is_url = self.is_pool and "://" in self.where
            valid = valid and (parts.port is not None or is_url)
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"--from {self.where}: expected the URL of a coordinator, such as "
                "http://HOST:4010, or HOST:PORT of another peer"
            )
        if not (self.is_pool or self.plain):
            raise ConfigError(
                f"--from {self.where}: the connection to a peer of another program is "
                "not encrypted; to use it anyway, give --plain"
            )


async def download_from(
    source: CopySource,
    request: DownloadRequest,
    progress: Callable[[int, int | None], None],
) -> DownloadedModel:
    """Download a model; ``progress`` is as in ``ModelDownload``.

    Raises as ``download_model`` does.
    """
    token, fingerprint = split_token(source.token)
    outgoing = _outgoing(source, token)
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
        advice = "; a peer of another program, such as a Mac, needs --plain"
        guessed = "://" not in source.where and not source.plain
        raise Unavailable(f"{closed}{advice if guessed else ''}") from closed


def _outgoing(source: CopySource, token: str) -> OutgoingConnection:
    """Return how to connect, by the wire of the other end."""
    # A key of its own: with the worker's key it would replace the worker.
    signer = Signer.from_seed(secrets.token_bytes(32))
    profile = WorkerProfile(
        f"models-{signer.public_key.hex()[:8]}",  # others may copy at the same time
        ServedModel(""),
        0,
        token,
        identity=signer,
        random_bytes=secrets.token_bytes,
        passcode=source.passcode,
        plain=source.plain,
    )
    connect = next(
        each.peering
        for each in discover().values()
        if each.peering is not None and each.preferred is source.is_pool
    )
    return connect(source.url, profile)
