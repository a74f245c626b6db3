"""All HTTP operations: the router and ``/openapi.json`` are made from them."""

from collections.abc import Iterable

from shoal.gateway import calls, dashboard, openapi, receipts
from shoal.gateway.accounts import balances, credentials, invitations, sign_in, usage
from shoal.gateway.batches import endpoints as batches
from shoal.gateway.batches import files
from shoal.gateway.chat.anthropic import endpoints as anthropic
from shoal.gateway.chat.ollama import endpoints as ollama
from shoal.gateway.chat.openai import endpoints as openai
from shoal.gateway.chat.responses import endpoints as responses
from shoal.gateway.faces import dispatch, grandsage
from shoal.gateway.http.operation import Operation, below, opened
from shoal.gateway.jobs import all_jobs, events, pairing, submit_job
from shoal.gateway.jobs import endpoints as jobs
from shoal.gateway.metrics import monitoring
from shoal.gateway.models import aliases, deployments, listing, placement, shard_relay
from shoal.gateway.operators import event_log, live_feed, status, workers
from shoal.gateway.runs import endpoints as runs
from shoal.gateway.runs import progress

OLLAMA_API = "ollama"
"""The name of the API in the settings: ``--ollama-open`` and ``--ollama-port``."""

OPENAI = (*listing.api, *openai.api, *responses.api)
JOBS = (*dispatch.api, *submit_job.api, *jobs.api, *events.api, *pairing.api)
OLLAMA = opened(ollama.api, OLLAMA_API)

OPERATIONS: tuple[Operation, ...] = (
    *OPENAI,
    *files.api,
    *batches.api,
    *anthropic.api,
    *calls.api,
    *runs.api,
    *shard_relay.api,
    *opened(JOBS, "dispatch"),
    *receipts.api,
    *balances.api,
    *status.api,
    *placement.copies,
    *aliases.api,
    *deployments.api,
    *workers.api,
    *all_jobs.api,
    *credentials.api,
    *invitations.api,
    *batches.overview,
    *event_log.api,
    *live_feed.api,
    *placement.api,
    *progress.api,
    *usage.api,
    *monitoring.api,
    *openapi.api,
    *dashboard.api,
    *sign_in.api,
    *below("/ollama", OLLAMA),
    *grandsage.api,
    *ollama.misdirected(OLLAMA, grandsage.api),
)
"""All operations; the router matches them in this order."""

OLLAMA_PORT: tuple[Operation, ...] = (
    *OLLAMA,
    # Ollama's port has these as well, and many clients use them.  Nothing by its id:
    # all clients without a key are one owner.
    *opened(
        (each for each in (*OPENAI, *anthropic.api) if "{id}" not in each.path),
        OLLAMA_API,
    ),
)
"""The operations at the port of Ollama's API."""


def on_fronts(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations that a process without the hub can answer.

    They run jobs, and wait for their answers: what is frequent, and what streams.
    """
    return [
        each
        for each in operations
        if each.method == "POST" and each.path.removeprefix("/ollama") in ON_FRONTS
    ]


ON_FRONTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    }
)
