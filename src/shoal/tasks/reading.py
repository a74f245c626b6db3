"""Reads the values that ``values`` writes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks.rich import (
    ARRAY,
    PICKLED,
    REFERENCE,
    SCALAR,
    TAGGED,
    put_together,
    read_array,
    read_scalar,
)

DIGEST_SIZE = 32  # bytes of SHA-256

GetBlob: TypeAlias = Callable[[bytes], memoryview | bytes]
"""Returns what was sent apart, by its digest."""

Unpickle: TypeAlias = Callable[[memoryview], object]
"""Returns what was pickled."""


def no_blobs(digest: bytes) -> memoryview:
    """Refuse what refers to a value that was sent apart."""
    raise InvalidRequest("a value refers to another one that is not here")


class Reader:
    """Reads values.

    Args:
        blob: where those are that were sent apart.
        unpickle: reads what is pickled.  ``unpickled`` does, for whoever trusts the
            writer; if nothing is said, it is refused.
    """

    def __init__(
        self, blob: GetBlob = no_blobs, unpickle: Unpickle | None = None
    ) -> None:
        self._blob = blob
        self._unpickle = not_unpickled if unpickle is None else unpickle
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self._decode_shared = msgspec.msgpack.Decoder(ext_hook=self._shared).decode

    def read(self, data: bytes | bytearray | memoryview) -> Any:
        """Return a value.

        Arrays can be written to, and lie on ``data`` if that can, and copies elsewhere;
        those of blobs lie on the blob, and are read-only.

        Raises InvalidRequest if it is none, or not to be read here.
        """
        return self._read(self._decode, data)

    def _read(
        self, decode: Callable[[Any], Any], data: bytes | bytearray | memoryview
    ) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"a value is no MessagePack: {error}") from error
        except RecursionError as error:
            raise InvalidRequest("values in values, too deep to be read") from error

    def _extension(self, code: int, data: memoryview) -> object:
        return self._extended(code, data, self._decode, shared=False)

    def _shared(self, code: int, data: memoryview) -> object:
        return self._extended(code, data, self._decode_shared, shared=True)

    def _extended(
        self, code: int, data: memoryview, decode: Callable[[Any], Any], *, shared: bool
    ) -> object:
        if code == ARRAY:
            return read_array(data, shared=shared)
        if code == SCALAR:
            return read_scalar(data)
        if code == TAGGED:
            pair = decode(data)
            if type(pair) is not list or len(pair) != 2:
                raise InvalidRequest("a value with a tag is broken")
            return put_together(*pair)
        if code == REFERENCE:
            if len(data) != DIGEST_SIZE:
                raise InvalidRequest("a reference to a value is broken")
            return self._read(self._decode_shared, self._blob(bytes(data)))
        if code == PICKLED:
            return self._unpickle(data)
        raise InvalidRequest(f"a value is of the extension type {code}, not known here")


def unpickled(data: memoryview) -> object:
    """Return what was pickled: this runs whatever its writer wants."""
    import cloudpickle

    return cloudpickle.loads(data)


def not_unpickled(data: memoryview) -> object:
    """Raise InvalidRequest saying how to trust whoever wrote it."""
    raise InvalidRequest(
        "a value is pickled, and reading it runs code of whoever wrote it: it is not "
        "read here; for workers that are to do so, start them with `shoal join "
        "--trust-code`"
    )
