"""How a dialect writes the answer to one job: whole, or as a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.gateway.http.media_types import SSE_TYPE
from shoal.gateway.http.responses import SSE_KEEPALIVE


class StreamEncoder(Protocol):
    """Writes the stream of one answer.

    Whichever method is called first also writes what begins a stream.
    """

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Write what came."""
        ...

    def encode_end(self, outcome: Outcome) -> bytes:
        """Write what comes after the last piece of a whole answer."""
        ...

    def encode_error(self, error: ShoalError) -> bytes:
        """Write how an answer ends that breaks off."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The encoders of the answer to one job.

    Both take the job's id and the time in Unix seconds.  A stream is of the type
    ``media``; ``keepalive`` is written where it has been silent, if it is not empty.
    If it ``names_workers``, a comment precedes what another worker writes than the one
    in the headers.
    """

    encode: Callable[[JobId, Outcome, int], bytes]
    stream: Callable[[JobId, int], StreamEncoder]
    media: str = SSE_TYPE
    keepalive: bytes = SSE_KEEPALIVE
    names_workers: bool = False
