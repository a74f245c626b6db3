"""Reads bodies of multipart/form-data, piece by piece.

Source: RFC 7578.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from shoal.domain.errors import InvalidRequest, TooSlow
from shoal.gateway.http.media_types import FORM_TYPE

PIECE = 1 << 18  # bytes that are passed on at a time
PIECE_TIMEOUT = 60.0  # seconds for a client to send a piece
FIELD_MAX = 4096  # bytes of a field that is not the file
FIELDS_MAX = 32
NAME_MAX = 255  # characters of a file's name
LIST_MARK = "[]"  # ends the names of fields that may be given more than once


class FileWriter(Protocol):
    """Takes the pieces of a file."""

    async def write(self, data: bytes) -> None:
        """Take a piece.  Raises TooLarge, and what else writing raises."""
        ...


@dataclass(slots=True)
class ReceivedForm:
    """A form: the name of its file, and its other fields as text.

    Fields that may be given more than once are in ``lists``, without the mark ``[]``.
    """

    file_name: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)


async def receive_form(request: web.Request, file: FileWriter) -> ReceivedForm:
    """Receive a form; its field ``file`` is written to ``file``.

    Raises InvalidRequest, TooSlow, and what ``file.write`` raises.
    """
    if request.content_type != FORM_TYPE or "Content-Encoding" in request.headers:
        raise InvalidRequest(f"expected {FORM_TYPE} without a Content-Encoding")
    form = ReceivedForm()
    received = 0
    with _reading():
        reader = await request.multipart()
    while (part := await _next_part(reader)) is not None:
        received += 1
        if received > FIELDS_MAX:
            raise InvalidRequest(f"the form has more than {FIELDS_MAX} fields")
        await _receive_part(part, form, file)
    if not form.file_name:
        raise InvalidRequest("file: required, but missing", "file")
    return form


@contextmanager
def _reading() -> Iterator[None]:
    """Translate the errors of aiohttp's reader, and of no other code."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        raise InvalidRequest(f"the form is malformed: {error}") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body is damaged: {error}") from error
    except TimeoutError:
        raise TooSlow(f"no more of the body came for {PIECE_TIMEOUT:g} s") from None


async def _next_part(reader: MultipartReader) -> BodyPartReader | None:
    with _reading():
        async with asyncio.timeout(PIECE_TIMEOUT):
            part = await reader.next()
    if isinstance(part, MultipartReader):
        raise InvalidRequest("the form has a form in it")
    return part


async def _receive_part(
    part: BodyPartReader, form: ReceivedForm, file: FileWriter
) -> None:
    name = part.name or ""
    if name == "file":
        if form.file_name:
            raise InvalidRequest("file: given more than once", "file")
        form.file_name = (part.filename or "file")[:NAME_MAX]
        while piece := await _read(part):
            await file.write(piece)
        return
    shown = name[:80]
    if name in form.fields:
        raise InvalidRequest(f"{shown}: given more than once", shown)
    text = bytearray()
    while piece := await _read(part):
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


async def _read(part: BodyPartReader) -> bytes:
    with _reading():
        async with asyncio.timeout(PIECE_TIMEOUT):
            return bytes(await part.read_chunk(PIECE))
