"""Metrics of requests over HTTP."""

from collections.abc import Callable, Collection, Iterable, Iterator
from operator import add

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal.domain.gen_ai import OPERATION_NAMES
from shoal.domain.histogram import observe
from shoal.domain.ids import WorkerId
from shoal.domain.outcome import Usage
from shoal.domain.work import JobKind
from shoal.gateway.http.request_record import RequestRecord
from shoal.gateway.http.responses import without_keys
from shoal.gateway.metrics.families import HistogramFamily, gauge
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
            if not model or model in SPECIAL_QUEUES:
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
        self._labels: dict[WorkerId, str] = {}  # of the same

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
        return [self._labels.pop(worker_id) for worker_id in lost]

    def label(self, worker_id: WorkerId, now: float) -> str:
        """Return the label of a worker that is connected, or was until just now."""
        label = self._labels.get(worker_id)
        if label is None:
            if len(self._labels) >= WORKERS_MAX:
                return OTHER
            self._last_seen[worker_id] = now
            # Dashboards show the metrics to people without a key of the pool, and only
            # operators see the keys of machines.
            label = self._labels[worker_id] = without_keys(_encodable(worker_id))
        return label


def _encodable(name: str) -> str:
    # A lone surrogate in one name would make all metrics unreadable.
    return name.encode(errors="replace").decode()


METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER_METHOD = "_OTHER"  # OpenTelemetry's value for unknown methods

# Some of those that OpenTelemetry proposes, and no others, so that queries over metrics
# of earlier versions go on: each is a line for each model, operation and error.
SECONDS = (0.01, 0.04, 0.16, 0.64, 1.28, 2.56, 5.12, 20.48, 81.92)
TOKENS = tuple(float(4**power) for power in range(2, 10))
PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)


class AnsweredRequest(msgspec.Struct, frozen=True):
    """What is counted of a request that has ended; one without a ``kind`` had no job.

    ``first_output`` is in seconds since it came.
    """

    method: str
    route: str
    status: int
    seconds: float
    kind: JobKind | None = None
    model: str = ""
    error: str = ""
    first_output: float | None = None
    usage: Usage | None = None


class CountedValues(msgspec.Struct, frozen=True):
    """A histogram of a family, by the values of its labels."""

    family: int  # the place among those of ``RequestMetrics``
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


class CountedRequests(msgspec.Struct, frozen=True):
    """What a front has counted of the requests that it has answered since the last."""

    values: tuple[CountedValues, ...]


class RequestMetrics(Collector):
    """Counts requests that have ended, by route, operation and model.

    ``model_label`` returns the label of a model.
    """

    def __init__(self, model_label: Callable[[str], str]) -> None:
        self.active = 0
        """The number of requests that have not ended."""
        self._model_label = model_label
        labels = ("gen_ai_operation_name", "gen_ai_request_model")
        self._duration = HistogramFamily(
            "gen_ai_server_request_duration_seconds",
            "Time from a request to the end of its answer",
            (*labels, "error_type"),
            SECONDS,
        )
        self._first_output = HistogramFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request to the first output of its answer",
            labels,
            SECONDS,
        )
        self._per_token = HistogramFamily(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, of streamed answers",
            labels,
            PER_TOKEN,
        )
        self._tokens = HistogramFamily(
            "gen_ai_client_token_usage",
            "Tokens read and written for a request",
            (*labels, "gen_ai_token_type"),
            TOKENS,
        )
        self._requests = HistogramFamily(
            "http_server_request_duration_seconds",
            "Time from a request to the end of its answer, by route",
            ("http_request_method", "http_route", "http_response_status_code"),
            SECONDS,
        )
        self._families = (
            *(self._requests, self._duration, self._first_output),
            *(self._per_token, self._tokens),
        )

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "http_server_active_requests", "Requests that have not ended", self.active
        )
        for family in self._families:
            yield from family.collect()

    def add(self, answered: AnsweredRequest) -> None:
        """Count a request that has ended."""
        of = answered
        found = [(self._requests.of[of.method, of.route, str(of.status)], of.seconds)]
        if of.kind is None:
            observe(*found)
            return
        labels = (OPERATION_NAMES[of.kind], self._model_label(of.model))
        found.append((self._duration.of[*labels, of.error], of.seconds))
        first = of.first_output
        if first is not None:
            found.append((self._first_output.of[labels], first))
        if of.usage is not None:
            read, written = of.usage.prompt_tokens, of.usage.completion_tokens
            found.append((self._tokens.of[*labels, "input"], read))
            found.append((self._tokens.of[*labels, "output"], written))
            if first is not None and written > 1:
                per_token = (of.seconds - first) / (written - 1)
                found.append((self._per_token.of[labels], per_token))
        observe(*found)

    def take(self) -> CountedRequests:
        """Return what is counted, and forget it."""
        taken = CountedRequests(
            tuple(
                CountedValues(number, labels, tuple(each.counts), each.total)
                for number, family in enumerate(self._families)
                for labels, each in family.of.items()
            )
        )
        for family in self._families:
            family.of.clear()
        return taken

    def add_counted(self, counted: CountedRequests) -> None:
        """Add what a front has counted."""
        for each in counted.values:
            family, labels = self._families[each.family], each.labels
            if family is not self._requests:  # the front may know other models
                labels = (labels[0], self._model_label(labels[1]), *labels[2:])
            histogram = family.of[labels]
            histogram.counts = [*map(add, histogram.counts, each.counts)]
            histogram.total += each.total


def answered_request(
    request: web.Request, record: RequestRecord, status: int, now: float
) -> AnsweredRequest:
    """Return what is counted of a request that has ended."""
    first = record.first_output
    return AnsweredRequest(
        request.method if request.method in METHODS else OTHER_METHOD,
        _route_label(request),
        status,
        now - record.started_at,
        record.kind,
        record.model,
        record.error,
        None if first is None else first - record.started_at,
        record.usage,
    )


def _route_label(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return OTHER if resource is None else resource.canonical
