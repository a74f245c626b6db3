"""A coordinator's HTTP API: its address and key, its refusals, and requests that block.

Commands start often, and importing ``aiohttp`` costs more than all the rest of a start:
they ask over the standard library, a connection for each request.  ``connection`` asks
from event loops, by the same address and with the same errors.
"""

import json
import os
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import cached_property
from http import HTTPStatus
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from shoal import __version__
from shoal.client.errors import ConnectionLost
from shoal.client.reconnection import (
    COORDINATOR,
    IDEMPOTENCY_KEY,
    IDEMPOTENT,
    PROXY_STATUSES,
    STOPPING,
    Attempts,
    Reconnection,
)
from shoal.config import data_folder
from shoal.config.runtime_file import local_url
from shoal.config.secret_files import KEY_FILE
from shoal.domain import errors
from shoal.domain.addresses import has_space, split_addresses
from shoal.domain.credentials import without_fingerprint
from shoal.engines.streams.sse import EventReader
from shoal.tasks.running_call import call_access
from shoal.transports.tls import (
    WrongServerKey,
    check_url,
    context_of_folder,
    context_of_system,
    context_pinning,
    context_trusting,
)

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds to connect
READ_TIMEOUT = 600.0  # seconds without a byte of an answer that a program waits for
READ_SIZE = 1 << 16  # bytes of a stream that are read at once
EVENT_MAX = 16 << 20  # bytes
SERVER_ERRORS = 500  # the first HTTP status of server errors
OTHER_CERTIFICATE = (
    "it is not the coordinator of %s, whose key is never sent to another one; give "
    "--api-key for this one"
)
OTHER_COORDINATOR_HINT = " To use another coordinator, give --url or SHOAL_URL."
TLS_HINT = "; if it serves TLS, its URL begins with https://"

FINAL = (socket.gaierror, UnicodeError, ssl.SSLError)
"""What will fail again: the name of a host, or its TLS."""

_TEMPORARY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
_REFUSALS: Mapping[int, type[errors.ShoalError]] = {
    HTTPStatus.UNAUTHORIZED: errors.Unauthorized,
    HTTPStatus.FORBIDDEN: errors.Forbidden,
    HTTPStatus.NOT_FOUND: errors.NotFound,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.TooLarge,
}


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A coordinator: its URLs without a path, the API key, and the TLS settings.

    There are several URLs if its pool has several coordinators; ``url`` is the one that
    is used now.  ``tls`` is None for the system's authorities.  ``explicit`` is False
    for the default coordinator of this machine.
    """

    urls: tuple[str, ...]
    api_key: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    explicit: bool = True
    reconnection: Reconnection = field(
        default_factory=Reconnection, compare=False, repr=False
    )

    @property
    def url(self) -> str:
        """The next one after each that has failed."""
        return self.urls[self.reconnection.turn % len(self.urls)]

    def attempts(self, *, repeatable: bool) -> Attempts:
        """Return the attempts to send a request, as ``Attempts`` has it."""
        count = len(self.urls)
        return Attempts(self.reconnection, repeatable=repeatable, addresses=count)


def find_coordinator(
    url: str | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    cacert: str | os.PathLike[str] | None = None,
    in_shell: bool = False,
) -> CoordinatorAddress:
    """Return the coordinator to call; ``url`` may be several, separated by commas.

    Defaults come from the running call of a task, then from SHOAL_URL, SHOAL_API_KEY
    and SHOAL_CACERT, and then from the data folder of the coordinator of this machine.

    Raises ConfigError naming what is missing or invalid; ``in_shell`` as an option.
    """
    if not (url or api_key or data_dir) and (access := call_access()) is not None:
        url, api_key = access
    folder = Path(data_dir) if data_dir else data_folder()
    chosen_url = url or os.environ.get("SHOAL_URL")
    chosen_key = api_key or os.environ.get("SHOAL_API_KEY")
    authorities = cacert or os.environ.get("SHOAL_CACERT")
    key, fingerprint = without_fingerprint(chosen_key or _stored_key(folder, in_shell))
    scheme = "http" if fingerprint is None else "https"
    bases: list[str] = []
    for given in split_addresses(chosen_url or local_url(folder)):
        named = f"--url {given}" if in_shell else f"url {given!r}"
        if (base := _base_url(given, scheme)) is None:
            raise errors.ConfigError(f"{named}: expected http://HOST:PORT, or https://")
        check_url(base, fingerprint)
        bases.append(base)
        if base.startswith("https:") is not bases[0].startswith("https:"):
            raise errors.ConfigError(
                f"{named}: the addresses of one pool are all https://, or none"
            )
    tls = None
    if fingerprint is not None:
        tls = context_pinning(fingerprint)
    elif bases[0].startswith("https:"):
        tls = _tls_context(folder, authorities, chosen_key)
    return CoordinatorAddress((*bases,), key, tls, bool(chosen_url))


def _base_url(url: str, scheme: str) -> str | None:
    """Return the URL of a coordinator's API, without ``/v1``; None if it is invalid."""
    url = url.strip()
    base = url if "://" in url else f"{scheme}://{url}"
    # Accept the base URL for OpenAI clients as well.
    base = base.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        usable = parts.scheme in ("http", "https") and parts.hostname
        return base if usable and parts.port != 0 and not has_space(base) else None
    except ValueError:
        return None


