"""Inputs that are texts or tokens, and the vectors that workers make of them.

Clients that cut texts to a model's context count tokens with the library tiktoken, and
then send the tokens: LangChain's ``OpenAIEmbeddings`` does by default.  For a model
that tiktoken does not know, and for those of OpenAI that make embeddings, they are
those of the encoding ``cl100k_base``; no other model reads them.

Source: OpenAI's API reference, "Create completion" and "Create embeddings".
"""

import asyncio
import base64
import binascii
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shoal.domain.errors import CannotDo, InvalidRequest, JobError, NotReady, TooLarge
from shoal.domain.json_limits import VALUES_MAX
from shoal.domain.outcome import Choice, Outcome
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.decoding import decode_field

if TYPE_CHECKING:
    import tiktoken

ENCODING = "cl100k_base"

LOAD_TIMEOUT = 10.0  # seconds that a request waits for the vocabulary
RETRY_AFTER = 60.0  # seconds
DECODE_INLINE_MAX = 10_000  # tokens that are decoded in the event loop's thread

REMEDY = "send texts: LangChain does with check_embedding_ctx_length=False"


class EncodingMissing(Exception):
    """The library or the vocabulary is missing."""


class TokenTexts:
    """Decodes tokens; ``load`` loads the encoding when the first ones come.

    It runs once at a time, in a thread of its own that ends with the process, for a
    download may hang.  After a failure it is not called again for ``RETRY_AFTER``.
    """

    def __init__(self, load: "Callable[[], tiktoken.Encoding] | None" = None) -> None:
        self._load = load or load_encoding
        self._loading: asyncio.Future[tiktoken.Encoding] | None = None
        self._loaded_at = 0.0  # by the loop's clock

    async def decode(self, inputs: Sequence[Sequence[int]], field: str) -> list[str]:
        """Return a text for each list of tokens; ``field`` is theirs in the body.

        Raises InvalidRequest for tokens that the encoding does not have, CannotDo if
        the encoding cannot be loaded, and NotReady while it is loaded.
        """
        encoding = await self._encoding(field)
        if sum(map(len, inputs)) <= DECODE_INLINE_MAX:
            return _decode(encoding, inputs, field)
        return await asyncio.to_thread(_decode, encoding, inputs, field)

    async def _encoding(self, field: str) -> "tiktoken.Encoding":
        loop = asyncio.get_running_loop()
        loading = self._loading
        if loading is None or (
            loading.done()
            and loading.exception() is not None
            and loop.time() - self._loaded_at > RETRY_AFTER
        ):
            loading = self._loading = self._begin_loading(loop)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                return await asyncio.shield(loading)
        except EncodingMissing as error:
            raise CannotDo(f"{field}: {error}: {REMEDY}", field) from error
        except TimeoutError:
            raise NotReady(
                f"{field}: the coordinator is still downloading the vocabulary of "
                f"{ENCODING}: try again, or {REMEDY}"
            ) from None

    def _begin_loading(
        self, loop: asyncio.AbstractEventLoop
    ) -> "asyncio.Future[tiktoken.Encoding]":
        loading: asyncio.Future[tiktoken.Encoding] = loop.create_future()

        def finish(encoding: "tiktoken.Encoding | EncodingMissing") -> None:
            self._loaded_at = loop.time()
            if isinstance(encoding, EncodingMissing):
                loading.set_exception(encoding)
                loading.exception()  # counts as retrieved: no request may wait any more
            else:
                loading.set_result(encoding)

        def load() -> None:
            found: tiktoken.Encoding | EncodingMissing
            try:
                found = self._load()
            except EncodingMissing as error:
                found = error
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(finish, found)

        threading.Thread(target=load, name="load-encoding", daemon=True).start()
        return loading


def _decode(
    encoding: "tiktoken.Encoding", inputs: Sequence[Sequence[int]], field: str
) -> list[str]:
    texts: list[str] = []
    size = 0
    for index, tokens in enumerate(inputs):
        try:
            texts.append(encoding.decode(tokens, errors="replace"))
        except KeyError as error:
            path = f"{field}[{index}]"
            raise InvalidRequest(
                f"{path}: not tokens of {ENCODING}: {REMEDY}", path
            ) from error
        size += len(texts[-1])
        if size > BODY_MAX:
            raise TooLarge(f"{field}: the texts exceed the limit of {BODY_MAX} bytes")
    return texts


