"""Who may do what: every operation, by a job's owner, other keys, and nobody.

``STATUSES`` has a row for each operation: a new one without a row fails, and so does
one that checks the body before the caller.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from gateway.batches.uploads import create, ended
from gateway.keys import CHAT, client, make_key, request
from gateway.serving import KEY, Pool
from shoal.domain.credentials import Scope
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.http.operation import Operation
from shoal.gateway.http.responses import JSON_TYPE

ADMIN, MONITOR, OWNER, OTHER, READER, NOBODY = ROLES = (
    "admin",
    "monitor",
    "owner",
    "other",
    "reader",
    "nobody",
)

# What the six get, in their order.  Requests have empty bodies: 400 is "permitted".
ALL = (200, 200, 200, 200, 200, 200)
NOBODYS = (404, 404, 404, 404, 404, 404)
ANY_KEY = (200, 200, 200, 200, 200, 401)
BAD_QUERY = (400, 400, 400, 400, 400, 401)
SUBMISSION = (400, 403, 400, 400, 403, 401)
OWN = (200, 200, 200, 404, 404, 401)
OWN_SHOWN = (200, 200, 200, 403, 403, 401)
OVERVIEW = (200, 200, 403, 403, 403, 401)
MANAGEMENT = (200, 403, 403, 403, 403, 401)
CREATION = (400, 403, 403, 403, 403, 401)

STATUSES: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("GET", "/v1/models"): ANY_KEY,
    ("GET", "/v1/models/{model}"): (
        404,
        404,
        404,
        404,
        404,
        401,
    ),  # its worker has left
    ("POST", "/v1/chat/completions"): SUBMISSION,
    ("GET", "/v1/chat/completions/{id}"): OWN,
    ("POST", "/v1/completions"): SUBMISSION,
    ("GET", "/v1/completions/{id}"): (404, 404, 404, 404, 404, 401),  # it is a chat
    ("POST", "/v1/embeddings"): SUBMISSION,
    ("POST", "/v1/rerank"): SUBMISSION,
    ("POST", "/v1/responses"): SUBMISSION,
    # The job is none of a response.
    ("GET", "/v1/responses/{id}"): (404, 404, 404, 404, 404, 401),
    ("DELETE", "/v1/responses/{id}"): (404, 403, 404, 404, 403, 401),
    ("POST", "/v1/responses/{id}/cancel"): (404, 403, 404, 404, 403, 401),
    ("GET", "/v1/responses/{id}/input_items"): (404, 404, 404, 404, 404, 401),
    ("POST", "/v1/audio/transcriptions"): SUBMISSION,
    ("POST", "/v1/files"): SUBMISSION,
    ("GET", "/v1/files"): ANY_KEY,
    ("GET", "/v1/files/{file_id}"): OWN,
    ("DELETE", "/v1/files/{file_id}"): (404, 403, 404, 404, 403, 401),  # there is none
    ("GET", "/v1/files/{file_id}/content"): OWN,
    ("POST", "/v1/batches"): SUBMISSION,
    ("GET", "/v1/batches"): ANY_KEY,
    ("GET", "/v1/batches/{batch_id}"): OWN,
    ("POST", "/v1/batches/{batch_id}/cancel"): (
        409,
        403,
        409,
        404,
        403,
        401,
    ),  # it ended
    ("POST", "/v1/messages"): SUBMISSION,
    ("POST", "/v1/messages/count_tokens"): SUBMISSION,
    ("GET", "/v1/tasks"): ANY_KEY,
    ("GET", "/v1/calls"): SUBMISSION,
    # Content is addressed by its SHA-256: who knows it may read it.
    ("HEAD", "/v1/blobs/{digest}"): (200, 403, 200, 200, 403, 401),
    ("GET", "/v1/blobs/{digest}"): ANY_KEY,
    ("PUT", "/v1/blobs/{digest}"): SUBMISSION,
    # The token of a run is its credential.
    ("GET", "/v1/runs/{run}/ranks"): (404, 404, 404, 404, 404, 404),
    ("GET", "/v1/runs/{run}/events"): (404, 404, 404, 404, 404, 404),
    ("GET", "/v1/runs/{run}/relay"): (404, 404, 404, 404, 404, 404),
    ("GET", "/v1/shards/relay"): (400, 400, 400, 400, 400, 400),
    ("GET", "/v1/health"): ALL,
    ("GET", "/v1/quote"): BAD_QUERY,
    ("POST", "/v1/jobs/commit/fast"): SUBMISSION,
    ("POST", "/v1/jobs/commit/cheap"): SUBMISSION,
    ("GET", "/v1/jobs"): ANY_KEY,
    ("DELETE", "/v1/jobs"): (400, 403, 400, 400, 403, 401),  # it names no key
    ("GET", "/v1/jobs/{id}"): OWN,
    ("DELETE", "/v1/jobs/{id}"): (409, 403, 409, 404, 403, 401),  # it has ended
    ("GET", "/v1/jobs/{id}/events"): OWN,
    ("POST", "/v1/trust/create"): SUBMISSION,
    ("POST", "/v1/trust/claim"): (
        400,
        400,
        400,
        400,
        400,
        400,
    ),  # a code is its credential
    ("GET", "/v1/trust/list"): BAD_QUERY,
    ("DELETE", "/v1/trust/{provider_pubkey}"): (
        400,
        403,
        400,
        400,
        403,
        401,
    ),  # no user
    ("GET", "/v1/receipts"): ANY_KEY,
    ("GET", "/v1/receipts/{id}"): OWN_SHOWN,
    ("GET", "/v1/log"): ALL,
    ("GET", "/v1/log/growth"): (400, 400, 400, 400, 400, 400),
    ("GET", "/admin/accounts"): ANY_KEY,
    ("GET", "/admin/accounts/{name}"): OWN_SHOWN,
    ("POST", "/admin/accounts/{name}/credit"): CREATION,
    ("PUT", "/admin/accounts/{name}/budget"): CREATION,
    ("GET", "/admin/status"): ANY_KEY,
    # The worker is unknown.
    ("GET", "/admin/workers/{name}"): (400, 400, 403, 403, 403, 401),
    ("POST", "/admin/workers/{name}/approve"): CREATION,
    ("POST", "/admin/workers/{name}/drain"): CREATION,
    ("POST", "/admin/workers/{name}/pause"): CREATION,
    ("POST", "/admin/workers/{name}/resume"): CREATION,
    ("POST", "/admin/workers/{name}/remove"): CREATION,
    ("GET", "/admin/nodes"): OVERVIEW,
    ("GET", "/admin/models/{model}"): OVERVIEW,
    ("GET", "/admin/aliases"): ANY_KEY,
    ("GET", "/admin/deployments"): OVERVIEW,
    ("GET", "/admin/splits/{name}"): (404, 404, 403, 403, 403, 401),
    ("PUT", "/admin/deployments/{name}"): (404, 403, 403, 403, 403, 401),
    ("DELETE", "/admin/deployments/{name}"): (404, 403, 403, 403, 403, 401),
    ("PUT", "/admin/aliases/{name}"): CREATION,
    ("DELETE", "/admin/aliases/{name}"): (404, 403, 403, 403, 403, 401),
    ("GET", "/admin/jobs"): ANY_KEY,
    ("GET", "/admin/jobs/{id}"): OWN_SHOWN,
    ("DELETE", "/admin/jobs/{id}"): (400, 403, 400, 403, 403, 401),  # it has ended
    ("GET", "/admin/jobs/{id}/explain"): OWN_SHOWN,
    ("GET", "/admin/keys"): OVERVIEW,
    ("POST", "/admin/keys"): CREATION,
    ("GET", "/admin/keys/{name}"): OVERVIEW,
    ("DELETE", "/admin/keys/{name}"): (404, 403, 403, 403, 403, 401),
    ("GET", "/admin/join"): MANAGEMENT,
    ("GET", "/admin/tokens"): OVERVIEW,
    ("POST", "/admin/tokens"): CREATION,
    ("DELETE", "/admin/tokens/{name}"): (404, 403, 403, 403, 403, 401),
    ("GET", "/admin/batches"): ANY_KEY,
    ("GET", "/admin/events"): OVERVIEW,
    ("GET", "/admin/live"): OVERVIEW,
    ("GET", "/admin/models"): ANY_KEY,
    ("GET", "/admin/runs"): ANY_KEY,
    ("GET", "/admin/runs/{id}"): (404, 404, 404, 404, 404, 401),  # the job is no run
    ("GET", "/admin/usage"): ANY_KEY,
    ("GET", "/admin/usage/minutes"): OVERVIEW,
    ("PUT", "/v1/runs/{run}/pieces/{digest}"): (404, 404, 404, 404, 404, 404),
    ("GET", "/v1/runs/{run}/results/{id}"): (404, 404, 404, 404, 404, 401),
    ("GET", "/metrics"): OVERVIEW,
    ("GET", "/healthz"): ALL,
    ("GET", "/health"): (503,) * len(ALL),  # there is no worker
    ("GET", "/readyz"): ALL,
    ("GET", "/openapi.json"): ALL,
    ("GET", "/"): ALL,
    ("GET", "/dashboard/{path}"): ALL,
    ("GET", "/dashboard/session"): ANY_KEY,
    # They lack the header of the dashboard's page.
    ("POST", "/dashboard/session"): (403, 403, 403, 403, 403, 403),
    ("DELETE", "/dashboard/session"): (403, 403, 403, 403, 403, 403),
    ("POST", "/dashboard/links"): MANAGEMENT,
    ("GET", "/ollama/"): ALL,
    ("GET", "/ollama/api/version"): ALL,
    ("POST", "/ollama/api/chat"): SUBMISSION,
    ("POST", "/ollama/api/generate"): SUBMISSION,
    ("POST", "/ollama/api/embed"): SUBMISSION,
    ("POST", "/ollama/api/embeddings"): SUBMISSION,
    ("GET", "/ollama/api/tags"): ANY_KEY,
    ("GET", "/ollama/api/ps"): ANY_KEY,
    ("POST", "/ollama/api/show"): BAD_QUERY,
    ("POST", "/ollama/api/pull"): BAD_QUERY,
    # It refuses these to everybody.
    ("POST", "/ollama/api/create"): SUBMISSION,
    ("POST", "/ollama/api/copy"): SUBMISSION,
    ("DELETE", "/ollama/api/delete"): SUBMISSION,
    ("POST", "/ollama/api/push"): SUBMISSION,
    ("HEAD", "/ollama/api/blobs/{digest}"): SUBMISSION,
    ("POST", "/ollama/api/blobs/{digest}"): SUBMISSION,
    # They tell Ollama's clients the address of its API.
    ("GET", "/api/version"): NOBODYS,
    ("POST", "/api/generate"): NOBODYS,
    ("POST", "/api/embed"): NOBODYS,
    ("POST", "/api/embeddings"): NOBODYS,
    ("GET", "/api/tags"): NOBODYS,
    ("GET", "/api/ps"): NOBODYS,
    ("POST", "/api/show"): NOBODYS,
    ("POST", "/api/pull"): NOBODYS,
    ("POST", "/api/chat"): ALL,  # its errors are lines of an answer
}

# Where keys see a list of what is theirs.
LISTS = [
    "/v1/files",
    "/v1/batches",
    "/v1/jobs",
    "/v1/receipts",
    "/admin/jobs",
    "/admin/accounts",
    "/admin/usage",
    "/admin/batches",
]

VALUE = b"a value of the owner" * 100


@dataclass(frozen=True, slots=True)
class Matrix:
    """A pool with a finished job, a file and a failed batch of the owner.

    ``keys`` has the key of each role.
    """

    pool: Pool
    keys: Mapping[str, str]
    job_id: str
    answer_id: str
    digest: str
    file_id: str
    batch_id: str

    def path(self, operation: Operation) -> str:
        is_answer = "completions/{id}" in operation.path
        deletes = operation.method == "DELETE"  # the keys are still needed
        return operation.path.format(
            id=self.answer_id if is_answer else self.job_id,
            digest=self.digest,
            provider_pubkey=self.digest,
            run="none",
            model="m1",
            file_id="none" if deletes else self.file_id,
            batch_id=self.batch_id,
            path="index.html",
            name="nobodys" if deletes else OWNER,
        )

    async def get(self, path: str, role: str) -> str:
        headers = self.pool.headers(self.keys[role])
        async with self.pool.session.get(self.pool.url + path, headers=headers) as got:
            return await got.text()


async def a_finished_job(pool: Pool, key: str) -> tuple[str, str]:
    """Have a chat answered; return the ids of its job and of its answer."""
    async with pool.node() as node:
        await pool.wait_joined()
        answering = asyncio.create_task(node.answer("hello"))
        async with pool.session.post(
            f"{pool.url}/v1/chat/completions", json=CHAT, headers=pool.headers(key)
        ) as response:
            assert response.status == 200
            answer = await response.json()
            await answering
            return response.headers["x-shoal-job"], answer["id"]


@pytest.fixture
async def matrix(pool: Pool) -> Matrix:
    keys = {
        ADMIN: KEY,
        MONITOR: await make_key(pool, MONITOR, scope="monitor"),
        OWNER: await make_key(pool, OWNER),
        OTHER: await make_key(pool, OTHER),
        READER: await make_key(pool, READER, scope="read"),
        NOBODY: "",
    }
    job_id, answer_id = await a_finished_job(pool, keys[OWNER])
    blob = hashlib.sha256(VALUE).hexdigest()
    async with pool.session.put(
        f"{pool.url}/v1/blobs/{blob}", data=VALUE, headers=pool.headers(keys[OWNER])
    ) as stored:
        assert stored.status < 300, await stored.text()
    async with client(pool, keys[OWNER]) as owner:
        batch = await ended(owner, (await create(owner, ["no request"])).id)
    file_id = batch.input_file_id
    return Matrix(pool, keys, job_id, answer_id, blob, file_id, batch.id)


async def test_each_role_gets_its_status(matrix: Matrix) -> None:
    pool = matrix.pool
    rows: dict[tuple[str, str], tuple[int, ...]] = {}
    for operation in OPERATIONS:
        body: object = {} if operation.method in ("POST", "PUT") else None
        statuses = []
        for role in ROLES:
            key = matrix.keys[role]
            async with pool.session.request(
                operation.method,
                pool.url + matrix.path(operation),
                json=body,
                headers=pool.headers(key) if key else None,
            ) as response:
                statuses.append(response.status)
        rows[operation.method, operation.path] = tuple(statuses)

    assert rows == STATUSES


async def test_a_bare_key_has_the_same_rights(
    matrix: Matrix, subtests: pytest.Subtests
) -> None:
    for path in ("/v1/models", "/admin/keys", "/v1/jobs/{id}"):
        url = matrix.pool.url + path.format(id=matrix.job_id)
        statuses = []
        for role in ROLES:
            headers = {"x-api-key": matrix.keys[role]}
            async with matrix.pool.session.get(url, headers=headers) as response:
                statuses.append(response.status)

        with subtests.test(path=path):
            assert tuple(statuses) == STATUSES["GET", path]


async def test_lists_show_a_key_its_own_alone(
    matrix: Matrix, subtests: pytest.Subtests
) -> None:
    credit = {"amount": 1_000_000}
    await request(matrix.pool, "POST", f"/admin/accounts/{OWNER}/credit", credit)
    marks = {
        "/admin/accounts": OWNER,
        "/admin/usage": OWNER,
        "/admin/batches": matrix.batch_id,
        "/v1/files": matrix.file_id,
        "/v1/batches": matrix.batch_id,
    }

    for path in LISTS:
        shown = {role: await matrix.get(path, role) for role in ROLES if role != NOBODY}

        mark = marks.get(path, matrix.job_id)
        seen_by = {role for role, text in shown.items() if mark in text}
        with subtests.test(path=path):
            assert seen_by - {ADMIN, MONITOR} == {OWNER}
            assert (MONITOR in seen_by) == (ADMIN in seen_by)


async def test_a_monitor_sees_what_an_admin_sees(
    matrix: Matrix, subtests: pytest.Subtests
) -> None:
    paths = [
        each.path
        for each in OPERATIONS
        if STATUSES[each.method, each.path][:2] == (200, 200)
        and (each.method, each.media) == ("GET", JSON_TYPE)
        and each.path.startswith("/admin/")
    ]
    for path in paths:
        url = path.format(id=matrix.job_id, name=OWNER, model="m1")

        with subtests.test(path=path):
            assert await matrix.get(url, MONITOR) == await matrix.get(url, ADMIN)


def test_a_monitor_changes_nothing() -> None:
    """Whatever is no GET asks for more than it has, or for another credential."""
    only_read = {("POST", "/ollama/api/show"), ("POST", "/ollama/api/pull")}

    permitted = {
        (each.method, each.path)
        for each in OPERATIONS
        if each.method not in ("GET", "HEAD")
        and each.scope is not None
        and Scope.MONITOR.covers(each.scope)
    }

    assert permitted == only_read
    assert not Scope.MONITOR.covers(Scope.USE)


async def test_what_everybody_sees_names_nobody(
    matrix: Matrix, subtests: pytest.Subtests
) -> None:
    for path, role in (
        ("/admin/status", OTHER),
        ("/admin/status", READER),
        ("/metrics", MONITOR),
    ):
        shown = await matrix.get(path, role)

        with subtests.test(path=path, role=role):
            assert OWNER not in shown
            assert matrix.job_id not in shown
            assert all(key not in shown for key in matrix.keys.values() if key)
