"""``/openapi.json``: the HTTP interface, described by the types that it is made of.

Source: OpenAPI Specification 3.1.0; JSON Schema comes from msgspec.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

import shoal
from shoal.gateway import (
    admin,
    admin_accounts,
    admin_jobs,
    admin_keys,
    admin_tokens,
    committing,
    jobs,
    problems,
    quotes,
    receipts,
    trust,
)
from shoal.gateway.chat_answer import ChatCompletion
from shoal.gateway.chat_body import CreateChatCompletion
from shoal.gateway.completion_answer import TextCompletion
from shoal.gateway.completion_request import CreateCompletion
from shoal.gateway.embeddings import CreateEmbedding, CreateEmbeddingResponse
from shoal.gateway.job_request import CommitJob
from shoal.gateway.job_shown import JobShown
from shoal.gateway.openai import Model, ModelList
from shoal.gateway.parts import Gateway
from shoal.ledger.bundle import Bundle
from shoal.ledger.growth import Growth

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
SSE_TYPE = "text/event-stream"

REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """What can be done at a path.

    ``streams`` says that the answer is server-sent events if the body asks for it,
    ``open`` that it takes no key, and ``query`` what the query may hold.
    """

    method: str
    path: str
    summary: str
    answer: type[Any] | None = None
    body: type[Any] | None = None
    streams: bool = False
    media: str = JSON_TYPE
    open: bool = False
    query: type[Any] | None = None
    status: int = 200


OPERATIONS = (
    Operation("get", "/v1/models", "List the models", ModelList),
    Operation("get", "/v1/models/{model}", "Show a model", Model),
    Operation(
        *("post", "/v1/chat/completions", "Answer a conversation"),
        *(ChatCompletion, CreateChatCompletion),
        streams=True,
    ),
    Operation("get", "/v1/chat/completions/{id}", "Fetch an answer", ChatCompletion),
    Operation(
        *("post", "/v1/completions", "Go on with a text"),
        *(TextCompletion, CreateCompletion),
        streams=True,
    ),
    Operation("get", "/v1/completions/{id}", "Fetch an answer", TextCompletion),
    Operation(
        *("post", "/v1/embeddings", "Turn texts into vectors"),
        *(CreateEmbeddingResponse, CreateEmbedding),
    ),
    Operation(
        *("get", "/v1/receipts", "List receipts, the newest first"),
        receipts.ReceiptList,
        query=receipts.ReceiptQuery,
    ),
    Operation("get", "/v1/receipts/{id}", "Export a job's receipt", Bundle),
    Operation("get", "/v1/log", "Show the log of receipts", receipts.Log, open=True),
    Operation(
        *("get", "/v1/log/growth", "Prove that the log has only grown", Growth),
        open=True,
        query=receipts.GrowthQuery,
    ),
    Operation(
        *("get", "/v1/health", "Whether there are workers", quotes.Health),
        open=True,
    ),
    Operation(
        *("get", "/v1/quote", "Tell what a job costs", quotes.Quote),
        query=quotes.QuoteQuery,
    ),
    Operation(
        *("post", "/v1/jobs/commit/fast", "Commit a job that is to be done fast"),
        *(committing.Committed, CommitJob),
        status=201,
    ),
    Operation(
        *("post", "/v1/jobs/commit/cheap", "Commit a job that is to be done cheaply"),
        *(committing.Committed, CommitJob),
        status=201,
    ),
    Operation(
        *("get", "/v1/jobs", "List jobs, the newest first", jobs.JobPage),
        query=jobs.ListQuery,
    ),
    Operation(
        *("get", "/v1/jobs/{id}", "Show a job, or wait for its end", JobShown),
        query=jobs.ShowQuery,
    ),
    Operation("delete", "/v1/jobs/{id}", "Cancel a job", JobShown),
    Operation(
        *("get", "/v1/jobs/{id}/events", "Tell what happens to a job as it happens"),
        media=SSE_TYPE,
    ),
    Operation(
        *("post", "/v1/trust/create", "Make a code to pair a worker with"),
        *(trust.CodeCreated, trust.CreateCode),
        status=201,
    ),
    Operation(
        *("post", "/v1/trust/claim", "Be paired by a code"),
        *(trust.CodeClaimed, trust.ClaimCode),
        open=True,
    ),
    Operation(
        *("get", "/v1/trust/list", "List a user's workers", trust.ProviderList),
        query=trust.ProviderQuery,
    ),
    Operation("get", "/admin/accounts", "List accounts", admin_accounts.AccountList),
    Operation(
        *("get", "/admin/accounts/{name}", "Show an account"),
        admin_accounts.AccountDetail,
    ),
    Operation(
        *("post", "/admin/accounts/{name}/credit", "Top an account up"),
        *(admin_accounts.AccountDetail, admin_accounts.Credit),
    ),
    Operation(
        *("put", "/admin/accounts/{name}/budget", "Bound an account"),
        *(admin_accounts.AccountDetail, admin_accounts.Limit),
    ),
    Operation("get", "/admin/status", "Show workers and jobs", admin.Status),
    Operation(
        *("get", "/admin/jobs", "List jobs, the newest first", admin_jobs.JobList),
        query=admin_jobs.JobQuery,
    ),
    Operation("get", "/admin/jobs/{id}", "Show a job", admin_jobs.JobDetail),
    Operation(
        *("get", "/admin/jobs/{id}/explain", "Tell why a job went as it did"),
        admin_jobs.Explanation,
    ),
    Operation("delete", "/admin/jobs/{id}", "Cancel a job", admin_jobs.CancelledJob),
    Operation("get", "/admin/keys", "List the API keys", admin_keys.KeyList),
    Operation(
        *("post", "/admin/keys", "Make an API key"),
        *(admin_keys.KeyShown, admin_keys.NewKey),
    ),
    Operation("get", "/admin/keys/{name}", "Show an API key", admin_keys.KeyShown),
    Operation("delete", "/admin/keys/{name}", "Revoke an API key", admin_keys.KeyShown),
    Operation("get", "/admin/tokens", "List the join tokens", admin_tokens.TokenList),
    Operation(
        *("post", "/admin/tokens", "Make a join token"),
        *(admin_tokens.TokenShown, admin_tokens.NewToken),
    ),
    Operation(
        *("delete", "/admin/tokens/{name}", "Revoke a join token"),
        admin_tokens.TokenShown,
    ),
    Operation("get", "/metrics", "Measurements, for Prometheus", media=TEXT_TYPE),
    Operation("get", "/healthz", "Whether the coordinator runs", open=True),
    Operation("get", "/readyz", "Whether it takes work", open=True),
    Operation("get", "/openapi.json", "This description", open=True),
)
"""All but ``/api/chat``, which is not described: it answers nothing as JSON."""


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the path of this face; it tells nothing of the pool, and needs no key."""
    described = msgspec.json.encode(describe())

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=described, content_type=JSON_TYPE)

    return [web.get("/openapi.json", show)]


