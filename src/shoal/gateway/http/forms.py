"""Reads bodies of multipart/form-data, piece by piece.

Source: RFC 7578.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from shoal.domain.errors import InvalidRequest, TooSlow
from shoal.gateway.http.decoding import missing
from shoal.gateway.http.responses import FORM_TYPE

PIECE = 1 << 18  # bytes that are passed on at a time
PIECE_TIMEOUT = 60.0  # seconds for a client to send a piece
RATE_MIN = 16 << 10  # bytes a second of a whole form, which has PIECE_TIMEOUT besides
FIELD_MAX = 4096  # bytes of a field that is not the file
FIELDS_MAX = 32
NAME_MAX = 255  # characters of a file's name
LIST_MARK = "[]"  # ends the names of fields that may be given more than once


class FileWriter(Protocol):
    """Takes the pieces of a file."""

    async def write(self, data: bytes) -> None:
        """Take a piece.  Raises TooLarge, and what else writing raises."""


@dataclass(slots=True)
class ReceivedForm:
    """A form: the name of its file, and its other fields as text.

    Fields that may be given more than once are in ``lists``, without the mark ``[]``.
    """

    file_name: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class SendingPace:
    """How slowly a client may send a form: seconds waited for the bytes received."""

    waited: float = 0.0
    received: int = 0

    @property
    def allowance(self) -> float:
        """The seconds that may pass until more of it comes."""
        left = PIECE_TIMEOUT + self.received / RATE_MIN - self.waited
        return min(PIECE_TIMEOUT, left)


async def receive_form(request: web.Request, file: FileWriter) -> ReceivedForm:
    """Receive a form; its field ``file`` is written to ``file``.

    Raises InvalidRequest, TooSlow, and what ``file.write`` raises.
    """
    if request.content_type != FORM_TYPE or "Content-Encoding" in request.headers:
        raise InvalidRequest(f"expected {FORM_TYPE} without a Content-Encoding")
    form = ReceivedForm()
    pace = SendingPace()
    count = 0
    async with _reading(pace):
        reader = await request.multipart()
    while (part := await _next_part(reader, pace)) is not None:
        count += 1
        if count > FIELDS_MAX:
            raise InvalidRequest(f"the form has more than {FIELDS_MAX} fields")
        await _receive_part(part, form, file, pace)
    if not form.file_name:
        raise missing("file")
    return form


@asynccontextmanager
async def _reading(pace: SendingPace) -> AsyncIterator[None]:
    """Wait for the client within the block, which has aiohttp's reader alone.

    Raises InvalidRequest in place of the reader's errors, TooSlow.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(pace.allowance):
            yield
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        raise InvalidRequest(f"the form is malformed: {error}") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body is damaged: {error}") from error
    except TimeoutError:
        raise TooSlow(
            f"the body arrived too slowly, {pace.received} bytes of it: send at least "
            f"{RATE_MIN} bytes a second, and some every {PIECE_TIMEOUT:g} s"
        ) from None
    finally:
        pace.waited += loop.time() - begun


async def _next_part(
    reader: MultipartReader, pace: SendingPace
) -> BodyPartReader | None:
    async with _reading(pace):
        part = await reader.next()
    if isinstance(part, MultipartReader):
        raise InvalidRequest("the form contains another form")
    return part


async def _receive_part(
    part: BodyPartReader, form: ReceivedForm, file: FileWriter, pace: SendingPace
) -> None:
    name = part.name or ""
    if name == "file":
        if form.file_name:
            raise InvalidRequest("file: given more than once", "file")
        form.file_name = (part.filename or "file")[:NAME_MAX]
        while piece := await _read(part, pace):
            await file.write(piece)
        return
    shown = name[:80]
    if name in form.fields:
        raise InvalidRequest(f"{shown}: given more than once", shown)
    text = bytearray()
    while piece := await _read(part, pace):
        text += piece
        if len(text) > FIELD_MAX:
            raise InvalidRequest(f"{shown}: more than {FIELD_MAX} bytes", shown)
    try:
        value = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{shown}: not in UTF-8", shown) from error
    if name.endswith(LIST_MARK):
        form.lists.setdefault(name.removesuffix(LIST_MARK), []).append(value)
    else:
        form.fields[name] = value


async def _read(part: BodyPartReader, pace: SendingPace) -> bytes:
    async with _reading(pace):
        piece = bytes(await part.read_chunk(PIECE))
    pace.received += len(piece)
    return piece
