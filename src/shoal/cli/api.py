"""A small client of the coordinator's own HTTP API, for the commands."""

import argparse
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from shoal.config import USER_DATA
from shoal.domain.errors import ConfigError, ShoalError

DEFAULT_URL = "http://127.0.0.1:4010"
TIMEOUT = 600.0  # seconds without a byte


class ApiError(ShoalError):
    """The coordinator could not be asked, or said no."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which coordinator to ask, and as whom."""
    parser.add_argument(
        "--url",
        default=os.environ.get("SHOAL_URL", DEFAULT_URL),
        help="the coordinator (default: %(default)s) [SHOAL_URL]",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SHOAL_API_KEY"),
        metavar="KEY",
        help="(default: the key of the coordinator on this machine) [SHOAL_API_KEY]",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA),
        metavar="DIR",
        help="where that coordinator keeps its data [SHOAL_DATA_DIR]",
    )


def ask(args: argparse.Namespace, path: str, body: object = None) -> Any:
    """Return the JSON answer to a request; with a body it is a POST.

    Raises ApiError.
    """
    with _open(args, path, body) as answer:
        try:
            return json.load(answer)
        except ValueError as error:
            raise ApiError(f"{args.url} is no coordinator of ours: {error}") from error


def events(args: argparse.Namespace, path: str, body: object) -> Iterator[Any]:
    """Yield the JSON of each server-sent event of the answer, up to ``[DONE]``.

    Raises ApiError, also for an error event or an answer that breaks off.
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
    raise ApiError("the answer broke off")


def _open(
    args: argparse.Namespace, path: str, body: object
) -> http.client.HTTPResponse:
    base = args.url if "://" in args.url else f"http://{args.url}"
    # The base URL that OpenAI clients are given is as good.
    url = base.rstrip("/").removesuffix("/v1") + path
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args.url}: expected http://HOST:PORT")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {_key(args)}"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        answer: http.client.HTTPResponse = urlopen(
            Request(url, data, headers), timeout=TIMEOUT
        )
    except HTTPError as error:
        with error:
            raise ApiError(_message(error)) from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise ApiError(
            f"cannot reach {args.url}: {reason}; is `shoal serve` running there?"
        ) from error
    return answer


def _key(args: argparse.Namespace) -> str:
    if args.api_key:
        return str(args.api_key)
    file = args.data_dir / "api-key"
    try:
        return str(file.read_text().strip())
    except OSError as error:
        raise ConfigError(
            f"no API key: give --api-key or SHOAL_API_KEY ({file}: {error.strerror})"
        ) from error


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} from {error.url}"
