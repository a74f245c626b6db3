"""Rerankings: requests, and the documents in the order of their scores."""

import asyncio
import json
from typing import Any

import pytest

from gateway.serving import KEY, Pool
from gateway.shoal_worker import offer, shoal_worker
from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.ids import JobId
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import JobKind, Rerank
from shoal.gateway.chat.openai.rerank import (
    DOCUMENTS_MAX,
    RerankRequest,
    decode_rerank_request,
    encode_ranking,
)


def decode(**fields: Any) -> RerankRequest:
    body = {"model": "m1", "query": "q", "documents": ["a", "b", "c"]} | fields
    return decode_rerank_request(json.dumps(body).encode())


def ranking(asked: RerankRequest, *scores: Any) -> Any:
    choices = tuple(Choice({"relevance_score": score}) for score in scores)
    outcome = Outcome("", choices=choices)
    return json.loads(encode_ranking(JobId("j"), asked, outcome, Usage(7, 0)))


def test_documents_are_texts_or_objects_with_texts() -> None:
    asked = decode(documents=["a", {"text": "b", "title": "ignored"}])

    assert asked.work == Rerank("m1", "q", ("a", "b"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a"] * (DOCUMENTS_MAX + 1)}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"top_n": 0}, "top_n"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field


def test_most_relevant_documents_come_first() -> None:
    answer = ranking(decode(top_n=2, return_documents=True), 0.5, -1, 2.0)

    assert answer == {
        "id": "rerank-j",
        "model": "m1",
        "results": [
            {"index": 2, "relevance_score": 2.0, "document": {"text": "c"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_equal_scores_keep_the_order_of_the_documents() -> None:
    assert [each["index"] for each in ranking(decode(), 1, 1, 1)["results"]] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("scores", [(1, 2), (1, 2, None), (1, 2, True), (1, 2, 1e999)])
def test_scores_of_a_worker_are_checked(scores: tuple[Any, ...]) -> None:
    with pytest.raises(JobError):
        ranking(decode(), *scores)


async def test_worker_ranks_documents(pool: Pool) -> None:
    body = {"model": "m1", "query": "q", "documents": ["a", "b"]}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        shoal_worker(pool, offer(JobKind.RERANK)) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        asking = tasks.create_task(
            pool.session.post(f"{pool.url}/v1/rerank", json=body, headers=headers)
        )
        job = await worker.job()
        for index, score in enumerate((0.25, 0.75)):
            fields = {"relevance_score": score}
            worker.delta(job, choice=index, fields=fields)
        worker.end(job)
        response = await asking
        answer = await response.json()

    assert worker.work() == Rerank("m1", "q", ("a", "b"))
    assert [each["index"] for each in answer["results"]] == [1, 0]