def _stored_key(folder: Path, in_shell: bool) -> str:
    try:
        return (folder / KEY_FILE).read_text().strip()
    except OSError as error:
        option = "--api-key" if in_shell else "api_key=…"
        raise errors.ConfigError(
            "no API key: `shoal serve` creates one for its own machine; elsewhere give "
            f"{option} or SHOAL_API_KEY ({folder / KEY_FILE}: {error.strerror})"
        ) from error


def _tls_context(
    folder: Path, authorities: str | os.PathLike[str] | None, api_key: str | None
) -> ssl.SSLContext | None:
    """The key in a coordinator's folder is sent to that coordinator only."""
    if authorities:
        return context_trusting(Path(authorities))
    return None if api_key else context_of_folder(folder)


def refusal(status: int, body: bytes, url: str) -> errors.ShoalError:
    """Return the error of an answer with an HTTP status other than success.

    ``body`` is read in OpenAI's form, and in that of the API of jobs.
    """
    try:
        reason = json.loads(body)["error"]
        text = reason if isinstance(reason, str) else str(reason["message"])
    except (ValueError, LookupError, TypeError):
        text = f"HTTP {status} from {url}"
    if status in _TEMPORARY or status >= SERVER_ERRORS:
        return errors.Unavailable(text)
    return _REFUSALS.get(status, errors.InvalidRequest)(text)


def interruption(
    status: int, headers: Iterable[str], error: errors.ShoalError
) -> ConnectionLost | None:
    """Return the error of an answer that a restart of the coordinator explains.

    ``error`` is that of its status.  None: the coordinator has refused the request.
    """
    names = {each.lower() for each in headers}
    if STOPPING in names:
        return ConnectionLost(str(error), sent=False, is_stopping=True)
    if status in PROXY_STATUSES and COORDINATOR not in names:
        return ConnectionLost(str(error))
    return None


def item_path(path: str, name: str) -> str:
    """Return the path of what is called ``name`` in the list at a ``path``."""
    return f"{path}/{quote(name, safe='')}"