def describe() -> dict[str, Any]:
    """Return the description as JSON."""
    types: set[type[Any]] = {problems.ErrorBody, problems.PlainError}
    for operation in OPERATIONS:
        types |= {each for each in (operation.answer, operation.body) if each}
        types |= {operation.query} if operation.query else set()
    order = sorted(types, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components(order, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _operation(operation)
        if parameters := _parameters(operation, schemas):
            described["parameters"] = parameters
        paths.setdefault(operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": shoal.__version__,
            "description": "One AI computer made of the machines people have.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {operation.media: {"schema": _schema(operation)}}
    plain = problems.form_at(operation.path) is problems.as_plain
    error = problems.PlainError if plain else problems.ErrorBody
    if operation.streams:
        answer[SSE_TYPE] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": _id(operation),
        "summary": operation.summary,
        "responses": {
            str(operation.status): {"description": "The answer", "content": answer},
            "default": {
                "description": "What went wrong",
                "content": {JSON_TYPE: {"schema": _ref(error)}},
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON_TYPE: {"schema": _ref(operation.body)}},
        }
    if operation.open:
        described["security"] = []
    return described


def _parameters(
    operation: Operation, schemas: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    in_path = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": _TEXT}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    if operation.query is None:
        return in_path
    properties = schemas[operation.query.__name__]["properties"]
    in_query = [
        {"name": name, "in": "query", "schema": _given(schema)}
        for name, schema in properties.items()
    ]
    return in_path + in_query


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a parameter may be when it is given: not null, then."""
    for each in schema.get("anyOf", ()):
        if each != {"type": "null"}:
            return dict(each)
    return schema


_TEXT = {"type": "string", "minLength": 1}


def _schema(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return _ref(operation.answer)
    return {"type": "object" if operation.media == JSON_TYPE else "string"}


def _ref(type_: type[Any]) -> dict[str, Any]:
    return {"$ref": REF.format(name=type_.__name__)}


def _id(operation: Operation) -> str:
    words = operation.path.replace("{", "by_").replace("}", "").strip("/").split("/")
    return "_".join([operation.method, *words]).replace(".", "_")
