"""How a worker gets to a coordinator, ours or an original one."""

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols.dispatch.desk import Desk
from shoal.protocols.dispatch.extension import (
    HEADER,
    read_header,
    write_header,
)
from shoal.protocols.dispatch.messages import MESSAGE_MAX, REPLACED
from shoal.protocols.dispatch.voice import Voice
from shoal.protocols.dispatch.worker import CoordinatorLink
from shoal.protocols.session import Member

SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class ProviderDialer:
    """Joins one coordinator, again and again, and keeps what it could not say.

    Raises ConfigError from the constructor if the URL cannot be dialled.
    """

    message_max = MESSAGE_MAX

    def __init__(self, url: str, member: Member) -> None:
        self.url = _address(url)
        assert member.identity is not None, "answers are signed on this wire"
        key = member.identity.public_key.hex()
        said = {"key": key, "model": member.model.name}
        headers = {HEADER: write_header(said)}
        if member.token:
            token = quote(member.token, safe="", errors="replace")
            headers["Authorization"] = f"Bearer {token}"
        self.headers: Mapping[str, str] = headers
        self._member = member
        self._desk = Desk()
        self._extended = False

    def connected(self, headers: Mapping[str, str]) -> "CoordinatorLink":
        announced = {name.lower(): value for name, value in headers.items()}
        ours = read_header(announced.get(HEADER.lower(), ""))
        self._extended = ours.known
        return CoordinatorLink(Voice(self._member, ours), self._desk)

    def final(self, code: int, text: str) -> str | None:
        if self._desk.refusal:
            return f"the coordinator refuses this worker: {self._desk.refusal}"
        if code == REPLACED and self._extended:
            return "another worker joined with the same key: choose another --name"
        return None


def _address(url: str) -> str:
    """Return the URL to dial; its path and query stay."""
    expected = "expected http://HOST:PORT or ws://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port raises if it is none
    except ValueError as error:
        raise ConfigError(f"coordinator URL: {error}; {expected}") from error
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        raise ConfigError(
            f"coordinator URL: unknown scheme {parts.scheme!r}; {expected}"
        )
    if not host:
        raise ConfigError(f"coordinator URL: no host; {expected}")
    query = f"?{parts.query}" if parts.query else ""
    return f"{scheme}://{parts.netloc}{parts.path or '/'}{query}"
