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

ACCEPTED: frozenset[type] = frozenset(
    {RunJob, CancelJob, Dismiss, PushCalls, CancelCalls, SendBlob}
)
CALLS = frozenset({JobKind.CALL, JobKind.CALL_STREAM})
VALUES = frozenset({Feature.VALUES})
RECORD = b"a record"
"""The record of its functions' exceptions, which only clients read."""


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def call(name: str, *args: object, needs: frozenset[Feature] = frozenset()) -> Call:
    return Call(name, pack(args), pack({}), needs=needs)


class FunctionWorker:
    """Calls its functions at once, or holds all calls if ``holds``.

    Held calls are in ``runs`` and ``calls``, for the test to answer.
    """

    def __init__(
        self,
        hub: Hub,
        functions: dict[str, Callable[..., object]],
        name: str = "w",
        slots: int = 1,
        features: frozenset[Feature] = VALUES,
        accepts: frozenset[type] = ACCEPTED,
        *,
        holds: bool = False,
        pythons: frozenset[str] = frozenset(),
    ) -> None:
        self.accepts = accepts
        self.holds = holds
        self.commands: list[Command] = []
        self.runs: list[RunJob] = []
        self.streams: dict[tuple[JobId, LeaseNumber], CallStream] = {}
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
        expressible = self.accepts | {CancelJob} if self.streams else self.accepts
        assert type(message) in expressible, "unsupported by the wire"
        self.commands.append(message)
        # Later, as over a wire: the hub is in the middle of a step.
        self._loop.call_soon(self._handle, message)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        self.port.on_disconnect(reason)

    def received(self, kind: type[Command]) -> list[Any]:
        return [each for each in self.commands if isinstance(each, kind)]

    def finish(self, run: int = -1, value: object = None) -> None:
        """Complete a held call."""
        job = self.runs[run]
        self.port.on_event(Completed(job.job_id, job.lease, value=pack(value)))

    def return_all(self, value: object = None, *, error: str = "") -> None:
        """Return a value, or an error with a record, from all held calls."""
        held, self.calls = self.calls, []
        for job_id, lease, made in held:
            result = CallResult(made.number, RECORD if error else pack(value), error)
            self.port.on_event(CallsReturned(job_id, lease, [result]))

    def return_calls(self, *numbers: int, error: str = "") -> None:
        """Return from held calls of a call stream, by their numbers."""
        for number in numbers:
            (job_id, lease, made) = next(
                each for each in self.calls if each[2].number == number
            )
            value = b"" if error else pack(unpack(made.args))
            self.port.on_event(
                CallsReturned(job_id, lease, [CallResult(number, value, error)])
            )

    def drop(self) -> None:
        self.port.on_disconnect("connection lost")

    def _handle(self, message: Command) -> None:
        match message:
            case RunJob(job_id, lease, CallStream() as stream):
                self.streams[job_id, lease] = stream
            case RunJob(job_id, lease, Call() as made):
                self.runs.append(message)
                if not self.holds:
                    self._run(job_id, lease, made)
            case PushCalls(job_id, lease, calls):
                if self.holds:
                    self.calls += [(job_id, lease, each) for each in calls]
                    return
                name = self.streams[job_id, lease].name
                returns = [self._return(name, each) for each in calls]
                self.port.on_event(CallsReturned(job_id, lease, returns))
            case CancelJob(job_id, lease):
                if (job_id, lease) in self.streams:
                    del self.streams[job_id, lease]
                    if CancelJob not in self.accepts:
                        self.port.on_event(Completed(job_id, lease))
            case _:
                pass  # ignores other commands

    def _run(self, job_id: JobId, lease: LeaseNumber, made: Call) -> None:
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
