"""What HTTP offers: the router and ``/openapi.json`` are made from it."""

from shoal.gateway import calls, dispatch, grandsage, monitoring, openapi, runs
from shoal.gateway.admin import accounts, credentials, models, status, workers
from shoal.gateway.admin import jobs as all_jobs
from shoal.gateway.anthropic import endpoints as anthropic
from shoal.gateway.batches import endpoints as batches
from shoal.gateway.batches import files
from shoal.gateway.dashboard import batches as all_batches
from shoal.gateway.dashboard import event_log as pool_events
from shoal.gateway.dashboard import files as dashboard_files
from shoal.gateway.dashboard import live_feed as live
from shoal.gateway.dashboard import models as placed_models
from shoal.gateway.dashboard import runs as watched_runs
from shoal.gateway.dashboard import sign_in, usage
from shoal.gateway.http.operation import Operation, below, opened
from shoal.gateway.jobs import endpoints as jobs
from shoal.gateway.jobs import events, pairing, receipts, submit_job
from shoal.gateway.ollama import endpoints as ollama
from shoal.gateway.ollama.endpoints import misdirected
from shoal.gateway.openai import endpoints as openai
from shoal.gateway.openai import models as openai_models
from shoal.gateway.responses import endpoints as responses

OLLAMA_API = "ollama"
"""The name of the API in the settings: ``--ollama-open`` and ``--ollama-port``."""

OPENAI = (*openai_models.api, *openai.api, *responses.api)
JOBS = (*dispatch.api, *submit_job.api, *jobs.api, *events.api, *pairing.api)
OLLAMA = opened(ollama.api, OLLAMA_API)

OPERATIONS: tuple[Operation, ...] = (
    *OPENAI,
    *files.api,
    *batches.api,
    *anthropic.api,
    *calls.api,
    *runs.api,
    *opened(JOBS, "dispatch"),
    *receipts.api,
    *accounts.api,
    *status.api,
    *models.api,
    *workers.api,
    *all_jobs.api,
    *credentials.api,
    *all_batches.api,
    *pool_events.api,
    *live.api,
    *placed_models.api,
    *watched_runs.api,
    *usage.api,
    *monitoring.api,
    *openapi.api,
    *dashboard_files.api,
    *sign_in.api,
    *below("/ollama", OLLAMA),
    *grandsage.api,
    *misdirected(OLLAMA, grandsage.api),
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
