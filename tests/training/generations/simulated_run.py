"""A run in virtual time: ranks, their connections and the rendezvous, without threads.

What decides is the code under test; what is simulated is the network, and the loop that
``generations.sequence`` runs over sockets.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

import numpy as np

from shoal.training import collectives
from shoal.training.collectives import Operation, Place, ReceiveSegment, reduction
from shoal.training.generations.member import GenerationMember
from shoal.training.generations.messages import EndReport, Formation, RankState, settle
from shoal.training.rendezvous import Rendezvous

NUMBERS = 6
TICK = 0.1  # seconds
LATER = (0.05, 2.0)  # seconds until a lost connection to the coordinator is back
CLOSED = None  # what arrives after the last message of a connection


class Network:
    """The clock, and everything that happens later."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._arrives: defaultdict[object, float] = defaultdict(float)

    def later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def carry(self, link: object, slow: float, event: Callable[[], None]) -> None:
        """Deliver over a link, on which nothing overtakes."""
        at = max(self._arrives[link], self.now + self.random.uniform(0.001, slow))
        self._arrives[link] = at
        self.later(at - self.now, event)

    def run(self, until: Callable[[], bool], limit: float) -> None:
        while not until():
            assert self._events, "nothing happens any more"
            self.now, _, event = heapq.heappop(self._events)
            assert self.now < limit, "ranks wait for ever"
            event()


