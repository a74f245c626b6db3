"""Runs rounds: asks whoever is to be asked, many at the same time, and calls others.

What a node is asked takes a connection of its own, which is over before anybody has to
know of it; whoever is called is served like all others.
"""

import asyncio
import logging
from collections.abc import Mapping

from shoal.protocols.crowd import Exchange, From, Listed, Outgoing, Rounds, To
from shoal.runtime.calling import Calls, Dial
from shoal.runtime.clock import Clock
from shoal.runtime.driver import Driver
from shoal.runtime.link import LinkClosed

AT_A_TIME = 64  # exchanges; others wait for one of them to end
LOOK_EVERY = 1.0  # seconds at most until it is seen that a deadline has moved

log = logging.getLogger("shoal.rounds")


class Kept:
    """A connection that is kept up until it is let go: an ``Aim``."""

    def __init__(self, outgoing: Outgoing) -> None:
        self.changed = asyncio.Event()
        self.wanted = True
        self._outgoing = outgoing

    def next(self, now: float) -> Outgoing:
        """Return how to connect."""
        return self._outgoing

    def let_go(self) -> None:
        """Call no more.  A connection that is there goes on."""
        self.wanted = False
        self.changed.set()


class Running:
    """One endpoint's rounds; ``calling`` are the connections that are kept up."""

    def __init__(
        self,
        wire: str,
        rounds: Rounds,
        calls: Calls,
        dial: Dial,
        clock: Clock,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.calling: set[asyncio.Task[None]] = set()
        self._wire = wire
        self._rounds = rounds
        self._calls = calls
        self._dial = dial
        self._clock = clock
        self._tasks = tasks
        self._kept: dict[int, Kept] = {}  # by the identity of what is called
        self._room = asyncio.Semaphore(AT_A_TIME)
        self._news = asyncio.Event()  # an exchange has ended
        self._listed: Mapping[str, Listed] = {}

    async def run(self) -> None:
        """Make the rounds until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                self._news.clear()
                for each in self._rounds.tick(self._clock.now()):
                    match each:
                        case Exchange():
                            asking.create_task(self._ask(each))
                        case Outgoing():
                            self._keep_up(each)
                for outgoing in self._rounds.unwanted():
                    if (kept := self._kept.pop(id(outgoing), None)) is not None:
                        kept.let_go()
                self._tell()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a tick is due."""
        while True:
            deadline = self._rounds.deadline
            left = LOOK_EVERY if deadline is None else deadline - self._clock.now()
            if left <= 0:
                await asyncio.sleep(0)  # what is always due is not all there is to do
                return
            try:
                async with asyncio.timeout(min(left, LOOK_EVERY)):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def _ask(self, exchange: Exchange) -> None:
        """Make one connection, and tell why it ended."""
        reason = "cut off"
        try:
            async with self._room:
                reason = await self._exchange(exchange)
        finally:
            exchange.over(reason, self._clock.now())
            self._news.set()

    async def _exchange(self, exchange: Exchange) -> str:
        outgoing = exchange.outgoing
        try:
            async with (
                asyncio.timeout(exchange.within),
                self._dial(
                    outgoing.url,
                    outgoing.headers,
                    outgoing.message_max,
                    fingerprint=outgoing.fingerprint,
                ) as (link, _),
            ):
                session = outgoing.open(self._clock.now())
                driver = Driver[From, To](session, link, self._clock, _meet_nobody)
                return (await driver.run()).reason
        except LinkClosed as closed:
            return str(closed)
        except TimeoutError:
            return f"no answer from {outgoing.url} within {exchange.within:g} s"
        except Exception:
            # A bug in the session: it must not take the other connections with it.
            log.exception("broken wire=%s peer=%s", self._wire, outgoing.url)
            return "internal error"

    def _keep_up(self, outgoing: Outgoing) -> None:
        kept = self._kept[id(outgoing)] = Kept(outgoing)
        task = self._tasks.create_task(self._calls.keep_up(self._wire, kept))
        self.calling.add(task)
        task.add_done_callback(self.calling.discard)

    def _tell(self) -> None:
        """Log whose state has changed."""
        before = self._listed
        self._listed = {
            each.name or each.address: each for each in self._rounds.listed()
        }
        for name, each in self._listed.items():
            known = before.get(name)
            if known is None or known.state != each.state:
                # One without an address is this machine, which is no news to it.
                log.log(
                    logging.INFO if each.address else logging.DEBUG,
                    "node wire=%s name=%r address=%s state=%r remark=%r",
                    self._wire,
                    each.name,
                    each.address,
                    each.state,
                    each.remark,
                )


def _meet_nobody(said: From) -> None:
    """Take what a session of an exchange says, which is to be nothing."""
    raise AssertionError(f"nobody is met in an exchange: {said}")
