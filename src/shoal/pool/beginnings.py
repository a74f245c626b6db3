"""The beginnings of conversations that workers have lately read.

An engine keeps what it has computed for the last prompts: one that begins like an
earlier prompt is read from where the two differ.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from shoal.domain.ids import WorkerId
from shoal.domain.job import Job
from shoal.domain.work import Chat, message_text

READ_MAX = 4 << 20  # characters of a job; a longer one is not read for its beginnings
CHARACTERS_MIN = 256  # of a beginning: to read fewer again costs next to nothing
FIRST_KEPT = 2  # beginnings of a chat that are compared: the shortest …
LAST_KEPT = 14  # … and the longest
OF_WORKER_MAX = 4096  # beginnings that are remembered of one worker
MAX = 65_536  # of all workers together


Beginning: TypeAlias = tuple[int, int]
"""The first messages of a chat: a key, and the number of their characters."""


def beginnings_of(job: Job, size: int) -> Sequence[Beginning]:
    """Return the beginnings of a chat that end with a message, the shortest first.

    ``size`` are the job's characters.  Chats have a beginning in common only if they
    are of the same owner and have the same model and tools.  Keys are Python's hashes,
    whose seed each process draws: they mean nothing elsewhere.
    """
    work = job.work
    if not isinstance(work, Chat) or size > READ_MAX:
        return ()
    tools = msgspec.json.encode(work.options.get("tools"))
    key = hash((job.owner, job.terms.user, work.model, tools))
    characters = 0
    found: list[Beginning] = []
    for message in work.messages:
        content = message.get("content")
        if isinstance(content, str) and len(message) == len(("role", "content")):
            key = hash((key, message.get("role"), content))
            characters += len(content)
        else:
            key = hash((key, msgspec.json.encode(message)))
            characters += len(message_text(message))
        if characters >= CHARACTERS_MIN:
            found.append((key, characters))
    return found[:FIRST_KEPT] + found[FIRST_KEPT:][-LAST_KEPT:]


@dataclass(slots=True)
class KnownBeginnings:
    """Which workers have read which beginnings; those unused the longest are dropped.

    A worker that has left has none.
    """

    readers: dict[int, dict[WorkerId, None]] = field(default_factory=dict)
    """The workers that have read each beginning, the latest last."""

    _by_worker: dict[WorkerId, dict[int, None]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def of_worker(self, worker_id: WorkerId) -> Collection[int]:
        """Return the keys of what a worker has read, the latest last."""
        return self._by_worker.get(worker_id, ())

    def record(self, worker_id: WorkerId, beginnings: Sequence[Beginning]) -> None:
        """Note that a worker reads a chat with these beginnings."""
        if not beginnings:
            return
        mine = self._by_worker.setdefault(worker_id, {})
        # The longest first, so that it is dropped before those that it begins with.
        for key, _ in reversed(beginnings):
            self._count += key not in mine
            mine.pop(key, None)  # put at the end again
            mine[key] = None
            readers = self.readers.pop(key, {})
            readers.pop(worker_id, None)
            readers[worker_id] = None
            self.readers[key] = readers
        while len(mine) > OF_WORKER_MAX:
            self._drop(next(iter(mine)), worker_id)
        while self._count > MAX:
            oldest, readers = next(iter(self.readers.items()))
            self._drop(oldest, next(iter(readers)))

    def forget(self, worker_id: WorkerId) -> None:
        """Drop what a worker has read."""
        for key in [*self._by_worker.get(worker_id, ())]:
            self._drop(key, worker_id)

    def _drop(self, key: int, worker_id: WorkerId) -> None:
        self._count -= 1
        del self.readers[key][worker_id]
        if not self.readers[key]:
            del self.readers[key]
        del self._by_worker[worker_id][key]
        if not self._by_worker[worker_id]:
            del self._by_worker[worker_id]
