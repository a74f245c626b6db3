"""The commands' client of the coordinator's HTTP API."""

import functools
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import click
import httpx2

from shoal.cli.options import data_dir_option
from shoal.config.runtime_file import DEFAULT_ADDRESS, local_url
from shoal.config.secret_files import KEY_FILE
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, ShoalError
from shoal.transports.tls import (
    WrongServerKey,
    check_url,
    context_of_folder,
    context_pinning,
    context_trusting,
)

F = TypeVar("F", bound=Callable[..., Any])

READ_TIMEOUT = 600.0  # seconds without a byte
CONNECT_TIMEOUT = 10.0  # seconds to connect
EVENT_MAX = 16 << 20  # bytes
OTHER_CERTIFICATE = (
    "it is not the coordinator of %s, whose key is sent to no other; give the "
    "--api-key of this one"
)
TLS_HINT = "; if it serves TLS, its URL begins with https://"
OTHER_COORDINATOR_HINT = " To use another coordinator, give --url or SHOAL_URL."


class ApiError(ShoalError):
    """The coordinator refused the request."""


class Unreachable(ApiError):
    """The coordinator does not answer, or the connection ended before its answer."""


class UnknownKey(ApiError):
    """The coordinator does not know the key."""


class CoordinatorApi:
    """A coordinator's HTTP API, as the command line names it: see ``pass_api``.

    Empty options stand for the coordinator of this machine: its URL, its key and its
    certificate are in its ``data_dir``.
    """

    def __init__(
        self,
        url: str | None,
        api_key: str | None,
        data_dir: Path,
        cacert: Path | None = None,
    ) -> None:
        self.url = url
        self.api_key = api_key
        self.data_dir = data_dir
        self.cacert = cacert
        self._client: httpx2.Client | None = None

    @property
    def base_url(self) -> str:
        """The URL of the coordinator, as people know it."""
        return self.url or local_url(self.data_dir)

    @property
    def http_url(self) -> str:
        """The base URL of its API, with a scheme and without ``/v1``.

        Raises ConfigError.
        """
        _, fingerprint = without_fingerprint(self._key())
        scheme = "http" if fingerprint is None else "https"
        given = self.base_url
        base = given if "://" in given else f"{scheme}://{given}"
        # Accept the base URL for OpenAI clients as well.
        url = base.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {given}: expected http://HOST:PORT, or https://")
        check_url(url, fingerprint)
        return url

    def request(
        self,
        path: str,
        body: object = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON answer to a request; with a body it is a POST.

        Raises ApiError.
        """
        answer = self._read(path, body, method, headers)
        try:
            return answer.json()
        except ValueError as error:
            raise ApiError(
                f"{self.base_url} is not a Shoal coordinator: {error}"
            ) from error

    def request_all(self, path: str) -> Any:
        """Return the JSON answer of a list with the entries of all its pages.

        Raises ApiError.
        """
        answer = self.request(path)
        while answer["next"] is not None:
            query = httpx2.QueryParams({"after": answer["next"]})
            page = self.request(f"{path}?{query}")
            answer = {**page, "data": answer["data"] + page["data"]}
        return answer

    def fetch(self, path: str) -> bytes:
        """Return the answer to a request, byte for byte.

        Raises ApiError.
        """
        return self._read(path).content

    def server_time(self) -> float | None:
        """Return the coordinator's Unix time, in whole seconds; None: it tells none.

        Raises ApiError.
        """
        told = self._read("/healthz").headers.get("Date", "")
        try:
            return parsedate_to_datetime(told).timestamp()
        except ValueError:
            return None

    @contextmanager
    def stream_events(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Iterator["EventStream"]:
        """Open the server-sent events of a request; leaving the block ends it.

        Raises ApiError; Unreachable for an incomplete answer, also in the block.
        """
        client = self._open()
        try:
            with client.stream("POST", path, json=body, headers=headers) as answer:
                if answer.is_error:
                    answer.read()
                    raise _refusal(answer)
                yield EventStream(answer)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _read(
        self,
        path: str,
        body: object = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        method = method or ("GET" if body is None else "POST")
        try:
            answer = self._open().request(method, path, json=body, headers=headers)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        if not answer.is_success:
            raise _refusal(answer)
        return answer

    def _open(self) -> httpx2.Client:
        if self._client is not None:
            return self._client
        key, fingerprint = without_fingerprint(self._key())
        url = self.http_url
        # Without TLS it trusts no one: to read the system's authorities takes 50 ms.
        context: ssl.SSLContext | None = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if url.startswith("https:"):
            context = self._context(fingerprint)
        try:
            self._client = httpx2.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
                verify=True if context is None else context,
            )
        except httpx2.InvalidURL as error:
            raise ConfigError(f"--url {self.base_url}: {error}") from error
        return self._client

    def _context(self, fingerprint: bytes | None) -> ssl.SSLContext | None:
        """Return which servers are trusted; None: those with the system's authorities.

        The key in a coordinator's folder is sent to that coordinator only.

        Raises ConfigError.
        """
        if fingerprint is not None:
            return context_pinning(fingerprint)
        if self.cacert:
            return context_trusting(self.cacert)
        if self.api_key:
            return None
        return context_of_folder(self.data_dir)

    def _key(self) -> str:
        if self.api_key:
            return self.api_key
        file = self.data_dir / KEY_FILE
        try:
            return file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                "no API key: `shoal serve` creates one for its own machine; elsewhere "
                f"give --api-key or SHOAL_API_KEY ({file}: {error.strerror})"
            ) from error

    def _unreachable(self, error: httpx2.TransportError) -> ApiError:
        """Return why there is no answer, and what to do."""
        url = self.base_url
        cause = next(_causes(error, ssl.SSLCertVerificationError), None)
        if isinstance(cause, WrongServerKey):
            why = cause if self.api_key else OTHER_CERTIFICATE % self.data_dir
            return ApiError(f"the certificate of {url} is not trusted: {why}")
        if cause is not None:
            return ApiError(
                f"the certificate of {url} is not trusted: {cause.verify_message}; "
                "give an API key with a fingerprint, as `shoal serve` prints it, or "
                "its authority with --cacert FILE, and in --url a host name that it is "
                "valid for"
            )
        failed = next(_causes(error, OSError), None)
        reason = (failed.strerror if failed else None) or error
        if isinstance(error, httpx2.ConnectTimeout):
            reason = f"no answer within {CONNECT_TIMEOUT:g} s"
        if not isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            hint = TLS_HINT if self.http_url.startswith("http:") else ""
            return Unreachable(f"{url} ended the connection: {reason}{hint}")
        return Unreachable(
            f"cannot reach {url}: {reason}; is `shoal serve` running there?"
            + ("" if self.url else OTHER_COORDINATOR_HINT)
        )


class EventStream:
    """The JSON of each server-sent event of an answer, up to ``[DONE]``.

    Iterating raises ApiError for an error event, and Unreachable if the end is missing.
    """

    def __init__(self, answer: httpx2.Response) -> None:
        self.headers: Mapping[str, str] = answer.headers
        self._events = httpx2.EventSource(answer, max_event_size=EVENT_MAX)

    def __iter__(self) -> Iterator[Any]:
        for event in self._events:
            if event.data == "[DONE]":
                return
            content: Any = event.json()
            if "error" in content:
                raise ApiError(content["error"]["message"])
            yield content
        raise Unreachable("the answer is incomplete: the connection ended")


def pass_api(function: F) -> F:
    """Add the options of a coordinator; the command's first argument is its API."""

    @functools.wraps(function)
    def call(
        *args: Any,
        url: str | None,
        api_key: str | None,
        data_dir: Path,
        cacert: Path | None,
        **kwargs: Any,
    ) -> Any:
        api = CoordinatorApi(url, api_key, data_dir, cacert)
        click.get_current_context().call_on_close(api.close)
        _interrupt_at_end()
        return function(api, *args, **kwargs)

    for option in (
        click.option(
            "--cacert",
            type=click.Path(path_type=Path),
            envvar="SHOAL_CACERT",
            show_envvar=True,
            metavar="FILE",
            help="PEM file with trusted authorities.  Default: the system's; for the "
            "coordinator on this machine, its own certificate.",
        ),
        data_dir_option,
        click.option(
            "--api-key",
            envvar="SHOAL_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help="API key.  Default: that of the coordinator on this machine.",
        ),
        click.option(
            "--url",
            envvar="SHOAL_URL",
            show_envvar=True,
            metavar="URL",
            help="URL of the coordinator.  Default: that of the one on this machine, "
            f"from --data-dir, else {DEFAULT_ADDRESS}.",
        ),
    ):
        call = option(call)
    return call  # type: ignore[return-value]


def _causes(error: BaseException, kind: type[Any]) -> Iterator[Any]:
    """Yield what led to an error, of a kind, the nearest first."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kind):
            yield cause
        cause = cause.__cause__ or cause.__context__


def _interrupt_at_end() -> None:
    """Have a closed terminal and SIGTERM interrupt the command, as Ctrl-C does.

    What it asked for is cancelled then.  ``nohup`` ignores a closed terminal.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)


def _refusal(answer: httpx2.Response) -> ApiError:
    unknown = answer.status_code == HTTPStatus.UNAUTHORIZED
    return (UnknownKey if unknown else ApiError)(_message(answer))


def _message(answer: httpx2.Response) -> str:
    """Return what an answer says about its error."""
    try:
        reason = answer.json()["error"]
        return reason if isinstance(reason, str) else str(reason["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} from {answer.url}"
