"""Metrics as Prometheus' client library shows them, counted at a lower cost.

That library's own counters and histograms take ten calls for each value, and it writes
the text of all of them at once, for some 5 µs a line.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shoal.domain.histogram import Histogram

LINES_MAX = 400  # of a piece of the text: about a millisecond
PIECE = 30  # histograms, of about as many lines


class HistogramPiece(HistogramMetricFamily):
    """Some histograms of a family; ``text`` is kept until one counts a value."""

    text: bytes | None = None


class _Histograms(dict[tuple[str, ...], Histogram]):
    """Histograms by the values of labels, made when they are first asked for."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, values: tuple[str, ...]) -> Histogram:
        made = self[values] = Histogram(self._bounds)
        return made


class HistogramFamily(Collector):
    """Histograms of one name; ``of`` has them by the values of the labels."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.of = _Histograms(bounds)
        # By their first histogram, each with the number of values in it.
        self._pieces: dict[int, tuple[int, HistogramPiece]] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the family in pieces; those without a new value are the same."""
        found = [*self.of.items()]
        for start in range(0, max(1, len(found)), PIECE):
            part = dict(found[start : start + PIECE])
            count = sum(sum(each.counts) for each in part.values())
            known = self._pieces.get(start)
            if known is None or known[0] != count:
                piece = histograms(self._name, self._text, self._labels, part)
                known = self._pieces[start] = (count, piece)
            yield known[1]


def histograms(
    name: str,
    text: str,
    labels: Sequence[str],
    found: Mapping[tuple[str, ...], Histogram],
) -> HistogramPiece:
    """Return histograms by the values of labels."""
    family = HistogramPiece(name, text, labels=labels)
    for values, each in found.items():
        bounds = [*map(floatToGoString, each.bounds), "+Inf"]
        buckets = [*zip(bounds, accumulate(each.counts), strict=True)]
        family.add_metric(values, buckets, each.total)
    return family


def counters(
    name: str, text: str, labels: Sequence[str], found: Mapping[tuple[str, ...], float]
) -> Metric:
    """Return counters by the values of labels; their name gets ``_total``."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in found.items():
        family.add_metric(values, value)
    return family


def gauges(
    name: str, text: str, labels: Sequence[str], found: Mapping[tuple[str, ...], float]
) -> Metric:
    """Return gauges by the values of labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in found.items():
        family.add_metric(values, value)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


async def exposition(metrics: Iterable[Metric]) -> bytes:
    """Return metrics in Prometheus' text format; other tasks run between its pieces.

    Those of a family follow one another.
    """
    written: list[bytes] = []
    name = ""
    for metric in metrics:
        for piece in _pieces(metric):
            text = _text_of(piece)
            # The first lines describe the family, once.
            written.append(text.split(b"\n", 2)[2] if piece.name == name else text)
            name = piece.name
            await asyncio.sleep(0)
    return b"".join(written)


def _pieces(metric: Metric) -> Iterator[Metric]:
    """Yield a metric in pieces of ``LINES_MAX`` lines."""
    samples = metric.samples
    if len(samples) <= LINES_MAX:
        yield metric
        return
    for start in range(0, len(samples), LINES_MAX):
        piece = copy(metric)
        piece.samples = samples[start : start + LINES_MAX]
        yield piece


def _text_of(piece: Metric) -> bytes:
    if not isinstance(piece, HistogramPiece):
        return generate_latest(_One(piece))
    if piece.text is None:
        piece.text = generate_latest(_One(piece))
    return piece.text


class _One(Collector):
    """Collects one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
