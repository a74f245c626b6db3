"""The commands' client of the coordinator's HTTP API."""

import argparse
import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from shoal.config import USER_DATA
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

TIMEOUT = 600.0  # seconds without a byte
OTHER_CERTIFICATE = (
    "it is not the coordinator of %s, whose key is sent to no other; give the "
    "--api-key of this one"
)
OTHER_COORDINATOR_HINT = " To use another coordinator, give --url or SHOAL_URL."


class ApiError(ShoalError):
    """The coordinator is unreachable, or refused the request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the coordinator's address and credentials."""
    parser.add_argument(
        "--url",
        default=os.environ.get("SHOAL_URL"),
        help="URL of the coordinator (default: that of the one on this machine, from "
        f"--data-dir, else {DEFAULT_ADDRESS}) [SHOAL_URL]",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SHOAL_API_KEY"),
        metavar="KEY",
        help="API key (default: that of the coordinator on this machine) "
        "[SHOAL_API_KEY]",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA),
        metavar="DIR",
        help="data folder of the coordinator on this machine (default: %(default)s) "
        "[SHOAL_DATA_DIR]",
    )
    parser.add_argument(
        "--cacert",
        type=Path,
        default=os.environ.get("SHOAL_CACERT"),
        metavar="FILE",
        help="PEM file with trusted authorities (default: the system's; for the "
        "coordinator on this machine, its own certificate) [SHOAL_CACERT]",
    )


def base_url(args: argparse.Namespace) -> str:
    """Return the URL of the coordinator."""
    return str(args.url) if args.url else local_url(args.data_dir)


def request(
    args: argparse.Namespace, path: str, body: object = None, method: str | None = None
) -> Any:
    """Return the JSON answer to a request; with a body it is a POST.

    Raises ApiError.
    """
    with _open(args, path, body, method) as answer:
        try:
            return json.load(answer)
        except ValueError as error:
            raise ApiError(
                f"{base_url(args)} is not a Shoal coordinator: {error}"
            ) from error


def request_all(args: argparse.Namespace, path: str) -> Any:
    """Return the JSON answer of a list with the entries of all its pages.

    Raises ApiError.
    """
    answer = request(args, path)
    while answer["next"] is not None:
        page = request(args, f"{path}?{urlencode({'after': answer['next']})}")
        answer = {**page, "data": answer["data"] + page["data"]}
    return answer


def fetch(args: argparse.Namespace, path: str) -> bytes:
    """Return the answer to a request, byte for byte.

    Raises ApiError.
    """
    with _open(args, path, None) as answer:
        return answer.read()


def stream_events(args: argparse.Namespace, path: str, body: object) -> Iterator[Any]:
    """Yield the JSON of each server-sent event of the answer, up to ``[DONE]``.

    Raises ApiError, also for an error event or an incomplete answer.
    """
    with _open(args, path, body) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ApiError(event["error"]["message"])
            yield event
    raise ApiError("the answer is incomplete: the connection ended")


def _open(
    args: argparse.Namespace, path: str, body: object, method: str | None = None
) -> http.client.HTTPResponse:
    given_url = base_url(args)
    key, fingerprint = without_fingerprint(_key(args))
    scheme = "http" if fingerprint is None else "https"
    base = given_url if "://" in given_url else f"{scheme}://{given_url}"
    # Accept the base URL for OpenAI clients as well.
    url = base.rstrip("/").removesuffix("/v1") + path
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {given_url}: expected http://HOST:PORT, or https://")
    check_url(url, fingerprint)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        answer: http.client.HTTPResponse = urlopen(
            Request(url, data, headers, method=method),
            timeout=TIMEOUT,
            context=_context(args, fingerprint) if url.startswith("https:") else None,
        )
    except HTTPError as error:
        with error:
            raise ApiError(_message(error)) from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, WrongServerKey):
            cause = reason if args.api_key else OTHER_CERTIFICATE % args.data_dir
            raise ApiError(
                f"the certificate of {given_url} is not trusted: {cause}"
            ) from error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ApiError(
                f"the certificate of {given_url} is not trusted: "
                f"{reason.verify_message}; give an API key with a fingerprint, as "
                "`shoal serve` prints it, or its authority with --cacert FILE, and in "
                "--url a host name that it is valid for"
            ) from error
        message = getattr(reason, "strerror", None) or reason
        raise ApiError(
            f"cannot reach {given_url}: {message}; is `shoal serve` running there?"
            + ("" if args.url else OTHER_COORDINATOR_HINT)
        ) from error
    return answer


def _context(
    args: argparse.Namespace, fingerprint: bytes | None
) -> ssl.SSLContext | None:
    """Return which servers are trusted; None: those with the system's authorities.

    The key in a coordinator's folder is sent to that coordinator only.

    Raises ConfigError.
    """
    if fingerprint is not None:
        return context_pinning(fingerprint)
    if args.cacert:
        return context_trusting(args.cacert)
    if args.api_key:
        return None
    return context_of_folder(args.data_dir)


def _key(args: argparse.Namespace) -> str:
    if args.api_key:
        return str(args.api_key)
    file = args.data_dir / KEY_FILE
    try:
        return str(file.read_text().strip())
    except OSError as error:
        raise ConfigError(
            "no API key: `shoal serve` creates one for its own machine; elsewhere give "
            f"--api-key or SHOAL_API_KEY ({file}: {error.strerror})"
        ) from error


def _message(error: HTTPError) -> str:
    try:
        reason = json.load(error)["error"]
        return reason if isinstance(reason, str) else str(reason["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} from {error.url}"
