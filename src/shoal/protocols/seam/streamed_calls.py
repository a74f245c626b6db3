"""The calls in a worker's call streams, across its connections to one coordinator.

A stream that its coordinator resumes goes on with them.  A coordinator that has lost
the stream, as after a restart, gives its stored calls as jobs of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import TypeAlias

from msgspec import Struct

from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber

CALLS_KEPT_MAX = 512  # calls, open or with a result, that are kept for a coordinator
RESULTS_MAX = 2 * CALLS_KEPT_MAX  # results, from which the oldest are dropped
RESULTS_SIZE = 8 << 20  # bytes of the results that are kept
RESULT_SECONDS = 60.0  # seconds for which a result is kept, which may have been lost


class CallPlace(Struct, frozen=True):
    """Where a call is: its stream, by the worker's id, and its number there."""

    stream: JobId
    number: int


_Result: TypeAlias = tuple[words.CallName | None, words.CallResult, float]
"""A result that may have been lost on its way: its call's name, and when it came."""


class CallsPushed(Struct):
    """What follows from calls that a coordinator sends."""

    new: list[words.StreamedCall]
    known: list[words.CallResult]  # results, of calls that were made before
    unwanted: list[CallPlace]


@dataclass(slots=True)
class _Stream:
    """An open stream.

    ``calls`` are those without a result, in order.  ``given`` are those that are jobs
    of their own now.  ``repeats``: all wanted calls are sent next.
    """

    calls: dict[int, words.CallName | None] = field(default_factory=dict)
    given: dict[int, words.CallName] = field(default_factory=dict)
    repeats: bool = False


