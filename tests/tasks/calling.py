"""A caller with real processes, and what calls its functions."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.domain.errors import Unavailable
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.domain.work import Call, Feature, Lane
from shoal.tasks import port
from shoal.tasks.port import OpenLane
from shoal.tasks.processes import Processes
from shoal.tasks.reading import Reader, unpickled
from shoal.tasks.values import pack

TESTS = Path(__file__).parents[1]
DEMO = "tasks.demo_tasks"
CODE = frozenset({Feature.CODE})


def call(name: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Call:
    """Return a call as a client writes it."""
    return Call(name, pack(args).data, pack(kwargs).data, timeout)


def code_call(function: object, *args: Any) -> Call:
    """Return a call of a function that is sent along."""
    packed = pack([function, *args], pickles=True)
    return Call("code", packed.data, pack({}).data, None, CODE)


async def no_blobs(digest: bytes) -> Path:
    raise Unavailable("there are no blobs here")


def unheard(share: float | None, remark: str) -> None:
    pass


@dataclass
class Caller:
    """Processes, and what calls them with values."""

    processes: port.Caller

    async def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await self.make(call(name, *args, **kwargs))

    async def make(self, call: Call) -> Any:
        value = await self.processes.call(call, no_blobs, unheard)
        return Reader(unpickle=unpickled).read(value)


@dataclass
class Calling:
    """A lane, and what has returned of it."""

    returns: list[LaneReturn] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    lane: OpenLane | None = None

    @classmethod
    def begin(cls, processes: port.Caller, lane: Lane) -> "Calling":
        calling = cls()
        calling.lane = processes.lane(lane, no_blobs, calling.returned)
        return calling

    def returned(self, returns: list[LaneReturn]) -> None:
        self.returns += returns
        self.news.set()

    def push(self, *calls: tuple[Any, ...], first: int = 0) -> None:
        """Push calls with these arguments, numbered from ``first``."""
        assert self.lane is not None
        self.lane.push(
            [
                LaneCall(number, pack(args).data, pack({}).data)
                for number, args in enumerate(calls, first)
            ]
        )

    async def until(self, count: int) -> Sequence[tuple[int, Any]]:
        """Wait for so many returns; give their numbers with values or errors."""
        while len(self.returns) < count:
            self.news.clear()
            await self.news.wait()
        return [
            (each.number, each.error or Reader().read(each.value))
            for each in self.returns
        ]


@asynccontextmanager
async def caller_of(
    *modules: str, slots: int = 1, trust_code: bool = False
) -> AsyncIterator[Caller]:
    """Start processes that have the tasks of modules, or of the demo."""
    processes = Processes(modules or (DEMO,), slots, trust_code=trust_code)
    try:
        await processes.start()
        yield Caller(processes)
    finally:
        await processes.close()


@dataclass
class Gate:
    """Two FIFOs by which a call of ``waits`` tells that it runs, and is let go on."""

    begun: Path
    go: Path

    @classmethod
    def make(cls, folder: Path) -> "Gate":
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
    """Let processes import what stands among the tests."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
