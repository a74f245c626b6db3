"""A coordinator for tests that block: it answers in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from client.coordinator import KEY, Coordinator
from harness.speed import PATIENCE
from shoal import Pool


@dataclass(slots=True)
class CoordinatorThread:
    """A coordinator in another thread."""

    coordinator: Coordinator
    loop: asyncio.AbstractEventLoop

    def pool(
        self, *, key: str = KEY, durable: bool = True, trust_code: bool = False
    ) -> Pool:
        return Pool(self.coordinator.url, key, durable=durable, trust_code=trust_code)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in its thread, and wait for it."""
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self.loop)
        done.result(PATIENCE)

    def functions(self, **functions: Callable[..., Any]) -> "CoordinatorThread":
        self.coordinator.functions.update(functions)
        return self


@pytest.fixture
def beside() -> Iterator[CoordinatorThread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = CoordinatorThread(Coordinator(), loop)
    server.run(server.coordinator.start())
    try:
        yield server
    finally:
        server.run(server.coordinator.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