def load_encoding() -> "tiktoken.Encoding":
    """Load the encoding; tiktoken downloads the vocabulary that it does not find.

    Raises EncodingMissing.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise EncodingMissing(
            "the coordinator reads tokens only with the package tiktoken, which is not "
            "installed there: pip install tiktoken"
        ) from error
    try:
        return tiktoken.get_encoding(ENCODING)
    # ValueError: what came is not a vocabulary, but for instance a login page.
    except (OSError, ValueError) as error:
        raise EncodingMissing(
            f"the coordinator could not download the vocabulary of {ENCODING}, which "
            "is not in its folder TIKTOKEN_CACHE_DIR either"
        ) from error


TOKENS_MAX = 1 << 20
BODY_VALUES_MAX = TOKENS_MAX + VALUES_MAX  # in a body with tokens

TextOrTokens: TypeAlias = str | list[str] | list[int] | list[list[int]]

Token = Annotated[int, Meta(ge=0, lt=2**31)]

_TOKENS = {"type": "array", "items": {"type": "integer"}}
_FORMS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    _TOKENS,
    {"type": "array", "items": _TOKENS},
]

RawTextOrTokens = Annotated[msgspec.Raw, Meta(extra_json_schema={"anyOf": _FORMS})]
"""A field of a body, for ``decode_text_or_tokens``."""


@dataclass(frozen=True, slots=True)
class _Form:
    decoder: msgspec.json.Decoder[Any]
    what: str


_BY_BEGINNING = {
    b'"': _Form(msgspec.json.Decoder(str), "text"),
    b'["': _Form(msgspec.json.Decoder(list[str]), "texts"),
    b"[": _Form(msgspec.json.Decoder(list[Token]), "tokens"),
    b"[[": _Form(msgspec.json.Decoder(list[list[Token]]), "lists of tokens"),
}
"""Forms by their first characters: msgspec allows one list type in a union."""

_BEGINNING = re.compile(rb'"|\[\s*["\[]?')


def decode_text_or_tokens(raw: msgspec.Raw, field: str, count_max: int) -> TextOrTokens:
    """Decode a field: at most ``count_max`` texts or lists; an empty list is invalid.

    Raises InvalidRequest.
    """
    data = bytes(raw)
    found = _BEGINNING.match(data)
    beginning = b"" if found is None else b"".join(found[0].split())
    if not beginning:
        raise _invalid(field)
    form = _BY_BEGINNING[beginning]
    limit = TOKENS_MAX if beginning == b"[" else count_max
    # Check before decoding: a list takes two bytes in JSON, and sixty in memory.
    if beginning == b"[[" and data.count(b"[") > limit + 1:
        raise _too_many(field, limit, form.what)
    try:
        value: TextOrTokens = decode_field(form.decoder, raw, field, BODY_MAX)
    except InvalidRequest as error:
        raise _invalid(field) from error
    if not isinstance(value, str):
        if not value:
            raise _invalid(field)
        if len(value) > limit:
            raise _too_many(field, limit, form.what)
    return value


def _invalid(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: expected a text, texts, tokens, or lists of tokens", field
    )


def _too_many(field: str, limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: more than {limit} {what}", field)


INPUTS_MAX = 2048  # texts in one request, as with OpenAI
DIMENSIONS_MAX = 1 << 16

FLOAT = 4  # bytes
LARGE_ANSWER = 256  # vectors: larger answers are encoded in a thread


def vectors_of(outcome: Outcome, wanted: int) -> Iterator[tuple[str, list[float]]]:
    """Yield each vector, as base64 of float32 (little-endian) and as numbers.

    Raises JobError if the worker did not give as many as ``wanted``, or an invalid one.
    """
    if len(outcome.choices) != wanted:
        given = len(outcome.choices)
        raise JobError(f"the worker returned {given} vectors for {wanted} texts")
    return map(_vector, outcome.choices)


def _vector(choice: Choice) -> tuple[str, list[float]]:
    encoded = choice.fields.get("embedding")
    if not isinstance(encoded, str):
        raise _vector_error("no text")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise _vector_error(str(error)) from error
    if not data or len(data) % FLOAT:
        raise _vector_error(f"{len(data)} bytes, expected float32 numbers")
    values = struct.unpack(f"<{len(data) // FLOAT}f", data)
    # JSON cannot express others.  A sum of float32 in double precision is finite if
    # all of them are.
    if not math.isfinite(sum(values)):
        raise _vector_error("a number in it is not finite")
    return encoded, list(values)


def _vector_error(problem: str) -> JobError:
    return JobError(f"the worker returned an invalid vector: {problem}")
