"""A caller with real processes, and helpers that call its functions."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.domain.errors import Unavailable
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream, Feature
from shoal.tasks import function_caller
from shoal.tasks.function_caller import CallStreamSlot
from shoal.tasks.process_pool import ProcessPool
from shoal.tasks.values import Form, ValueReader, load_pickle, pack

TESTS = Path(__file__).parents[1]
DEMO, TYPED = "tasks.demo_tasks", "tasks.typed_tasks"
CODE = frozenset({Feature.CODE})
IMPORTABLE = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
}
"""Variables of processes that import the modules of the tests."""


def call(name: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Call:
    """Return a call as a client writes it."""
    return Call(name, pack([*args]).data, pack(kwargs).data, timeout, exact=True)


def code_call(function: object, *args: Any) -> Call:
    """Return a call of a function that is sent as code."""
    packed = pack([function, *args], form=Form.PICKLED)
    return Call("code", packed.data, pack({}).data, None, CODE, exact=True)


async def no_blobs(digest: bytes) -> Path:
    raise Unavailable("there are no blobs here")


def ignore_progress(share: float | None, remark: str) -> None:
    pass


@dataclass
class ProcessCaller:
    """A process pool, called with Python values."""

    processes: function_caller.FunctionCaller

    async def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await self.run(call(name, *args, **kwargs))

    async def run(self, call: Call) -> Any:
        value = await self.processes.call(call, no_blobs, ignore_progress)
        return ValueReader(unpickle=load_pickle).read(value)


@dataclass
class RecordedStream:
    """A call stream with its results so far."""

    returns: list[CallResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: CallStreamSlot | None = None

    @classmethod
    def open(
        cls, processes: function_caller.FunctionCaller, stream_work: CallStream
    ) -> "RecordedStream":
        calling = cls()
        calling.stream = processes.open_stream(stream_work, no_blobs, calling.returned)
        return calling

    def returned(self, returns: list[CallResult]) -> None:
        self.returns += returns
        self.changed.set()

    def push(self, *calls: tuple[Any, ...], first: int = 0) -> None:
        """Push calls with these arguments, numbered from ``first``."""
        assert self.stream is not None
        self.stream.push(
            [
                StreamedCall(number, pack([*args]).data, pack({}).data)
                for number, args in enumerate(calls, first)
            ]
        )

    async def wait_for(self, count: int) -> Sequence[tuple[int, Any]]:
        """Wait for results; return their numbers with values or errors."""
        while len(self.returns) < count:
            self.changed.clear()
            await self.changed.wait()
        return [
            (each.number, each.error or ValueReader().read(each.value))
            for each in self.returns
        ]


@asynccontextmanager
async def caller_of(
    *modules: str, slots: int = 1, trust_code: bool = False, sharers: int = 1
) -> AsyncIterator[ProcessCaller]:
    """Start processes that have the tasks of modules, or of the demo."""
    processes = ProcessPool(
        modules or (DEMO,),
        slots,
        trust_code=trust_code,
        sharers=sharers,
        variables=IMPORTABLE,
    )
    try:
        await processes.start()
        yield ProcessCaller(processes)
    finally:
        await processes.close()


@dataclass
class Gate:
    """Two FIFOs: a call of ``waits`` reports its start to one and waits for another."""

    begun: Path
    go: Path

    @classmethod
    def make(cls, folder: Path) -> "Gate":
        if sys.platform == "win32":
            pytest.skip("Windows has no FIFOs")
        gate = cls(folder / "begun", folder / "go")
        os.mkfifo(gate.begun)
        os.mkfifo(gate.go)
        return gate

    @property
    def args(self) -> tuple[str, str]:
        return str(self.begun), str(self.go)

    async def reached(self) -> str:
        return await asyncio.to_thread(self.begun.read_text)

    async def open(self) -> None:
        await asyncio.to_thread(self.go.write_text, "go")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.make(tmp_path)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules of the tests importable in processes."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
