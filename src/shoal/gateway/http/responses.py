"""Encodes and writes responses: JSON, whole or streamed."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.moderation import AnswerModerator
from shoal.domain.outcome import AnswerPiece

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
HTML_TYPE = "text/html"
FORM_TYPE = "multipart/form-data"
SSE_TYPE = "text/event-stream"
NDJSON_TYPE = "application/x-ndjson"  # a JSON value a line
BYTES_TYPE = "application/octet-stream"
CSV_TYPE = "text/csv"


KEY_SHOWN = 8  # digits of a public key that are shown in place of all

_KEY = re.compile("[0-9a-f]{64}", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode


class ItemList(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list in OpenAI's form; the next page is after its ``last_id``."""

    data: Sequence[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
    object: Literal["list"] = "list"


def item_list(
    items: Sequence[T], ids: Sequence[str], has_more: bool = False
) -> ItemList[T]:
    """Return a page; ``ids`` are those of its items, or of others in their place."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return ItemList(items, first, last, has_more)


def well_formed(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def without_keys(text: str) -> str:
    """Shorten the public keys of machines, which may be named by them."""
    return _KEY.sub(lambda found: f"{found[0][:KEY_SHOWN]}…", text)


def encode_text(text: str) -> bytes:
    """Encode a JSON string as JavaScript does: raw UTF-8, controls escaped."""
    try:
        return _encode(text)
    except UnicodeEncodeError:
        return _encode(well_formed(text))


def encode_lines(values: Sequence[Mapping[str, str]]) -> bytes:
    """Encode objects of texts, each for a line, as ``encode_text`` does."""
    try:
        return _encoder.encode_lines(values)
    except UnicodeEncodeError:
        found = [{k: well_formed(text) for k, text in each.items()} for each in values]
        return _encoder.encode_lines(found)


def encode_event_text(text: str) -> bytes:
    """Encode a JSON string for a line of a server-sent event."""
    if text.isascii():
        return _encode(text)
    return _one_line(encode_text(text))


def encode_json(value: object) -> bytes:
    """Encode a value for a body, or for a line of a server-sent event."""
    try:
        encoded = _encode(value)
    except UnicodeEncodeError:
        # Rare and slow: some text in it has a lone surrogate.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        encoded = well_formed(text).encode()
    return encoded if encoded.isascii() else _one_line(encoded)


def encode_event(name: str, value: object) -> bytes:
    """Encode a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))


def _one_line(encoded: bytes) -> bytes:
    # Python clients that use str.splitlines split at these, too.
    for char, escape in _LINE_ENDS:
        encoded = encoded.replace(char, escape)
    return encoded


_LINE_ENDS = tuple(
    (char.encode(), b"\\u%04x" % ord(char)) for char in ("\x85", "\u2028", "\u2029")
)


NO_STORE = {"Cache-Control": "no-store"}
"""For responses that contain a new secret."""


def json_response(
    value: msgspec.Struct, status: int = 200, *, secret: bool = False
) -> web.Response:
    """Return a JSON response; caches do not store a ``secret`` one."""
    return json_bytes_response(msgspec.json.encode(value), status, secret=secret)


def json_bytes_response(
    data: bytes, status: int = 200, *, secret: bool = False
) -> web.Response:
    """Return a response of encoded JSON."""
    return web.Response(
        status=status,
        body=data,
        content_type="application/json",
        headers=NO_STORE if secret else None,
    )


def stream_headers(media: str = SSE_TYPE) -> dict[str, str]:
    """Return the headers of a response that is written as it comes."""
    return {
        "Content-Type": f"{media}; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",  # stops nginx from buffering tokens
    }


SSE_KEEPALIVE = b": keep-alive\n\n"

AT_ONCE_MAX = 16 << 10  # bytes that a connection takes without waiting for its client
WRITE_TIMEOUT = 10.0  # seconds that a client may read nothing
KEEPALIVE_EVERY = 15.0  # seconds of silence that proxies and clients tolerate


