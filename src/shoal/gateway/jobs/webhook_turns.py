"""The order of webhook deliveries: keys take turns, slow receivers share a slot."""

from collections import Counter
from collections.abc import Collection, Iterable

from shoal.domain.ids import JobId
from shoal.store.webhooks import DeliveryState

CONCURRENT_MAX = 8  # deliveries; each holds a job's result of at most 16 MiB
CONCURRENT_PER_KEY_MAX = 4  # a key whose receivers do not answer leaves room for others
CONCURRENT_PER_LANE_MAX = 2  # of one key, to one host and port
REMEMBERED_MAX = 1000  # keys that had a turn, and slow lanes; the oldest are forgotten


class WebhookTurns:
    """The deliveries in progress, and which keys and lanes wait for others.

    A lane whose last attempt timed out is slow: all slow lanes share one slot.
    """

    def __init__(self) -> None:
        self._in_flight: dict[JobId, DeliveryState] = {}
        self._served: dict[str, None] = {}  # keys, the last one to have its turn last
        self._slow: dict[str, None] = {}  # lanes, the oldest first

    @property
    def has_room(self) -> bool:
        """Whether another delivery may begin."""
        return len(self._in_flight) < CONCURRENT_MAX

    @property
    def jobs(self) -> Collection[JobId]:
        """The jobs of the deliveries in progress."""
        return self._in_flight.keys()

    @property
    def full_keys(self) -> set[str]:
        """The keys that wait for deliveries of their own."""
        counts = Counter(each.owner for each in self._in_flight.values())
        return {key for key, count in counts.items() if count >= CONCURRENT_PER_KEY_MAX}

    @property
    def full_lanes(self) -> set[str]:
        """The lanes that wait for deliveries in progress."""
        counts = Counter(each.lane for each in self._in_flight.values())
        full = {
            lane for lane, count in counts.items() if count >= CONCURRENT_PER_LANE_MAX
        }
        return full if self._slow.keys().isdisjoint(counts) else full | set(self._slow)

    def choose(
        self, first: Iterable[DeliveryState], now: float
    ) -> DeliveryState | None:
        """Return which of the first deliveries of lanes is next; it may be due later.

        Of those due, it is of the key whose last turn was longest ago.  Returns None if
        all wait for deliveries in progress.
        """
        full_keys, full_lanes = self.full_keys, self.full_lanes
        turns = {key: turn for turn, key in enumerate(self._served)}

        def order(each: DeliveryState) -> tuple[float, int, float]:
            due_at = each.due_at or 0.0
            return max(due_at, now), turns.get(each.owner, -1), due_at

        able = (
            each
            for each in first
            if each.owner not in full_keys and each.lane not in full_lanes
        )
        return min(able, key=order, default=None)

    def begin(self, tried: DeliveryState) -> None:
        """Note the beginning of an attempt."""
        self._in_flight[tried.delivery.job_id] = tried
        _put_last(self._served, tried.owner)

    def end(self, tried: DeliveryState, *, timed_out: bool) -> None:
        """Note the end of an attempt."""
        del self._in_flight[tried.delivery.job_id]
        if timed_out:
            _put_last(self._slow, tried.lane)
        else:
            self._slow.pop(tried.lane, None)


def _put_last(remembered: dict[str, None], name: str) -> None:
    remembered.pop(name, None)
    remembered[name] = None
    if len(remembered) > REMEMBERED_MAX:
        del remembered[next(iter(remembered))]
