"""What can be done over HTTP, path by path: the table of ``/openapi.json``."""

from dataclasses import dataclass
from typing import Any

from shoal.gateway import (
    admin,
    admin_accounts,
    admin_jobs,
    admin_keys,
    admin_nodes,
    admin_tokens,
    committing,
    jobs,
    quotes,
    receipts,
    tasks,
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
from shoal.ledger.bundle import Bundle
from shoal.ledger.growth import Growth

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
SSE_TYPE = "text/event-stream"
BYTES = "application/octet-stream"


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
    Operation("get", "/v1/tasks", "List the functions", tasks.FunctionList),
    Operation("get", "/v1/calls", "Call functions, over a WebSocket", status=101),
    Operation("get", "/v1/blobs/{digest}", "Fetch a value", media=BYTES),
    Operation("put", "/v1/blobs/{digest}", "Keep a value", media=BYTES, status=204),
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
    Operation("get", "/admin/nodes", "Show the nodes of fleets", admin_nodes.NodeList),
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
