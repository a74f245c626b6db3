"""Monitors an engine: its models, whether they are loaded, or why it is unavailable."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.domain.errors import Unavailable
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Engine
from shoal.worker.agent import WorkerEvent

CHECK_INTERVAL = 10.0  # seconds between checks
CHECK_SOON = 1.0  # seconds until a requested check
CHECK_TIMEOUT = 10.0  # seconds for the engine to answer
TIMEOUTS_MAX = 2  # consecutive checks that a busy engine may leave unanswered


@dataclass(slots=True, eq=False)
class EngineMonitor:
    """Checks one engine periodically, and after it refused a job.

    Args:
        engine: started, unless ``load`` is given; the caller closes it.
        report: receives the events unavailable and available.
        load: starts the engine, which takes long; None: it is started.
    """

    engine: Engine
    _report: Callable[[WorkerEvent], None]
    _load: Callable[[], Awaitable[None]] | None = None
    unavailable_reason: str | None = None
    _check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _timeouts: int = 0  # consecutive checks without an answer

    @property
    def models(self) -> Sequence[ServedModel]:
        """The engine's models; none until it is loaded, and while it is unavailable."""
        if self._load is not None or self.unavailable_reason is not None:
            return ()
        return self.engine.models

    @property
    def expected_models(self) -> Sequence[ServedModel]:
        """The models that the engine has once it is loaded; none afterwards."""
        return () if self._load is None else self.engine.models

    async def load(self) -> None:
        """Start the engine, unless it is started.  Raises ConfigError if it fails."""
        if self._load is not None:
            await self._load()
            self._load = None

    def request_check(self) -> None:
        """Request a check soon."""
        self._check_requested.set()

    async def wait(self, leaving: asyncio.Event) -> None:
        """Wait until the next check, or a requested one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_INTERVAL - CHECK_SOON):
                await self._check_requested.wait()
        # A busy engine may refuse many jobs meanwhile: one check is enough.
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SOON):
                await leaving.wait()

    async def check(self) -> None:
        """Refresh the engine's models, within ``CHECK_TIMEOUT``."""
        self._check_requested.clear()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                await self.engine.refresh()
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_MAX:
                self._mark_unavailable(f"no answer within {CHECK_TIMEOUT:g} s")
        except Unavailable as error:
            self._mark_unavailable(str(error))
        else:
            self._timeouts = 0
            if self.unavailable_reason is not None:
                self.unavailable_reason = None
                self._report(WorkerEvent("available"))

    def _mark_unavailable(self, reason: str) -> None:
        if self.unavailable_reason is None:
            self.unavailable_reason = f"the engine is unavailable: {reason}"
            self._report(WorkerEvent("unavailable", reason))
