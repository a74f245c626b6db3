"""Reads a server's answer to a request for embeddings.

Source: OpenAI API reference, "Create embeddings".  Servers send numbers where they do
not know the base64 form, which is asked for because it is a quarter of the work.
"""

import base64
import binascii
import sys
from array import array

import msgspec

from shoal.domain.errors import JobError
from shoal.domain.outcome import Delta, Usage
from shoal.engines.chunks import Tokens
from shoal.engines.refusals import UNREADABLE, failure, read_problem

ANSWER_MAX = 256 * 1024 * 1024  # bytes: 2048 inputs of 4096 numbers, written out
FLOAT = 4  # bytes


class Vector(msgspec.Struct, frozen=True):
    embedding: list[float] | str
    index: int


class Vectors(msgspec.Struct, frozen=True):
    data: list[Vector]
    usage: Tokens | None = None


def read_vectors(
    body: bytes, inputs: int, secret: str = ""
) -> tuple[list[Delta], Usage | None]:
    """Return a piece for each of so many ``inputs``, in their order.

    Raises JobError if these are no such vectors, and whatever ``failure`` makes of an
    error in their place.
    """
    try:
        answer = msgspec.json.decode(body, type=Vectors)
    except UNREADABLE as error:
        if read_problem(body) is not None:
            raise failure(body, secret) from error
        raise JobError(f"the server sent no embeddings: {error}") from error
    if sorted(vector.index for vector in answer.data) != list(range(inputs)):
        raise JobError(f"the server sent {len(answer.data)} embeddings for {inputs}")
    pieces = [
        Delta(vector.index, {"embedding": encoded(vector.embedding)})
        for vector in sorted(answer.data, key=lambda vector: vector.index)
    ]
    tokens = answer.usage
    if tokens is None or not tokens.plausible:
        return pieces, None
    return pieces, Usage(tokens.prompt_tokens, 0)


def encoded(vector: list[float] | str) -> str:
    """Return float32 numbers, little-endian, in base64.

    Raises JobError if the text is not that, or there are no numbers.
    """
    if isinstance(vector, str):
        try:
            size = len(base64.b64decode(vector, validate=True))
        except binascii.Error as error:
            raise JobError(f"the server sent an embedding: {error}") from error
        if not size or size % FLOAT:
            raise JobError(f"the server sent an embedding of {size} bytes")
        return vector
    if not vector:
        raise JobError("the server sent an embedding without numbers")
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