@dataclass
class CoordinatorApi:
    """A coordinator's HTTP API for commands, which block until it answers.

    Empty options stand for the coordinator of this machine: its URL, its key and its
    certificate are in its ``data_dir``.  With ``on_wait``, requests wait for one that
    restarts, as ``Attempts`` has it, and ``on_wait`` gets a sentence for the user.
    """

    url: str | None
    api_key: str | None = field(repr=False)
    data_dir: Path
    cacert: Path | None = None
    on_wait: Callable[[str], None] | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments of ``shoal.Pool`` and of others for the same coordinator."""
        names = ("url", "api_key", "data_dir", "cacert")
        return {name: getattr(self, name) for name in names}

    @property
    def base_url(self) -> str:
        """The URL of the coordinator, as people know it."""
        if self.url and len(split_addresses(self.url)) > 1:
            return self.http_url
        return self.url or local_url(self.data_dir)

    @property
    def http_url(self) -> str:
        """The base URL of its API, with a scheme and without ``/v1``.

        Raises ConfigError.
        """
        return self._address.url

    @property
    def is_known(self) -> bool:
        """Whether the coordinator has answered before."""
        return self._address.reconnection.is_known

    @property
    def at_once(self) -> "CoordinatorApi":
        """The same, whose requests do not wait for a coordinator that is away."""
        return replace(self, on_wait=None)

    def request(
        self,
        path: str,
        body: object = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:
        """Return the JSON answer to a request; with a body it is a POST.

        Entries of the ``query`` that are None are left out.

        Raises the error of a refusal; ConnectionLost if the coordinator does not
        answer, and PeerError if the server is not a coordinator.
        """
        given = {k: v for k, v in (query or {}).items() if v is not None}
        path += f"?{urlencode(given)}" if given else ""
        _, answer = self._read(path, body, method, headers)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise errors.PeerError(
                f"{self.base_url} is not a Shoal coordinator: {error}"
            ) from error

    def request_all(self, path: str) -> Any:
        """Return the JSON answer of a list with the entries of all its pages.

        Raises as ``request`` does.
        """
        answer = self.request(path)
        while answer["next"] is not None:
            page = self.request(path, query={"after": answer["next"]})
            answer = {**page, "data": answer["data"] + page["data"]}
        return answer

    def fetch(self, path: str) -> bytes:
        """Return the bytes of the answer to a request; raises as ``request`` does."""
        return self._read(path)[1]

    def server_time(self) -> float | None:
        """Return the coordinator's Unix time, in whole seconds; None: it reports none.

        Raises as ``request`` does.
        """
        headers, _ = self._read("/healthz")
        try:
            return parsedate_to_datetime(headers.get("Date", "")).timestamp()
        except ValueError:
            return None

    @contextmanager
    def stream_events(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Iterator[tuple[HTTPMessage, Iterator[Any]]]:
        """Open the server-sent events of a request; leaving the block ends it.

        Yields the headers, and up to ``[DONE]`` the JSON of each event, and the text of
        each comment as bytes.

        Raises as ``request`` does.  Reading an event raises JobError for an error, and
        ConnectionLost if the end is missing.
        """
        with ExitStack() as stack:

            def attempt() -> HTTPResponse:
                answer = self._answer(path, body, "POST", headers)
                return stack.enter_context(answer)

            answer = self._repeat(attempt, repeatable=False, waits=False)
            yield answer.headers, self._events(answer)

    def _events(self, answer: HTTPResponse) -> Iterator[Any]:
        comments: list[bytes] = []
        reader = EventReader(EVENT_MAX, comments.append)
        while data := self._more(answer):
            found = reader.feed(data)
            yield from comments
            comments.clear()
            for event in found:
                if event == b"[DONE]":
                    return
                content: Any = json.loads(event)
                if "error" in content:
                    raise errors.JobError(content["error"]["message"])
                yield content
        raise ConnectionLost("the answer is incomplete: the connection ended")

    def _more(self, answer: HTTPResponse) -> bytes:
        """Return what has arrived, after waiting for some; empty at the end."""
        try:
            return answer.read1(READ_SIZE)
        except (OSError, HTTPException) as error:
            self._fail(error)

    def _read(
        self,
        path: str,
        body: object = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[HTTPMessage, bytes]:
        """Return the headers and the body of an answer."""

        def attempt() -> tuple[HTTPMessage, bytes]:
            with self._answer(path, body, method, headers) as answer:
                try:
                    return answer.headers, answer.read()
                except (OSError, HTTPException) as error:
                    self._fail(error)

        idempotent = _method(body, method) in IDEMPOTENT
        keyed = IDEMPOTENCY_KEY in (headers or {})
        return self._repeat(attempt, repeatable=idempotent or keyed)

    def _repeat(
        self, attempt: Callable[[], T], *, repeatable: bool, waits: bool = True
    ) -> T:
        """Make attempts until one succeeds; raise the error of the last one.

        Unless it ``waits``, each address is tried once.
        """
        attempts = self._address.attempts(repeatable=repeatable)
        on_wait = self.on_wait if waits else None
        while True:
            try:
                return attempt()
            except ConnectionLost as error:
                pause = attempts.pause(error, time.monotonic())
                if pause is None or (pause and on_wait is None):
                    raise
                if attempts.begins_to_wait and on_wait is not None:
                    on_wait(f"{error} (trying again for a while)")
            time.sleep(pause)

    @contextmanager
    def _answer(
        self,
        path: str,
        body: object,
        method: str | None,
        headers: Mapping[str, str] | None,
    ) -> Iterator[HTTPResponse]:
        """Send a request, and yield the answer without its body; raise a refusal.

        It is sent once.
        """
        address = self._address
        sent = {
            "Authorization": f"Bearer {address.api_key}",
            "User-Agent": f"Shoal/{__version__}",
            **(headers or {}),
        }
        data = None
        if body is not None:
            sent["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        method = _method(body, method)
        url = address.url + path
        connection, target = _connection(url, address.tls, sent)
        try:
            try:
                connection.connect()
            except (OSError, HTTPException, UnicodeError) as error:
                raise self._unreachable(error) from error
            try:
                connection.sock.settimeout(READ_TIMEOUT)
                with suppress(ConnectionError):  # it may have refused it already
                    connection.request(method, target, data, sent)
                answer = connection.getresponse()
                status, given = answer.status, answer.headers
                succeeded = HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES
                reason = b"" if succeeded else answer.read()
            except (OSError, HTTPException) as error:
                self._fail(error)
            if succeeded or COORDINATOR in given:
                address.reconnection.is_known = True
            if not succeeded:
                refused = refusal(status, reason, url)
                raise interruption(status, given, refused) or refused
            yield answer
        finally:
            connection.close()

    @cached_property
    def _address(self) -> CoordinatorAddress:
        return find_coordinator(**self.options, in_shell=True)

    def _unreachable(self, error: Exception) -> errors.ShoalError:
        """Return why there is no connection, and what to do."""
        url = self.base_url
        if isinstance(error, WrongServerKey):
            why = error if self.api_key else OTHER_CERTIFICATE % self.data_dir
            return errors.Unavailable(f"the certificate of {url} is not trusted: {why}")
        if isinstance(error, ssl.SSLCertVerificationError):
            return errors.Unavailable(
                f"the certificate of {url} is not trusted: {error.verify_message}; "
                "give an API key with a fingerprint, as `shoal serve` prints it, or "
                "its authority with --cacert FILE, and in --url a host name that it is "
                "valid for"
            )
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CONNECT_TIMEOUT:g} s"
        return ConnectionLost(
            f"cannot reach {url}: {reason}; is `shoal serve` running there?"
            + ("" if self.url else OTHER_COORDINATOR_HINT),
            sent=False,
            is_final=isinstance(error, FINAL),
        )

    def _fail(self, error: Exception) -> NoReturn:
        """Raise ConnectionLost: the connection ended before the answer."""
        reason = getattr(error, "strerror", None) or error
        hint = TLS_HINT if self.http_url.startswith("http:") else ""
        if isinstance(error, IncompleteRead):  # it has begun, so it is HTTP
            reason, hint = "the answer is incomplete", ""
        raise ConnectionLost(
            f"{self.base_url} ended the connection: {reason}{hint}"
        ) from error


def _method(body: object, method: str | None) -> str:
    return method or ("GET" if body is None else "POST")


def _connection(
    url: str, tls: ssl.SSLContext | None, headers: dict[str, str]
) -> tuple[HTTPConnection, str]:
    """Return a connection that is not open yet, and the target of the request.

    A proxy is that of the variables that other programs read, such as ``https_proxy``;
    its own headers are added to ``headers``.

    Raises ConfigError if its address is invalid.
    """
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return _to(host, port, secure, tls), target
    via, via_port = _split_proxy(proxy)
    proxy_headers = {}
    if via.username is not None:
        name = f"{unquote(via.username)}:{unquote(via.password or '')}"
        credentials = b64encode(name.encode()).decode()
        proxy_headers["Proxy-Authorization"] = f"Basic {credentials}"
    connection = _to(via.hostname or "", via_port, secure, tls)
    if secure:
        connection.set_tunnel(host, port, proxy_headers)
        return connection, target
    headers |= proxy_headers
    return connection, url


def _split_proxy(proxy: str) -> tuple[SplitResult, int]:
    """Return the parts of a proxy's URL, and its port.  Raises ConfigError."""
    with suppress(ValueError):
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = 80 if via.port is None else via.port
        if via.hostname and port and not has_space(via.hostname):
            return via, port
    # Without the URL, and the parser's words: they may have a password.
    raise errors.ConfigError(
        "the proxy of the environment (http_proxy, https_proxy, all_proxy) has no "
        "valid address: expected http://HOST:PORT, with the special characters of a "
        "password escaped"
    )


def _to(
    host: str, port: int, secure: bool, tls: ssl.SSLContext | None
) -> HTTPConnection:
    if not secure:
        return HTTPConnection(host, port, timeout=CONNECT_TIMEOUT)
    context = tls or context_of_system()
    return HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT, context=context)
