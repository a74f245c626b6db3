"""What embeddings have in common: their limits, and the vectors from a worker."""

import base64
import binascii
import math
import struct
from collections.abc import Iterator

from shoal.domain.errors import JobError
from shoal.domain.outcome import Choice, Outcome

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
