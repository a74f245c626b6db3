"""A sequence of operations that goes on over generations of a group.

Each operation is carried out in the present generation.  If that ends, the next one
begins with what is missing: ranks are one operation apart at most, for none completes
an operation before all have begun it.  If a rank has completed the operation, the
others get its result, bit for bit; if none has, it is repeated.

There are two kinds of operations.  Those whose result is *shared*, all ranks having the
same, are reduced into memory of the sequence, which keeps the latest result for a rank
that misses it.  All others end with a barrier: a rank that has passed it knows that all
ranks have their results.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from shoal.domain.errors import PeerError, ShoalError, Unavailable
from shoal.training import collectives, rank_port
from shoal.training.collectives import Bytes, Kind
from shoal.training.generations.member import GenerationMember
from shoal.training.generations.messages import (
    EndCause,
    EndReport,
    Formation,
    RankState,
    RunMessage,
    settle,
)
from shoal.training.group import RankGroup

FORMATION_TIMEOUT = 1800.0  # seconds; ranks start late, and coordinators restart
DIAL_TIMEOUT = 5.0  # seconds; ranks of a formation listen already
POLL = 0.1  # seconds between looks at the clock

log = logging.getLogger("shoal.training")


class RendezvousLink(Protocol):
    """A connection to the rendezvous; it connects again by itself."""

    def send(self, message: RunMessage) -> object:
        """Send a message, now or soon."""

    def receive(self, timeout: float) -> RunMessage | None:
        """Wait for a message; None: there was none in time.

        Raises Unavailable once the run has ended.
        """

    def close(self) -> None:
        """Send what waits, and disconnect."""


Greeting: TypeAlias = Callable[[], Sequence[RunMessage]]
"""Returns the first messages over each connection."""


@dataclass(slots=True)
class _Pending:
    """An operation that is to be completed.

    ``attempt`` carries it out in one generation; ``memory`` is where a shared result
    goes, None for others; these have ``arrived`` when only the barrier is left.
    """

    key: Hashable
    attempt: Callable[[RankGroup], None]
    memory: Bytes | None = None
    arrived: bool = False


class OperationSequence:
    """The operations of one rank of a run; used by one thread.

    ``connect`` opens the connection to the rendezvous.  ``timeout`` limits one
    operation in one generation, in seconds.  ``reachable`` takes the addresses that a
    rank has announced, and returns where this one reaches it.  ``meeting`` limits the
    wait for the first generation.  The port is closed with the sequence.

    All operations raise GroupEnded once this rank takes no part any more.
    """

    def __init__(
        self,
        connect: Callable[[Greeting], RendezvousLink],
        port: rank_port.RankPort,
        run_id: str,
        state: RankState,
        timeout: float,
        reachable: Callable[[Sequence[str]], Sequence[str]],
        meeting: float = FORMATION_TIMEOUT,
    ) -> None:
        self._port = port
        self._run_id = run_id
        self._timeout = timeout
        self._reachable = reachable
        self._meeting = meeting
        self._member = GenerationMember(state)
        self._changed = threading.Condition()
        self._group: RankGroup | None = None  # of the present formation
        self._formation: Formation | None = None  # the latest one
        self._settled = -1  # the last generation in which no rank misses an operation
        self._last: Bytes | None = None  # the result of the last operation, if shared
        self._stores: list[Bytes | None] = [None, None]  # for shared results, in turn
        self._closed = False
        port.expect(run_id, 0)
        self._link = connect(self._greeting)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def formation(self) -> Formation:
        """The latest generation; waits for the first one."""
        if self._formation is None:
            self._await_generation()
        assert self._formation is not None
        return self._formation

    @property
    def operation(self) -> int:
        """The number of the last operation that this rank has completed."""
        return self._member.operation

    @property
    def waiting(self) -> int:
        """How many new ranks wait to be admitted."""
        return self._member.waiting

    @property
    def present(self) -> RankGroup:
        """The group of the present generation; waits for it.  Raises GroupEnded."""
        return self._await_generation()[1]

    def rank_of(self, gang_rank: int) -> int | None:
        """Return a rank's number in the present generation; None: it is lost."""
        for rank, each in enumerate(self.formation.ranks):
            if each.gang_rank == gang_rank:
                return rank
        return None

    def set_step(self, step: int) -> None:
        """Set the step of training to which the next operations belong."""
        with self._changed:
            self._member.set_step(step)
            if self._group is not None:
                self._group.set_step(step)

    def set_saves(self) -> None:
        """Set that the script saves the model as the lowest rank that is left."""
        with self._changed:
            self._member.state = replace(self._member.state, saves=True)

    def run(self, kind: Kind, call: Callable[[RankGroup], None]) -> None:
        """Complete an operation; ``call`` may be repeated, in another generation."""

        def attempt(group: RankGroup) -> None:
            pending.arrived = False
            call(group)
            pending.arrived = True
            group.barrier()

        pending = _Pending(kind, attempt)
        self._complete(pending)
        self._last = None

    def run_shared(
        self, kind: Kind, size: int, call: Callable[[RankGroup, Bytes], None]
    ) -> Bytes:
        """Complete an operation that gives all ranks the same bytes, and return them.

        ``call`` puts its result into the array of bytes, and may be repeated.  The
        returned array is overwritten by the operation after the next one.
        """
        store = self._stores[0]
        if store is None or store.nbytes < size:
            store = self._stores[0] = np.empty(size, np.uint8)
        memory = store[:size]
        pending = _Pending((kind, size), lambda group: call(group, memory), memory)
        self._complete(pending)
        self._last = memory
        self._stores.reverse()
        return memory

    def renew(self) -> Formation:
        """End the generation in all ranks, to admit new ones; return the next one.

        All ranks call it after the same operation.
        """
        report = EndReport("new ranks are admitted", EndCause.ADMISSION)
        self._member.renews = True
        while not (formation := self._await_settled()[0]).admitted:
            with self._changed:
                if self._member.formation is formation:
                    self._port.expect(self._run_id, formation.generation + 1)
                    self._send(self._member.fail(report))
        self._member.renews = False
        return formation

    def stop(self, reason: str) -> None:
        """End the run in all ranks."""
        with self._changed:
            if not self._member.out:
                self._send(self._member.fail(EndReport(reason, EndCause.STOP)))
                self._member.set_out(reason)
            if self._group is not None:
                self._group.abort(reason)

    def leave(self) -> None:
        """Say that this rank is done, after a barrier; then close."""
        try:
            if not self._member.out:
                self.run(Kind.BARRIER, lambda group: None)
                self._send(({"leave": self._member.operation},))
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect; ranks that are still there miss this one."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._member.set_out("this rank has left")
            self._changed.notify_all()
        self._listener.join()
        if self._group is not None:
            self._group.close()
        self._link.close()
        self._port.close()

    def _await_settled(self) -> tuple[Formation, RankGroup]:
        """Wait for a generation in which no rank misses a result."""
        while True:
            formation, group = self._await_generation()
            try:
                self._settle(formation, group, None)
            except rank_port.GroupEnded as error:
                self._on_failure(formation, error)
            else:
                return formation, group

    def _complete(self, pending: _Pending) -> None:
        """Carry out an operation, in as many generations as it takes."""
        while True:
            formation, group = self._await_generation()
            try:
                if self._settle(formation, group, pending):
                    return
                if not self._begin(formation, pending.key):
                    continue
                pending.attempt(group)
            except rank_port.GroupEnded as error:
                self._on_failure(formation, error)
            except ShoalError:
                self._end(counts=False)
                raise
            else:
                self._end(counts=True)
                return

    def _settle(
        self, formation: Formation, group: RankGroup, pending: _Pending | None
    ) -> bool:
        """Give the last result to ranks that miss it; return whether this one did.

        Raises GroupEnded, and RankMissing if no rank that has the result is left.
        """
        if self._settled == formation.generation:
            return False
        mine, last = self._member.operation, self._last
        misses = mine < formation.newest
        result = last if not misses or pending is None else pending.memory
        misses, root = settle(
            formation,
            mine,
            shared=result is not None,
            arrived=pending is not None and pending.arrived,
        )
        if result is not None and root is not None:
            if not self._begin(formation, "settle"):
                return False
            self._pass_on(group, result, root)
            self._end(counts=False, adopts=misses)
        elif misses:
            with self._changed:
                self._member.adopt()
        self._settled = formation.generation
        return misses

    def _pass_on(self, group: RankGroup, result: Bytes, root: int) -> None:
        """Copy the root's result to all ranks.

        Raises GroupEnded, and ends the run if a rank has completed it with other bits.
        """
        checks = result is self._last and group.place.rank != root
        received = result.copy() if checks else result
        operation = collectives.broadcast(group.place, received.data, root)
        group.run(Kind.BROADCAST, operation)
        if checks and not np.array_equal(received, result):
            reason = f"the results of operation {self.operation} differ"
            self.stop(reason)
            raise rank_port.GroupEnded(reason)

    def _await_generation(self) -> tuple[Formation, RankGroup]:
        """Wait until there is a generation.  Raises GroupEnded."""
        member = self._member
        limit = self._meeting if self._formation is None else FORMATION_TIMEOUT
        with self._changed:
            self._changed.wait_for(
                lambda: member.out or member.formation is not None, limit
            )
            if member.out:
                raise rank_port.GroupEnded(member.out)
            if member.formation is None or self._group is None:
                raise rank_port.GroupEnded(
                    f"the ranks did not find each other within {limit:g} s: is the "
                    "coordinator reachable?"
                )
            return member.formation, self._group

    def _begin(self, formation: Formation, key: Hashable) -> bool:
        """Begin an operation, unless the generation has ended."""
        with self._changed:
            if self._member.formation is not formation:
                return False
            self._member.begin(key, time.monotonic())
            return True

    def _end(self, *, counts: bool, adopts: bool = False) -> None:
        with self._changed:
            if adopts:
                self._member.adopt()
            self._send(self._member.complete(time.monotonic(), counts=counts))

    def _on_failure(self, formation: Formation, error: rank_port.GroupEnded) -> None:
        """Report the end of a generation."""
        suspect = error.suspect
        report = EndReport(
            str(error),
            EndCause.STOP if error.out_of_step else EndCause.FAILURE,
            None if suspect is None else formation.ranks[suspect].gang_rank,
        )
        with self._changed:
            if not self._member.out:
                self._port.expect(self._run_id, formation.generation + 1)
                self._send(self._member.fail(report))

    def _greeting(self) -> Sequence[RunMessage]:
        with self._changed:
            return self._member.greeting()

    def _send(self, messages: Sequence[RunMessage]) -> None:
        for message in messages:
            self._link.send(message)

    def _listen(self) -> None:
        while not self._closed:
            try:
                message = self._link.receive(POLL)
                with self._changed:
                    transfers = self._group is not None and self._group.transfers
                    self._send(self._member.tick(time.monotonic(), transfers=transfers))
                    if message is not None:
                        self._receive(message)
            except (Unavailable, PeerError) as error:
                with self._changed:
                    self._member.set_out(str(error))
                    self._abort(str(error))
                return

    def _receive(self, message: RunMessage) -> None:
        before = self._member.generation
        reaction = self._member.receive(message)
        if reaction.end:
            self._port.expect(self._run_id, before + 1)
            self._abort(reaction.end)
        self._send(reaction.send)
        if self._member.generation != before:
            self._open()

    def _abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort(reason)
        self._changed.notify_all()

    def _open(self) -> None:
        """Open the connections of a new generation."""
        formation = self._member.formation
        assert formation is not None
        if self._group is not None:
            self._group.close()
        names = tuple(each.gang_rank for each in formation.ranks)
        membership = rank_port.GroupMembership(
            self._run_id,
            formation.generation,
            formation.rank,
            len(names),
            formation.secret,
            names,
        )
        links = self._port.open_group(membership, self._timeout, DIAL_TIMEOUT)
        links.set_addresses(
            {
                rank: rank_port.RankAddress(
                    self._reachable(each.hosts), each.port, each.port_id
                )
                for rank, each in enumerate(formation.ranks)
            }
        )
        self._group = RankGroup(links, self._timeout)
        self._group.set_step(self._member.state.step)
        self._formation = formation
        for sentence in formation.story:
            log.warning("generation=%d %s", formation.generation, sentence)
        self._changed.notify_all()
