"""When the tasks of a connection are overdue, on wires whose tasks have timeouts."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

STALE_MAX = 64  # entries of removed tasks that are always tolerated


class TaskDeadlines:
    """The tasks of one connection that have a timeout, by id.

    A heap by due time.  Entries of removed tasks stay in it until they come first or
    outnumber the others, so adding and removing takes logarithmic time on average.
    """

    def __init__(self, grace: float = 0.0) -> None:
        """Create it; a task is due ``grace`` seconds after its timeout."""
        self._grace = grace
        self._tasks: dict[str, tuple[float, float]] = {}  # due time and timeout, by id
        self._heap: list[tuple[float, str]] = []  # due time and id

    @property
    def due(self) -> float | None:
        """When the first task is due; None: never."""
        heap = self._heap
        while heap and self._is_stale(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else None

    def add(self, task_id: str, timeout: float, now: float) -> None:
        """Add a task that is not there yet."""
        due = now + timeout + self._grace
        self._tasks[task_id] = due, timeout
        heappush(self._heap, (due, task_id))

    def remove(self, task_id: str) -> None:
        """Remove a task, if it is there."""
        if self._tasks.pop(task_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._tasks) + STALE_MAX:
            self._heap = [(due, id) for id, (due, _) in self._tasks.items()]
            heapify(self._heap)

    def take_overdue(self, now: float) -> Iterator[tuple[str, float]]:
        """Remove the tasks that are due; yield each with its timeout."""
        while (due := self.due) is not None and due <= now:
            _, task_id = heappop(self._heap)
            _, timeout = self._tasks.pop(task_id)
            yield task_id, timeout

    def _is_stale(self, entry: tuple[float, str]) -> bool:
        due, task_id = entry
        task = self._tasks.get(task_id)
        return task is None or task[0] != due
