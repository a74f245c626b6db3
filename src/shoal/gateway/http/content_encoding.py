"""Decompresses request bodies, a little at a time.

aiohttp would decompress what has arrived in one go, also of bodies that were refused:
a body of 4 MiB can become 4 GiB.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from shoal.domain.errors import InvalidRequest

PIECE = 256 << 10  # bytes that are decompressed at once, which takes a millisecond

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's parameter for the format


class Inflater:
    """The decompressed pieces of a body.  ``encoding`` is ``gzip`` or ``deflate``."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None  # zlib's, whose type has no public name

    @classmethod
    def of(cls, content_encoding: str) -> "Inflater | None":
        """Return the one for a ``Content-Encoding``; None: it is not compressed.

        Raises InvalidRequest for an encoding that is not supported.
        """
        encoding = content_encoding.strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in ("gzip", "deflate"):
            raise InvalidRequest(
                f"Content-Encoding: {encoding[:40]!a} is not supported: send "
                "gzip, deflate, or the plain body"
            )
        return cls(encoding)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Return what more data becomes, in pieces of ``PIECE`` bytes at most.

        Raises InvalidRequest if it is damaged.
        """
        try:
            while data:
                if self._stream is None:
                    self._stream = zlib.decompressobj(self._format(data))
                yield self._stream.decompress(data, PIECE)
                data = self._stream.unconsumed_tail
                if self._stream.eof:
                    # More members of a gzip file may follow (RFC 1952, section 2.2).
                    data = self._stream.unused_data
                    self._stream = None
        except zlib.error as error:
            raise InvalidRequest(f"the body is damaged: {error}") from error

    def check_end(self) -> None:
        """Raise InvalidRequest if the end of the body is missing."""
        if self._stream is not None:
            raise InvalidRequest(
                f"the body is damaged: its {self._encoding} is cut off"
            )

    def _format(self, data: bytes) -> int:
        if self._encoding == "gzip":
            return _GZIP
        # Some clients leave out the header of zlib, whose low bits are 8.
        return _ZLIB if data[0] & 0x0F == 8 else _RAW
