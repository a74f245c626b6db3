"""Monitors an engine: what it can run now, and why nothing while it is unavailable."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.domain.errors import Unavailable
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Engine
from shoal.worker.agent import WorkerEvent

CHECK_INTERVAL = 10.0  # seconds between looks at an engine
CHECK_SOON = 1.0  # seconds before it is looked at because something happened
CHECK_TIMEOUT = 10.0  # seconds for it to answer
TIMEOUTS_MAX = 2  # looks in a row that a busy engine may leave without an answer


class EngineMonitor:
    """One engine, looked at now and then, and when it did not take a job.

    Args:
        engine: started; whoever started it closes it.
        report: told when the engine is withdrawn, and when it is back.
    """

    def __init__(self, engine: Engine, report: Callable[[WorkerEvent], None]) -> None:
        self.engine = engine
        self.unavailable_reason: str | None = None
        self._report = report
        self._news = asyncio.Event()
        self._silent = 0  # looks in a row without an answer

    @property
    def models(self) -> Sequence[ServedModel]:
        """What it can run: nothing, if it does not answer."""
        return self.engine.models if self.unavailable_reason is None else ()

    def request_check(self) -> None:
        """Have the engine looked at soon, for something happened."""
        self._news.set()

    async def wait(self, leaving: asyncio.Event) -> None:
        """Wait until the next look: not for long, if something happened."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_INTERVAL - CHECK_SOON):
                await self._news.wait()
        # A busy engine may refuse a thousand jobs meanwhile: one look is enough.
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SOON):
                await leaving.wait()

    async def check(self) -> None:
        """Ask the engine what it has; it has ten seconds to say so."""
        self._news.clear()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                await self.engine.refresh()
        except TimeoutError:
            self._silent += 1
            if self._silent >= TIMEOUTS_MAX:
                self._withdraw(f"no answer within {CHECK_TIMEOUT:g} s")
        except Unavailable as error:
            self._withdraw(str(error))
        else:
            self._silent = 0
            if self.unavailable_reason is not None:
                self.unavailable_reason = None
                self._report(WorkerEvent("available"))

    def _withdraw(self, reason: str) -> None:
        if self.unavailable_reason is None:
            self.unavailable_reason = f"the engine is unavailable: {reason}"
            self._report(WorkerEvent("unavailable", reason))
