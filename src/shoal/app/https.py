"""HTTPS: the certificate that the coordinator presents, and its renewal."""

import asyncio
import datetime
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal.config import ServeConfig
from shoal.config.private_files import make_private_folder
from shoal.config.secret_files import store_certificate
from shoal.domain.addresses import LOOPBACK_NAME, is_own_host
from shoal.domain.errors import ConfigError, StoreError
from shoal.transports import tls
from shoal.transports.clock import Clock
from shoal.transports.http_server import public_url
from shoal.transports.mdns import ANY_ADDRESS, addresses_of

FOLDER = "tls"  # in the data folder
OFF, AUTO = "off", "auto"
CHECK_INTERVAL = 3600.0  # seconds between checks of the certificate's names and dates

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class Https:
    """How to speak TLS: the context, and the certificate in PEM form.

    ``authority`` is the file of the local authority that signed it, and ``renew``
    returns the certificate if another one was made, None otherwise; both are None for a
    certificate from elsewhere.
    """

    context: ssl.SSLContext
    certificate: str
    authority: Path | None = None
    renew: Callable[[float], str | None] | None = None

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the server's key."""
        return tls.fingerprint_of(self.certificate)

    @property
    def presented(self) -> tls.ServerTls:
        """The server's side on the ports beside that of HTTP."""
        return tls.ServerTls(self.context, tls.certificate_hash(self.certificate))


def open_https(config: ServeConfig, names: frozenset[str], at: float) -> Https | None:
    """Return how to speak TLS at a Unix time; None: HTTP is not encrypted.

    ``names`` are those of this machine.  Warns if other machines can read HTTP.

    Raises ConfigError.
    """
    if config.tls not in (OFF, AUTO):
        raise ConfigError(f"--tls {config.tls}: expected {AUTO} or {OFF}")
    certificate, key = config.tls_cert, config.tls_key
    if config.tls == AUTO and (certificate or key):
        raise ConfigError(
            "--tls auto creates a certificate, and --tls-cert and --tls-key name an "
            "existing one: give one or the other"
        )
    if config.tls == AUTO:
        return _local_https(config, names, at)
    if certificate is None and key is None:
        if not is_own_host(config.host):
            log.warning(
                "HTTP is not encrypted: other machines on the networks of %s can read "
                "API keys, prompts and answers; give --tls auto, or --tls-cert and "
                "--tls-key",
                config.host,
            )
        return None
    if certificate is None or key is None:
        given, missing = "--tls-cert", "--tls-key"
        if certificate is None:
            given, missing = missing, given
        raise ConfigError(f"{given} takes {missing} beside it: give both, or neither")
    return Https(
        tls.server_context(certificate, key), tls.server_certificate(certificate)
    )


async def keep_valid(
    https: Https | None,
    folder: Path,
    clock: Clock,
    publish: Callable[[], None] | None = None,
) -> None:
    """Renew the certificate of the local authority as long as the coordinator runs.

    Open connections keep the old one.  Commands on this machine find the new one in the
    data folder; ``publish`` stores the authority, which may be another one, elsewhere.
    """
    if https is None or https.renew is None:
        return
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        try:
            renewed = await asyncio.to_thread(https.renew, clock.wall())
            if renewed is not None:
                log.info("renewed the certificate of HTTPS")
                await asyncio.to_thread(store_certificate, folder, renewed)
                if publish is not None:
                    await asyncio.to_thread(publish)
        except (ConfigError, StoreError, OSError) as error:
            log.error("cannot renew the certificate of HTTPS: %s", error)


def _local_https(config: ServeConfig, names: frozenset[str], at: float) -> Https:
    # Imported here, because that takes as long as all the rest of a start.
    from shoal.transports.local_authority import (
        LocalCertificate,
        local_certificate,
        server_names,
    )

    def issue(at: float) -> LocalCertificate:
        now = datetime.datetime.fromtimestamp(at, datetime.UTC)
        named = server_names({*names, *_addresses(config.host)})
        made = local_certificate(folder, named, socket.gethostname(), now)
        if made.replaced:
            log.warning(
                "the local certificate authority is new: other programs have to trust "
                "%s instead of the old file; tokens and keys with a fingerprint stay "
                "valid",
                made.authority,
            )
        return made

    def renew(at: float) -> str | None:
        made = issue(at)
        if not made.issued:
            return None
        context.load_cert_chain(made.certificate, made.key)
        return tls.server_certificate(made.certificate)

    folder = config.data_dir / FOLDER
    try:
        make_private_folder(config.data_dir)
    except OSError as error:
        raise ConfigError(f"--data-dir {config.data_dir}: {error.strerror}") from error
    made = issue(at)
    context = tls.server_context(made.certificate, made.key)
    certificate = tls.server_certificate(made.certificate)
    return Https(context, certificate, made.authority, renew)


def _addresses(host: str) -> set[str]:
    """Return the addresses at which clients reach what listens on a host."""
    found = {LOOPBACK_NAME, "127.0.0.1", "::1"}
    if host in ANY_ADDRESS:
        found |= {*addresses_of("0.0.0.0"), *addresses_of("::")}
        found.add(urlsplit(public_url(host, 0, secure=True)).hostname or "")
    return found
