"""Which compression suits a group's links: measured, agreed on, and logged.

The ranks time their messages, a probing all-reduce, and their codings.  Each takes the
slowest rank's figures, so all compute the same choice from the same numbers.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.training.all_reduces import ChosenCompression, ReducingGroup
from shoal.training.collectives import Array
from shoal.training.compression import sparse_spans
from shoal.training.compression.codings import CODINGS

log = logging.getLogger("shoal.training")

INTERVAL = 256  # all-reduces between two measurements
PROBE_SIZES = (64 << 10, 512 << 10, 4 << 20)  # bytes, until one takes so much longer:
PROBE_SECONDS = 0.05
PROBES = 3  # of which the fastest counts
SLOWER_MAX = 1.5  # for which a compression of less error is preferred

BY_ERROR: Sequence[ChosenCompression] = (None, "fp16", "int8", "topk")
"""The choices, the least error first; bf16 and fp8 are never better than both."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What the slowest rank has measured.

    ``rate``: bytes a second that a rank sends while it receives as many; ``delay``:
    seconds of a message; ``costs``: seconds of a rank for one byte of numbers.
    """

    rate: float
    delay: float
    costs: Mapping[ChosenCompression, float]


def expected_seconds(
    chosen: ChosenCompression, figures: LinkFigures, size: int, ranks: int, ratio: float
) -> float:
    """Return how long an all-reduce of ``size`` bytes takes; ``ratio`` is topk's."""
    moved = 2 * (ranks - 1) / ranks * size
    if chosen is None:
        return 2 * (ranks - 1) * figures.delay + moved / figures.rate
    if chosen == "topk":
        # A kept number and its place have four bytes; of the sum, half are dense.
        moved *= (min(ratio, 0.5) + min(ratio * ranks, 0.5)) / 2
    else:
        moved *= CODINGS[chosen].encoded_size(1 << 20) / (1 << 20)
    return 2 * figures.delay + moved / figures.rate + figures.costs[chosen] * size


def choose(times: Mapping[ChosenCompression, float]) -> ChosenCompression:
    """Return the compression of the least error among those that are fast enough."""
    limit = min(times.values()) * SLOWER_MAX
    return next(each for each in BY_ERROR if each in times and times[each] <= limit)


def measure(
    group: ReducingGroup, clock: Callable[[], float] = time.perf_counter
) -> LinkFigures:
    """Return the figures of a group's links; all ranks call it, and get the same."""

    def agreed(figures: Sequence[float]) -> Array:
        return group.all_reduce(np.array(figures), "max")

    def fastest(call: Callable[[], object]) -> float:
        return min(_seconds(call, clock) for _ in range(PROBES))

    ranks = group.place.size
    number = np.zeros(1, np.float32)
    group.all_reduce(number)  # connects
    own = fastest(partial(group.all_reduce, number))
    (small,) = agreed([own])
    for size in PROBE_SIZES:
        array = np.zeros(size // 4, np.float32)
        (large,) = agreed([fastest(partial(group.all_reduce, array))])
        # Not a delay, nor a burst that a slow link lets through.
        if large - small >= PROBE_SECONDS:
            break
    lossy = [each for each in BY_ERROR if each is not None]
    costs = agreed([fastest(_trial(each)) / TRIAL for each in lossy])
    messages = 2 * (ranks - 1)
    return LinkFigures(
        messages / ranks * size / max(float(large - small), 1e-6),
        float(small) / messages,
        {None: 0.0, **dict(zip(lossy, map(float, costs), strict=True))},
    )


class AutoCompression:
    """Chooses the compression of each all-reduce of a group, from agreed figures."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._figures: LinkFigures | None = None
        self._uses = 0
        self._logged: dict[tuple[int, float], ChosenCompression] = {}

    def choose(
        self, group: ReducingGroup, array: Array, ratio: float = 0.0
    ) -> ChosenCompression:
        """Return the compression of an all-reduce of such an array.

        All ranks call it in the same order.  ``ratio``: of the numbers that topk would
        keep; 0: it would lose the others.
        """
        ranks, size = group.place.size, array.nbytes
        if ranks == 1 or array.dtype != "float32":
            return None
        if self._figures is None or self._uses % INTERVAL == 0:
            self._figures = measure(group, self._clock)
        self._uses += 1
        figures = self._figures
        options = BY_ERROR if ratio else BY_ERROR[:-1]
        times = {
            each: expected_seconds(each, figures, size, ranks, ratio)
            for each in options
        }
        chosen = choose(times)
        if self._logged.get((size, ratio), "") != chosen:
            self._logged[size, ratio] = chosen
            log.info(
                "compression=%s bytes=%d rate_mb_s=%.3g delay_ms=%.3g %s",
                chosen or "none",
                size,
                figures.rate / 1e6,
                figures.delay * 1e3,
                " ".join(f"{k or 'none'}_ms={v * 1e3:.3g}" for k, v in times.items()),
            )
        return chosen


TRIAL = 256 << 10  # bytes of numbers


def _trial(chosen: ChosenCompression) -> Callable[[], None]:
    """Return what a rank computes for ``TRIAL`` bytes: each is decoded twice."""
    numbers = np.sin(np.arange(TRIAL // 4, dtype=np.float32))
    decoded = np.empty_like(numbers)

    def sparse() -> None:
        places = sparse_spans.largest(numbers, numbers.size // 100)
        data = sparse_spans.encode_span(numbers, places)
        for _ in range(2):
            sparse_spans.decode_span(data, places.size, decoded)

    def coded() -> None:
        assert chosen is not None
        assert chosen != "topk"
        coding = CODINGS[chosen]
        data = memoryview(bytearray(coding.encoded_size(TRIAL)))
        coding.encode(numbers.view(np.uint8).data, data)
        for _ in range(2):
            coding.decode(data, decoded.view(np.uint8).data)

    return sparse if chosen == "topk" else coded


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began
