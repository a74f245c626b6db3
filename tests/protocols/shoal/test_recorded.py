"""What the first release with this wire sends, at either end, is understood later.

``recorded/first_release.json`` has the bytes of each step of a conversation.  A wire
that cannot read them any more is another version: then both ends have to say so.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protocols import pairs
from protocols.calling import (
    CALL,
    MEMBER,
    OFFER,
    REQUEST,
    STREAM,
    TASK,
    fleet_context,
    packed,
)
from protocols.session_pair import sent
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelQuery,
)
from shoal.domain.outcome import Delta, Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallResult,
    CallsReturned,
    CancelJob,
    Completed,
    Draining,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import Completion, Embedding, Work
from shoal.domain.worker import MachineHealth, WorkerLoad
from shoal.protocols.seam.endpoints import WebSocketRoute
from shoal.protocols.seam.peer_session import ALL_PEERS, ToPeer
from shoal.protocols.seam.session import BoundSession, Close
from shoal.protocols.shoal import PROTOCOL

RECORDED = Path(__file__).parent / "recorded" / "first_release.json"
LEASE = LeaseNumber(1)
MODEL_OFFER = replace(OFFER, models=frozenset({"qwen3-8b"}), context=8192)
JOBS: dict[str, Work] = {
    "chat": pairs.CHAT,
    "completion": Completion("qwen3-8b", "Once", 16, 0.5, {"top_p": 0.9}),
    "embedding": Embedding("qwen3-8b", ("a", "b"), {}),
    "task": TASK,
    "call": CALL,
    "stream": STREAM,
    "refused": CALL,
    "cancelled": CALL,
    "failed": pairs.CHAT,
}


def job(name: str) -> tuple[JobId, LeaseNumber]:
    return JobId(name), LEASE


COMMANDS: Sequence[Any] = (
    *(RunJob(*job(name), work) for name, work in JOBS.items()),
    PushCalls(*job("stream"), [StreamedCall(1, packed([2]), packed({}))]),
    CancelJob(*job("cancelled")),
    SendBlob(bytes(32), b"a large value"),
    ModelQuery("qwen3-8b"),
)
EVENTS: Sequence[Any] = (
    OffersChanged((MODEL_OFFER,)),
    LoadChanged(WorkerLoad(queued=2, full=True)),
    HealthReported(MachineHealth(12.5, 50.0, 1)),
    AnswerChunk(*job("chat"), ["Hello", Delta(0, {"reasoning_content": "x"})]),
    Completed(*job("chat"), "stop", Usage(3, 2, 1)),
    Completed(*job("completion"), "length", None, (" upon",)),
    Completed(*job("task"), "stop", None, output="{}"),
    Completed(*job("call"), "stop", None, value=packed(42)),
    CallsReturned(*job("stream"), [CallResult(1, packed(4))]),
    Rejected(*job("refused"), "no room"),
    Failed(*job("failed"), "too long", Fault.CONTEXT),
    Draining("stopped by its owner"),
    ModelAnswer("qwen3-8b", available=True),
)
"""What the worker says, after all commands."""


class Conversation:
    """Both ends of this release, which may hear a recording in place of each other."""

    def __init__(self) -> None:
        routes = PROTOCOL.endpoints(PROTOCOL.config(), fleet_context())
        route = routes[0]
        assert isinstance(route, WebSocketRoute)
        self.coordinator: Any = route.accept(REQUEST, 0.0).session
        dialer = PROTOCOL.dial("http://127.0.0.1:4010", MEMBER)
        self.worker: Any = dialer.start_session({})
        for end in (self.coordinator, self.worker):
            assert isinstance(end, BoundSession)
            end.bind(b"the only channel")

    def run(
        self, heard: Callable[[str, Sequence[bytes]], Sequence[bytes]]
    ) -> tuple[list[Any], list[Any]]:
        """Return what the coordinator and the worker hear.

        ``heard`` takes the name of a step and what an end of this release sends, and
        returns what the other hears.
        """
        self.coordinator.tick(0.0)
        hello = _bytes(self.worker.tick(0.0))
        events = self._hear(self.coordinator, heard("worker's hello", hello))
        answer = _bytes(events)
        commands = self._hear(self.worker, heard("coordinator's hello", answer))
        ids: dict[JobId, JobId] = {}
        for number, command in enumerate(COMMANDS):
            data = _bytes(self.coordinator.send(ToPeer(ALL_PEERS, command), 0.0))
            told = self._hear(self.worker, heard(f"command {number}", data))
            for each in told:
                if isinstance(each, RunJob):
                    ids[command.job_id] = each.job_id
            commands += told
        for number, event in enumerate(EVENTS):
            if hasattr(event, "job_id"):
                event = replace(event, job_id=ids[event.job_id])
            data = _bytes(self.worker.send(event, 0.0))
            events += self._hear(self.coordinator, heard(f"event {number}", data))
        return events, commands

    def _hear(self, end: Any, messages: Sequence[bytes]) -> list[Any]:
        found = [each for data in messages for each in end.receive([data], 0.0)]
        assert not [each for each in found if isinstance(each, Close)]
        return found


def _bytes(outputs: Sequence[Any]) -> list[bytes]:
    return [each for each in sent(outputs, joined=False) if isinstance(each, bytes)]


def recorded() -> dict[str, list[bytes]]:
    steps: dict[str, list[str]] = json.loads(RECORDED.read_text())
    return {
        step: [bytes.fromhex(each) for each in data] for step, data in steps.items()
    }


def plain(messages: Sequence[Any]) -> list[Any]:
    """Return messages without what each release says of itself, and receipts."""
    found = [getattr(each, "message", each) for each in messages]
    return [
        replace(each, receipt=None) if isinstance(each, Completed) else each
        for each in found
        if type(each) in {type(known) for known in (*COMMANDS, *EVENTS)}
    ]


@pytest.mark.parametrize("recorded_end", ["worker", "coordinator"])
def test_the_first_release_is_understood(recorded_end: str) -> None:
    """One end is of the first release: the other hears what it sent then."""
    steps = recorded()
    theirs = {"worker": ("worker", "event"), "coordinator": ("coordinator", "command")}

    def as_then(step: str, now: Sequence[bytes]) -> Sequence[bytes]:
        return steps[step] if step.startswith(theirs[recorded_end]) else now

    then = Conversation().run(as_then)
    today = Conversation().run(lambda step, now: now)

    assert [plain(each) for each in then] == [plain(each) for each in today]


def test_all_that_was_said_is_heard() -> None:
    events, commands = Conversation().run(lambda step, now: now)

    heard = [type(each) for each in plain(events)]
    assert heard.count(OffersChanged) >= 1
    assert {type(each) for each in EVENTS} <= {*heard}
    assert {type(each) for each in COMMANDS} == {type(e) for e in plain(commands)}


def record() -> None:
    """Write what this release sends: once, before the wire is released."""
    steps: dict[str, list[str]] = {}

    def keep(step: str, now: Sequence[bytes]) -> Sequence[bytes]:
        steps[step] = [data.hex() for data in now]
        return now

    Conversation().run(keep)
    RECORDED.write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    record()
