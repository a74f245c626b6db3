"""Files for offline verification: canonical JSON, with exactly one encoding."""

from typing import Any, TypeVar

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.ledger.canonical import encode

T = TypeVar("T")

FILE_MAX = 32 * 2**20  # bytes; an output may have 10 MB, and escaping may double it


def write(value: Any) -> bytes:
    """Encode a dataclass in canonical JSON, bytes in base64, with a final newline.

    Raises ValueError as ``encode`` does.
    """
    return encode(msgspec.to_builtins(value)) + b"\n"


def read(data: bytes, type: type[T]) -> T:
    """Decode the output of ``write``.

    Raises InvalidRequest for anything that ``write`` would not have written.
    """
    if len(data) > FILE_MAX:
        raise InvalidRequest(f"the file has {len(data)} bytes, at most {FILE_MAX} do")
    try:
        value = msgspec.json.decode(data, type=type)
        if write(value) != data:
            raise ValueError("it is not in its one canonical form")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the file cannot be read: {error}") from error
    return value