class SimulatedRun:
    """Some ranks that complete ``operations`` operations each, if they are not lost."""

    def __init__(self, size: int, operations: int, random: Random) -> None:
        self.network = Network(random)
        self.operations = operations
        self.size = size
        self.rendezvous = self._new()
        self.connected: set[str] = set()
        self.connections: Counter[str] = Counter()
        self.ranks = {str(rank): SimulatedRank(self, rank) for rank in range(size)}
        for name in self.ranks:
            self.connect(name)
        self._expire()

    def run(self, limit: float = 600.0) -> None:
        self.network.run(
            lambda: all(each.is_over for each in self.ranks.values()), limit
        )

    def restart(self) -> None:
        """The coordinator forgets everything; ranks connect again."""
        self.rendezvous = self._new()
        for name in sorted(self.connected):
            self._reconnect(name)

    def disconnect(self, name: str) -> None:
        """A connection to the coordinator breaks, and comes back."""
        if name in self.connected:
            self._deliver(self.rendezvous.lost(name, self.network.now))
            self._reconnect(name)

    def send(self, name: str, message: Mapping[str, Any]) -> None:
        """Carry a message to the coordinator, or lose it with the connection."""
        number = self.connections[name]

        def arrive() -> None:
            if number == self.connections[name] and name in self.connected:
                now = self.network.now
                self._deliver(self.rendezvous.receive(name, dict(message), now))

        self.network.carry((name, "up"), 0.05, arrive)

    def connect(self, name: str) -> None:
        rank = self.ranks[name]
        if rank.is_paused:
            self._reconnect(name)
        elif rank.is_alive:
            self.connected.add(name)
            self.connections[name] += 1
            for message in rank.member.greeting():
                self.send(name, message)

    def lose(self, name: str) -> None:
        """A rank's process is gone."""
        self.connected.discard(name)
        self._deliver(self.rendezvous.lost(name, self.network.now))

    def _new(self) -> Rendezvous:
        return Rendezvous("run", self.size, random_bytes=self.network.random.randbytes)

    def _reconnect(self, name: str) -> None:
        self.connected.discard(name)
        delay = self.network.random.uniform(*LATER)
        self.network.later(delay, lambda: self.connect(name))

    def _deliver(self, outgoing: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for name, message in outgoing:
            arrive = partial(self._arrive, name, self.connections[name], message)
            self.network.carry((name, "down"), 0.05, arrive)

    def _arrive(self, name: str, number: int, message: Mapping[str, Any]) -> None:
        if number == self.connections[name] and name in self.connected:
            rank = self.ranks[name]
            rank.wake(lambda: rank.on_message(message))

    def _expire(self) -> None:
        deadline = self.rendezvous.deadline
        if deadline is not None and self.network.now >= deadline:
            self._deliver(self.rendezvous.expire(self.network.now))
        self.network.later(TICK / 4, self._expire)


class SimulatedRank:
    """One rank: computes, and completes operations with the others."""

    def __init__(self, run: SimulatedRun, rank: int) -> None:
        self.name = str(rank)
        self.member = GenerationMember(RankState(rank, (), 1, str(rank)))
        self.results: list[bytes] = []
        """Those of its operations, in order."""
        self.is_alive = True
        self._run = run
        self._network = run.network
        self._paused: list[Callable[[], None]] | None = None
        self._inbox: defaultdict[tuple[int, int], deque[bytes | None]] = defaultdict(
            deque
        )
        self._formation: Formation | None = None  # whose connections are open
        self._settled = -1
        self._operation: Operation | None = None
        self._waits_for: ReceiveSegment | None = None
        self._ends: Callable[[], None] = lambda: None
        self._own = self._last = self._memory = np.zeros(NUMBERS, np.float32)
        self._last_is_shared = False
        self._arrived = False
        self._is_pending = False
        self._tick()
        self._compute()

    @property
    def is_over(self) -> bool:
        done = len(self.results) == self._run.operations
        return done or not self.is_alive or bool(self.member.out)

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def kill(self) -> None:
        self.is_alive = False
        self._close()
        self._network.carry((self.name, "up"), 0.05, lambda: self._run.lose(self.name))

    def pause(self, seconds: float) -> None:
        if self._paused is None:
            self._paused = []
            self._network.later(seconds, self._resume)

    def wake(self, event: Callable[[], None]) -> None:
        """Handle an event, now or when the process goes on."""
        if self._paused is not None:
            self._paused.append(event)
        elif self.is_alive:
            event()
            self._go_on()

    def on_message(self, message: Mapping[str, Any]) -> None:
        reaction = self.member.receive(message)
        if reaction.end:
            is_running = self._operation is not None
            self._close()
            if is_running and not self.member.out:
                self._send(self.member.fail(EndReport(reaction.end)))
        self._send(reaction.send)
        if self.member.formation not in (None, self._formation):
            self._close()
            self._formation = self.member.formation

    def _resume(self) -> None:
        events, self._paused = self._paused or [], None
        for event in events:
            self.wake(event)

    def _tick(self) -> None:
        if not self.is_over:
            self.wake(lambda: self._send(self.member.tick(self._network.now)))
            self._network.later(TICK, self._tick)

    def _compute(self) -> None:
        def ready() -> None:
            # Floats, whose sum depends on who is there and in which order.
            seed = len(self.results) * 100 + int(self.name)
            numbers = np.random.default_rng(seed).normal(size=NUMBERS)
            self._own = numbers.astype(np.float32)
            self._memory = np.zeros(NUMBERS, np.float32)
            self._arrived, self._is_pending = False, True

        self._network.later(
            self._network.random.uniform(0.001, 0.3), lambda: self.wake(ready)
        )

    def _go_on(self) -> None:
        """Do what can be done."""
        while self.is_alive and self._advance():
            pass

    def _advance(self) -> bool:
        formation = self._formation
        if formation is None or self.member.formation is not formation:
            return False
        if self._operation is not None:
            return self._carry_on(formation)
        if not self._is_pending:
            return False
        if self._settled != formation.generation:
            return self._settle(formation)
        shared = self._is_shared(len(self.results))
        place = Place(formation.rank, len(formation.ranks))
        self._begin(self._attempt(place, shared), self._complete)
        return True

    def _settle(self, formation: Formation) -> bool:
        misses = self.member.operation < formation.newest
        shared = self._is_shared(formation.newest)
        found = settle(
            formation, self.member.operation, shared=shared, arrived=self._arrived
        )
        assert found.misses == misses

        def done() -> None:
            self._settled = formation.generation
            self._send(self.member.complete(self._network.now, counts=False))
            if misses:
                self.member.adopt()
                self._keep()

        if found.root is None:
            self._settled = formation.generation
            if misses:
                self.member.adopt()
                self._keep()
            return True
        memory = self._memory if misses else self._last.copy()
        place = Place(formation.rank, len(formation.ranks))
        self._begin(collectives.broadcast(place, bytes_of(memory), found.root), done)
        return True

    def _attempt(self, place: Place, shared: bool) -> Operation:
        memory = bytes_of(self._memory)
        if shared:
            combined = reduction("sum", self._own.dtype, place.size)
            own = bytes_of(self._own)
            yield from collectives.all_reduce(place, own, memory, combined)
            return
        self._arrived = False
        memory[:] = bytes_of(self._own)
        yield from collectives.broadcast(place, memory, 0)
        self._arrived = True
        yield from collectives.barrier(place)

    def _begin(self, operation: Operation, ends: Callable[[], None]) -> None:
        self.member.begin("an operation", self._network.now)
        self._operation, self._ends = operation, ends
        self._resume_operation(operation)

    def _carry_on(self, formation: Formation) -> bool:
        """Hand the operation what has arrived; return whether it was something."""
        operation, action = self._operation, self._waits_for
        assert operation is not None
        assert action is not None
        inbox = self._inbox[formation.generation, action.source]
        if not inbox:
            return False
        data = inbox[0]
        if data is CLOSED:
            suspect = formation.ranks[action.source].gang_rank
            self._close()
            report = EndReport(f"rank {suspect} has left", suspect=suspect)
            self._send(self.member.fail(report))
            return False
        inbox.popleft()
        action.into[:] = data
        self._resume_operation(operation)
        return True

    def _resume_operation(self, operation: Operation) -> None:
        formation = self._formation
        assert formation is not None
        for action in operation:
            if isinstance(action, ReceiveSegment):
                self._waits_for = action
                return
            self._post(formation, action.to, bytes(action.data))
        self._operation = None
        self._ends()

    def _complete(self) -> None:
        self._send(self.member.complete(self._network.now))
        self._keep()

    def _keep(self) -> None:
        assert self.member.operation == len(self.results)
        self.results.append(self._memory.tobytes())
        self._last = self._memory
        self._is_pending = False
        if len(self.results) < self._run.operations:
            self._compute()

    def _post(self, formation: Formation, to: int, data: bytes | None) -> None:
        other = self._run.ranks[formation.ranks[to].port_id]
        inbox = other._inbox[formation.generation, formation.rank]
        link = self.name, other.name
        self._network.carry(link, 0.01, lambda: other.wake(lambda: inbox.append(data)))

    def _close(self) -> None:
        """End the connections of the present generation."""
        formation, self._formation = self._formation, None
        self._operation = None
        if formation is not None:
            for to in range(len(formation.ranks)):
                if to != formation.rank:
                    self._post(formation, to, CLOSED)

    def _send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            self._run.send(self.name, message)

    @staticmethod
    def _is_shared(operation: int) -> bool:
        return operation % 3 != 2


def bytes_of(array: "np.ndarray[Any, np.dtype[np.float32]]") -> memoryview:
    return array.view(np.uint8).data
