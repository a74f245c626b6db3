"""When the tasks of a connection are overdue, on wires whose tasks have timeouts."""

from collections.abc import Iterator


class TaskDeadlines:
    """The tasks of one connection that have a timeout, by id.

    Tasks with the same timeout are due in the order in which they were added, so adding
    and removing one takes constant time.
    """

    def __init__(self, grace: float = 0.0) -> None:
        """Create it; a task is due ``grace`` seconds after its timeout."""
        self._grace = grace
        self._timeouts: dict[str, float] = {}
        self._added_at: dict[float, dict[str, float]] = {}  # by timeout, in order

    @property
    def due(self) -> float | None:
        """When the first task is due; None: never."""
        return min(
            (
                next(iter(tasks.values())) + timeout + self._grace
                for timeout, tasks in self._added_at.items()
            ),
            default=None,
        )

    def add(self, task_id: str, timeout: float, now: float) -> None:
        """Add a task that is not there yet."""
        self._timeouts[task_id] = timeout
        self._added_at.setdefault(timeout, {})[task_id] = now

    def remove(self, task_id: str) -> None:
        """Remove a task, if it is there."""
        timeout = self._timeouts.pop(task_id, None)
        if timeout is None:
            return
        tasks = self._added_at[timeout]
        del tasks[task_id]
        if not tasks:
            del self._added_at[timeout]

    def take_overdue(self, now: float) -> Iterator[tuple[str, float]]:
        """Remove the tasks that are due; yield each with its timeout."""
        for timeout, tasks in list(self._added_at.items()):
            latest = now - timeout - self._grace
            for task_id, added_at in list(tasks.items()):
                if added_at > latest:
                    break
                self.remove(task_id)
                yield task_id, timeout
