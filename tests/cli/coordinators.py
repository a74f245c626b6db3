"""Servers on 127.0.0.1 that answer as coordinators do, or differently."""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeAlias

Answers: TypeAlias = Mapping[str, object]
"""What is answered, in JSON, by path."""

NEVER = object()
"""Stands for an answer that does not come."""

# As recorded with an original coordinator, but for the time.
ORIGINAL: Mapping[str, Any] = {
    "status": "ok",
    "workers_online": 0,
    "network": "eip155:10143",
    "timestamp": "2026-02-09T12:00:05.000Z",
}


class Sites(Protocol):
    """Starts servers; returns the URL of each.

    ``status`` is that of the answers.  With ``redirects`` each answer is a URL to go
    to.  What is posted is put into ``posted``.
    """

    def __call__(
        self,
        answers: Answers,
        *,
        status: int = 200,
        redirects: bool = False,
        posted: list[Any] | None = None,
    ) -> Awaitable[str]: ...
