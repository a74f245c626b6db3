"""What keys see: their own data, nothing of other keys, and no machine's identity.

Each operation that reads is requested with the paths and queries of somebody else's
data.  A new operation is covered without a change here.
"""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.batches.uploads import create, ended
from gateway.keys import client, make_key, request
from gateway.operators.test_nodes import HERE, FixedMembership
from gateway.providers import Provider, provider
from gateway.serving import KEY, Pool, serving
from protocols.dispatch.recorded import SIGNERS
from shoal.domain.worker import Hardware
from shoal.gateway.all_operations import OPERATIONS
from shoal.protocols.dispatch import Config
from shoal.protocols.seam.endpoints import ListedNode
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import PeerProfile

ADA, BOB, READER, ADMIN = "ada-owner", "bob-owner", "reader", "admin"
WORKER, IDLE = (SIGNERS[each].public_key.hex() for each in "AB")
PEER, REFUSED, NODE = ("5e" * 32, "7f" * 32, "c4" * 32)
OPERATOR = "night-shift"

MACHINES = (
    *(WORKER, IDLE, PEER, REFUSED, NODE, OPERATOR),
    *("Adas-MacBook", "10.11.12.13", "10.11.12.14", "M2 of Ada"),
)
"""What only operators see: keys, names, addresses and hardware of machines."""

ENDLESS = {"/admin/live"}
READS = [
    each for each in OPERATIONS if each.method == "GET" and each.path not in ENDLESS
]
QUERIES = {
    "/v1/jobs": "?limit=100",
    "/v1/quote": "?job_type=TASK",
    "/v1/trust/list": "?user_id={user}",
    "/v1/log/growth": "?since=1",
    "/admin/jobs": "?limit=100",
}


@dataclass(frozen=True, slots=True)
class Data:
    """What belongs to one key; ``marks`` occur only in answers about it."""

    key: str
    user: str
    job_id: str
    file_id: str
    batch_id: str
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """A pool in which two keys have data, and two more have none."""

    pool: Pool
    data: Mapping[str, Data]
    keys: Mapping[str, str]

    async def answers(self, role: str, about: str) -> Mapping[str, str]:
        """Return every answer to a key about the data of another, by path.

        The answer has the headers; what the request itself names is left out.
        """
        return {
            each.path: await self._answer(role, path)
            for each in READS
            for path in [self._path(each.path, self.data[about], about)]
        }

    async def _answer(self, role: str, path: str) -> str:
        headers = self.pool.headers(self.keys[role])
        async with self.pool.session.get(self.pool.url + path, headers=headers) as got:
            named = [each for each in re.split("[/?=]", path) if each]
            text = f"{got.headers}\n{await got.text()}"
        for each in sorted(named, key=len, reverse=True):
            text = text.replace(each, "")
        return text

    def _path(self, path: str, data: Data, owner: str) -> str:
        values = {
            "id": data.job_id,
            "file_id": data.file_id,
            "batch_id": data.batch_id,
            "digest": "00" * 32,
            "model": "m1",
            "run": "00" * 16,
            "path": "index.html",
            "name": "dispatch:nobody" if "workers" in path else owner,
        }
        return path.format(**values) + QUERIES.get(path, "").format(user=data.user)


async def finished(pool: Pool, worker: Provider, name: str, number: int) -> Data:
    """Have a key's job done, credit its account, and create a code of its user."""
    key = await make_key(pool, name)
    prompt, output = f"prompt-of-{name}", f"answer-to-{name}"
    user, amount = f"user-of-{name}", 7_123_450 + number
    task = {"job_type": "TASK", "task_type": "classify", "input": prompt}
    status, answer = await request(
        pool,
        "POST",
        "/v1/jobs/commit/cheap",
        {"job_type": "TASK", "user_id": user, "payload": task},
        key,
    )
    assert status == 201, answer
    job = await worker.job(number)
    await worker.complete(job["job_id"], {"label": output})
    await request(pool, "POST", f"/admin/accounts/{name}/credit", {"amount": amount})
    status, code = await request(
        pool, "POST", "/v1/trust/create", {"user_id": user}, key
    )
    assert status == 201, code
    async with client(pool, key) as owner:
        batch = await ended(owner, (await create(owner, [f"line-of-{name}"])).id)
    marks = (name, prompt, output, user, answer["job_id"], str(amount))
    return Data(
        *(key, user, answer["job_id"], batch.input_file_id, batch.id),
        (*marks, batch.input_file_id, batch.id, code["pairing_code"]),
    )


