"""Serves connections that stand for many peers, and tells them what we can run."""

import asyncio
import logging

from shoal.domain.errors import NotAdmitted, StoreError
from shoal.domain.facts import Fact, WorkerConditioned, WorkerFact
from shoal.domain.vocabulary import Conditioned, Dismiss, Draining, Event, Offered
from shoal.pool.own_offers import own_condition, own_offers
from shoal.protocols.crowd import EVERYBODY, CrowdSession, From, Gone, Met, To
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.door import Door
from shoal.runtime.driver import Driver, End
from shoal.runtime.guests import Around, Guest, Share, ShareNothing
from shoal.runtime.hub import GOING_AWAY, Hub
from shoal.runtime.link import Link
from shoal.runtime.local_link import LocalLink
from shoal.runtime.model_peers import NAME_MAX
from shoal.runtime.neighbours import HOUSE, House
from shoal.runtime.restocking import Restocking

TELL_EVERY = 1.0  # seconds from one word about ourselves to the next
GUESTS_MAX = 4096  # peers of one connection
REPLACED = "replaced by a newer connection of this name: choose another --name"
INTERNAL = End("internal error", 1011, "internal error")  # RFC 6455, section 7.4.1

log = logging.getLogger("shoal.crowd")


class Crowds:
    """All connections with several peers each, and who is met on them.

    Peers are told what we can run for them, and how busy we are, when that changes.
    ``share`` answers what they say about models to be copied.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        door: Door,
        house: House = HOUSE,
        share: Share | None = None,
    ) -> None:
        restocking = Restocking(clock)
        self.around = Around(hub, share or ShareNothing(), house, restocking)
        self.clock = clock
        self.door = door
        self.waiting: set[Guest] = set()  # with models that are to join anew
        self._crowds: set[_Crowd] = set()
        self._guests: dict[str, Guest] = {}  # by wire and name
        self._draining: Draining | None = None
        self._offered: Offered | None = None  # None: has to be found out
        self._told: tuple[Event, ...] = ()
        self._tell_from = clock.now()
        self._timer: Timer | None = None
        hub.watch(self._saw)

    async def serve(self, wire: str, session: CrowdSession, link: Link) -> End:
        """Run a session until its connection ends; return why it did.

        Raises nothing but CancelledError: a bug in the session, or here, ends the
        connection.
        """
        crowd = _Crowd(self, wire, session, link)
        # Where nothing can be said, nobody is met: it is over before one has looked.
        # And what the coordinator says to itself is no news.
        news = session.accepts and not isinstance(link, LocalLink)
        level = logging.INFO if news else logging.DEBUG
        log.log(level, "connected wire=%s peer=%s", wire, link.peer)
        end = End("cut off")
        self._crowds.add(crowd)
        try:
            end = await crowd.run()
        except Exception:
            # It must not take the other connections with it.
            end = INTERNAL
            log.exception("broken wire=%s peer=%s", wire, link.peer)
            await link.close(end.code, end.text)
        finally:
            self._crowds.discard(crowd)
            reason = end.reason
            parted = "disconnected wire=%s peer=%s reason=%r"
            log.log(level, parted, wire, link.peer, reason)
        return end

    def drain(self, reason: str) -> None:
        """Tell all peers that nothing new is taken; the hub refuses it in any case."""
        self._draining = Draining(reason)
        for crowd in self._crowds:
            crowd.tell(self._draining)

    def hang_up_all(self, reason: str) -> None:
        """End all connections; whoever is at the other end may come back."""
        for crowd in self._crowds:
            crowd.driver.hang_up(reason, GOING_AWAY, reason)

    # For the connections.

    def enter(self, guest: Guest) -> None:
        """Let a peer in, in the place of an older one of its name."""
        if (older := self._guests.get(guest.name)) is not None:
            older.dismiss(REPLACED)
        self._guests[guest.name] = guest
        guest.enter()

    def left(self, guest: Guest) -> None:
        """Forget a peer that has gone."""
        self.waiting.discard(guest)
        if self._guests.get(guest.name) is guest:
            del self._guests[guest.name]

    def about_us(self) -> tuple[Event, ...]:
        """Return what a peer has to know of us."""
        pool = self.around.hub.pool
        if self._offered is None:
            self._offered = Offered(own_offers(pool))
        last = () if self._draining is None else (self._draining,)
        return (self._offered, Conditioned(own_condition(pool)), *last)

    # From the hub.

    def _saw(self, fact: Fact) -> None:
        for guest in [guest for guest in self.waiting if guest.renew()]:
            self.waiting.discard(guest)
        if isinstance(fact, WorkerConditioned):
            return
        if isinstance(fact, WorkerFact):
            self._offered = None
        if self._timer is None and self._crowds:
            # Later than the facts of the same batch, at any rate.
            when = max(self.clock.now(), self._tell_from)
            self._timer = self.clock.call_at(when, self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._tell_from = self.clock.now() + TELL_EVERY
        before, self._told = self._told, self.about_us()
        for word in self._told:
            if word not in before:
                for crowd in self._crowds:
                    crowd.tell(word)


class _Crowd:
    """One connection and its peers."""

    def __init__(
        self, crowds: Crowds, wire: str, session: CrowdSession, link: Link
    ) -> None:
        self.driver: Driver[From, To] = Driver(
            session, link, crowds.clock, lambda said: self._heard(said)
        )
        self._crowds = crowds
        self._wire = wire
        self._guests: dict[str, Guest] = {}  # by what the session calls them
        self._admitting: dict[Guest, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> End:
        """Serve until the connection ends; return why it did."""
        reason = "cut off"
        async with self._tasks:
            # Its first turn comes when the session has opened.
            self._tasks.create_task(self._introduce())
            try:
                end = await self.driver.run()
                reason = end.reason
            finally:
                for key in list(self._guests):
                    self._leave(key, reason)
        return end

    def tell(self, word: Event) -> None:
        """Tell all peers something, if the wire can express it."""
        if type(word) in self.driver.accepts:
            self.driver.issue(To(EVERYBODY, word))

    async def _introduce(self) -> None:
        for word in self._crowds.about_us():
            self.tell(word)

    def _heard(self, said: From) -> None:
        match said.word:
            case Met():
                self._meet(said.peer, said.word)
            case Gone(reason):
                self._leave(said.peer, reason)
            case word:
                if (guest := self._guests.get(said.peer)) is not None:
                    guest.heard(word)

    def _meet(self, key: str, met: Met) -> None:
        self._leave(key, "met anew")
        if (reason := self._why_not(met)) is not None:
            log.warning("refused wire=%s peer=%r: %s", self._wire, key[:64], reason)
            self.driver.issue(To(key, Dismiss(reason)))
            return
        guest = self._guests[key] = Guest(
            self._crowds.around,
            self._wire,
            key,
            met,
            self.driver,
            self._tasks.create_task,
            self._crowds.waiting.add,
            self._left,
        )
        log.info("met peer=%r protection=%s", guest.name, met.protection.value)
        if met.admitted.token_id:
            self._admitting[guest] = self._tasks.create_task(self._admit(guest))
        else:
            self._crowds.enter(guest)

    def _why_not(self, met: Met) -> str | None:
        if not 0 < len(met.name) <= NAME_MAX:
            return f"a peer's name has 1 to {NAME_MAX} characters"
        if len(self._guests) >= GUESTS_MAX:
            return f"{GUESTS_MAX} peers are on this connection already"
        return None

    async def _admit(self, guest: Guest) -> None:
        """Let a peer in once that is stored, for as long as its token holds."""
        try:
            await self._crowds.door.record(guest.met.admitted)
            with self._crowds.door.entered(guest.met.admitted, guest):
                self._crowds.enter(guest)
                # Until it leaves, which cancels this.
                await asyncio.get_running_loop().create_future()
        except (NotAdmitted, StoreError) as error:
            log.warning("refused peer=%r: %s", guest.name, error)
            guest.dismiss(str(error))

    def _leave(self, key: str, reason: str) -> None:
        if (guest := self._guests.get(key)) is not None:
            guest.leave(reason)

    def _left(self, guest: Guest, reason: str) -> None:
        log.info("left peer=%r reason=%r", guest.name, reason)
        if self._guests.get(guest.key) is guest:
            del self._guests[guest.key]
        self._crowds.left(guest)
        if (admitting := self._admitting.pop(guest, None)) is not None:
            admitting.cancel()
