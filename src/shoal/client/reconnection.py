"""Retries of requests, at another address or while their coordinator restarts."""

from dataclasses import dataclass

from shoal.client.errors import ConnectionLost

FIRST_WAIT = 3.0  # seconds, before the first response: the URL may be wrong
RECONNECT_TIMEOUT = 60.0  # seconds, after a response, or if it is shutting down
# Seconds between attempts; the last one repeats.
RETRY_DELAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)

COORDINATOR = "x-shoal-coordinator"
"""Header of a coordinator's responses; a proxy's error pages lack it."""

STOPPING = "x-shoal-stopping"
"""Header of a coordinator's refusals while it shuts down."""

IDEMPOTENCY_KEY = "Idempotency-Key"
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})  # RFC 9110, section 9.2.2

PROXY_STATUSES = range(502, 505)
"""Statuses of a proxy that cannot reach its coordinator."""


@dataclass(slots=True)
class Reconnection:
    """Whether a coordinator ``is_known``: whether it has answered before.

    ``turn`` counts the requests that failed: each next one is for another address.
    """

    is_known: bool = False
    turn: int = 0


class Attempts:
    """The attempts to send a request; ``repeatable``: it is idempotent.

    Each of the ``addresses`` of the pool is tried before there is a pause.
    """

    def __init__(
        self, coordinator: Reconnection, *, repeatable: bool, addresses: int = 1
    ) -> None:
        self.failed = 0
        self._addresses = addresses
        self._coordinator = coordinator
        self._repeatable = repeatable
        self._began = 0.0  # when the first one failed

    @property
    def begins_to_wait(self) -> bool:
        """Whether all addresses have failed for the first time."""
        return self.failed == self._addresses

    def pause(self, error: ConnectionLost, now: float) -> float | None:
        """Return the seconds until the next attempt; None: ``error`` is the result.

        ``now`` is in monotonic seconds.
        """
        if not self.failed:
            self._began = now
        limit = self._limit(error)
        waited = self.failed - (self._addresses - 1)
        self.failed += 1
        self._coordinator.turn += 1
        if waited < 0 and (self._repeatable or not error.sent):
            return 0.0
        pause = RETRY_DELAYS[min(max(waited, 0), len(RETRY_DELAYS) - 1)]
        return None if now + pause > self._began + limit else pause

    def _limit(self, error: ConnectionLost) -> float:
        if error.sent and not self._repeatable:
            return 0.0
        if self._coordinator.is_known or error.is_stopping:
            return RECONNECT_TIMEOUT
        return 0.0 if error.is_final else FIRST_WAIT