@dataclass(slots=True)
class StreamedCalls:
    """The calls of all streams of a worker at one coordinator."""

    _streams: dict[JobId, _Stream] = field(default_factory=dict)
    _results: dict[CallPlace, _Result] = field(default_factory=dict)  # oldest first
    _places: dict[JobId, CallPlace] = field(default_factory=dict)  # of stored calls
    _results_size: int = 0

    def open(self, stream: JobId) -> None:
        """Begin to note the calls of a stream."""
        self._streams[stream] = _Stream()

    def close(self, stream: JobId) -> None:
        """Forget the open calls of a stream, which has ended."""
        if (known := self._streams.pop(stream, None)) is not None:
            for number, name in known.calls.items():
                self._forget_name(name, CallPlace(stream, number))

    def repeat(self, stream: JobId) -> None:
        """Expect all calls of a stream again: its coordinator goes on with it."""
        known = self._streams[stream]
        known.repeats = True
        known.given.clear()

    def is_done(self, stream: JobId) -> bool:
        """Return whether a stream has no open call."""
        return not self._streams[stream].calls

    def push(self, stream: JobId, message: words.PushCalls) -> CallsPushed:
        """Note calls that a coordinator sends."""
        known = self._streams[stream]
        pushed = CallsPushed([], [], [])
        if known.repeats:
            known.repeats = False
            wanted = {each.number for each in message.calls}
            left_out = [each for each in known.calls if each not in wanted]
            pushed.unwanted.extend(CallPlace(stream, each) for each in left_out)
        names = chain(message.names, repeat(None))
        for call, name in zip(message.calls, names, strict=False):
            place = CallPlace(stream, call.number)
            if call.number in known.calls:
                continue
            earlier = place if name is None else self._places.get(name[0], place)
            if (result := self._results.get(earlier)) is not None:
                pushed.known.append(result[1]._replace(number=call.number))
                continue
            if earlier != place:
                pushed.unwanted.append(earlier)  # it is made anew
            known.calls[call.number] = name
            if name is not None:
                self._places[name[0]] = place
            pushed.new.append(call)
        return pushed

    def recall(self, stream: JobId, numbers: Sequence[int]) -> None:
        """Forget calls that are not wanted."""
        known = self._streams[stream]
        for number in numbers:
            self._forget_name(known.calls.pop(number, None), CallPlace(stream, number))
            known.given.pop(number, None)

    def take_results(
        self, stream: JobId, results: Sequence[words.CallResult], now: float
    ) -> tuple[list[words.CallResult], list[words.Completed | words.Failed]]:
        """Note results; return those of the stream, and the ends of the other calls."""
        known = self._streams[stream]
        ends: list[words.Completed | words.Failed] = []
        returned: list[words.CallResult] = []
        for result in results:
            name = known.calls.pop(result.number, None)
            self._results[CallPlace(stream, result.number)] = name, result, now
            self._results_size += len(result.value)
            given = known.given.pop(result.number, None) if known.given else None
            if given is None:
                returned.append(result)
            else:
                ends.append(_end(given, result))
        if len(self._results) > RESULTS_MAX or self._results_size > RESULTS_SIZE:
            self._drop_results(now)
        return returned, ends

    # When the connection was lost.

    def detach(self, now: float) -> list[CallPlace]:
        """Keep what has a name, up to a limit; return the calls that have no room."""
        self._drop_results(now)
        room, lost = CALLS_KEPT_MAX, list[CallPlace]()
        for stream, known in self._streams.items():
            known.given.clear()
            named = [n for n, name in known.calls.items() if name is not None]
            lost += [CallPlace(stream, number) for number in named[room:]]
            room = max(0, room - len(named))
        for place in lost:
            self.recall(place.stream, [place.number])
        return lost

    def unnamed(self, stream: JobId) -> list[int]:
        """Return the open calls of a stream that are not stored."""
        calls = self._streams[stream].calls.items()
        return [number for number, name in calls if name is None]

    def not_given(self, stream: JobId) -> list[int]:
        """Return the open calls of a stream that are no jobs of their own."""
        known = self._streams[stream]
        return [number for number in known.calls if number not in known.given]

    @property
    def names(self) -> list[words.CallName]:
        """The names of the open calls, and of the last ones with a result."""
        opened = (
            name for each in self._streams.values() for name in each.calls.values()
        )
        ended = (name for name, _, _ in reversed(self._results.values()))
        known = (name for name in chain(opened, ended) if name is not None)
        return [*islice(known, CALLS_KEPT_MAX)]

    def place_of(self, job_id: JobId) -> CallPlace | None:
        """Return where a stored call is open; None: nowhere."""
        place = self._places.get(job_id)
        return None if place in self._results else place

    def find(self, job_id: JobId, lease: LeaseNumber) -> CallPlace | None:
        """Return where the call of a name is, open or with a result."""
        place = self._places.get(job_id)
        if place is None:
            return None
        known = self._streams.get(place.stream)
        name = None if known is None else known.calls.get(place.number)
        if (result := self._results.get(place)) is not None:
            name = result[0]
        return place if name == (job_id, lease) else None

    def give(
        self, place: CallPlace, job_id: JobId, lease: LeaseNumber
    ) -> words.Completed | words.Failed | None:
        """Go on with a call as a job of its own, under a lease; return its end."""
        name = (job_id, lease)
        if (result := self._results.get(place)) is not None:
            self._results[place] = name, *result[1:]
            return _end(name, result[1])
        known = self._streams[place.stream]
        known.calls[place.number] = known.given[place.number] = name
        return None

    def given(self, stream: JobId) -> list[words.CallName]:
        """Return the calls of a stream that are jobs of their own; else none."""
        known = self._streams.get(stream)
        return [] if known is None else [*known.given.values()]

    def forget_result(self, place: CallPlace) -> bool:
        """Drop a result that is not needed; return whether there was one."""
        if (result := self._results.pop(place, None)) is None:
            return False
        self._results_size -= len(result[1].value)
        self._forget_name(result[0], place)
        return True

    def _forget_name(self, name: words.CallName | None, place: CallPlace) -> None:
        if name is not None and self._places.get(name[0]) == place:
            del self._places[name[0]]

    def _drop_results(self, now: float) -> None:
        """Drop what is kept for too long, and the oldest of too much."""
        results = self._results
        for place, (name, result, at) in [*results.items()]:
            too_many = len(results) > CALLS_KEPT_MAX
            too_many = too_many or self._results_size > RESULTS_SIZE
            if not too_many and now - at < RESULT_SECONDS:
                return
            # Without other functions: all results come here.
            del results[place]
            self._results_size -= len(result.value)
            if name is not None and self._places.get(name[0]) == place:
                del self._places[name[0]]


def _end(
    name: words.CallName, result: words.CallResult
) -> words.Completed | words.Failed:
    """Return how a call ended, as a job of its own."""
    if result.error:
        return words.Failed(*name, result.error, exception=result.value)
    return words.Completed(*name, value=result.value)