def add_machines(pool: Pool) -> None:
    """Add peers, a refused one, and the nodes of a fleet."""
    assert pool.gateway is not None
    directory = pool.gateway.directory
    directory.add(f"wire:{PEER}", PeerJoined(PEER), "tcp://10.11.12.13:4010")
    hardware = Hardware("M2 of Ada", "m2", 32.0)
    directory.describe(f"wire:{PEER}", PeerProfile("Adas-MacBook", hardware))
    directory.refuse(f"wire:{REFUSED}", "its protocol is too old")
    node = ListedNode(NODE, "10.11.12.14:50051", "alive", None)
    pool.gateway.probers.append(("wire", FixedMembership(HERE, node)))


def reserve(pool: Pool, name: str) -> None:
    """Reserve the idle worker for one key."""
    worker = pool.hub.pool.workers[next(w for w in pool.hub.pool.workers if IDLE in w)]
    worker.offer = replace(worker.offer, only_for=frozenset({name}))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    wires: dict[str, Any] = {"dispatch": Config(open=True)}
    async with (
        serving(tmp_path, wires=wires) as pool,
        AsyncExitStack() as workers,
    ):
        worker = await workers.enter_async_context(provider(pool))
        data = {
            name: await finished(pool, worker, name, number)
            for number, name in enumerate((ADA, BOB))
        }
        idle = await workers.enter_async_context(provider(pool, SIGNERS["B"]))
        await pool.wait_joined(2)
        add_machines(pool)
        operator = await make_key(pool, OPERATOR, scope="admin")
        order = f"/admin/workers/dispatch:{IDLE}/pause"
        status, paused = await request(pool, "POST", order, key=operator)
        assert (status, paused["by"]) == (200, OPERATOR), paused
        keys = {name: each.key for name, each in data.items()}
        keys[READER] = await make_key(pool, READER, scope="read")
        yield Store(pool, data, keys | {ADMIN: KEY})
        assert idle.closed is None


def found(marks: tuple[str, ...], answers: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the paths whose answers have each of the marks."""
    return {
        mark: paths
        for mark in marks
        if (paths := [path for path, text in answers.items() if mark in text])
    }


@pytest.mark.parametrize("role", [READER, BOB])
async def test_no_answer_shows_data_of_another_key(store: Store, role: str) -> None:
    answers = await store.answers(role, about=ADA)

    assert found(store.data[ADA].marks, answers) == {}


async def test_read_key_without_jobs_sees_no_machine(store: Store) -> None:
    assert found(MACHINES, await store.answers(READER, about=ADA)) == {}


async def test_key_sees_of_all_machines_only_the_worker_of_its_jobs(
    store: Store,
) -> None:
    shown = found(MACHINES, await store.answers(ADA, about=ADA))

    assert shown == {
        WORKER: ["/v1/jobs/{id}", "/v1/jobs/{id}/events", "/v1/receipts",
                 "/v1/receipts/{id}", "/admin/jobs", "/admin/jobs/{id}"],
    }  # fmt: skip


async def test_marks_are_in_the_answers_to_those_who_may_see_them(store: Store) -> None:
    own, all_ = await store.answers(ADA, ADA), await store.answers(ADMIN, ADA)

    unseen = {f"prompt-of-{ADA}", store.data[ADA].marks[-1]}  # and the code
    assert found(store.data[ADA].marks, own).keys() == {*store.data[ADA].marks} - unseen
    # The peer shares no model: only for one would its address be shown.
    assert found(MACHINES, all_).keys() == {*MACHINES} - {"10.11.12.13"}


async def test_worker_of_another_key_is_not_listed(store: Store) -> None:
    reserve(store.pool, ADA)

    listed = {}
    for role in (ADA, BOB, ADMIN):
        _, status = await request(
            store.pool, "GET", "/admin/status", key=store.keys[role]
        )
        listed[role] = [each["only_for"] for each in status["workers"]]

    assert listed == {ADA: [[], [ADA]], BOB: [[]], ADMIN: [[], [ADA]]}
