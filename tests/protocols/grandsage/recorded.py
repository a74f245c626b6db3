"""Exchanges recorded with real servers and nodes, and sessions to replay them on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest

from protocols.contexts import protocol_context, require_token
from protocols.each_case import Test, in_each_case
from protocols.pairs import EPOCH, AcceptedWorker, as_worker
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import AnswerChunk, Completed, Event, RunJob
from shoal.domain.work import Chat, Feature, Work
from shoal.domain.worker import ServedModel
from shoal.protocols.grandsage import Config, endpoints
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.session import CoordinatorEnd, Output

VECTORS = Path(__file__).parent / "vectors" / "grandsage.json"

Case: TypeAlias = dict[str, Any]  # as recorded; the fields depend on the kind
CASES: dict[str, Case] = {
    case["id"]: case for case in json.loads(VECTORS.read_text("utf-8"))["cases"]
}

NOW = 7.0
NODE = "/ws?name=n1&model=m1&token=nt&max_concurrency=8"
MEMBER = WorkerProfile(
    "nn", ServedModel("stub-model", features=frozenset(Feature)), 3, "nt"
)


def of_kind(kind: str) -> pytest.MarkDecorator:
    """Run a test for every recorded case of one kind."""
    cases = [case for case in CASES.values() if case["kind"] == kind]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


def each_of_kind(kind: str) -> Callable[[Test], Test]:
    """Run a test without a socket for every recorded case of one kind, as one test."""
    return in_each_case(
        {name: case for name, case in CASES.items() if case["kind"] == kind}
    )


def accept(target: str = NODE) -> AcceptedWorker:
    """Let a node in as the server of the recordings would; its token was "nt"."""
    (endpoint,) = endpoints(Config(), protocol_context(EPOCH, require_token("nt")))
    path, _, query = target.partition("?")
    request = UpgradeRequest(path, query)
    assert endpoint.claims(request)
    return as_worker(endpoint.accept(request, 0.0))


def joined(target: str = NODE) -> CoordinatorEnd:
    """Let a node in and open its session."""
    session = accept(target).session
    session.tick(0.0)
    return session


def run(work: Work, name: str = "job") -> RunJob:
    return RunJob(JobId(name), LeaseNumber(1), work)


def chat_of(task: Case) -> Chat:
    """Rebuild the chat that a recorded task came from, in OpenAI's form."""
    system = {"role": "system", "content": task["system"]}
    return Chat(
        "m1",
        (system, *task["messages"]),
        max_tokens=task["max_new_tokens"],
        temperature=task["temperature"],
    )


def as_recorded(text: str, task_id: int) -> str:
    """Put the recording's placeholders into a task of ours."""
    started = int(EPOCH)
    times = [f'"created_at":{started + seconds}' for seconds in range(10)]
    for time in times:
        text = text.replace(time, '"created_at":{{now}}')
    return text.replace(f'"id":{task_id},', '"id":{{id}},', 1)


def http_lines(outputs: Sequence[Event | Output]) -> str:
    """Write the events of one job as the original's HTTP body has them."""
    lines = ""
    for output in outputs:
        if isinstance(output, AnswerChunk):
            text = json.dumps(output.pieces[0], ensure_ascii=False)
            lines += f'{{"o":{text}}}\n'
        elif isinstance(output, Completed):
            lines += '{"done":true}\n'
    return lines


def query_of(url: str) -> dict[str, str]:
    """Return the parameters of a URL none of whose values is escaped."""
    pairs = urlsplit(url).query.split("&")
    return dict(pair.split("=", 1) for pair in pairs)
