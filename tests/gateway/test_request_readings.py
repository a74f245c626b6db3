"""Clients prove with a receipt which of their requests was answered, in any dialect."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.commands import shoal
from coordinator.hubs import ScriptedWorker
from gateway.keys import make_key, request
from gateway.serving import KEY, Pool, eventually, serving
from harness.documents import ROOT, Block, blocks_of
from protocols.contexts import SIGNER
from shoal.cli.main import main
from shoal.domain.credentials import Scope
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.vocabulary import AnswerChunk, Command, Completed, RunJob
from shoal.domain.work import Completion, Embedding, Feature, JobKind, Rerank
from shoal.gateway import chat
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.receipts import works_of
from shoal.ledger import bundle
from shoal.ledger.canonical import encode
from shoal.ledger.requests import request_of
from shoal.ledger.verification import VerificationStep

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = [{"role": "user", "content": "hi"}]
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
VECTOR = "AACAPw=="  # 1.0
COORDINATOR = SIGNER.public_key
FUNCTION = {"name": "f", "parameters": {"type": "object"}}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "m", "messages": HI},
        {"model": "m", "messages": HI, "temperature": 0.7, "max_completion_tokens": 5,
         "stop": "END", "user": "u", "stream": True, "seed": 2**60, "n": 1},
        {"model": "m", "messages": HI, "tools": [{"type": "function",
                                                  "function": FUNCTION}]},
    ],
    "/v1/completions": [
        {"model": "m", "prompt": ["one"], "temperature": 0, "max_tokens": 3},
    ],
    "/v1/responses": [
        {"model": "m", "input": "hi", "instructions": "Be brief.", "store": False},
    ],
    "/v1/messages": [
        {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": HI,
         "stop_sequences": ["END"]},
    ],
    "/v1/embeddings": [{"model": "m", "input": "hi", "dimensions": 1}],
    "/v1/rerank": [
        {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    ],
    "/ollama/api/chat": [
        {"model": "m:latest", "messages": HI, "options": {"num_predict": 7},
         "format": "json", "stream": False},
    ],
    "/ollama/api/generate": [
        {"model": "m", "prompt": "hi", "system": "Be brief.", "think": False},
        {"model": "m", "prompt": "a", "raw": True, "options": {"temperature": 0.5}},
    ],
    "/ollama/api/embed": [{"model": "m", "input": ["hi"]}],
    "/ollama/api/embeddings": [{"model": "m", "prompt": "hi"}],
    "/v1/jobs/commit/fast": [
        {"job_type": "LLM_INFER", "payload": {"prompt": "hi", "model": "m"},
         "user_id": "u"},
        {"job_type": "TASK", "payload": {"task_type": "hi", "input": [1, 0.5]},
         "user_id": 7},
    ],
}  # fmt: skip


READ_BY_NOBODY = {
    "/v1/audio/transcriptions",  # its body is a form with a file
    "/v1/responses/{id}/cancel",
    "/v1/messages/count_tokens",
    *(f"/ollama/api/{name}" for name in ("blobs/{digest}", "push", "copy", "create")),
}
"""What ``works_of`` cannot read, or asks no model anything."""


async def test_each_request_for_a_model_is_here() -> None:
    asking = {
        each.path
        for each in OPERATIONS
        if each.method == "POST" and each.scope is Scope.USE
        if each.handler.__module__.startswith(f"{chat.__name__}.")
    }

    assert asking - READ_BY_NOBODY == {each for each in BODIES if "jobs" not in each}


class Worker(ScriptedWorker):
    """Completes each job at once."""

    def send(self, message: Command) -> bool:
        if isinstance(message, RunJob):
            asyncio.get_running_loop().call_soon(self._run, message)
        return super().send(message)

    def _run(self, run: RunJob) -> None:
        pieces: list[AnswerPiece] = ["text"]
        if isinstance(run.work, Embedding):
            pieces = [Delta(0, {"embedding": VECTOR})]
        elif isinstance(run.work, Rerank):
            pieces = [Delta(each, {"relevance_score": 0.5}) for each in range(2)]
        self.emit(AnswerChunk(run.job_id, run.lease, pieces))
        self.emit(Completed(run.job_id, run.lease))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    async with serving(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(pool: Pool) -> Worker:
    everything = frozenset(JobKind) - {JobKind.CALL, JobKind.CALL_STREAM}
    # A worker that takes all values names its tasks, which this one does not.
    features = frozenset(Feature) - {Feature.VALUES}
    made = Worker(pool.hub, slots=9, features=features, kinds=everything)
    await pool.wait_joined()
    return made


async def posted(
    pool: Pool, worker: Worker, path: str, body: bytes, key: str = KEY
) -> RunJob:
    """Send a request; return what the worker gets of it."""
    number = len(worker.runs)
    headers = {**pool.headers(key), "Content-Type": "application/json"}
    url = pool.url + path
    async with pool.session.post(url, data=body, headers=headers) as response:
        assert response.status in (200, 201), await response.text()
        await response.read()
    await eventually(lambda: len(worker.runs) > number)
    return worker.runs[-1]


async def exported(pool: Pool, job_id: JobId, query: str = "?request=true") -> bytes:
    """Return the bundle of a job, once it is done."""
    url = f"{pool.url}/v1/receipts/{job_id}{query}"
    with pool.hub.observe_job(job_id) as reader:
        if reader is not None:
            await reader.outcome()
    async with pool.session.get(url, headers=pool.headers()) as response:
        assert response.status == 200, await response.text()
        return await response.read()


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, each in BODIES.items() for body in each]
)
async def test_body_is_proved_to_be_the_request_of_its_receipt(
    pool: Pool, worker: Worker, path: str, body: dict[str, Any]
) -> None:
    data = json.dumps(body, indent=1).encode()
    run = await posted(pool, worker, path, data)
    file = await exported(pool, run.job_id)

    opened = bundle.read(file)
    assert opened.request
    assert opened.request.text == request_of(run.work).decode()
    readings = [request_of(work) for work in works_of(data)]
    steps = bundle.verify(file, COORDINATOR, readings)
    assert all(each.ok for each in steps), steps
    assert VerificationStep.REQUEST in [each.step for each in steps]
    changed = json.dumps(body).replace('"hi"', '"ho"').replace('"one"', '"two"')
    changed = changed.replace('"m"', '"n"')
    others = [request_of(work) for work in works_of(changed.encode())]
    assert others
    assert not bundle.verify(file, COORDINATOR, others)[-1].ok


async def test_line_of_a_batch_is_read_as_its_body() -> None:
    body = BODIES["/v1/chat/completions"][1]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": body}  # fmt: skip

    expected = [*works_of(json.dumps(body).encode())]
    assert [*works_of(json.dumps(line).encode())] == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b'{"model": "m"}',
        b'{"model": "m", "input": [1, 2]}',
        b'{"model": "m", "input": [{"role": "user", "content": "a"}],'
        b' "previous_response_id": "resp_1"}',
        b'{"model": "m", "input": [{"type": "item_reference", "id": "msg_1"}]}',
        b'{"model": "m", "messages": []}',
        b'{"model": "m", "prompt": ""}',
    ],
)
async def test_what_depends_on_more_than_the_body_has_no_reading(body: bytes) -> None:
    works = [*works_of(body)]

    assert [work for work in works if not isinstance(work, Completion)] == []


async def test_export_has_no_request_unless_it_is_asked_for(
    pool: Pool, worker: Worker
) -> None:
    # Spaces, since the file has signatures and hashes, in which any two letters occur.
    asked = CHAT.replace(b"hi", b"a b c")
    job_id = (await posted(pool, worker, "/v1/chat/completions", asked)).job_id

    for query in ("", "?request=false"):
        file = await exported(pool, job_id, query)
        assert b"a b c" not in file
        assert b'"request":' not in file
    status, listed = await request(pool, "GET", "/v1/receipts?limit=1")
    assert status == 200
    (receipt,) = listed["data"]
    assert receipt["request_hash"] in bundle.read(file).receipt
    assert (await request(pool, "GET", f"/v1/receipts/{job_id}?requests=1"))[0] == 400


async def test_request_is_for_the_owner_of_the_job_alone(
    pool: Pool, worker: Worker
) -> None:
    owner = await make_key(pool, "al")
    other = await make_key(pool, "bo")
    watcher = await make_key(pool, "eve", scope="monitor")
    run = await posted(pool, worker, "/v1/chat/completions", CHAT, owner)
    path = f"/v1/receipts/{run.job_id}"

    assert (await request(pool, "GET", f"{path}?request=true", key=owner))[0] == 200
    for key in (other, watcher, KEY):
        status, answer = await request(pool, "GET", f"{path}?request=true", key=key)
        assert status == 403
        assert "request" not in answer
    assert (await request(pool, "GET", path, key=watcher))[0] == 200


async def test_salt_of_a_deleted_job_still_proves_its_request(
    pool: Pool, worker: Worker
) -> None:
    job_id = (await posted(pool, worker, "/v1/chat/completions", CHAT)).job_id
    await exported(pool, job_id)
    assert pool.gateway is not None

    await pool.gateway.store.prune(pool.gateway.clock.wall() + 1)

    file = await exported(pool, job_id)
    opened = bundle.read(file)
    assert opened.request
    assert (opened.output, opened.request.text) == (None, None)
    readings = [request_of(work) for work in works_of(CHAT)]
    assert all(each.ok for each in bundle.verify(file, COORDINATOR, readings))
    others = [request_of(work) for work in works_of(CHAT.replace(b"hi", b"ho"))]
    assert not bundle.verify(file, COORDINATOR, others)[-1].ok


async def test_command_exports_the_request(
    pool: Pool, worker: Worker, tmp_path: Path
) -> None:
    job_id = (await posted(pool, worker, "/v1/chat/completions", CHAT)).job_id
    await exported(pool, job_id)
    file, body = tmp_path / "bundle.json", tmp_path / "body.json"
    body.write_bytes(CHAT)

    export = ("receipts", "export", job_id, "--request", "-o", str(file))
    assert await shoal(pool, *export) == 0

    assert file.read_bytes() == await exported(pool, job_id)
    words = ["receipts", "verify", str(file), "--key", COORDINATOR.hex()]
    assert main([*words, "--request", str(body)]) == 0


# The page.


def documented() -> list[tuple[Block, Block]]:
    """Return the bodies on the page, each with the request that it is."""
    blocks = [each for each in blocks_of(ROOT / "docs" / "receipts.md") if each.mark]
    bodies = [each for each in blocks if each.mark.startswith("body: ")]
    requests = [each for each in blocks if each.mark == "request"]
    return [*zip(bodies, requests, strict=True)]


async def test_page_shows_what_becomes_of_a_body() -> None:
    shown = documented()

    assert {each.mark for each, _ in shown} == {
        "body: /v1/chat/completions",
        "body: /v1/messages",
    }
    for body, canonical in shown:
        expected = encode(json.loads(canonical.code))
        assert expected in map(request_of, works_of(body.code.encode())), body.place
