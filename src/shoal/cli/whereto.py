"""Which coordinator a worker joins, by which wire, and as whom."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError
from shoal.protocols import Protocol, discover
from shoal.runtime.secret_files import CERTIFICATE_FILE, TOKEN_FILE
from shoal.transports.tls import fingerprint_of

PORT = 4010  # of a coordinator
SECURE = frozenset({"https", "wss"})


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator; ``fingerprint`` is that of its certificate, if that is known."""

    url: str
    protocol: Protocol
    token: str
    fingerprint: bytes | None

    @property
    def shown(self) -> str:
        """The URL without what may hold a token."""
        return self.url.partition("?")[0]


def target(url: str, wire: str, token: str, data: Path) -> Target:
    """Return where to join; without a ``url`` that is the coordinator of this machine.

    That one's token and certificate are read from its ``data`` folder.

    Raises ConfigError if there is no such wire, or the token is for another place.
    """
    if not url:
        return _here(wire, token, data)
    token, fingerprint = without_fingerprint(token)
    if fingerprint is not None and urlsplit(url).scheme not in SECURE:
        raise ConfigError(
            f"{url.partition('?')[0]}: the token is for a coordinator that has a "
            "certificate; its URL begins with https:// or wss://"
        )
    return Target(url, _wire(wire, url), token, fingerprint)


def _here(wire: str, token: str, data: Path) -> Target:
    token, fingerprint = without_fingerprint(token or _read(data / TOKEN_FILE))
    certificate = _read(data / CERTIFICATE_FILE)
    if certificate and fingerprint is None:
        fingerprint = fingerprint_of(certificate)
    scheme = "http" if fingerprint is None else "https"
    url = f"{scheme}://127.0.0.1:{PORT}"
    return Target(url, _wire(wire, url), token, fingerprint)


def _read(file: Path) -> str:
    """Return what a file holds; nothing if it is not there or not ours to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _wire(name: str, url: str) -> Protocol:
    """Return the protocol that is meant.

    Raises ConfigError if there is none of that name, or none for such a URL.
    """
    protocols = discover()
    if name != "auto":
        if name not in protocols:
            known = ", ".join(["auto", *protocols])
            raise ConfigError(f"--wire {name}: there is no such wire; known: {known}")
        return protocols[name]
    scheme = urlsplit(url).scheme
    for protocol in protocols.values():
        if scheme in protocol.schemes:
            return protocol
    raise ConfigError(
        f"{url}: cannot tell the wire; give a URL such as http://HOST:PORT, or --wire"
    )
