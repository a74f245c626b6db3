"""A worker that calls functions, as the hub sees its connection."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.coordinator.hub import Hub
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CallProgress,
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Failed,
    Joined,
    PushCalls,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import Call, CallStream, Feature, JobKind
from shoal.domain.worker import Offer

HEARS: frozenset[type] = frozenset(
    {RunJob, CancelJob, Dismiss, PushCalls, CancelCalls, SendBlob}
)
CALLS = frozenset({JobKind.CALL, JobKind.CALL_STREAM})
VALUES = frozenset({Feature.VALUES})
RECORD = b"a record"
"""Of the exceptions of its functions; only clients read it."""


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def call(name: str, *args: object, needs: frozenset[Feature] = frozenset()) -> Call:
    return Call(name, pack(args), pack({}), needs=needs)


class Functions:
    """Calls its functions at once, unless it is told to hold what comes.

    What it holds is in ``runs`` and ``calls``, for the test to answer.
    """

    def __init__(
        self,
        hub: Hub,
        functions: dict[str, Callable[..., object]],
        name: str = "w",
        slots: int = 1,
        features: frozenset[Feature] = VALUES,
        accepts: frozenset[type] = HEARS,
        *,
        holds: bool = False,
        pythons: frozenset[str] = frozenset(),
    ) -> None:
        self.accepts = accepts
        self.holds = holds
        self.told: list[Command] = []
        self.runs: list[RunJob] = []
        self.lanes: dict[tuple[JobId, LeaseNumber], CallStream] = {}
        self.calls: list[tuple[JobId, LeaseNumber, StreamedCall]] = []
        self._functions = functions
        self._loop = asyncio.get_running_loop()
        self.port = hub.connect(self, "wire")
        names = frozenset(functions)
        self.port.on_event(
            Joined(
                name,
                Offer(
                    CALLS, frozenset(), slots, features, tasks=names, pythons=pythons
                ),
            )
        )

    def send(self, message: Command) -> bool:
        # A wire that cannot cancel calls can still end a stream of them.
        expressible = self.accepts | {CancelJob} if self.lanes else self.accepts
        assert type(message) in expressible, "asked for what its wire cannot express"
        self.told.append(message)
        # Later, as over a wire: the hub is in the middle of something.
        self._loop.call_soon(self._heard, message)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        self.port.on_disconnect(reason)

    def told_of(self, kind: type[Command]) -> list[Any]:
        return [each for each in self.told if isinstance(each, kind)]

    def finish(self, run: int = -1, value: object = None) -> None:
        """Answer a call that was held."""
        job = self.runs[run]
        self.port.on_event(Completed(job.job_id, job.lease, value=pack(value)))

    def return_all(self, value: object = None, *, error: str = "") -> None:
        """Return a value from all calls that were held, or an error with a record."""
        held, self.calls = self.calls, []
        for job_id, lease, made in held:
            result = CallResult(made.number, RECORD if error else pack(value), error)
            self.port.on_event(CallsReturned(job_id, lease, [result]))

    def say_return(self, *numbers: int, error: str = "") -> None:
        """Return from calls in a lane that were held, by their numbers."""
        for number in numbers:
            (job_id, lease, made) = next(
                each for each in self.calls if each[2].number == number
            )
            value = b"" if error else pack(unpack(made.args))
            self.port.on_event(
                CallsReturned(job_id, lease, [CallResult(number, value, error)])
            )

    def lose(self) -> None:
        self.port.on_disconnect("connection lost")

    def _heard(self, message: Command) -> None:
        match message:
            case RunJob(job_id, lease, CallStream() as lane):
                self.lanes[job_id, lease] = lane
            case RunJob(job_id, lease, Call() as made):
                self.runs.append(message)
                if not self.holds:
                    self._call(job_id, lease, made)
            case PushCalls(job_id, lease, calls):
                if self.holds:
                    self.calls += [(job_id, lease, each) for each in calls]
                    return
                name = self.lanes[job_id, lease].name
                returns = [self._return(name, each) for each in calls]
                self.port.on_event(CallsReturned(job_id, lease, returns))
            case CancelJob(job_id, lease):
                if (job_id, lease) in self.lanes:
                    del self.lanes[job_id, lease]
                    if CancelJob not in self.accepts:
                        self.port.on_event(Completed(job_id, lease))
            case _:
                pass  # it plays no other part

    def _call(self, job_id: JobId, lease: LeaseNumber, made: Call) -> None:
        try:
            self.port.on_event(CallProgress(job_id, lease, 0.5, "half"))
            value = self._functions[made.name](*unpack(made.args))
        except ArithmeticError as error:
            self.port.on_event(Failed(job_id, lease, repr(error), exception=RECORD))
        else:
            self.port.on_event(Completed(job_id, lease, value=pack(value)))

    def _return(self, name: str, made: StreamedCall) -> CallResult:
        try:
            value = self._functions[name](*unpack(made.args))
        except ArithmeticError as error:
            return CallResult(made.number, RECORD, repr(error))
        return CallResult(made.number, pack(value))
