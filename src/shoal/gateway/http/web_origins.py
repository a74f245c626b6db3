"""Which host names and web origins may use this coordinator.

A browser lets every page send requests to this machine and to the local network.  It
names the page in ``Origin``: with every WebSocket, and with every request that is not a
plain GET.  That name proves nothing if the page's own host resolves to this machine by
now (DNS rebinding), but then ``Host`` has that name as well.  So where no key is
required, requests have to use a name of the coordinator, and come from one of its own
pages or from an origin that the operator allows.

Programs other than browsers may leave ``Origin`` out, and do.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from multidict import CIMultiDictProxy

from shoal.domain.addresses import LOOPBACK_NAME
from shoal.domain.errors import ConfigError, Forbidden

PREFLIGHT_SECONDS = 7200  # that a browser may remember an answer; its own maximum
METHODS = "GET, POST, PUT, DELETE"
EXPOSED = (
    "*, x-request-id, x-shoal-job, x-shoal-worker, x-shoal-attempts, "
    "x-shoal-left-out, Retry-After"
)

OWN_SITES = frozenset({"same-origin", "none"})
"""What browsers say in ``Sec-Fetch-Site`` of a coordinator's own pages, and of none."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PagePolicy:
    """The names of this coordinator, and the other pages that may use it.

    ``hosts`` are the names, in lower case, beside ``localhost`` and all IP addresses,
    which no page can be called.  ``origins`` are allowed as ``https://HOST[:PORT]``.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def allows_page(self, headers: CIMultiDictProxy[str]) -> bool:
        """Say whether a request comes from an allowed page, or from no page."""
        origins = headers.getall("Origin", [])
        host = headers.get("Host", "").lower()
        own = {f"http://{host}", f"https://{host}"} if self.names_us(headers) else set()
        return all(
            origin.lower() in own or origin in self.origins for origin in origins
        )

    def names_us(self, headers: CIMultiDictProxy[str]) -> bool:
        """Say whether a request was sent to a name of this coordinator."""
        hosts = headers.getall("Host", [])
        if len(hosts) != 1 or (name := host_name(hosts[0])) is None:
            return False
        return name in self.hosts or name == LOOPBACK_NAME or _is_address(name)

    def check_upgrade(self, headers: CIMultiDictProxy[str]) -> None:
        """Raise Forbidden if a page that is not allowed opens a WebSocket."""
        if not self.allows_page(headers):
            raise _page_refused(headers)

    def check_keyless(self, headers: CIMultiDictProxy[str]) -> None:
        """Raise Forbidden if a request that needs no key may come from a page."""
        if not self.names_us(headers):
            raise Forbidden(
                f"{_shown(headers, 'Host')} is not a name of this coordinator: without "
                "a key, it accepts only its addresses and its own names; its operator "
                "can add a name with `shoal serve --allowed-host NAME`"
            )
        if not self.allows_page(headers):
            raise _page_refused(headers)

    def check_own_page(self, headers: CIMultiDictProxy[str]) -> None:
        """Raise Forbidden if a request may come from a page of another site.

        An allowed page is one of those: it has to have a key of its own.
        """
        if not self.names_us(headers):
            raise Forbidden(
                f"{_shown(headers, 'Host')} is not a name of this coordinator: "
                "browsers can sign in only at its addresses and its own names; its "
                "operator can add a name with `shoal serve --allowed-host NAME`"
            )
        host = headers.get("Host", "").lower()
        own = (f"http://{host}", f"https://{host}")
        if headers.get("Sec-Fetch-Site", "none") not in OWN_SITES or any(
            origin.lower() not in own for origin in headers.getall("Origin", [])
        ):
            raise Forbidden(
                f"web pages of {_shown(headers, 'Origin')} may not use the session of "
                f"a browser at {ascii(host)[1:-1]}; a reverse proxy has to pass on the "
                "header Host"
            )

    def cors_headers(self, headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
        """Return the headers that let an allowed page of another site read an answer.

        Source: https://fetch.spec.whatwg.org/#http-cors-protocol
        """
        origin = headers.get("Origin", "")
        if origin not in self.origins:
            return {"Vary": "Origin"} if self.origins else {}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
        }

    def preflight_headers(
        self, headers: CIMultiDictProxy[str]
    ) -> Mapping[str, str] | None:
        """Return the answer to a page that asks whether it may send a request.

        None if the request is no such question, or the page is not allowed.
        """
        if (
            "Access-Control-Request-Method" not in headers
            or headers.get("Origin", "") not in self.origins
        ):
            return None
        return {
            **self.cors_headers(headers),
            "Access-Control-Allow-Methods": METHODS,
            # "*" does not cover Authorization.
            "Access-Control-Allow-Headers": headers.get(
                "Access-Control-Request-Headers", "*"
            ),
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }


def page_policy(
    listen: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]
) -> PagePolicy:
    """Return the policy of a coordinator that listens on a host.

    Its own names are that host and the machine's.

    Raises ConfigError for an invalid host or origin.
    """
    machine = socket.gethostname().lower()
    bare = machine.partition(".")[0]
    names = {listen.lower(), machine, bare, f"{bare}.local"}
    return PagePolicy(
        frozenset(names | {_allowed_host(each) for each in allowed_hosts}),
        frozenset(_allowed_origin(each) for each in allowed_origins),
    )


def host_name(host: str) -> str | None:
    """Return the name in a ``Host`` header, in lower case; None if it is malformed."""
    return _name_and_port(host)[0]


def host_port(host: str) -> int | None:
    """Return the port in a ``Host`` header; None: that of the scheme, or malformed."""
    return _name_and_port(host)[1]


def _name_and_port(host: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname, parts.port  # the port raises if it is none
    except ValueError:
        return None, None
    if parts.netloc != host or "@" in host:
        return None, None
    return name, port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _allowed_host(name: str) -> str:
    if not _NAME.fullmatch(name.lower()):
        raise ConfigError(
            f"--allowed-host {name!r}: expected a name without a scheme or port, "
            "such as pool.example.com"
        )
    return name.lower()


def _allowed_origin(origin: str) -> str:
    parts = _split(origin)
    if parts is None or origin != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError(
            f"--allowed-origin {origin!r}: expected SCHEME://HOST[:PORT] and no path, "
            "such as https://chat.example.com or http://localhost:3000"
        )
    return origin


def _split(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        _ = parts.port
    except ValueError:
        return None
    named = parts.hostname and parts.netloc == parts.netloc.lower()
    return parts if named and "*" not in origin and "@" not in origin else None


def _page_refused(headers: CIMultiDictProxy[str]) -> Forbidden:
    return Forbidden(
        f"web pages of {_shown(headers, 'Origin')} may not use this coordinator: its "
        "operator can allow them with `shoal serve --allowed-origin ORIGIN`"
    )


def _shown(headers: CIMultiDictProxy[str], name: str) -> str:
    return ascii(headers.get(name, ""))[1:-1][:200] or "an unnamed site"
