"""Races: one scenario, with a fault at each of its turns."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from harness.profiles import some_long
from protocols.contexts import SIGNER, protocol_context
from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.credential_cache import CredentialCache
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShoalError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
)
from shoal.domain.ids import JobId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.work import Chat
from shoal.peers.connections import PeerConnections
from shoal.protocols.grandsage import Config, endpoints
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.store.ledger import NO_ENTRIES, LedgerEntries
from shoal.store.port import CommitId, RecordedFact
from shoal.store.sqlite.database import SqliteStore
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd
from simulation import virtual
from transports.memory_links import MemoryLink

ENDS = (JobCompleted, JobFailed, JobCancelled, JobExpired)
# Without chance, so that another node can repeat an answer.
CHAT = Chat("m", ({"role": "user", "content": "hi"},), temperature=0.0)
LIMITS = TimeLimits(queue=5.0, first_output=20.0, silence=20.0, total=60.0)
PIECES = ("one ", "two ", "three")
WHOLE = "".join(PIECES)
TURNS = 30  # of the loop: more than the story takes


class SlowStore(SqliteStore):
    """Delays each commit by turns of the loop."""

    def __init__(self, turns: int) -> None:
        super().__init__(Path(":memory:"))
        self._turns = turns

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
        commit: CommitId | None = None,
    ) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        await super().append(facts, at, earlier, entries, commit)


@dataclass(slots=True)
class Node:
    """A node that sends a word per turn."""

    link: MemoryLink
    serving: asyncio.Task[ConnectionEnd]
    read: int = 0  # texts
    running: dict[int, Iterator[str]] = field(default_factory=dict)

    def work(self) -> None:
        """Run one turn."""
        for text in self.link.sent[self.read :]:
            self.read += 1
            chunk = json.loads(text)
            if "stop" in chunk:
                self.running.pop(chunk["id"], None)
            else:
                self.running[chunk["id"]] = iter(PIECES)
        for task_id, pieces in list(self.running.items()):
            head = task_id.to_bytes(4, "big")
            piece = next(pieces, None)
            if piece is None:
                del self.running[task_id]
                self.link.deliver(head)
            else:
                self.link.deliver(head + piece.encode())

    def send(self, text: str = "", *, fields: dict[str, object] | None = None) -> None:
        """Send messages about every task, true or not."""
        for task_id in list(self.running):
            if fields is not None:
                self.link.deliver(json.dumps({"id": task_id} | fields))
            else:
                self.link.deliver(task_id.to_bytes(4, "big") + text.encode())


class Table:
    """A hub, its nodes and its clients, advanced turn by turn."""

    def __init__(self, store: SlowStore) -> None:
        self.store = store
        numbers = count(1)
        self.clock = LoopClock()
        self.hub = Hub(
            self.store, self.clock, lambda: JobId(f"job{next(numbers)}"), SIGNER
        )
        keys = self.store.keys
        tokens = CredentialCache("join token", (), keys.tokens)
        admission = WorkerAdmission(tokens, keys, self.clock)
        self.peers = PeerConnections(self.hub, self.clock, admission)
        (self._route,) = endpoints(Config(), protocol_context())
        self.nodes: dict[str, Node] = {}
        self.all_nodes: list[Node] = []
        self.clients: list[Client] = []
        self.hub_task = asyncio.create_task(self.hub.run())

    def join(self, name: str) -> None:
        """Let a node join, even under a used name."""
        query = f"name={name}&model=m&token=t&max_concurrency=1"
        request = UpgradeRequest("/ws", query, {})
        accepted = self._route.accept(request, self.clock.now())
        link = MemoryLink()
        serving = asyncio.create_task(self.peers.serve("w", accepted.session, link))
        self.nodes[name] = Node(link, serving)
        self.all_nodes.append(self.nodes[name])

    def request(self) -> None:
        self.clients.append(Client(self.hub))

    async def turn(self) -> None:
        for node in self.nodes.values():
            node.work()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Advance by a millisecond per turn until a condition holds."""
        for _ in range(200_000):
            if condition():
                return
            await self.turn()
            await asyncio.sleep(0.001)
        raise AssertionError("it never came about")

    async def settle(self) -> None:
        """Check that everything ends once, and that the hub has no state left."""
        await self.until(lambda: all(client.task.done() for client in self.clients))
        # The pool decides first, and then it is stored and told.
        await self.until(lambda: not (self.hub.pool.jobs or self.hub._answers))
        assert not self.hub_task.done(), "the hub has ended"
        for client in self.clients:
            client.check()
        for record in [await self.store.history(job_id) for job_id in self.job_ids]:
            assert sum(isinstance(each.fact, ENDS) for each in record) == 1, record
        self.join("fresh")
        await self.until(lambda: "w:fresh/m" in self.hub.pool.workers)
        self.request()
        await self.until(self.clients[-1].task.done)
        self.clients[-1].check()
        assert self.clients[-1].whole == WHOLE
        for worker in self.hub.pool.workers.values():
            assert worker.leases == {}, worker
        assert not self.hub._deadlines._timers

    async def end(self) -> None:
        for node in self.all_nodes:
            node.link.cut()
        await asyncio.gather(*[node.serving for node in self.all_nodes])
        await self.until(lambda: not self.hub.pool.workers)
        await self.until(lambda: not self.hub._connections._in_pool)
        assert not self.hub._connections._newest
        self.hub_task.cancel()
        with suppress(asyncio.CancelledError):
            await self.hub_task

    @property
    def job_ids(self) -> list[JobId]:
        return [client.job_id for client in self.clients if client.job_id]


