"""What can be done over HTTP, path by path: the table of ``/openapi.json``."""

from dataclasses import dataclass
from typing import Any

from shoal.gateway import calls
from shoal.gateway.admin import accounts, credentials, jobs, status
from shoal.gateway.jobs import endpoints, pairing, quotes, receipts, submit_job
from shoal.gateway.jobs.job_request import CommitJob
from shoal.gateway.jobs.job_view import JobInfo
from shoal.gateway.openai.chat_answer import ChatCompletion
from shoal.gateway.openai.chat_body import CreateChatCompletion
from shoal.gateway.openai.completion_answer import TextCompletion
from shoal.gateway.openai.completion_request import CreateCompletion
from shoal.gateway.openai.embeddings import CreateEmbedding, CreateEmbeddingResponse
from shoal.gateway.openai.endpoints import ModelList, ModelObject
from shoal.ledger.bundle import ReceiptBundle
from shoal.ledger.consistency import ConsistencyProof

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
    Operation("get", "/v1/models/{model}", "Show a model", ModelObject),
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
    Operation("get", "/v1/receipts/{id}", "Export a job's receipt", ReceiptBundle),
    Operation("get", "/v1/tasks", "List the functions", calls.FunctionList),
    Operation("get", "/v1/calls", "Call functions, over a WebSocket", status=101),
    Operation("get", "/v1/blobs/{digest}", "Fetch a value", media=BYTES),
    Operation("put", "/v1/blobs/{digest}", "Keep a value", media=BYTES, status=204),
    Operation(
        "get", "/v1/log", "Show the log of receipts", receipts.ReceiptLog, open=True
    ),
    Operation(
        *(
            "get",
            "/v1/log/growth",
            "Prove that the log has only grown",
            ConsistencyProof,
        ),
        open=True,
        query=receipts.GrowthQuery,
    ),
    Operation(
        *("get", "/v1/health", "Whether there are workers", quotes.HealthReport),
        open=True,
    ),
    Operation(
        *("get", "/v1/quote", "Tell what a job costs", quotes.Quote),
        query=quotes.QuoteQuery,
    ),
    Operation(
        *("post", "/v1/jobs/commit/fast", "Commit a job that is to be done fast"),
        *(submit_job.CommittedJob, CommitJob),
        status=201,
    ),
    Operation(
        *("post", "/v1/jobs/commit/cheap", "Commit a job that is to be done cheaply"),
        *(submit_job.CommittedJob, CommitJob),
        status=201,
    ),
    Operation(
        *("get", "/v1/jobs", "List jobs, the newest first", endpoints.JobPage),
        query=endpoints.JobListQuery,
    ),
    Operation(
        *("get", "/v1/jobs/{id}", "Show a job, or wait for its end", JobInfo),
        query=endpoints.JobShowQuery,
    ),
    Operation("delete", "/v1/jobs/{id}", "Cancel a job", JobInfo),
    Operation(
        *("get", "/v1/jobs/{id}/events", "Tell what happens to a job as it happens"),
        media=SSE_TYPE,
    ),
    Operation(
        *("post", "/v1/trust/create", "Make a code to pair a worker with"),
        *(pairing.CodeCreated, pairing.CreateCode),
        status=201,
    ),
    Operation(
        *("post", "/v1/trust/claim", "Be paired by a code"),
        *(pairing.CodeClaimed, pairing.ClaimCode),
        open=True,
    ),
    Operation(
        *("get", "/v1/trust/list", "List a user's workers", pairing.ProviderList),
        query=pairing.ProviderQuery,
    ),
    Operation("get", "/admin/accounts", "List accounts", accounts.AccountList),
    Operation(
        *("get", "/admin/accounts/{name}", "Show an account"),
        accounts.AccountDetail,
    ),
    Operation(
        *("post", "/admin/accounts/{name}/credit", "Top an account up"),
        *(accounts.AccountDetail, accounts.CreditAccount),
    ),
    Operation(
        *("put", "/admin/accounts/{name}/budget", "Bound an account"),
        *(accounts.AccountDetail, accounts.SetBudget),
    ),
    Operation(
        "get", "/admin/status", "Show workers and jobs", status.CoordinatorStatus
    ),
    Operation("get", "/admin/nodes", "Show the nodes of fleets", status.NodeList),
    Operation(
        *("get", "/admin/jobs", "List jobs, the newest first", jobs.JobList),
        query=jobs.AdminJobQuery,
    ),
    Operation("get", "/admin/jobs/{id}", "Show a job", jobs.JobDetail),
    Operation(
        *("get", "/admin/jobs/{id}/explain", "Tell why a job went as it did"),
        jobs.Explanation,
    ),
    Operation("delete", "/admin/jobs/{id}", "Cancel a job", jobs.CancelledJob),
    Operation("get", "/admin/keys", "List the API keys", credentials.KeyList),
    Operation(
        *("post", "/admin/keys", "Make an API key"),
        *(credentials.KeyInfo, credentials.NewKey),
    ),
    Operation("get", "/admin/keys/{name}", "Show an API key", credentials.KeyInfo),
    Operation("delete", "/admin/keys/{name}", "Revoke an API key", credentials.KeyInfo),
    Operation("get", "/admin/tokens", "List the join tokens", credentials.TokenList),
    Operation(
        *("post", "/admin/tokens", "Make a join token"),
        *(credentials.TokenInfo, credentials.NewToken),
    ),
    Operation(
        *("delete", "/admin/tokens/{name}", "Revoke a join token"),
        credentials.TokenInfo,
    ),
    Operation("get", "/metrics", "Measurements, for Prometheus", media=TEXT_TYPE),
    Operation("get", "/healthz", "Whether the coordinator runs", open=True),
    Operation("get", "/readyz", "Whether it takes work", open=True),
    Operation("get", "/openapi.json", "This description", open=True),
)
"""All but ``/api/chat``, which is not described: it answers nothing as JSON."""
