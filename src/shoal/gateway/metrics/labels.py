"""Values of labels whose number must stay bounded, whatever clients and workers do."""

from collections.abc import Collection, Iterable

from shoal.domain.ids import WorkerId
from shoal.gateway.http.responses import without_keys
from shoal.pool.roster import SPECIAL_QUEUES

MODELS_MAX = 200  # models with a label of their own
WORKERS_MAX = 100  # workers with a label of their own
WORKER_MEMORY = 3600.0  # seconds that a worker that left keeps its label
OTHER = "other"


class ModelLabels:
    """Models with a label of their own: the first ``MODELS_MAX`` that workers have."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def label(self, model: str, known: Collection[str]) -> str:
        """Return the label of a model; ``known`` are the models of the pool.

        Tasks and functions have none.
        """
        label = self._labels.get(model)
        if label is None:
            if model in SPECIAL_QUEUES:
                return ""
            if model not in known or len(self._labels) >= MODELS_MAX:
                return OTHER
            label = self._labels[model] = _encodable(model)
        return label


class WorkerLabels:
    """Workers with a label of their own: the first ``WORKERS_MAX`` to connect.

    A worker that has been away for ``WORKER_MEMORY`` makes room for another, so that
    workers under ever new names add a bounded number of series an hour.
    """

    def __init__(self) -> None:
        self._last_seen: dict[WorkerId, float] = {}

    def update(self, connected: Iterable[WorkerId], now: float) -> Collection[str]:
        """Record who is connected; return the labels that workers have lost."""
        seen = self._last_seen
        absent = [
            worker_id for worker_id, at in seen.items() if now - at > WORKER_MEMORY
        ]
        connected = set(connected)
        lost = [worker_id for worker_id in absent if worker_id not in connected]
        for worker_id in lost:
            del seen[worker_id]
        for worker_id in connected & seen.keys():
            seen[worker_id] = now
        return [_worker_label(worker_id) for worker_id in lost]

    def label(self, worker_id: WorkerId, now: float) -> str:
        """Return the label of a worker that is connected, or was until just now."""
        if worker_id not in self._last_seen:
            if len(self._last_seen) >= WORKERS_MAX:
                return OTHER
            self._last_seen[worker_id] = now
        return _worker_label(worker_id)


def _worker_label(worker_id: WorkerId) -> str:
    # Dashboards show the metrics to people without a key of the pool, and only
    # operators see the keys of machines.
    return without_keys(_encodable(worker_id))


def _encodable(name: str) -> str:
    # A lone surrogate in one name would make all metrics unreadable.
    return name.encode(errors="replace").decode()