class ClientGone(ConnectionError):
    """The client left, or was disconnected because it stopped reading."""


class KeepAlive(Protocol):
    """Makes what is written in a silence; ``early``: when it has just begun."""

    async def __call__(self, *, early: bool) -> bytes: ...


async def _silent(*, early: bool) -> bytes:
    return b""


async def forward_pieces(
    request: web.Request,
    response: web.StreamResponse,
    reader: AnswerCursor,
    encode: Callable[[Sequence[AnswerPiece]], bytes],
    *,
    first: list[AnswerPiece] | None = None,
    keepalive: KeepAlive = _silent,
    watch: AnswerModerator | None = None,
) -> bool:
    """Write the answer until it ends; return whether ``watch`` passed all of it.

    Pieces that arrive together are written together.  ``first`` has the pieces that
    were read before.  ``keepalive`` makes what is written in a silence, and at
    once when the job waits for another worker.

    Raises ClientGone.  ``reader.outcome`` has the end of the job.
    """
    loop, transport = asyncio.get_running_loop(), request.transport
    pieces = first
    reading = early = due = False
    written_at = loop.time()

    def write_now(pieces: Sequence[AnswerPiece]) -> bool:
        """Write pieces where they arrive: waking a task costs more than a piece.

        Not if anything waits to be sent: the client may read slowly.
        """
        nonlocal written_at
        if not reading or transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size():
            return False
        try:
            data = encode(pieces)
        except Exception:  # a fault of this answer, and no worker's
            return False  # it is raised again where the pieces are read
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            written_at = loop.time()
        return True

    def end_silence() -> None:
        nonlocal early
        if reading:
            early = True
            reader.wake()

    def on_time() -> None:
        nonlocal due
        due = True
        reader.wake()

    reader.on_requeue(end_silence)
    if watch is None and response.headers.get("Transfer-Encoding") == "chunked":
        reader.on_pieces(write_now)
    timer = loop.call_at(written_at + KEEPALIVE_EVERY, on_time)
    try:
        while True:
            if pieces is None:
                reading = True
                pieces = await reader.read(once=True)
                reading = False
            if pieces:
                shown = pieces if watch is None else watch.filter(pieces)
                # Pieces of which nothing is written do not end a silence.
                if data := encode(shown) if shown else b"":
                    await write(request, response, data)
                    written_at = loop.time()
                if watch is not None and watch.blocked:
                    return False
            elif reader.is_over:
                return watch is None or not watch.blocks_end()
            pieces = None
            if early or (due and loop.time() >= written_at + KEEPALIVE_EVERY):
                comment, early = await keepalive(early=early), False
                if comment:
                    await write(request, response, comment)
                written_at = loop.time()
            if due:
                due = False
                timer = loop.call_at(written_at + KEEPALIVE_EVERY, on_time)
    finally:
        timer.cancel()


async def write(
    request: web.Request,
    response: web.StreamResponse,
    data: bytes,
    *,
    last: bool = False,
    timeout: float = WRITE_TIMEOUT,
) -> None:
    """Write ``data``, and the end of the response if it is the ``last``.

    Raises ClientGone, also if the client does not read it within ``timeout`` seconds.
    """
    transport = request.transport
    has_room = transport is not None and not transport.get_write_buffer_size()
    at_once = has_room and len(data) <= AT_ONCE_MAX
    try:
        sending = response.write_eof(data) if last else response.write(data)
        if at_once:
            await sending
            return
        async with asyncio.timeout(timeout):
            await sending
    except TimeoutError:
        raise _abort(request) from None
    except ConnectionError as error:
        raise ClientGone from error


def _abort(request: web.Request) -> ClientGone:
    # Closing would wait for the client to read the buffer.
    if request.transport is not None:
        request.transport.abort()
    return ClientGone("the client stopped reading")
