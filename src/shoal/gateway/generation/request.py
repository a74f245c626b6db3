"""A request for text, decoded from any dialect."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.domain.work import Chat, Completion

W_co = TypeVar("W_co", bound=Chat | Completion, covariant=True)


@dataclass(frozen=True, slots=True)
class GenerationRequest(Generic[W_co]):
    """A request for text, and how to answer it.

    ``include_usage``: a stream of chunks ends with the usage.  ``session`` is the
    client's name for related requests; ``tier`` is the service tier that it asks for.
    """

    work: W_co
    stream: bool = False
    include_usage: bool = False
    session: str = ""
    tier: str = ""