class Client:
    """A client that reads the answer as it is streamed."""

    def __init__(self, hub: Hub) -> None:
        self.job_id = JobId("")
        self.text = ""
        self.whole: str | None = None
        self._hub = hub
        self.task = asyncio.create_task(self._request())

    async def _request(self) -> None:
        with suppress(ShoalError, asyncio.CancelledError):
            job = Job(self._hub.new_id(), CHAT, LIMITS)
            async with self._hub.run_job(job) as reader:
                self.job_id = reader.job_id
                while pieces := await reader.read():
                    self.text += "".join(map(str, pieces))
                self.whole = (await reader.outcome()).text

    def check(self) -> None:
        """Check that the text read is the answer, or a prefix."""
        assert WHOLE.startswith(self.text), self.text
        if self.whole is not None:
            assert self.whole == self.text


def leave(table: Table) -> None:
    table.clients[0].task.cancel()


def withdraw(table: Table) -> None:
    for job_id in table.job_ids:
        table.hub.cancel(job_id, "by an operator")
        table.hub.cancel(job_id, "twice")


def cut_one(table: Table) -> None:
    table.nodes["a"].link.cut()


def cut_all(table: Table) -> None:
    for node in table.nodes.values():
        node.link.cut()


def replace_one(table: Table) -> None:
    table.join("a")


def replace_all(table: Table) -> None:
    for name in list(table.nodes):
        table.join(name)
        table.join(name)


def cut_and_rejoin(table: Table) -> None:
    cut_all(table)
    replace_all(table)


def leave_and_cut(table: Table) -> None:
    leave(table)
    cut_all(table)


def withdraw_leave_and_replace(table: Table) -> None:
    withdraw(table)
    leave(table)
    replace_all(table)


def end_early(table: Table) -> None:
    for node in table.nodes.values():
        node.send()


def end_twice_and_go_on(table: Table) -> None:
    end_early(table)
    end_early(table)
    for node in table.nodes.values():
        node.send("more")


def reject(table: Table) -> None:
    for node in table.nodes.values():
        node.send(fields={"rejected": "no"})


def reject_fail_and_end(table: Table) -> None:
    reject(table)
    for node in table.nodes.values():
        node.send(fields={"failed": "no"})
        node.send()
        node.send("more")


def end_and_cut(table: Table) -> None:
    end_early(table)
    cut_all(table)


def end_and_leave(table: Table) -> None:
    end_early(table)
    leave(table)


def drain_nodes(table: Table) -> None:
    for node in table.nodes.values():
        node.link.deliver('{"draining":"enough"}')


def drain_and_reject(table: Table) -> None:
    drain_nodes(table)
    reject(table)


def break_protocol(table: Table) -> None:
    for node in table.nodes.values():
        node.link.deliver(b"12")


def hang_up_all(table: Table) -> None:
    table.hub.disconnect_all("stopping")
    table.join("c")


def ask_again(table: Table) -> None:
    for _ in range(5):
        table.request()


def ask_and_leave(table: Table) -> None:
    for _ in range(5):
        table.request()
        table.clients[-1].task.cancel()


def fire_a_storm(table: Table) -> None:
    ask_again(table)
    cut_one(table)
    end_early(table)
    withdraw(table)
    replace_all(table)
    leave(table)


FAULTS = [
    leave,
    withdraw,
    cut_one,
    cut_all,
    replace_one,
    replace_all,
    cut_and_rejoin,
    leave_and_cut,
    withdraw_leave_and_replace,
    end_early,
    end_twice_and_go_on,
    reject,
    reject_fail_and_end,
    end_and_cut,
    end_and_leave,
    drain_nodes,
    drain_and_reject,
    break_protocol,
    hang_up_all,
    ask_again,
    ask_and_leave,
    fire_a_storm,
]


# After these, somebody is still there to give the answer.
HARMLESS = {cut_one, replace_one, reject, ask_again, ask_and_leave}


async def run_case(fault: Callable[[Table], None], turn: int, store_turns: int) -> None:
    """Run the scenario: two nodes, a client, and a fault at that turn, twice."""
    store = SlowStore(store_turns)
    await store.open()
    table = Table(store)
    table.join("a")
    table.join("b")
    await table.until(lambda: len(table.hub.pool.workers) == 2)
    table.request()
    for _ in range(turn):
        await table.turn()
    fault(table)
    await table.turn()
    fault(table)
    await table.settle()
    if fault in HARMLESS:
        assert table.clients[0].whole == WHOLE
    await table.end()
    await store.close()


MOMENTS = [(turn, commits) for turn in range(TURNS) for commits in (0, 3)]


# Of some, each second has slow commits.
@pytest.mark.parametrize("step", some_long([7, 1], short=1), ids=["some", "all"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_at_any_moment_leaks_nothing(
    fault: Callable[[Table], None], step: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    for turn, store_turns in MOMENTS[::step]:
        try:
            virtual.run(run_case(fault, turn, store_turns))
        except BaseException as error:
            error.add_note(f"at turn {turn}, commits take {store_turns}")
            raise

    assert caplog.records == []
