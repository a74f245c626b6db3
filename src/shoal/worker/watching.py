"""Watches an engine: what it can run now, and why nothing while it is away."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.domain.errors import Unavailable
from shoal.domain.worker import Model
from shoal.engines.port import Engine
from shoal.worker.agent import Happening

LOOK_EVERY = 10.0  # seconds between looks at an engine
LOOK_SOON = 1.0  # seconds before it is looked at because something happened
LOOK_LIMIT = 10.0  # seconds for it to answer
SILENT_MAX = 2  # looks in a row that a busy engine may leave without an answer


class Watch:
    """One engine, looked at now and then, and when it did not take a job.

    Args:
        engine: started; whoever started it closes it.
        report: told when the engine is withdrawn, and when it is back.
    """

    def __init__(self, engine: Engine, report: Callable[[Happening], None]) -> None:
        self.engine = engine
        self.why_away: str | None = None
        self._report = report
        self._news = asyncio.Event()
        self._silent = 0  # looks in a row without an answer

    @property
    def models(self) -> Sequence[Model]:
        """What it can run: nothing, if it does not answer."""
        return self.engine.models if self.why_away is None else ()

    def stir(self) -> None:
        """Have the engine looked at soon, for something happened."""
        self._news.set()

    async def pause(self, leaving: asyncio.Event) -> None:
        """Wait until the next look: not for long, if something happened."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY - LOOK_SOON):
                await self._news.wait()
        # A busy engine may refuse a thousand jobs meanwhile: one look is enough.
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SOON):
                await leaving.wait()

    async def look(self) -> None:
        """Ask the engine what it has; it has ten seconds to say so."""
        self._news.clear()
        try:
            async with asyncio.timeout(LOOK_LIMIT):
                await self.engine.refresh()
        except TimeoutError:
            self._silent += 1
            if self._silent >= SILENT_MAX:
                self._withdraw(f"no answer within {LOOK_LIMIT:g} s")
        except Unavailable as error:
            self._withdraw(str(error))
        else:
            self._silent = 0
            if self.why_away is not None:
                self.why_away = None
                self._report(Happening("available"))

    def _withdraw(self, reason: str) -> None:
        if self.why_away is None:
            self.why_away = f"the engine is unavailable: {reason}"
            self._report(Happening("unavailable", reason))
